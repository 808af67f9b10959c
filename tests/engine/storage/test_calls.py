"""Bytes that a transport moves without an engine: by what moves them in one, and what is late keeps its memory."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest

from gdscache.errors import DeadlineError, IOFailedError, ShortIOError, ThreadStartError
from gdscache.storage import calls
from gdscache.storage.base import Memory, Op
from gdscache.storage.calls import carry
from gdscache.storage.files import NativeTransport
from tests.support.helpers import WAIT, until
from tests.support.native_parts import has_ring
from tests.support.posix_transport import PosixTransport

PIECE = 1 << 16


@pytest.fixture(params=[False, True], ids=["posix", "uring"])
def own(request: pytest.FixtureRequest) -> Iterator[NativeTransport]:
    if request.param and not has_ring():
        pytest.skip("no io_uring here")
    with NativeTransport(3, uring=request.param) as transport:
        yield transport


def test_what_is_the_library_s_own_is_moved_as_in_an_engine(
    own: NativeTransport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    move = calls.move_pieces
    monkeypatch.setattr(
        calls, "move_pieces", lambda kind, *rest, **how: (made.append(kind), move(kind, *rest, **how))[1]
    )
    monkeypatch.setattr(NativeTransport, "_move", lambda *_: pytest.fail("a call in Python"))
    path = tmp_path / "file"
    path.write_bytes(bytes(PIECE * 9))
    memory = memoryview(mmap.mmap(-1, PIECE * 9))
    memory[:] = content = os.urandom(PIECE * 9)
    file = own.open(path)
    pieces = [(file, at, memory[at : at + PIECE]) for at in range(0, PIECE * 9, PIECE)]
    carry(own, Op.WRITE, pieces, WAIT)
    assert path.read_bytes() == content
    memory[:] = bytes(PIECE * 9)
    carry(own, Op.READ, pieces, WAIT)
    assert memory == content
    carry(own, Op.READ, [], WAIT)
    with pytest.raises(ShortIOError, match=f"read moved 0 of {PIECE} bytes at offset {PIECE * 9}"):
        carry(own, Op.READ, [(file, PIECE * 9, memory[:PIECE])], WAIT)
    with path.open("wb") as other:
        os.dup2(other.fileno(), file)
    with pytest.raises(IOFailedError, match=f"read at offset {PIECE} of {path}") as caught:
        carry(own, Op.READ, [(file, PIECE, memory[:PIECE])], WAIT)
    assert caught.value.errno == errno.EBADF
    assert set(made) == {"ring" if own.uring else "threads"}


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


@pytest.mark.parametrize("error", [ThreadStartError("no more threads", "raise the limit"), KeyboardInterrupt()])
def test_what_runs_keeps_its_memory_where_its_caller_breaks_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """A thread that cannot be started, or an interrupt: the threads before still read into the memory."""
    path, given, begin = tmp_path / "file", threading.Event(), calls.begin
    path.write_bytes(bytes(8192))
    memory = memoryview(bytearray(8192))

    def refuses(name: str, work: Callable[[], None]) -> Future[None]:
        if name.endswith("1"):
            raise error
        return begin(name, work)

    monkeypatch.setattr(calls, "begin", refuses)
    with Hanging() as transport, contextlib.ExitStack() as undo:
        undo.callback(given.set)
        file = transport.open(path)
        pieces = [(file, at, memory[at : at + 4096]) for at in (0, 4096)]
        with pytest.raises(type(error)):
            carry(transport, Op.READ, pieces, WAIT, undo)
        undo.close()
        assert not given.wait(0.05)
        transport.go.set()
        until(given.is_set, "the memory is given back, and no further piece begins")
