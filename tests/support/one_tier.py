"""One tier under a trace: the real index with an order of eviction, pages without bytes and without time."""

from __future__ import annotations

from gdscache.commands.replay.trace import Workload
from gdscache.index.index import PageIndex
from gdscache.index.retention import DEFAULT
from gdscache.index.table import PageState
from gdscache.policies.base import EvictionPolicy
from tests.support.bounds import Counts


def simulate(workload: Workload, capacity: int, policy: EvictionPolicy) -> Counts:
    """Replay a trace on one tier of `capacity` pages with the real `PageIndex` and an empty `policy`.

    A request touches the pages that it hits, tail first, and stores the others as a store of the engine does: it
    evicts tails before heads, never a page of its own prefix, and what finds no slot is cut from the tail.
    """
    counts, index, names = Counts(), PageIndex(capacity, policy), workload.names
    seen = bytearray(len(names))
    for pages, _ in workload.prompts:
        prompt = [names[page] for page in pages]
        keys = [page.key for page in prompt]
        hits = index.visible(keys).find(0)
        hits = len(pages) if hits < 0 else hits
        counts.hits += hits
        index.touch(keys[:hits][::-1])
        lacking = pages[hits:]  # no page is in the tier without those before it: tails go before heads
        for page in lacking:
            counts.absent += seen[page]
            counts.cold += 1 - seen[page]
            seen[page] = 1
        if not lacking:
            continue
        slots = index.allocate_some(len(lacking), keep=set(keys))
        stored = prompt[hits : hits + len(slots)]
        entries = index.insert_all(stored, slots, PageState.PENDING, [DEFAULT] * len(slots), leases=1)
        index.commit_all(entries)
        index.release_all(entries)
        counts.written += len(slots)
    counts.evictions = index.evictions
    return counts
