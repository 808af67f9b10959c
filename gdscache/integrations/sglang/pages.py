"""SGLang's page names: SHA-256 in hexadecimal, each over the previous name and the page's tokens.

A call may name pages from the middle of a request without the page before them. Earlier calls tell that page, since a
page should outlast its followers.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

from gdscache.errors import InvalidValueError
from gdscache.limits import KEY_BYTES
from gdscache.pages.keys import PageHashes

LINKS_KEPT = 1 << 16  # about 20 MiB


class PageLinks:
    """The parents of the pages named last, and the number of pages before each. Thread-safe."""

    def __init__(self, kept: int = LINKS_KEPT) -> None:
        self._kept = kept
        self._before: OrderedDict[bytes, tuple[bytes, int]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._before)

    def named(self, keys: Sequence[str], before: Sequence[str] = ()) -> PageHashes:
        """The pages of consecutive keys. `before`: keys of the pages before them, if known. Raises `InvalidValueError`
        for an invalid key, and for one that is there twice."""
        hashes = [digest(key) for key in keys]
        parent, depth = parent_of(before), len(before)
        with self._lock:
            known = self._before.get(hashes[0]) if hashes else None
            if known is not None:
                parent, depth = parent or known[0], max(depth, known[1])
            found = PageHashes(hashes, parent=parent, before=depth)  # raises before anything is remembered
            self._remember(parent, depth, hashes)
        return found

    def _remember(self, parent: bytes | None, depth: int, hashes: Sequence[bytes]) -> None:
        links, last = self._before, parent
        for pages, name in enumerate(hashes, depth):
            if last is not None:
                links[name] = last, pages
                links.move_to_end(name)
            last = name
        while len(links) > self._kept:
            links.popitem(last=False)


def parent_of(before: Sequence[str]) -> bytes | None:
    """The bytes of the last key; None if there is none. Raises `InvalidValueError`."""
    return digest(before[-1]) if before else None


def digest(key: str) -> bytes:
    """The bytes of a key. Raises `InvalidValueError`."""
    try:
        found = bytes.fromhex(key)
    except (TypeError, ValueError):
        found = b""
    if len(found) != KEY_BYTES:
        raise InvalidValueError(f"{str(key)[:80]!r} is not the key of a page", f"pages have {2 * KEY_BYTES} hex digits")
    return found
