"""Pins keep pages from eviction for a time. `Pin` is the caller's handle, `Claim` a prefetch's; `Pins` has all pins of
all tiers, and the manager's lock is held in each of its calls.

There is no thread: the next lookup, plan or store ends pins whose time is up.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

from gdscache import arguments
from gdscache.errors import EngineClosedError
from gdscache.index.retention import LONGEST_TTL
from gdscache.index.table import Entry
from gdscache.pages.keys import Page
from gdscache.runtime.calls import Released
from gdscache.tiers.base import Lease, Tier

if TYPE_CHECKING:
    from gdscache.index.index import PageIndex
    from gdscache.tiers.manager import TierManager

PIN_SHARE = 0.5  # most of a tier's slots that pins may hold together; of a single slot they may hold it


class Pin(Released):
    """The pages of a prefix, kept from eviction on every tier that has them, until `release` or until its time is up.

    Made by `CacheEngine.pin`. A page that is cleared, invalidated, found bad or expired goes all the same.
    """

    def __init__(self, pins: Pins, lease: Lease, pages: list[list[Entry]], page_tokens: int, until: float) -> None:
        self._pins = pins
        self._lease = lease
        self._pages = pages
        self._page_tokens = page_tokens
        self.until = until  # by the manager's monotonic clock

    @property
    def tokens(self) -> int:
        """Tokens of the prefix that are pinned now.

        Fewer than asked for if pages were not cached, or if every tier with the next page has reached its bound of
        pinned pages (`PIN_SHARE` of its slots). 0 once the pin has ended.
        """
        with self._pins.manager.calls, self._pins.manager.lock:
            self._pins.end_due()
            return self.count() * self._page_tokens

    @property
    def over(self) -> bool:
        """Whether it was released, or its time is up."""
        with self._pins.manager.calls, self._pins.manager.lock:
            self._pins.end_due()
            return self._pins.seconds_left(self._lease) is None

    def count(self) -> int:
        """Leading pages that are pinned and not dropped. The lock is held."""
        return sum(1 for _ in itertools.takewhile(lambda some: not all(e.dropped for e in some), self._pages))

    def release(self) -> None:
        with contextlib.suppress(EngineClosedError), self._pins.manager.calls, self._pins.manager.lock:
            self._pins.end(self)


class Claim(Pin):
    """The pins of a prefetch: pages in the landing tiers, and room there for pages to come.

    `pages`: the pages with room, in order, and `tiers` the landing tier of each. `promised`: number -> key of the pages
    to come. The manager's lock guards the claim; `good` may be read without it.
    """

    def __init__(self, pins: Pins, lease: Lease, page_tokens: int, until: float) -> None:
        super().__init__(pins, lease, [], page_tokens, until)
        self.pages: list[Page] = []
        self.tiers: list[Tier] = []
        self.promised: dict[int, bytes] = {}
        self.slots: list[int | None] = []  # slot of each page, None before it has come
        self._indices = [landing.index for landing in pins.manager.landings]
        self._good = 0  # leading pages that are held, as counted when the indices had torn `_torn` pages
        self._torn = self._all_torn()

    def _all_torn(self) -> int:
        return sum(index.torn for index in self._indices)

    def take(self, tier: Tier, pages: Sequence[Page], slots: Sequence[int]) -> None:
        """The next pages are present, each with a lease, which the claim takes over."""
        self._lease.hold(tier.index, pages, slots)
        self._good += len(slots) if self._good == len(self.pages) else 0
        self.pages += pages
        self.tiers += [tier] * len(pages)
        self.slots += slots

    def expect(self, tier: Tier, pages: Sequence[Page]) -> None:
        first = len(self.pages)
        self.promised.update((first + i, page.key) for i, page in enumerate(pages))
        self.pages += pages
        self.tiers += [tier] * len(pages)
        self.slots += [None] * len(pages)

    def holds(self, number: int) -> bool:
        """Whether the page is present and was never dropped: a page that came again is in another slot."""
        slot = self.slots[number]
        return slot is not None and self.tiers[number].index.slot(self.pages[number].key) == slot

    def put(self, number: int, slot: int) -> None:
        self.slots[number] = slot
        self._good = self._held_from(self._good)

    def cut(self, pages: int) -> None:
        del self.pages[pages:], self.tiers[pages:], self.slots[pages:]

    def _held_from(self, first: int) -> int:
        return next(itertools.filterfalse(self.holds, range(first, len(self.slots))), len(self.slots))

    def count(self) -> int:
        if self._torn != (torn := self._all_torn()):
            self._good = self._held_from(0)  # set before `_torn`, which validates it for readers without the lock
            self._torn = torn
        return self._good

    @property
    def good(self) -> int:
        """`count`, at little cost; 0 when the claim has ended."""
        pins = self._pins
        if pins.clock() >= self.until:
            return 0
        if self._torn == self._all_torn():
            return self._good
        with pins.manager.lock:
            return self.count()


_P = TypeVar("_P", bound=Pin)


class Pins:
    """The pins that have not ended. `clock`: seconds, monotonic."""

    def __init__(self, manager: TierManager, clock: Callable[[], float]) -> None:
        self.manager = manager
        self.clock = clock
        self._pins: dict[Lease, Pin] = {}
        # Number of pins on each page, by its slot, which no other page gets meanwhile.
        self._held: dict[str, Counter[int]] = {name: Counter() for name in manager.tiers}
        # Of each landing tier: keys that claims expect there, and those whose room no pinned page has taken yet.
        self._promised: dict[str, Counter[bytes]] = {landing.name: Counter() for landing in manager.landings}
        self._owed: dict[str, set[bytes]] = {landing.name: set() for landing in manager.landings}
        self._ends: list[tuple[float, int, Pin]] = []
        self._numbers = itertools.count()

    def begin(self, pages: Sequence[Page], seconds: float, page_tokens: int) -> Pin:
        seconds = arguments.span(seconds, "seconds", LONGEST_TTL)
        distinct = {page.key: page for page in pages}.values()
        with self._begun(Pin(self, self.manager.lease("pin"), [], page_tokens, self.clock() + seconds)) as pin:
            pin._pages += itertools.takewhile(bool, (self._hold(page, pin._lease) for page in distinct))
        return pin

    @contextlib.contextmanager
    def _begun(self, pin: _P) -> Iterator[_P]:
        """Ends the pin when its time is up, or now if the block raises."""
        self._pins[pin._lease] = pin
        end: tuple[float, int, Pin] = (pin.until, next(self._numbers), pin)
        heapq.heappush(self._ends, end)
        with contextlib.ExitStack() as undo:
            undo.callback(self.end, pin)
            yield pin
            undo.pop_all()

    def _hold(self, page: Page, lease: Lease) -> list[Entry]:
        found = []
        for name, tier in self.manager.served:
            entry, held = tier.index.get(page.key), self._held[name]
            if entry is None or self.manager.hidden(name, entry.slot):
                continue
            if entry.slot in held or self._room(name) > 0:
                lease.add(tier.index, entry)
                held[entry.slot] += 1
                found.append(entry)
        return found

    def _room(self, name: str) -> int:
        owed = self._owed.get(name, ())
        return _most(self.manager.tiers[name]) - len(self._held[name]) - len(owed)

    def describe(self) -> dict[str, int]:
        """Of the landing tiers: pinned pages, pages promised to claims, and the bound of both together."""
        landings = self.manager.landings
        held = sum(len(self._held[landing.name]) for landing in landings)
        most = sum(map(_most, landings))
        return {"pinned_pages": held, "promised_pages": sum(map(len, self._owed.values())), "pin_quota_pages": most}

    # -- claims: the pins of prefetches -------------------------------------------------------------------------------

    def claim(self, pages: Sequence[Page], seconds: float, page_tokens: int, tiers: Sequence[str]) -> Claim:
        """Lease the leading `pages` that a landing tier has, and promise room for the others, until none is left.
        Nothing waits for room. `tiers`: the pages' tiers, by their names."""
        at, lease = 0, self.manager.lease("prefetch pin")
        with self._begun(Claim(self, lease, page_tokens, self.clock() + seconds)) as claim:
            for name, some in itertools.groupby(tiers):
                end = at + sum(1 for _ in some)
                self._claim(claim, self.manager.landing_of(self.manager.tiers[name]), pages[at:end])
                if len(claim.pages) < end:
                    break
                at = end
        return claim

    def _claim(self, claim: Claim, landing: Tier, pages: Sequence[Page]) -> None:
        """Lease pages, or promise room for them, in one landing tier, until it has no room left."""
        index, held, owed = landing.index, self._held[landing.name], self._owed[landing.name]
        keys = [page.key for page in pages]
        shown, at, room = index.visible(keys), 0, self._room(landing.name)
        while at < len(keys):
            end = shown.find(1 - shown[at], at)
            end = len(keys) if end < 0 else end
            there = index.hold_run(pages, at, end) if shown[at] else []
            new = [slot not in held for slot in there] if there else [key not in owed for key in keys[at:end]]
            fits = _fitting(new, room)
            room -= sum(new[:fits])
            if there:
                index.let_go(pages[at + fits : end], there[fits:])
                claim.take(landing, pages[at : at + fits], there[:fits])
                held.update(there[:fits])
            else:
                claim.expect(landing, pages[at : at + fits])
                self._promised[landing.name].update(keys[at : at + fits])
                owed.update(keys[at : at + fits])
            at += fits
            if at < end:
                break

    def fill(self, claim: Claim, numbers: Iterable[int]) -> None:
        """Pages of a claim, by their numbers, are now in their landing tiers and good.

        Each has its promised room. Only a page that was dropped since, while its slot is still held, needs new room.
        """
        new: dict[PageIndex, list[Page]] = {}
        for number in numbers if claim._lease in self._pins else ():
            page, landing = claim.pages[number], claim.tiers[number]
            index, held, owed = landing.index, self._held[landing.name], self._owed[landing.name]
            slot = index.slot(page.key)
            if slot is None or claim.holds(number) or not index.has(page.key):
                continue
            if not (slot in held or page.key in owed or self._room(landing.name) > 0):
                continue
            held[slot] += 1
            owed.discard(page.key)
            new.setdefault(index, []).append(page)
            claim.put(number, slot)
            if number in claim.promised:
                self._forgo(claim, number)
        for index, pages in new.items():
            claim._lease.hold(index, pages, index.hold_run(pages, 0, len(pages)))

    def keep_run(self, claim: Claim) -> None:
        """No more pages of a claim will come. It keeps the pages before the first missing one, and ends if it has
        none."""
        if claim._lease not in self._pins:
            return
        self._forgo(claim, *claim.promised)
        kept = claim.count()
        claim.cut(kept)
        if not kept:
            self.end(claim)
            return
        if kept < len(claim._lease):  # pages behind the gap, and pages that were dropped and came again
            left = {(tier.index, slot) for tier, slot in zip(claim.tiers, claim.slots, strict=True)}
            gone = []
            for index, pages, slots in claim._lease.runs():
                pins = [(page, slot) for page, slot in zip(pages, slots, strict=True) if (index, slot) not in left]
                gone.append((index, pins))
            held = []
            for tier, numbers in itertools.groupby(range(kept), claim.tiers.__getitem__):
                some = [claim.pages[number] for number in numbers]
                held.append((tier.index, some, tier.index.hold_run(some, 0, len(some))))
            claim._lease.end()
            for one in held:
                claim._lease.hold(*one)
            for index, pins in gone:
                self._unhold(index, [page for page, _ in pins], [slot for _, slot in pins])

    def _forgo(self, claim: Claim, *numbers: int) -> None:
        for number in numbers:
            key, name = claim.promised.pop(number), claim.tiers[number].name
            promised = self._promised[name]
            promised[key] -= 1
            if not promised[key]:
                del promised[key]
                self._owed[name].discard(key)

    def _unhold(self, index: PageIndex, pages: Sequence[Page], slots: Sequence[int]) -> None:
        name = next(name for name, tier in self.manager.tiers.items() if tier.index is index)
        held, expected = self._held[name], self._promised.get(name, ())
        for page, slot in zip(pages, slots, strict=True):
            times = held.pop(slot)
            if times > 1:
                held[slot] = times - 1
            elif expected and page.key in expected:  # claims expect the page: its room is theirs again
                self._owed[name].add(page.key)

    # -- their ends ---------------------------------------------------------------------------------------------------

    def end(self, pin: Pin) -> None:
        if self._pins.pop(pin._lease, None) is None:
            return
        for index, pages, slots in pin._lease.runs():
            self._unhold(index, pages, slots)
        if isinstance(pin, Claim):
            self._forgo(pin, *pin.promised)
            pin.slots, pin._good = [], 0
        pin._pages = []
        self.manager.end(pin._lease)
        if len(self._ends) > 2 * len(self._pins) + 16:
            self._ends = sorted(end for end in self._ends if end[2]._lease in self._pins)

    def end_due(self) -> None:
        while self._ends and self._ends[0][0] <= self.clock():
            self.end(heapq.heappop(self._ends)[2])

    def seconds_left(self, lease: Lease) -> float | None:
        """Seconds that the pin with this lease has left; None for a lease of another kind."""
        pin = self._pins.get(lease)
        return None if pin is None else max(0.0, pin.until - self.clock())


def _most(tier: Tier) -> int:
    return max(1, int(PIN_SHARE * tier.index.slots))


def _fitting(new: Sequence[bool], room: int) -> int:
    if sum(new) <= room:
        return len(new)
    taken = itertools.accumulate(new)
    return next(i for i, used in enumerate(taken) if used > room)
