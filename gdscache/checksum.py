"""Per-layer checksums of an extent: XXH3-64 (the `xxhash` library), one 64-bit value a layer.

The checksum of layer `i` covers exactly `extent[start:end]` of `PageLayout.layer_bounds[i]`; padding is not covered.
See docs/format.md.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import xxhash

Checksums = npt.NDArray[np.uint64]


def layer_checksums(extent: memoryview, bounds: Sequence[tuple[int, int]]) -> Checksums:
    """XXH3-64 of each layer of one extent in host memory; uint64 of shape (layers,)."""
    digest = xxhash.xxh3_64_intdigest
    return np.fromiter((digest(extent[start:end]) for start, end in bounds), np.uint64, len(bounds))


def first_bad_layer(extent: memoryview, bounds: Sequence[tuple[int, int]], expected: Checksums) -> int | None:
    """The first layer whose bytes do not match `expected`, or None when all do."""
    if len(expected) != len(bounds):
        return 0
    bad = np.flatnonzero(layer_checksums(extent, bounds) != expected)
    return int(bad[0]) if bad.size else None
