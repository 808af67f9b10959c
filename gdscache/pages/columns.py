"""Keys as columns: those of many pages in one numpy array, compared and found all at once."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gdscache.limits import KEY_BYTES

KEY = np.dtype(f"V{KEY_BYTES}")


def differ(some: npt.NDArray[np.void], others: npt.NDArray[np.void]) -> npt.NDArray[np.bool_]:
    """Where two columns of keys differ."""
    where: npt.NDArray[np.bool_] = (_words(some) != _words(others)).any(axis=1)
    return where


def find(keys: npt.NDArray[np.void], wanted: npt.NDArray[np.void]) -> npt.NDArray[np.int64]:
    """The index of each wanted key in `keys`, which all differ; -1 if absent.

    Keys are digests, so eight of their bytes tell nearly all apart. Sorted keys are searched with sorted keys, so
    memory is read in order.
    """
    if not len(keys) or not len(wanted):
        return np.full(len(wanted), -1, np.int64)
    part, wanted_part = _words(keys)[:, 0], _words(wanted)[:, 0]
    order, wanted_order = np.argsort(part), np.argsort(wanted_part)
    part = part[order]
    at = np.minimum(np.searchsorted(part, wanted_part[wanted_order]), len(part) - 1)
    found = np.empty(len(wanted), np.int64)
    found[wanted_order] = np.where(part[at] == wanted_part[wanted_order], order[at], -1)
    there = np.flatnonzero(found >= 0)
    if (part[1:] == part[:-1]).any() or differ(keys[found[there]], wanted[there]).any():
        exact = {key: i for i, key in enumerate(keys.tolist())}
        return np.array([exact.get(key, -1) for key in wanted.tolist()], np.int64)
    return found


def _words(keys: npt.NDArray[np.void]) -> npt.NDArray[np.uint64]:
    return np.ascontiguousarray(keys).view(np.uint64).reshape(len(keys), KEY_BYTES // 8)
