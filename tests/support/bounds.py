"""References for orders of eviction: infinite tiers, plain LRU, and the optimum of all policies.

A request is one step: its lookup, whose hits are the leading consecutive cached pages; then its store. A page's slot
may be taken only after the lookup, and never by a page of the same request.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from dataclasses import dataclass

from gdscache.commands.replay.trace import Workload

_NEVER = 1 << 62


@dataclass
class Counts:
    """Pages by outcome. Pages looked up are `hits + cold + absent`; `cold + absent` are the misses."""

    hits: int = 0
    cold: int = 0  # first use
    absent: int = 0  # used before: evicted since then, or not stored
    written: int = 0  # pages
    evictions: int = 0


def infinite(workload: Workload) -> Counts:
    cold = workload.references - workload.repeated
    return Counts(hits=workload.repeated, cold=cold, written=cold)


def plain_lru(workload: Workload, capacity: int) -> Counts:
    """Textbook LRU, page reference by page reference, blind to prefixes: the baseline of published figures.

    Each reference hits, or replaces the least recently used page, also in the middle of a prompt. A page behind a
    missing one counts as a hit.
    """
    counts = Counts()
    order: OrderedDict[int, None] = OrderedDict()
    seen = bytearray(len(workload.names))
    for pages, _ in workload.prompts:
        for page in pages:
            if page in order:
                counts.hits += 1
                order.move_to_end(page)
                continue
            counts.absent += seen[page]
            counts.cold += 1 - seen[page]
            seen[page] = 1
            order[page] = None
            if len(order) > capacity:
                order.popitem(last=False)
                counts.evictions += 1
    counts.written = counts.cold + counts.absent
    return counts


def optimum(workload: Workload, capacity: int) -> Counts:
    """The most hits of any policy, with the future known: Belady's rule, one request a step. Exact.

    After a request the tier keeps, of its pages and the request's, the `capacity` pages with the soonest next use;
    among pages of the same next request, those nearest to its start. It may leave a page unstored, so it bounds
    admission filters too. A page's next use is never before its parent's, so the parent of a kept page is kept: hits
    are equal whether or not they must be consecutive. Source: L. A. Belady, A study of replacement algorithms for a
    virtual-storage computer, IBM Systems Journal 5(2), 1966.
    """
    counts = Counts()
    following = _next_uses(workload)
    seen = bytearray(len(workload.names))
    kept: dict[int, tuple[int, int]] = {}  # page -> (next request with it, its place there), both negative
    heap: list[tuple[int, int, int]] = []  # the latest next use first; some entries are outdated
    for (pages, _), needs in zip(workload.prompts, following, strict=True):
        hits = next((i for i, page in enumerate(pages) if page not in kept), len(pages))
        counts.hits += hits
        fresh = set()
        for place, (page, need) in enumerate(zip(pages, needs, strict=True)):
            if page not in kept:
                counts.absent += seen[page]
                counts.cold += 1 - seen[page]
                seen[page] = 1
                fresh.add(page)
            if need == _NEVER:
                kept.pop(page, None)
                fresh.discard(page)
                continue
            kept[page] = (-need, -place)
            heapq.heappush(heap, (-need, -place, page))
        while len(kept) > capacity:
            need, place, page = heapq.heappop(heap)
            if kept.get(page) == (need, place):
                del kept[page]
                if page in fresh:
                    fresh.remove(page)
                else:
                    counts.evictions += 1
        counts.written += len(fresh)
    return counts


def _next_uses(workload: Workload) -> list[list[int]]:
    """For each page of each prompt, the next request with it."""
    last = [_NEVER] * len(workload.names)
    found = []
    for at in range(len(workload.prompts) - 1, -1, -1):
        pages = workload.prompts[at].pages
        found.append([last[page] for page in pages])
        for page in pages:
            last[page] = at
    found.reverse()
    return found
