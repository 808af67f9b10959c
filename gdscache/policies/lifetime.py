"""An eviction order that gives pages the lifetime of their class, learned from the traffic."""

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

    The class of an unused page depends on the uses of the page that its prefix branched off from (none, or one of 1, 2
    to 3, 4 to 7, 8 uses), and on the number of pages stored with it (up to 3, 15, 63, more). So a new conversation
    behind a common system prompt, the next turn of a conversation, and a long document have different classes. The
    class of a used page depends on its uses (1, 2 to 3, 4 to 7, 8 or more) and on the time since the last one (up to
    1/8, 1/4, 1/2, 1, 2 periods, more). With one lifetime for all classes the order is LRU; `ReuseMonitor` finds the
    best lifetimes. Time is counted in stored pages: a period is the number of present pages, and has `STEPS` steps.

    A class has two lifetimes. A page gets one of them by its lot, which is drawn by its key, or taken over from the
    page that it follows: so a class can be kept in part, such as a round of documents that is larger than the tier
    (after Beckmann and Sanchez: Talus, HPCA 2015).

    Uses are remembered beyond eviction in a table of 16 cells a page, in which a page overwrites the last page of its
    cell. A restart only keeps the order of the last uses: restored pages go first, the least recently used first, until
    they are used again.
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

    def remove(self, key: bytes) -> None:
        self.evict_all(((key, None),))

    def deferring(self) -> Sequence[LifetimeOrder]:
        return (self,)

    def __iter__(self) -> Iterator[bytes]:
        return chain.from_iterable(iter(self.walk(), []))


def _learn(monitor: ReuseMonitor, pages: int, stored: int) -> tuple[int, list[int], list[int]] | None:
    """New lifetimes in steps, and the number of lots with the second lifetime; None if the monitor has no new
    conclusion."""
    found = monitor.learn(pages, stored)
    if found is None:
        return None
    step = pages / Lifetime.STEPS
    less, more = ([int(age / step) for age in ages] for ages in (found.less, found.more))
    return round(Lifetime.LOTS * found.share), less, more
