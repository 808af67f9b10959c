import errno
import importlib.util
import logging
import os
import subprocess
import sys
import threading
import time
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gdscache.errors import IOFailedError, TransportUnavailableError
from gdscache.storage import Transport, calls, open_transport, probe
from gdscache.storage.base import Op
from gdscache.storage.files import DirectFiles, NativeTransport, find_mount
from tests.support.posix_transport import PosixTransport
from tests.support.transport_parts import has_libcuda, refuse_ring

# The factory.


def opened(tmp_path: Path, transport: str = "auto", device: str = "cpu", gds: str = "auto") -> Transport:
    return open_transport(transport, directory=tmp_path, device=device, threads=1, direct_io="auto", gds=gds)


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str, str]]:
    """What each cuFile transport from now on is made of: threads, direct I/O, and the driver of a GPU."""
    made: list[tuple[int, str, str]] = []

    def make(threads: int, direct_io: str, gpu: str) -> Transport:
        made.append((threads, direct_io, gpu))
        return NativeTransport(1, uring=False, name="cufile")

    monkeypatch.setattr("gdscache.storage.cufile.CufileTransport", make)
    monkeypatch.setattr("gdscache.cuda.driver.Driver", lambda device: f"driver of {device}")
    return made


@pytest.mark.parametrize("transport", ["auto", "posix"])
@pytest.mark.parametrize("gds", ["auto", "off"])
def test_cpu_gets_posix_and_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, transport: str, gds: str
) -> None:
    with caplog.at_level(logging.INFO, "gdscache.storage"), opened(tmp_path, transport, gds=gds) as chosen:
        assert isinstance(chosen, DirectFiles)
    assert len(caplog.records) == 1
    assert f"transport {chosen.name}" in caplog.text
    assert "io_uring" in caplog.text if transport == "auto" else chosen.name == "posix"


def test_auto_takes_threads_where_io_uring_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_ring(monkeypatch)
    with caplog.at_level(logging.INFO, "gdscache.storage"), opened(tmp_path) as chosen:
        assert chosen.name == "posix"
    assert "no io_uring: io_uring_setup answers Operation not permitted" in caplog.text
    with pytest.raises(TransportUnavailableError, match="Operation not permitted") as caught:
        opened(tmp_path, "uring")
    assert "posix" in caught.value.hint


def test_auto_takes_threads_for_files_in_memory(caplog: pytest.LogCaptureFixture) -> None:
    memory = Path("/dev/shm")
    if find_mount(memory).file_system != "tmpfs":
        pytest.skip("no RAM disk at /dev/shm")
    with caplog.at_level(logging.INFO, "gdscache.storage"), opened(memory) as chosen:
        assert chosen.name == "posix"
    assert "files of tmpfs" in caplog.text


@pytest.mark.parametrize("transport", ["auto", "posix", "cufile", "kvikio", "nixl", "some.module:Class"])
def test_gds_on_without_gds_is_refused(tmp_path: Path, transport: str) -> None:
    with pytest.raises(TransportUnavailableError) as caught:
        opened(tmp_path, transport, gds="on")
    assert "gds" in caught.value.hint
    assert ("ssd.transport" in caught.value.hint) is (transport in ("posix", "some.module:Class"))


@pytest.mark.parametrize(("mode", "ok"), [("compat", True), ("posix", False)])
def test_auto_takes_cufile_for_proven_gds_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, ok: bool
) -> None:
    monkeypatch.setattr(probe, "no_gds_driver", lambda: "")
    monkeypatch.setattr(probe, "probe", lambda *_: probe.ProbeResult(ok, mode, "because"))
    with opened(tmp_path, device="cuda:0") as chosen:
        assert chosen.name in ("uring", "posix")
    for transport in ("auto", "cufile", "kvikio"):
        with pytest.raises(TransportUnavailableError, match="because"):
            opened(tmp_path, transport, device="cuda:0", gds="on")
    if not ok:
        for transport in ("cufile", "kvikio"):
            with pytest.raises(TransportUnavailableError, match=f"{transport} does not work.*because"):
                opened(tmp_path, transport, device="cuda:0")
    monkeypatch.setattr(probe, "probe", lambda *_: pytest.fail("gds is off: nothing to probe"))
    with opened(tmp_path, device="cuda:0", gds="off") as chosen:
        assert chosen.name in ("uring", "posix")


def test_a_disk_too_full_to_probe_is_read_without_gds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be full of our own slab."""

    def full(*_: object) -> probe.ProbeResult:
        raise IOFailedError("no space left", "free some", errno.ENOSPC)

    monkeypatch.setattr(probe, "no_gds_driver", lambda: "")
    monkeypatch.setattr(probe, "probe", full)
    with opened(tmp_path, device="cuda:0") as chosen:
        assert chosen.name in ("uring", "posix")
    for transport, gds in (("auto", "on"), ("cufile", "auto")):
        with pytest.raises(IOFailedError, match="no space left"):
            opened(tmp_path, transport, device="cuda:0", gds=gds)


def test_without_the_driver_nothing_is_probed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "no_gds_driver", lambda: "no driver")
    monkeypatch.setattr(probe, "probe", lambda *_: pytest.fail("nothing could prove it"))
    with opened(tmp_path, device="cuda:0") as chosen:
        assert chosen.name in ("uring", "posix")
    for transport in ("auto", "cufile"):
        with pytest.raises(TransportUnavailableError, match="no driver"):
            opened(tmp_path, transport, device="cuda:0", gds="on")


@pytest.mark.parametrize("transport", ["auto", "cufile"])
def test_cufile_is_opened_where_gds_is_proven(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transport: str) -> None:
    monkeypatch.setattr(probe, "no_gds_driver", lambda: "")
    seen: list[tuple[str, Path, int]] = []

    def proven(name: str, directory: Path, index: int) -> probe.ProbeResult:
        seen.append((name, directory, index))
        return probe.ProbeResult(True, "gds", "counted")

    monkeypatch.setattr(probe, "probe", proven)
    made = recorded(monkeypatch)
    for gds in ("auto", "on"):
        with opened(tmp_path, transport, device="cuda:3", gds=gds) as chosen:
            assert chosen.name == "cufile"
    assert seen == [("cufile", tmp_path, 3)] * 2
    assert made == [(1, "auto", "driver of cuda:3")] * 2


def test_cufile_by_name_takes_any_path_that_brings_the_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its own compat mode, or P2PDMA, whose I/O nothing counts; and memory of the host alone where GDS is off."""
    made = recorded(monkeypatch)
    monkeypatch.setattr(probe, "no_gds_driver", lambda: "no driver")
    monkeypatch.setattr(probe, "probe", lambda *_: probe.ProbeResult(True, "compat", "not counted"))
    with caplog.at_level(logging.INFO, "gdscache.storage"):
        for device, gds in (("cuda:1", "auto"), ("cuda:1", "off"), ("cpu", "auto"), ("cpu", "off")):
            opened(tmp_path, "cufile", device, gds).close()
    assert [gpu for _, _, gpu in made] == ["driver of cuda:1"]
    causes = ["no GPUDirect Storage: not counted", "gds is off", "the device is cpu", "the device is cpu"]
    assert [cause in record.getMessage() for cause, record in zip(causes, caplog.records, strict=True)] == [True] * 4


@pytest.mark.skipif(has_libcuda(), reason="needs a machine without a CUDA driver")
@pytest.mark.parametrize(
    ("name", "device", "cause"), [("cufile", "cuda:0", "CUDA driver"), ("kvikio", "cpu", "libcuda")]
)
def test_without_a_driver_is_a_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, device: str, cause: str
) -> None:
    monkeypatch.setattr(probe, "probe", lambda *_: probe.ProbeResult(True, "compat", "not counted"))
    before = threading.active_count()
    with pytest.raises(TransportUnavailableError, match=cause) as caught:
        opened(tmp_path, name, device)
    assert "posix" in caught.value.hint
    assert threading.active_count() == before


class Own(PosixTransport):
    pass


class Narrow(PosixTransport):
    def __init__(self, depth: int) -> None:
        super().__init__(depth)


class Unfinished(Transport):
    name = "unfinished"


def test_a_class_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("users_module")
    module.Own, module.Narrow, module.Unfinished, module.other = Own, Narrow, Unfinished, dict  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "users_module", module)
    with opened(tmp_path, "users_module:Own") as chosen:
        assert isinstance(chosen, Own)
        assert (chosen.threads, chosen.direct_io) == (1, "auto")
    for target, cause in [
        ("users_module:Missing", "no subclass"),
        ("users_module:other", "no subclass"),
        ("users_module:Unfinished", "write"),
        ("users_module:Narrow", "keywords"),
        ("no_such_module_at_all:Own", "cannot be imported"),
    ]:
        with pytest.raises(TransportUnavailableError, match=cause):
            opened(tmp_path, target)
    with pytest.raises(TransportUnavailableError, match="'nvme'"):
        opened(tmp_path, "nvme")


@pytest.mark.suite
def test_imports_take_in_what_is_chosen_only() -> None:
    code = """if True:
        import sys, gdscache.storage
        names = ("cufile", "gds", "kvikio", "native", "nixl", "probe")
        chosen = {"kvikio", "nixl", *(f"gdscache.storage.{name}" for name in names)}
        assert not chosen & set(sys.modules)
        import gdscache.cuda.host_memory, torch
        assert not torch.cuda.is_initialized() and "kvikio" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# The probe.


def test_a_trial_registers_one_memory(tmp_path: Path) -> None:
    """kvikio registers allocations, torch puts small tensors into one, and cuFile takes none twice: of two memories,
    the second was refused, and so GPUDirect Storage was."""
    known = list[Any]()

    class Registering(NativeTransport):
        def register(self, memory: Any) -> None:
            known.append(memory)

        def deregister(self, memory: Any) -> None:
            known.remove(memory)

        def _move(self, op: Op, file: int, offset: int, memory: Any) -> int:
            assert len(known) == 1
            return super()._move(op, file, offset, memory)

    with Registering(2, "auto", uring=False) as transport:
        probe.write_and_read(transport, tmp_path / "trial", "cpu", 3 << 20)
    assert not known


def test_a_child_that_hangs_is_killed(tmp_path: Path) -> None:
    mark = tmp_path / "pid"
    code = "import os, sys, time\nopen(sys.argv[1], 'w').write(str(os.getpid()))\nwhile True: time.sleep(1)"
    begun = time.monotonic()
    ended = probe.run_child(code, [str(mark)], 1.0)
    assert (ended.status, ended.cause) == (None, "no answer within 1 s: killed")
    assert time.monotonic() - begun < 10
    with pytest.raises(ProcessLookupError):
        os.kill(int(mark.read_text()), 0)


def test_what_a_child_says() -> None:
    ended = probe.run_child("print('fine')", [], 20)
    assert (ended.status, ended.cause, ended.lines) == (0, "", ["fine"])
    for code, cause in (
        ("import sys; sys.exit('bytes differ')", "bytes differ (exit status 1)"),
        ("1/0", "ZeroDivisionError: division by zero (exit status 1)"),
        ("import os; os.kill(os.getpid(), 9)", "no message (exit status -9)"),
    ):
        assert probe.run_child(code, [], 20).cause == cause


NVFS = """GDS Version: 1.7.0.149
NVFS statistics(ver: 4.0)
IO stats: Enabled, peer IO stats: Enabled
Reads				: n={reads} ok={reads} err=0 readMiB=4 io_state_err=0
Reads				: Bandwidth(MiB/s)=0 Avg-Latency(usec)=0
Writes				: n={writes} ok={writes} err=0 writeMiB=4 io_state_err=0 pg-cache=0
"""


@pytest.mark.parametrize(
    ("refusals", "counted", "want"),
    [
        ({"off": ""}, (4, 4), "gds"),
        ({"off": ""}, (0, 0), "compat"),
        ({"off": ""}, (4, 0), "compat"),
        ({"off": "error 5027", "on": ""}, (4, 4), "compat"),
        ({"off": "no answer", "on": "no libcuda"}, (0, 0), "posix"),
    ],
)
def test_only_counted_io_proves_gds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusals: dict[str, str], counted: tuple[int, int], want: str
) -> None:
    stats = tmp_path / "stats"
    stats.write_text(NVFS.format(reads=10, writes=20))
    there = tmp_path / "modules"
    there.touch()
    folder = tmp_path / "cache"
    folder.mkdir()

    def child(code: str, arguments: list[str], deadline_s: float) -> SimpleNamespace:
        assert Path(arguments[0]).parent == folder
        stats.write_text(NVFS.format(reads=10 + counted[0], writes=20 + counted[1]))
        return SimpleNamespace(cause=refusals[arguments[3]])

    monkeypatch.setattr(probe, "NVIDIA_FS_STATS", stats)
    monkeypatch.setattr(calls, "PROC_MODULES", there)
    monkeypatch.setattr(probe, "run_child", child)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)  # kvikio is installed
    result = probe.probe("kvikio", folder, 0)
    assert result.mode == want
    assert result.ok == (want != "posix")
    for refusal in refusals.values():
        assert refusal in result.reason
    assert not list(folder.iterdir())


def test_cufile_is_not_asked_without_proc_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(calls, "PROC_MODULES", tmp_path / "missing")

    def child(code: str, arguments: list[str], deadline_s: float) -> SimpleNamespace:
        asked.append(arguments[3])
        return SimpleNamespace(cause="")

    monkeypatch.setattr(probe, "run_child", child)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)  # kvikio is installed
    assert probe.probe("kvikio", tmp_path, 0).mode == "compat"
    assert asked == ["on"]


def test_probe_without_kvikio_or_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert probe.probe("kvikio", tmp_path, 0) == probe.ProbeResult(False, "posix", "kvikio is not installed")
    with pytest.raises(IOFailedError) as caught:
        probe.probe("cufile", tmp_path / "missing", 0)
    assert caught.value.errno == errno.ENOENT
