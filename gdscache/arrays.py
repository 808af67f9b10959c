"""Names of numpy's array types, and conversions for the native library."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]
UInt64Array = npt.NDArray[np.uint64]
Float64Array = npt.NDArray[np.float64]


def address(array: npt.NDArray[Any]) -> int:
    """The address of a contiguous array's bytes; the caller keeps it alive. For writable arrays five times as fast as
    numpy's own way."""
    if array.flags.writeable and array.size:
        return ctypes.addressof(ctypes.c_char.from_buffer(array))  # type: ignore[arg-type]
    return int(array.ctypes.data)


def integers(values: Any) -> Int64Array:
    """Any values as a contiguous int64 array, copied only if needed."""
    return np.ascontiguousarray(values, np.int64)
