"""A user's transport in Python: `preadv` and `pwritev` from threads, past the page cache where the system can.

Tests give it a `move` of their own, to fail, to die or to record.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from gdscache.pages.layout import EXTENT_ALIGNMENT
from gdscache.storage.base import Op, failed, host_memory
from gdscache.storage.files import DirectFiles
from gdscache.storage.workers import IORun, QueuedTransport, Result


class PosixTransport(DirectFiles, QueuedTransport):
    """Reads and writes host memory with `threads` threads; files as `DirectFiles` opens them."""

    name = "python"
    memory_kinds = frozenset({"host"})

    def move(self, run: IORun) -> list[Result]:
        pieces = run.pieces
        try:
            moved = _transfer(run.op, run.file, [host_memory(piece.memory) for piece in pieces], run.offset, run.nbytes)
        except (OSError, ValueError, MemoryError) as error:
            if len(pieces) == 1:
                return [(pieces[0].index, 0, failed(run.op.value, self._path(run.file), run.offset, error))]
            # One bad sector must not cost its neighbours.
            return [r for p in pieces for r in self.move(IORun(run.op, run.file, run.submission, [p], p.nbytes))]
        if moved == run.nbytes:
            return [(piece.index, piece.nbytes, None) for piece in pieces]
        end = run.offset + moved
        return [(piece.index, min(max(end - piece.offset, 0), piece.nbytes), None) for piece in pieces]


def _transfer(op: Op, file: int, views: Sequence[memoryview], offset: int, nbytes: int) -> int:
    """Move the bytes of `views`, one after the other, from or to `offset`; fewer only at the end of the file."""
    call = os.preadv if op is Op.READ else os.pwritev
    moved = call(file, views, offset)
    while 0 < moved < nbytes:
        # A continuation must start on a whole sector again; a file that ends within one has no more to give.
        resume = moved // EXTENT_ALIGNMENT * EXTENT_ALIGNMENT
        more = call(file, _skip(views, resume), offset + resume)
        if resume + more <= moved:
            break
        moved = resume + more
    return moved


def _skip(views: Sequence[memoryview], nbytes: int) -> list[memoryview]:
    for at, view in enumerate(views):
        if nbytes < view.nbytes:
            return [view[nbytes:], *views[at + 1 :]]
        nbytes -= view.nbytes
    return []
