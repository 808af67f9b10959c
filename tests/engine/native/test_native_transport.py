"""A transport of Python's as what threads of the library call (csrc/host/bind/disk.cc)."""

from __future__ import annotations

import errno
import gc
import logging
import mmap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gdscache.arrays import integers
from gdscache.errors import EngineClosedError, IOFailedError
from gdscache.native import Disk
from gdscache.storage.base import Memory, address_of
from tests.support.helpers import WAIT
from tests.support.hooks import hooks
from tests.support.posix_transport import PosixTransport

SECTOR = 4096


class Told(PosixTransport):
    """Does what it is told to in place of its first read."""

    def __init__(self, threads: int = 2) -> None:
        super().__init__(threads, "off")
        self.first: Callable[[memoryview], int] | None = None
        self.calls: list[tuple[int, int]] = []

    def read(self, file: int, offset: int, memory: Memory) -> int:
        assert isinstance(memory, memoryview)
        assert not memory.readonly
        self.calls.append((offset, memory.nbytes))
        first, self.first = self.first, None
        return super().read(file, offset, memory) if first is None else first(memory)

    def write(self, file: int, offset: int, memory: Memory) -> int:
        assert isinstance(memory, memoryview)
        assert memory.readonly
        return super().write(file, offset, memory)


class Rig:
    """A disk of a transport, a file, and memory, all of eight sectors."""

    def __init__(self, folder: Path, transport: Told) -> None:
        self.content = np.random.default_rng(0).integers(0, 256, 8 * SECTOR, np.uint8).tobytes()
        self.path = folder / "file"
        self.path.write_bytes(self.content)
        self.transport = transport
        self.file = transport.open(self.path)
        self.memory = memoryview(mmap.mmap(-1, 8 * SECTOR))
        self.disk = Disk("threads", transport.threads, 0, transport=transport)
        self._kept: list[Any] = []

    def submit(self, sectors: list[int], op: int = 0) -> None:
        """A piece of the first sectors of the file, which lie at these in memory."""
        at = address_of(self.memory)
        fragments = np.array([(at + sector * SECTOR, SECTOR) for sector in sectors], np.uint64)
        self._kept.append(fragments)
        self.disk.submit(integers([(7, op, self.file, 0, 0, len(sectors), 0)]).reshape(1, 7), fragments)

    def ended(self) -> list[tuple[int, int, int, int]]:
        """(first fragment, fragments, error, bytes) of all answers."""
        found: list[tuple[int, int, int, int]] = []
        while hooks.disk_pending(self.disk):
            found += [(first, count, error, moved) for _, first, count, error, moved in self.disk.reap(WAIT).tolist()]
        return sorted(found)


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path, Told())


def test_bytes_move_and_neighbours_in_memory_are_one_call(rig: Rig) -> None:
    rig.submit([0, 1, 2, 5, 6, 4])
    assert rig.ended() == [(0, 6, 0, 6 * SECTOR)]
    assert rig.transport.calls == [(0, 3 * SECTOR), (3 * SECTOR, 2 * SECTOR), (5 * SECTOR, SECTOR)]
    parts = [rig.memory[n * SECTOR : (n + 1) * SECTOR] for n in (0, 1, 2, 5, 6, 4)]
    assert b"".join(parts) == rig.content[: 6 * SECTOR]
    rig.submit([7, 7], op=1)
    assert rig.ended() == [(0, 2, 0, 2 * SECTOR)]
    assert rig.path.read_bytes()[: 2 * SECTOR] == bytes(2 * SECTOR)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (OSError(errno.ENOSPC, "full"), errno.ENOSPC),
        (IOFailedError("no", "", errno.ENODEV), errno.ENODEV),
        (EngineClosedError("closed"), errno.EIO),
        (InterruptedError(errno.EINTR, "again"), errno.EIO),
    ],
)
def test_an_error_has_its_errno(rig: Rig, caplog: pytest.LogCaptureFixture, error: Exception, code: int) -> None:
    def fail(memory: memoryview) -> int:
        raise error

    rig.transport.first = fail
    rig.submit([0])
    assert rig.ended() == [(0, 1, code, 0)]
    assert not caplog.records


@pytest.mark.parametrize("answer", [-1, SECTOR + 1, None, "all", KeyError("x")])
def test_what_makes_no_sense_is_logged_and_an_error(rig: Rig, caplog: pytest.LogCaptureFixture, answer: Any) -> None:
    def answered(memory: memoryview) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    rig.transport.first = answered
    with caplog.at_level(logging.ERROR):
        rig.submit([0])
        assert rig.ended() == [(0, 1, errno.EIO, 0)]
    [record] = caplog.records
    assert record.exc_info is not None


def test_a_short_read_goes_on_and_a_failed_one_is_tried_again_page_by_page(rig: Rig) -> None:
    rig.transport.first = lambda memory: rig.transport.read(rig.file, 0, memory[:SECTOR])
    rig.submit([0, 1, 2])
    assert rig.ended() == [(0, 1, 0, SECTOR), (1, 1, 0, SECTOR), (2, 1, 0, SECTOR)]
    assert rig.memory[: 3 * SECTOR] == rig.content[: 3 * SECTOR]


def test_who_keeps_the_memory_has_none(rig: Rig) -> None:
    kept: list[memoryview] = []
    rig.transport.first = lambda memory: kept.append(memory) or memory.nbytes  # type: ignore[func-returns-value]
    rig.submit([0])
    assert rig.ended() == [(0, 1, 0, SECTOR)]
    with pytest.raises(ValueError, match="released"):
        kept[0][0]


def test_nobody_who_ends_a_disk_keeps_the_lock_from_its_threads(rig: Rig) -> None:
    begun, go = threading.Event(), threading.Event()

    def hang(memory: memoryview) -> int:
        begun.set()
        go.wait(WAIT)
        return memory.nbytes

    for end in (lambda: rig.disk.close(), lambda: delattr(rig, "disk")):
        rig.transport.first = hang
        begun.clear()
        go.clear()
        rig.submit([0])
        assert begun.wait(WAIT)
        threading.Timer(0.2, go.set).start()
        end()
        gc.collect()
        assert go.is_set()
        rig.disk = Disk("threads", 2, 0, transport=rig.transport)
