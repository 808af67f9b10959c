"""Namespaces and page keys: names that say which bytes are interchangeable.

A page key is a chained BLAKE2b-256 (RFC 7693) keyed with the namespace: `digest(parent key || token ids)`, the token
ids as little-endian uint32. A key therefore names the whole prefix up to and including its page.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import threading
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gdscache.errors import TokensError

KEY_BYTES = 32
FORMAT = 1
SEQUENCES_KEPT, NAMES_KEPT = 32, 1 << 15  # sequences whose names are remembered, and names in all: about 13 MiB
_COMPARED = 8  # of those that begin with the same page, the last

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

    Takes a list or tuple of integers, a numpy integer array, or a dense torch tensor in host memory.
    Raises `TokensError` for anything that is not one flat run of integers in [0, 2**32).
    """
    if isinstance(tokens, (list, tuple)):
        try:
            return np.frombuffer(array("I", tokens), dtype="<u4")
        except (TypeError, OverflowError, ValueError, RuntimeError) as error:  # RuntimeError: tensors without data
            raise TokensError(
                f"token ids must be integers in [0, 2**32): {_first_line(error)}", "pass token ids, not text"
            ) from None
    if isinstance(tokens, np.ma.MaskedArray):
        raise TokensError("token ids are a masked array", "pass .compressed(), or the ids of one sequence")
    try:
        values = np.asarray(tokens)
    except (TypeError, ValueError, RuntimeError) as error:  # what tensors answer that numpy cannot see into
        raise TokensError(
            f"token ids are {_kind(tokens)}, which has no array of integers in host memory: {_first_line(error)}",
            "pass a dense tensor of integers in host memory (.detach().cpu()), a numpy array or a list",
        ) from None
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


def _kind(tokens: Any) -> str:
    """What was given: for a tensor its type, layout and device, which are what numpy refuses."""
    about = [str(getattr(tokens, name)) for name in ("dtype", "layout", "device") if hasattr(tokens, name)]
    return f"a {type(tokens).__name__}" + (f" ({', '.join(about)})" if about else "")


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def page_keys(
    namespace: bytes, tokens: npt.NDArray[np.uint32], page_tokens: int, parent: bytes | None = None
) -> list[bytes]:
    """Keys of all full pages of `tokens` (see `as_tokens`), first page first; the partial tail has none.

    `parent`: the key of the page before them, where they are not the first of their sequence.
    """
    data = tokens.tobytes()
    step = page_tokens * 4
    keyed = hashlib.blake2b(digest_size=KEY_BYTES, key=namespace)  # a copy of it costs half as much as another one
    parent, keys = parent or namespace, []
    for at in range(0, len(data) - step + 1, step):
        page = keyed.copy()
        page.update(parent)
        page.update(data[at : at + step])
        parent = page.digest()
        keys.append(parent)
    return keys


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Named:
    """Tokens whose pages have names. `first`: the namespace, and the bytes of the first page."""

    first: tuple[bytes, bytes]
    tokens: npt.NDArray[np.uint32]
    pages: list[Page]


class PageNames:
    """The names of the pages of token sequences.

    The last `kept` sequences are remembered, fewer where they have more than `names` pages together, and what begins as
    one of them is hashed only from where it differs: a prompt that is stored chunk by chunk, or a conversation that
    goes on, is hashed once. Thread-safe.
    """

    def __init__(self, page_tokens: int, kept: int = SEQUENCES_KEPT, names: int = NAMES_KEPT) -> None:
        self._page_tokens = page_tokens
        self._kept = kept
        self._names = names
        self._known: list[_Named] = []  # the one that was used last comes last
        self._lock = threading.Lock()

    def of(self, namespace: bytes, tokens: npt.NDArray[np.uint32]) -> list[Page]:
        """The names of all full pages of `tokens` (see `as_tokens`), first page first."""
        size = self._page_tokens
        tokens = tokens[: len(tokens) // size * size]
        if not len(tokens):
            return []
        first = namespace, tokens[:size].tobytes()
        known, equal = self._nearest(first, tokens)
        pages = [] if known is None else known.pages[: equal // size]
        if known is not None and equal == len(tokens):
            used = known
        else:
            parent = pages[-1].key if pages else namespace
            keys = page_keys(namespace, tokens[len(pages) * size :], size, parent)
            rows = zip(keys, itertools.chain((parent,), keys), itertools.repeat(namespace), strict=False)
            pages += map(tuple.__new__, itertools.repeat(Page), rows)  # Page._make takes twice as long
            used = _Named(first, tokens.copy(), pages[:])
        with self._lock:
            # One that `used` goes on from is not needed any more; one with an end of its own may go on, too.
            if known is not None and known in self._known and (used is known or equal == len(known.tokens)):
                self._known.remove(known)
            self._known.append(used)
            del self._known[: -self._kept]
            while len(self._known) > 1 and sum(len(some.pages) for some in self._known) > self._names:
                del self._known[0]
        return pages

    def _nearest(self, first: tuple[bytes, bytes], tokens: npt.NDArray[np.uint32]) -> tuple[_Named | None, int]:
        """The remembered sequence that has the most first tokens in common with these, and how many these are."""
        with self._lock:
            alike = [some for some in self._known if some.first == first][-_COMPARED:]
        equal = [_equal(some.tokens, tokens) for some in alike]
        most = max(equal, default=0)
        return (alike[equal.index(most)], most) if most else (None, 0)

    def forget(self) -> None:
        """Remember nothing."""
        with self._lock:
            self._known.clear()


def _equal(a: npt.NDArray[np.uint32], b: npt.NDArray[np.uint32]) -> int:
    """How many of the first elements of both are equal."""
    most = min(len(a), len(b))
    if not most:
        return 0
    differs = a[:most] != b[:most]
    first = int(differs.argmax())
    return first if differs[first] else most
