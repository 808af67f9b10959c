"""The transport `uring` where the kernel answers as it seldom does: with little, with errors, or not at all."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import random
import resource
import select
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transport_parts import soon

from gdscache.errors import EngineClosedError, IOFailedError, ShortIOError, TransportUnavailableError
from gdscache.memory import HostBuffer
from gdscache.storage import IORequest, Op, ring, uring
from gdscache.storage.ring import READ, Ring
from gdscache.storage.uring import UringTransport

SECTOR = 4096
FILE_BYTES = 64 * SECTOR


@pytest.fixture(autouse=True)
def _there() -> None:
    try:
        Ring(2, 1).close()
    except TransportUnavailableError as error:
        pytest.skip(error.message)


class BentRing(Ring):
    """Shortens or replaces answers: `bend` gets each one, and what was asked for."""

    def __init__(self, entries: int, workers: int) -> None:
        super().__init__(entries, workers)
        self.asked: dict[int, tuple[int, int]] = {}  # user data -> offset, length
        self.bend = lambda offset, length, answer: answer
        self.seen: list[tuple[int, int]] = []

    def put(
        self, opcodes: Any, files: Any, offsets: Any, addresses: Any, lengths: Any, user_data: Any, **more: Any
    ) -> None:
        super().put(opcodes, files, offsets, addresses, lengths, user_data, **more)
        places = zip(*(np.broadcast_to(n, len(user_data)).tolist() for n in (offsets, lengths)), strict=True)
        self.asked.update(zip(user_data.tolist(), places, strict=True))

    def take(self) -> tuple[Any, Any]:
        numbers, answers = super().take()
        for at, (user_data, answer) in enumerate(zip(numbers.tolist(), answers.tolist(), strict=True)):
            if user_data:
                self.seen.append(self.asked[user_data])
                answers[at] = self.bend(*self.asked[user_data], answer)
        return numbers, answers


@pytest.fixture
def transport(monkeypatch: pytest.MonkeyPatch) -> Iterator[UringTransport]:
    monkeypatch.setattr(uring, "Ring", BentRing)
    with UringTransport(2, "off") as made:
        yield made


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "slab"
    path.write_bytes(random.Random(5).randbytes(FILE_BYTES))
    return path


def rest(transport: UringTransport) -> BentRing:
    bent = transport._ring
    assert isinstance(bent, BentRing)
    return bent


def test_what_is_short_goes_on_from_a_whole_sector(transport: UringTransport, data: Path) -> None:
    file = transport.open(data)
    bent = rest(transport)
    bent.seen.clear()
    bent.bend = lambda offset, length, answer: min(answer, 3 * SECTOR + 77)
    with HostBuffer(FILE_BYTES, "off") as memory:
        assert transport.submit(Op.READ, [IORequest(file, 0, memory.view)]).wait(soon()) == [None]
        assert memory.view == data.read_bytes()
    assert [offset // SECTOR for offset, _ in bent.seen] == [*range(0, 63, 3), 63]


def test_a_short_run_of_several_requests_is_tried_one_by_one(transport: UringTransport, data: Path) -> None:
    file, content = transport.open(data), data.read_bytes()
    bent = rest(transport)
    bad = 5 * SECTOR
    with HostBuffer(FILE_BYTES, "off") as memory:
        places = [(7 * n) % 64 for n in range(64)]  # neighbours in the file, not in memory: one run
        batch = [IORequest(file, n * SECTOR, memory.view[p * SECTOR : (p + 1) * SECTOR]) for n, p in enumerate(places)]
        bent.bend = lambda offset, length, answer: -errno.EIO if offset == bad or length == 64 else answer
        errors = transport.submit(Op.READ, batch).wait(soon())
        assert [n for n, error in enumerate(errors) if error is not None] == [5]
        assert isinstance(errors[5], IOFailedError)
        assert errors[5].errno == errno.EIO
        assert str(data) in errors[5].message
        for n, p in enumerate(places):
            if n != 5:
                assert memory.view[p * SECTOR : (p + 1) * SECTOR] == content[n * SECTOR : (n + 1) * SECTOR]


def test_an_interrupted_request_is_tried_again(transport: UringTransport, data: Path) -> None:
    file = transport.open(data)
    bent, left = rest(transport), [-errno.EAGAIN, -errno.EINTR, -errno.EAGAIN]
    bent.bend = lambda offset, length, answer: left.pop() if left else answer
    with HostBuffer(FILE_BYTES, "off") as memory:
        assert transport.submit(Op.READ, [IORequest(file, 0, memory.view)]).wait(soon()) == [None]
        assert memory.view == data.read_bytes()
    assert not left


def test_a_file_that_ends_is_short(transport: UringTransport, data: Path) -> None:
    file = transport.open(data)
    os.truncate(data, 10 * SECTOR + 5)
    with HostBuffer(FILE_BYTES, "off") as memory:
        [error] = transport.submit(Op.READ, [IORequest(file, 0, memory.view)]).wait(soon())
        assert isinstance(error, ShortIOError)
        assert f"{10 * SECTOR + 5} of {FILE_BYTES} bytes" in error.message


def test_a_batch_is_begun_while_another_waits(transport: UringTransport, tmp_path: Path, data: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    end = os.open(fifo, os.O_RDWR)
    slow, file = transport.open(fifo), transport.open(data)
    try:
        with HostBuffer(FILE_BYTES, "off") as memory, HostBuffer(SECTOR, "off") as other:
            waits = transport.submit(Op.READ, [IORequest(slow, 0, other.view)])
            time.sleep(0.05)  # the thread sleeps in the ring now
            assert transport.submit(Op.READ, [IORequest(file, 0, memory.view)]).wait(soon()) == [None]
            assert waits.pending == 1
            os.write(end, bytes(SECTOR))
            assert waits.wait(soon()) == [None]
    finally:
        os.close(end)


def test_writes_that_hang_leave_room_for_reads(transport: UringTransport, tmp_path: Path, data: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    end = os.open(fifo, os.O_RDWR | os.O_NONBLOCK)
    full = fcntl.fcntl(end, fcntl.F_SETPIPE_SZ, SECTOR)
    os.write(end, bytes(full))
    stuck, file = transport.open(fifo), transport.open(data)
    try:
        with HostBuffer(FILE_BYTES, "off") as memory, HostBuffer(SECTOR, "off") as other:
            writes = [transport.submit(Op.WRITE, [IORequest(stuck, 0, other.view)]) for _ in range(2 * transport._most)]
            time.sleep(0.05)
            read = transport.submit(Op.READ, [IORequest(file, 0, memory.view)])
            try:
                assert read.wait(soon()) == [None]
                assert memory.view == data.read_bytes()
                assert all(write.pending for write in writes)
            finally:  # let all of them end, or the transport never closes
                while any(write.pending for write in writes):
                    select.select([end], [], [], 1)
                    with contextlib.suppress(BlockingIOError):
                        os.read(end, full)
            assert all(write.wait(soon()) == [None] for write in writes)
    finally:
        os.close(end)


@pytest.mark.parametrize(("nbytes", "small"), [(SECTOR, True), (512 << 10, True), (1 << 20, False)])
def test_small_reads_are_more_in_flight(transport: UringTransport, tmp_path: Path, nbytes: int, small: bool) -> None:
    """No neighbours, so that each is a run. What is in flight has a limit, and small reads make use of the larger."""
    most = transport._most_small if small else transport._most
    path, count, seen = tmp_path / "sparse", 2 * transport._most_small, list[int]()
    with path.open("wb") as made:
        made.truncate(2 * count * nbytes)
    file, enter = transport.open(path), transport._ring.enter

    def counted(wait: int, seconds: float | None = None) -> None:
        seen.append(transport._flying)
        enter(wait, seconds)

    transport._ring.enter = counted  # type: ignore[method-assign]
    with HostBuffer(nbytes, "off") as memory:
        batch = [IORequest(file, 2 * n * nbytes, memory.view) for n in range(count)]
        assert transport.submit(Op.READ, batch).wait(soon()) == [None] * count
    assert max(seen) == most


def test_an_error_nobody_foresaw_fails_what_waits(transport: UringTransport, data: Path) -> None:
    file = transport.open(data)

    def broken(wait: int) -> None:
        raise OSError(errno.EBADF, "broken")

    failures: list[threading.ExceptHookArgs] = []
    before, threading.excepthook = threading.excepthook, failures.append
    try:
        transport._ring.enter = broken  # type: ignore[method-assign]
        with HostBuffer(FILE_BYTES, "off") as memory:
            batch = [
                IORequest(file, n * SECTOR, memory.view[n * SECTOR : (n + 1) * SECTOR]) for n in range(0, 64, 2)
            ] * 2
            submission = transport.submit(Op.READ, batch)
            transport._threads[0].join(10)
            assert submission.pending <= transport._most_small < 64  # those that the kernel has; what waited has failed
            with pytest.raises(EngineClosedError):
                transport.submit(Op.READ, batch)
    finally:
        threading.excepthook = before
    assert len(failures) == 1


def test_a_kernel_that_reads_wrong_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(BentRing):
        def take(self) -> tuple[Any, Any]:
            numbers, answers = super().take()
            return numbers, answers - 1

    monkeypatch.setattr(uring, "Ring", Wrong)
    files = len(os.listdir("/proc/self/fd"))
    with pytest.raises(TransportUnavailableError, match="other bytes"):
        UringTransport(2)
    assert len(os.listdir("/proc/self/fd")) == files


def test_another_processor_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring.platform, "machine", lambda: "aarch64")
    with pytest.raises(TransportUnavailableError, match="aarch64"):
        Ring(4, 1)


def test_a_ring_goes_round(tmp_path: Path, data: Path) -> None:
    content, small = data.read_bytes(), Ring(2, 2)
    file = os.open(data, os.O_RDONLY)
    with HostBuffer(SECTOR, "off") as memory:
        for n in range(200):
            small.put(READ, file, n % 64 * SECTOR, memory.address, SECTOR, np.array([n]))
            small.enter(1)
            numbers, answers = small.take()
            assert (numbers.tolist(), answers.tolist()) == ([n], [SECTOR])
            assert memory.view == content[n % 64 * SECTOR : (n % 64 + 1) * SECTOR]
    os.close(file)
    small.close()


def test_a_process_without_descriptors_is_told_and_loses_none(monkeypatch: pytest.MonkeyPatch) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held: list[int] = []
    refusals: list[IOFailedError] = []
    try:
        used = len(os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 8, hard))
        with contextlib.suppress(OSError):
            while True:
                held.append(os.open("/dev/null", os.O_RDONLY))
        for free in range(5):
            if free:
                os.close(held.pop())
            before = len(held)
            try:
                UringTransport(1).close()
            except IOFailedError as error:
                refusals.append(error)
            spare = []
            with contextlib.suppress(OSError):
                while True:
                    spare.append(os.open("/dev/null", os.O_RDONLY))
            for file in spare:
                os.close(file)
            assert (len(held), len(spare)) == (before, free)
        assert {(error.errno, "ulimit" in error.hint) for error in refusals} == {(errno.EMFILE, True)}
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for file in held:
            os.close(file)
