"""The results of a `HybridEngine`: hits, and handles of loads, stores, prefetches and pins, each over all pools."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from gdscache.arguments import remaining
from gdscache.errors import GdsCacheError
from gdscache.groups.names import Chain, GroupNames
from gdscache.load.handle import LayerwiseLoad
from gdscache.load.plan import LoadReport, told_of
from gdscache.moves import PageStatus
from gdscache.pages.hit import CACHED, Hit, Reason, Told, joined, words
from gdscache.prefetch.handle import Prefetch, PrefetchReport
from gdscache.runtime.calls import Released
from gdscache.store.handle import StoreHandle
from gdscache.tiers.pins import Pin

if TYPE_CHECKING:
    from gdscache.engine.hybrid import HybridEngine

Said = TypeVar("Said")
GroupReasons = dict[str, tuple[Reason, ...]]


@dataclasses.dataclass(frozen=True)
class HybridHit:
    """The result of `lookup`: a snapshot, without a lease. `tokens` tokens from `start` on are cached in all groups.

    `pages`: by group, the numbers of the pages that a load brings, counted from the request's first token. `parted`:
    tokens up to which the groups that keep all tokens have every page. If it is more than the hit, another prompt
    parted there: pass it as `keep_at` to `store`, and the next prompt finds its windows. `seconds` and
    `recompute_seconds` are expected, None before they are known; `declined`: tokens that the gate left out. `parts` and
    `order` are for the engine: by pool, the pages as its engine takes them, and the group of each.
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
        """By group, the tiers of its pages from `start` to the last full `alignment`, or why they are in none.

        Computed when called, from the present state. Where a group keeps all tokens, a page behind a missing one is
        `behind`. Every page of a window is told, needed or not: a window is stored where a prompt ends
        (`store.window_every`).
        """
        return dict.fromkeys(self.pages, ()) if self.why is None else self.why()


@dataclasses.dataclass(frozen=True)
class HybridReport:
    """The verdict on a load. `tokens`: of the hit, or 0 if a page of any group is bad. `pages`: by group, the status of
    each page of the hit. `why` is for `reasons`."""

    tokens: int
    pages: dict[str, tuple[PageStatus, ...]]
    bytes_by_tier: dict[str, int]
    seconds: float
    why: Callable[[], GroupReasons] = dataclasses.field(default=dict, repr=False, compare=False)

    def reasons(self) -> GroupReasons:
        """By group, the tiers that the hit's pages came from, or why they did not come; empty for a batch. Computed
        when called."""
        return self.why()


@dataclasses.dataclass(frozen=True)
class HybridStoreReport:
    """How a store ended, by group and by page number: the `tiers` that committed the page now, and why it was
    `dropped`. A page that was stored already, or that another store is bringing, has no tiers and no cause. Until that
    other store has ended, a lookup may miss the page."""

    tiers: dict[str, dict[int, tuple[str, ...]]]
    dropped: dict[str, dict[int, str]]


class _Handle(Generic[Said]):
    """The handles of one call, of some or all pools."""

    def __init__(self, handles: Iterable[Any]) -> None:
        self._handles = [handle for handle in handles if handle is not None]

    def result(self, seconds: float | None = None) -> Said:
        raise NotImplementedError

    def done(self) -> bool:
        return all(handle.done() for handle in self._handles)

    def __await__(self) -> Generator[Any, None, Said]:
        """`result()` in asyncio's event loop. Cancelling the await cancels nothing else."""
        for handle in self._handles:
            yield from handle.__await__()
        return self.result()


class _Releasing(_Handle[Said]):
    """The handles of a call that uses the caller's slots."""

    def released(self, seconds: float | None = None) -> None:
        """Wait until the slots are the caller's again. Raises `DeadlineError`."""
        left = remaining(seconds)
        for handle in self._handles:
            handle.release_event.synchronize(left())


class HybridLoad(_Releasing[HybridReport]):
    """The handle of a load, or of a batch of loads. Made by `HybridEngine.load` and `load_many`; thread-safe."""

    def __init__(self, engine: HybridEngine, hits: Sequence[HybridHit], loads: list[LayerwiseLoad | None]) -> None:
        """`loads`: by pool; None for one without a page of the hits."""
        super().__init__(loads)
        self._engine, self._hits, self.by_pool = engine, hits, loads

    @property
    def tokens(self) -> int:
        """Tokens on their way, over all requests; a hit with a page that has gone since counts 0."""
        return sum(self.tokens_by_request)

    @property
    def tokens_by_request(self) -> tuple[int, ...]:
        return tuple(
            hit.tokens if all(pages in (None, len(order)) for pages, order in zip(row, hit.order, strict=True)) else 0
            for hit, row in self._by_request(lambda load: [part.pages for part in load.parts])
        )

    def wait(self, layer: int, seconds: float | None = None) -> None:
        """Order the current stream after this layer's pages: see `LayerwiseLoad.wait`. `layer`: of the model."""
        pool, local = self._engine.place(layer)
        load = self.by_pool[pool]
        if load is not None:
            load.wait(local, seconds)

    def results(self, seconds: float | None = None) -> list[HybridReport]:
        """The verdict on each request, in order. Never raises for a bad page; `DeadlineError` when it is late."""
        left = remaining(seconds)
        return [self._report([one]) for one in self._by_request(lambda load: load.results(left()))]

    def result(self, seconds: float | None = None) -> HybridReport:
        """The verdict. A batch gives one report over all its requests, whose `tokens` are the sum."""
        left = remaining(seconds)
        return self._report(self._by_request(lambda load: load.results(left())))

    def _by_request(self, said: Callable[[LayerwiseLoad], Sequence[Said]]) -> list[tuple[HybridHit, list[Said | None]]]:
        rows: list[list[Said | None]] = [[] for _ in self._hits]
        for pool, load in enumerate(self.by_pool):
            of_those = iter(said(load) if load is not None else ())
            for hit, row in zip(self._hits, rows, strict=True):
                row.append(next(of_those) if hit.order[pool] else None)
        return list(zip(self._hits, rows, strict=True))

    def _report(self, requests: Sequence[tuple[HybridHit, Sequence[LoadReport | None]]]) -> HybridReport:
        sizes = {group.name: group.page_tokens for group in self._engine.groups}
        names, pages = [*sizes], {name: list[PageStatus]() for name in sizes}
        by_tier, took, tokens = Counter[str](), 0.0, 0
        for hit, reports in requests:
            whole = True
            for report, order in zip(reports, hit.order, strict=True):
                if report is None:
                    continue
                statuses = [*report.pages, *[PageStatus.GONE] * (len(order) - len(report.pages))]
                for g, status in zip(order.groups, statuses, strict=True):
                    pages[names[g]].append(status)
                    whole = whole and status is PageStatus.LOADED
                by_tier.update(report.bytes_by_tier)
                took = max(took, report.seconds)
            tokens += hit.tokens if whole else 0
        told = {name: tuple(some) for name, some in pages.items()}
        if len(requests) != 1:
            return HybridReport(tokens, told, dict(by_tier), took)
        ((hit, _),) = requests

        def why() -> GroupReasons:
            tiers: dict[str, list[str]] = {name: [] for name in told}
            for part, order in zip(hit.parts, hit.order, strict=True):
                for g, tier in zip(order.groups, part.tiers, strict=True):
                    tiers[names[g]].append(tier)
            return {
                name: joined(hit.pages[name].start * sizes[name], sizes[name], map(told_of, some, tiers[name]))
                for name, some in told.items()
            }

        return HybridReport(tokens, told, dict(by_tier), took, why)

    def cancel(self) -> None:
        """Stop early. The slots stay the engine's until `released`."""
        for load in self._handles:
            load.cancel()


class HybridStore(_Releasing[HybridStoreReport]):
    """The handle of a store. Made by `HybridEngine.store`; thread-safe."""

    def __init__(self, names: Sequence[str], handles: Sequence[StoreHandle], order: Sequence[Chain]) -> None:
        super().__init__(handles)
        self._names, self._order = names, order

    def result(self, seconds: float | None = None) -> HybridStoreReport:
        """The report. Waits up to `seconds` (None: without limit), then raises `DeadlineError`."""
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


class HybridPrefetch(_Handle[list[PrefetchReport]], Released):
    """The handle of a prefetch. Made by `HybridEngine.prefetch`; thread-safe. Leaving its `with` block cancels it."""

    def __init__(self, engine: HybridEngine, hit: HybridHit, parts: Sequence[Prefetch | None]) -> None:
        super().__init__(parts)
        self._engine, self._hit, self._parts = engine, hit, parts

    @property
    def tokens(self) -> int:
        """Tokens of the hit that it has found in the CPU tier: all of them, or 0."""
        return self._if_all(lambda part: part.tokens)

    @property
    def begun(self) -> tuple[int, ...]:
        """`Prefetch.begun` of each pool."""
        return tuple(0 if part is None else part.begun for part in self._parts)

    @property
    def verified(self) -> int:
        """Tokens of the hit that are in the CPU tier now, pinned and verified: all of them, or 0."""
        return self._if_all(lambda part: part.verified)

    def _if_all(self, tokens: Callable[[Prefetch], int]) -> int:
        there = zip(self._engine.engines, self._parts, self._hit.order, strict=True)
        good = all(
            part is None or tokens(part) == len(order) * engine.layout.page_tokens for engine, part, order in there
        )
        return self._hit.tokens if good else 0

    def hit(self) -> HybridHit:
        """The hit of verified and pinned pages, for a load in which only a copy can fail; a hit of 0 tokens if any are
        missing. Raises `InvalidValueError` without pins."""
        parts = tuple(
            part if prefetch is None else prefetch.hit()
            for part, prefetch in zip(self._hit.parts, self._parts, strict=True)
        )
        if any(len(part.pages) < len(order) for part, order in zip(parts, self._hit.order, strict=True)):
            return self._engine.nothing(self._hit.start)
        return dataclasses.replace(self._hit, parts=parts)

    def wait(self, seconds: float | None = 0.0) -> int:
        """Wait up to `seconds` for its end, then stop it, and return `tokens`: see `Prefetch.wait`."""
        left = remaining(seconds)
        for part in self._handles:
            part.wait(left())
        return self.tokens

    def result(self, seconds: float | None = None) -> list[PrefetchReport]:
        """Wait until it has ended, by pool: see `Prefetch.result`."""
        left = remaining(seconds)
        return [part.result(left()) for part in self._handles]

    def release(self) -> None:
        """End it, and its pins. May be called twice."""
        for part in self._handles:
            part.release()

    cancel = release


class HybridPin(Released):
    """The pages of a hit, kept from eviction until `release` or until its time is up."""

    def __init__(self, hit: HybridHit, pins: Sequence[tuple[Pin, int]]) -> None:
        self._hit, self._pins = hit, pins

    @property
    def tokens(self) -> int:
        """Tokens of the hit if all its pages are pinned, else 0. A hit at the end of chunks has no pages."""
        pinned = all(pin.tokens == whole and not pin.over for pin, whole in self._pins)
        return self._hit.tokens if pinned else 0

    def release(self) -> None:
        for pin, _ in self._pins:
            pin.release()


def all_begun(stores: Iterable[StoreHandle], *, wait: bool = True) -> list[StoreHandle]:
    """The handles of a store in several pools, which `stores` begins one after another. If a pool refuses, nothing
    reads the blocks behind the error, since the caller has no handle to wait by; except with `wait=False`."""
    begun: list[StoreHandle] = []
    try:
        begun.extend(stores)  # keeps those before an error
    except GdsCacheError:
        for handle in begun if wait else ():
            handle.release_event.synchronize()
        raise
    return begun


def group_reasons(
    told: Mapping[int, Callable[[Sequence[bytes]], list[Told]]], names: GroupNames, start: int, stop: int, declined: int
) -> GroupReasons:
    """By group name, the states of its pages from token `start` to `stop`. `told`: of each group by its number, the
    source of its pages' states (`TierManager.told`).

    Where a group keeps all tokens, pages behind a missing one are `behind` it, and the first `declined` tokens are the
    `gate`'s. Every page of a window is told, needed or not: a window is stored where a prompt ends.
    """
    found: GroupReasons = {}
    for g, states in told.items():
        group, gap = names.groups[g], False
        size = group.page_tokens
        first = start // size
        pages = states(names.keys(g, first, stop // size))
        for n, page in enumerate(pages):
            if page.cause != CACHED:
                gap = True
            elif (n + 1) * size <= declined:
                pages[n] = Told("gate", page.tier)
            elif gap and group.keeps == "all":
                pages[n] = Told("behind", page.tier)
        found[group.name] = joined(first * size, size, pages)
    return found


def group_words(reasons: GroupReasons) -> str:
    return "; ".join(f"{name}: {words(some)}" for name, some in reasons.items())
