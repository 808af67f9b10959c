"""An eviction order whose pages stay as long as pages of their class are worth it, learned from the traffic."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from typing import ClassVar, Self

import numpy as np
import numpy.typing as npt

from gdscache.native import LifetimeOrder
from gdscache.policies.reuse import Classes, ReuseMonitor


class Lifetime(LifetimeOrder):
    """Earliest deadline first: each use gives a page the lifetime of its class anew.

    A page that was not used yet belongs to the class of the page that its prefix branched off from (none, or one of 1,
    2 to 3, 4 to 7, 8 uses) and of the pages that were stored with it (up to 3, 15, 63, more): a new conversation behind
    a system prompt that all use, the next turn of one, and a long document that somebody asks about are told apart so.
    A page that was used belongs to the class of its uses (1, 2 to 3, 4 to 7, 8 or more) and of the time since the last
    one (up to 1/8, 1/4, 1/2, 1, 2 periods, more). All classes with one lifetime are LRU; which lifetimes pay is what
    `ReuseMonitor` finds. Time is counted in stored pages: a period is as many as are present, and has `STEPS` steps.

    There are two lifetimes a class, and a page has one of them by its lot, which is drawn by its key, or taken over
    from the page that it follows: what is worth keeping only in part is kept in part, as a round of documents that is
    larger than the tier (after Beckmann and Sanchez: Talus, HPCA 2015).

    Uses are remembered beyond eviction in a table of 16 cells a page, in which a page overwrites what was in its cell.
    What is known of a page is lost at a restart; only the order of the last uses is not: restored pages go first, the
    least recently used first, until they are used again.
    """

    CLASSES = Classes(*LifetimeOrder.SHAPE)
    monitor: ClassVar[type[ReuseMonitor]] = ReuseMonitor

    def __init__(self) -> None:
        super().__init__()
        self.restore((), ())

    def empty(self) -> Self:
        return type(self)()

    def restore(self, keys: Sequence[bytes], order: Sequence[int] | npt.NDArray[np.int64]) -> None:
        monitor = self.monitor(self.CLASSES, len(order))
        self.begin(keys, order, monitor.sample, partial(_learn, monitor))

    def __iter__(self) -> Iterator[bytes]:
        return chain.from_iterable(iter(self.walk(), []))


def _learn(monitor: ReuseMonitor, pages: int, stored: int) -> tuple[int, list[int], list[int]] | None:
    """Other lifetimes, in steps, where the monitor comes to a conclusion; and the lots that have the second ones."""
    found = monitor.learn(pages, stored)
    if found is None:
        return None
    step = pages / Lifetime.STEPS
    less, more = ([int(age / step) for age in ages] for ages in (found.less, found.more))
    return round(Lifetime.LOTS * found.share), less, more
