"""The free slots of a tier, as runs of neighbours, so that pages that are stored together lie together.

A segregated fit (Wilson, Johnstone, Neely and Boles, "Dynamic Storage Allocation: A Survey and Critical Review", 1995):
runs are in bins by size, one bin for each size up to `EXACT` slots and for each power of two beyond, and a bit mask
says which bins have runs. Neighbouring runs are joined when slots come back (the boundary tags of Knuth, TAOCP 1, 2.5).
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

EXACT = 64  # runs up to this length have a bin for each length
TRIES = 8  # runs to look at in a bin whose runs may be too short
JOINED = 4096  # slots that one call joins to runs; others that came back wait


class FreeSlots:
    """The free slots of `0 ... slots-1`; all of them at first.

    Giving a slot back costs O(1). Taking costs O(1) for each run, and joins at most `JOINED` slots that came back (more
    if they are needed). The caller locks.
    """

    __slots__ = ("_bins", "_count", "_ends", "_mask", "_returned", "_runs")

    def __init__(self, slots: int) -> None:
        self._returned: list[int] = []  # free, in no run yet
        self._runs: dict[int, int] = {}  # first slot -> length
        self._ends: dict[int, int] = {}  # slot behind the last -> first slot
        self._bins: list[dict[int, None]] = [{} for _ in range(EXACT + 64)]
        self._mask = 0  # bit i is set while bin i has runs
        self._count = 0
        if slots:
            self._add(0, slots)

    def __len__(self) -> int:
        return self._count + len(self._returned)

    def __iter__(self) -> Iterator[int]:
        for start, length in self._runs.items():
            yield from range(start, start + length)
        yield from self._returned

    def give_all(self, slots: Iterable[int]) -> None:
        self._returned.extend(slots)

    def take(self, n: int, after: int | None = None) -> list[int]:
        """Up to `n` free slots, fewer only if fewer are free: one run if possible, ascending.

        Slots right behind `after` are preferred; else the shortest run that is long enough, else the longest ones.
        """
        if len(self) <= n and (after is None or not self._count):  # all slots, as after an eviction of `n`
            return self._take_all()
        self._join(JOINED)
        slots: list[int] = []
        if after is not None and after + 1 in self._runs:
            self._cut(after + 1, n, slots)
        while len(slots) < n:
            if self._mask.bit_length() > _bin(n - len(slots)):
                self._cut(self._fitting(n - len(slots)), n - len(slots), slots)
            elif self._mask:
                self._cut_longest(n - len(slots), slots)
            elif self._returned:
                self._join(JOINED)
            else:
                break
        return slots

    @classmethod
    def beside(cls, used: npt.NDArray[np.bool_]) -> FreeSlots:
        slots = cls(0)
        edges = np.flatnonzero(np.diff(np.concatenate(([True], used, [True]))))
        starts, ends = edges[::2], edges[1::2]
        lengths = ends - starts
        slots._runs = dict(zip(starts.tolist(), lengths.tolist(), strict=True))
        slots._ends = dict(zip(ends.tolist(), starts.tolist(), strict=True))
        slots._count = int(lengths.sum())
        for start, length in slots._runs.items():
            slots._file(start, length)
        return slots

    def runs(self) -> list[tuple[int, int]]:
        """(first slot, slots) of each run, in order. Joins all slots first: for reports, not for a hot path."""
        while self._returned:
            self._join(JOINED)
        return sorted(self._runs.items())

    def check(self) -> list[str]:
        """Violated invariants, recomputed from scratch."""
        problems = []
        if self._ends != {start + length: start for start, length in self._runs.items()}:
            problems.append("the ends of the free runs are not those of the runs")
        if self._count != sum(self._runs.values()):
            problems.append(f"the free runs hold {sum(self._runs.values())} slots, counted are {self._count}")
        if any(start in self._ends for start in self._runs):
            problems.append("free runs touch each other")
        filed = {start: size for size, starts in enumerate(self._bins) for start in starts}
        if filed != {start: _bin(length) for start, length in self._runs.items()}:
            problems.append("free runs are not filed by their length")
        if self._mask != sum(1 << size for size, starts in enumerate(self._bins) if starts):
            problems.append("the mask of the sizes of free runs is wrong")
        return problems

    def _file(self, start: int, length: int) -> None:
        size = _bin(length)
        self._bins[size][start] = None
        self._mask |= 1 << size

    def _add(self, start: int, length: int) -> None:
        self._count += length
        before = self._ends.get(start)
        if before is not None:
            length += self._remove(before)
            start = before
        if start + length in self._runs:
            length += self._remove(start + length)
        self._runs[start] = length
        self._ends[start + length] = start
        self._file(start, length)

    def _remove(self, start: int) -> int:
        """Remove a run, without uncounting its slots; returns its length."""
        size = _bin(self._runs[start])  # first: an interrupt in this call must leave the books consistent
        length = self._runs.pop(start)
        del self._ends[start + length]
        bin_ = self._bins[size]
        del bin_[start]
        if not bin_:
            self._mask ^= 1 << size
        return length

    def _cut(self, start: int, n: int, out: list[int]) -> None:
        length = self._runs[start]
        taken = min(n, length)
        left = length - taken
        size = _bin(left) if left else 0
        self._remove(start)
        out.extend(range(start, start + taken))
        self._count -= taken
        if left:
            start += taken
            self._runs[start] = left
            self._ends[start + left] = start
            self._bins[size][start] = None
            self._mask |= 1 << size

    def _take_all(self) -> list[int]:
        slots, self._returned = sorted(self), []
        if self._count:
            self._count = self._mask = 0
            self._runs.clear()
            self._ends.clear()
            for bin_ in self._bins:
                bin_.clear()
        return slots

    def _cut_longest(self, n: int, out: list[int]) -> None:
        """Move whole runs to `out`, the longest first, while the longest is shorter than the rest of `n`."""
        runs, ends = self._runs, self._ends
        while 0 <= (size := self._mask.bit_length() - 1) < _bin(n):
            bin_ = self._bins[size]
            start = bin_.popitem()[0]
            if not bin_:
                self._mask ^= 1 << size
            length = runs.pop(start)
            del ends[start + length]
            out.extend(range(start, start + length))
            self._count -= length
            n -= length

    def _fitting(self, n: int) -> int:
        size = _bin(n)
        if n > EXACT and self._mask >> size & 1:
            bin_ = self._bins[size]
            fits = [start for start in self._last(bin_, TRIES) if self._runs[start] >= n]
            if fits:
                return min(fits, key=lambda start: self._runs[start])
            size += 1
        elif n > EXACT:
            size += 1
        longer = self._mask >> size
        found = size + (longer & -longer).bit_length() - 1 if longer else self._mask.bit_length() - 1
        start, _ = self._bins[found].popitem()
        self._bins[found][start] = None
        return start

    @staticmethod
    def _last(bin_: dict[int, None], most: int) -> list[int]:
        """The last runs of a bin. By `popitem`, which leaves no gaps in the dictionary for the next call to walk
        over."""
        starts = [bin_.popitem()[0] for _ in range(min(most, len(bin_)))]
        bin_.update(dict.fromkeys(reversed(starts)))
        return starts

    def _join(self, most: int) -> None:
        returned = self._returned
        if not returned:
            return
        some = sorted(returned[-most:])
        del returned[-most:]
        start = last = some[0]
        for slot in some:
            if slot > last + 1:
                self._add(start, last + 1 - start)
                start = slot
            last = slot
        self._add(start, last + 1 - start)


def _bin(length: int) -> int:
    """The bin of runs of `length` slots: 1 ... EXACT for these lengths, then one bin for each power of two."""
    return length if length <= EXACT else EXACT - 6 + length.bit_length()


class SlotShare:
    """The slots `0 ... slots-1` for threads to take and give back: a share of the bounce reserve. Prefers neighbours,
    and slots that came back lately."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._free = FreeSlots(slots)
        self._changed = threading.Condition()

    @property
    def free_slots(self) -> int:
        return len(self._free)

    def try_take(self, most: int) -> list[int]:
        """Up to `most` slots, ascending, at once, perhaps none."""
        with self._changed:
            return sorted(self._free.take(most))

    def wait(self, seconds: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: bool(self._free), seconds)

    def give(self, slots: Sequence[int]) -> None:
        with self._changed:
            self._free.give_all(slots)
            self._changed.notify_all()
