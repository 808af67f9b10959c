"""Bytes that a transport moves without an engine: what is late keeps its memory until it ends."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

import pytest

from gdscache.errors import DeadlineError
from gdscache.storage.base import Memory, Op
from gdscache.storage.calls import carry
from tests.support.helpers import WAIT, until
from tests.support.posix_transport import PosixTransport


class Hanging(PosixTransport):
    """Reads from the offset 0 hang until `go`, those from 4096 on until `then`."""

    def __init__(self) -> None:
        super().__init__(2)
        self.go, self.then = threading.Event(), threading.Event()

    def read(self, file: int, offset: int, memory: Memory) -> int:
        (self.then if offset else self.go).wait(WAIT)
        return memory.nbytes


def test_what_is_late_gives_its_memory_back_when_all_of_it_has_ended(tmp_path: Path) -> None:
    path, given = tmp_path / "file", threading.Event()
    path.write_bytes(bytes(8192))
    memory = memoryview(bytearray(8192))
    with Hanging() as transport, contextlib.ExitStack() as undo:
        undo.callback(given.set)
        file = transport.open(path)
        pieces = [(file, at, memory[at : at + 4096]) for at in (0, 4096)]
        with pytest.raises(DeadlineError, match=r"within 0\.05 s"):
            carry(transport, Op.READ, pieces, 0.05, undo)
        undo.close()  # as the caller does, who has nothing left to close
        transport.go.set()
        assert not given.wait(0.05)
        transport.then.set()
        until(given.is_set, "the memory is given back")
        undo.callback(given.clear)
        carry(transport, Op.READ, pieces, WAIT, undo)
        assert given.is_set()  # in time: the memory is the caller's to give back
    assert not given.is_set()
