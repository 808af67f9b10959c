"""Waits with a limit for calls that may hang, and moves of bytes by a transport without an engine."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Literal, TypeVar

from gdscache.arrays import integers
from gdscache.errors import DeadlineError, ShortIOError
from gdscache.native import error_of, move_pieces
from gdscache.runtime.threads import start
from gdscache.storage.base import Memory, Op, Transport, address_of, failed
from gdscache.storage.files import NativeTransport

PROC_MODULES = "/proc/modules"
CALL_S = 60.0  # seconds for a call into cuFile, or into a library above it
_T = TypeVar("_T")
Piece = tuple[int, int, Memory]  # a file's handle, the offset in it, the memory


def begin(name: str, work: Callable[[], _T]) -> Future[_T]:
    """Run `work()` in a daemon thread, which does not delay the end of the process."""
    done: Future[_T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised by the future's `result`
            done.set_exception(error)

    start([threading.Thread(target=run, name=name, daemon=True)], lambda: None)
    return done


def within(name: str, work: Callable[[], _T], late: str, hint: str, seconds: float | None = None) -> _T:
    """The result of `work()`, run as in `begin`. Raises `DeadlineError` after `seconds`, by default `CALL_S`, which
    says `late` and `hint`, and the errors of `work`."""
    end, limit = begin(name, work), CALL_S if seconds is None else seconds
    if not wait([end], limit).done:
        raise DeadlineError(f"{late} within {limit:g} s", hint)
    return end.result()


def cufile_hangs() -> str:
    """Why cuFile would never answer here, as its versions 1.16 to 1.20 do; an empty string if it may answer."""
    return "" if os.path.exists(PROC_MODULES) else f"cuFile never answers on a kernel without {PROC_MODULES}"


def carry(
    transport: Transport,
    op: Op,
    pieces: Iterable[Piece],
    seconds: float | None = None,
    memory: contextlib.ExitStack | None = None,
) -> None:
    """Move pieces as an engine does: by a disk of the library if the transport is its own, else by the transport's
    number of threads.

    Raises the first error; `ShortIOError`; `DeadlineError` if a call has not ended in time: its memory must stay then.
    `memory` releases the memory. Where a call outlives this one, by its lateness or any error, it is taken over, and
    closed at the call's end.
    """
    left, lock, stopped = iter(pieces), threading.Lock(), threading.Event()
    call = transport.read if op is Op.READ else transport.write

    def take() -> Piece | None:
        with lock:
            return None if stopped.is_set() else next(left, None)

    def run() -> None:
        while (piece := take()) is not None:
            _check(op, piece, call(*piece))

    if isinstance(transport, NativeTransport) and transport.is_own:
        works: list[Callable[[], None]] = [functools.partial(_by_disk, transport, op, list(left))]
    else:
        works = [run] * transport.threads
    until = None if seconds is None else time.monotonic() + seconds
    ends: list[Future[None]] = []
    try:
        for n, work in enumerate(works):
            ends.append(begin(f"gdscache-{transport.name}-{n}", work))
        wait(ends, seconds, FIRST_EXCEPTION)
        stopped.set()
        wait(ends, None if until is None else max(0.0, until - time.monotonic()))
    finally:  # also where a thread cannot be started, or a wait is interrupted
        stopped.set()
        if late := [end for end in ends if not end.done()]:
            kept = contextlib.ExitStack() if memory is None else memory.pop_all()
            for end in late:
                end.add_done_callback(lambda _: kept.close() if all(other.done() for other in late) else None)
    if late:
        raise DeadlineError(
            f"{op.value}s have not ended within {seconds:g} s", "the device is slow or hangs; its memory stays in use"
        )
    for end in ends:
        end.result()


def _by_disk(transport: NativeTransport, op: Op, pieces: Sequence[Piece]) -> None:
    kind: Literal["ring", "threads"] = "ring" if transport.uring else "threads"
    rows = integers([(file, offset, address_of(memory), memory.nbytes) for file, offset, memory in pieces])
    answers = move_pieces(
        kind,
        transport.threads,
        rows.reshape(-1, 4),
        write=op is Op.WRITE,
        copied=not transport.direct,
        cufile=transport.cufile,
    )
    for piece, (code, moved) in zip(pieces, answers.tolist(), strict=True):
        file, offset, _ = piece
        if code:
            raise failed(op.value, transport.path(file), offset, error_of(code))
        _check(op, piece, moved)


def _check(op: Op, piece: Piece, moved: int) -> None:
    _, offset, memory = piece
    if moved != memory.nbytes:
        message = f"{op.value} moved {moved} of {memory.nbytes} bytes at offset {offset}"
        raise ShortIOError(message, "the file is shorter than that, or the file system is full")
