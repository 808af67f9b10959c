"""Counts keys in fixed memory, with decay: admission's knowledge of absent pages.

Keys are page keys, that is digests: their own bytes serve as hashes. Counters err on one side only: they may be too
high, never too low. The caller locks.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Sequence

import numpy as np

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
