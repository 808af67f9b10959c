"""Rows of tables by the native library, which keeps the interpreter's lock.

numpy gives the lock up for each of these, however small, and whoever gives it up may wait 5 ms to have it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from gdscache.errors import InvalidValueError
from gdscache.limits import KEY_BYTES
from gdscache.native.library import address, checked, integers, library

_FAULTS: tuple[Literal["", "outside", "twice"], ...] = ("", "outside", "twice")
_T = TypeVar("_T", bound=np.generic)


def blocks_fault(blocks: npt.NDArray[np.int64], limit: int) -> Literal["", "outside", "twice"]:
    """What is wrong with block numbers, contiguous, which are to be different and within [0, limit)."""
    return _FAULTS[checked(library().blocks_fault(address(blocks), blocks.size, limit), "blocks_fault")]


def narrow_tokens(tokens: bytes) -> npt.NDArray[np.uint32] | None:
    """int64 token ids, as their bytes, as uint32; None where one does not fit."""
    found = np.empty(len(tokens) // 8, np.uint32)
    fits = not found.size or checked(library().narrow_tokens(tokens, found.size, address(found)), "narrow_tokens")
    return found if fits else None


def take_rows(table: npt.NDArray[_T], rows: Any) -> npt.NDArray[_T]:
    """`table[rows]` for a contiguous table and an int64 array or a list of numbers. Raises `NativeCallError`."""
    if 0 in table.shape[1:]:
        return np.empty((len(rows), *table.shape[1:]), table.dtype)
    numbers = integers(rows)
    found = np.empty((len(numbers), *table.shape[1:]), table.dtype)
    if found.size:
        answer = library().take_rows(
            *(address(table), len(table), found.nbytes // len(numbers), address(numbers), len(numbers)),
            address(found),
        )
        checked(answer, "take_rows")
    return found


def put_rows(table: npt.NDArray[_T], rows: Any, values: npt.NDArray[_T]) -> None:
    """`table[rows] = values` for contiguous arrays of one dtype, of which `values` has a row for each. Raises
    `NativeCallError`."""
    numbers = integers(rows)
    if values.size:
        answer = library().put_rows(
            *(address(table), len(table), values.nbytes // len(numbers), address(numbers), len(numbers)),
            address(values),
        )
        checked(answer, "put_rows")


def take_unbound(stored: npt.NDArray[np.uint64], rows: Any, keys: Sequence[bytes]) -> npt.NDArray[np.uint64]:
    """`checksum.unbound(stored[rows], keys)`, for a contiguous table. Raises `NativeCallError`, `InvalidValueError`."""
    numbers, joined = integers(rows), b"".join(keys)
    if len(joined) != KEY_BYTES * len(numbers):
        raise InvalidValueError(f"{len(joined)} bytes of keys for {len(numbers)} pages", f"a key has {KEY_BYTES} bytes")
    found = np.empty((len(numbers), stored.shape[1]), np.uint64)
    if found.size:
        answer = library().take_unbound(
            *(address(stored), len(stored), stored.shape[1], address(numbers), len(numbers), joined, address(found))
        )
        checked(answer, "take_unbound")
    return found
