"""What an engine and its index cost: lookups, reopening a million pages, memory. `pytest -m throughput -s` prints it.

docs/performance.md has the targets. These tests ask for half of that speed: a machine that does other things too is
slower, and what they are to find is what is broken.
"""

from __future__ import annotations

import gc
import hashlib
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gdscache import CacheEngine
from gdscache.config import Config, SsdConfig
from gdscache.disk.catalog import Catalog, PageRecord
from gdscache.disk.slab import Slab
from gdscache.pages.keys import page_keys
from gdscache.pages.layout import PageLayout
from gdscache.tiers.ssd import SsdTier
from tests.support.places import ROOT

soak = [pytest.mark.throughput, pytest.mark.soak]

TOKENS, PAGES = 64, 2048  # of a page; of the prompt
LAYERS = 32
ROW_BYTES = 64  # of a token, so that a page has 4 KiB


def hash_loop(namespace: bytes, data: bytes) -> bytes:
    """The chained digests of token bytes, page after page; the last of them."""
    parent = namespace
    for at in range(0, len(data), TOKENS * 4):
        parent = hashlib.blake2b(parent + data[at : at + TOKENS * 4], digest_size=32, key=namespace).digest()
    return parent


def test_the_hash_loop_is_what_makes_keys() -> None:
    tokens = np.arange(5 * TOKENS, dtype=np.uint32)
    namespace = bytes(range(32))
    assert hash_loop(namespace, tokens.tobytes()) == page_keys(namespace, tokens, TOKENS)[-1]


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[CacheEngine]:
    room, page = PAGES + 64, TOKENS * ROW_BYTES
    plane = {"name": "rows", "shape": [ROW_BYTES], "dtype": "uint8"}
    config = {
        "model": {"name": "m", "layers": 1, "page_tokens": TOKENS, "planes": [plane]},
        "gpu": {"device": "cpu", "capacity": (room + 1) * page},
        "cpu": {"capacity": (room + 2) * page},
        "ssd": {"path": str(tmp_path), "capacity": (room + 128) * page, "transport": "posix", "threads": 2},
        "store": {"queue": PAGES * page},
    }
    with CacheEngine.from_config(config) as engine:
        yield engine


def commit(engine: CacheEngine, tokens: Any) -> None:
    with engine.sequence(tokens) as sequence:
        sequence.commit()
    engine.drain(600.0)


def seconds(action: Callable[[], object]) -> float:
    begun = time.perf_counter()
    action()
    return time.perf_counter() - begun


@pytest.mark.parametrize("rounds", [pytest.param(60, marks=soak)])
def test_a_lookup_is_not_much_slower_than_its_hashing(engine: CacheEngine, rounds: int) -> None:
    """Of a new prompt, whose pages are on all tiers; a page is stored before each lookup, as requests do."""
    tokens = np.random.default_rng(0).integers(0, 128_000, PAGES * TOKENS, dtype=np.uint32)
    commit(engine, tokens)
    assert {len(tier.index) for tier in engine.manager.tiers.values()} == {PAGES}
    namespace, took = engine.namespace(), dict[str, list[float]]()

    def look_up(given: Any, number: int, *, remembered: bool = False, store: bool = True) -> float:
        if store:
            commit(engine, np.full(TOKENS, number, dtype=np.uint32))
        if not remembered:
            engine.names.forget()
        return seconds(lambda: engine.lookup(given))

    gc.collect()
    gc.freeze()
    for number in range(3 + rounds):
        found = {
            "hash": seconds(lambda: hash_loop(namespace, tokens.tobytes())),
            "numpy": look_up(tokens, number),
            "list": look_up(tokens.tolist(), number + 1000),
            "remembered": look_up(tokens, number + 2000, remembered=True),
        }
        for name, value in found.items() if number >= 3 else ():
            took.setdefault(name, []).append(value)
    in_a_row = [look_up(tokens, 0, store=False) for _ in range(16 + rounds)][16:]
    gc.unfreeze()
    assert engine.lookup(tokens).tokens == len(tokens)
    medians = {name: statistics.median(values) for name, values in (*took.items(), ("in a row", in_a_row))}
    shown = ", ".join(f"{name} {value * 1e3:.2f} ms" for name, value in medians.items())
    print(f"\nlookup of {PAGES:,} pages: {shown}; numpy {medians['numpy'] / medians['hash']:.2f} of the hash loop")
    assert medians["numpy"] <= 6 * medians["hash"]


def tier_of(path: Path, pages: int) -> tuple[PageLayout, SsdConfig]:
    """The smallest pages of so many layers, and the SSD tier that holds `pages` of them in `path`."""
    plane = {"name": "rows", "shape": [2], "dtype": "uint8"}
    model = {"name": "m", "layers": LAYERS, "page_tokens": 64, "planes": [plane]}
    layout = Config.from_dict({"model": model, "gpu": {"device": "cpu"}}).model.layout()
    return layout, SsdConfig(path=path, capacity=pages * layout.extent_bytes, transport="posix", threads=1)


def fill(path: Path, pages: int) -> None:
    """A catalogue of synthetic pages, used in random order. The slab is reserved and never written: nobody reads it."""
    layout, _ = tier_of(path, pages)
    Slab.open(path, layout.extent_bytes, pages)
    random = np.random.default_rng(0)
    recency, namespace = random.permutation(pages), random.bytes(32)
    parent = namespace
    with Catalog(path, extent_bytes=layout.extent_bytes, durability="process") as catalog:
        for first in range(0, pages, 1024):
            batch = []
            for slot in range(first, min(first + 1024, pages)):
                key, sums = random.bytes(32), random.integers(0, 1 << 64, LAYERS, np.uint64)
                batch.append(PageRecord(slot, key, parent, namespace, layout.page_bytes, int(recency[slot]), sums))
                parent = key
            catalog.commit(batch, (), {})


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def in_child(function: str, path: Path, pages: int) -> dict[str, int]:
    """What a function of this file returns in a fresh interpreter."""
    code = (
        f"import json, sys; from pathlib import Path; from {__name__} import {function}; "
        f"print(json.dumps({function}(Path(sys.argv[1]), int(sys.argv[2]))))"
    )
    command = [sys.executable, "-c", code, str(path), str(pages)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found: dict[str, int] = json.loads(done.stdout)
    return found


def tier_growth(path: Path, pages: int) -> dict[str, int]:
    """Bytes that an interpreter grows by when it opens the SSD tier, and when it has read every checksum."""
    layout, config = tier_of(path, pages)
    before = resident()
    tier = SsdTier(layout, config, "cpu", threading.RLock())
    opened = resident() - before
    entries = list(tier.index)
    for at in range(0, len(entries), 1024):
        tier.checksums(entries[at : at + 1024])
    del entries
    found = {"pages": len(tier.index), "opened": opened, "with sums": resident() - before}
    tier.close()
    return found


@pytest.mark.parametrize(
    ("pages", "most_seconds", "most_bytes"),
    [pytest.param(20_000, 2.0, 2048, marks=pytest.mark.suite), pytest.param(1_000_000, 4.0, 1024, marks=soak)],
)
def test_a_large_catalogue_opens_soon_and_takes_a_kib_a_page_at_most(
    tmp_path: Path, pages: int, most_seconds: float, most_bytes: int
) -> None:
    """`most_bytes`: resident, a page; a small catalogue shares out what every tier takes."""
    fill(tmp_path, pages)
    layout, config = tier_of(tmp_path, pages)
    took = []
    for _ in range(3):
        gc.collect()
        begun = time.perf_counter()
        tier = SsdTier(layout, config, "cpu", threading.RLock())
        took.append(time.perf_counter() - begun)
        assert len(tier.index) == pages
        tier.close()
        del tier
    held = in_child("tier_growth", tmp_path, pages)
    print(f"\n{pages:,} pages: reopened in {statistics.median(took):.2f} s; {held}")
    assert held["pages"] == pages
    assert 64 < held["opened"] / pages < held["with sums"] / pages <= most_bytes
    assert statistics.median(took) <= most_seconds


EXTENT = 8192  # small pages: the figure does not grow with the pages' bytes
HOST_BUFFER = 16 << 20


def engine_growth(path: Path, pages: int) -> dict[str, int]:
    """Bytes that an interpreter grows by with an engine on the CPU that has stored `pages` pages, and has loaded them
    from the SSD and from the CPU tier; less its pools, all of which are touched."""
    before, pool = resident(), pages * EXTENT
    config = {
        "model": {"name": "m", "layers": LAYERS, "kv_heads": 1, "head_dim": 16, "page_tokens": 4},
        "gpu": {"device": "cpu", "capacity": pool + EXTENT},
        "cpu": {"capacity": pool},
        "ssd": {"path": str(path), "capacity": pool + 128 * EXTENT, "transport": "posix"},
        "host_buffer": HOST_BUFFER,
        "store": {"queue": pool},
    }
    tokens = list(range(pages * 4 + 1))
    with CacheEngine.from_config(config) as engine, engine.sequence(tokens) as sequence:
        for layer in range(LAYERS):
            for plane in engine.gpu.planes(layer):
                plane.fill_(layer)
        sequence.commit()
        engine.drain(600.0)
    with CacheEngine.from_config(config) as engine:
        for source in ("ssd", "cpu"):
            with engine.sequence(tokens) as sequence:
                assert sequence.verify(600.0) == pages * 4
                assert sequence.load.result().bytes_by_tier == {source: pool}
                if source == "cpu":
                    sequence.commit()
        pools = engine.gpu.capacity + engine.stats()["tiers"]["cpu"]["capacity_bytes"] + HOST_BUFFER
        return {"pools": pools, "beyond": resident() - before - pools}


@pytest.mark.parametrize("pages", [pytest.param(500, marks=pytest.mark.suite), pytest.param(10_000, marks=soak)])
def test_an_engine_takes_150_mib_beside_its_pools_at_most(tmp_path: Path, pages: int) -> None:
    held = in_child("engine_growth", tmp_path, pages)
    print(f"\n{pages:,} pages: {held}")
    assert 0 < held["beyond"] <= 150 << 20
