"""Namespaces and page keys: names that say which bytes are interchangeable.

A page key is a chained BLAKE2b-256 (RFC 7693) keyed with the namespace: `digest(parent key || token ids)`, the token
ids as little-endian uint32. A key therefore names the whole prefix up to and including its page.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gdscache.errors import TokensError

KEY_BYTES = 32
FORMAT = 1

Tokens = Sequence[int] | npt.NDArray[np.integer[Any]]


class Page(NamedTuple):
    """The name of a page: its key, the key of the page before it (the namespace for a first page), its namespace."""

    key: bytes
    parent: bytes
    namespace: bytes


def namespace_digest(fields: Mapping[str, object]) -> bytes:
    """Digest of everything that makes bytes interchangeable (32 bytes), from plain JSON data.

    Canonical JSON (sorted keys, no blanks, ASCII) makes equal fields equal bytes, and keeps field borders apart.
    """
    text = json.dumps({"format": FORMAT, **fields}, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.blake2b(text.encode("ascii"), digest_size=KEY_BYTES, person=b"gdscache-ns").digest()


def as_tokens(tokens: Any) -> npt.NDArray[np.uint32]:
    """Token ids as a one-dimensional little-endian uint32 array.

    Takes a list or tuple of integers, a numpy integer array, or a torch tensor in host memory.
    Raises `TokensError` for anything that is not one flat run of integers in [0, 2**32).
    """
    if isinstance(tokens, (list, tuple)):
        try:
            return np.frombuffer(array("I", tokens), dtype="<u4")
        except (TypeError, OverflowError) as error:
            raise TokensError(
                f"token ids must be integers in [0, 2**32): {error}", "pass token ids, not text"
            ) from None
    values = np.asarray(tokens)
    if values.ndim != 1:
        raise TokensError(f"token ids have shape {values.shape}", "pass one sequence at a time, of shape (tokens,)")
    if values.size == 0:
        return np.empty(0, dtype="<u4")
    if values.dtype.kind not in "iu":
        raise TokensError(f"token ids have dtype {values.dtype}", "pass integers")
    if values.dtype.itemsize > 4 or values.dtype.kind == "i":
        low, high = int(values.min()), int(values.max())
        if low < 0 or high >= 1 << 32:
            raise TokensError(f"token ids span {low} ... {high}", "ids must fit in [0, 2**32)")
    return np.ascontiguousarray(values, dtype="<u4")


def page_keys(namespace: bytes, tokens: npt.NDArray[np.uint32], page_tokens: int) -> list[bytes]:
    """Keys of all full pages of `tokens` (see `as_tokens`), first page first; the partial tail has none."""
    data = tokens.tobytes()
    step = page_tokens * 4
    keyed = hashlib.blake2b(digest_size=KEY_BYTES, key=namespace)  # a copy of it costs half as much as another one
    parent, keys = namespace, []
    for at in range(0, len(data) - step + 1, step):
        page = keyed.copy()
        page.update(parent)
        page.update(data[at : at + step])
        parent = page.digest()
        keys.append(parent)
    return keys
