"""The transports `uring` and `posix`, when their disk answers with errors, with little, late or never."""

from __future__ import annotations

import errno
import logging
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gdscache.cuda.host_memory import HostBuffer
from gdscache.errors import (
    EngineClosedError,
    InvalidValueError,
    IOFailedError,
    NativeCallError,
    RefusedDiskError,
    ShortIOError,
    ThreadStartError,
    TransportUnavailableError,
)
from gdscache.native import Disk
from gdscache.storage import IORequest, Op, native
from gdscache.storage.native import DEPTH, DEPTH_SMALL, WRITES, NativeTransport
from gdscache.storage.run_batch import SMALL, RunBatch
from tests.support.helpers import WAIT, Host, prompt, until
from tests.support.native_parts import ERROR, HANG, LATE, SHORT, has_ring
from tests.support.transport_parts import FILE_BYTES, SECTOR, FailingTransport, opened, random_bytes, soon


@pytest.fixture(params=["uring", "posix"])
def name(request: pytest.FixtureRequest) -> str:
    if request.param == "uring" and not has_ring():
        pytest.skip("io_uring is not allowed here")
    return str(request.param)


@pytest.fixture
def slab(tmp_path: Path) -> Path:
    path = tmp_path / "slab"
    path.write_bytes(random_bytes(1))
    return path


@pytest.fixture
def buffer() -> Iterator[HostBuffer]:
    with HostBuffer(FILE_BYTES, "off") as made:
        yield made


def apart(file: int, buffer: HostBuffer, count: int, nbytes: int = SECTOR) -> list[IORequest]:
    """Requests that are no neighbours, so that each is a run."""
    return [IORequest(file, 2 * n * nbytes, buffer.view[:nbytes]) for n in range(count)]


# -- errors -----------------------------------------------------------------------------------------------------------


def test_the_memory_of_one_request_harms_no_neighbour(name: str, slab: Path, buffer: HostBuffer) -> None:
    """Memory that may be written from by its flags, and that the kernel cannot read."""
    before = slab.read_bytes()
    buffer.view[:] = random_bytes(2)
    with opened(name, 2) as transport, mmap.mmap(-1, SECTOR, prot=0) as nowhere:
        file = transport.open(slab)
        batch = [IORequest(file, n * SECTOR, buffer.view[n * SECTOR : (n + 1) * SECTOR]) for n in range(32)]
        batch[7] = IORequest(file, 7 * SECTOR, memoryview(nowhere))
        errors = transport.submit(Op.WRITE, batch).wait(soon())
        del batch
    assert [n for n, error in enumerate(errors) if error] == [7]
    assert isinstance(errors[7], IOFailedError)
    assert errors[7].errno == errno.EFAULT
    assert f"offset {7 * SECTOR} of {slab}" in errors[7].message
    wanted = bytearray(before)
    wanted[: 32 * SECTOR] = buffer.view[: 32 * SECTOR]
    wanted[7 * SECTOR : 8 * SECTOR] = before[7 * SECTOR : 8 * SECTOR]
    assert slab.read_bytes() == wanted


def test_an_error_of_a_run_is_each_of_its_requests_own(name: str, slab: Path, buffer: HostBuffer) -> None:
    with FailingTransport(name, [(0, ERROR, errno.EIO)]) as transport:
        file = transport.open(slab)
        batch = [IORequest(file, n * SECTOR, buffer.view[n * SECTOR : (n + 1) * SECTOR]) for n in range(3)]
        batch += [IORequest(file, 9 * SECTOR, buffer.view[:SECTOR])]
        *bad, good = transport.submit(Op.READ, batch).wait(soon())
    assert good is None
    assert [error.errno for error in bad if isinstance(error, IOFailedError)] == [errno.EIO] * 3
    for n, error in enumerate(bad):
        assert f"read at offset {n * SECTOR} of {slab}" in str(error)


def test_bytes_that_are_missing_are_the_last_ones(name: str, slab: Path, buffer: HostBuffer) -> None:
    """Of a run, and of a request that is several runs."""
    with FailingTransport(name, [(0, SHORT, SECTOR + 77), (2, SHORT, 5)]) as transport:
        file = transport.open(slab)
        batch = [IORequest(file, n * SECTOR, buffer.view[n * SECTOR : (n + 1) * SECTOR]) for n in range(3)]
        errors = transport.submit(Op.WRITE, batch).wait(soon())
        assert errors[0] is None
        assert [type(error) for error in errors[1:]] == [ShortIOError] * 2
        assert "moved 77 of 4096 bytes" in str(errors[1])
        assert "moved 0 of 4096 bytes" in str(errors[2])
        [error] = transport.submit(Op.READ, [IORequest(file, 0, buffer.view)]).wait(soon())
        parts = transport.threads  # equal ones
        assert f"moved {FILE_BYTES // parts * (parts - 1) + 5} of {FILE_BYTES} bytes" in str(error)


def test_a_file_that_ends_is_short(name: str, slab: Path, buffer: HostBuffer) -> None:
    with opened(name, 2) as transport:
        file = transport.open(slab)
        os.truncate(slab, 10 * SECTOR + 5)
        [error] = transport.submit(Op.READ, [IORequest(file, 0, buffer.view)]).wait(soon())
    assert isinstance(error, ShortIOError)
    assert f"{10 * SECTOR + 5} of {FILE_BYTES} bytes" in error.message


# -- what is late, or hangs -------------------------------------------------------------------------------------------


def test_a_batch_is_begun_and_ends_while_another_hangs(name: str, slab: Path, buffer: HostBuffer) -> None:
    with FailingTransport(name, [(0, HANG, 0), (1, LATE, 30)]) as transport:
        file = transport.open(slab)
        hangs = transport.submit(Op.READ, apart(file, buffer, 1))
        until(lambda: transport._under_way == 1 and transport._asleep, "it hangs")
        for _ in range(3):
            assert transport.submit(Op.READ, apart(file, buffer, 5)).wait(soon()) == [None] * 5
        assert hangs.pending == 1
        transport.let_go()
        assert hangs.wait(soon()) == [None]


def test_close_waits_for_what_hangs(name: str, slab: Path, buffer: HostBuffer) -> None:
    transport = FailingTransport(name, [(0, HANG, 0)])
    file = transport.open(slab)
    hangs = transport.submit(Op.READ, apart(file, buffer, 1))
    closing = threading.Thread(target=transport.close)
    closing.start()
    until(lambda: transport._closing, "it closes")
    with pytest.raises(EngineClosedError):
        transport.submit(Op.READ, apart(file, buffer, 1))
    closing.join(0.1)
    assert closing.is_alive()
    os.fstat(file)
    transport.let_go()
    assert hangs.wait(soon()) == [None]
    closing.join(20)
    assert not closing.is_alive()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file)


def test_writes_that_hang_leave_room_for_reads(name: str, slab: Path, buffer: HostBuffer) -> None:
    threads = 2
    with FailingTransport(name, [(n, HANG, 0) for n in range(WRITES * threads)], threads) as transport:
        file = transport.open(slab)
        writes = [transport.submit(Op.WRITE, apart(file, buffer, 1)) for _ in range(3 * DEPTH)]
        until(lambda: transport._under_way == WRITES * threads and transport._asleep, "writes are begun")
        with HostBuffer(SECTOR, "off") as other:
            read = transport.submit(Op.READ, [IORequest(file, 5 * SECTOR, other.view)])
            assert read.wait(soon()) == [None]
            assert other.view == slab.read_bytes()[5 * SECTOR : 6 * SECTOR]
        assert all(write.pending for write in writes)
        transport.let_go()
        assert all(write.wait(soon()) == [None] for write in writes)


@pytest.mark.parametrize(("nbytes", "small"), [(SECTOR, True), (SMALL, True), (1 << 20, False)])
def test_the_disk_has_more_of_small_reads(name: str, tmp_path: Path, nbytes: int, small: bool) -> None:
    threads, path = 2, tmp_path / "sparse"
    count = 2 * DEPTH_SMALL * threads
    with path.open("wb") as made:
        made.truncate(2 * count * nbytes)
    with (
        FailingTransport(name, [(n, HANG, 0) for n in range(count)], threads) as transport,
        HostBuffer(nbytes, "off") as memory,
    ):
        file, most = transport.open(path), (DEPTH_SMALL if small else DEPTH) * threads
        batch = transport.submit(Op.READ, apart(file, memory, count, nbytes))
        until(lambda: transport._disk.pending == most, "as many as there is room for")
        assert transport._under_way == most
        transport.let_go()
        assert batch.wait(soon()) == [None] * count


# -- what nobody foresaw -----------------------------------------------------------------------------------------------


def test_an_error_nobody_foresaw_fails_what_waits_and_the_transport_goes_on(
    name: str, slab: Path, buffer: HostBuffer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answer, seen = RunBatch.answer, list[int]()

    def breaks_off(batch: RunBatch, *arguments: Any) -> None:
        seen.append(batch.number)
        if len(seen) == 2:
            raise ValueError("nobody foresaw this")
        answer(batch, *arguments)

    monkeypatch.setattr(RunBatch, "answer", breaks_off)
    with opened(name, 2) as transport:
        file = transport.open(slab)
        first = transport.submit(Op.READ, apart(file, buffer, 1))
        assert first.wait(soon()) == [None]
        batch = transport.submit(Op.WRITE, apart(file, buffer, 3 * DEPTH))
        errors = batch.wait(soon())
        assert len(errors) == 3 * DEPTH
        assert any("unexpected error" in str(error) for error in errors)
        assert transport.submit(Op.READ, apart(file, buffer, 60)).wait(soon()) == [None] * 60
    assert first.wait() == [None]
    assert "nobody foresaw this" in caplog.text


def test_a_broken_disk_fails_what_waits_and_keeps_the_memory_of_what_it_has(
    name: str, slab: Path, buffer: HostBuffer, caplog: pytest.LogCaptureFixture
) -> None:
    broken = threading.Event()

    class BrokenDisk(Disk):
        def reap(self, seconds: float = -1) -> Any:
            if broken.is_set():
                raise NativeCallError("disk_reap: Bad file descriptor", "", errno.EBADF)
            return super().reap(seconds)

    class Broken(FailingTransport):
        disk_type = BrokenDisk

    transport = Broken(name, [(n, HANG, 0) for n in range(DEPTH_SMALL * 2)])
    file = transport.open(slab)
    batch = transport.submit(Op.READ, apart(file, buffer, 100))
    until(lambda: transport._disk.pending == 2 * DEPTH_SMALL, "the disk is full")
    broken.set()
    transport._disk.wake()
    transport._threads[0].join(20)
    assert batch.pending == 2 * DEPTH_SMALL
    assert transport._live[0].memory
    with pytest.raises(EngineClosedError):
        transport.submit(Op.READ, apart(file, buffer, 1))
    transport.close()
    assert "Bad file descriptor" in caplog.text
    transport.let_go()
    transport._disk.close()


@pytest.mark.parametrize(
    ("uring", "code", "error", "hint"),
    [
        (True, errno.EPERM, TransportUnavailableError, "posix"),
        (True, errno.ENOSYS, TransportUnavailableError, "posix"),
        (True, errno.EMFILE, IOFailedError, "ulimit -n"),
        (True, errno.ENOMEM, IOFailedError, "memory"),
        (False, errno.ENFILE, IOFailedError, "ulimit -n"),
        (False, errno.EAGAIN, ThreadStartError, "ulimit -u"),
    ],
)
def test_a_disk_that_cannot_be_had_is_said(
    monkeypatch: pytest.MonkeyPatch, uring: bool, code: int, error: type[Exception], hint: str
) -> None:
    def refused(*_: object) -> None:
        raise RefusedDiskError("the system answers no", "", code)

    monkeypatch.setattr(native, "Disk", refused)
    before = threading.active_count()
    with pytest.raises(error, match="the system answers no") as caught:
        NativeTransport(2, uring=uring)
    assert hint in getattr(caught.value, "hint", "")
    assert threading.active_count() == before


@pytest.mark.parametrize("settings", [{"threads": 0}, {"threads": 1025}, {"threads": 1, "direct_io": "yes"}])
def test_settings_out_of_range_start_no_thread(name: str, settings: dict[str, Any]) -> None:
    tasks, files = len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))
    with pytest.raises(InvalidValueError):
        NativeTransport(**settings, uring=name == "uring")
    assert len(os.listdir("/proc/self/fd")) == files
    until(lambda: len(os.listdir("/proc/self/task")) <= tasks, "threads end")


def test_what_an_executor_needs_of_it(name: str, slab: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), opened(name, 3, "auto") as transport:
        file = transport.open(slab)
        assert (transport.threads, transport.uring, transport.name) == (3, name == "uring", name)
        assert os.path.samestat(os.fstat(file), slab.stat())
        assert transport.describe()["threads"] == 3


def test_it_flushes_files_whose_bytes_somebody_else_moves(name: str, slab: Path) -> None:
    with opened(name, 1, "auto") as transport:
        file = transport.open(slab)
        transport.hand_over()
        transport.flush(file)
    with pytest.raises(EngineClosedError, match="was closed"):
        transport.flush(file)


@pytest.mark.parametrize("cpu", [None, 8])
def test_pages_survive_a_loss_of_power_with_it(
    name: str, open_host: Callable[..., Host], tmp_path: Path, cpu: int | None
) -> None:
    host = open_host(tmp_path / "cache", cpu=cpu, transport=name, ssd_options={"durability": "power"})
    report = host.store(prompt(1, 4)).result(WAIT)
    assert not report.dropped
    assert all("ssd" in tiers for tiers in report.tiers)
