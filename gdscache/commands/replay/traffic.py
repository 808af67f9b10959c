"""A trace through all tiers: each request's hits, loads, computation and stores, with their times."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from gdscache.commands.console import Progress, silent
from gdscache.commands.replay.clock import MachineModel, Process
from gdscache.commands.replay.hierarchy import Hierarchy
from gdscache.commands.replay.trace import Workload
from gdscache.config import Config
from gdscache.config.pools import window_every
from gdscache.engine.hybrid_states import StandingStates
from gdscache.groups.base import alignment, complete, kept, lengths, marks, needed
from gdscache.groups.names import GroupNames
from gdscache.groups.pools import Partings, pools_of
from gdscache.load.plan import LoadPlan
from gdscache.pages.keys import Page, namespace_digest

_REPORT_EVERY = 64  # requests between progress reports


class Found(NamedTuple):
    """A request's hit pages by tier, and the number of them that it received."""

    cpu: int
    ssd: int
    loaded: int


@dataclasses.dataclass
class Outcome:
    """A run's result. Pages looked up are the hits of all tiers and the misses of all causes.

    Misses: `cold` (first use), `behind` (in a tier, after a page that is in none, or without a window or state that a
    hit needs), `absent` (no longer in any tier, or never stored). `found[i]` is of request `i`, and None until its
    lookup. Times to the first token in seconds, by request.
    """

    found: list[Found | None]
    hit_tokens: int = 0  # over all requests; `found` counts the pages of all groups
    misses: Counter[str] = dataclasses.field(default_factory=Counter)
    first_token: list[float] = dataclasses.field(default_factory=list)
    seconds: float = 0.0  # of virtual time, from the first request to the end of the last one

    def hits(self, tier: str) -> int:
        """Pages found first in this tier."""
        return sum(getattr(found, tier) for found in self.found if found is not None)


class Traffic:
    """A workload's requests on the tiers of a configuration, for each of its pools. `run` once.

    A request loads its hit pages, computes the others and then stores them, in order. `serial`: a request ends
    completely, including writes, before the next one begins; demotions by a lookup end before the load. Else requests
    arrive at their times.
    """

    def __init__(
        self,
        workload: Workload,
        pools: Sequence[Hierarchy],
        config: Config,
        machine: MachineModel,
        times: Sequence[float],
        *,
        serial: bool = False,
    ) -> None:
        """`times`: of the requests, in seconds, ascending."""
        self._work = workload
        self._pools = pools
        self._manager = pools[0].manager
        self._clock = pools[0].clock
        self._machine = machine
        self._times = times
        self._serial = serial
        self._seen = bytearray(len(workload.names))
        self._groups = config.model.layer_groups()
        self._partings = Partings(self._groups, window_every(config), adapts=config.store.window_every is None)
        self._in_pools = [pool.groups for pool in pools_of(self._groups)]
        self._states = StandingStates(self._groups, self._in_pools, [pool.manager for pool in self._pools])
        self._namespaces = [namespace_digest(config.model.namespace_fields(group=group)) for group in self._groups]
        self.outcome = Outcome([None] * len(workload.prompts))

    def run(self, progress: Progress = silent) -> Outcome:
        """Run all requests, until the last one and all stores end."""
        clock, outcome, total = self._clock, self.outcome, len(self._work.prompts)
        outcome.first_token = [0.0] * total
        begin = self._times[0] if total else 0.0
        with clock.interruptible():
            for i in range(total):
                if i % _REPORT_EVERY == 0:
                    progress(i, total, "replaying")
                if self._serial:
                    self._one(i)
                else:
                    clock.run(until=self._times[i] - begin)
                    clock.start(self._request(i))
            clock.run()
        outcome.seconds = clock.now
        progress(total, total, "replaying")
        return outcome

    def _one(self, i: int) -> None:
        """A request alone: each step ends with all its moves before the next one."""
        for done in self._request(i):
            self._clock.run()
            assert done.happened, "a request waits for an event that never fires"
        self._clock.run()

    def _request(self, i: int) -> Process:
        prompt, names = self._work.prompts[i], self._work.names
        steps = self._grouped if self._groups else self._attached
        return steps(i, [names[number] for number in prompt.pages], prompt.tokens)

    def _attached(self, i: int, pages: Sequence[Page], tokens: int) -> Process:
        arrival = self._clock.now
        found = self._manager.lookup(pages, 0)
        self._missed(i, len(found), self._manager.visible([page.key for page in pages[len(found) :]]))
        if self._serial:
            yield self._clock.past
        plan = self._pools[0].plan_load(pages[: len(found)])
        loaded = len(plan)
        self.outcome.found[i] = Found(found.count("cpu"), found.count("ssd"), loaded)
        self.outcome.hit_tokens += len(found) * self._work.page_tokens
        yield from self._load_and_compute(i, [plan], tokens, loaded, arrival)
        if loaded < len(pages):
            self._pools[0].store(pages[loaded:])

    def _grouped(self, i: int, pages: Sequence[Page], tokens: int) -> Process:
        """As `_attached`, for groups that keep different tokens. A hit is a length at which all groups have their part.
        Groups with windows and states store the pages that such a length needs."""
        groups, pools, size, arrival = self._groups, self._pools, self._work.page_tokens, self._clock.now
        names = GroupNames(groups, self._namespaces, size, self._in_pools)
        names.extend([page.key for page in pages])
        has, most = names.presence(*(pool.manager.visible for pool in pools)), len(pages) * size
        whole = complete(groups, has, most)
        longest = (
            min(most, max(0, tokens - 1) // size * size) if any(group.keeps == "state" for group in groups) else most
        )
        length = next(lengths(groups, has, longest, whole=min(whole, longest)), 0)
        wanted = [chain.pages for chain in names.chain(needed(groups, length))]
        found = [tier for pool, some in zip(pools, wanted, strict=True) for tier in pool.manager.lookup(some, 0)]
        # The presence of the others in a group that keeps all tokens; several of them may be one page there.
        g = next((g for g, group in enumerate(groups) if group.keeps == "all"), 0)
        step = groups[g].page_tokens // size
        there = has(g, length // size // step, len(pages) // step)
        self._missed(i, length // size, [seen for seen in there for _ in range(step)])
        if self._serial:
            yield self._clock.past
        plans = [pool.plan_load(some) for pool, some in zip(pools, wanted, strict=True)]
        got = sum(map(len, plans))
        loaded = length // size if got == sum(map(len, wanted)) else 0
        self.outcome.found[i] = Found(found.count("cpu"), found.count("ssd"), got)
        self.outcome.hit_tokens += length
        yield from self._load_and_compute(i, plans, tokens, loaded, arrival)
        every = self._partings.every(whole - length)
        ends = {most, longest, whole, *marks(every, alignment(groups), most)}
        rest = [kept(group, ends, loaded * size // group.page_tokens, most // group.page_tokens) for group in groups]
        self._states.stand(names, rest)
        for pool, chain in zip(pools, names.chain(rest), strict=True):
            if len(chain):
                pool.store(chain.pages)

    def _load_and_compute(self, i: int, plans: Sequence[LoadPlan], tokens: int, cached: int, arrival: float) -> Process:
        """Load the plan of each pool, then compute the tokens behind the `cached` pages, at least one."""
        for pool, plan in zip(self._pools, plans, strict=True):
            if plan.pages:
                yield from pool.load(plan)
            else:
                pool.loads.end(plan)
        yield self._clock.wait(max(1, tokens - cached * self._work.page_tokens) / self._machine.prefill)
        self.outcome.first_token[i] = self._clock.now - arrival

    def _missed(self, i: int, hits: int, there: Sequence[int]) -> None:
        """Count the causes of the misses after the first `hits`. `there`: 1 for each of these pages that a tier has,
        perhaps for fewer of them. Mark all pages of the prompt as used."""
        seen, misses = self._seen, self.outcome.misses
        for number, found in itertools.zip_longest(self._work.prompts[i].pages[hits:], there, fillvalue=0):
            misses["cold" if not seen[number] else "behind" if found else "absent"] += 1
            seen[number] = 1
