"""`gdscache bench io`: what it measures, that it looks at the bytes, that it goes on where it was ended."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import re
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch

from gdscache.commands.bench import (
    bare,
    io,
    io_cache,
    io_cells,
    io_measure,
    io_plot,
    io_report,
    io_trial,
    io_ways,
    machine,
    measure,
)
from gdscache.commands.bench import io_rows_engine as engine_rows
from gdscache.commands.bench.io_cells import BY_NAME, OPS, WAYS, Cell, Settings
from gdscache.commands.bench.io_engine import ColdEngine
from gdscache.commands.bench.io_files import CallPerPage, FilePerPage, KvikioPerPage
from gdscache.commands.bench.io_loop import Metered
from gdscache.commands.bench.io_loop import run as run_cell
from gdscache.commands.bench.io_rows import RATES, Place
from gdscache.commands.bench.io_ways import OpenWay
from gdscache.config import SsdConfig
from gdscache.errors import (
    GdsCacheError,
    InvalidValueError,
    IOFailedError,
    ShortIOError,
    StorageError,
    TransportUnavailableError,
)
from gdscache.storage import files, open_transport
from gdscache.storage.base import Op
from tests.support.posix_transport import PosixTransport
from tests.support.transport_parts import refuse_ring

pytestmark = pytest.mark.suite

KIB, MIB = 1 << 10, 1 << 20
CPU = torch.device("cpu")
TINY = dataclasses.replace(
    Settings.quick(), total=16 * MIB, row_total=4 * MIB, ways=("host",), repeat=1, cell_seconds=0.005
)
RAM = Path("/dev/shm")
HAS_RAM = RAM.is_dir() and os.access(RAM, os.W_OK) and io_cache.in_memory(RAM)


def command(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-W", "error", "-m", "gdscache", "bench", "io", *map(str, arguments)]
    return subprocess.run(line, capture_output=True, text=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    path = tmp_path_factory.mktemp("io")
    done = command("--quick", "--dir", path, "--json", path / "r.json", "--plot", path / "r.svg")
    assert done.returncode == 0, done.stdout + done.stderr
    return path, done


@pytest.fixture(scope="module")
def report(quick: tuple[Path, Any]) -> dict[str, Any]:
    found = json.loads((quick[0] / "r.json").read_text())
    assert isinstance(found, dict)
    return found


# -- the command -------------------------------------------------------------------------------------------------------


def test_every_way_is_measured_or_listed_with_its_cause(report: dict[str, Any]) -> None:
    assert report["schema"] == "gdscache.bench.io/1"
    assert report["complete"] is True
    assert report["failed"] == []
    assert [way["way"] for way in report["ways"]] == [way.name for way in WAYS]
    measured = {cell["way"] for cell in report["cells"]}
    listed = {entry["what"]: entry["cause"] for entry in report["cannot"]}
    for way in report["ways"]:
        assert (way["way"] in measured) == (not way["cause"])
        assert way["cause"] == listed.get(way["label"], "")
    assert "host" in measured
    assert listed["direct GPU, native"] == "torch sees no CUDA device"
    for cell in report["cells"]:
        assert len(cell["gb_per_second"]["values"]) == report["settings"]["cell_rounds"]
        assert cell["ratio"] == pytest.approx(cell["gb_per_second"]["median"] / cell["ceiling_gb_per_second"]["median"])
        assert cell["iops"] == pytest.approx(cell["gb_per_second"]["median"] * 1e9 / cell["io_bytes"])
        latency = cell["latency_seconds"]
        assert 0 < latency["p50"] <= latency["p99"] <= latency["max"]
        assert cell["bytes"] == cell["requests"] * cell["io_bytes"]
        assert cell["cpu_seconds_per_gib"]["median"] > 0
    assert {cell["op"] for cell in report["cells"]} == set(OPS)


def test_comparisons_say_what_they_are_held_against(report: dict[str, Any]) -> None:
    rows = {(r["what"], r["against"].partition(",")[0]): r for r in report["comparisons"]}
    targets = {r["part"]: r["target"] for r in measure.judged(report)}
    assert targets["a file a page, 256KiB pages"] in (2.0, 1.5)
    assert targets["one call a page"] == 0.5
    assert ("host reads" in targets) == (report["machine"]["storage"]["file_system"] not in io_cache.IN_MEMORY)
    assert {r["transport"] for r in rows.values()} == {engine_transport(Path())}
    threads = {r["threads"] for r in rows.values() if r["part"] != "host reads"}  # those are scouted
    assert threads == {report["settings"]["threads"]}
    for r in rows.values():
        assert r["ratio"] == pytest.approx(r["figure"]["median"] / r["against_figure"]["median"])
        if "target" in r:
            better = r["ratio"] >= r["target"] if r["unit"] in RATES else r["ratio"] <= r["target"]
            assert r["met"] is better
    causes = [entry["what"] for entry in report["cannot"]]
    assert [f"loads from a RAM disk, {size} pages" for size in ("4MiB", "1MiB", "256KiB")] == causes[-3:]


def test_people_get_tables_and_the_directory_back(quick: tuple[Path, Any], report: dict[str, Any]) -> None:
    path, done = quick
    assert {p.name for p in path.iterdir()} == {"r.json", "r.svg"}
    assert done.stderr == ""
    assert "…" not in done.stdout, "every table fits"
    for words in ("Ways that work here", "Comparisons", "Ceilings", "Not measured here", "torch sees no CUDA device"):
        assert words in done.stdout
    assert f"by {engine_transport(path)}, {report['settings']['threads']} threads" in done.stdout
    assert "Failed" not in done.stdout
    missed = [r for r in measure.judged(report) if not r["met"]]
    assert done.stdout.count("MISSED") == len(missed)
    assert "host only" in (path / "r.svg").read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--dir", "{}/none"), "not a directory"),
        (("--dir", "{}", "--way", "gds"), "unknown way 'gds'"),
        (("--dir", "{}", "--total", "1MiB"), "use at least 16MiB"),
        (("--dir", "{}", "--total", "much"), "--total 'much'"),
        (("--dir", "{}", "--full", "--quick"), "choose one"),
        (("--dir", "{}", "--resume", "{}/none.json"), "cannot be read"),
        (("--dir", "{}", "--json", "{}/none/r.json"), "--json"),
        (("--dir", "{}", "--plot", "{}/r.doc"), "r.doc"),
        (("--dir", "{}", "--require-gds", "--way", "host"), "add --way cufile"),
    ],
)
def test_bad_arguments_are_refused_before_anything_runs(
    arguments: tuple[str, ...], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    from gdscache import cli

    monkeypatch.setattr(sys, "argv", ["gdscache", "bench", "io", *(a.format(tmp_path) for a in arguments)])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 2
    assert words in capfd.readouterr().err
    assert not list(tmp_path.iterdir())


def test_gds_that_is_required_is_proven_or_refused(tmp_path: Path) -> None:
    done = command("--quick", "--require-gds", "--dir", tmp_path)
    assert done.returncode == 2
    assert "GPUDirect Storage is not proven to work" in done.stderr
    assert "torch sees no CUDA device" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("no_trials")
def test_a_way_that_failed_is_the_exit_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from gdscache import cli

    def broken(*_: object, **__: object) -> None:
        raise IOFailedError("the disk is on fire", "leave")

    monkeypatch.setattr(io_measure, "run", broken)
    monkeypatch.setattr(io._Bench, "_parts", lambda self: [])
    monkeypatch.setattr(sys, "argv", ["gdscache", "bench", "io", "--quick", "--way", "host", "--dir", str(tmp_path)])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 1
    assert "the disk is on fire" in capfd.readouterr().out


# -- cells -------------------------------------------------------------------------------------------------------------


def test_the_matrix() -> None:
    full, default = (io_cells.cells(profile, BY_NAME, 4 << 30) for profile in ("full", "default"))
    for some in (full, default):
        assert len({cell.key for cell in some}) == len(some)
        assert all(cell.depth < 128 and cell.depth * cell.io_bytes <= io_cells.MEMORY for cell in some)
        assert [key for key, _ in itertools.groupby(cell.way for cell in some)] == list(BY_NAME)
        assert all(cell.lanes * cell.batch == cell.depth for cell in some)
    assert set(default) < set(full)
    wanted = itertools.product(BY_NAME, OPS, io_cells.SIZES, io_cells.DEPTHS, io_cells.THREADS)
    missing = set(wanted) - {cell.key for cell in full}
    assert all(io_bytes * depth > io_cells.MEMORY for _, _, io_bytes, depth, _ in missing)
    for way in BY_NAME:
        own = [cell for cell in default if cell.way == way]
        assert [cell.op for cell in own[: len(OPS)]] == list(OPS), "the most telling first"
        for field, values in (("io_bytes", io_cells.SIZES), ("depth", io_cells.DEPTHS), ("threads", io_cells.THREADS)):
            assert {getattr(c, field) for c in own if c.op == "random read"} == set(values)
    small = io_cells.cells("default", ["host"], 16 * MIB)
    assert small
    assert all(cell.depth * cell.io_bytes <= 16 * MIB for cell in small)


@pytest.mark.parametrize("op", OPS)
def test_a_pass_covers_the_file_once(op: str) -> None:
    offsets = Cell("host", op, MIB, 8, 1).offsets(64 * MIB)
    assert sorted(offsets.tolist()) == [i * MIB for i in range(64)]
    in_order = offsets.tolist() == sorted(offsets.tolist())
    assert in_order == (op in ("read", "write"))


def test_a_quarter_of_what_is_mixed_is_written() -> None:
    cell = Cell("host", "mixed", MIB, 8, 1)
    assert [cell.op_of(batch) for batch in range(8)].count(Op.WRITE) == 2
    assert io_cells.mixed_rate(4.0, 4.0) == pytest.approx(4.0)
    assert io_cells.mixed_rate(6.0, 2.0) == pytest.approx(4.0)  # 3 GB in 0.5 s, 1 GB in 0.5 s


def test_percentiles_occurred() -> None:
    found = io_cells.percentiles(np.arange(1.0, 101.0))
    assert found == {"p50": 51.0, "p99": 100.0, "max": 100.0}


# -- the loop ----------------------------------------------------------------------------------------------------------


class Recorder:
    """A lane that moves nothing and says that each request took 2 s."""

    def __init__(self, moved: list[tuple[Op, int, int]], error_at: int | None = None) -> None:
        self.moved, self.error_at = moved, error_at
        self.start = threading.Barrier(1)

    def move(self, op: Op, some: Sequence[tuple[int, int]], nbytes: int) -> list[float]:
        start, self.start = self.start, threading.Barrier(1)
        start.wait(60)
        self.moved += [(op, offset, at) for offset, at in some]
        if self.error_at is not None and len(self.moved) > self.error_at:
            raise IOFailedError("broken", "")
        return [2.0] * len(some)


def test_a_run_moves_each_part_once_and_counts() -> None:
    cell, moved = Cell("host", "mixed", 64 * KIB, 8, 1), []  # type: ignore[var-annotated]
    lanes = [Recorder(moved) for _ in range(cell.lanes)]
    together = threading.Barrier(cell.lanes)  # so that each lane has a batch
    for lane in lanes:
        lane.start = together
    found = run_cell(cell, lanes, 4 * MIB, 60.0, again=False)
    assert sorted(offset for _, offset, _ in moved) == [i * 64 * KIB for i in range(64)]
    assert found.nbytes == 4 * MIB
    assert found.latencies.tolist() == [2.0] * 64
    assert sum(op is Op.WRITE for op, _, _ in moved) == 16
    places = {at for _, _, at in moved}
    assert places == {i * 64 * KIB for i in range(8)}, "lanes share no memory, and use no more than depth requests"


def test_a_run_ends_with_its_time_or_goes_round() -> None:
    cell, moved = Cell("host", "read", 64 * KIB, 4, 1), []  # type: ignore[var-annotated]
    lanes = [Recorder(moved) for _ in range(cell.lanes)]
    assert run_cell(cell, lanes, 4 * MIB, 0.0, again=True).nbytes >= cell.lanes * cell.batch * cell.io_bytes
    moved.clear()
    found = run_cell(cell, lanes, 256 * KIB, 0.05, again=True)
    assert len(moved) * cell.io_bytes == found.nbytes > 256 * KIB
    assert found.seconds < 5


def test_a_run_that_fails_is_no_figure() -> None:
    cell, moved = Cell("host", "read", 64 * KIB, 4, 1), []  # type: ignore[var-annotated]
    with pytest.raises(IOFailedError, match="broken"):
        run_cell(cell, [Recorder(moved, 10) for _ in range(cell.lanes)], 4 * MIB, 60.0, again=True)


def test_what_is_metered() -> None:
    order: list[str] = []
    meter = Metered(lambda: order.append("way") or 3.0, MIB, lambda: order.append("first"))  # type: ignore[func-returns-value]
    assert [meter(), meter()] == [3.0, 3.0]
    assert order == ["first", "way"] * 2
    assert len(meter.cpu_per_gib.values) == 2
    assert min(meter.cpu_per_gib.values) >= 0


# -- ways --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "io.bin"
    path.write_bytes(np.random.default_rng(5).bytes(io_ways.CHECK_BYTES))
    return path


@pytest.mark.parametrize("name", ["host", "uring"])
def test_the_byte_check_passes_what_is_right(name: str, file: Path) -> None:
    if name == "uring" and engine_transport(file.parent) != name:
        pytest.skip("no io_uring here")
    with OpenWay(name, file, 2, io_ways.CHECK_BYTES, CPU) as way:
        io_ways.check(way)


class FlippedRead(PosixTransport):
    def move(self, run: Any) -> Any:
        found = super().move(run)
        if run.op is Op.READ:
            run.pieces[-1].memory[-1] ^= 1
        return found


class LostWrite(PosixTransport):
    def move(self, run: Any) -> Any:
        if run.op is Op.WRITE:
            return [(piece.index, piece.nbytes, None) for piece in run.pieces]
        return super().move(run)


class NoRead(PosixTransport):
    """Says that it read, and did not."""

    def move(self, run: Any) -> Any:
        if run.op is Op.READ:
            return [(piece.index, piece.nbytes, None) for piece in run.pieces]
        return super().move(run)


@pytest.mark.parametrize(
    ("kind", "where"), [(FlippedRead, "bytes read at"), (NoRead, "bytes read at"), (LostWrite, "bytes in the file at")]
)
def test_the_byte_check_finds_what_is_wrong(
    kind: type[PosixTransport], where: str, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(io_ways, "open_transport", lambda name, threads, device: kind(threads))
    with OpenWay("host", file, 2, io_ways.CHECK_BYTES, CPU) as way, pytest.raises(StorageError, match=where):
        io_ways.check(way)


def test_a_lane_raises_the_error_of_a_request(file: Path) -> None:
    with OpenWay("host", file, 2, MIB, CPU) as way, pytest.raises(ShortIOError):
        way.lane().move(Op.READ, [(0, 0), (io_ways.CHECK_BYTES, 4 * KIB)], 4 * KIB)


class Clock:
    """CUDA's streams and events, for copies that are done when the call returns."""

    def __init__(self, *_: object, **__: object) -> None:
        self.at = 0.0

    def record(self, stream: object) -> None:
        import time

        self.at = time.perf_counter()

    def elapsed_time(self, end: Clock) -> float:
        return (end.at - self.at) * 1e3

    def synchronize(self) -> None: ...


def test_host_then_gpu_goes_through_both(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lane that copies, with a GPU that is played by host memory."""
    for name in ("Stream", "Event"):
        monkeypatch.setattr(torch.cuda, name, Clock)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(io_ways, "HostBuffer", lambda nbytes, pin, unit: real(nbytes, "off", unit))
    from gdscache.cuda.host_memory import HostBuffer as real  # noqa: N813

    with OpenWay("host_gpu", file, 2, io_ways.CHECK_BYTES, CPU) as way:
        assert type(way.lane()) is io_ways.CopyingLane
        io_ways.check(way)
        assert way.host is not None
        assert way.gpu is not None
        latencies = way.lane().move(Op.READ, [(0, 0), (MIB, MIB)], 64 * KIB)
        assert len(latencies) == 2
        assert all(0 < seconds < 60 for seconds in latencies)
        way.gpu.zero_()
        monkeypatch.setattr(way, "put", lambda content: None)
        with pytest.raises(StorageError, match="in the file"):  # what is written comes from the GPU, not from the host
            io_ways.check(way)


def test_trials_of_what_hangs_dies_or_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    direct = not files.probe_direct_io(tmp_path)
    assert io_trial.try_way("host", tmp_path, 2, "cpu") == io_trial.Trial("host", word="posix", direct=direct)
    monkeypatch.setattr(io_trial, "_CODE", "import time; time.sleep(600)")
    assert "no answer within 0.5 s" in io_trial.try_way("host", tmp_path, 2, "cpu", 0.5).cause
    monkeypatch.setattr(io_trial, "_CODE", "import os; print('so long', flush=True); os.kill(os.getpid(), 11)")
    assert io_trial.try_way("host", tmp_path, 2, "cpu").cause == "so long (exit status -11)"
    assert not list(tmp_path.iterdir())


def test_a_transport_that_is_missing_is_a_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    path = tmp_path / "t.bin"
    path.write_bytes(bytes(io_ways.CHECK_BYTES))

    def missing(name: str, threads: int, device: object) -> NoReturn:
        raise TransportUnavailableError("nixl cannot be\nimported", "install it")

    monkeypatch.setattr(io_ways, "open_transport", missing)
    monkeypatch.setattr(sys, "argv", ["-c", "nixl_posix", str(path), "1", "cpu"])
    io_trial.main()
    assert capsys.readouterr().out == '\ntrial: {"cause": "nixl cannot be imported"}\n'


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
    io_cache.sync(tmp_path)


@pytest.mark.skipif(not HAS_RAM, reason="no RAM disk at /dev/shm")
def test_a_ram_disk_is_said_to_be_one() -> None:
    import tempfile

    with tempfile.TemporaryDirectory(dir=RAM) as name:
        path = Path(name, "f")
        path.write_bytes(bytes(MIB))
        io_cache.drop([path])
        assert io_cache.state([path], direct=True) == {"state": "memory", "resident_bytes": MIB}


# -- what pages are compared with --------------------------------------------------------------------------------------


def test_a_file_a_page(tmp_path: Path) -> None:
    files = FilePerPage(tmp_path, 8, 64 * KIB)
    returned, on_device = files.write()
    assert returned >= on_device > 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{i:08x}.bin" for i in range(8)]
    assert all(path.read_bytes() == page.tobytes() for path, page in zip(files.files, files.pages, strict=True))
    for threads in (1, 3):
        files._into.fill(1)
        assert files.read(threads) > 0
        files.check()
    files.files[3].write_bytes(bytes(64 * KIB))
    files.read()
    with pytest.raises(IOFailedError, match="other bytes"):
        files.check()
    os.truncate(files.files[3], 4096)
    with pytest.raises(ShortIOError, match="4096 of 65536"):
        files.read()


def test_one_call_a_page(file: Path) -> None:
    memory = memoryview(io_ways.HostBuffer(io_ways.CHECK_BYTES, "off").view)
    with CallPerPage(file, memory, 256 * KIB, 3) as calls:
        assert calls.read() > 0
        assert memory == file.read_bytes()
        os.truncate(file, MIB)
        with pytest.raises(ShortIOError, match="0 of 262144"):
            calls.read()


def fake_kvikio(monkeypatch: pytest.MonkeyPatch, damage: Callable[[Any], object] = lambda view: None) -> dict[str, Any]:
    """A stand-in for the module that reads at once; the settings that it was given."""
    settings: dict[str, Any] = {}

    class CuFile:
        def __init__(self, path: Path, flags: str) -> None:
            self._file = open(path, "rb", buffering=0)  # noqa: SIM115

        def pread(self, view: torch.Tensor, size: int, offset: int) -> Any:
            self._file.seek(offset)
            moved = self._file.readinto(view.numpy().data)
            damage(view)
            return types.SimpleNamespace(get=lambda: moved)

        def close(self) -> None:
            self._file.close()

    defaults = types.SimpleNamespace(set=settings.update)
    module = types.SimpleNamespace(CuFile=CuFile, CompatMode=types.SimpleNamespace(ON="on"), defaults=defaults)
    monkeypatch.setitem(sys.modules, "kvikio", module)
    monkeypatch.setitem(sys.modules, "kvikio.defaults", defaults)
    return settings


def test_kvikio_once_a_page(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = fake_kvikio(monkeypatch)
    memory = torch.zeros(io_ways.CHECK_BYTES, dtype=torch.uint8)
    with KvikioPerPage(file, memory, 256 * KIB, 7) as kvikio:
        assert settings["num_threads"] == 7
        assert settings["compat_mode"] == "on"
        assert kvikio.read() > 0
        kvikio.check()
        memory[-1] ^= 1
        with pytest.raises(IOFailedError, match="other bytes than the file"):
            kvikio.check()
        os.truncate(file, MIB)
        with pytest.raises(ShortIOError):
            kvikio.read()


@pytest.fixture
def cold(tmp_path: Path) -> Iterator[ColdEngine]:
    with ColdEngine(tmp_path, MIB, 6 * MIB, 2, CPU) as engine:
        yield engine


def test_cold_loads_come_from_the_disk(cold: ColdEngine) -> None:
    for load in (cold.load, cold.load_unchecked):
        cold.blank()
        with pytest.raises(IOFailedError, match="other bytes"):
            cold.check()
        assert load() > 0
        cold.check()
    assert cold.copy() > 0
    assert torch.equal(cold.flat(), cold._cpu.extents.rows.view(-1)[: cold.nbytes])


def test_loads_without_checksums_take_none(cold: ColdEngine) -> None:
    """They bring damaged bytes without a word; a load with checksums does not."""
    size = cold.slab.stat().st_size
    cold.slab.write_bytes(bytes(size))
    assert cold.load_unchecked() > 0
    with pytest.raises(IOFailedError, match="were to come from the SSD"):
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
        (row,) = io.io_rows.host_reads(place(tmp_path))
        assert row["transport"] == wanted
        assert row["threads"] in io.io_rows.HOST_THREADS
        assert {r["transport"] for r in io.io_rows.call_per_page(place(tmp_path))} == {wanted}
        assert {r["transport"] for r in io.io_rows.file_per_page(place(tmp_path), MIB)} == {wanted}
        assert {r["transport"] for r in engine_rows.cold_loads(place(tmp_path))} == {wanted}


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
    monkeypatch.setattr(io._Bench, "_parts", lambda self: parts)
    monkeypatch.setattr(io_cells, "cells", lambda *_: [])
    monkeypatch.setattr(io, "cells", lambda *_: [])
    monkeypatch.setattr(io_trial, "try_ways", lambda *_: [])
    monkeypatch.setattr(io_cache, "in_memory", lambda directory: directory.is_relative_to(ram))
    io.run(tmp_path, dataclasses.replace(TINY, threads=None, ram_disk=str(ram)))
    assert seen == [(False, default), (True, max(default, 12))]


def place(directory: Path, nbytes: int = 4 * MIB) -> Place:
    return Place(directory, directory / "io.bin", nbytes, 1, 2, CPU, measure.silent, 5)


def test_loads_from_memory_are_held_against_what_they_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_kvikio(monkeypatch)
    rows = engine_rows.loads_from_memory(place(tmp_path), 256 * KIB)
    assert [r["what"] for r in rows[:4]] == 2 * ["RAM disk → GPU via CPU, 256KiB pages"] + 2 * [
        "RAM disk → GPU via CPU, 256KiB pages that pass the CPU tier by"
    ]
    loop = r"bare loop that copies on{}, 2 threads, \d+ KiB"
    for row, through in ((rows[0], ""), (rows[2], " through 128MiB")):
        assert re.fullmatch(loop.format(through), row["against"])
        assert row["target"] == 0.80
        assert row["against_figure"]["median"] > 0
    assert all(r["against"] == "a page-locked copy" and "target" not in r for r in (rows[1], rows[3]))
    assert [(r["against"], r["target"]) for r in rows[4:]] == [
        ("kvikio, one call a page", 2.0),
        ("kvikio, one call a page", 0.5),
    ]
    assert [r["unit"] for r in rows] == [*["GB/s"] * 5, "CPU s/GiB"]
    assert all((r["transport"], r["threads"]) == (engine_transport(tmp_path), 2) for r in rows)
    rows = engine_rows.loads_from_memory(place(tmp_path), MIB)
    assert [r["target"] for r in rows if "target" in r] == [0.90, 0.90, 0.97]
    assert rows[-1]["against"] == "without checksums"
    assert not list(tmp_path.iterdir())


def test_kvikio_with_wrong_bytes_is_no_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_kvikio(monkeypatch, lambda view: view.fill_(7))
    with pytest.raises(IOFailedError, match="kvikio gave other bytes"):
        engine_rows.loads_from_memory(place(tmp_path), 256 * KIB)


# -- whole runs --------------------------------------------------------------------------------------------------------


@pytest.fixture
def no_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials cost a child each."""
    monkeypatch.setattr(
        io_trial, "try_ways", lambda ways, *_: [io_trial.Trial(name, "", "posix", direct=True) for name in ways]
    )


@pytest.mark.usefixtures("no_trials")
def test_a_run_goes_on_where_a_report_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, kept = tmp_path / "r.json", []
    head = {"schema": io_report.IO_SCHEMA, "machine": machine.describe(tmp_path), "settings": TINY.describe()}

    def keep(found: dict[str, Any]) -> None:
        io.write_json(path, {**head, **found})
        kept.append(json.loads(path.read_text()))

    whole = io.run(tmp_path, TINY, keep=keep)
    assert whole["complete"]
    counts = [len(found["cells"]) for found in kept]
    assert counts == sorted(counts)
    assert set(counts) == set(range(len(whole["cells"]) + 1)), "the file is written after each cell"
    assert kept[-1]["cells"] == whole["cells"]

    def never(*_: object) -> None:
        raise AssertionError("measured again")

    with monkeypatch.context() as patch:
        patch.setattr(io_measure.Matrix, "_cell", never)
        patch.setattr(io_measure.Matrix, "_ceiling", never)
        for part in ("host_reads", "call_per_page", "file_per_page"):
            patch.setattr(io.io_rows, part, never)
        patch.setattr(engine_rows, "cold_loads", never)
        done = io.resumed(path, io_report.IO_SCHEMA, TINY, tmp_path)
        again = io.run(tmp_path, TINY, done=done)
    assert (again["cells"], again["comparisons"]) == (whole["cells"], whole["comparisons"])
    assert again["complete"]

    part = done["comparisons"][0]["part"]
    done["comparisons"] = [r for r in done["comparisons"] if r["part"] != part]
    gone = done["cells"].pop(1)
    mended = io.run(tmp_path, TINY, done=done)
    assert io_cells.key_of(mended["cells"][-1]) == io_cells.key_of(gone)
    assert mended["cells"][-1] != gone
    assert len(mended["cells"]) == len(whole["cells"])
    assert mended["comparisons"][-1]["part"] == part
    assert {p.name for p in tmp_path.iterdir()} == {"r.json"}

    with pytest.raises(InvalidValueError, match="measured with repeat 1, now it is 2"):
        io.resumed(path, io_report.IO_SCHEMA, dataclasses.replace(TINY, repeat=2), tmp_path)
    io.resumed(path, io_report.IO_SCHEMA, dataclasses.replace(TINY, profile="full", ways=("host", "direct")), tmp_path)
    path.write_text(json.dumps({**kept[-1], "machine": {**head["machine"], "cores": 999}}))
    with pytest.raises(InvalidValueError, match="measured with cores 999"):
        io.resumed(path, io_report.IO_SCHEMA, TINY, tmp_path)
    path.write_text('{"schema": "gdscache.bench.copy/1"}')
    with pytest.raises(InvalidValueError, match="no report of bench io"):
        io.resumed(path, io_report.IO_SCHEMA, TINY, tmp_path)


@pytest.fixture
def cells_only(no_trials: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(io._Bench, "_parts", lambda self: [])


@pytest.mark.usefixtures("cells_only")
def test_reads_through_the_page_cache_are_cold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where O_DIRECT is refused, the file is dropped before each run, is read once, and the report says so."""
    for module in (files, bare):
        monkeypatch.setattr(module, "probe_direct_io", lambda directory: "open answers Invalid argument")
    found = io.run(tmp_path, dataclasses.replace(TINY, cell_seconds=60.0))
    assert found["failed"] == []
    expected = "memory" if io_cache.in_memory(tmp_path) else "dropped"
    for cell in found["cells"]:
        assert cell["direct"] is False
        assert cell["cache"]["state"] == expected
        assert cell["bytes"] == TINY.total, "no part is read a second time, when the page cache would have it"
    assert found["ceilings"]["read"]["direct"] is False


@pytest.mark.usefixtures("cells_only")
def test_time_that_is_over_leaves_cells_and_says_so(tmp_path: Path) -> None:
    found = io.run(tmp_path, dataclasses.replace(TINY, budget_seconds=0.0))
    assert found["cells"] == []
    assert found["complete"] is False
    assert found["left"] == len(io_cells.cells("quick", ["host"], TINY.total)) > 0
    tables = io_report.io_tables({**found, "machine": {}})
    assert any("--resume" in str(cell) for table in tables for cell in table.columns[0].cells)


@pytest.mark.usefixtures("cells_only")
def test_one_broken_way_does_not_cost_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Second(OpenWay):
        def __init__(self, name: str, *rest: Any) -> None:
            super().__init__("host", *rest)
            if name == "nixl_posix":
                self.close()
                raise TransportUnavailableError("gone since the trial", "")

    monkeypatch.setattr(io_measure, "OpenWay", Second)
    found = io.run(tmp_path, dataclasses.replace(TINY, ways=("nixl_posix", "host")))
    assert [entry["cause"] for entry in found["failed"]] == ["gone since the trial"]
    assert found["failed"][0]["what"].startswith("NIXL POSIX, read")
    assert {cell["way"] for cell in found["cells"]} == {"host"}
    assert found["left"] == len(io_cells.cells("quick", ["nixl_posix"], TINY.total))
    assert found["complete"] is False
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("cells_only")
def test_ctrl_c_leaves_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls, kept = io_measure.Matrix._cell, [], []

    def interrupted(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(io_measure.Matrix, "_cell", interrupted)
    found = io.run(tmp_path, TINY, keep=lambda found: kept.append(len(found["cells"])))
    assert (found["interrupted"], found["complete"], len(found["cells"])) == (True, False, 2)
    assert kept[-1] == 2
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("cells_only")
@pytest.mark.parametrize("counted", [False, True])
def test_a_cell_without_gds_fails_where_it_is_required(
    counted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    operations = itertools.count()
    monkeypatch.setattr(io_trial, "require_gds", lambda directory: "proven once")
    monkeypatch.setitem(BY_NAME, "host", io_cells.Way("host", "host only", "host", cufile=True))
    monkeypatch.setattr(io_measure, "gds_operations", lambda: (next(operations), 0) if counted else (5, 5))
    found = io.run(tmp_path, dataclasses.replace(TINY, require_gds=True))
    assert found["gds_proof"] == "proven once"
    if counted:
        assert found["failed"] == []
        assert all(cell["nvidia_fs"] == {"reads": 1, "writes": 0} for cell in found["cells"])
    else:
        assert found["cells"] == []
        assert "nvidia-fs counted no I/O" in found["failed"][0]["cause"]


@pytest.mark.usefixtures("no_trials")
def test_a_comparison_that_fails_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(place: Place) -> list[Any]:
        raise GdsCacheError("no luck", "")

    monkeypatch.setattr(
        io._Bench, "_parts", lambda self: [io.Part("a part", broken), io.Part("b", broken, cause="why")]
    )
    found = io.run(tmp_path, TINY)
    assert found["failed"] == [{"what": "a part", "cause": "no luck"}]
    assert {"what": "b", "cause": "why"} in found["cannot"]
    assert found["cells"]


def test_a_report_is_replaced_in_one_step(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    io.write_json(path, {"a": 1})
    assert oct(path.stat().st_mode & 0o777) == "0o644"
    inode = path.stat().st_ino
    path.chmod(0o600)
    io.write_json(path, {"a": 2})
    assert path.stat().st_ino != inode
    assert oct(path.stat().st_mode & 0o777) == "0o600"
    assert json.loads(path.read_text()) == {"a": 2}
    with pytest.raises(TypeError):
        io.write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 2}
    assert [p.name for p in tmp_path.iterdir()] == ["r.json"]
    io.write_json(Path("/dev/null"), {"a": 3})


def test_a_disk_without_room_is_refused(tmp_path: Path) -> None:
    with pytest.raises(GdsCacheError, match="are needed"):
        io.run(tmp_path, dataclasses.replace(TINY, total=1 << 60))
    assert not list(tmp_path.iterdir())


def test_part_of_a_report_can_be_drawn(report: dict[str, Any], tmp_path: Path) -> None:
    none = {**report, "cells": [], "comparisons": [], "ceilings": {}}
    io_plot.io_plot(none, tmp_path / "none.svg")
    assert (tmp_path / "none.svg").stat().st_size


# -- on a GPU ----------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_every_way_on_a_gpu(tmp_path: Path) -> None:
    """Whatever works here is byte-checked and measured; what does not has a cause."""
    settings = dataclasses.replace(Settings.quick(), pages=(256 * KIB,))
    found = io.run(tmp_path, settings)
    assert found["failed"] == []
    words = {way["way"]: way for way in found["ways"]}
    assert words["host_gpu"]["cause"] == ""
    assert {cell["way"] for cell in found["cells"]} == {name for name, way in words.items() if not way["cause"]}
    against = {r["against"] for r in found["comparisons"]}
    if HAS_RAM:
        assert "a page-locked copy" in against
    assert not list(tmp_path.iterdir())
