"""What becomes of stores: which pages go to which tier, and when. Decisions only; no bytes, no threads, no torch.

A page is *offered* by a store. The planner accepts it (or drops and counts it), finds its slot in the landing tier (the
first in memory: the CPU tier), and says which tiers of files are to get it now, by the write policy. To each of them
there is an *outlet* (store/outlets.py). With one of them, the SSD:

* `write_through`: every page, at once.
* `write_through_selective`: a page that was hit `store.write_hits` times since it came. A lookup only notes that; the
  next load or store sends the page on.
* `write_back`: a page that the CPU tier is about to give up. Until then it is *dirty* there, which eviction respects;
  the coldest are written ahead when more than `cpu.high_watermark` of the slots are dirty, down to `cpu.low_watermark`.
* `never`: none.

What the policy would write still has to pass the SSD's admission. Whoever runs the plan (the engine's threads, or a
simulation) moves the bytes and reports back. The manager's lock is held in every call, unless it says otherwise.

The ways into the two tiers are bounded apart, by `store.queue` each, so that an SSD that falls behind does not keep
pages out of the CPU tier. What the first has no room for is dropped. What the second has no room for is refused, as by
the admission ("queue_full"): it stays in the CPU tier alone, and may be evicted. Pages on their way to the SSD hold CPU
slots, so a store that finds more of them on their way than half of those slots finds no room there either; dirty pages
hold slots too, so the coldest are refused where there are too many.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from gdscache.keys import Page
from gdscache.store.outlets import Outlet
from gdscache.tiers.base import Lease, Tier
from gdscache.tiers.pages import Entry, PageState
from gdscache.tiers.retention import DEFAULT, Retention

if TYPE_CHECKING:
    from gdscache.config import StoreConfig
    from gdscache.tiers.admission import Admission
    from gdscache.tiers.manager import TierManager

# What one gather, and one write batch, takes at once: each costs turns at the locks that a model's thread wants, too.
_FIRST_ROUND_BYTES, _ROUND_BYTES, _ROUND_PAGES = 32 << 20, 128 << 20, 1024
BATCH_BYTES = 128 << 20
_UNWRITTEN = ("closed", "switched_off", "lock_lost")  # causes for which no byte of a page went out
_MOST_HITS = 255  # counted a page


def round_pages(extent_bytes: int) -> Iterator[int]:
    """Pages of a store that find slots and are gathered at a time, round after round.

    The first rounds are small, so that the writer has something to do early; each takes twice as many.
    """
    most = max(1, min(_ROUND_BYTES // extent_bytes, _ROUND_PAGES))
    pages = min(most, max(1, _FIRST_ROUND_BYTES // extent_bytes))
    while True:
        yield pages
        pages = min(most, 2 * pages)


class Receipt(Protocol):
    """Who wants to know what becomes of a store."""

    def committed(self, page: int, tier: str) -> None: ...

    def finish(self, page: int, cause: str = "") -> None: ...


class _Nobody:
    def committed(self, page: int, tier: str) -> None: ...

    def finish(self, page: int, cause: str = "") -> None: ...


_NOBODY = _Nobody()


@dataclasses.dataclass(frozen=True, slots=True)
class StoreJob:
    """Pages as accepted. `numbers[i]` is page `i`'s place in the receipt; `epochs[i]` that of its namespace then.
    `left`: the pages that have no last word yet."""

    receipt: Receipt
    numbers: Sequence[int]
    pages: Sequence[Page]
    epochs: Sequence[int]
    retention: Retention = DEFAULT
    left: set[int] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "left", set(range(len(self.pages))))


@dataclasses.dataclass(slots=True, eq=False)
class Placed:
    """A page of a job and the slot that its bytes go to, or lie in.

    `entry` is its page in the landing tier, under `lease`; None: the slot is of the bounce reserve, `space` says which
    memory that is. `copied`: the bytes are in the slot already. `to`: the outlets that the page takes
    now; `open` those that have not said what became of it, `reading` those that still read the slot.
    """

    job: StoreJob
    i: int
    slot: int
    space: str
    entry: Entry | None
    lease: Lease | None
    copied: bool
    to: tuple[Outlet, ...]
    cause: str = ""  # what the first outlet said that did not take it
    open: set[Outlet] = dataclasses.field(init=False)
    reading: set[Outlet] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.open, self.reading = set(self.to), set(self.to)

    @property
    def page(self) -> Page:
        return self.job.pages[self.i]


class StorePlanner:
    """The state of all stores that were accepted and are not done.

    `send` is given pages of the landing tier that are to be written now, without any store; it calls `written` and
    `released` for each of their outlets. `keys`: pages on their way to tiers of files, and over how many outlets. On
    each are at most `store.queue` bytes, and so are the other pages that are `queued`; without a landing tier both
    together are.
    """

    def __init__(
        self,
        manager: TierManager,
        config: StoreConfig,
        extent_bytes: int,
        admissions: Mapping[str, Admission],
        watermarks: tuple[float, float] = (1.0, 1.0),
        *,
        selective: bool = False,
    ) -> None:
        """`admissions`: by the names of the tiers of files. `selective`: loads do not promote every page that they
        read, so stores do not either."""
        self.outlets = [Outlet(tier, admissions[tier.name], config.queue // extent_bytes) for tier in manager.files]
        self.keys: dict[bytes, int] = {}
        self.queued = 0  # pages accepted and not finished
        self._cleaning = 0  # ... that are on their way from the CPU tier to the SSD without a store
        self.send: Callable[[Sequence[Placed]], None] = _keep
        self.empty: Callable[[], None] = _nothing  # called when nothing is queued any more
        self._manager = manager
        self._landing = manager.landing
        self._policy = config.write_policy if self.outlets else "never"
        self._hits_wanted = config.write_hits
        self._selective = selective
        self._limit = config.queue // extent_bytes
        slots = 0 if self._landing is None else self._landing.index.slots
        low, high = watermarks
        self._low, self._high = int(low * slots), int(high * slots)
        # CPU slots that may be held by what is not on the SSD yet: pages on their way, or dirty ones.
        self._most_held = (self._high + slots) // 2 if self._policy == "write_back" else slots // 2
        self.behind = False  # the SSD was, when the store that is being placed had its turn: it is not waited for
        self._hits = bytearray(slots)  # of the page in each CPU slot, since it came
        # Hits offer pages of the CPU tier again where a first offer is not enough; the next store need not, then. Where
        # it is enough but for a lack of room, hits offer what was refused, and so does the next store.
        refuses = any(outlet.admission.refuses for outlet in self.outlets)
        self._hits_offer = self._policy == "write_through_selective" or (self._policy == "write_through" and refuses)
        self._earned: dict[bytes, None] = {}  # pages that uses made worth an offer, for the next load or store
        if self.outlets:
            manager.on_use.append(self._used)

    # -- accepting ---------------------------------------------------------------------------------------------------

    def accept(self, pages: Sequence[Page], receipt: Receipt, retention: Retention = DEFAULT) -> list[int]:
        """The places of those pages that some tier lacks and the queue has room for; the last word on the others."""
        manager = self._manager
        manager.counts["stores", "requests"] += 1
        manager.retain(pages, retention)
        self.offer_earned()
        room = self._limit - self.queued + (0 if self._landing is None else len(self.keys))
        wanted: list[int] = []
        for number, page in enumerate(pages):
            if not self._missing(page):
                manager.counts["stores", "present"] += 1
                receipt.finish(number)
            elif len(wanted) >= room:
                manager.counts["dropped", "queue_full"] += 1
                receipt.finish(number, "queue_full")
            else:
                wanted.append(number)
        self.queued += len(wanted)
        for outlet in self.outlets:
            outlet.admission.use([pages[number].key for number in wanted])
        return wanted

    def _missing(self, page: Page) -> bool:
        """True when a tier that is to have the page lacks it and nothing is bringing it."""
        landing = self._landing
        if landing is not None and page.key not in landing.index:  # nor is promoted what the load before it did not
            return not (self._selective and any(page.key in outlet.tier.index for outlet in self.outlets))
        if landing is None or (self._policy == "write_through" and not self._hits_offer):
            return bool(self._lacking(page))
        return False

    def _lacking(self, page: Page) -> list[Outlet]:
        """The outlets to tiers that are to have a page, and neither have nor get it."""
        return [] if self._policy == "never" else [outlet for outlet in self.outlets if outlet.lacks(page.key)]

    def _room(self, outlets: Iterable[Outlet]) -> bool:
        """Whether one more page may set out on any of these."""
        return any(outlet.room for outlet in outlets)

    def _falls_behind(self) -> bool:
        """Whether pages that are not on the SSD yet hold so much of the landing tier that no more may."""
        landing = self._landing
        if landing is None:
            return False
        return (landing.index.dirty_pages if self._policy == "write_back" else len(self.keys)) > self._most_held

    def _offer(self, page: Page, outlets: Iterable[Outlet], *, behind: bool) -> tuple[tuple[Outlet, ...], str]:
        """Offer a page to tiers that lack it: the outlets that it takes, and why not the first of the others."""
        going, cause = [], ""
        for outlet in outlets:
            why = outlet.offer(page, room=not behind and outlet.room)
            if why:
                self._manager.counts["refused", why] += 1
                cause = cause or why
            else:
                going.append(outlet)
        return tuple(going), cause

    def _set_out(self, key: bytes, outlets: Sequence[Outlet]) -> None:
        for outlet in outlets:
            outlet.keys.add(key)
        if outlets:
            self.keys[key] = self.keys.get(key, 0) + len(outlets)

    def _arrived(self, key: bytes, outlet: Outlet) -> None:
        if key in outlet.keys:
            outlet.keys.discard(key)
            self.keys[key] -= 1
            if not self.keys[key]:
                del self.keys[key]

    # -- placing -----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """A store has its turn: its pages are placed next. Whether the SSD is behind is decided here, once a store.

        Else a prompt would be cut by its own pages, in a CPU tier that has been idle.
        """
        self.behind = self._falls_behind()
        if self.behind:
            self._give_up()

    def cpu_slots(self, pages: Sequence[Page]) -> list[int]:
        """CPU slots for those of `pages` that the tier lacks, without evicting what comes before them."""
        landing = self._landing
        if landing is None:
            return []
        lacking = sum(1 for page in pages if page.key not in landing.index)
        return landing.index.allocate_some(lacking, pages=pages)

    def free(self, slots: Sequence[int]) -> None:
        """Give CPU slots back that no page was put in."""
        if slots:
            self._manager.cpu_index.free(slots)

    def place(self, job: StoreJob, i: int, slots: list[int], bounced: list[int]) -> tuple[bool, Placed | None]:
        """Find a slot for page `i`, one of `slots` (CPU) or `bounced`, which shrink.

        `(True, None)`: nothing to do, settled; `(False, None)`: it needs a bounce slot and there is none.
        """
        manager, page, landing = self._manager, job.pages[i], self._landing
        if manager.clearing.epoch(page.namespace) != job.epochs[i]:
            self.settle(job, i, "cleared")
            return True, None
        lacking = self._lacking(page)
        if landing is not None:
            entry, copied = landing.index.find(page.key), True
            if entry is None:
                if slots:
                    kept = manager.expiry.joined(page, job.retention)
                    entry, copied = landing.index.insert(page, slots.pop(), PageState.PENDING, kept), False
                    self._hits[entry.slot] = 0
            elif not lacking or entry.state is not PageState.VERIFIED:
                self.settle(job, i)  # there, or on its way by somebody else
                return True, None
            if entry is not None:
                to: tuple[Outlet, ...] = ()
                if self._policy == "write_through":
                    to, _ = self._offer(page, lacking, behind=self.behind)
                if copied and not to:
                    self.settle(job, i)
                    return True, None
                return True, self._placed(job, i, landing, entry, to, copied=copied)
        if not lacking or self._policy == "write_through_selective":
            self.settle(job, i, f"{landing.name}_full" if landing is not None else "")
            return True, None
        if manager.quarantine.off:  # its writes hold the bounce slots
            self.settle(job, i, manager.quarantine.cause)
            return True, None
        if self._room(lacking) and not bounced:  # such a page holds no slot of the landing tier
            return False, None
        to, cause = self._offer(page, lacking, behind=False)
        if not to:
            self.settle(job, i, cause)
            return True, None
        self._set_out(page.key, to)
        return True, Placed(job, i, bounced.pop(), "bounce", None, None, copied=False, to=to)

    def turn_away(self, job: StoreJob, i: int) -> None:
        """No bounce slot is free for page `i`, and the SSD is behind: it is dropped."""
        page = job.pages[i]
        self.settle(job, i, self._offer(page, self._lacking(page), behind=True)[1])

    def _placed(
        self, job: StoreJob, i: int, landing: Tier, entry: Entry, to: tuple[Outlet, ...], *, copied: bool
    ) -> Placed:
        lease = self._manager.lease("store")
        lease.add(landing.index, entry)
        self._set_out(entry.key, to)
        return Placed(job, i, entry.slot, landing.name, entry, lease, copied=copied, to=to)

    # -- outcomes ----------------------------------------------------------------------------------------------------

    def publish(self, placed: Placed) -> bool:
        """The bytes are in the slot: the landing tier shows the page. True when it goes on to tiers of files now."""
        job, landing, entry = placed.job, self._landing, placed.entry
        if landing is not None and entry is not None and not placed.copied and landing.index.commit(entry):
            job.receipt.committed(job.numbers[placed.i], landing.name)
            self._manager.counts["stored", landing.name] += 1
            if self._policy == "write_back" and self._lacking(placed.page):
                landing.index.mark_dirty(entry)
        if placed.to:
            return True
        self._give_back(placed)
        self.settle(job, placed.i, self._gone(placed.page) if entry is not None and entry.dropped else "")
        return False

    def _gone(self, page: Page) -> str:
        """Why a page left the CPU tier while it was being put there."""
        return "expired" if self._manager.expiry.was(page) else "cleared"

    def written(self, placed: Placed, outlet: Outlet, cause: str) -> None:
        """A writer's last word on a page, "" or why its tier has not got it. `released` gives the slot back.

        Where it is broken off, it may be said again.
        """
        if outlet not in placed.open:
            return
        self._arrived(placed.page.key, outlet)
        if not cause:
            placed.job.receipt.committed(placed.job.numbers[placed.i], outlet.tier.name)
            self._manager.counts["stored", outlet.tier.name] += 1
        elif cause == "deadline" and placed.lease is not None:
            placed.lease.owner = "quarantine"
        if cause and (cause in _UNWRITTEN or cause == f"{outlet.tier.name}_full"):
            outlet.admission.not_written()
        placed.cause = placed.cause or cause
        if len(placed.open) == 1:
            if placed.entry is not None:
                self._manager.cpu_index.mark_clean(placed.entry)  # refused for good, too: it must not stay for ever
            self.settle(placed.job, placed.i, placed.cause)
        placed.open.discard(outlet)

    def released(self, placed: Placed, outlet: Outlet) -> bool:
        """An outlet does not read the page's slot any more. True when none does; a slot of the bounce reserve is for
        its owner to give back then."""
        if outlet not in placed.reading:
            return False
        last = len(placed.reading) == 1
        if last:
            self._give_back(placed)
        placed.reading.discard(outlet)
        return last

    def _give_back(self, placed: Placed) -> None:
        if placed.lease is not None:
            self._manager.end(placed.lease)

    def abandon(self, placed: Placed) -> None:
        """The bytes of a placed page never came: undo its reservation."""
        if placed.entry is not None and not placed.copied:
            self._manager.cpu_index.drop(placed.entry)
        for outlet in placed.open:
            self._arrived(placed.page.key, outlet)
            outlet.admission.not_written()
        placed.open, placed.reading = set(), set()
        self._give_back(placed)
        self.settle(placed.job, placed.i, "error")

    def _abandon_all(self, some: Sequence[Placed]) -> None:
        for placed in some:
            self.abandon(placed)

    def settle(self, job: StoreJob, i: int, cause: str = "") -> None:
        """The last word on a page; again changes nothing."""
        if i not in job.left:
            return
        job.left.discard(i)
        if cause:
            self._manager.counts["dropped", cause] += 1
        job.receipt.finish(job.numbers[i], cause)
        self.queued -= 1
        self._cleaning -= job.receipt is _NOBODY
        if not self.queued:
            self.empty()

    def describe(self) -> dict[str, Any]:
        """For `stats()`: the policy, and what the SSD's admission let in and refused."""
        found = [outlet.admission.describe() for outlet in self.outlets[:1]]
        return {"write_policy": self._policy, "admission": found[0] if found else None}

    # -- from the CPU tier to the SSD, without a store ---------------------------------------------------------------

    def _used(self, keys: Sequence[bytes]) -> None:
        """Pages were hit, tail first: note those that have earned an offer to the SSD, heads first. Starts nothing."""
        refused = dict.fromkeys(key for outlet in self.outlets for key in outlet.admission.use(keys))
        landing = self._landing
        offered = keys if self._hits_offer else list(refused) if self._policy == "write_through" else []
        if landing is None:
            return
        for key in reversed(offered):
            slot = landing.index.slot(key)
            if slot is None:
                continue
            if self._policy == "write_through_selective":
                hits = self._hits[slot] = min(_MOST_HITS, self._hits[slot] + 1)
                if hits < self._hits_wanted:
                    continue
            self._earned.pop(key, None)
            self._earned[key] = None
        while len(self._earned) > landing.index.slots:
            del self._earned[next(iter(self._earned))]

    def offer_earned(self) -> int:
        """Send on what the lookups since the last load or store noted, as far as it is in memory; how many went."""
        landing = self._landing
        if landing is None or not self._earned:
            return 0
        earned, self._earned = self._earned, {}
        entries = map(landing.index.find, earned)
        return self._demote([entry.page for entry in entries if entry is not None], landing)

    def clean(self, everything: bool = False) -> int:
        """Send dirty pages on where the high watermark is passed, or all of them; how many went. `send` is called.

        The coldest first, so that eviction finds clean pages; each behind those before it. As many as the SSD has room
        for; where it does not keep up, others become clean as they are.
        """
        landing = self._landing
        offered = self.offer_earned() if everything else 0
        if landing is None or not landing.index.dirty_pages:
            return offered
        waiting = landing.index.dirty_pages - self._cleaning
        wanted = waiting if everything else waiting - self._low if waiting > self._high else 0
        wanted = min(wanted, self._limit - len(self.keys))
        sent = self._demote(landing.index.coldest_dirty(wanted, self.keys), landing) if wanted > 0 else 0
        if not everything and (self._manager.quarantine.off or self.behind or not self._room(self.outlets)):
            self._give_up()
        return offered + sent

    def _give_up(self) -> None:
        """The SSD takes no more. Where dirty pages are more than halfway from the high watermark to the whole tier, let
        the coldest be evicted unwritten, tails before heads, down to the high watermark.
        """
        index = self._manager.cpu_index
        surplus = min(index.dirty_pages - self._high, index.dirty_pages - self._cleaning)
        if index.dirty_pages <= self._most_held or surplus <= 0:
            return
        for page in list(reversed(index.coldest_dirty(surplus, self.keys)))[:surplus]:
            entry = index.find(page.key)
            if entry is not None:
                self._offer(page, self._lacking(page), behind=True)
                index.mark_clean(entry)

    def _demote(self, pages: Iterable[Page], landing: Tier) -> int:
        placed: list[Placed] = []
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(self._abandon_all, placed)
            placed.extend(self._leaving(pages, landing))
            if placed:
                self.send(placed)
            on_failure.pop_all()
        return len(placed)

    def _leaving(self, pages: Iterable[Page], landing: Tier) -> Iterator[Placed]:
        manager, index = self._manager, landing.index
        behind = self._policy != "write_back" and self._falls_behind()  # dirty pages keep their slots anyway
        for page in pages:
            lacking = self._lacking(page)
            if not lacking or manager.quarantine.off:
                continue
            entry = index.find(page.key)
            if entry is None or entry.state is not PageState.VERIFIED:
                continue
            if self._policy == "write_back" and not self._room(lacking):
                return  # dirty pages wait
            to, _ = self._offer(page, lacking, behind=behind)
            if not to:
                index.mark_clean(entry)
                continue
            job = StoreJob(_NOBODY, (0,), (page,), (manager.clearing.epoch(page.namespace),), entry.retention)
            placed = self._placed(job, 0, landing, entry, to, copied=True)
            self.queued += 1
            self._cleaning += 1
            yield placed


def _nothing() -> None:
    pass


def _keep(placed: Sequence[Placed]) -> None:
    raise AssertionError("no writer takes the pages that leave the CPU tier")
