"""Per-layer checksums of an extent: XXH3-64 (the `xxhash` library), one 64-bit value a layer.

The checksum of layer `i` covers exactly `extent[start:end]` of `PageLayout.layer_bounds[i]`, without padding. A
catalogue stores checksums *bound* to the page's key: under another key they match nothing. See docs/format.md.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from gdscache.limits import KEY_BYTES

Checksums = npt.NDArray[np.uint64]

MOST_SUMS = 1 << 16  # of a page
_KEY_FACTORS = np.array(  # odd, one for each eight bytes of a key
    [0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63], np.uint64
)
_STEP = np.uint64(0x9E3779B97F4A7C15)  # between two checksums of a page


def layer_checksums(extent: memoryview, bounds: Sequence[tuple[int, int]]) -> Checksums:
    """XXH3-64 of each layer of one extent in host memory; uint64 of shape (layers,)."""
    digest = xxhash.xxh3_64_intdigest
    return np.fromiter((digest(extent[start:end]) for start, end in bounds), np.uint64, len(bounds))


def first_bad_layer(extent: memoryview, bounds: Sequence[tuple[int, int]], expected: Checksums) -> int | None:
    """The first layer whose bytes do not match `expected`, or None."""
    if len(expected) != len(bounds):
        return 0
    bad = np.flatnonzero(layer_checksums(extent, bounds) != expected)
    return int(bad[0]) if bad.size else None


def bound(sums: Checksums, keys: Sequence[bytes]) -> Checksums:
    """Checksums of pages as a catalogue stores them: uint64 of shape (pages, sums a page).

    `keys`: the key of each page. The difference to `sums` is a 64-bit value that follows from the key and from the
    position of the sum in its page (shard after shard, the layers of each); two keys share it with a chance of 2^-64.
    """
    return sums + _bindings(keys, sums.shape[1])


def unbound(stored: Checksums, keys: Sequence[bytes]) -> Checksums:
    """The inverse of `bound`: the checksums of the bytes of pages with these `keys`. Loads use
    `native.take_unbound`."""
    return stored - _bindings(keys, stored.shape[1])


def _bindings(keys: Sequence[bytes], sums: int) -> Checksums:
    words = np.frombuffer(b"".join(keys), "<u8").reshape(len(keys), KEY_BYTES // 8)
    of_keys: Checksums = (words * _KEY_FACTORS).sum(axis=1, dtype=np.uint64)
    return of_keys[:, None] + np.arange(sums, dtype=np.uint64) * _STEP
