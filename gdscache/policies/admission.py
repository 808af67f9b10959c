"""Admission to the SSD: the pages that are worth their write. Decisions only, under the manager's lock; no I/O.

A policy (a row of `ADMISSIONS`) decides whether a page may go in. `Admission` asks it, and then checks:

* *Was the parent refused?* A lookup finds consecutive pages from the first on, each in any tier, so a page is useful
  only while those before it are in some tier. The parent may be in the CPU tier alone: tails leave it first. It may
  even be in no tier, with an engine that keeps the head itself; the SSD tier gives such a page free slots only. A
  refused parent, though, is lost when the CPU tier evicts it, and its child on the SSD would be out of reach. So a page
  is refused ("no_prefix") if its parent was refused since its last use. Pages offered together come heads first.
* *Is there room on the way?* The caller says so; without room the page is refused ("queue_full").
* *Is there budget left?* See `EnduranceBudget`. Asked last, so that other refusals cost no budget.

A restart loses the policy's state.

Keys are counted in fixed memory, with decay. They are page keys, that is digests: their own bytes serve as hashes.
Counters err on one side only: they may be too high, never too low. The caller locks.
"""

from __future__ import annotations

import logging
import struct
import time
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from gdscache.limits import LIMITS
from gdscache.runtime.limited_log import LimitedLog
from gdscache.sizes import about

if TYPE_CHECKING:
    from gdscache.pages.keys import Page

_WORD_AND_BITS = struct.Struct("<2I").unpack_from  # bytes 0 to 7 of a key
_ROWS = struct.Struct("<8x4I").unpack_from  # bytes 8 to 23
_BIT = tuple(1 << i for i in range(64))
_SHIFTS = np.arange(0, 24, 6, dtype=np.uint32)


class BloomFilter:
    """A set of keys that also claims to have some absent ones (Bloom, 1970), in blocks of one word, so that a key is
    one access (Putze, Sanders, Singler: Cache-, Hash- and Space-Efficient Bloom Filters, 2007).

    Sized for `keys` keys at `bits_per_key` (or up to twice as many bits, for a power of two). When it has that many, it
    is wrong about some 5 % of the absent keys at 8 bits, about 1 % at 16.
    """

    __slots__ = ("_mask", "_words")

    def __init__(self, keys: int, bits_per_key: int = 8) -> None:
        words = _power_of_two(keys * bits_per_key // 64)
        self._words = array("Q", bytes(8 * words))
        self._mask = words - 1

    @property
    def nbytes(self) -> int:
        return 8 * len(self._words)

    def add(self, key: bytes) -> bool:
        at, some = _WORD_AND_BITS(key)
        at &= self._mask
        bits = _BIT[some & 63] | _BIT[some >> 6 & 63] | _BIT[some >> 12 & 63] | _BIT[some >> 18 & 63]
        word = self._words[at]
        if word & bits == bits:
            return True
        self._words[at] = word | bits
        return False

    def add_all(self, keys: Sequence[bytes]) -> None:
        """`add` keys of one length."""
        parts = np.frombuffer(b"".join(keys), "<u4").reshape(len(keys), -1)
        bits = np.uint64(1) << (parts[:, 1:2] >> _SHIFTS & 63).astype(np.uint64)
        words = np.frombuffer(self._words, np.uint64)
        np.bitwise_or.at(words, parts[:, 0] & self._mask, np.bitwise_or.reduce(bits, axis=1))

    def __contains__(self, key: bytes) -> bool:
        at, some = _WORD_AND_BITS(key)
        bits = _BIT[some & 63] | _BIT[some >> 6 & 63] | _BIT[some >> 12 & 63] | _BIT[some >> 18 & 63]
        there: bool = self._words[at & self._mask] & bits == bits
        return there

    def clear(self) -> None:
        np.frombuffer(self._words, np.uint64)[:] = 0

    def dump(self) -> bytes:
        return self._words.tobytes()

    def load(self, bits: bytes) -> None:
        """Take over bits from `dump`. Raises `ValueError` if they are of a filter of another size."""
        if len(bits) != self.nbytes:
            raise ValueError(f"{len(bits)} bytes for a filter of {self.nbytes}")
        self._words = array("Q", bits)


class RecentCounter:
    """How often a key was added lately, up to `most` times.

    An add is remembered during the next `period` adds at least, and forgotten after `2 * period` at the latest: keys
    are counted in generations of `period` adds, of which the current and the last one count. A generation is `most`
    Bloom filters of 16 to 32 bits an add, so all takes `4 * most * period` to `8 * most * period` bytes.
    """

    __slots__ = ("_adds", "_current", "_last", "added", "most", "period")

    def __init__(self, period: int, most: int = 1) -> None:
        self.period = max(1, period)
        self.added = 0
        self.most = most
        self._current, self._last = ([BloomFilter(self.period, 16) for _ in range(most)] for _ in range(2))
        self._adds = 0

    @property
    def nbytes(self) -> int:
        return sum(filter_.nbytes for filter_ in (*self._current, *self._last))

    def __contains__(self, key: bytes) -> bool:
        return key in self._current[0] or key in self._last[0]

    def dump(self) -> tuple[int, int, list[bytes]]:
        """`period`, the adds of the current generation, and the bits of all filters; for `load`. Takes no lock:
        concurrent adds may be in it or not."""
        return self.period, self._adds, [filter_.dump() for filter_ in (*self._current, *self._last)]

    @classmethod
    def load(cls, period: int, adds: int, filters: Sequence[bytes]) -> RecentCounter:
        """The counter of a `dump`. Raises `ValueError` for impossible values."""
        bits = sum(map(len, filters))
        if not 1 <= period <= bits or not 0 <= adds <= period or len(filters) % 2:
            raise ValueError(f"{bits} bytes of filters, {adds} of {period} adds")
        found = cls(period, len(filters) // 2)
        for filter_, some in zip((*found._current, *found._last), filters, strict=True):
            filter_.load(some)
        found._adds = adds
        return found

    def take_over(self, other: RecentCounter) -> bool:
        """Go on from another counter's adds; False, and nothing, if its size differs."""
        if (other.period, other.most) != (self.period, self.most):
            return False
        self._current, self._last, self._adds = other._current, other._last, other._adds
        return True

    def add(self, key: bytes) -> int:
        self._count(1)
        before = 0
        for filter_ in self._current:
            if not filter_.add(key):
                break
            before += 1
        for filter_ in self._last:
            if before == self.most or key not in filter_:
                break
            before += 1
        return before

    def add_all(self, keys: Sequence[bytes]) -> None:
        """`add` keys, for a counter whose `most` is 1."""
        at = 0
        while at < len(keys):
            some = self._count(len(keys) - at)
            self._current[0].add_all(keys[at : at + some])
            at += some

    def _count(self, adds: int) -> int:
        """Begin a generation if the current one is full. Returns how many of these adds are of one generation."""
        if self._adds == self.period:
            self._adds = 0
            self._current, self._last = self._last, self._current
            for filter_ in self._current:
                filter_.clear()
        adds = min(adds, self.period - self._adds)
        self._adds += adds
        self.added += adds
        return adds


class FrequencySketch:
    """How often keys were used, as TinyLFU counts (Einziger, Friedman, Manes: TinyLFU: A Highly Efficient Cache
    Admission Policy, 2017).

    The first use of a key since the last halving goes to a Bloom filter, the *doorkeeper*, and the others to a
    count-min sketch of four rows whose counters end at 15; only the smallest of a key's counters grow. After `SAMPLE`
    uses a slot, all counters are halved, the doorkeeper is emptied, and the uses count half.

    Takes 18 to 36 bytes a slot, and some 4 KiB at least. A halving takes some 3 ms with a million slots.
    """

    SAMPLE = 10
    MOST = 15
    __slots__ = ("_doorkeeper", "_mask", "_rows", "_uses", "sample")

    def __init__(self, slots: int) -> None:
        width = max(1024, _power_of_two(2 * slots))
        self._rows = tuple(bytearray(width) for _ in range(4))
        self._mask = width - 1
        self.sample = self.SAMPLE * max(1, slots)
        self._doorkeeper = BloomFilter(self.sample)
        self._uses = 0

    @property
    def nbytes(self) -> int:
        return sum(map(len, self._rows)) + self._doorkeeper.nbytes

    def add(self, keys: Iterable[bytes]) -> None:
        one, two, three, four = self._rows
        mask, most, seen = self._mask, self.MOST, self._doorkeeper.add
        for key in keys:
            if self._uses >= self.sample:
                self._age()
            self._uses += 1
            if not seen(key):
                continue
            a, b, c, d = _ROWS(key)
            a, b, c, d = a & mask, b & mask, c & mask, d & mask
            p, q, r, s = one[a], two[b], three[c], four[d]
            least = min(p, q, r, s)
            if least == most:
                continue
            if p == least:
                one[a] = least + 1
            if q == least:
                two[b] = least + 1
            if r == least:
                three[c] = least + 1
            if s == least:
                four[d] = least + 1

    def count(self, key: bytes) -> int:
        a, b, c, d = _ROWS(key)
        one, two, three, four = self._rows
        mask = self._mask
        least: int = one[a & mask]
        if (other := two[b & mask]) < least:
            least = other
        if (other := three[c & mask]) < least:
            least = other
        if (other := four[d & mask]) < least:
            least = other
        return least + (key in self._doorkeeper)

    def _age(self) -> None:
        for row in self._rows:
            counters = np.frombuffer(row, np.uint8)
            np.right_shift(counters, 1, out=counters)
        self._doorkeeper.clear()
        self._uses //= 2


def _power_of_two(least: int) -> int:
    power: int = 1 << max(0, least - 1).bit_length()
    return power


REMEMBERED = 4  # `second_offer` remembers an offer for this many offers a slot of the SSD, up to twice as many
REFUSED_KEPT = 4096  # refused pages, not used since, that are remembered
BURST = 8  # one part in 8 of a day's budget may be written at once
_NS = 1_000_000_000
_DAY = 86_400 * _NS
_log = logging.getLogger("gdscache.store")


class AdmitAll:
    """Admits every page. The other policies say whether a page is worth its write. They know keys only."""

    name = "all"
    asks_victim = False  # True: the answer depends on the victim

    def __init__(self, slots: int, offers: int) -> None:
        """For an SSD of `slots` pages; `second_offer` admits a page at its `offers`th offer."""

    def use(self, keys: Sequence[bytes]) -> None: ...

    def offer(self, key: bytes, victim: bytes | None) -> bool:
        """True when the page may go in, in place of `victim` (None: there is room)."""
        return True

    def vouched(self, keys: list[bytes]) -> None:
        """The next offers of these pages are offers that the policy of another tier has admitted."""

    def explain(self, key: bytes, victim: bytes | None) -> str:
        """Why the page was just refused, with figures, and the setting to change; for people."""
        return "store.admission is all, which refuses nothing"

    def describe(self) -> dict[str, Any]:
        """For `stats()`: `memory_bytes`, and the policy's own figures."""
        return {"memory_bytes": 0}


class SecondOffer(AdmitAll):
    """Admits a page that was offered lately, `offers` - 1 times at least.

    Remembers an offer for four to eight offers a slot of the SSD, in 16 to 32 bytes a slot for every offer before the
    last. About one page in a hundred is admitted too early.
    """

    name = "second_offer"

    def __init__(self, slots: int, offers: int) -> None:
        self._offers = offers
        self._counter = RecentCounter(REMEMBERED * slots, offers - 1)

    def offer(self, key: bytes, victim: bytes | None) -> bool:
        return self._counter.add(key) >= self._offers - 1

    def vouched(self, keys: list[bytes]) -> None:
        for key in keys * (self._offers - 1):
            self._counter.add(key)

    def explain(self, key: bytes, victim: bytes | None) -> str:
        return (
            f"offered fewer than {self._offers} times in the last {self._counter.period:,} offers. "
            f"store.admission is second_offer: set it to all to write more"
        )

    def describe(self) -> dict[str, Any]:
        counter = self._counter
        return {"offers": self._offers, "remembered_offers": counter.period, "memory_bytes": counter.nbytes}


class TinyLFU(AdmitAll):
    """Admits a page that was used more often than its victim; any page while there is room.

    Takes 18 to 36 bytes a slot of the SSD. See `FrequencySketch`.
    """

    name = "tinylfu"
    asks_victim = True

    def __init__(self, slots: int, offers: int) -> None:
        self._sketch = FrequencySketch(slots)

    def use(self, keys: Sequence[bytes]) -> None:
        self._sketch.add(keys)

    def offer(self, key: bytes, victim: bytes | None) -> bool:
        return victim is None or self._sketch.count(key) > self._sketch.count(victim)

    def explain(self, key: bytes, victim: bytes | None) -> str:
        there = 0 if victim is None else self._sketch.count(victim)
        return (
            f"used {self._sketch.count(key)} times, and the page that would have to go {there} times. "
            f"store.admission is tinylfu: set it to all, or raise ssd.capacity, to write more"
        )

    def describe(self) -> dict[str, Any]:
        return {"memory_bytes": self._sketch.nbytes}


ADMISSIONS = {policy.name: policy for policy in (AdmitAll, SecondOffer, TinyLFU)}


class EnduranceBudget:
    """A token bucket. It holds an eighth of `bytes_per_day`, which it begins with; the other seven come back evenly
    over a day.

    The bytes taken (and not given back) in any period of t days are at most (1 + 7 t) / 8 of `bytes_per_day`. So no 24
    hours have more than `bytes_per_day`; a night without a write allows a burst of an eighth, not of all that was
    saved; and constant load writes 7/8, evenly.

    The state is not kept: n opens in a day allow up to n / 8 of `bytes_per_day` more.
    """

    def __init__(self, bytes_per_day: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` counts seconds and does not go back."""
        self.bytes_per_day = bytes_per_day
        self.burst = bytes_per_day // BURST
        self._rate = bytes_per_day - self.burst  # bytes a day
        self._clock = clock
        self._now = int(clock() * _NS)
        self._level = self.burst * _DAY  # integers, in bytes / _DAY: sums of small floats would lose some

    def left(self) -> int:
        self._refill()
        return self._level // _DAY

    def take(self, nbytes: int) -> bool:
        """Use up `nbytes`; False, and nothing used, if fewer are left."""
        self._refill()
        wanted = nbytes * _DAY
        if wanted > self._level:
            return False
        self._level -= wanted
        return True

    def give_back(self, nbytes: int) -> None:
        self._refill()
        self._level = min(self.burst * _DAY, self._level + nbytes * _DAY)

    def describe(self) -> dict[str, Any]:
        return {"bytes_per_day": self.bytes_per_day, "burst_bytes": self.burst, "left_bytes": self.left()}

    def __str__(self) -> str:
        left, rate = about(self.left()), about(self._rate // 24)
        return f"{left} left of {about(self.bytes_per_day)} a day, {rate} more each hour"

    def _refill(self) -> None:
        now = int(self._clock() * _NS)
        if now > self._now:
            self._level = min(self.burst * _DAY, self._level + self._rate * (now - self._now))
            self._now = now


class Admission:
    """A policy, the prefix and the budget together, for a tier of `slots` pages. Refusals are counted by cause, and
    logged.

    Causes: the policy's name, "queue_full", "no_prefix", "endurance". Pages offered are `admitted` + `refused`.
    Remembers up to 4,096 refused pages besides the policy's state. The manager's lock guards it.
    """

    def __init__(
        self,
        name: str,
        slots: int,
        extent_bytes: int,
        endurance: int | None = None,
        *,
        offers: int = LIMITS.admission_offers,
        clock: Callable[[], float] = time.monotonic,
        log: LimitedLog | None = None,
    ) -> None:
        """`name`: of the policy; `second_offer` admits a page at its `offers`th offer. `endurance`: bytes a day."""
        self._log = LimitedLog() if log is None else log
        self.admitted = 0
        self.refused: Counter[str] = Counter()
        self.policy = ADMISSIONS[name](slots, offers)
        self._extent_bytes = extent_bytes
        self._budget = None if endurance is None else EnduranceBudget(endurance, clock)
        self._lately: OrderedDict[bytes, None] = OrderedDict()  # refused pages, not used since

    @property
    def refuses(self) -> bool:
        return self._budget is not None or self.policy.name != AdmitAll.name

    def use(self, keys: Sequence[bytes]) -> list[bytes]:
        """A request found or brought these pages: each once a request. Returns the pages that were refused and not used
        since."""
        refused = [key for key in keys if key in self._lately] if self._lately else []
        for key in refused:
            self._lately.pop(key, None)
        self.policy.use(keys)
        return refused

    def admit(self, page: Page, victim: bytes | None = None, *, room: bool = True) -> str:
        """Why the page must not be written; "" when it may.

        `victim`: the key of the page that would have to go, None while there is room. `room`: False if the most pages
        are on their way already. Counts an offer. If the page is not written after all, call `not_written`.
        """
        if not self.policy.offer(page.key, victim):
            return self._refuse(page, self.policy.name, victim)
        if not room:
            return self._refuse(page, "queue_full", victim)
        if page.parent in self._lately:
            return self._refuse(page, "no_prefix", victim)
        if self._budget is not None and not self._budget.take(self._extent_bytes):
            return self._refuse(page, "endurance", victim)
        if self._lately:
            self._lately.pop(page.key, None)
        self.admitted += 1
        return ""

    @property
    def admits_all(self) -> bool:
        return not self.refuses and not self._lately

    def admit_all(self, pages: int) -> None:
        """Admit unnamed pages, while `admits_all`: the policy need not know them."""
        self.admitted += pages

    def not_written(self, pages: int = 1) -> None:
        """Admitted pages were dropped before any byte was written: give their budget back."""
        if self._budget is not None:
            self._budget.give_back(pages * self._extent_bytes)

    def describe(self) -> dict[str, Any]:
        return {
            "policy": self.policy.name,
            **self.policy.describe(),
            "admitted": self.admitted,
            "refused": dict(self.refused),
            "endurance": None if self._budget is None else self._budget.describe(),
        }

    def _refuse(self, page: Page, cause: str, victim: bytes | None) -> str:
        self.refused[cause] += 1
        self._log.say(
            *(_log, logging.WARNING, f"refused: {cause}"),
            lambda: f"the SSD refuses pages ({cause}): {self._said(page, cause, victim)}",
        )
        self._lately[page.key] = None
        if len(self._lately) > REFUSED_KEPT:
            self._lately.popitem(last=False)
        return cause

    def _said(self, page: Page, cause: str, victim: bytes | None) -> str:
        if cause == "no_prefix":
            others = ", ".join(f"{n:,} for {name}" for name, n in self.refused.items() if name != cause) or "none"
            return (
                f"the page before it was refused (refusals so far: {others}), so no lookup would get to it; "
                f"store.admission and ssd.endurance decide about that one"
            )
        if cause == "endurance":
            return f"a page needs {about(self._extent_bytes)}, {self._budget}. Raise ssd.endurance, or set it to null"
        if cause == "queue_full":
            return (
                "the SSD writes more slowly than pages are stored, and as many are on their way as store.queue allows, "
                "or as fill half of the CPU tier. Raise store.queue and cpu.capacity if that passes; if it lasts, "
                "let store.admission choose the pages that are written"
            )
        return self.policy.explain(page.key, victim)
