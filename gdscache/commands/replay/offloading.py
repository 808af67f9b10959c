"""The reference for a replay of a model with states: vLLM's own offloading, by rules that select the kept states.

As in vLLM 0.32: pages and states are in host memory alone, in one order of last use, the end of a prompt first. `ends`:
its default for prompts that part at no place in its GPU cache. `ends and junctions`: its default when the GPU has all
of these places. `chunks`: with `prefix_cache_retention_interval: None`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from gdscache.commands.replay.workload import Workload
from gdscache.config import Config
from gdscache.groups.pools import pools_of

CHUNK_TOKENS = 8192  # of a step of vLLM, by default
Rule = Callable[[int, int, int, int], set[int]]  # (pages of the prompt, hit pages, stored pages, pages of a chunk)

RULES: dict[str, Rule] = {
    "ends": lambda pages, hit, there, chunk: {pages},
    "ends and junctions": lambda pages, hit, there, chunk: {pages, there},
    "chunks": lambda pages, hit, there, chunk: {pages, *range(hit + chunk, pages, chunk)},
}


def offloading(workload: Workload, config: Config) -> dict[str, float]:
    """The share of all tokens that each rule finds in a CPU tier of the configuration's size. Empty for a model without
    states, or without a CPU tier."""
    groups = config.model.layer_groups()
    page = state = 0
    for pool, layout in zip(pools_of(groups), config.model.pool_layouts(), strict=False):
        page += layout.extent_bytes * sum(groups[g].keeps == "all" for g in pool.groups)
        state += layout.extent_bytes * sum(groups[g].keeps == "state" for g in pool.groups)
    if config.cpu is None or not page or not state:
        return {}
    return {name: _found(workload, config.cpu.capacity, page, state, rule) for name, rule in RULES.items()}


def _found(workload: Workload, capacity: int, page: int, state: int, rule: Rule) -> float:
    order: OrderedDict[tuple[int, bool], int] = OrderedDict()  # pages, and the states after them: bytes
    size, used, hits = workload.page_tokens, 0, 0
    for pages, tokens in workload.prompts:
        there = next((n for n, one in enumerate(pages) if (one, False) not in order), len(pages))
        hit = min(there, (tokens - 1) // size)
        while hit and (pages[hit - 1], True) not in order:
            hit -= 1
        hits += hit * size
        kept = rule(len(pages), hit, there, CHUNK_TOKENS // size) | {hit, (tokens - 1) // size}
        for n in range(len(pages), 0, -1):
            for key, nbytes in (((pages[n - 1], True), state), ((pages[n - 1], False), page)):
                if key in order:
                    if not key[1] or n == hit:
                        order.move_to_end(key)
                elif not key[1] or n in kept:
                    order[key] = nbytes
                    used += nbytes
        while used > capacity:
            used -= order.popitem(last=False)[1]
    return hits / workload.tokens
