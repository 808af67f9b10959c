"""Losses of power, simulated: with `durability: power` nothing acknowledged is lost, and nothing wrong is served.

A run of the engine is recorded. A loss of power is a cut of the tape, and what the disk may hold then is opened again.
"""

from __future__ import annotations

import random
import shutil
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from gdscache.disk import catalog_file, slab
from gdscache.disk.slab import SlabIO
from gdscache.tiers.ssd import SsdTier
from tests.support.helpers import PACKED, SEED, make_config
from tests.support.kill_check import LAYOUT, ROOMY, TIGHT, USUAL, look
from tests.support.kill_child import THREADS, Session
from tests.support.kill_record import SALTS, Record
from tests.support.places import scratch
from tests.support.power_cut import log_of, moments, restore, stripe_of
from tests.support.power_recorder import Event, FlushEnded, TapeLog, recording

RECORDING, FORGETFUL = (f"tests.support.power_recorder:{name}Transport" for name in ("Recording", "Forgetful"))
SETUPS = USUAL | {
    "over three directories": {"cpu": None, "ssd": ROOMY, "stripes": 2},
    "over two directories, evicting": {"cpu": None, "ssd": TIGHT, "stripes": 1},
    "packed, evicting": {"gpu": 16, "cpu": 10, "ssd": TIGHT, "model": PACKED},
}


def configured(directory: Path, setup: str, transport: str = "posix", durability: str = "", **more: Any) -> Any:
    """The configuration of a setup in this directory, and in others beside it where it is striped."""
    options = dict(SETUPS[setup])
    stripes = [str(stripe_of(directory, 1 + number)) for number in range(options.pop("stripes", 0))]
    ssd = ({"stripes": stripes} if stripes else {}) | ({"durability": durability} if durability else {})
    return make_config(directory, transport=transport, ssd_options=ssd, **options, **more)


@pytest.fixture(autouse=True)
def _short_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny slabs lie in all their directories."""
    monkeypatch.setattr(slab, "STRETCH_BYTES", 2 * LAYOUT.extent_bytes)


@pytest.fixture
def folder() -> Iterator[Path]:
    """What a flush does is on the tape."""
    yield (path := scratch())
    shutil.rmtree(path)


@pytest.mark.parametrize("setup", SETUPS)
@pytest.mark.parametrize(
    ("tapes", "cuts"), [pytest.param(1, 10, marks=pytest.mark.suite), pytest.param(10, 50, marks=pytest.mark.soak)]
)
def test_losses_of_power(folder: Path, setup: str, tapes: int, cuts: int, record_property: Any) -> None:
    total: Counter[str] = Counter()
    for tape in range(tapes + 5):
        if tape >= tapes and min(total["served"], total["required"]) > total["cuts"]:
            break  # else a slow machine has committed little: one more
        place = folder / str(tape)
        place.mkdir()
        events = record(place, setup, f"{setup} {SEED} {tape}")
        found = cut(place, setup, events, cuts, SEED + tape)
        shutil.rmtree(place)
        assert not found.losses, f"{len(found.losses)} of {cuts} losses of power: {found.losses[:5]}"
        total += found.counts
    assert total["served"] > total["cuts"], "hardly a page was served: nothing was tested"
    assert total["required"] > total["cuts"], "hardly a page was acknowledged: nothing was tested"
    assert total["cleared"], "nothing was cleared: nothing was tested"
    summary = ", ".join(f"{count} {what}" for what, count in total.items())
    record_property("power", summary)
    print(f"{setup}: {summary}")


# A simulation that finds nothing wrong proves nothing until it has found something.

MUTATIONS: dict[str, Callable[[], Any]] = {
    "slots are used again before the deletion of their row": lambda: mock.patch.object(SsdTier, "_return", _free_now),
    "the catalogue is committed without a flush": lambda: mock.patch.object(
        catalog_file, "open_writer", _unflushed(catalog_file.open_writer)
    ),
    "the slab is flushed after the commit": lambda: mock.patch.object(SsdTier, "commit", _late_flush(SsdTier.commit)),
    "clear returns before its deletions are committed": lambda: mock.patch.object(
        SsdTier, "commit", _idle_without_writes(SsdTier.commit)
    ),
    "the first of two directories is flushed, and not the other": lambda: mock.patch.object(
        SlabIO, "flush", lambda io: io.transport.flush(io._files[0])
    ),
}
FOUND_IN = {
    "slots are used again before the deletion of their row": ("ssd only, evicting", "have rows, but other bytes"),
    "the catalogue is committed without a flush": ("ssd only, room for all", "are lost"),
    "the slab is flushed after the commit": ("ssd only, room for all", "have rows, but other bytes"),
    "clear returns before its deletions are committed": ("ssd only, room for all", "were cleared"),
    "the first of two directories is flushed, and not the other": (
        "over two directories, evicting",
        "have rows, but other bytes",
    ),
}
TAPES, CUTS = 6, 60


@pytest.mark.suite
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_mistake_is_found(folder: Path, mutation: str) -> None:
    setup, loss = FOUND_IN[mutation]
    losses: list[str] = []
    for attempt in range(TAPES):  # what a tape holds depends on the machine's speed; each is longer than the last
        place = folder / str(attempt)
        place.mkdir()
        with MUTATIONS[mutation]():
            events = record(place, setup, f"{mutation} {attempt}", length=1 + attempt)
        losses += cut(place, setup, events, CUTS, attempt, stop=loss).losses
        shutil.rmtree(place)
        if any(loss in text for text in losses):
            return
    pytest.fail(f"of {TAPES * CUTS} losses of power: {losses}")


@pytest.mark.suite
@pytest.mark.parametrize(
    ("durability", "transport"), [("process", RECORDING), ("power", FORGETFUL)], ids=["process", "forgotten"]
)
def test_without_flushes_pages_are_lost_and_none_is_served_wrong(folder: Path, durability: str, transport: str) -> None:
    """Where a write was lost its page is a miss: `look` fails if any is served with other bytes."""
    setup = "ssd only, evicting"
    events = record(folder, setup, "unflushed", durability=durability, transport=transport)
    assert not any(isinstance(event, FlushEnded) for event in events)
    found = cut(folder, setup, events, 40, 0)
    assert any("are lost" in text for text in found.losses), found.losses
    assert found.counts["refused"], "no page with a row had lost its bytes: nothing was tested"
    assert found.counts["served"], "no page was served at all: nothing was tested"


def _free_now(tier: SsdTier, slots: Sequence[int]) -> None:
    for slot in slots:
        tier._known[slot] = 0
    tier.index.free(slots)


def _unflushed(original: Callable[..., sqlite3.Connection]) -> Callable[..., sqlite3.Connection]:
    return lambda path, extent_bytes, synchronous: original(path, extent_bytes, "NORMAL")


def _late_flush(original: Callable[..., list[bool]]) -> Callable[..., list[bool]]:
    def commit(tier: SsdTier, entries: Any, sums: Any) -> list[bool]:
        with mock.patch.object(tier, "_power", False):
            visible = original(tier, entries, sums)
        tier.io.flush()
        return visible

    return commit


def _idle_without_writes(original: Callable[..., list[bool]]) -> Callable[..., list[bool]]:
    return lambda tier, entries, sums: original(tier, entries, sums) if entries else []


# Recording, and cutting.


class Findings:
    def __init__(self) -> None:
        self.losses: list[str] = []
        self.counts: Counter[str] = Counter()


def record(
    folder: Path, setup: str, seed: str, *, durability: str = "power", transport: str = RECORDING, length: float = 1
) -> list[Event]:
    """Store, load, evict, clear and reopen on two threads for `length` seconds; what reached the disk meanwhile."""
    config = configured(folder / "recorded", setup, transport, durability)
    rng = random.Random(seed)
    with recording() as tape:
        log = TapeLog()
        log.session()
        for seconds in (0.4 * length, 0.3 * length):
            session = Session(config, "cpu" not in config, log)
            session.engine.manager.clearing.piece = 3  # so that a clear has several pieces
            until = time.monotonic() + seconds
            with ThreadPoolExecutor(THREADS) as pool:
                running = [pool.submit(session.work, rng.random(), thread, until) for thread in range(THREADS)]
                for salt in rng.sample([None, *SALTS], 2):
                    time.sleep(seconds / 3)
                    session.clear(salt)
                for work in running:
                    work.result()
            session.acknowledge()
            session.engine.close(drain=rng.random() < 0.5)
            session.acknowledge()
        return list(tape.events)


def cut(folder: Path, setup: str, events: list[Event], cuts: int, seed: int, stop: str = "") -> Findings:
    """Lose power at random moments of the tape, and open what is left; where `stop` is given, until a loss says so."""
    rng = random.Random(f"{setup} {seed}")
    found, roomy = Findings(), SETUPS[setup]["ssd"] == ROOMY
    chosen = [at for at in moments(events) if at]
    for number in range(cuts):
        at = rng.choice(chosen[number % len(chosen)])
        directory = folder / f"cut-{number}"
        stripes = SETUPS[setup].get("stripes", 0)
        keys = restore(events, at, directory, rng, stripes)
        said = Record.replay(log_of(events[:at], folder / "log"))
        config = configured(directory, setup, load={"verify": ("once", "always")[number // 4 % 2]})
        pages = look(config)
        # Where pages are evicted, an acknowledged page may be gone once its deletion may be committed.
        required = said.required if roomy else said.required & {pages.names[key] for key in keys}
        found.losses += [f"cut {number} at {at}: {loss}" for loss in pages.losses(said.allowed, required)]
        found.counts += Counter(
            cuts=1, served=len(pages.served), required=len(required), refused=len(pages.refused), cleared=said.cleared
        )
        for which in range(1 + stripes):
            shutil.rmtree(stripe_of(directory, which))
        if stop and stop in "".join(found.losses):
            break
    return found
