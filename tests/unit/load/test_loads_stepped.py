"""Every order of what can happen to small loads: landings, failures, damage, deadlines, copies, cancels, a close.

The loader, its steps and the execution of moves are the engine's; a machine that does nothing by itself stands in for
threads, devices and time (stepped_machine.py). After each step what is visible has the right bytes, and a layer
that is said to be ready is there; after the last everything has ended, and given back what it held.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import random
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from gdscache.commands.replay.hierarchy import ModelSsd, ModelTier
from gdscache.config import LoadConfig
from gdscache.errors import EngineClosedError
from gdscache.extents import HostExtents
from gdscache.index.table import Entry, PageState
from gdscache.load import run as load_run
from gdscache.load.handle import LayerwiseLoad
from gdscache.load.loader import Loader
from gdscache.load.plan import LoadPlan
from gdscache.load.planner import LoadPlanner
from gdscache.moves import PageStatus, Priority, Steps, failure
from gdscache.pages.checksum import Checksums, layer_checksums
from gdscache.pages.keys import Page
from gdscache.pages.layout import GroupSizes
from gdscache.pages.planes import PagedPlanes
from gdscache.tiers.cpu import Bounce
from gdscache.tiers.manager import TierManager
from tests.support.helpers import MHA, SEED, layout_of, read_page, write_page
from tests.support.stepped import Order, SteppedExecutor, every_order, prompt, random_orders
from tests.support.stepped_machine import Choice, SteppedMachine

LAYOUT = layout_of(MHA | {"layers": 2, "head_dim": 72})  # two groups of a layer each, with the sizes below
SIZES = GroupSizes(least=4096, first=1)
BLOCKS = 24
CPU = torch.device("cpu")


@functools.cache
def content(key: bytes) -> bytes:
    """The extent of a page."""
    return random.Random(key).randbytes(LAYOUT.page_bytes).ljust(LAYOUT.extent_bytes, b"\0")


@functools.cache
def sums(key: bytes) -> Checksums:
    return layer_checksums(memoryview(content(key)), LAYOUT.layer_bounds)


@functools.cache
def memory(slots: int, owner: str) -> HostExtents:
    """Memory that runs take one after the other: none is right about what another left there."""
    return HostExtents(LAYOUT, slots * LAYOUT.extent_bytes, "off")


@functools.cache
def pool() -> PagedPlanes:
    return PagedPlanes.allocate(LAYOUT, BLOCKS, CPU)


@pytest.fixture(autouse=True)
def _quiet_and_in_small_groups(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(load_run, "GROUP_SIZES", SIZES)
    logging.disable(logging.ERROR)  # the quarantine says when it switches the tier off, thousands of times
    yield
    logging.disable(logging.NOTSET)


def right(key: bytes) -> Any:
    return np.frombuffer(content(key), np.uint8)[: LAYOUT.page_bytes]


class Ssd(ModelSsd):
    """Knows what it has."""

    def checksums(self, entries: Sequence[Entry]) -> Checksums:
        return np.stack([sums(entry.key) for entry in entries])


@dataclasses.dataclass(frozen=True)
class Small:
    """How large everything is, and what is done: a `load` or a `prefetch` of so many pages of a prompt, a load that is
    `checked` of what the CPU tier has of them, a `cancel` of the first load; `replace` drops these pages from there,
    and puts others into whatever slots are free then. `resident`: pages of the first prompt in the CPU tier. `faults`:
    how many there may be."""

    acts: tuple[tuple[str, int, int], ...]
    cpu: int | None = 4
    bounce: int = 4
    resident: int = 0
    faults: int = 1
    verify: str = "once"
    threads: int = 2
    keep: bool = True
    breaks: int = 0  # the copy that cannot be queued, from 1
    part: int = 0  # pages that are planned before the first of them moves; 0: all


@dataclasses.dataclass
class Begun:
    """A load, and what was seen of it."""

    load: LayerwiseLoad
    pages: list[Page]
    blocks: list[int]
    at: float  # when it was begun
    seen: dict[int, list[Any]] = dataclasses.field(default_factory=dict)  # layer -> bytes when it was said to be ready
    left: bool = False

    @property
    def statuses(self) -> list[PageStatus]:
        """What became of each page."""
        assert all(part.report is not None for part in self.load.parts), "no report"
        return [status for part in self.load.parts if part.report is not None for status in part.report.pages]


class Parted(Loader):
    """Loads are planned in parts."""

    first = 0

    def _first_part(self, pages: int) -> int | None:
        return self.first if 0 < self.first < pages else None


class Interrupted(LoadPlanner):
    """Between the parts of a plan other things happen: whatever may, for a while."""

    def __init__(self, manager: TierManager, run: Run) -> None:
        super().__init__(manager)
        self._run = run

    def go_on(self, plan: LoadPlan, most: int | None = None) -> None:
        for _ in range(2 if len(plan) else 0):
            if found := self._run.executor.choices():
                self._run.choose(found).do()
        super().go_on(plan, most)


class Run(Order):
    """One order of what may happen to a case."""

    def __init__(self, small: Small, order: Sequence[int], rng: random.Random | None = None) -> None:
        super().__init__(order, rng, small.faults)
        self.small = small
        self.cpu = None if small.cpu is None else ModelTier("cpu", small.cpu, LAYOUT.extent_bytes, "lru")
        self.ssd = Ssd(16, LAYOUT.extent_bytes, "lru", 0)
        self.manager = TierManager(threading.RLock(), [tier for tier in (self.cpu, self.ssd) if tier is not None])
        memories = {}
        if small.cpu is not None:
            memories["cpu"] = self.memory = memory(small.cpu, "cpu")
        self.bounce = Bounce(memory(small.bounce, "bounce"), self.manager.quarantine)
        self.tiers: dict[str, ModelTier] = {"ssd": self.ssd} | ({} if self.cpu is None else {"cpu": self.cpu})
        self.ssd_slots: dict[bytes, int] = {}
        stored = self._stored()
        planes = pool()
        self.planes = planes.tensors
        self.machine = SteppedMachine(planes, memories, {"ssd": stored}, self.bounce, breaks=small.breaks)
        self.files = self.machine.files["ssd"]
        self.files.begins = self._read_begins
        self.executor = SteppedExecutor(self.choose, self.machine)
        self.planner = Interrupted(self.manager, self)
        how = LoadConfig(verify=small.verify), 100.0
        parts = self.planner, self.executor, LAYOUT
        self.loader = Parted(*parts, *how, threads=small.threads, keep=small.keep)
        self.loader.first = small.part
        self.lane = self.executor.lane(Priority.PREFETCH, lambda: None)
        self.loads: list[Begun] = []
        self._blocks = iter(range(BLOCKS))
        self.acts = [
            Choice(f"{what} {seed}", functools.partial(self._do, what, seed, n)) for what, seed, n in small.acts
        ]

    def _stored(self) -> dict[int, bytes]:
        """What the tiers have to begin with."""
        found = {}
        seeds = [(s, n) for what, seed, n in self.small.acts if n for s in (seed, seed + (what == "both"))]
        for page in dict.fromkeys(page for seed, n in seeds for page in prompt(seed, n)):
            (slot,) = self.ssd.index.allocate(1) or ()
            self._put(self.ssd, page, slot)
            found[slot] = content(page.key)
            self.ssd_slots[page.key] = slot
        first = next(seed for what, seed, n in self.small.acts if n)
        for page in prompt(first, self.small.resident):
            assert self.cpu is not None, "no CPU tier"
            (slot,) = self.cpu.index.allocate(1) or ()
            self.memory.memory(slot)[:] = content(page.key)
            self.memory.checksums[slot] = sums(page.key)
            self._put(self.cpu, page, slot)
        return found

    def _put(self, tier: ModelTier, page: Page, slot: int) -> None:
        entry = tier.index.insert(page, slot, PageState.VERIFIED)
        tier.index.lease(entry)
        tier.index.release(entry)

    # -- what the caller does ------------------------------------------------------------------------------------------

    def _do(self, what: str, seed: int, pages: int) -> None:
        if what == "cancel":
            for begun in self.loads[:1]:
                begun.load.cancel()
        elif what == "prefetch":
            chunk, _, _ = self.planner.plan_prefetch(prompt(seed, pages), 0, pages, ())
            if chunk.pages:
                self.lane.start(self._bring(chunk))
        elif what == "close":
            self.loader.close()
        elif what == "replace":
            self._replace(prompt(seed, pages), prompt(seed + 50, pages))
        elif what == "checked":
            self._load(prompt(seed, pages), checked=True)
        elif what == "both":
            self._load(prompt(seed, pages), prompt(seed + 1, pages))
        else:
            self._load(prompt(seed, pages))

    def _bring(self, plan: LoadPlan) -> Steps[None]:
        assert (yield from failure(self.loader.bring(plan))) is None, "a prefetch broke off"

    def _replace(self, old: list[Page], new: list[Page]) -> None:
        assert self.cpu is not None, "no CPU tier"
        for page in old:
            entry = self.cpu.index.get(page.key)
            if entry is not None:
                self.cpu.index.drop(entry)
        for page in new:
            for slot in self.cpu.index.take_free(1):
                self.memory.memory(slot)[:] = content(page.key)
                self.memory.checksums[slot] = sums(page.key)
                self._put(self.cpu, page, slot)

    def _load(self, *requests: list[Page], checked: bool = False) -> None:
        pages = [page for some in requests for page in some]
        blocks = [next(self._blocks) for _ in pages]
        self._starts = self.machine.now
        try:
            table = np.array(blocks).reshape(-1, 1)
            starts = itertools.accumulate(map(len, requests), initial=0)
            batch = [(some, table[at : at + len(some)], 0) for some, at in zip(requests, starts, strict=False)]
            load = self.loader.start(batch, "load", checked=checked)
        except EngineClosedError:
            return
        moved = [
            (some[: part.pages], table[: part.pages]) for part, (some, table, _) in zip(load.parts, batch, strict=True)
        ]
        pages = [page for some, _ in moved for page in some]  # without those behind one that failed before
        self.loads.append(
            Begun(load, pages, np.concatenate([table for _, table in moved]).reshape(-1).tolist(), self.machine.now)
        )

    def _read_begins(self) -> None:
        running = [begun.at for begun in self.loads if not begun.load.done()]
        prefetching = any(what == "prefetch" for what, _, _ in self.small.acts)
        assert prefetching or self.machine.now in [*running, self._starts], "a read begins behind the deadline"

    # -- one order -----------------------------------------------------------------------------------------------------

    _starts = -1.0  # when a load was last asked for

    def play(self) -> None:
        while True:
            found = self.executor.choices()
            if not found and not self.acts:
                break
            choice = self.choose(found)
            self.busy = True
            choice.do()
            self.busy = False
            self.check()
        self.loader.close()
        self.check_end()

    def check(self) -> None:
        """What is visible has the right bytes; what a load has said to be ready is looked at."""
        if self.cpu is not None:
            for entry in list(self.cpu.index):
                if self.cpu.index.has(entry.key):
                    assert bytes(self.memory.memory(entry.slot)[: LAYOUT.page_bytes]) == bytes(right(entry.key)), (
                        "wrong bytes"
                    )
        self._check_pinned()
        for begun in self.loads:
            fences = begun.load._layers
            for layer in range(len(fences)):
                over = begun.load.release_event.done()  # copies of others may be behind ours, and before the event
                if layer not in begun.seen and (fences.done(layer) or (over and fences.queued(layer))):
                    begun.seen[layer] = [self._layer(block, layer) for block in begun.blocks]
            if not begun.left and begun.load.release_event.done():
                self._leave(begun)

    def _check_pinned(self) -> None:
        """What is being read or copied is nobody else's."""
        kept = {
            name: {e.slot for e in tier.index if e.leases} | tier.index._leaving.keys()
            for name, tier in self.tiers.items()
        }
        written: list[range] = []  # of the reserve: what passes through lies in nobody else's bytes
        for slot, memory, part in [touched for io in self.files.flying for touched in io.touching]:
            assert slot in kept["ssd"], "a slot that is read was given back"
            if memory == "bounce":
                written.append(part)
            else:
                assert part.start // LAYOUT.extent_bytes in kept["cpu"], "a slot that is read into was given back"
        for job, extents, places in self.machine.copies:
            for place in places:
                if job.window:
                    written.append(extents.where(place))
                else:
                    assert place in kept["cpu"], "a slot of the CPU tier in use was given back"
        written.sort(key=lambda part: part.start)
        assert all(a.stop <= b.start for a, b in itertools.pairwise(written)), "two pages share bytes of the reserve"

    def _layer(self, block: int, layer: int) -> Any:
        return torch.cat([tensor[block].reshape(-1).view(torch.uint8) for tensor in self.planes[layer]]).numpy()

    def _leave(self, begun: Begun) -> None:
        """Its blocks are somebody else's now."""
        begun.left = True
        for page, block, status in zip(begun.pages, begun.blocks, begun.statuses, strict=True):
            if status is PageStatus.LOADED:
                assert np.array_equal(read_page(self.planes, LAYOUT, [block]), right(page.key)), "a page is not there"
        for block in begun.blocks:
            write_page(self.planes, LAYOUT, [block], np.full(LAYOUT.page_bytes, 7, np.uint8))

    def check_end(self) -> None:
        for begun in self.loads:
            assert begun.load.done(), "a load has no end"
            statuses = begun.statuses
            assert begun.left, "the blocks of a load are never free"
            assert len(begun.seen) == LAYOUT.n_layers, "a layer is never ready"
            assert PageStatus.PENDING not in statuses
            assert self.small.breaks or PageStatus.ABORTED not in statuses, "a load broke off"
            for i, (page, status) in enumerate(zip(begun.pages, statuses, strict=True)):
                start = 0
                for layer, (begin, end) in enumerate(LAYOUT.layer_bounds):
                    if status is PageStatus.LOADED:
                        seen = begun.seen[layer][i]
                        assert np.array_equal(seen, right(page.key)[begin:end]), "a layer was said to be ready early"
                    start = end
                assert start == LAYOUT.page_bytes
            self._check_causes(begun, statuses)
            for block in begun.blocks:
                assert (read_page(self.planes, LAYOUT, [block]) == 7).all(), "written behind the end"
        assert not self.planner._filling, "pages are still being filled"
        assert not +self.planner.under_way, "pages are still under way"
        assert not self.manager.stats()["leases"]
        assert self.manager.check() == []
        assert self.machine.moves.free_slots() == len(self.bounce.loads), "a slot of the reserve is lost"
        assert not self.machine.moves.held_slots()
        self.machine.moves.close()
        assert not self.manager.quarantine.requests
        for tier in (self.cpu, self.ssd):
            if tier is not None:
                assert all(tier.index.has(entry.key) for entry in tier.index), f"a page of the {tier.name} never ends"
                assert not any(entry.leases for entry in tier.index), f"a page of the {tier.name} stays in use"
                assert tier.index.free_slots + len(tier.index) == tier.index.slots, f"a slot of the {tier.name} is lost"

    def _check_causes(self, begun: Begun, statuses: Sequence[PageStatus]) -> None:
        """What is wrong with a page is what happened to it."""
        files, late = self.files, self.machine.now > 0  # perhaps for the load that brings a page
        if begun.load.checked:
            assert set(statuses) <= {PageStatus.LOADED, PageStatus.CANCELLED} or self.small.breaks
        for page, status in zip(begun.pages, statuses, strict=True):
            slot = self.ssd_slots[page.key]
            if status is PageStatus.CHECKSUM:
                assert slot in files.damaged, "good bytes are said to be damaged"
            elif status is PageStatus.IO_ERROR:
                assert slot in files.failed, "a read is said to have failed"
            elif status is PageStatus.DEADLINE:
                assert late, "time is not up"
                alone = [what for what, _, pages in self.small.acts if pages] == ["load"]  # nobody else reads pages
                here = alone and files.in_time.get(slot, 0) >= LAYOUT.extent_bytes
                assert not here, "what was read in time is late"
            elif status is PageStatus.CANCELLED:
                assert begun.load.cancelled
            elif status is PageStatus.ABORTED:
                assert self.small.breaks
            else:
                assert status is PageStatus.LOADED or (status is PageStatus.SWITCHED_OFF and late), status


LOAD = ("load", 1, 2)
CASES = {
    "memory": Small((LOAD,), resident=2),
    "memory, always verified": Small((LOAD,), resident=2, verify="always"),
    "files": Small((LOAD,), faults=2),
    "files and memory": Small((("load", 1, 3),), resident=1),
    "past the CPU tier": Small((("load", 1, 3),), keep=False),
    "no CPU tier": Small((("load", 1, 3),), cpu=None),
    "a reserve of two slots, for two": Small((("load", 1, 3), ("load", 2, 3)), cpu=None, bounce=4),
    "a reserve of one slot, for two": Small((LOAD, ("load", 2, 2)), cpu=None, bounce=2),
    "all ways at once": Small((("load", 1, 4),), cpu=2, resident=1),
    "two that share a page": Small((LOAD, ("load", 2, 2))),
    "two requests that share a page": Small((("both", 1, 2),)),
    "two requests that share pages in memory": Small((("both", 1, 2),), resident=2),
    "two requests past the CPU tier": Small((("both", 1, 2),), keep=False),
    "one twice": Small((LOAD, LOAD)),
    "one twice, one thread": Small((LOAD, LOAD), threads=1),
    "cancelled": Small((LOAD, ("cancel", 0, 0))),
    "cancelled, past the CPU tier": Small((("load", 1, 3), ("cancel", 0, 0)), keep=False),
    "cancelled, and shared": Small((LOAD, ("load", 2, 2), ("cancel", 0, 0))),
    "late, and others behind": Small((("load", 1, 1), ("load", 2, 3)), cpu=16),
    "late, and others behind, past the CPU tier": Small((("load", 1, 1), ("load", 2, 3)), bounce=16, keep=False),
    **{f"copy {n} breaks": Small((("load", 1, 3), LOAD), resident=1, breaks=n) for n in (1, 2, 3, 4)},
    **{f"copy {n} breaks, past the CPU tier": Small((("load", 1, 3),), keep=False, breaks=n) for n in (1, 2, 3)},
    "a prefetch before": Small((("prefetch", 1, 2), LOAD)),
    "a prefetch behind": Small((LOAD, ("prefetch", 2, 2))),
    "checked": Small((("checked", 1, 2),), resident=2, verify="always"),
    "checked, of which a part is there": Small((("checked", 1, 3),), resident=2),
    "checked, and its pages are replaced": Small((("checked", 1, 2), ("replace", 1, 2)), resident=2),
    "checked, replaced, and again": Small((("checked", 1, 2), ("replace", 1, 2), ("checked", 1, 2)), resident=2, cpu=2),
    "checked, behind a prefetch": Small((("prefetch", 1, 2), ("checked", 1, 2))),
    "checked, and cancelled": Small((("checked", 1, 2), ("cancel", 0, 0), ("replace", 1, 2)), resident=2),
    "checked, beside others": Small((("load", 1, 3), ("checked", 1, 3), ("load", 2, 2)), resident=1, threads=1),
    **{f"checked, copy {n} breaks": Small((("checked", 1, 3), LOAD), resident=3, breaks=n) for n in (1, 2, 3)},
    "closed": Small((LOAD, ("close", 0, 0), ("load", 2, 2))),
    "in parts": Small((("load", 1, 4),), part=1, faults=2),
    "in parts, out of files and memory": Small((("load", 1, 4),), resident=2, part=1, cpu=8),
    "in parts, memory alone": Small((("load", 1, 4),), resident=4, part=2),
    "in parts, past the CPU tier": Small((("load", 1, 4),), part=1, keep=False),
    "in parts, no CPU tier": Small((("load", 1, 4),), part=2, cpu=None, bounce=2),
    "in parts, and shared": Small((("load", 1, 3), ("load", 2, 3), ("load", 1, 3)), part=1, cpu=8, threads=1),
    "in parts, behind a prefetch": Small((("prefetch", 1, 3), ("load", 1, 4)), part=1, cpu=8),
    "in parts, two requests": Small((("both", 1, 3),), part=2, cpu=8),
    "in parts, cancelled": Small((("load", 1, 3), ("load", 2, 3), ("cancel", 0, 0)), part=1, keep=False),
    "in parts, checked": Small((("checked", 1, 3), ("replace", 1, 3)), resident=3, part=1),
    **{f"in parts, copy {n} breaks": Small((("load", 1, 3), LOAD), part=1, cpu=8, breaks=n) for n in (1, 2, 3)},
    "closed, one of two waiting": Small((LOAD, ("load", 2, 2), ("close", 0, 0)), threads=1),
}


def test_a_layer_is_ready_before_the_next_one_is_read() -> None:
    """The first choices are taken; whatever they do, the reads of the second group wait."""
    run = Run(CASES["files"], ())
    run.acts.pop(0).do()
    (begun,) = run.loads
    for _ in range(100):
        first = [
            choice for choice in run.executor.choices() if choice.name != "read 2 of ssd lands" and not choice.fault
        ]
        if begun.load._layers.done(0):
            break
        next(choice for choice in first if "read 2" not in choice.name).do()
    assert begun.load._layers.done(0)
    assert not begun.load._layers.queued(1)
    while found := run.executor.choices():
        found[0].do()
        run.check()
    run.check_end()


@pytest.mark.parametrize("case", CASES)
def test_some_orders(case: str) -> None:
    assert every_order(functools.partial(Run, CASES[case]), 6)
    random_orders(functools.partial(Run, CASES[case]), 6, SEED)


@pytest.mark.suite
@pytest.mark.parametrize("case", CASES)
def test_more_orders(case: str) -> None:
    random_orders(functools.partial(Run, CASES[case]), 80, SEED + 60)


@pytest.mark.soak
@pytest.mark.parametrize("case", CASES)
def test_every_order(case: str, record_property: Any) -> None:
    record_property("orders", every_order(functools.partial(Run, CASES[case]), 200_000))
    random_orders(functools.partial(Run, dataclasses.replace(CASES[case], faults=3)), 20_000, SEED)
