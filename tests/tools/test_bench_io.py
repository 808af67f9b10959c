"""`gdscache bench io`: what it measures, that it looks at the bytes, that it goes on where it was ended."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch

from gdscache import errors
from gdscache.commands import console
from gdscache.commands.bench import bare, io, io_cache, io_packed, io_rows, io_sweep, io_ways, measure
from gdscache.commands.bench.io import BENCH, Settings
from gdscache.commands.bench.io_engine import ColdEngine
from gdscache.commands.bench.io_rows import Place
from gdscache.commands.bench.io_sweep import OPS, measure_way
from gdscache.commands.bench.io_ways import BY_NAME, WAYS, OpenWay
from gdscache.config import SsdConfig
from gdscache.storage import files, open_transport
from gdscache.storage.base import Op
from tests.support.posix_transport import PosixTransport
from tests.support.terminal import on_terminal
from tests.support.transport_parts import refuse_ring

pytestmark = pytest.mark.suite

KIB, MIB = 1 << 10, 1 << 20
CPU = torch.device("cpu")
TINY = dataclasses.replace(
    Settings.of("quick", everything=True),
    total=16 * MIB,
    row_total=4 * MIB,
    ways=("host",),
    repeat=1,
    sweep_sizes=(64 * KIB,),
)
RAM = Path("/dev/shm")
HAS_RAM = RAM.is_dir() and os.access(RAM, os.W_OK) and io_cache.in_memory(RAM)


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A quick run: its directory, and what a terminal of 80 columns showed."""
    path, before = tmp_path_factory.mktemp("io"), os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        line = "-W", "error", "-m", "gdscache", "bench", "io", "--quick", "--all", "--dir", str(path)
        status, shown = on_terminal([*line, "--report", str(path / "r.json"), "--plot", str(path / "r.svg")])
    finally:
        os.environ.pop("CUDA_VISIBLE_DEVICES")
        os.environ.update({} if before is None else {"CUDA_VISIBLE_DEVICES": before})
    assert status == 0, shown
    return path, shown


@pytest.fixture(scope="module")
def report(quick: tuple[Path, str]) -> dict[str, Any]:
    found = json.loads((quick[0] / "r.json").read_text())
    assert isinstance(found, dict)
    return found


# -- the command -------------------------------------------------------------------------------------------------------


def test_every_way_is_measured_or_listed_with_its_cause(report: dict[str, Any]) -> None:
    assert report["schema"] == "gdscache.bench.io/4"
    assert (report["complete"], report["left"], report["failed"]) == (True, [], [])
    assert [way["way"] for way in report["ways"]] == [way.name for way in WAYS]
    measured = {cell["way"] for cell in report["cells"]}
    listed = {entry["what"]: entry["cause"] for entry in report["cannot"]}
    for way in report["ways"]:
        assert (way["way"] in measured) == (not way["cause"])
        assert way["cause"] == listed.get(way["label"], "")
    assert "host" in measured
    assert listed["direct GPU, native"] == listed["direct reads"] == "torch sees no CUDA device"
    for cell in report["cells"]:
        assert len(cell["gb_per_second"]["values"]) == report["settings"]["sweep_rounds"]
        assert cell["ratio"] == pytest.approx(cell["gb_per_second"]["median"] / cell["ceiling_gb_per_second"]["median"])
        assert cell["bytes"] % cell["io_bytes"] == 0 < cell["bytes"]
    for way in measured:
        found = [(cell["op"], cell["io_bytes"]) for cell in report["cells"] if cell["way"] == way]
        assert found == list(itertools.product(OPS, report["settings"]["sweep_sizes"]))


def test_comparisons_say_what_they_are_held_against(report: dict[str, Any]) -> None:
    rows = {(r["what"], r["against"].partition(",")[0]): r for r in report["comparisons"]}
    targets = {(r["case"], r["target"]) for r in measure.judged(report["comparisons"])}
    on_disk = report["machine"]["storage"]["file_system"] not in io_cache.IN_MEMORY
    stores = {("stores and loads, 4MiB pages", 0.85), ("stores and loads, 1MiB pages", 0.78)}
    assert (stores <= targets) == on_disk
    assert {r["transport"] for r in rows.values()} == {engine_transport(Path())}
    assert {r["threads"] for r in rows.values()} == {report["settings"]["threads"]}
    for r in rows.values():
        assert r["ratio"] == pytest.approx(r["figure"]["median"] / r["against_figure"]["median"])
        if "target" in r:
            assert r["met"] is (r["ratio"] >= r["target"])
    assert report["cannot"][0]["what"] == "packed loads from a RAM disk, 8MiB pages"


def test_what_developers_read_is_not_measured_unasked() -> None:
    cpu, unasked = torch.device("cpu"), Settings.of("default")
    names = {part.name.partition(",")[0] for part in io.parts(unasked, cpu)}
    assert names == {"stores and loads"}
    assert unasked.ways == ()
    everything = {part.name.partition(",")[0] for part in io.parts(Settings.of("default", everything=True), cpu)}
    assert names | {"packed loads from a RAM disk", "direct reads"} <= everything
    direct = io.parts(dataclasses.replace(unasked, ways=("cufile",)), cpu)
    assert {part.name.partition(",")[0] for part in direct} == names | {"direct reads"}


def test_people_get_whole_tables_and_the_directory_back(quick: tuple[Path, str], report: dict[str, Any]) -> None:
    path, shown = quick
    assert {p.name for p in path.iterdir()} == {"r.json", "r.svg"}
    assert max(map(len, shown.splitlines())) <= 80
    assert "…" not in shown
    for words in (
        "This cache",
        "Ceilings",
        "Cannot be measured here",
        "no CUDA device",
    ):
        assert words in shown
    assert not {"met:", "MISSED:", "Failed"} & set(shown.split())
    for row in report["comparisons"]:
        assert console.figure(row["ratio"]) in shown, row["what"]
    drawn = (path / "r.svg").read_text()
    assert "host only" in drawn
    assert drawn.count("<!-- store, 4MiB pages -->") == 1


def test_people_get_what_it_comes_to(quick: tuple[Path, str], report: dict[str, Any]) -> None:
    _, shown = quick
    [said] = io.bottom(report)
    assert " ".join(shown.split()).endswith(said)
    speeds = {}
    for r in report["comparisons"]:
        if r["case"].startswith("stores and loads"):
            kind = r["what"].split(",")[0]
            speeds[kind] = max(speeds.get(kind, 0.0), r["figure"]["median"])
    assert f"{console.figure(speeds['cold load'])} GB/s of loads" in said
    assert f"{console.figure(speeds['store'])} GB/s of stores" in said
    assert io.bottom({**report, "comparisons": []}) == []
    usual = [line for table in io.tables(report) for line in table.lines(80)]
    assert len(usual) < 60


def test_gds_that_is_required_is_proven_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(errors.TransportUnavailableError, match=r"not proven to work .* torch sees no CUDA device"):
        BENCH.run(dataclasses.replace(TINY, ways=("cufile",), require_gds=True), tmp_path)
    assert not list(tmp_path.iterdir())


# -- the sweep ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", [Op.READ, Op.WRITE])
def test_a_pass_moves_each_part_once_with_so_many_in_flight(
    op: Op, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, size = tmp_path / "io.bin", 4 * KIB
    path.write_bytes(np.random.default_rng(5).bytes(8 * MIB))
    moved: list[int] = []
    under_way: list[int] = []  # their memory
    most: list[int] = []
    with OpenWay("host", path, 2, io_sweep.DEPTH * size, CPU) as way:
        begin, finish = way.begin, way.finish

        def begins(op: Op, some: Any, nbytes: int) -> Any:
            assert not set(under_way) & {place for _, place in some}, "memory of another request"
            moved.extend(at for at, _ in some)
            under_way.extend(place for _, place in some)
            most.append(len(under_way))
            return begin(op, some, nbytes)

        def finishes(batch: Any) -> None:
            finish(batch)
            del under_way[: len(batch.calls)]

        monkeypatch.setattr(way, "begin", begins)
        monkeypatch.setattr(way, "finish", finishes)
        io_sweep.one_pass(way, op, 1 * MIB, size)
        assert max(most) == io_sweep.DEPTH
        assert not under_way
    assert sorted(moved) == list(range(0, MIB, size))
    assert moved != sorted(moved)


def test_a_way_in_a_child_that_hangs_dies_or_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not come back is a way that this machine does not have; an error of what worked is a failure."""
    path = tmp_path / "io.bin"
    path.write_bytes(bytes(16 * MIB))
    ceilings = {op: {"gb_per_second": {"median": 1.0}, "threads": 2, "io_bytes": MIB} for op in ("read", "write")}
    given = {"seconds": 0.01, "rounds": 1, "sizes": [64 * KIB, 256 * MIB], "require_gds": False}
    found = io_sweep.sweep(path, "host", "cpu", 16 * MIB, given, ceilings)
    direct = not files.probe_direct_io(tmp_path)
    assert (found["cause"], found["word"], found["direct"]) == ("", "posix", direct)
    assert [(cell["op"], cell["io_bytes"]) for cell in found["cells"]] == [(op, 64 * KIB) for op in OPS]
    assert path.stat().st_size == 16 * MIB
    missing = io_sweep.sweep(path, "kvikio_compat", "cuda:99", 16 * MIB, given, ceilings)
    assert missing["cause"]
    assert missing["cells"] == []
    with monkeypatch.context() as patch:
        patch.setattr(io_sweep, "DEADLINE_S", 0.2)
        assert "no answer within 0.2 s" in io_sweep.sweep(path, "host", "cpu", 16 * MIB, given, ceilings)["cause"]
    with pytest.raises(errors.IOFailedError, match="the bare read loop failed"):
        io_sweep.sweep(path, "host", "cpu", 16 * MIB, given, {**ceilings, "read": {**ceilings["read"], "threads": 0}})


def test_a_transport_that_is_missing_is_a_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.bin"
    path.write_bytes(bytes(io_ways.CHECK_BYTES))

    def missing(name: str, threads: int, device: object) -> NoReturn:
        raise errors.TransportUnavailableError("nixl cannot be\nimported", "install it")

    monkeypatch.setattr(io_ways, "open_transport", missing)
    found = measure_way(str(path), "nixl_posix", "cpu", 8 * MIB, {"sizes": [64 * KIB]}, {})
    assert found == io_sweep.lacking("nixl cannot be imported")


def sweep_of(path: Path, **settings: Any) -> dict[str, Any]:
    """A sweep in this process."""
    ceilings = {op: {"gb_per_second": {"median": 1.0}, "threads": 2, "io_bytes": MIB} for op in ("read", "write")}
    given = {"seconds": 0.01, "rounds": 2, "sizes": [64 * KIB], "require_gds": False, **settings}
    return measure_way(str(path), "host", "cpu", path.stat().st_size, given, ceilings)


def test_reads_through_the_page_cache_are_cold(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where O_DIRECT is refused, the file is dropped before each pass, and the report says so."""
    for module in (files, bare):
        monkeypatch.setattr(module, "probe_direct_io", lambda directory: "open answers Invalid argument")
    dropped: list[int] = []
    drop = io_cache.drop
    monkeypatch.setattr(io_cache, "drop", lambda paths: dropped.append(1) or drop(paths))
    found = sweep_of(file)
    expected = "memory" if io_cache.in_memory(file.parent) else "dropped"
    assert [(cell["direct"], cell["cache"]["state"]) for cell in found["cells"]] == [(False, expected)] * 2
    assert len(dropped) == 2 * (1 + 2 * 2)  # before the look at the cache, and before each pass of either


@pytest.mark.parametrize("counted", [False, True])
def test_a_way_without_gds_fails_where_it_is_required(
    counted: bool, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    operations = itertools.count()
    monkeypatch.setitem(BY_NAME, "host", io_ways.Way("host", "host only", "host", cufile=True))
    monkeypatch.setattr(io_sweep, "gds_operations", lambda: (next(operations), 0) if counted else (5, 5))
    if counted:
        assert all(cell["nvidia_fs"] == {"reads": 1, "writes": 0} for cell in sweep_of(file, require_gds=True)["cells"])
    else:
        with pytest.raises(errors.IOFailedError, match="nvidia-fs counted no I/O"):
            sweep_of(file, require_gds=True)


# -- ways --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "io.bin"
    path.write_bytes(np.random.default_rng(5).bytes(io_ways.CHECK_BYTES))
    return path


@pytest.mark.parametrize("name", ["host", "uring", "own"])
def test_the_byte_check_passes_what_is_right(name: str, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "uring" and engine_transport(file.parent) != name:
        pytest.skip("no io_uring here")
    if name == "own":
        monkeypatch.setattr(io_ways, "open_transport", lambda name, threads, device: Own(threads))
        name = "host"
    with OpenWay(name, file, 2, io_ways.CHECK_BYTES, CPU) as way:
        io_ways.check(way)


class Own(PosixTransport):
    """A user's transport, which threads call."""

    name = "own"


class FlippedRead(Own):
    def read(self, file: int, offset: int, memory: Any) -> int:
        moved = super().read(file, offset, memory)
        memory[-1] ^= 1
        return moved


class LostWrite(Own):
    def write(self, file: int, offset: int, memory: Any) -> int:
        return int(memory.nbytes)


class NoRead(Own):
    """Says that it read, and did not."""

    def read(self, file: int, offset: int, memory: Any) -> int:
        return int(memory.nbytes)


@pytest.mark.parametrize(
    ("kind", "where"), [(FlippedRead, "bytes read at"), (NoRead, "bytes read at"), (LostWrite, "bytes in the file at")]
)
def test_the_byte_check_finds_what_is_wrong(
    kind: type[Own], where: str, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(io_ways, "open_transport", lambda name, threads, device: kind(threads))
    with OpenWay("host", file, 2, io_ways.CHECK_BYTES, CPU) as way, pytest.raises(errors.StorageError, match=where):
        io_ways.check(way)


@pytest.mark.parametrize("own", [False, True])
def test_the_error_of_a_request_is_raised(file: Path, monkeypatch: pytest.MonkeyPatch, own: bool) -> None:
    if own:
        monkeypatch.setattr(io_ways, "open_transport", lambda name, threads, device: Own(threads))
    with OpenWay("host", file, 2, 8 * MIB, CPU) as way:
        with pytest.raises(errors.ShortIOError):
            way.move(Op.READ, [(0, 0), (io_ways.CHECK_BYTES, 4 * KIB)], 4 * KIB)
        with pytest.raises(errors.IOFailedError):
            way.move(Op.READ, [(-8 * KIB, 0)], 4 * KIB)
        way.move(Op.READ, [(0, 0)], 5 * MIB)  # in two calls
        assert way.get(0, 5 * MIB) == file.read_bytes()[: 5 * MIB]


def test_host_then_gpu_goes_through_both(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a GPU that is played by host memory."""
    monkeypatch.setattr(io_ways, "HostBuffer", lambda nbytes, pin, unit: real(nbytes, "off", unit))
    from gdscache.cuda.host_memory import HostBuffer as real  # noqa: N813

    with OpenWay("host_gpu", file, 2, io_ways.CHECK_BYTES, CPU) as way:
        io_ways.check(way)
        assert way.host is not None
        assert way.gpu is not None
        way.gpu.zero_()
        monkeypatch.setattr(way, "put", lambda content: None)
        with pytest.raises(errors.StorageError, match="in the file"):  # the GPU is what is written
            io_ways.check(way)


# -- the page cache ----------------------------------------------------------------------------------------------------


def test_what_is_dropped_is_gone_and_what_is_not_is_said(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(bytes(4 * MIB))
    if io_cache.in_memory(tmp_path):
        pytest.skip("the temporary directory is a RAM disk: nothing can be dropped there")
    assert io_cache.resident_bytes(path) == 4 * MIB
    assert io_cache.state([path], direct=False) == {"state": "kept", "resident_bytes": 4 * MIB}
    io_cache.drop([path])
    assert io_cache.state([path], direct=False) == {"state": "dropped", "resident_bytes": 0}
    assert io_cache.state([path], direct=True)["state"] == "bypassed"
    with path.open("rb") as file:
        file.read(4096)
    assert io_cache.state([path], direct=False)["state"] == "kept"


@pytest.mark.skipif(not HAS_RAM, reason="no RAM disk at /dev/shm")
def test_a_ram_disk_is_said_to_be_one() -> None:
    import tempfile

    with tempfile.TemporaryDirectory(dir=RAM) as name:
        path = Path(name, "f")
        path.write_bytes(bytes(MIB))
        io_cache.drop([path])
        assert io_cache.state([path], direct=True) == {"state": "memory", "resident_bytes": MIB}


# -- an engine's stores and loads --------------------------------------------------------------------------------------


@pytest.fixture
def cold(tmp_path: Path) -> Iterator[ColdEngine]:
    with ColdEngine(tmp_path, MIB, 6 * MIB, 2, CPU) as engine:
        yield engine


def test_cold_loads_come_from_the_disk(cold: ColdEngine) -> None:
    cold.blank()
    with pytest.raises(errors.IOFailedError, match="other bytes"):
        cold.check()
    assert cold.load() > 0
    cold.check()
    assert cold.copy() > 0


def test_a_load_of_damaged_pages_is_no_figure(cold: ColdEngine) -> None:
    cold.slab.write_bytes(bytes(cold.slab.stat().st_size))
    with pytest.raises(errors.IOFailedError, match="were to come from the ssd tier"):
        cold.load()


def engine_transport(directory: Path) -> str:
    """What `auto` opens for the engines that are measured."""
    with open_transport("auto", directory=directory, device="cpu", threads=1, direct_io="auto", gds="off") as found:
        return found.name


def test_what_is_compared_is_what_an_engine_would_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "io.bin").write_bytes(bytes(4 * MIB))
    here = engine_transport(tmp_path)
    for refused, wanted in ((False, here), (True, "posix")):
        if refused:
            refuse_ring(monkeypatch)
        assert {r["transport"] for r in io_rows.stores_and_loads(place(tmp_path), MIB)} == {wanted}


def test_threads_of_comparisons_are_the_engine_s_and_more_on_a_ram_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    default = int(SsdConfig.model_fields["threads"].default)
    settings = Settings()
    assert (settings.threads_on(ram=False), settings.threads_on(ram=True)) == (default, max(default, 12))
    given = dataclasses.replace(settings, threads=3)
    assert (given.threads_on(ram=False), given.threads_on(ram=True)) == (3, 3)

    ram = tmp_path / "ram"
    ram.mkdir()
    seen: list[tuple[bool, int]] = []
    parts = [io.Part("a", lambda place: seen.append((False, place.threads)) or [])]  # type: ignore[func-returns-value]
    parts += [io.Part("b", lambda place: seen.append((True, place.threads)) or [], ram=True)]  # type: ignore[func-returns-value]
    monkeypatch.setattr(io, "parts", lambda *_: parts)
    monkeypatch.setattr(io_cache, "in_memory", lambda directory: directory.is_relative_to(ram))
    BENCH.run(dataclasses.replace(TINY, threads=None, ways=(), ram_disk=str(ram)), tmp_path)
    assert seen == [(False, default), (True, max(default, 12))]


def place(directory: Path, nbytes: int = 4 * MIB) -> Place:
    return Place(directory, directory / "io.bin", nbytes, 1, 2, CPU, console.silent)


def test_packed_loads_are_held_against_unpacked_ones(tmp_path: Path) -> None:
    rows = io_packed.packed_loads(place(tmp_path), MIB)
    assert [r["against"] for r in rows] == ["unpacked", "a page-locked copy"] * 3
    assert [r.get("target") for r in rows] == [1.25, 1.18, 1.20, None, 1.20, None]


# -- whole runs --------------------------------------------------------------------------------------------------------


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ways are measured in this process: each costs a child."""
    monkeypatch.setattr(measure, "child", lambda module, function, *arguments, **_: measure_way(*arguments))


@pytest.mark.usefixtures("here")
def test_a_run_goes_on_where_a_report_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    some = io.parts(TINY, CPU)[:3]
    monkeypatch.setattr(io, "parts", lambda *_: some)
    kept: list[dict[str, Any]] = []
    whole = BENCH.run(TINY, tmp_path, keep=lambda found: kept.append(json.loads(json.dumps(found))))
    assert whole["complete"]
    assert [len(found["done"]) for found in kept] == sorted(len(found["done"]) for found in kept)
    assert kept[-1] == whole

    def never(*_: object, **__: object) -> NoReturn:
        raise AssertionError("measured again")

    with monkeypatch.context() as patch:
        for module, name in ((io_sweep, "ceiling"), (io_sweep, "sweep"), (io_rows, "stores_and_loads")):
            patch.setattr(module, name, never)
        again = BENCH.run(TINY, tmp_path, done=whole)
    assert (again["cells"], again["comparisons"], again["ways"]) == (
        whole["cells"],
        whole["comparisons"],
        whole["ways"],
    )
    assert again["complete"]
    gone = whole["comparisons"][0]["case"]
    part = {**whole, "done": [name for name in whole["done"] if name not in (gone, "host only")]}
    mended = BENCH.run(TINY, tmp_path, done=part)
    assert mended["complete"]
    assert len(mended["cells"]) == len(whole["cells"])
    assert mended["cells"] != whole["cells"]
    assert mended["comparisons"][-1]["case"] == gone
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("here")
def test_one_broken_way_does_not_cost_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = io_sweep.measure_way

    def way(path: str, name: str, *rest: Any) -> dict[str, Any]:
        if name == "nixl_posix":
            raise errors.IOFailedError("gone since the check", "")
        return plain(path, name, *rest)

    monkeypatch.setattr(io, "parts", lambda *_: [])
    monkeypatch.setattr(measure, "child", lambda module, function, *arguments, **_: way(*arguments))
    found = BENCH.run(dataclasses.replace(TINY, ways=("nixl_posix", "host")), tmp_path)
    assert found["failed"] == [{"what": "NIXL POSIX", "cause": "gone since the check"}]
    assert {cell["way"] for cell in found["cells"]} == {"host"}
    assert found["left"] == []
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("here")
def test_a_comparison_that_fails_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(place: Place) -> list[Any]:
        raise errors.GdsCacheError("no luck", "")

    parts = [io.Part("a part", broken), io.Part("b", broken, cause="why")]
    monkeypatch.setattr(io, "parts", lambda *_: parts)
    found = BENCH.run(TINY, tmp_path)
    assert found["failed"] == [{"what": "a part", "cause": "no luck"}]
    assert {"what": "b", "cause": "why"} in found["cannot"]
    assert found["cells"]


def test_a_disk_without_room_is_refused(tmp_path: Path) -> None:
    with pytest.raises(errors.CapacityError, match="are needed"):
        BENCH.run(dataclasses.replace(TINY, total=1 << 60), tmp_path)
    assert not list(tmp_path.iterdir())


def test_part_of_a_report_can_be_drawn(report: dict[str, Any], tmp_path: Path) -> None:
    import matplotlib.figure

    for part in ({"cells": [], "comparisons": [], "ceilings": None}, {"cells": report["cells"][:1]}):
        figure = matplotlib.figure.Figure()
        io.plot({**report, **part}, figure)
        figure.savefig(tmp_path / "part.svg")
        shown = (*io.tables({**report, **part}), *io.details({**report, **part}))
        assert all(len(line) <= 80 for table in shown for line in table.lines(80))


# -- on a GPU ----------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_every_way_on_a_gpu(tmp_path: Path) -> None:
    """Whatever works here is byte-checked and measured; what does not has a cause."""
    found = BENCH.run(Settings.of("quick", everything=True), tmp_path)
    assert found["failed"] == []
    words = {way["way"]: way for way in found["ways"]}
    assert words["host_gpu"]["cause"] == ""
    assert {cell["way"] for cell in found["cells"]} == {name for name, way in words.items() if not way["cause"]}
    against = {r["against"] for r in found["comparisons"]}
    if HAS_RAM:
        assert "a page-locked copy" in against
    assert not list(tmp_path.iterdir())
