"""Names of numpy's array types, and conversions for the native library."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]
UInt64Array = npt.NDArray[np.uint64]
Float64Array = npt.NDArray[np.float64]


def integers(values: Any) -> Int64Array:
    """Any values as a contiguous int64 array, copied only if needed."""
    return np.ascontiguousarray(values, np.int64)
