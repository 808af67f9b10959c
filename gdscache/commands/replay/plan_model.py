"""What a pair of tiers gives under a trace: the replay through all tiers, on a thinned trace where it is long.

Of `every` consecutive pages of a prompt one is kept and stands for all of them, with their bytes. Which one is decided
by the key of the first of them, so that prompts with a common prefix keep the same pages, and what is kept is a tree of
prefixes again. Capacities, rates and times stay as they are. Pages that everybody uses would be kept or lost by chance:
they are left out, and their hits added. After spatially hashed sampling: C. Waldspurger et al.,
Efficient MRC construction with SHARDS, FAST 2015.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from gdscache.commands.replay import tier_report
from gdscache.commands.replay.simulate import Progress, infinite, optimum, silent, simulate
from gdscache.commands.replay.tier_setup import Asked, Setup, setups
from gdscache.commands.replay.workload import Prompt, Workload
from gdscache.config import Config, ModelConfig
from gdscache.errors import InvalidValueError
from gdscache.moves.clock import MachineModel
from gdscache.pages.keys import Page
from gdscache.policies import new_policy

REFERENCES = 60_000  # pages of all prompts that a run of the search has, about
HOT = 0.001  # of all references: a page with so many is not left to chance
_QUEUE_PAGES = 4  # of a thinned trace, that store.queue holds at least


class Sample(NamedTuple):
    """A workload that stands for another one, in pages of `every` times the tokens.

    `hot_pages` of the whole are left out of it, with the tokens that they hold: they count as found in the first tier
    at each use but the first, and take their room there.
    """

    workload: Workload
    every: int
    hot_pages: int
    hot_hits: int
    references: int  # pages of all prompts of the whole
    page_tokens: int  # of the whole

    @property
    def hot_uses(self) -> int:
        return self.hot_pages + self.hot_hits

    def hit_rate(self, hits: int, looked: int) -> float:
        """Of the whole, from pages of the sample."""
        share = hits / looked if looked else 0.0
        return (share * (self.references - self.hot_uses) + self.hot_hits) / self.references


def thin(workload: Workload, every: int) -> Sample:
    """About one of `every` full pages of a workload."""
    if every == 1:
        return Sample(workload, 1, 0, 0, workload.references, workload.page_tokens)
    uses = Counter(page for prompt in workload.prompts for page in prompt.pages)
    hot = {page for page, n in uses.items() if n >= max(2.0, HOT * workload.references)}
    numbers: dict[int, int] = {}
    names: list[Page] = []
    prompts = []
    for pages, tokens in workload.prompts:
        kept: list[int] = []
        begin = next((i for i, page in enumerate(pages) if page not in hot), len(pages))
        for start in range(begin, len(pages), every):
            first = workload.names[pages[start]].key
            place = start + int.from_bytes(first[-4:], "little") % every
            if place >= len(pages):
                break
            number = numbers.setdefault(pages[place], len(names))
            if number == len(names):
                parent = names[kept[-1]].key if kept else workload.namespace
                names.append(Page(workload.names[pages[place]].key, parent, workload.namespace))
            kept.append(number)
        prompts.append(Prompt(kept, tokens - begin * workload.page_tokens))
    small = Workload(workload.page_tokens * every, False, prompts, names, workload.namespace)
    hits = sum(uses[page] for page in hot) - len(hot)
    return Sample(small, every, len(hot), hits, workload.references, workload.page_tokens)


def thinned(config: Config, sample: Sample) -> Config:
    """The same tiers, less the room of the hot pages, for pages of a sample."""
    if sample.every == 1:
        return config
    extent = config.model.layout().extent_bytes
    size = extent * sample.every
    plane = {"name": "rows", "shape": [size], "dtype": "uint8"}
    model = ModelConfig.model_validate(
        {"name": "thinned", "kind": "planes", "layers": 1, "page_tokens": 1, "planes": [plane]}
    )
    update: dict[str, Any] = {"model": model, "host_buffer": max(config.host_buffer, 4 * size)}
    for name in ("cpu", "ssd"):
        tier = getattr(config, name)
        if tier is not None:
            less = {"capacity": max(size, tier.capacity - sample.hot_pages * extent)}
            if name == "ssd":
                less["reserve"] = tier.reserve // sample.every
            update[name] = tier.model_copy(update=less)
    return config.model_copy(update=update)


def keep_one_of(workload: Workload, config: Config) -> int:
    """How far a trace is thinned: to `REFERENCES`, and so that the store queue still holds a few pages."""
    wanted = math.ceil(workload.references / REFERENCES)
    return max(1, min(wanted, config.store.queue // (_QUEUE_PAGES * config.model.layout().extent_bytes)))


def grid(most: int, points: int, budget: int | None) -> list[int]:
    """`most`, its half, ... down to `points` sizes; where the budget is less, it and those below it. Ascending."""
    sizes = {max(1, most >> i) for i in range(points)}
    if budget is not None and budget < most:
        sizes = {size for size in sizes if size < budget} | ({budget} if budget else set())
    return sorted(sizes)


def with_reserve(pages: int, reserve: int) -> int:
    """Slots of an SSD tier that holds so many pages beside its reserve, which is an eighth of it at most."""
    return pages + min(reserve, pages // 7 + 1)


@dataclasses.dataclass(frozen=True)
class Writing:
    """How pages get to the SSD: None is what the config has."""

    admission: str | None = None
    write: str | None = None


AS_CONFIGURED = Writing()


class Modeller:
    """Replays one workload with candidates; each once. Sizes are pages of the workload as it was before thinning."""

    def __init__(
        self,
        workload: Workload,
        times: Sequence[float],
        asked: Asked,
        machine: MachineModel,
        every: int,
        *,
        own_pool: bool = False,
    ) -> None:
        self._tokens = workload.tokens
        self.unique = len(workload.names)
        self.sample = thin(workload, every)
        if not self.sample.workload.references:
            raise InvalidValueError(f"one page of {every} leaves none of the trace", "set --sample to less")
        self._none = tier_report.spread([prompt.tokens / machine.prefill for prompt in workload.prompts])
        self._times = times
        self._asked = asked
        self._machine = machine
        self._own_pool = own_pool
        self._known: dict[tuple[int, int, str, str], dict[str, Any]] = {}

    def setup(self, cpu: int, ssd: int, writing: Writing = AS_CONFIGURED) -> Setup:
        """The configuration of a candidate, for the whole trace."""
        asked = dataclasses.replace(
            self._asked,
            cpu=(str(cpu),),
            ssd=(str(ssd) if ssd else "none",),
            admission=(writing.admission,) if writing.admission else (),
            write=(writing.write,) if writing.write else (),
            sweep=False,
        )
        [setup] = setups(asked, self.unique)
        return setup

    def row(self, cpu: int, ssd: int, writing: Writing = AS_CONFIGURED, progress: Progress = silent) -> dict[str, Any]:
        """What a candidate gives."""
        setup = self.setup(cpu, ssd, writing)
        disk, store = setup.config.ssd, setup.config.store
        key = (cpu, ssd, disk.admission if disk else "", store.write_policy if disk else "")
        if key not in self._known:
            sampled = Setup(thinned(setup.config, self.sample), setup.varied)
            found = tier_report.simulate(
                self.sample.workload, self._times, sampled, self._machine, own_pool=self._own_pool, progress=progress
            )
            self._known[key] = {
                **_row(setup.config, found, self.sample, self._tokens, cpu=cpu, ssd=ssd),
                "no_cache_first_token_seconds": self._none,
            }
        return self._known[key]


def _row(
    config: Config, found: Mapping[str, Any], sample: Sample, tokens: int, *, cpu: int, ssd: int
) -> dict[str, Any]:
    looked, each, every = found["lookup_pages"], sample.references * sample.page_tokens / tokens, sample.every
    rates = {
        name: each * sample.hit_rate(tier["hit_pages"], looked) - each * sample.hot_hits / sample.references
        for name, tier in found["tiers"].items()
    }
    rates[next(iter(rates))] += each * sample.hot_hits / sample.references
    hits = sample.hit_rate(found["hit_pages"], looked)
    extent = config.model.layout().extent_bytes
    wear = found["ssd"] or {}
    a_day = wear.get("drive_writes_per_day", 0.0)
    written = a_day and a_day * found["tiers"]["ssd"]["capacity_bytes"]
    return {
        "cpu_pages": cpu,
        "cpu_bytes": cpu * extent,
        "ssd_pages": ssd,
        "ssd_bytes": ssd * extent,
        "admission": config.ssd.admission if config.ssd else None,
        "write_policy": config.store.write_policy if config.ssd else None,
        "hit_rate": hits,
        "token_hit_rate": hits * each,
        "tier_token_hit_rates": rates,
        "first_token_seconds": found["first_token_seconds"],
        "ssd_written_bytes": wear.get("written_bytes", 0),
        "ssd_written_bytes_per_day": written,
        "drive_writes_per_day": a_day,
        "write_amplification": wear.get("write_amplification"),
        "dropped_pages": {cause: n * every for cause, n in found["stores"]["dropped_pages"].items()},
        "offered_pages": found["stores"]["offered_pages"] * every,
        "ssd_refused_pages": {cause: n * every for cause, n in wear.get("refused_pages", {}).items()},
        "ssd_offered_pages": wear.get("offered_pages", 0) * every,
        "problems": tier_report.totals(found),
    }


class Curve(NamedTuple):
    """Hits of one tier over its capacity; of an infinite one; the row of the knee."""

    rows: list[dict[str, Any]]
    infinite: dict[str, float]
    knee: dict[str, Any]


def hit_curve(
    workload: Workload,
    sample: Sample,
    eviction: str,
    page_bytes: int,
    points: int,
    within: float,
    progress: Progress = silent,
) -> Curve:
    """The curve, and its knee: the smallest capacity whose hits are at most `within` below an infinite cache's."""
    small, found = sample.workload, dict[int, dict[str, Any]]()
    references = small.references

    def at(pages: int) -> dict[str, Any]:
        if pages not in found:
            counts, best = simulate(small, pages, new_policy(eviction)), optimum(small, pages)
            room = pages * sample.every + sample.hot_pages
            found[pages] = {
                "capacity_pages": room,
                "capacity_bytes": room * page_bytes,
                "hit_rate": sample.hit_rate(counts.hits, references),
                "optimum_hit_rate": sample.hit_rate(best.hits, references),
            }
        return found[pages]

    sizes = grid(len(small.names), points, None)
    for number, pages in enumerate(sizes):
        progress(number, len(sizes), "hits over capacity")
        at(pages)
    enough = (1 - within) * sample.hit_rate(infinite(small).hits, references)
    high = next((n for n in sizes if at(n)["hit_rate"] >= enough), sizes[-1])
    low = max((n for n in sizes if n < high), default=0)
    while high - low > 1 and high > 1.05 * low:
        middle = (low + high) // 2
        low, high = (low, middle) if at(middle)["hit_rate"] >= enough else (middle, high)
    progress(len(sizes), len(sizes), "hits over capacity")
    forever = infinite(workload)
    rates = {"hit_rate": forever.hits / workload.references, "token_hit_rate": forever.hit_tokens / workload.tokens}
    return Curve([found[pages] for pages in sorted(found)], rates, dict(found[high]))
