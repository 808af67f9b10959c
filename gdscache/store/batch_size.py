"""The number of pages in a batch of writes, by the tier's speed."""

from __future__ import annotations

import dataclasses

from gdscache.limits import BATCH_BYTES, BATCH_PAGES, LEAST_BATCH, SMALL_BATCH_BYTES

_QUICK_S, _SLOW_S = 0.25, 2.0  # seconds of a batch: below, the next has twice as many pages; above, half as many


def batch_pages(extent_bytes: int) -> int:
    most = max(BATCH_PAGES, SMALL_BATCH_BYTES // extent_bytes)
    return max(LEAST_BATCH, min(BATCH_BYTES // extent_bytes, most))


@dataclasses.dataclass(slots=True)
class BatchSize:
    """Begins with `pages`, and stays between `least` and `most`.

    A batch costs a millisecond of Python for any number of pages. Its deadline covers the batches in flight before it
    too, so on a slow tier it must be small.
    """

    least: int
    pages: int
    most: int

    @classmethod
    def of(cls, extent_bytes: int) -> BatchSize:
        most = batch_pages(extent_bytes)
        return cls(LEAST_BATCH, min(most, max(LEAST_BATCH, SMALL_BATCH_BYTES // extent_bytes)), most)

    def learn(self, pages: int, seconds: float) -> None:
        if seconds > _SLOW_S:
            self.pages = max(self.least, min(self.pages, pages // 2))
        elif seconds < _QUICK_S and pages >= self.pages:
            self.pages = min(self.most, 2 * self.pages)
