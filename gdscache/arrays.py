"""Names of numpy's array types, and what the library is handed of arrays. What an array's elements count is said where
it is taken."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]
UInt64Array = npt.NDArray[np.uint64]
Float64Array = npt.NDArray[np.float64]


def address(array: npt.NDArray[Any]) -> int:
    """Where a contiguous array's bytes begin; the caller keeps it alive. Five times as fast as numpy's own way where
    the array may be written to."""
    if array.flags.writeable and array.size:
        return ctypes.addressof(ctypes.c_char.from_buffer(array))  # type: ignore[arg-type]
    return int(array.ctypes.data)


def integers(values: Any) -> Int64Array:
    """Anything as a contiguous int64 array, copied only where it is not one."""
    return np.ascontiguousarray(values, np.int64)
