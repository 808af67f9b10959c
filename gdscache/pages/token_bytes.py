"""Token ids as bytes: numpy releases the interpreter's lock for arrays of more than 500 elements; operations on bytes
do not."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from gdscache.native import narrow_tokens


def narrowed(values: npt.NDArray[Any]) -> npt.NDArray[np.uint32] | None:
    """int32 or int64 token ids as uint32, if all fit; None: unknown."""
    if values.dtype == np.dtype("<i4"):
        data = values.tobytes()
        return np.frombuffer(data, "<u4") if data[3::4].isascii() else None
    if values.dtype == np.dtype("<i8"):
        return narrow_tokens(values.tobytes())
    return None


def equal_tokens(a: bytes, b: bytes) -> int:
    same, most = 0, min(len(a), len(b)) // 4
    if a[: 4 * most] == b[: 4 * most]:
        return most
    while same < most:  # the first `same` are equal, and no more than `most`
        middle = (same + most + 1) // 2
        if a[4 * same : 4 * middle] == b[4 * same : 4 * middle]:
            same = middle
        else:
            most = middle - 1
    return same
