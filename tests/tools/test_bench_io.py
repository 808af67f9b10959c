"""`gdscache bench io`: what it measures, that it looks at the bytes, that it goes on where it was ended."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gdscache import errors
from gdscache.commands import console
from gdscache.commands.bench import io, machine
from gdscache.commands.bench.io import BENCH, ColdEngine, Place, Settings
from gdscache.config import SsdConfig
from gdscache.storage import files, open_transport
from gdscache.storage.base import Op
from tests.support.fault_plan import Fault
from tests.support.faulty import PLAN
from tests.support.pages import FAULTY
from tests.support.terminal import on_terminal
from tests.support.transport_parts import refuse_ring

pytestmark = pytest.mark.suite

MIB = 1 << 20
CPU = torch.device("cpu")
TINY = Settings.of(quick=True, repeat=1)
RAM = Path("/dev/shm")
HAS_RAM = RAM.is_dir() and os.access(RAM, os.W_OK) and machine.in_memory(RAM)


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A quick run: its directory, and what a terminal of 80 columns showed."""
    path = tmp_path_factory.mktemp("io")
    line = "-W", "error", "-m", "gdscache", "bench", "io", "--quick", "--all", "--dir", str(path)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("CUDA_VISIBLE_DEVICES", "")
        status, shown = on_terminal([*line, "--report", str(path / "r.json"), "--plot", str(path / "r.svg")])
    assert status == 0, shown
    return path, shown


@pytest.fixture(scope="module")
def report(quick: tuple[Path, str]) -> dict[str, Any]:
    found = json.loads((quick[0] / "r.json").read_text())
    return found


def test_every_transport_is_measured_or_listed_with_its_cause(report: dict[str, Any]) -> None:
    assert report["schema"] == "gdscache.bench.io/5"
    assert (report["complete"], report["left"], report["failed"]) == (True, [], [])
    listed = {entry["what"]: entry["cause"] for entry in report["cannot"]}
    measured = {row["case"] for row in report["comparisons"]}
    assert listed["packed loads, 8MiB pages"] == "torch sees no CUDA device"
    for transport in io.TRANSPORTS:
        cases = [f"stores and loads, {transport}, {size}MiB pages" for size in (4, 1)]
        assert [case in measured for case in cases] == [case not in listed for case in cases]
    assert "stores and loads, posix, 4MiB pages" in measured
    for row in report["comparisons"]:
        assert len(row["figure"]["values"]) == len(row["against_figure"]["values"]) == report["settings"]["repeat"]
        words = row["what"].split(", ")
        assert row["transport"] == (words[1] if len(words) == 3 else engine_transport(Path()))


def test_comparisons_say_what_they_are_held_against(report: dict[str, Any]) -> None:
    rows = report["comparisons"]
    assert not any("target" in r for r in rows), "--quick judges nothing"
    assert {r["threads"] for r in rows} == {report["settings"]["threads"]}
    for r in rows:
        assert r["against"].startswith("bare loop, ")
        assert r["ratio"] == pytest.approx(r["figure"]["median"] / r["against_figure"]["median"])


def test_people_get_whole_tables_and_the_directory_back(quick: tuple[Path, str], report: dict[str, Any]) -> None:
    path, shown = quick
    assert {p.name for p in path.iterdir()} == {"r.json", "r.svg"}
    assert max(map(len, shown.splitlines())) <= 80
    assert "…" not in shown
    for words in ("This cache", "Cannot be measured here", "no CUDA device"):
        assert words in shown
    assert not {"met:", "MISSED:", "Failed"} & set(shown.split())
    for row in report["comparisons"]:
        assert console.figure(row["ratio"]) in shown, row["what"]
    assert (path / "r.svg").read_text().count("<!-- store, 4MiB pages -->") == 1


def test_people_get_what_it_comes_to(quick: tuple[Path, str], report: dict[str, Any]) -> None:
    """Of the transport that an engine chooses by itself."""
    _, shown = quick
    [said] = io.bottom(report)
    assert " ".join(shown.split()).endswith(said)
    for what, words in (("cold load", "loads"), ("store", "stores")):
        own = [r for r in report["comparisons"] if r["what"] in (f"{what}, 4MiB pages", f"{what}, 1MiB pages")]
        assert f"{console.figure(max(r['figure']['median'] for r in own))} GB/s of {words}" in said
    assert io.bottom({**report, "comparisons": []}) == []
    usual = [line for table in BENCH.tables(report) for line in table.lines(80)]
    assert len(usual) < 60


def test_gds_that_is_required_is_proven_or_fails(tmp_path: Path) -> None:
    found = BENCH.run(dataclasses.replace(TINY, transports=("cufile",), require_gds=True), tmp_path)
    assert not list(tmp_path.iterdir())
    if torch.cuda.is_available():
        pytest.skip("a GPU may have GPUDirect Storage")
    assert [row["what"] for row in found["failed"]] == [f"stores and loads, cufile, {size}MiB pages" for size in (4, 1)]
    assert all(row["cause"].startswith("--require-gds: ") for row in found["failed"])
    assert len(found["comparisons"]) == 4, "other transports prove nothing and are measured"


@pytest.mark.usefixtures("one_way")
def test_gds_that_no_counter_saw_is_no_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a transport to host memory in the place of one that is proven."""
    monkeypatch.setattr(io, "GDS", ("posix",))
    counters = iter([(5, 5), (5, 5), (5, 5), (6, 6)])
    monkeypatch.setattr(io, "gds_operations", lambda: next(counters))
    plain = io.ColdEngine
    monkeypatch.setattr(io, "ColdEngine", lambda place, size, ssd: plain(place, size, {**ssd, "gds": "off"}))
    with pytest.raises(errors.IOFailedError, match="nvidia-fs counted no I/O"):
        io.stores_and_loads(place(tmp_path), MIB, "posix", require_gds=True)
    assert io.stores_and_loads(place(tmp_path), MIB, "posix", require_gds=True)


def test_what_is_dropped_is_gone_and_what_is_not_is_said(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(bytes(4 * MIB))
    if machine.in_memory(tmp_path):
        pytest.skip("the temporary directory is a RAM disk: nothing can be dropped there")
    assert machine.resident_bytes(path) == 4 * MIB
    assert machine.cache_state(path, direct=False) == {"state": "kept", "resident_bytes": 4 * MIB}
    machine.drop_cached([path])
    assert machine.cache_state(path, direct=False) == {"state": "dropped", "resident_bytes": 0}
    assert machine.cache_state(path, direct=True)["state"] == "bypassed"
    with path.open("rb") as file:
        file.read(4096)
    assert machine.cache_state(path, direct=False)["state"] == "kept"


@pytest.mark.skipif(not HAS_RAM, reason="no RAM disk at /dev/shm")
def test_a_ram_disk_is_said_to_be_one() -> None:
    with tempfile.NamedTemporaryFile(dir=RAM) as file:
        file.write(bytes(MIB))
        file.flush()
        machine.drop_cached([Path(file.name)])
        assert machine.cache_state(Path(file.name), direct=True) == {"state": "memory", "resident_bytes": MIB}


@pytest.fixture
def cold(tmp_path: Path) -> Iterator[ColdEngine]:
    with contextlib.closing(ColdEngine(place(tmp_path, 6 * MIB), MIB)) as engine:
        yield engine


@pytest.fixture
def one_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(io.BareLoop, "scout", lambda *_: [io.Way(2, MIB)])


def place(directory: Path, nbytes: int = 4 * MIB) -> Place:
    return Place(directory, nbytes, 1, 2, CPU)


def test_cold_loads_come_from_the_disk(cold: ColdEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cold.load() > 0
    assert cold.copy() > 0
    cold.check()
    monkeypatch.setattr(cold, "load", lambda: 1.0)
    with pytest.raises(errors.IOFailedError, match="other bytes"):
        cold.check()


def test_a_load_of_damaged_pages_is_no_figure(cold: ColdEngine) -> None:
    cold.slab.write_bytes(bytes(cold.slab.stat().st_size))
    with pytest.raises(errors.IOFailedError, match="were to come from the ssd tier"):
        cold.load()


def test_a_transport_that_hangs_ends_with_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind its probe, in a write or in a read."""
    monkeypatch.setattr(io, "PATIENCE_S", 0.5)
    with PLAN.rule(Op.WRITE, Fault.HANG), pytest.raises(errors.IOFailedError, match="reached the SSD; pages: deadline"):
        ColdEngine(place(tmp_path), MIB, {"transport": FAULTY})
    with contextlib.closing(ColdEngine(place(tmp_path), MIB, {"transport": FAULTY})) as engine:
        hangs, late = PLAN.rule(Op.READ, Fault.HANG), pytest.raises(errors.IOFailedError, match="pages: deadline")
        with hangs, late:
            engine.load()


@pytest.mark.usefixtures("one_way")
def test_reads_through_the_page_cache_are_cold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where O_DIRECT is refused, the slab is dropped before each load and bare read, and the report says so."""
    for module in (files, io):
        monkeypatch.setattr(module, "probe_direct_io", lambda directory: "open answers Invalid argument")
    dropped: list[int] = []
    drop = machine.drop_cached
    monkeypatch.setattr(machine, "drop_cached", lambda paths: dropped.append(1) or drop(paths))
    found = io.stores_and_loads(place(tmp_path), MIB)
    assert {row["cache"]["state"] for row in found} == {"memory" if machine.in_memory(tmp_path) else "dropped"}
    assert len(dropped) == 3  # before the load that counts, the bare loop's, and the check


def test_the_bare_loops_bytes_are_not_taken_for_the_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop writes the last page of a total that is no multiple of 4 MiB only in parts of 1 MiB."""
    monkeypatch.setattr(io.BareLoop, "scout", lambda _, op, *__: [io.Way(2, 4 * MIB if op is Op.READ else MIB)])
    assert io.stores_and_loads(place(tmp_path, 5 * MIB), MIB)


def engine_transport(directory: Path) -> str:
    """What `auto` opens for the engines that are measured."""
    with open_transport("auto", directory=directory, device="cpu", threads=1, direct_io="auto", gds="off") as found:
        return found.name


@pytest.mark.usefixtures("one_way")
def test_without_io_uring_it_measures_threads_as_an_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_ring(monkeypatch)
    assert {r["transport"] for r in io.stores_and_loads(place(tmp_path), MIB)} == {"posix"}


@pytest.mark.usefixtures("one_way")
@pytest.mark.parametrize(
    ("mib", "memory", "transport", "targets"),
    [
        (4, False, "", [0.92, 0.85]),
        (1, False, "", [0.88, 0.78]),
        (1, False, "posix", [None, None]),
        (1, True, "", [None, None]),
    ],
)
def test_targets_are_those_of_a_disk(
    mib: int, memory: bool, transport: str, targets: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "in_memory", lambda directory: memory)
    rows = io.stores_and_loads(place(tmp_path), mib * MIB, transport)
    assert [row.get("target") for row in rows] == targets
    assert all(row["met"] is (row["ratio"] >= row["target"]) for row in rows if "target" in row)


def test_threads_are_the_engine_s_and_more_on_a_ram_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    default = int(SsdConfig.model_fields["threads"].default)
    seen: list[int] = []
    monkeypatch.setattr(io, "stores_and_loads", lambda place, **_: seen.append(place.threads) or [])
    for given, memory in ((None, False), (None, True), (3, True)):
        monkeypatch.setattr(machine, "in_memory", lambda directory, memory=memory: memory)
        BENCH.run(dataclasses.replace(TINY, threads=given), tmp_path)
    assert seen == [default, default, max(default, 12), max(default, 12), 3, 3]


def test_packed_loads_are_held_against_unpacked_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "in_memory", lambda directory: True)
    rows = io.packed_loads(place(tmp_path), MIB)
    assert [r["against"] for r in rows] == ["unpacked", "a page-locked copy"] * 3
    assert [r.get("target") for r in rows] == [1.25, 1.18, 1.20, None, 1.20, None]


def test_a_disk_without_room_is_refused(tmp_path: Path) -> None:
    with pytest.raises(errors.CapacityError, match=r"are needed\n .*--dir, or lower --total"):
        BENCH.run(dataclasses.replace(TINY, total=1 << 60), tmp_path)
    assert not list(tmp_path.iterdir())


def test_packed_pages_of_a_small_total(tmp_path: Path) -> None:
    """As `--quick` measures them on a GPU: a few pages, and slots for those that cannot be packed."""
    rows = io.packed_loads(Place(tmp_path, 16 * MIB, 1, 2, CPU))
    assert {row["against"] for row in rows} == {"a page-locked copy", "unpacked"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_every_transport_on_a_gpu(tmp_path: Path) -> None:
    """Whatever works here is byte-checked and measured; what does not has a cause."""
    found = BENCH.run(Settings.of(quick=True, everything=True), tmp_path)
    assert found["failed"] == []
    assert found["complete"]
    assert {"a page-locked copy", "unpacked"} <= {r["against"] for r in found["comparisons"]}
    assert not list(tmp_path.iterdir())
