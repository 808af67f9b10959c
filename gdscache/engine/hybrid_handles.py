"""What a `HybridEngine` returns: hits, and the handles of loads, stores, prefetches and pins, each over all pools."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, TypeVar

from gdscache import arguments
from gdscache.groups.names import Chain
from gdscache.groups.reasons import GroupReasons
from gdscache.load.handle import LayerwiseLoad
from gdscache.load.report import LoadReport, told_of
from gdscache.moves import PageStatus
from gdscache.pages.hit import Hit
from gdscache.pages.reasons import joined
from gdscache.prefetch.handle import Prefetch, PrefetchReport
from gdscache.store.handle import StoreHandle
from gdscache.tiers.pins import Pin

if TYPE_CHECKING:
    from gdscache.engine.hybrid import HybridEngine

Said = TypeVar("Said")


@dataclasses.dataclass(frozen=True)
class HybridHit:
    """What `lookup` found: a snapshot, without a lease. `tokens` tokens from `start` on are cached in all groups.

    `pages`: by group, the numbers of the pages that a load brings, counted from the request's first token. `parted`:
    tokens up to which the groups that keep all tokens have every page. Where it is more than the hit, another prompt
    parted there: pass it as `keep_at` to `store`, and the next one finds its windows. `seconds` and
    `recompute_seconds` are expected, None before they are known; `declined`: tokens that the gate left out. `parts` and
    `order` are for the engine: by pool, the pages as its engine takes them, and of which group each is.
    """

    start: int
    tokens: int
    pages: Mapping[str, range]
    parted: int
    seconds: float | None = None
    recompute_seconds: float | None = None
    declined: int = 0
    parts: tuple[Hit, ...] = dataclasses.field(default=(), repr=False)
    order: tuple[Chain, ...] = dataclasses.field(default=(), repr=False)
    why: Callable[[], GroupReasons] | None = dataclasses.field(default=None, repr=False, compare=False)

    def reasons(self) -> GroupReasons:
        """By group, where its pages from `start` on are, up to the last full `alignment`, or why they are nowhere.

        It is worked out when it is asked for, and says what is known by then. Where a group keeps all tokens, a page
        behind a missing one is `behind`. Of windows every page is told, whether the hit needs it or not: a window is
        stored where a prompt ends (`store.window_every`).
        """
        return dict.fromkeys(self.pages, ()) if self.why is None else self.why()


@dataclasses.dataclass(frozen=True)
class HybridReport:
    """The verdict on a load. `tokens`: those of the hit, or 0 where a page of any group is bad. `pages`: by group, of
    each page of the hit. `why` is for `reasons`."""

    tokens: int
    pages: dict[str, tuple[PageStatus, ...]]
    bytes_by_tier: dict[str, int]
    seconds: float
    why: Callable[[], GroupReasons] = dataclasses.field(default=dict, repr=False, compare=False)

    def reasons(self) -> GroupReasons:
        """By group, which tier the hit's pages came from, or why they did not come; of a batch nothing. Worked out when
        asked for."""
        return self.why()


@dataclasses.dataclass(frozen=True)
class HybridStoreReport:
    """What became of a store, by group, and by the number of each page that was to be stored: `tiers` that committed it
    now, and why it was `dropped`. A page that was stored already has no tiers and no cause."""

    tiers: dict[str, dict[int, tuple[str, ...]]]
    dropped: dict[str, dict[int, str]]


class HybridLoad:
    """The handle of a load, or of a batch of them. Made by `HybridEngine.load` and `load_many`; thread-safe."""

    def __init__(self, engine: HybridEngine, hits: Sequence[HybridHit], loads: Sequence[LayerwiseLoad | None]) -> None:
        """`loads`: of each pool, of those of the hits that have pages there."""
        self._engine, self._hits, self._loads = engine, hits, loads

    @property
    def begun(self) -> list[LayerwiseLoad]:
        """The loads of the pools that have pages of it."""
        return [load for load in self._loads if load is not None]

    @property
    def tokens(self) -> int:
        """Tokens on their way, over all requests: those of a hit, or 0 where a page of it has gone since."""
        return sum(self.tokens_by_request)

    @property
    def tokens_by_request(self) -> tuple[int, ...]:
        """`tokens` of each request, in the order in which they were given."""
        return tuple(
            hit.tokens if all(pages in (None, len(order)) for pages, order in zip(row, hit.order, strict=True)) else 0
            for hit, row in self._by_request(lambda load: [part.pages for part in load.parts])
        )

    def wait(self, layer: int, seconds: float | None = None) -> None:
        """Order the current stream after this layer's pages: see `LayerwiseLoad.wait`. `layer`: of the model."""
        pool, local = self._engine.place(layer)
        load = self._loads[pool]
        if load is not None:
            load.wait(local, seconds)

    def done(self) -> bool:
        """True when the verdict is there; never waits."""
        return all(load is None or load.done() for load in self._loads)

    def results(self, seconds: float | None = None) -> list[HybridReport]:
        """The verdict on each request, in order. Never raises for a bad page; `DeadlineError` when it is late."""
        left = remaining(seconds)
        return [self._report(hit, row) for hit, row in self._by_request(lambda load: load.results(left()))]

    def result(self, seconds: float | None = None) -> HybridReport:
        """The verdict; of a batch, that on all its requests as one, whose `tokens` are the sum."""
        reports = self.results(seconds)
        if len(reports) == 1:
            return reports[0]
        by_tier = Counter[str]()
        for report in reports:
            by_tier.update(report.bytes_by_tier)
        pages = {
            group.name: tuple(one for r in reports for one in r.pages[group.name]) for group in self._engine.groups
        }
        took = max((report.seconds for report in reports), default=0.0)
        return HybridReport(sum(report.tokens for report in reports), pages, dict(by_tier), took)

    def _by_request(self, said: Callable[[LayerwiseLoad], Sequence[Said]]) -> list[tuple[HybridHit, list[Said | None]]]:
        """Each hit, with what the load of each pool says of it; None where it has no page there."""
        rows: list[list[Said | None]] = [[] for _ in self._hits]
        for pool, load in enumerate(self._loads):
            of_those = iter(said(load) if load is not None else ())
            for hit, row in zip(self._hits, rows, strict=True):
                row.append(next(of_those) if hit.order[pool] else None)
        return list(zip(self._hits, rows, strict=True))

    def _report(self, hit: HybridHit, reports: Sequence[LoadReport | None]) -> HybridReport:
        pages: dict[str, list[PageStatus]] = {name: [] for name in hit.pages}
        by_tier, took, whole = Counter[str](), 0.0, True
        names = [group.name for group in self._engine.groups]
        for report, order in zip(reports, hit.order, strict=True):
            if report is None:
                continue
            statuses = [*report.pages, *[PageStatus.GONE] * (len(order) - len(report.pages))]
            for g, status in zip(order.groups, statuses, strict=True):
                pages[names[g]].append(status)
                whole = whole and status is PageStatus.LOADED
            by_tier.update(report.bytes_by_tier)
            took = max(took, report.seconds)
        told = {name: tuple(some) for name, some in pages.items()}
        sizes = {group.name: group.page_tokens for group in self._engine.groups}
        why = functools.partial(_came, hit, names, sizes, told)
        return HybridReport(hit.tokens if whole else 0, told, dict(by_tier), took, why)

    def __await__(self) -> Generator[Any, None, HybridReport]:
        """`result()` in an event loop of asyncio's. The load goes on where the await is cancelled."""
        for load in self.begun:
            yield from load.__await__()
        return self.result()

    def cancel(self) -> None:
        """Stop early. The slots stay the engine's until `released`."""
        for load in self.begun:
            load.cancel()

    def released(self, seconds: float | None = None) -> None:
        """Wait until nothing writes to the slots any more. Raises `DeadlineError`."""
        left = remaining(seconds)
        for load in self.begun:
            load.release_event.synchronize(left())


class HybridStore:
    """The handle of a store. Made by `HybridEngine.store`; thread-safe."""

    def __init__(self, names: Sequence[str], handles: Sequence[StoreHandle], order: Sequence[Chain]) -> None:
        """`names`: of the groups; `order`: the pages of each pool's store."""
        self._names, self._handles, self._order = names, handles, order

    def done(self) -> bool:
        """True when every page has its outcome; never waits."""
        return all(handle.done() for handle in self._handles)

    def result(self, seconds: float | None = None) -> HybridStoreReport:
        """What every tier committed. Waits up to `seconds` (None: until it is over), then raises `DeadlineError`."""
        left = remaining(seconds)
        tiers: dict[str, dict[int, tuple[str, ...]]] = {name: {} for name in self._names}
        dropped: dict[str, dict[int, str]] = {name: {} for name in self._names}
        for handle, order in zip(self._handles, self._order, strict=True):
            report = handle.result(left())
            for place, one in enumerate(order):
                name = self._names[one.group]
                tiers[name][one.number] = report.tiers[place]
                if place in report.dropped:
                    dropped[name][one.number] = report.dropped[place]
        return HybridStoreReport(tiers, dropped)

    def __await__(self) -> Generator[Any, None, HybridStoreReport]:
        """`result()` in an event loop of asyncio's. The store goes on where the await is cancelled."""
        for handle in self._handles:
            yield from handle.__await__()
        return self.result()

    def released(self, seconds: float | None = None) -> None:
        """Wait until the slots may be written again. Raises `DeadlineError`."""
        left = remaining(seconds)
        for handle in self._handles:
            handle.release_event.synchronize(left())


class HybridPrefetch:
    """The handle of a prefetch. Made by `HybridEngine.prefetch`; thread-safe. Leaving its `with` block cancels it."""

    def __init__(self, engine: HybridEngine, hit: HybridHit, parts: Sequence[Prefetch | None]) -> None:
        self._engine, self._hit, self._parts = engine, hit, parts

    @property
    def tokens(self) -> int:
        """Tokens of the hit that it has seen in the CPU tier: all of them, or 0."""
        return self._if_all(lambda part: part.tokens)

    @property
    def begun(self) -> tuple[int, ...]:
        """By pool, how many of its first pages have had their turn: see `Prefetch.begun`."""
        return tuple(0 if part is None else part.begun for part in self._parts)

    @property
    def verified(self) -> int:
        """Tokens of the hit that lie in the CPU tier now, pinned, and were found good: all of them, or 0."""
        return self._if_all(lambda part: part.verified)

    def _if_all(self, tokens: Callable[[Prefetch], int]) -> int:
        there = zip(self._engine.engines, self._parts, self._hit.order, strict=True)
        good = all(
            part is None or tokens(part) == len(order) * engine.layout.page_tokens for engine, part, order in there
        )
        return self._hit.tokens if good else 0

    def hit(self) -> HybridHit:
        """The hit of pages that are verified and pinned, for a load that cannot fail but by the copy itself; one of 0
        tokens where some are not. Raises `InvalidValueError` without pins."""
        parts = tuple(
            part if prefetch is None else prefetch.hit()
            for part, prefetch in zip(self._hit.parts, self._parts, strict=True)
        )
        if any(len(part.pages) < len(order) for part, order in zip(parts, self._hit.order, strict=True)):
            return self._engine.nothing(self._hit.start)
        return dataclasses.replace(self._hit, parts=parts)

    def done(self) -> bool:
        """True when it has ended; never waits."""
        return all(part is None or part.done() for part in self._parts)

    def wait(self, seconds: float | None = 0.0) -> int:
        """Wait up to so many seconds for its end, then stop it, and return `tokens`: see `Prefetch.wait`."""
        left = remaining(seconds)
        for part in filter(None, self._parts):
            part.wait(left())
        return self.tokens

    def result(self, seconds: float | None = None) -> list[PrefetchReport]:
        """Wait until it has ended, by pool: see `Prefetch.result`."""
        left = remaining(seconds)
        return [part.result(left()) for part in self._parts if part is not None]

    def __await__(self) -> Generator[Any, None, list[PrefetchReport]]:
        """`result()` in an event loop of asyncio's. The prefetch goes on where the await is cancelled."""
        for part in filter(None, self._parts):
            yield from part.__await__()
        return self.result()

    def cancel(self) -> None:
        """End it, and its pins. Twice is fine."""
        for part in filter(None, self._parts):
            part.cancel()

    release = cancel

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.cancel()


class HybridPin:
    """The pages of a hit, kept from eviction until `release` or until its time is up."""

    def __init__(self, hit: HybridHit, pins: Sequence[tuple[Pin, int]]) -> None:
        """`pins`: of each pool, with the tokens that it counts where it holds all its pages."""
        self._hit, self._pins = hit, pins

    @property
    def tokens(self) -> int:
        """Tokens of the hit, all of whose pages it holds now; else 0."""
        return self._hit.tokens if all(pin.tokens == whole for pin, whole in self._pins) else 0

    def release(self) -> None:
        """Let the pages go; twice is fine."""
        for pin, _ in self._pins:
            pin.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


def _came(
    hit: HybridHit,
    names: Sequence[str],
    page_tokens: Mapping[str, int],
    statuses: Mapping[str, Sequence[PageStatus]],
) -> GroupReasons:
    """Why the pages of a hit came, by group; the tiers are those of the lookup."""
    tiers: dict[str, list[str]] = {name: [] for name in statuses}
    for part, order in zip(hit.parts, hit.order, strict=True):
        for g, tier in zip(order.groups, part.tiers, strict=True):
            tiers[names[g]].append(tier)
    return {
        name: joined(hit.pages[name].start * page_tokens[name], page_tokens[name], map(told_of, some, tiers[name]))
        for name, some in statuses.items()
    }


def remaining(seconds: float | None) -> Callable[[], float | None]:
    """What is left of so many seconds that begin now, for one wait after another."""
    limit = arguments.seconds(seconds)
    if limit is None:
        return lambda: None
    end = time.monotonic() + limit
    return lambda: max(0.0, end - time.monotonic())
