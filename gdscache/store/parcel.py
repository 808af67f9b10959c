"""Pages of a store, in columns: jobs are accepted together, parcels go the same ways."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from gdscache.arrays import Int64Array
from gdscache.index.retention import DEFAULT, Retention
from gdscache.index.table import Entry
from gdscache.native import take_rows
from gdscache.pages.keys import Page
from gdscache.store.outlets import Outlet
from gdscache.tiers.base import Lease

if TYPE_CHECKING:
    from gdscache.cuda.streams import Event, Landed

_NO_BLOCKS = np.empty((0, 1), np.int64)


class Receipt(Protocol):
    """Hears how the pages of a store end, numbered as in the store, and when its blocks may be written again."""

    def committed(self, pages: Sequence[int], tier: str) -> None: ...

    def finish(self, pages: Sequence[int], cause: str = "") -> None: ...

    def reading(self, lands: Callable[[float], Landed | None]) -> None:
        """After the event that `lands(seconds)` waits for; it returns None if the event is not queued in that time."""
        ...

    def read(self, event: Event) -> None:
        """After `event`; None: now. May be called again."""
        ...


@dataclasses.dataclass(slots=True, eq=False)
class StoreJob:
    """Pages of one salt, as asked for, and later as accepted: a page's *place* is its index in `pages`. `receipt`: None
    for pages that go on without a store. `numbers` has their numbers in it; empty: the places at first. `epoch`: the
    namespace's when the bytes were known good. `since`: the time of acceptance, by the executor's clock. `left`: places
    without an outcome.

    `blocks`: of the planes, int64 (pages, blocks_per_page), read after the event `after`. `sources` pins blocks of our
    own. `given`: places that the writers have. `unfit`: places of pages that do not fit into packed extents.
    """

    receipt: Receipt | None
    pages: Sequence[Page]
    epoch: int
    retention: Retention = DEFAULT
    blocks: Int64Array = dataclasses.field(default_factory=lambda: _NO_BLOCKS)
    after: Event = None
    sources: Lease | None = None
    numbers: Sequence[int] = ()
    since: float | None = None
    left: set[int] = dataclasses.field(init=False)
    given: set[int] = dataclasses.field(init=False, default_factory=set)
    unfit: list[int] = dataclasses.field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.numbers, self.left = self.numbers or range(len(self.pages)), set(range(len(self.pages)))

    @property
    def namespace(self) -> bytes:
        return self.pages[0].namespace

    def numbers_of(self, some: Iterable[int]) -> list[int]:
        numbers = self.numbers
        return [numbers[i] for i in some]

    def narrow(self, places: Sequence[int]) -> None:
        """Go on with these pages alone, and their blocks; the others have their outcome."""
        if len(self.blocks):
            self.blocks = take_rows(self.blocks, places)
        if len(places) < len(self.pages):
            self.numbers, self.pages = self.numbers_of(places), [self.pages[place] for place in places]
            self.left = set(range(len(places)))

    def committed(self, places: Iterable[int], tier: str) -> None:
        if self.receipt is not None:
            self.receipt.committed(self.numbers_of(places), tier)


@dataclasses.dataclass(slots=True, eq=False)
class Parcel:
    """Pages of a job in slots of one memory, all with the same outlets. A *row* is a page's number in the parcel.

    `places`: the pages' numbers in the job. `entries`: the pages in the landing tier, each leased; None: the slots are
    in the bounce reserve (`space`). `copied`: the bytes are in the slots already. `to`: the outlets. `left`: by outlet,
    the rows that it has not ended; `reading`: those whose slots it still reads.
    """

    job: StoreJob
    places: Sequence[int]
    slots: Sequence[int]
    space: str
    entries: Sequence[Entry] | None
    leases: list[Lease]
    to: tuple[Outlet, ...]
    copied: bool = dataclasses.field(kw_only=True)
    rows: range = dataclasses.field(init=False)
    pages: list[Page] = dataclasses.field(init=False)
    left: dict[Outlet, set[int]] = dataclasses.field(init=False)
    reading: dict[Outlet, set[int]] = dataclasses.field(init=False)
    # the cause of the first outlet that did not take the page
    _causes: dict[int, str] = dataclasses.field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        pages = self.job.pages
        self.rows, self.pages = range(len(self.places)), [pages[i] for i in self.places]
        self.left = {outlet: set(self.rows) for outlet in self.to}
        self.reading = {outlet: set(self.rows) for outlet in self.to}

    def __len__(self) -> int:
        return len(self.places)

    def only(self, rows: Sequence[int]) -> Parcel:
        """A parcel of these rows alone, with the leases of this one."""
        entries = None if self.entries is None else [self.entries[row] for row in rows]
        places, slots = self.places_of(rows), [self.slots[row] for row in rows]
        return Parcel(self.job, places, slots, self.space, entries, self.leases, self.to, copied=self.copied)

    def keys(self, rows: Iterable[int]) -> list[bytes]:
        pages = self.pages
        return [pages[row].key for row in rows]

    def places_of(self, rows: Iterable[int]) -> list[int]:
        places = self.places
        return [places[row] for row in rows]

    def note(self, rows: Iterable[int], cause: str) -> None:
        for row in rows:
            self._causes.setdefault(row, cause)

    def by_cause(self, rows: Sequence[int]) -> dict[str, list[int]]:
        """The rows by the cause of the first outlet that did not take them; "" where every outlet did."""
        if not self._causes:
            return {"": list(rows)}
        found: dict[str, list[int]] = {}
        for row in rows:
            found.setdefault(self._causes.get(row, ""), []).append(row)
        return found

    def give_up(self) -> list[tuple[Outlet, list[int]]]:
        lacking = [(outlet, sorted(rows)) for outlet, rows in self.left.items() if rows]
        for rows in (*self.left.values(), *self.reading.values()):
            rows.clear()
        return lacking

    def set_apart(self, rows: Sequence[int], lease: Lease) -> None:
        """Give the pins of these rows to another lease, which ends later than the others."""
        if self.entries is not None:
            entries = [self.entries[row] for row in rows]
            for held in self.leases:
                held.hand_over(entries, lease)
            self.leases.append(lease)


def last_of(rows: Iterable[int], outlet: Outlet, of: Mapping[Outlet, set[int]]) -> list[int]:
    """The rows that are left to this outlet, and to no other."""
    return sorted(
        of[outlet].intersection(rows).difference(*(some for other, some in of.items() if other is not outlet))
    )
