"""What becomes of stores: which pages go to which tier, and when. Decisions only; no bytes, no threads, no torch.

A page is *offered* by a store. The planner accepts it (or drops and counts it), finds its slot in the CPU tier, and
says whether the SSD is to get it now, by the write policy:

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from gdscache.keys import Page
from gdscache.tiers.base import Lease
from gdscache.tiers.index import PageIndex
from gdscache.tiers.pages import Entry, PageState
from gdscache.tiers.retention import DEFAULT, Retention

if TYPE_CHECKING:
    from gdscache.config import StoreConfig
    from gdscache.tiers.admission import Admission
    from gdscache.tiers.manager import TierManager

# What one gather, and one write batch, takes at once: each costs turns at the locks that a model's thread wants, too.
_ROUND_BYTES, _ROUND_PAGES = 512 << 20, 1024
BATCH_BYTES = 128 << 20
_UNWRITTEN = ("closed", "switched_off", "lock_lost", "ssd_full")  # causes for which no byte of a page went out
_MOST_HITS = 255  # counted a page


def round_pages(extent_bytes: int) -> int:
    """Pages of a store that find slots and are gathered at a time."""
    return max(1, min(_ROUND_BYTES // extent_bytes, _ROUND_PAGES))


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


@dataclasses.dataclass(frozen=True, slots=True)
class Placed:
    """A page of a job and the slot that its bytes go to, or lie in.

    `entry` is its page in the CPU tier, under `lease`; None: the slot is of the bounce reserve. `copied`: the bytes are
    in the slot already. `to_ssd`: the SSD gets the page now.
    """

    job: StoreJob
    i: int
    slot: int
    entry: Entry | None
    lease: Lease | None
    copied: bool
    to_ssd: bool

    @property
    def page(self) -> Page:
        return self.job.pages[self.i]

    @property
    def space(self) -> str:
        """The memory that the slot is of."""
        return "bounce" if self.entry is None else "cpu"


class StorePlanner:
    """The state of all stores that were accepted and are not done.

    `send` is given pages of the CPU tier that are to be written to the SSD now, without any store; it calls `written`
    and `give_back` for each. `keys`: pages on their way to the SSD. These are at most `store.queue` bytes, and so are
    the other pages that are `queued`; without a CPU tier both together are.
    """

    def __init__(
        self,
        manager: TierManager,
        config: StoreConfig,
        extent_bytes: int,
        admission: Admission | None,
        watermarks: tuple[float, float] = (1.0, 1.0),
        *,
        selective: bool = False,
    ) -> None:
        """`selective`: loads do not promote every page that they read, so stores do not either."""
        self.keys: set[bytes] = set()
        self.queued = 0  # pages accepted and not finished
        self._cleaning = 0  # ... that are on their way from the CPU tier to the SSD without a store
        self.send: Callable[[Sequence[Placed]], None] = _keep
        self.empty: Callable[[], None] = _nothing  # called when nothing is queued any more
        self._manager = manager
        self._policy = config.write_policy if manager.ssd is not None else "never"
        self._hits_wanted = config.write_hits
        self._admission = admission
        self._selective = selective
        self._limit = config.queue // extent_bytes
        slots = 0 if manager.cpu is None else manager.cpu.index.slots
        low, high = watermarks
        self._low, self._high = int(low * slots), int(high * slots)
        # CPU slots that may be held by what is not on the SSD yet: pages on their way, or dirty ones.
        self._most_held = (self._high + slots) // 2 if self._policy == "write_back" else slots // 2
        self.behind = False  # the SSD was, when the store that is being placed had its turn: it is not waited for
        self._hits = bytearray(slots)  # of the page in each CPU slot, since it came
        # Hits offer pages of the CPU tier again where a first offer is not enough; the next store need not, then. Where
        # it is enough but for a lack of room, hits offer what was refused, and so does the next store.
        refuses = admission is not None and admission.refuses
        self._hits_offer = self._policy == "write_through_selective" or (self._policy == "write_through" and refuses)
        self._earned: dict[bytes, None] = {}  # pages that uses made worth an offer, for the next load or store
        if admission is not None:
            manager.on_use.append(self._used)

    # -- accepting ---------------------------------------------------------------------------------------------------

    def accept(self, pages: Sequence[Page], receipt: Receipt, retention: Retention = DEFAULT) -> list[int]:
        """The places of those pages that some tier lacks and the queue has room for; the last word on the others."""
        manager = self._manager
        manager.counts["stores", "requests"] += 1
        manager.retain(pages, retention)
        self.offer_earned()
        room = self._limit - self.queued + (0 if manager.cpu is None else len(self.keys))
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
        if self._admission is not None:
            self._admission.use([pages[number].key for number in wanted])
        return wanted

    def _missing(self, page: Page) -> bool:
        """True when a tier that is to have the page lacks it and nothing is bringing it."""
        cpu, ssd = self._manager.cpu, self._manager.ssd
        if cpu is not None and page.key not in cpu.index:  # nor does a store promote what the load before it did not
            return not (self._selective and ssd is not None and page.key in ssd.index)
        return (cpu is None or (self._policy == "write_through" and not self._hits_offer)) and self._ssd_lacks(page)

    def _ssd_lacks(self, page: Page) -> bool:
        ssd = self._manager.ssd
        return self._policy != "never" and ssd is not None and page.key not in self.keys and page.key not in ssd.index

    def _room(self, behind: bool) -> bool:
        """Whether one more page may set out for the SSD."""
        return not behind and len(self.keys) < self._limit

    def _falls_behind(self) -> bool:
        """Whether pages that are not on the SSD yet hold so much of the CPU tier that no more may."""
        cpu = self._manager.cpu
        if cpu is None:
            return False
        return (cpu.index.dirty_pages if self._policy == "write_back" else len(self.keys)) > self._most_held

    def _admits(self, page: Page, room: bool) -> str:
        """Offer a page to the SSD, which lacks it: why it does not get it, counted; "" when it does."""
        ssd, admission = self._manager.ssd, self._admission
        assert ssd is not None, "an offer to the SSD tier without one"
        assert admission is not None, "an SSD tier without admission"
        full = admission.asks_victim and ssd.spare_slots <= len(self.keys)  # those have no slot yet
        cause = admission.admit(page, ssd.index.coldest() if full else None, room=room)
        if cause:
            self._manager.counts["refused", cause] += 1
        return cause

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
        cpu = self._manager.cpu
        if cpu is None:
            return []
        lacking = sum(1 for page in pages if page.key not in cpu.index)
        return cpu.index.allocate_some(lacking, pages=pages)

    def free(self, slots: Sequence[int]) -> None:
        """Give CPU slots back that no page was put in."""
        if slots:
            self._manager.cpu_index.free(slots)

    def place(self, job: StoreJob, i: int, slots: list[int], bounced: list[int]) -> tuple[bool, Placed | None]:
        """Find a slot for page `i`, one of `slots` (CPU) or `bounced`, which shrink.

        `(True, None)`: nothing to do, settled; `(False, None)`: it needs a bounce slot and there is none.
        """
        manager, page, cpu = self._manager, job.pages[i], self._manager.cpu
        if manager.clearing.epoch(page.namespace) != job.epochs[i]:
            self.settle(job, i, "cleared")
            return True, None
        if cpu is not None:
            entry, copied = cpu.index.find(page.key), True
            if entry is None:
                if slots:
                    kept = manager.expiry.joined(page, job.retention)
                    entry, copied = cpu.index.insert(page, slots.pop(), PageState.PENDING, kept), False
                    self._hits[entry.slot] = 0
            elif not self._ssd_lacks(page) or entry.state is not PageState.VERIFIED:
                self.settle(job, i)  # there, or on its way by somebody else
                return True, None
            if entry is not None:
                wanted = self._policy == "write_through" and self._ssd_lacks(page)
                to_ssd = wanted and not self._admits(page, self._room(self.behind))
                if copied and not to_ssd:
                    self.settle(job, i)
                    return True, None
                return True, self._placed(job, i, cpu.index, entry, copied=copied, to_ssd=to_ssd)
        if not self._ssd_lacks(page) or self._policy == "write_through_selective":
            self.settle(job, i, "cpu_full" if cpu is not None else "")
            return True, None
        if manager.quarantine.off:  # its writes hold the bounce slots
            self.settle(job, i, manager.quarantine.cause)
            return True, None
        room = self._room(False)  # such a page holds no CPU slot
        if room and not bounced:
            return False, None
        if cause := self._admits(page, room):
            self.settle(job, i, cause)
            return True, None
        self.keys.add(page.key)
        return True, Placed(job, i, bounced.pop(), None, None, copied=False, to_ssd=True)

    def turn_away(self, job: StoreJob, i: int) -> None:
        """No bounce slot is free for page `i`, and the SSD is behind: it is dropped."""
        self.settle(job, i, self._admits(job.pages[i], room=False))

    def _placed(self, job: StoreJob, i: int, index: PageIndex, entry: Entry, *, copied: bool, to_ssd: bool) -> Placed:
        lease = self._manager.lease("store")
        lease.add(index, entry)
        if to_ssd:
            self.keys.add(entry.key)
        return Placed(job, i, entry.slot, entry, lease, copied=copied, to_ssd=to_ssd)

    # -- outcomes ----------------------------------------------------------------------------------------------------

    def publish(self, placed: Placed) -> bool:
        """The bytes are in the slot: the CPU tier shows the page. True when it goes on to the SSD now."""
        job, cpu, entry = placed.job, self._manager.cpu, placed.entry
        if cpu is not None and entry is not None and not placed.copied and cpu.index.commit(entry):
            job.receipt.committed(job.numbers[placed.i], "cpu")
            self._manager.counts["stored", "cpu"] += 1
            if self._policy == "write_back" and self._ssd_lacks(placed.page):
                cpu.index.mark_dirty(entry)
        if placed.to_ssd:
            return True
        self.give_back(placed)
        self.settle(job, placed.i, self._gone(placed.page) if entry is not None and entry.dropped else "")
        return False

    def _gone(self, page: Page) -> str:
        """Why a page left the CPU tier while it was being put there."""
        return "expired" if self._manager.expiry.was(page) else "cleared"

    def written(self, placed: Placed, cause: str) -> None:
        """The writer's last word on a page, "" or why it is not on the SSD. Its slot is given back by another call."""
        self.keys.discard(placed.page.key)
        if placed.entry is not None:
            self._manager.cpu_index.mark_clean(placed.entry)  # refused for good, too: it must not stay for ever
        if not cause:
            placed.job.receipt.committed(placed.job.numbers[placed.i], "ssd")
            self._manager.counts["stored", "ssd"] += 1
        elif cause == "deadline" and placed.lease is not None:
            placed.lease.owner = "quarantine"
        if cause in _UNWRITTEN and self._admission is not None:
            self._admission.not_written()
        self.settle(placed.job, placed.i, cause)

    def give_back(self, placed: Placed) -> None:
        """End the lease on a page of the CPU tier. A slot of the bounce reserve is for its owner to give back."""
        if placed.lease is not None:
            self._manager.end(placed.lease)

    def abandon(self, placed: Placed) -> None:
        """The bytes of a placed page never came: undo its reservation."""
        if placed.entry is not None and not placed.copied:
            self._manager.cpu_index.drop(placed.entry)
        if placed.to_ssd:
            self.keys.discard(placed.page.key)
            if self._admission is not None:
                self._admission.not_written()
        self.give_back(placed)
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
        admission = None if self._admission is None else self._admission.describe()
        return {"write_policy": self._policy, "admission": admission}

    # -- from the CPU tier to the SSD, without a store ---------------------------------------------------------------

    def _used(self, keys: Sequence[bytes]) -> None:
        """Pages were hit, tail first: note those that have earned an offer to the SSD, heads first. Starts nothing."""
        refused = self._admission.use(keys) if self._admission is not None else []
        cpu = self._manager.cpu
        offered = keys if self._hits_offer else refused if self._policy == "write_through" else []
        if cpu is None:
            return
        for key in reversed(offered):
            slot = cpu.index.slot(key)
            if slot is None:
                continue
            if self._policy == "write_through_selective":
                hits = self._hits[slot] = min(_MOST_HITS, self._hits[slot] + 1)
                if hits < self._hits_wanted:
                    continue
            self._earned.pop(key, None)
            self._earned[key] = None
        while len(self._earned) > cpu.index.slots:
            del self._earned[next(iter(self._earned))]

    def offer_earned(self) -> int:
        """Send on what the lookups since the last load or store noted, as far as the CPU tier has it; how many went."""
        cpu = self._manager.cpu
        if cpu is None or not self._earned:
            return 0
        earned, self._earned = self._earned, {}
        entries = map(cpu.index.find, earned)
        return self._demote([entry.page for entry in entries if entry is not None], cpu.index)

    def clean(self, everything: bool = False) -> int:
        """Send dirty pages on where the high watermark is passed, or all of them; how many went. `send` is called.

        The coldest first, so that eviction finds clean pages; each behind those before it. As many as the SSD has room
        for; where it does not keep up, others become clean as they are.
        """
        cpu = self._manager.cpu
        offered = self.offer_earned() if everything else 0
        if cpu is None or not cpu.index.dirty_pages:
            return offered
        waiting = cpu.index.dirty_pages - self._cleaning
        wanted = waiting if everything else waiting - self._low if waiting > self._high else 0
        wanted = min(wanted, self._limit - len(self.keys))
        sent = self._demote(cpu.index.coldest_dirty(wanted, self.keys), cpu.index) if wanted > 0 else 0
        if not everything and (self._manager.quarantine.off or not self._room(self.behind)):
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
                self._admits(page, room=False)
                index.mark_clean(entry)

    def _demote(self, pages: Iterable[Page], index: PageIndex) -> int:
        placed: list[Placed] = []
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(self._abandon_all, placed)
            placed.extend(self._leaving(pages, index))
            if placed:
                self.send(placed)
            on_failure.pop_all()
        return len(placed)

    def _leaving(self, pages: Iterable[Page], index: PageIndex) -> Iterator[Placed]:
        manager = self._manager
        behind = self._policy != "write_back" and self._falls_behind()  # dirty pages keep their slots anyway
        for page in pages:
            if not self._ssd_lacks(page) or manager.quarantine.off:
                continue
            entry = index.find(page.key)
            if entry is None or entry.state is not PageState.VERIFIED:
                continue
            if self._policy == "write_back" and not self._room(False):
                return  # dirty pages wait
            if self._admits(page, self._room(behind)):
                index.mark_clean(entry)
                continue
            job = StoreJob(_NOBODY, (0,), (page,), (manager.clearing.epoch(page.namespace),), entry.retention)
            placed = self._placed(job, 0, index, entry, copied=True, to_ssd=True)
            self.queued += 1
            self._cleaning += 1
            yield placed


def _nothing() -> None:
    pass


def _keep(placed: Sequence[Placed]) -> None:
    raise AssertionError("no writer takes the pages that leave the CPU tier")
