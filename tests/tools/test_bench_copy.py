"""`gdscache bench copy`: what it measures, how figures are made, and all of it on a GPU that is played by a clock."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import Mock, call

import numpy as np
import pytest
import torch

from gdscache.commands import console
from gdscache.commands.bench import copy, copy_gpu
from gdscache.commands.bench.copy_gpu import (
    GQA,
    MLA,
    MLA_FP8,
    BenchPlanes,
    Beside,
    Cell,
    Copies,
    Gpu,
    Moved,
    Neighbour,
    Queued,
    timed,
)
from gdscache.errors import CapacityError, DeviceError, IOFailedError
from gdscache.pages.planes import PagedPlanes
from tests.support.host_copies import HostCopies

pytestmark = pytest.mark.suite

MIB = 1 << 20
PLAIN = 50e9  # bytes a second of the plain copies of the stand-in
RATE = 49e9  # of ours
PIECE = 1e-5  # seconds of a neighbour's piece of work


class Done(float):
    """A time at which queued copies are over, as an event."""

    def synchronize(self) -> None:
        pass


T = TypeVar("T")


class Stand(Gpu):
    """A GPU that is played by a clock: copies happen at once, and take the time that `RATE` gives them."""

    pin = "off"

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.clock = 1.0
        self.free = {"load": 0.0, "store": 0.0}
        self.released = 0
        self.opened = 0
        self.queued: list[tuple[str, range, list[int], list[int]]] = []

    def take(self, direction: str, nbytes: int, rate: float, after: Sequence[Any]) -> Done:
        self.clock += 1e-6
        start = max(self.clock, self.free[direction], *after, 0.0)
        self.free[direction] = start + nbytes / rate
        return Done(self.free[direction])

    def together(self, ways: Sequence[Callable[[], T]]) -> list[T]:
        return [way() for way in ways]

    def open_copies(self, planes: PagedPlanes) -> Any:
        self.opened += 1
        return StandCopies(self, planes)

    def move(
        self, by: Any, direction: str, extents: Any, slots: Any, blocks: Any, layers: range, after: Any, *, sums: bool
    ) -> Moved:
        assert isinstance(slots, np.ndarray)  # a list would be converted within the time that counts
        bounds = by.planes.layout.layer_bounds
        nbytes = len(slots) * (bounds[layers.stop - 1][1] - bounds[layers.start][0])
        self.queued.append((direction, layers, slots.tolist(), blocks.reshape(-1).tolist()))
        if not after and not by.broken:
            by.copy(extents, slots, blocks, layers, load=direction == "load")
        event: Any = self.take(direction, nbytes, RATE * (0.99 if sums else 1.0), after)
        return event, lambda: np.zeros((len(slots), len(layers)), dtype=np.uint64)

    def now(self) -> float:
        return self.clock

    def mark(self, after: Sequence[Any] = ()) -> float:
        return max(self.clock, *after, 0.0)

    def wait(self, mark: float) -> None:
        self.clock = max(self.clock, mark)

    def seconds(self, start: float, end: float) -> float:
        return end - start

    def idle(self) -> None:
        self.clock = max(self.clock, *self.free.values())

    def copy(self, direction: str, dst: torch.Tensor, src: torch.Tensor, after: Sequence[Any]) -> Any:
        dst.copy_(src)
        return self.take(direction, dst.numel(), PLAIN, after)

    def busy(self, queue: Any, count: int) -> list[float]:
        return [self.clock + PIECE * i for i in range(count + 1)]

    def require(self, nbytes: int) -> None:
        pass

    def release(self) -> None:
        self.released += 1


class StandCopies(HostCopies):
    """Copies in host memory, timed by the stand-in. What waits for an event is timed and not moved; `broken` moves
    nothing."""

    def __init__(self, gpu: Stand, planes: PagedPlanes, *, broken: bool = False) -> None:
        super().__init__(planes)
        self.planes, self.broken, self.closed = planes, broken, False
        self.driver = Mock(version=13000)

    def describe(self) -> dict[str, Any]:
        return {"copy_engine": "batch_13", "calibration": None}

    def route(self, direction: str, layers: range, *, sums: bool) -> str:
        return "staged"

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize(
    ("geometry", "page_tokens", "part", "layers"),
    [
        (GQA, 64, "one", 1), (GQA, 64, "group", 4), (GQA, 64, "all", 8), (GQA, 16, "group", 8),
        (GQA, 256, "group", 1), (MLA, 64, "group", 15), (MLA_FP8, 1, "group", 32),
    ],
)  # fmt: skip
def test_a_group_has_1_mib_a_page_where_the_page_has(geometry: Any, page_tokens: int, part: str, layers: int) -> None:
    bounds = [0, *(end for _, end in geometry.layout(page_tokens).layer_bounds)]
    assert Cell(geometry, page_tokens, (part,), "load").layers == layers
    if part == "group":
        assert bounds[layers] >= MIB or layers == geometry.n_layers
        assert layers == 1 or bounds[layers - 1] < MIB
    assert geometry.layout(64).page_bytes >= MIB


def test_every_target_is_a_cell() -> None:
    """All pages of 1 MiB a call in all directions, one layer of GQA, pages of one token, and packed pages."""
    every = copy_gpu.cells()
    targets = {(c.geometry.name, c.page_tokens, c.parts, c.direction): c.target for c in every}
    assert len(targets) == len(every) == 44
    both = ("load", "store")
    for name, tokens, parts in ("gqa", 64, ("one",)), ("gqa", 1, ("group", "all")), ("mla", 1, ("group", "all")):
        assert [targets[name, tokens, parts, direction] for direction in both] == [0.92, 0.92]
    assert [targets[copy_gpu.PACKED.name, 64, ("all",), direction] for direction in both] == [1.28, 1.20]
    bulk = [c for c in every if c.span_bytes >= MIB and not c.geometry.packed]
    assert all(c.target == (0.93 if c.direction == "both" else 0.97) for c in bulk)
    sizes = itertools.product(copy_gpu.GEOMETRIES, (1, 16, 64, 256), copy_gpu.PARTS, copy_gpu.DIRECTIONS)
    wanted = [Cell(geometry, tokens, (part,), direction) for geometry, tokens, part, direction in sizes]
    layers = {(c.geometry, c.page_tokens, c.layers, c.direction) for c in wanted if c.span_bytes >= MIB}
    assert {(c.geometry, c.page_tokens, c.layers, c.direction) for c in bulk} == layers


@pytest.fixture
def gpu() -> Stand:
    return Stand()


@pytest.fixture
def pool(gpu: Stand) -> Iterator[BenchPlanes]:
    with contextlib.closing(BenchPlanes(gpu, GQA.layout(16), 2 * MIB)) as pool:
        yield pool
    assert gpu.released == 1


def cell_of(part: str, direction: str, geometry: Any = GQA) -> Cell:
    return Cell(geometry, 16, (part,), direction)


def copies_of(pool: BenchPlanes, cell: Cell, *, broken: bool = False) -> Copies:
    return Copies(pool, StandCopies(pool.gpu, pool.planes, broken=broken), cell)  # type: ignore[arg-type]


def test_a_run_is_timed_from_before_the_call_to_the_last_byte(gpu: Stand) -> None:
    def way(after: Sequence[Any]) -> Queued:
        assert after == (1.0,)
        gpu.clock += 2.0
        return Queued([Done(10.0), None, Done(7.0)], gpu.mark(), lambda: gpu.wait(11.0))  # type: ignore[list-item]

    gpu.mark = lambda after=(): max(gpu.clock, *(e for e in after if e is not None), 0.0)  # type: ignore[method-assign]
    run = timed(gpu, way)
    assert (run.seconds, run.first, run.end) == (10.0, 3.0, 10.0)


def test_calls_take_the_next_layers_and_shuffled_pages_that_loads_and_stores_do_not_share(
    gpu: Stand, pool: BenchPlanes
) -> None:
    copies_of(pool, cell_of("one", "both")).ours()(())
    assert [layers for _, layers, _, _ in gpu.queued] == [range(i, i + 1) for i in (0, 1, 2, 3)] * 2
    (up, _, *load), (down, _, *store) = gpu.queued[0], gpu.queued[-1]
    assert (up, down) == ("load", "store")
    for taken, other in zip(load, store, strict=True):
        assert not set(taken) & set(other)
        assert sorted(taken + other) == list(range(16))
        assert taken != sorted(taken)
    assert load[0] != load[1]


def test_plain_copies_keep_to_halves_of_their_own(pool: BenchPlanes) -> None:
    for two in zip(pool.ends("load", 2 * MIB), reversed(pool.ends("store", 2 * MIB)), strict=True):
        low, high = sorted(end.data_ptr() for end in two)
        assert high >= low + 2 * MIB


def test_packed_pages_move_the_bytes_of_the_planes(gpu: Stand) -> None:
    """The rate is of these; what comes back has the same bits, and copies that bring none are no figure."""
    with contextlib.closing(BenchPlanes(gpu, copy_gpu.PACKED.layout(16), 2 * MIB)) as pool:
        by = StandCopies(gpu, pool.planes)
        assert pool.planes.blocks * pool.layout.plane_bytes == 8 * MIB
        assert pool.extents.nbytes < 0.8 * 8 * MIB
        pool.pack(by)
        for direction in ("load", "store"):
            cell = cell_of("all", direction, copy_gpu.PACKED)
            copies = Copies(pool, by, cell)
            assert copies.moved_bytes == 2 * MIB
            copies.check()
            with pytest.raises(IOFailedError, match="packed pages came back"):
                copies_of(pool, cell, broken=True).check()
            ours, plain = timed(gpu, copies.ours()), timed(gpu, copies.plain())
            assert plain.seconds / ours.seconds == pytest.approx(
                RATE / PLAIN * pool.layout.plane_bytes / pool.layout.page_bytes, rel=0.1
            )


def test_one_wrong_byte_is_found(gpu: Stand, pool: BenchPlanes) -> None:
    class OffByOne(StandCopies):
        def copy(self, extents: Any, slots: Any, blocks: Any, *rest: Any, **options: Any) -> None:
            super().copy(extents, slots, blocks, *rest, **options)
            self.planes.tensors[3][1].view(torch.uint8)[blocks[-1], 15, 7, 255] ^= 1

    with pytest.raises(IOFailedError, match="load of layer 3"):
        Copies(pool, OffByOne(gpu, pool.planes), cell_of("all", "load")).check()


def test_a_pool_that_cannot_be_is_refused_and_gives_its_memory_back(
    gpu: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    for tokens, mib, words in ((256, 4, "8MiB"), (16, 1025, "1024MiB")):
        with pytest.raises(CapacityError, match=words):
            BenchPlanes(gpu, GQA.layout(tokens), mib * MIB)
    monkeypatch.setattr(PagedPlanes, "allocate", Mock(side_effect=MemoryError("no planes")))
    with pytest.raises(MemoryError, match="no planes"):
        BenchPlanes(gpu, GQA.layout(16), 2 * MIB)
    assert gpu.released == 1


def test_marks_copies_and_work_are_on_streams_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams and events of CUDA note down calls, in order."""
    cuda, streams = Mock(), iter(["marks", "work", "load", "store"])
    for name in ("current_device", "Event", "stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(cuda, name))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: next(streams))
    cuda.current_device.return_value, cuda.stream.return_value = 0, contextlib.nullcontext()
    gpu = Gpu()

    def taken() -> list[Any]:
        calls = cuda.mock_calls.copy()
        cuda.reset_mock()
        return calls

    taken()
    gpu.mark((cuda.first, None, cuda.second))
    timed_event = [call.Event(enable_timing=True), call.Event().record("marks")]
    assert taken() == [call.first.wait("marks"), call.second.wait("marks"), *timed_event]
    for direction in ("load", "store"):
        dst, src = torch.zeros(8, dtype=torch.uint8), torch.arange(8, dtype=torch.uint8)
        gpu.copy(direction, dst, src, (cuda.first, None))
        assert torch.equal(dst, src)
        assert [call.first.wait(direction), call.stream(direction)] == taken()[:2]
    assert len(gpu.busy(cuda.queue, 3)) == 4
    found = taken()
    assert found[0] == call.stream("work")
    assert [found.count(one) for one in (call.queue(), call.Event().record("work"))] == [3, 4]


class Scripted(Stand):
    """A neighbour whose pieces take `alone` seconds, and `beside` while a copy is under way: `first` to `end`."""

    def __init__(self, alone: float, beside: float, copy_seconds: float) -> None:
        super().__init__()
        self.alone, self.beside, self.copy_seconds = alone, beside, copy_seconds
        self.counts: list[int] = []
        self.slowed = False

    def busy(self, queue: Any, count: int) -> list[float]:
        self.counts.append(count)
        step = self.beside if self.slowed else self.alone
        return [self.clock + step * i for i in range(count + 1)]

    def way(self, after: Sequence[Any]) -> Queued:
        first = self.clock + 0.5
        self.clock = first
        return Queued([Done(first + self.copy_seconds)], first)


def beside_work(gpu: Scripted, least: int = 1) -> Beside:
    return Beside(gpu, Neighbour("work", 7, lambda: None), lambda n: gpu.way, least)


def test_work_counts_when_it_ran_wholly_beside_the_copy_and_else_is_queued_again_and_longer() -> None:
    gpu = Scripted(1.0, 1.0, 8.0)
    beside = beside_work(gpu)
    assert beside.alone_seconds == 1.0
    found = beside.run(gpu.way)
    # the copy begins at the third piece's end, its first call returns half a piece later, it ends 8 pieces after that
    assert (found.pieces, found.work_seconds, found.copy.seconds) == (7, 1.0, 8.5)
    before = len(gpu.counts)
    gpu.copy_seconds = 40.0
    assert beside.run(gpu.way).pieces > 30
    assert gpu.counts[before:] == [gpu.counts[before], 2 * gpu.counts[before]]
    gpu.copy_seconds = 1e6
    with pytest.raises(IOFailedError, match="work: "):
        beside.run(gpu.way)


def test_a_copy_lasts_for_enough_work() -> None:
    gpu = Scripted(1.0, 1.0, 0.1)
    assert beside_work(gpu, 2).repeat >= copy_gpu.LEAST / 0.6 - 1
    assert beside_work(Scripted(1e-3, 1e-3, 1.0), 5).repeat == 5


def test_copy_and_work_have_targets_of_their_own() -> None:
    gpu = Scripted(1.0, 1.1, 20.0)
    beside = beside_work(gpu)

    def ours(after: Sequence[Any]) -> Queued:
        queued = gpu.way(after)
        return Queued([Done(queued.first + 25.0)], queued.first)

    def run(way: Any) -> Any:
        gpu.slowed = way is ours
        return Beside.run(beside, way)

    beside.run = run  # type: ignore[method-assign]
    copies, work = beside.compare(ours, gpu.way, "other", 10**9, 6)
    for row, what, unit in (copies, "copy beside work", "GB/s"), (work, "work beside it", "s"):
        assert (row["what"], row["unit"], row["against"]) == (what, unit, "other")
        assert (row["size"], row["bytes"], row["pairs"]) == (7, 10**9, 6)
    assert copies["figure"]["median"] == pytest.approx(1 / 25.5)
    assert (copies["ratio"], copies["target"], copies["met"]) == (pytest.approx(20.5 / 25.5), 0.97, False)
    assert (work["ratio"], work["target"], work["met"]) == (pytest.approx(1.1), 1.02, False)
    assert work["alone_seconds"] == 1.0


def test_the_neighbours_work(gpu: Stand) -> None:
    product, attention = copy_gpu.matrix_product(gpu, 32), copy_gpu.attention(gpu, 24)
    out: Any = product.queue()
    assert (out.shape, out.dtype) == ((32, 32), torch.bfloat16)
    assert out.data_ptr() == product.queue().data_ptr()  # type: ignore[attr-defined]
    found: Any = attention.queue()
    assert (found.shape, found.dtype) == ((1, 32, 24, 128), torch.bfloat16)


SMALL = copy.Settings("default", True, 8 * MIB, 16 * MIB, 2, product=16, attention=16)


def run(gpu: Gpu, settings: copy.Settings = SMALL, **more: Any) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(copy, "Gpu", lambda: gpu)
        return copy.BENCH.run(settings, **more)


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    gpu, kept, texts = Stand(), [], []
    found = run(
        gpu,
        progress=lambda done, total, text: texts.append((done, text)),
        keep=lambda part: kept.append((part["complete"], len(part["copies"]))),
    )
    pools, cells = 9, len(copy_gpu.cells())
    assert (gpu.opened, gpu.released) == (pools, pools)
    assert kept == [*((number == cells, number) for number in range(1, cells + 1)), (True, cells)]
    assert [done for done, _ in texts] == list(range(cells))
    assert len({text for _, text in texts}) == cells
    return found


@pytest.fixture(scope="module")
def report(found: dict[str, Any]) -> dict[str, Any]:
    return {"schema": "gdscache.bench.copy/6", "settings": {"profile": "default"}, **found}


def check_row(row: dict[str, Any], ratio: float) -> None:
    assert row["ratio"] == pytest.approx(ratio, rel=0.1)
    assert row["ratio_low"] <= row["ratio"] <= row["ratio_high"]
    assert row["pairs"] == len(row["figure"]["values"]) == len(row["against_figure"]["values"])
    assert row["bytes"] > 0


def test_every_cell_has_its_rows_without_and_with_checksums(found: dict[str, Any]) -> None:
    cells, keys = copy_gpu.cells(), ("geometry", "page_tokens", "direction", "layers", "parts")
    for row, cell in zip(found["copies"], cells, strict=True):
        bounds = cell.geometry.layout(cell.page_tokens).layer_bounds[cell.layers - 1][1]
        said = cell.describe()
        assert {key: row[key] for key in said} == said
        check_row(row, RATE / PLAIN * cell.span_bytes / bounds)  # packed pages have fewer bytes in their extents
        assert row["target"] == cell.target
        assert row["met"] == (row["ratio"] >= cell.target)
        assert (row["pairs"], row["sums"], row["against"]) == (2, False, "cudaMemcpyAsync")
        assert set(row["routes"]) == set(cell.directions)
    for row, plain in zip(found["checksums"], found["copies"], strict=True):
        assert [row[key] for key in keys] == [plain[key] for key in keys]
        check_row(row, 0.99)
        assert (row["sums"], row["against"], row["target"]) == (True, "without checksums", 0.98)


def test_a_load_runs_beside_both_kinds_of_work(found: dict[str, Any]) -> None:
    rows = [(r["what"], r["against"], r["target"]) for r in found["beside"]]
    names = "matrix product", "attention"
    each = [((f"copy beside {name}", 0.97), (f"{name} beside it", 1.02)) for name in names]
    assert rows == [(what, "cudaMemcpyAsync", target) for two in each for what, target in two]
    for row in found["beside"]:
        assert (row["geometry"], row["page_tokens"], row["parts"], row["direction"]) == ("gqa", 64, ["all"], "load")
        assert row["bytes"] >= 16 * MIB
        ratio = 1.0 if row["unit"] == "s" else 0.98
        assert row["ratio"] == pytest.approx(ratio, abs=0.01)


class Interrupted(Stand):
    def open_copies(self, planes: PagedPlanes) -> Any:
        if self.opened == 1:
            raise KeyboardInterrupt
        return super().open_copies(planes)


def test_wrong_bytes_fail_their_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(Stand):
        def open_copies(self, planes: PagedPlanes) -> Any:
            super().open_copies(planes)
            return StandCopies(self, planes, broken=self.opened == 2)

    few = [cell for cell in copy_gpu.cells() if cell.page_tokens == 64]  # four pools
    monkeypatch.setattr(copy, "cells", lambda: few)
    bad = run(Wrong(), dataclasses.replace(SMALL, pairs=1))
    assert {row["what"] for row in bad["failed"]} == {copy.label(cell) for cell in few if cell.geometry == MLA}
    assert all("gave other bytes" in row["cause"] for row in bad["failed"])
    assert len(bad["copies"]) == len(few) - len(bad["failed"])
    assert bad["left"] == []


@pytest.mark.parametrize("width", [80, 300])
def test_tables_have_every_figure(report: dict[str, Any], width: int) -> None:
    lines = [line for table in copy.BENCH.tables(report, everything=True)[1:] for line in table.lines(width)]
    text = "\n".join(lines)
    assert max(map(len, lines)) <= width
    rows = [*report["copies"], *report["checksums"]]
    judged = [*rows, *report["beside"]]
    assert len(judged) == 2 * 44 + 4
    assert [text.count(word) for word in ("met:", "MISSED")] == [
        sum(r["met"] is met for r in judged) for met in (True, False)
    ]
    for row in rows:
        assert console.figure(row["ratio"]) in text
        assert console.figure(row["figure"]["median"]) in text
    if width == 300:
        assert "load, gqa, 64 tokens, all (staged)" in text
        assert "load, mla, 1 token, group/all" in text


def test_people_get_whole_pages_of_64_tokens_and_what_it_comes_to(report: dict[str, Any]) -> None:
    shown = [line for table in copy.BENCH.tables(report) for line in table.lines(80)]
    assert len(shown) < 80
    assert not any(word in line for line in shown for word in ("1 token", "checksums"))
    [said] = copy.bottom(report)
    usual = {row["direction"]: row for row in report["copies"] if (row["geometry"], row["page_tokens"]) == ("gqa", 64)}
    for direction, words in (("load", "loads to the GPU"), ("store", "stores from it")):
        assert f"{console.figure(usual[direction]['figure']['median'])} GB/s of {words}" in said
    assert "A model's work takes" in said
    assert copy.bottom({**report, "copies": [], "beside": []}) == []


def test_pages_of_64_tokens_are_measured_unasked() -> None:
    found = run(Stand(), dataclasses.replace(SMALL, everything=False, profile="quick"))
    assert {row["page_tokens"] for row in found["copies"]} == {64}
    assert '"target"' not in json.dumps(found), "--quick judges nothing"
    assert found["complete"]
    assert found["beside"]


def test_without_a_gpu_there_is_nothing_to_measure(gdscache, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    status, out, err = gdscache("bench", "copy", "--report", tmp_path / "r.json")
    assert (status, out) == (2, "")
    assert "bench copy needs a CUDA GPU" in err
    assert not list(tmp_path.iterdir())
    with pytest.raises(DeviceError):
        Gpu()


def test_the_command_writes_what_was_measured(gdscache, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(copy, "Gpu", Interrupted)
    small = {key: value for key, value in dataclasses.asdict(SMALL).items() if key != "profile"}
    monkeypatch.setattr(copy.Settings, "defaults", lambda **options: small)
    files = ("--report", tmp_path / "r.json", "--plot", tmp_path / "r.svg")
    status, out, _ = gdscache("bench", "copy", "--total", "16MiB", "--pairs", "3", *files)
    assert status == 130
    written = json.loads((tmp_path / "r.json").read_text())
    head = ["complete", "interrupted", "left", "done", "cannot", "failed"]
    sections = ["mover", "copies", "checksums", "beside"]
    assert list(written) == ["schema", "machine", "settings", *head, *sections]
    assert written["settings"] == dataclasses.asdict(SMALL) | {"everything": False, "total": 16 * MIB, "pairs": 3}
    assert written["mover"]["copy_engine"] == "batch_13"
    assert written["copies"]
    drawn = (tmp_path / "r.svg").read_text()
    assert all(f"<!-- {d}, gqa, 64 tokens, all (staged) -->" in drawn for d in ("load", "store", "both"))
    assert "attention" in drawn
    assert "Copies against cudaMemcpyAsync" in out


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_quick_profile_on_a_gpu(tmp_path: Path) -> None:
    if not find_spec("cuda.core"):
        pytest.skip("cuda-core is not installed")
    command = [sys.executable, "-W", "error", "-m", "gdscache", "bench", "copy", "--quick", "--all"]
    command += ["--report", str(tmp_path / "r.json"), "--plot", str(tmp_path / "r.png")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["complete"] is True
    assert report["machine"]["gpus"]
    assert len(report["copies"]) == len(copy_gpu.cells())
    assert len(report["checksums"]) == 44
    assert len(report["beside"]) == 4
    assert not any(word in json.dumps(report) for word in ("NaN", "Infinity"))
    assert all(row["ratio_low"] > 0 for key in ("copies", "checksums", "beside") for row in report[key])
    assert report["mover"]["calibration"]
    assert report["mover"]["driver"] > 12000
    assert "MISSED" not in done.stdout
