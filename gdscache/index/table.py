"""A page in use, and the columns of pages at rest, as native calls read them."""

from __future__ import annotations

import enum
from array import array
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gdscache.index.retention import DEFAULT, Retention
from gdscache.pages.keys import Page


class PageState(enum.Enum):
    PENDING = "pending"  # reserved, the bytes are on their way
    VERIFIED = "verified"


# For loops over pages: an enum's member takes as long to look up as a page.
PENDING, VERIFIED = PageState.PENDING, PageState.VERIFIED


class Entry:
    """A page in use: leased, reserved, or just looked at. While a page is leased it has one such object.

    `leases`: all leases of the page, including those without an object (`PageIndex.hold_run`).
    """

    __slots__ = ("dropped", "key", "leases", "page", "retention", "slot", "state")

    def __init__(
        self, page: Page, slot: int, state: PageState, retention: Retention = DEFAULT, leases: int = 0
    ) -> None:
        self.page = page
        self.key = page.key
        self.slot = slot
        self.state = state
        self.retention = retention
        self.leases = leases
        self.dropped = False

    @property
    def parent(self) -> bytes:
        return self.page.parent

    @property
    def namespace(self) -> bytes:
        return self.page.namespace


class Columns(NamedTuple):
    """What native calls read and change: pages at rest by key, pages in use, and a row a slot, as in `PageIndex`."""

    resting: dict[bytes, int]
    in_use: Mapping[bytes, Entry]
    children: array[int]
    parents: Sequence[bytes | None]
    restored_parents: bytes
    namespaces: Sequence[bytes]
    orphans: dict[bytes, int]
