"""A copy beside a model's work: the cost of each to the other, against the cost of a plain copy in its place.

The work is queued again and again on its own stream of normal priority. The copy starts after the work's start and ends
before its end. The copy's time is the host's, from before the call to the last byte. The work's time is that of the
pieces that run wholly between the return of the copy's first call and the copy's end.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional

from gdscache.commands.bench.copy_gpu import Gpu, Timing, Way, timed
from gdscache.commands.bench.measure import paired, rate, series, target, turns
from gdscache.errors import IOFailedError

COPY_TARGET = 0.97
WORK_TARGET = 1.02
SUMS_TARGET = 0.98

LEAD = 3  # pieces of work before the copy begins
LEAST = 8  # least pieces during a copy
HEADS, HEAD_DIM = 32, 128


def compared_rates(nbytes: int, ours: Sequence[float], other: Sequence[float], limit: float) -> dict[str, Any]:
    """The rates of two ways by the seconds of their runs, as plain data. `limit`: the least ratio."""
    found = paired(other, ours)
    return {
        "gb_per_second": series(rate(nbytes, s) for s in ours),
        "against_gb_per_second": series(rate(nbytes, s) for s in other),
        **found,
        **target(found["ratio"], limit, at_least=True),
    }


@dataclasses.dataclass(frozen=True)
class Neighbour:
    """A model's work. `queue` queues one piece of it on the current stream."""

    name: str
    size: int
    queue: Callable[[], object]


def matrix_product(gpu: Gpu, edge: int) -> Neighbour:
    """A bfloat16 product of two matrices of `edge` x `edge`."""
    a, b, out = (torch.randn(edge, edge, dtype=torch.bfloat16, device=gpu.device) for _ in range(3))
    return Neighbour("matrix product", edge, lambda: torch.mm(a, b, out=out))


def attention(gpu: Gpu, tokens: int) -> Neighbour:
    """Causal bfloat16 self-attention of `tokens` tokens: 32 heads of 128."""
    q, k, v = (torch.randn(1, HEADS, tokens, HEAD_DIM, dtype=torch.bfloat16, device=gpu.device) for _ in range(3))
    return Neighbour(
        "attention", tokens, lambda: functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    )  # shape (1, 32, tokens, 128)


@dataclasses.dataclass(frozen=True)
class Together:
    """A run of a copy beside work: the copy, and the mean seconds of a piece of work beside it."""

    copy: Timing
    work_seconds: float
    pieces: int


class Beside:
    """Runs copies beside a neighbour's work. `repeat`: the repeats of a copy that make it last long enough."""

    def __init__(self, gpu: Gpu, neighbour: Neighbour, copy: Callable[[int], Way], least_repeat: int) -> None:
        self.gpu = gpu
        self.neighbour = neighbour
        self.alone_seconds = self._alone()
        gpu.idle()
        once = min(timed(gpu, copy(1)).seconds for _ in range(3))
        self.repeat = max(least_repeat, math.ceil(LEAST * self.alone_seconds / once))
        self._count = LEAD + 2 + math.ceil(2 * self.repeat * once / self.alone_seconds)

    def _alone(self) -> float:
        """Median seconds of a piece that runs alone."""
        self.gpu.idle()
        for _ in range(2):  # the first run includes one-time setup
            marks = self.gpu.busy(self.neighbour.queue, 8)
            self.gpu.wait(marks[-1])
        return statistics.median(self.gpu.seconds(a, b) for a, b in itertools.pairwise(marks))

    def run(self, way: Way) -> Together:
        """Run a way beside the work. Raises `IOFailedError` if the work cannot be made to last."""
        for _ in range(4):
            marks = self.gpu.busy(self.neighbour.queue, self._count)
            self.gpu.wait(marks[LEAD])
            copy = timed(self.gpu, way)
            self.gpu.wait(marks[-1])
            times = [self.gpu.seconds(marks[0], mark) for mark in marks]
            first, end = (self.gpu.seconds(marks[0], mark) for mark in (copy.first, copy.end))
            pieces = [b - a for a, b in itertools.pairwise(times) if a >= first and b <= end]
            if end <= times[-1] and pieces:
                return Together(copy, statistics.mean(pieces), len(pieces))
            self._count *= 2
        raise IOFailedError(
            f"{self.neighbour.name}: {len(pieces)} of {len(marks) - 1} ran beside a copy of {copy.seconds:.4f} s",
            "let nothing else use the GPU, or choose a larger --total",
        )

    def compare(self, ours: Way, other: Way, nbytes: int, pairs: int) -> dict[str, Any]:
        """Two ways in turns, of `nbytes` each: figures of the copies and the work, as plain data."""
        for way in (ours, other):
            self.run(way)
        mine, others = turns(lambda: self.run(ours), lambda: self.run(other), pairs)
        seconds, other_seconds = ([run.copy.seconds for run in runs] for runs in (mine, others))
        worked, other_worked = ([run.work_seconds for run in runs] for runs in (mine, others))
        work = paired(worked, other_worked)
        return {
            "beside": self.neighbour.name,
            "size": self.neighbour.size,
            "bytes": nbytes,
            "copy": compared_rates(nbytes, seconds, other_seconds, COPY_TARGET),
            "work": {
                "seconds": series(worked),
                "against_seconds": series(other_worked),
                "alone_seconds": self.alone_seconds,
                "pieces_beside": min(run.pieces for run in (*mine, *others)),
                **work,
                **target(work["ratio"], WORK_TARGET, at_least=False),
            },
        }
