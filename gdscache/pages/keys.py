"""Namespaces and page keys: names that say which bytes are interchangeable.

A page key is a chained BLAKE2b-256 (RFC 7693) keyed with the namespace: `digest(parent key || token ids)`, the token
ids as little-endian uint32. A key therefore names the whole prefix up to and including its page.

For a caller that chains digests of its own (`PageHashes`), a page key is `digest(its digest)`, keyed in the same way.
The digested data has 32 bytes then, and at least 36 with tokens, so no key of one kind equals one of the other.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import threading
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gdscache import arguments
from gdscache.errors import InvalidValueError, TokensError
from gdscache.limits import KEY_BYTES, MAX_COUNT
from gdscache.native import chained_keys, keys_of, narrow_tokens

FORMAT = 1
KEY = np.dtype(f"V{KEY_BYTES}")  # of keys as columns
SEQUENCES_KEPT, NAMES_KEPT = 32, 1 << 15  # remembered sequences, and names in all: about 10 MiB
_COMPARED = 8  # of the sequences with the same first page, the last
_NAMESPACES_KEPT = 8  # of one `PageHashes`: the namespaces in which its pages were last named

Tokens = Sequence[int] | npt.NDArray[np.integer[Any]]


class Page(NamedTuple):
    """The name of a page: its key, the key of the page before it (the namespace for a first page), its namespace."""

    key: bytes
    parent: bytes
    namespace: bytes


def namespace_digest(fields: Mapping[str, object]) -> bytes:
    """Digest of all facts that make bytes interchangeable (32 bytes), from plain JSON data.

    Canonical JSON (sorted keys, no blanks, ASCII) makes equal fields equal bytes, and keeps field borders apart.
    """
    text = json.dumps({"format": FORMAT, **fields}, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.blake2b(text.encode("ascii"), digest_size=KEY_BYTES, person=b"gdscache-ns").digest()


def as_tokens(tokens: Any) -> npt.NDArray[np.uint32]:
    """Token ids as a one-dimensional little-endian uint32 array.

    Takes a list or tuple of integers, a numpy integer array, or a dense torch tensor in host memory. Raises
    `TokensError` unless they are one flat run of integers in [0, 2**32).
    """
    if isinstance(tokens, PageHashes):
        raise TokensError(
            f"{len(tokens)} page hashes were given where token ids are needed",
            "lookup, store, prefetch, pin and pages of an engine take PageHashes, and load takes the hit",
        )
    if isinstance(tokens, (list, tuple)):
        try:
            return np.frombuffer(array("I", tokens), dtype="<u4")
        except (TypeError, OverflowError, ValueError, RuntimeError) as error:  # RuntimeError: tensors without data
            raise TokensError(
                f"token ids must be integers in [0, 2**32): {_first_line(error)}",
                "pass one flat list of the tokenizer's ids, not text",
            ) from None
    if isinstance(tokens, np.ma.MaskedArray):
        raise TokensError("token ids are a masked array", "pass .compressed(), or the ids of one sequence")
    try:
        values = np.asarray(tokens)
    except (TypeError, ValueError, RuntimeError) as error:  # raised by tensors that numpy cannot read
        raise TokensError(
            f"token ids are {_kind(tokens)}, which has no array of integers in host memory: {_first_line(error)}",
            "pass a dense tensor of integers in host memory (.detach().cpu()), a numpy array or a list",
        ) from None
    if values.ndim != 1:
        what = f"have shape {values.shape}" if values.ndim else f"are {_kind(tokens)}"
        raise TokensError(f"token ids {what}", "pass one sequence of token ids at a time, of shape (tokens,)")
    if values.size == 0:
        return np.empty(0, dtype="<u4")
    if values.dtype.kind not in "iu":
        raise TokensError(f"token ids have dtype {values.dtype}", "pass integers")
    if (found := _narrowed(values)) is not None:
        return found
    if values.dtype.itemsize > 4 or values.dtype.kind == "i":
        low, high = int(values.min()), int(values.max())
        if low < 0 or high >= 1 << 32:
            raise TokensError(f"token ids span {low} ... {high}", "ids must fit in [0, 2**32)")
    return np.ascontiguousarray(values, dtype="<u4")


def _narrowed(values: npt.NDArray[Any]) -> npt.NDArray[np.uint32] | None:
    """int32 or int64 token ids as uint32, if all fit; None: unknown. By bytes: numpy releases the interpreter's lock
    for arrays of more than 500 elements."""
    if values.dtype == np.dtype("<i4"):
        data = values.tobytes()
        return np.frombuffer(data, "<u4") if data[3::4].isascii() else None
    if values.dtype == np.dtype("<i8"):
        return narrow_tokens(values.tobytes())
    return None


def _kind(tokens: Any) -> str:
    """The type of an argument, and a tensor's dtype, layout and device, which numpy may refuse."""
    about = [str(getattr(tokens, name)) for name in ("dtype", "layout", "device") if hasattr(tokens, name)]
    return f"a {type(tokens).__name__}" + (f" ({', '.join(about)})" if about else "")


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def page_keys(
    namespace: bytes, tokens: npt.NDArray[np.uint32], page_tokens: int, parent: bytes | None = None
) -> list[bytes]:
    """Keys of all full pages of `tokens` (see `as_tokens`), first page first; the partial tail has none.

    `parent`: the key of the page before them, unless they begin their sequence.
    """
    return chained_keys(namespace, parent or namespace, tokens.tobytes(), page_tokens * 4)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Named:
    """Tokens whose pages have names. `first`: the namespace, and the bytes of the first page.

    It keeps keys instead of `Page`s, which the garbage collector would visit.
    """

    first: tuple[bytes, bytes]
    tokens: bytes  # uint32
    keys: list[bytes]


class PageNames:
    """The names of the pages of token sequences.

    The last `kept` sequences are remembered, fewer if they have more than `names` pages together. A sequence that
    begins like one of them is hashed only from the first difference: a prompt that is stored chunk by chunk, or a
    conversation that goes on, is hashed once. Thread-safe.
    """

    def __init__(self, page_tokens: int, kept: int = SEQUENCES_KEPT, names: int = NAMES_KEPT) -> None:
        self._page_tokens = page_tokens
        self._kept = kept
        self._names = names
        self._known: list[_Named] = []  # the last used one comes last
        self._lock = threading.Lock()

    def of(self, namespace: bytes, tokens: npt.NDArray[np.uint32]) -> list[Page]:
        """The names of all full pages of `tokens` (see `as_tokens`), first page first."""
        size = self._page_tokens
        tokens = tokens[: len(tokens) // size * size]
        if not len(tokens):
            return []
        data = tokens.tobytes()  # bytes from here on: numpy would release the interpreter's lock
        first = namespace, data[: 4 * size]
        known, equal = self._nearest(first, data)
        keys = [] if known is None else known.keys[: equal // size]
        if known is not None and equal == len(tokens):
            used = known
        else:
            keys += page_keys(namespace, tokens[len(keys) * size :], size, keys[-1] if keys else None)
            used = _Named(first, data, keys)
        with self._lock:
            before = len(self._known)
            # A sequence that `used` continues is not needed any more; one with an end of its own may continue too.
            if known is not None and known in self._known and (used is known or 4 * equal == len(known.tokens)):
                self._known.remove(known)
            self._known.append(used)
            if used is not known or len(self._known) > before:  # otherwise only their order has changed
                del self._known[: -self._kept]
                while len(self._known) > 1 and sum(len(some.keys) for some in self._known) > self._names:
                    del self._known[0]
        return list(_pages(keys, namespace, namespace))

    def _nearest(self, first: tuple[bytes, bytes], tokens: bytes) -> tuple[_Named | None, int]:
        """The remembered sequence with the longest common prefix, and its length in tokens."""
        with self._lock:
            alike = [some for some in self._known if some.first == first][-_COMPARED:]
        equal = [_equal_tokens(some.tokens, tokens) for some in alike]
        most = max(equal, default=0)
        return (alike[equal.index(most)], most) if most else (None, 0)

    def forget(self) -> None:
        with self._lock:
            self._known.clear()


def _equal_tokens(a: bytes, b: bytes) -> int:
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


class PageHashes:
    """The pages of a request by digests of the caller's, for an engine that hashes its blocks itself.

    `hashes`: 32 bytes a full page, the first page first. The caller chains them, so that each names the whole prefix up
    to and including its page, with all facts that decide its bytes (an adapter, images). `tokens`: of the whole
    request, a partial last page included; None: full pages only. A `PageHashes` takes the place of token ids in
    `lookup`, `store`, `prefetch`, `pin` and `pages` of an engine; `start` counts tokens as ever. Keys of hashes and
    keys of tokens never meet.

    `parent`: the caller's digest of the page before the first one, for pages from the middle of a request. It links the
    first page to its parent, and changes no key. `before`: the number of pages before the first one, if known: the gate
    prices computing behind them.

    The names of its pages are remembered, so a request that grows (`extend`) is named page by page. Thread-safe. Raises
    `InvalidValueError` for invalid hashes. Calls that take it raise `TokensError` if hashes and `tokens` do not fit.
    """

    def __init__(
        self, hashes: Sequence[bytes], tokens: int | None = None, *, parent: bytes | None = None, before: int = 0
    ) -> None:
        self._lock = threading.Lock()
        self.before = arguments.whole(before, "before", 0, MAX_COUNT)
        self._parent = None if parent is None else _as_hashes([parent])[0]
        self._hashes: list[bytes] = []
        self._distinct: set[bytes] = set()
        self._named: dict[bytes, list[Page]] = {}
        self._tokens: int | None = None
        self.extend(hashes, tokens)

    def __len__(self) -> int:
        return len(self._hashes)

    @property
    def whole(self) -> bool:
        """Whether the first page is the first of its request, without a `parent`."""
        return self._parent is None

    def chain(self) -> list[bytes]:
        """The caller's digests: the parent's, if there is one, and those of the pages."""
        with self._lock:
            return [*([] if self._parent is None else [self._parent]), *self._hashes]

    def __repr__(self) -> str:
        return f"PageHashes({len(self._hashes)} pages, tokens={self._tokens})"

    def extend(self, hashes: Sequence[bytes], tokens: int | None = None) -> None:
        """The request has grown by pages. `tokens`: of the whole request now; None: full pages only.

        Raises like the constructor, and changes nothing then.
        """
        length = None if tokens is None else arguments.whole(tokens, "tokens", 0, MAX_COUNT)
        more = _as_hashes(hashes)
        with self._lock:
            if not self._distinct.isdisjoint(more) or len(set(more)) < len(more):
                raise InvalidValueError(
                    f"a hash is there twice among {len(self._hashes) + len(more)}",
                    "chain them: each hash is to name its page and all before it",
                )
            if self._parent is not None and (self._parent in more or self._parent in self._distinct):
                raise InvalidValueError(
                    f"the parent is one of the {len(self._hashes) + len(more)} pages that follow it",
                    "pass the digest of the page before the first one",
                )
            self._distinct.update(more)
            self._hashes += more
            self._tokens = length

    def length(self, page_tokens: int) -> int:
        """Tokens of the whole request, with pages of `page_tokens`. Raises `TokensError` if the number of pages
        differs."""
        with self._lock:
            pages, tokens = len(self._hashes), self._tokens
        if tokens is None:
            return pages * page_tokens
        if tokens // page_tokens != pages:
            full = tokens // page_tokens
            raise TokensError(
                f"{pages} page hashes for {tokens} tokens, which are {full} full pages of {page_tokens} tokens",
                "pass a hash for each full page, and the tokens of the whole request",
            )
        return tokens

    def pages(self, namespace: bytes) -> list[Page]:
        """The names of all pages in a namespace, the first page first."""
        with self._lock:
            known = self._named.get(namespace)
            if known is None:
                known = self._named[namespace] = []
                while len(self._named) > _NAMESPACES_KEPT:
                    del self._named[next(iter(self._named))]
            if len(known) < len(self._hashes):
                parent = known[-1].key if known else namespace
                if self._parent is not None and not known:
                    (parent,) = keys_of(namespace, [self._parent])
                known += _pages(keys_of(namespace, self._hashes[len(known) :]), parent, namespace)
            return known[:]


def _pages(keys: Sequence[bytes], parent: bytes, namespace: bytes) -> Iterator[Page]:
    """The names of consecutive pages; the first follows `parent`."""
    rows = zip(keys, itertools.chain((parent,), keys), itertools.repeat(namespace), strict=False)
    return map(tuple.__new__, itertools.repeat(Page), rows)  # Page._make takes twice as long


def _as_hashes(hashes: Any) -> list[bytes]:
    if not isinstance(hashes, Sequence) or isinstance(hashes, (str, bytes, bytearray, memoryview)):
        raise InvalidValueError(
            f"page hashes are of type {type(hashes).__name__}", f"pass a list of bytes, {KEY_BYTES} of each full page"
        )
    found = list(hashes)
    for number, given in enumerate(found):
        if not isinstance(given, bytes) or len(given) != KEY_BYTES:
            what = f"{len(given)} bytes" if isinstance(given, bytes) else f"of type {type(given).__name__}"
            raise InvalidValueError(
                f"the hash of page {number} of those given is {what}", f"pass {KEY_BYTES} bytes of each full page"
            )
    return found


# -- keys as columns: those of many pages in one numpy array -----------------------------------------------------------


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
