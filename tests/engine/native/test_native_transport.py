"""A transport of Python's as what threads of the library call (csrc/host/bind/disk.cc)."""

from __future__ import annotations

import errno
import logging
import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gdscache.arrays import integers
from gdscache.errors import EngineClosedError, IOFailedError
from gdscache.native import move_pieces
from gdscache.storage.base import Memory, address_of
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
    """A file of a transport, and memory, both of eight sectors."""

    def __init__(self, folder: Path, transport: Told) -> None:
        self.content = np.random.default_rng(0).integers(0, 256, 8 * SECTOR, np.uint8).tobytes()
        self.path = folder / "file"
        self.path.write_bytes(self.content)
        self.transport = transport
        self.file = transport.open(self.path)
        self.memory = memoryview(mmap.mmap(-1, 8 * SECTOR))

    def move(self, sectors: list[int], *, write: bool = False) -> list[list[int]]:
        """Move the first sectors of the file, which lie at these in memory. The error and the bytes of each."""
        at = address_of(self.memory)
        rows = integers([(self.file, n * SECTOR, at + sector * SECTOR, SECTOR) for n, sector in enumerate(sectors)])
        found: list[list[int]] = move_pieces(
            "threads", 2, rows, write=write, copied=False, transport=self.transport
        ).tolist()
        return found


GOOD = [0, SECTOR]


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path, Told())


def test_bytes_move_and_neighbours_in_memory_are_one_call(rig: Rig) -> None:
    assert rig.move([0, 1, 2, 5, 6, 4]) == [GOOD] * 6
    assert rig.transport.calls == [(0, 3 * SECTOR), (3 * SECTOR, 2 * SECTOR), (5 * SECTOR, SECTOR)]
    parts = [rig.memory[n * SECTOR : (n + 1) * SECTOR] for n in (0, 1, 2, 5, 6, 4)]
    assert b"".join(parts) == rig.content[: 6 * SECTOR]
    assert rig.move([7, 7], write=True) == [GOOD] * 2
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
    assert rig.move([0]) == [[code, 0]]
    assert not caplog.records


@pytest.mark.parametrize("answer", [-1, SECTOR + 1, None, "all", KeyError("x")])
def test_what_makes_no_sense_is_logged_and_an_error(rig: Rig, caplog: pytest.LogCaptureFixture, answer: Any) -> None:
    def answered(memory: memoryview) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    rig.transport.first = answered
    with caplog.at_level(logging.ERROR):
        assert rig.move([0]) == [[errno.EIO, 0]]
    [record] = caplog.records
    assert record.exc_info is not None


def test_a_short_read_goes_on_and_a_failed_one_is_tried_again_page_by_page(rig: Rig) -> None:
    rig.transport.first = lambda memory: rig.transport.read(rig.file, 0, memory[:SECTOR])
    assert rig.move([0, 1, 2]) == [GOOD] * 3
    assert rig.memory[: 3 * SECTOR] == rig.content[: 3 * SECTOR]


def test_who_keeps_the_memory_has_none(rig: Rig) -> None:
    kept: list[memoryview] = []
    rig.transport.first = lambda memory: kept.append(memory) or memory.nbytes  # type: ignore[func-returns-value]
    assert rig.move([0]) == [GOOD]
    with pytest.raises(ValueError, match="released"):
        kept[0][0]
