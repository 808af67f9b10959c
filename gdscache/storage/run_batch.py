"""What one submit asked of a native disk: requests as runs of neighbouring pieces, and their answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from gdscache.arrays import Int64Array, integers
from gdscache.errors import IOFailedError
from gdscache.native import cut_and_merge, error_of
from gdscache.storage.base import FileRange, Op, Submission, failed
from gdscache.storage.workers import Result, run_bytes

TAG_BITS = 32  # of a tag that are the run's number within its batch; those above are the batch's
SMALL = 512 << 10  # bytes of a small read's run


class RunBatch:
    """A batch cut into runs, for `ways` that move one at a time. A piece is (part of) a request. One thread owns it.

    `memory` is kept until the last piece has ended. `next` is the first run that is not begun. `pending`: pieces that
    have not ended. `small`: reads of few bytes.
    """

    def __init__(
        self,
        op: Op,
        spans: Sequence[FileRange],
        sizes: Sequence[int],
        memory: Sequence[object],
        rows: Int64Array,
        ways: int,
    ) -> None:
        """`spans`, `sizes`: of all requests. `rows`: int64 (requests that can be done, 5): index, descriptor, offset,
        address, bytes."""
        parts, runs = cut_and_merge(integers(rows[:, 1:]), run_bytes(int(rows[:, 4].sum()), ways))
        self.op = op
        self.memory = memory
        self.fragments: npt.NDArray[np.uint64] = parts[:, :2].astype(np.uint64)
        self.number, self.next, self.pending = 0, 0, len(parts)
        self.small = op is Op.READ and int(rows[:, 4].sum()) <= SMALL * len(runs)
        self._index: Int64Array = rows[parts[:, 2], 0]  # of each piece: whose it is,
        self._sizes = parts[:, 1]
        self._starts = np.concatenate([[0], np.cumsum(self._sizes)])  # bytes of the batch before it,
        self._told = np.zeros(len(parts), np.bool_)  # and whether it was answered for
        self._whole = len(parts) == len(rows)  # each request is one piece
        self._files, self._offsets, self._firsts, self._left = (runs[:, column].copy() for column in range(4))
        counts = np.bincount(self._index, minlength=len(spans))
        self.submission = Submission(op, spans, np.maximum(counts, 1).tolist(), sizes)

    def __len__(self) -> int:
        return len(self._firsts)

    def table(self, runs: slice) -> Int64Array:
        """Runs that are not begun, as a disk takes them. Threads of its own copy the bytes: the submit never does."""
        pieces = np.empty((runs.stop - runs.start, 7), np.int64)
        pieces[:, 0] = (self.number << TAG_BITS) + np.arange(runs.start, runs.stop)
        pieces[:, 1] = self.op is Op.WRITE
        for column, values in enumerate((self._files, self._offsets, self._firsts, self._left), 2):
            pieces[:, column] = values[runs]
        pieces[:, 6] = 1
        return pieces

    def count(self, ended: Int64Array) -> int:
        """Count pieces that have ended (rows of `Disk.reap`). How many runs are over with them."""
        runs, counts = _runs(ended), ended[:, 2]
        self.pending -= int(counts.sum())
        if (self._left[runs] == counts).all():  # whole runs, as nearly always
            self._left[runs] = 0
            return len(runs)
        np.subtract.at(self._left, runs, counts)
        return int(np.count_nonzero(self._left[np.unique(runs)] == 0))

    def answer(self, ended: Int64Array, path_of: Callable[[int], str]) -> None:
        """Tell the submission about them. `path_of` a descriptor is for messages."""
        runs, counts, errors, moved = _runs(ended), ended[:, 2], ended[:, 3], ended[:, 4]
        firsts = self._firsts[runs] + ended[:, 1]
        good = (errors == 0) & (moved == self._starts[firsts + counts] - self._starts[firsts])
        everything = _spread(firsts, counts)
        all_good = bool(good.all())
        pieces = everything if all_good else _spread(firsts[good], counts[good])
        index = self._index[pieces].tolist()
        results: list[Result] = []
        if not (whole := self._whole and all_good):
            results += [(n, size, None) for n, size in zip(index, self._sizes[pieces].tolist(), strict=True)]
            for row in np.flatnonzero(~good).tolist():
                some = range(int(firsts[row]), int(firsts[row] + counts[row]))
                results += self._odd(int(runs[row]), some, int(errors[row]), int(moved[row]), path_of)
        if not self.pending:
            self.memory = []  # who is told that requests have ended may count on nothing here holding their memory
        self._told[everything] = True
        if whole:
            self.submission.finish_whole(index)
        else:
            self.submission.finish(results)

    def fail(self, cause: IOFailedError, *, begun: bool) -> None:
        """What was not answered for has failed. `begun`: what was begun, too; nothing touches its memory any more."""
        left = np.flatnonzero(~self._told)
        if begun:
            self.memory = []
        else:
            left = left[left >= np.append(self._firsts, len(self._index))[self.next]]
        self._told[left] = True
        self.submission.finish([(index, 0, cause) for index in self._index[left].tolist()])

    def _odd(self, run: int, pieces: range, error: int, moved: int, path_of: Callable[[int], str]) -> list[Result]:
        """Neighbouring pieces that failed, or that lack bytes: the last ones do."""
        results: list[Result] = []
        for piece in pieces:
            nbytes, cause = min(moved, int(self._sizes[piece])), None
            moved -= nbytes
            if error:
                offset = int(self._offsets[run] + self._starts[piece] - self._starts[self._firsts[run]])
                path = path_of(int(self._files[run]))
                cause = failed(self.op.value, path, offset, error_of(error))
            results.append((int(self._index[piece]), nbytes, cause))
        return results


def _runs(ended: Int64Array) -> Int64Array:
    runs: Int64Array = ended[:, 0] & ((1 << TAG_BITS) - 1)
    return runs


def _spread(firsts: Int64Array, counts: Int64Array) -> Int64Array:
    """`counts` numbers from each of `firsts` on."""
    if not len(counts) or counts.max() == 1:
        return firsts
    spread: Int64Array = np.arange(counts.sum()) + np.repeat(firsts - np.cumsum(counts) + counts, counts)
    return spread
