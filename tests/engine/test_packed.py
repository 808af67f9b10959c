"""Engines whose pages are packed: the same bits come back from every tier, in three quarters of the bytes."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import pytest
import torch
from typer.testing import CliRunner

from gdscache import CacheEngine, Config
from gdscache.commands import top
from gdscache.commands.cli import app
from gdscache.config import ModelConfig
from gdscache.config.pools import PLAIN_DIRECTORY
from gdscache.disk import status_page
from gdscache.errors import ExtentSizeError, GeometryError
from gdscache.metrics import FAMILIES
from gdscache.moves import PrefetchEnd
from gdscache.pages.layout import PLAIN
from gdscache.sizes import about
from gdscache.storage.base import Op
from gdscache.store.parcel import Parcel
from gdscache.store.plan import StorePlanner
from gdscache.tiers.journal import summed
from tests.support import fake_gpu
from tests.support.faults import Fault, FaultPlan
from tests.support.faulty import PLAN
from tests.support.helpers import WAIT, until
from tests.support.packed_pages import KINDS, bits, drawn
from tests.support.pairs import pairs

MODEL = {"name": "packed", "layers": 3, "kv_heads": 4, "head_dim": 64, "dtype": "bfloat16", "page_tokens": 32}
PAGES, BLOCKS = 5, 32
TOKENS = list(range(PAGES * 32))


PLANES = ["host", "staged", "zero_copy"]


@pytest.fixture(params=PLANES, autouse=True)
def _planes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planes in host memory, and of a GPU that is not there, whose kernels the library's codec stands for."""
    if request.param != "host":
        fake_gpu.use(monkeypatch, request.param)


IN_HOST = pytest.mark.parametrize("_planes", ["host"], indirect=True)  # where planes are no matter


def in_turns(name: str, values: list[Any]) -> pytest.MarkDecorator:
    """Each value in some planes, and in all of them in the suite."""
    return pytest.mark.parametrize(("_planes", name), pairs(PLANES, values), indirect=["_planes"])


def config(path: Path | None, pack: str, **sections: Any) -> Config:
    extent = ModelConfig(**MODEL, pack="off").layout().extent_bytes
    given: dict[str, Any] = {"model": MODEL | {"pack": pack}, "gpu": {"device": "cpu"}, "host_buffer": 4 * extent}
    given |= {"cpu": {"capacity": 8 * extent}, "deadline": WAIT}
    if path is not None:
        given["ssd"] = ssd(path, 16 * extent)
    return Config.from_dict(given | sections)


def ssd(path: Path, capacity: Any) -> dict[str, Any]:
    return {"path": str(path), "capacity": capacity, "threads": 2, "transport": "posix"}


def planes(kind: str = "keys", seed: int = 1) -> list[list[torch.Tensor]]:
    rng = np.random.default_rng(seed)
    made = [[torch.zeros((BLOCKS, 16, 4, 64), dtype=torch.bfloat16) for _ in range(2)] for _ in range(3)]
    for tensor in (tensor for layer in made for tensor in layer):
        bits(tensor)[:] = drawn(kind, tensor.numel(), rng).reshape(tensor.shape)
    return made


def unfit(pool: list[list[torch.Tensor]], *blocks: int) -> None:
    """Values that do not fit into packed extents, in one plane of these blocks."""
    for block in blocks:
        values = bits(pool[1][0])[block]
        values[:] = drawn("random", values.size, np.random.default_rng(block)).reshape(values.shape)


def rows(pool: list[list[torch.Tensor]], blocks: range) -> list[bytes]:
    return [bits(tensor)[list(blocks)].tobytes() for layer in pool for tensor in layer]


def store(engine: CacheEngine) -> dict[int, str]:
    """Why pages were dropped, by their numbers."""
    dropped = engine.store(TOKENS, list(range(2 * PAGES))).result(WAIT).dropped
    engine.flush(WAIT)
    return dict(dropped)


def load(engine: CacheEngine, blocks: range) -> int:
    hit = engine.lookup(TOKENS)
    return engine.load(hit, list(blocks)[: hit.tokens // 16]).result(WAIT).tokens


def test_pages_come_back_bit_for_bit_out_of_memory_and_after_a_restart(tmp_path: Path) -> None:
    pool = planes()
    wanted = rows(pool, range(10))
    with CacheEngine(config(tmp_path, "on"), pool) as engine:
        assert not store(engine)
        assert load(engine, range(16, 26)) == len(TOKENS)
        assert rows(pool, range(16, 26)) == wanted
        assert engine.layout.packed
        assert engine.layout.extent_bytes < 0.82 * engine.layout.plane_bytes
    slab = (tmp_path / "slab-0.bin").stat().st_size
    assert slab % engine.layout.extent_bytes == 0
    for pack in ("auto", "on"):
        pool = planes(seed=2)
        with CacheEngine(config(tmp_path, pack), pool) as engine:
            assert engine.config.model.pack == "on"
            assert load(engine, range(10)) == len(TOKENS)
            assert rows(pool, range(10)) == wanted


@IN_HOST
def test_what_was_packed_is_not_found_unpacked_and_the_other_way_round(tmp_path: Path) -> None:
    for first, second in (("on", "off"), ("off", "on")):
        path = tmp_path / first
        with CacheEngine(config(path, first), planes()) as engine:
            assert not store(engine)
        with pytest.raises(ExtentSizeError, match="extents of"):
            CacheEngine(config(path, second), planes())
    assert ModelConfig(**MODEL, pack="on").namespace_fields() != ModelConfig(**MODEL, pack="off").namespace_fields()
    with CacheEngine(config(tmp_path / "off", "auto"), planes()) as engine:
        assert engine.config.model.pack == "off"
        assert engine.lookup(TOKENS).tokens == len(TOKENS)


@IN_HOST
def test_a_check_of_auto_tells_what_an_engine_finds_in_the_directory(tmp_path: Path) -> None:
    (file := tmp_path / "c.yaml").write_text(json.dumps(config(tmp_path / "c", "auto").dump()))
    said = []
    for _ in range(2):
        said.append(json.loads(CliRunner().invoke(app, ["config", "check", str(file), "--json"]).stdout))
        with CacheEngine(config(tmp_path / "c", "on"), planes()) as engine:
            found = engine.layout.extent_bytes, engine.namespace("").hex(), True
    assert [(one["extent_bytes"], one["namespace"], "ssd_plain" in one["tiers"]) for one in said][1] == found
    assert said[0]["extent_bytes"] == engine.layout.packed_as(packed=False).extent_bytes


@IN_HOST
def test_auto_packs_no_new_directory(tmp_path: Path) -> None:
    with CacheEngine(config(tmp_path, "auto"), planes()) as engine:
        assert not engine.layout.packed
        assert engine.config.model.namespace_fields() == ModelConfig(**MODEL, pack="off").namespace_fields()


@in_turns("cpu", [True, False])
def test_pages_that_do_not_fit_go_as_they_are_into_tiers_of_their_own(tmp_path: Path, cpu: bool) -> None:
    pool = planes()
    unfit(pool, 2)
    wanted = rows(pool, range(10))
    sections = {} if cpu else {"cpu": None}
    with CacheEngine(config(tmp_path, "on", **sections), pool) as engine:
        assert not store(engine)
        stats = engine.stats()
        assert stats["stores"]["unfit"] == 1
        assert stats["stored"] == {"ssd": PAGES - 1, "ssd_plain": 1} | (
            {"cpu": PAGES - 1, "cpu_plain": 1} if cpu else {}
        )
        assert "dropped" not in stats
        where = "cpu" if cpu else "ssd"
        assert engine.lookup(TOKENS).tiers == (where, f"{where}_plain", where, where, where)
        assert load(engine, range(16, 26)) == len(TOKENS)
        assert rows(pool, range(16, 26)) == wanted
        assert not store(engine)  # all are present
        assert engine.stats()["stores"]["unfit"] == 1
        assert engine.check().ok
    pool = planes(seed=2)
    with CacheEngine(config(tmp_path, "auto", **sections), pool) as engine:
        assert engine.lookup(TOKENS).tiers == ("ssd", "ssd_plain", "ssd", "ssd", "ssd")
        assert load(engine, range(10)) == len(TOKENS)
        assert rows(pool, range(10)) == wanted
        assert engine.clear()["ssd_plain"] == 1
        assert engine.lookup(TOKENS).tokens == 0


@IN_HOST
@pytest.mark.parametrize("cpu", [True, False])
@pytest.mark.parametrize("number", [0, 1])
def test_an_error_while_pages_are_left_out_gives_each_slot_back_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cpu: bool, number: int
) -> None:
    """`number`: of the parcel at which the error comes."""
    pool, calls = planes(), iter(range(100))
    unfit(pool, *range(2 * PAGES))
    extent, without = ModelConfig(**MODEL, pack="off").layout().extent_bytes, StorePlanner.without
    sections = {"cpu": {"capacity": 3 * extent} if cpu else None, "ssd": ssd(tmp_path, 200 * extent)}

    def broken(planner: StorePlanner, parcel: Parcel, left_out: Sequence[int]) -> Parcel:
        if next(calls) == number:
            raise ValueError("broken")
        return without(planner, parcel, left_out)

    with CacheEngine(config(tmp_path, "on", **sections), pool) as engine:
        monkeypatch.setattr(StorePlanner, "without", broken)
        dropped = engine.store(TOKENS, list(range(2 * PAGES))).result(WAIT).dropped
        assert next(calls) > number, "no parcel was left out"
        assert set(dropped.values()) <= {"error"}
        engine.flush(WAIT)
        assert engine.stats()["store_queue"]["bytes"] == 0
        assert all(bounce.stores.free_slots == bounce.stores.slots for bounce in engine._parts.bounces)
        assert "error" not in engine.store(TOKENS, list(range(2 * PAGES))).result(WAIT).dropped.values()


def test_pages_of_which_none_fits_come_back(tmp_path: Path) -> None:
    pool = planes("random")
    wanted = rows(pool, range(10))
    given = config(tmp_path, "on", cpu={"capacity": "8MiB"}, ssd=ssd(tmp_path, "32MiB"))
    with CacheEngine(given, pool) as engine:
        assert not store(engine)
        assert engine.lookup(TOKENS).tiers == ("cpu_plain",) * PAGES
        assert engine.load(engine.lookup(TOKENS), range(16, 26)).result(WAIT).bytes_by_tier == {
            "cpu_plain": PAGES * engine.layout.plane_bytes
        }
        assert rows(pool, range(16, 26)) == wanted
    with CacheEngine(given, pool) as engine:
        assert engine.lookup(TOKENS).tiers == ("ssd_plain",) * PAGES
        assert load(engine, range(10)) == len(TOKENS)
        assert rows(pool, range(10)) == wanted


def test_figures_are_of_bytes_as_they_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of pages that fit, and of one that does not: on the status page, and what is read from it; in metrics and log."""
    monkeypatch.setattr(status_page, "PERIOD_S", 0.1)
    pool = planes()
    unfit(pool, 2)
    with CacheEngine(config(tmp_path, "on", ssd=ssd(tmp_path, "32MiB")), pool) as engine:
        extents = [engine.layout.extent_bytes, engine.layout.packed_as(packed=False).extent_bytes]
        nbytes = [(PAGES - 1) * engine.layout.page_bytes, engine.layout.plane_bytes]
        [one] = top.watched([tmp_path])
        until(lambda: one.look()["rates"] is not None, "two pages come")
        assert not store(engine)
        assert load(engine, range(16, 26)) == len(TOKENS)
        until(lambda: one.look()["counts"]["loaded"]["cpu_plain"], "the page tells of the load")
        found = one.look()
        assert {tier["name"]: tier["extent_bytes"] for tier in found["tiers"]} == {
            f"{tier}{PLAIN * plain}": extents[plain] for tier in ("cpu", "ssd") for plain in (False, True)
        }
        pages = {
            tier: flow["stored_bytes"] * found["rates"]["over_seconds"]
            for tier, flow in found["rates"]["tiers"].items()
        }
        assert pages == pytest.approx({tier["name"]: tier["pages"] * tier["extent_bytes"] for tier in found["tiers"]})
        packed, plain = json.loads(CliRunner().invoke(app, ["inspect", str(tmp_path), "--json"]).stdout)
        assert [(one["pages"], one["extent_bytes"]) for one in (packed, plain)] == [
            (PAGES - 1, extents[0]),
            (1, extents[1]),
        ]
        assert plain["slots"] * plain["extent_bytes"] == plain["capacity_bytes"]
        assert plain["owner"]["state"] == "in use"
        moved = next(family for family in FAMILIES if family.name == "gdscache_moved_bytes").read(engine.stats())
        assert [moved["planes", "cpu"], moved["planes", "cpu_plain"], moved["cpu_plain", "planes"]] == [
            *nbytes,
            nbytes[1],
        ]
        each = [f"{tier}{PLAIN * plain} {about(nbytes[plain])}" for plain in (0, 1) for tier in ("cpu", "ssd")]
        said = summed(engine.manager.snapshot(), engine.layout)
        assert all(one in said.split("stored ")[1] for one in each)


def test_prices_are_of_bytes_as_they_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page of a plain tier costs what its bytes do: in lookups, in hits of prefetches, and asked for by itself."""
    pool = planes()
    unfit(pool, 2)
    given = config(tmp_path, "on", cpu={"capacity": "8MiB"}, ssd=ssd(tmp_path, "32MiB"))
    with CacheEngine(given, pool) as engine:
        assert not store(engine)
    with CacheEngine(given, pool) as engine:
        page, plain = engine.layout.page_bytes, engine.layout.plane_bytes
        monkeypatch.setattr(engine.manager.costs, "load_price", lambda tier: (1.0, 0.0))  # a second a byte
        for tier in ("cpu", "ssd"):
            assert (engine.load_seconds(tier, 3), engine.load_seconds(tier + PLAIN, 3)) == (3 * page, 3 * plain)
        assert engine.lookup(TOKENS).seconds == (PAGES - 1) * page + plain
        with engine.prefetch(engine.lookup(TOKENS), pin=WAIT) as prefetch:
            assert prefetch.result(WAIT).end is PrefetchEnd.COMPLETE
            assert prefetch.hit().tiers == ("cpu", "cpu_plain", "cpu", "cpu", "cpu")
            assert prefetch.hit().seconds == (PAGES - 1) * page + plain


def test_plain_pages_are_evicted_for_plain_pages(tmp_path: Path) -> None:
    pool = planes("random")
    with CacheEngine(config(tmp_path, "on"), pool) as engine:  # one plain slot on each tier
        store(engine)
        tiers = engine.stats()["tiers"]
        assert (tiers["cpu_plain"]["slots"], tiers["ssd_plain"]["slots"]) == (1, 1)
        tokens = [token + 1 for token in TOKENS[:32]]
        wanted = rows(pool, range(4, 6))
        assert not engine.store(tokens, [4, 5]).result(WAIT).dropped
        engine.flush(WAIT)
        assert engine.load(engine.lookup(tokens), [16, 17]).result(WAIT).tokens == 32
        assert rows(pool, range(16, 18)) == wanted
        assert engine.stats()["tiers"]["cpu_plain"]["evictions"] >= 1


FITS, UNFIT = [kind for kind in KINDS if kind not in ("random", "outlier channels")], ("random", "outlier channels")


class Hostile:
    """Six prompts of five pages, the first two in common. Values of each odd page do not fit, and those of the others
    do, barely some. `stored`: the values of each page that was stored, by its tokens: part after part."""

    def __init__(self, seed: int) -> None:
        self.seed, self.stored = seed, dict[tuple[int, ...], list[npt.NDArray[np.uint16]]]()
        self.pool, self.rng = planes(), np.random.default_rng(seed)

    def prompt(self) -> list[int]:
        return [*range(64), *range(100 * (1 + self.rng.integers(6)), 20_000)][: PAGES * 32]

    def pages(self, tokens: list[int]) -> list[tuple[int, ...]]:
        return [tuple(tokens[: end + 32]) for end in range(0, len(tokens), 32)]

    def values(self, page: tuple[int, ...]) -> list[npt.NDArray[np.uint16]]:
        rng = np.random.default_rng([self.seed, *page])
        kinds, number = (UNFIT if len(page) // 32 % 2 == 0 else FITS), 2 * 16 * 4 * 64
        hostile = kinds[rng.integers(len(kinds))]
        return [drawn(hostile, number, rng).reshape(2, 16, 4, 64) for _ in range(6)]

    def store(self, engine: CacheEngine, tokens: list[int]) -> None:
        for at, page in enumerate(self.pages(tokens)):
            self.stored[page] = self.values(page)
            for plane, values in zip(
                (tensor for layer in self.pool for tensor in layer), self.stored[page], strict=True
            ):
                bits(plane)[2 * at : 2 * at + 2] = values
        assert not engine.store(tokens, list(range(2 * PAGES))).result(WAIT).dropped

    def load(self, engine: CacheEngine, tokens: list[int]) -> int:
        """The pages that are found. What is behind them was never stored, or did not fit and was evicted."""
        hit, pages = engine.lookup(tokens), self.pages(tokens)
        found = hit.tokens // 32
        for plane in (tensor for layer in self.pool for tensor in layer):
            bits(plane)[16:] = 0x5A5A
        assert engine.load(hit, list(range(16, 16 + 2 * found))).result(WAIT).tokens == hit.tokens
        for at, page in enumerate(pages[:found]):
            for plane, values in zip(
                (tensor for layer in self.pool for tensor in layer), self.stored[page], strict=True
            ):
                assert np.array_equal(bits(plane)[16 + 2 * at : 18 + 2 * at], values), (at, "a wrong bit")
        assert found == PAGES or pages[found] not in self.stored or found % 2 == 1, "a page that fits is gone"
        return found


@IN_HOST
def test_a_prefetch_pins_a_page_in_a_plain_tier_of_one_slot(tmp_path: Path) -> None:
    pool, extent = planes(), ModelConfig(**MODEL, pack="off").layout().extent_bytes
    unfit(pool, 2)  # of page 1
    given = config(tmp_path, "on", cpu={"capacity": 12 * extent})
    with CacheEngine(given, pool) as engine:
        assert engine.manager.tiers["cpu_plain"].index.slots == 1
        assert not store(engine)
    with CacheEngine(given, pool) as engine, engine.prefetch(TOKENS, pin=WAIT) as prefetch:
        prefetch.result(WAIT)
        assert prefetch.hit().tokens == len(TOKENS)
        assert engine.lookup(TOKENS).tiers == ("cpu", "cpu_plain", "cpu", "cpu", "cpu")


@in_turns("tiers", ["cpu", "ssd", "cpu ssd"])
def test_hostile_pages_against_a_plain_model(tmp_path: Path, tiers: str) -> None:
    """Packed tiers have room for all pages, the plain tiers for few. So the pages that fit stay, whatever the others
    do, the last prompt is there as a whole, and each bit is as it was stored."""
    model = Hostile(int(os.environ.get("GDSCACHE_SEED", "7")))
    extent = ModelConfig(**MODEL, pack="off").layout().extent_bytes
    sections: dict[str, Any] = {
        "host_buffer": 64 * extent,
        "cpu": {"capacity": 48 * extent},
        "ssd": ssd(tmp_path, 64 * extent),
    }
    sections |= {tier: None for tier in ("cpu", "ssd") if tier not in tiers.split()}
    evicted = 0
    for _ in range(3):
        with CacheEngine(config(None, "on", **sections), model.pool) as engine:
            if "ssd" not in tiers:
                model.stored.clear()
            for _ in range(15):
                tokens = model.prompt()
                if model.rng.integers(2):
                    model.store(engine, tokens)
                    assert model.load(engine, tokens) == PAGES, "the last prompt is not there as a whole"
                else:
                    model.load(engine, tokens)
            engine.flush(WAIT)
            assert engine.check().ok
            kept = [page for page in model.stored if len(page) // 32 % 2]
            stats = engine.stats()["tiers"]
            for name, tier in stats.items():
                evicted += tier["evictions"]
                assert name.endswith(PLAIN) or not tier["evictions"], "packed pages were evicted for plain ones"
            assert stats[tiers.split()[-1]]["pages"] == len(kept)
    assert evicted > 10, "the plain tiers were never full"


@in_turns("number", [1, 2])
def test_pages_behind_one_that_does_not_fit_evict_others(tmp_path: Path, number: int) -> None:
    """Of a full SSD, and so does the page that does not fit, whose prefix is in another tier."""
    pool = planes()
    unfit(pool, 2 * number)
    wanted, extent = rows(pool, range(10)), ModelConfig(**MODEL, pack="on").layout().extent_bytes
    given = config(None, "on", cpu=None, ssd=ssd(tmp_path, 9 * extent), host_buffer="16MiB")
    for first in range(0, 50_000, 10_000):
        tokens = [first + token for token in TOKENS]
        with CacheEngine(given, pool) as engine:
            slots = [tier["slots"] for tier in engine.stats()["tiers"].values()]
            assert slots == [7, 1], "more than one prompt's, and less than two"
            assert not engine.store(tokens, list(range(2 * PAGES))).result(WAIT).dropped
            assert engine.load(engine.lookup(tokens), range(16, 26)).result(WAIT).tokens == len(TOKENS)
            assert rows(pool, range(16, 26)) == wanted


@IN_HOST
@pytest.mark.parametrize("kind", ["keys", "random"])
def test_pages_behind_one_that_no_tier_has_evict_none(tmp_path: Path, kind: str) -> None:
    """They would be out of reach, whether they fit or not."""
    extent = ModelConfig(**MODEL, pack="on").layout().extent_bytes
    given = config(None, "on", cpu=None, ssd=ssd(tmp_path, 7 * extent), host_buffer="16MiB")
    with CacheEngine(given, planes(kind)) as engine:
        tier = "ssd_plain" if kind == "random" else "ssd"
        full = engine.stats()["tiers"][tier]["slots"]
        assert not engine.store(TOKENS[: full * 32], list(range(2 * full))).result(WAIT).dropped
        others = [10_000 + token for token in TOKENS]
        told = engine.store(others, list(range(2, 2 * PAGES)), start=32).result(WAIT)
        assert list(told.dropped.values()) == [f"{tier}_full"] * (PAGES - 1)
        assert engine.lookup(TOKENS).tokens == full * 32


@IN_HOST
def test_endurance_of_few_pages_has_room_for_some_that_do_not_fit(tmp_path: Path) -> None:
    """Their part of it is the one that the configuration gives them: eight pages at least."""
    extent = ModelConfig(**MODEL, pack="off").layout().extent_bytes
    with CacheEngine(
        config(tmp_path, "on", ssd=ssd(tmp_path, "32MiB") | {"endurance": 256 * extent}), planes("random")
    ) as engine:
        engine.store(TOKENS[:32], [0, 1]).result(WAIT)
        engine.flush(WAIT)
        assert engine.stats()["stored"] == {"cpu_plain": 1, "ssd_plain": 1}


@in_turns("cpu", [True, False])
def test_a_page_that_does_not_fit_is_admitted_with_the_others(tmp_path: Path, cpu: bool) -> None:
    """At its second offer: the plain tier's admission takes the packed tier's word."""
    pool = planes()
    unfit(pool, 2)
    sections = {} if cpu else {"cpu": None}
    given = config(tmp_path, "on", ssd=ssd(tmp_path, "32MiB"), store={"admission": "second_offer"}, **sections)
    with CacheEngine(given, pool) as engine:
        for stored in ({}, {"ssd": PAGES - 1, "ssd_plain": 1}):
            store(engine)
            pages = {name: tier["pages"] for name, tier in engine.stats()["tiers"].items() if tier["kind"] == "files"}
            assert {name: number for name, number in pages.items() if number} == stored
            engine.lookup(TOKENS)  # pages of the CPU tier are offered again when they were hit
        other = [5, *TOKENS[1:]]
        engine.store(other, list(range(2 * PAGES))).result(WAIT)
        assert "ssd" not in str(engine.lookup(other).tiers), "one offer of other pages"


@IN_HOST
@pytest.mark.parametrize("accepted", [False, True])
def test_pages_that_do_not_fit_have_an_outcome_where_their_store_breaks_off(accepted: bool) -> None:
    pool = planes()
    unfit(pool, 2, 3)
    with CacheEngine.from_config(config(None, "on"), planes=pool) as engine:
        below = engine._parts.storer._unfit
        assert below is not None
        broken = below._lane if accepted else below._planner
        with mock.patch.object(broken, "start" if accepted else "accept", side_effect=MemoryError):
            report = engine.store(TOKENS, range(2 * PAGES)).result(WAIT)
        assert report.dropped == {1: "error"}
        assert engine.store(TOKENS, range(2 * PAGES)).result(WAIT).tiers[1] == ("cpu_plain",)
        engine.drain(WAIT)
        assert engine.check().ok


@IN_HOST
def test_damage_of_plain_pages_is_found(tmp_path: Path) -> None:
    given = config(tmp_path, "on", ssd=ssd(tmp_path, "32MiB"))
    with CacheEngine(given, planes("random")) as engine:
        assert not store(engine)
        extent, last = engine.layout.plane_bytes, engine.layout.packed_as(packed=False).pieces[2][1]
    report = CliRunner().invoke(app, ["verify", str(tmp_path), "--json"])
    assert report.exit_code == 0, report.output
    assert [one["good_pages"] for one in json.loads(report.stdout)] == [0, PAGES]
    assert [
        one["pages"] for one in json.loads(CliRunner().invoke(app, ["inspect", str(tmp_path), "--json"]).stdout)
    ] == [0, PAGES]
    slab = tmp_path / "plain" / "slab-0.bin"
    data = bytearray(slab.read_bytes())
    for at in range(0, len(data), extent):
        data[at + last.offset + last.nbytes - 1] ^= 1
    slab.write_bytes(data)
    packed, plain = json.loads(CliRunner().invoke(app, ["verify", str(tmp_path), "--json"]).stdout)
    assert [(bad["cause"], bad["layer"]) for bad in plain["bad"]] == [("checksum", 2)] * PAGES
    assert not packed["bad"]
    with CacheEngine(given, planes()) as engine:
        assert engine.lookup(TOKENS).tokens == len(TOKENS)
        assert load(engine, range(10)) == 0
        assert engine.stats()["misses"]["checksum"] == PAGES


@IN_HOST
def test_plain_pages_that_were_lost_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_page, "PERIOD_S", 0.1)
    given = config(tmp_path, "on", ssd=ssd(tmp_path, "32MiB"))
    with CacheEngine(given, planes("random")) as engine:
        assert not store(engine)
    catalogue = sqlite3.connect(tmp_path / PLAIN_DIRECTORY / "catalog.sqlite")
    with contextlib.closing(catalogue), catalogue:
        assert catalogue.execute("UPDATE pages SET length = 0").rowcount == PAGES
    with CacheEngine(given, planes()) as engine:
        (lost,) = (family.read(engine.stats()) for family in FAMILIES if family.name == "gdscache_lost_pages")
        assert lost["length",] == PAGES
        [one] = top.watched([tmp_path])
        until(lambda: "pid" in one.look(), "there is a page")
        assert one.look()["causes"]["lost"]["length"] == PAGES


@IN_HOST
def test_damage_of_packed_bytes_is_found(tmp_path: Path) -> None:
    with CacheEngine(config(tmp_path, "on"), planes()) as engine:
        assert not store(engine)
        extent, piece = engine.layout.extent_bytes, engine.layout.pieces[2][1]
    slab = tmp_path / "slab-0.bin"
    data = bytearray(slab.read_bytes())
    for slot in range(len(data) // extent):
        data[slot * extent + piece.offset + piece.nbytes - 1] ^= 0x40  # behind the last exception of a list
    slab.write_bytes(data)
    result = CliRunner().invoke(app, ["verify", str(tmp_path), "--json"])
    assert result.exit_code
    packed, plain = json.loads(result.stdout)
    assert {(bad["cause"], bad["layer"]) for bad in packed["bad"]} == {("checksum", 2)}
    assert not plain["bad"]
    with CacheEngine(config(tmp_path, "on"), planes()) as engine:
        assert load(engine, range(10)) == 0


@IN_HOST
@pytest.mark.parametrize("dtype", ["float16", "float8_e4m3fn"])
def test_other_types_are_refused_by_name_and_left_alone_by_auto(dtype: str) -> None:
    with pytest.raises(GeometryError, match=f"{dtype}\\) cannot be packed"):
        config(None, "on", model=MODEL | {"dtype": dtype, "pack": "on"})
    given = config(None, "auto", model=MODEL | {"dtype": dtype}, gpu={"device": "cpu", "capacity": "4MiB"})
    with CacheEngine(given) as engine:
        assert not engine.layout.packed


@IN_HOST
def test_groups_of_which_none_can_be_packed_are_refused_by_name() -> None:
    groups = [{"name": "all", "layers": [0, 1]}, {"name": "near", "layers": [2], "window": 64}]
    with pytest.raises(GeometryError, match=r"model\.pack is on, and pages of no group can be packed"):
        config(None, "on", model=MODEL | {"dtype": "int8", "groups": groups, "pack": "on"})


def switched_off(engine: CacheEngine) -> tuple[bool, list[str]]:
    found = engine.stats()["tiers"]["ssd"]["quarantine"]
    return found["switched_off"], found["switched_off_alone"]


@in_turns("io", [(Op.READ, "64MiB"), (Op.READ, "1MiB"), (Op.WRITE, "1MiB")])
def test_io_of_plain_pages_that_hangs_costs_these_pages_alone(tmp_path: Path, io: tuple[Op, str]) -> None:
    """In a large reserve, and in one with a slot for loads and one for stores, which switches the plain tier off."""
    PLAN.reset()
    pool, (op, room) = planes(), io
    unfit(pool, 2, 6)  # of pages 1 and 3
    wanted = rows(pool, range(10))
    faulty = ssd(tmp_path, "64MiB") | {"transport": "tests.support.faulty:FaultyTransport"}
    given = config(tmp_path, "on", ssd=faulty, cpu=None, host_buffer=room, deadline=0.5)
    with CacheEngine(given, pool) as engine:
        hanging = functools.partial(FaultPlan.rule, PLAN, Fault.HANG, op, where=lambda path, offset: "/plain/" in path)
        with hanging() if op is Op.WRITE else contextlib.nullcontext():
            dropped = store(engine)
            if op is Op.WRITE:
                assert dropped.keys() == {1, 3}
                assert {*dropped.values()} == {"deadline", "switched_off"}
                found = switched_off(engine)
            else:
                assert not dropped
        with hanging() if op is Op.READ else contextlib.nullcontext():
            assert load(engine, range(16, 26)) == 32
            found = switched_off(engine) if op is Op.READ else found
            assert engine.lookup(TOKENS[:32]).tokens == 32, "the packed pages are there"
        assert found == (False, ["ssd_plain"] if room == "1MiB" else [])
        until(lambda: not engine.manager.quarantine.requests, "late I/O ends")
        assert switched_off(engine) == (False, [])
        assert not store(engine)
        assert load(engine, range(16, 26)) == len(TOKENS)
        assert rows(pool, range(16, 26)) == wanted


@IN_HOST
def test_a_plain_part_that_is_small_beside_its_directories(tmp_path: Path) -> None:
    """Stretches of 4 MiB lie over directories in turn, and the pages that do not fit have a part of few pages."""
    pool = planes()
    unfit(pool, 2)
    wanted = rows(pool, range(10))
    extent = ModelConfig(**MODEL, pack="off").layout().extent_bytes
    capacity = 9 << 20  # two whole stretches, and a part of a third
    where = ssd(tmp_path / "0", capacity) | {"stripes": [str(tmp_path / "1"), str(tmp_path / "2")]}
    with CacheEngine(config(None, "on", ssd=where), pool) as engine:
        assert not store(engine)
        assert 0 < engine.stats()["tiers"]["ssd_plain"]["slots"] * extent < 4 << 20
    pool = planes(seed=2)
    with CacheEngine(config(None, "auto", ssd=where), pool) as engine:
        assert engine.lookup(TOKENS).tiers == ("ssd", "ssd_plain", "ssd", "ssd", "ssd")
        assert load(engine, range(10)) == len(TOKENS)
        assert rows(pool, range(10)) == wanted
        assert engine.check().ok
    found = CliRunner().invoke(app, ["verify", str(tmp_path / "0"), "--json"])
    assert [report["good_pages"] for report in json.loads(found.stdout)] == [PAGES - 1, 1]
