"""How big the tiers should be: candidates on a grid, each replayed through all tiers, and a rule that picks one.

The search runs on a thinned trace where the trace is long (`plan_model`). What is picked is replayed once more with the
whole trace; those figures are reported, and how far the thinned ones are from them.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from gdscache.commands.replay import tier_report
from gdscache.commands.replay.plan_model import Modeller, Writing, grid, hit_curve, keep_one_of, with_reserve
from gdscache.commands.replay.plan_rule import Limits, Rule, binds, keeps, mean_of
from gdscache.commands.replay.simulate import Progress, silent
from gdscache.commands.replay.tier_setup import WRITE_POLICIES, Asked
from gdscache.commands.replay.workload import Workload
from gdscache.moves.clock import MachineModel
from gdscache.policies.admission import ADMISSIONS

SCHEMA = "gdscache.plan/1"
POINTS = 6  # sizes of each tier in the grid, each twice the one before
_CURVE_POINTS = 8
_NEAR = 1.15  # sizes that differ by less are not told apart
_REFINED = 3  # runs for each tier, after the grid
_STEP = 1000  # of the progress of one run

Row = Mapping[str, Any]


def plan(
    workload: Workload,
    times: Sequence[float],
    asked: Asked,
    machine: MachineModel,
    limits: Limits,
    rule: Rule,
    *,
    points: int = POINTS,
    every: int | None = None,
    own_pool: bool = False,
    progress: Progress = silent,
) -> dict[str, Any]:
    """The report of `gdscache plan` for a trace.

    `asked`: model, policies and keys; its capacities are not read. `every`: one of so many pages is kept for the
    search; None decides by the length of the trace. Raises `CapacityError` for a budget that holds no page and
    `InvalidValueError` for a workload without pages.
    """
    tier_report.check(workload)
    begun = time.process_time()
    config = Modeller(workload, times, asked, machine, 1, own_pool=own_pool).setup(1, 2).config
    layout = config.model.layout()
    limits.check(layout.extent_bytes)
    every = keep_one_of(workload, config) if every is None else every
    search = _Search(Modeller(workload, times, asked, machine, every, own_pool=own_pool), limits, rule, progress)
    curve = hit_curve(
        workload,
        search.modeller.sample,
        config.cpu.eviction if config.cpu else config.gpu.eviction,
        layout.extent_bytes,
        _CURVE_POINTS,
        rule.within,
        search.stage,
    )
    unique, extent = len(workload.names), layout.extent_bytes
    reserve = config.ssd.reserve if config.ssd else 0
    cpu = grid(unique, points, None if limits.cpu is None else limits.cpu // extent)
    ssd = [with_reserve(n, reserve) for n in grid(unique, points, None)]
    if limits.ssd is not None:
        ssd = sorted({n for n in ssd if n * extent <= limits.ssd} | ({limits.ssd // extent} - {0}))
        ssd = [n for n in ssd if n <= with_reserve(unique, reserve)]
    search.run(cpu, ssd, _writings(asked, limits))
    chosen = search.chosen
    others = _others(asked) if chosen["ssd_pages"] else []
    beside = [search.row(chosen["cpu_pages"], chosen["ssd_pages"], writing, "other settings") for writing in others]
    sample, best, forever = None, chosen, search.forever
    if every > 1:
        search.modeller = Modeller(workload, times, asked, machine, 1, own_pool=own_pool)
        best = search.row(chosen["cpu_pages"], chosen["ssd_pages"], _writing(chosen), "the whole trace")
        forever = search.row(unique, 0, Writing(), "the whole trace")
        best["within_limits"] = keeps(best, limits)
        sample = {
            "every": every,
            "pages": search.sampled_pages,
            "hit_rate": chosen["hit_rate"],
            "mean_first_token_seconds": mean_of(chosen),
            "hit_rate_error": chosen["hit_rate"] - best["hit_rate"],
            "mean_first_token_error": mean_of(chosen) / mean_of(best) - 1 if mean_of(best) else 0.0,
        }
    progress(1, 1, "done")
    return {
        "schema": SCHEMA,
        "mode": "trace",
        "workload": tier_report.describe_workload(workload, times),
        "machine": machine.describe(),
        "model": {
            "page_tokens": workload.page_tokens,
            "page_bytes": extent,
            "token_bytes": extent / workload.page_tokens,
        },
        "limits": limits.describe(),
        "rule": rule.describe(limits),
        "sample": sample,
        "recommended": {**best, "above_infinite": mean_of(best) / mean_of(forever) - 1 if mean_of(forever) else 0.0},
        "no_cache_first_token_seconds": best["no_cache_first_token_seconds"],
        "infinite": {**curve.infinite, "bytes": unique * extent, "first_token_seconds": forever["first_token_seconds"]},
        "target_seconds": search.target,
        "met": search.met,
        "binds": binds(
            search.rows,
            chosen,
            limits,
            rule,
            machine,
            extent / workload.page_tokens,
            unique * extent,
            met=search.met,
            infinite=mean_of(search.forever),
        ),
        "knee": curve.knee,
        "curve": curve.rows,
        "candidates": search.rows,
        "other_settings": beside,
        "problems": sorted({text for row in (*search.rows, best, forever) for text in row["problems"]}),
        "seconds": time.process_time() - begun,
    }


def _writing(row: Row) -> Writing:
    return Writing(row["admission"], row["write_policy"]) if row["ssd_pages"] else Writing()


def _writings(asked: Asked, limits: Limits) -> list[Writing]:
    """Settings that the search varies: those that were given, and every admission where wear is limited."""
    admissions: Sequence[str | None] = asked.admission or (tuple(ADMISSIONS) if limits.of_wear else (None,))
    return [Writing(*both) for both in itertools.product(admissions, asked.write or (None,))]


def _others(asked: Asked) -> list[Writing]:
    """Settings beside the recommended ones, one at a time, where nothing was said of them."""
    found = [Writing(admission=name) for name in ADMISSIONS] if not asked.admission else []
    return found + ([Writing(write=name) for name in WRITE_POLICIES] if not asked.write else [])


def candidates(
    cpu: Sequence[int], ssd: Sequence[int], writings: Sequence[Writing]
) -> Iterator[tuple[int, int, Writing]]:
    """Every CPU pool by itself, and with every SSD that is larger."""
    for above in cpu:
        yield above, 0, Writing()
        yield from ((above, below, writing) for below in ssd if below > above for writing in writings)


class _Search:
    """The grid, the choice, and smaller sizes near it. Sizes in pages of the whole trace."""

    def __init__(self, modeller: Modeller, limits: Limits, rule: Rule, progress: Progress) -> None:
        self.modeller = modeller
        self.sampled_pages = modeller.sample.workload.references
        self.limits = limits
        self.rule = rule
        self.rows: list[dict[str, Any]] = []
        self._progress = progress
        self._done, self._total = 0, 1

    def stage(self, done: int, total: int, text: str) -> None:
        self._progress(done, 4 * total, text)

    def row(self, cpu: int, ssd: int, writing: Writing, text: str) -> dict[str, Any]:
        done, total = self._done, max(self._total, self._done + 1)

        def step(at: int, of: int, _: str) -> None:
            self._progress(_STEP * done + _STEP * at // max(1, of), _STEP * total, text)

        self._done += 1
        return self.modeller.row(cpu, ssd, writing, step)

    def _candidate(self, cpu: int, ssd: int, writing: Writing, text: str) -> dict[str, Any]:
        row = self.row(cpu, ssd, writing, text)
        row["within_limits"] = keeps(row, self.limits)
        if not any(row is known for known in self.rows):
            self.rows.append(row)
        return row

    def run(self, cpu: Sequence[int], ssd: Sequence[int], writings: Sequence[Writing]) -> None:
        """Raises `InvalidValueError` where wear is limited and the trace takes no time."""
        wanted = list(candidates(cpu, ssd, writings))
        self._total = len(wanted) + 1 + 2 * _REFINED + 2
        self.forever = self.row(self.modeller.unique, 0, Writing(), "infinite tiers")
        for number, (above, below, writing) in enumerate(wanted, 1):
            self._candidate(above, below, writing, f"candidate {number} of {len(wanted)}")
        allowed = [row for row in self.rows if row["within_limits"]]
        self.best = min(mean_of(row) for row in (self.forever, *allowed))
        self.target, self.met = self.rule.target(allowed, self.best, self.limits)
        chosen = self.rule.choose(allowed, self.target)
        writing, above, below = _writing(chosen), chosen["cpu_pages"], chosen["ssd_pages"]
        above = self._smaller(above, cpu, lambda n: self._passes(n, below, writing))
        if below:
            below = self._smaller(below, [n for n in ssd if n > above], lambda n: self._passes(above, n, writing))
        self.chosen = self._candidate(above, below, writing, "the choice")

    def _passes(self, cpu: int, ssd: int, writing: Writing) -> bool:
        row = self._candidate(cpu, ssd, writing, "smaller sizes")
        return bool(row["within_limits"]) and mean_of(row) <= self.target

    def _smaller(self, high: int, sizes: Sequence[int], passes: Callable[[int], bool]) -> int:
        """The least size that passes, between `high`, which does, and the next one below it in the grid."""
        low = max((n for n in sizes if n < high), default=high)
        for _ in range(_REFINED):
            middle = round(math.sqrt(low * high))
            if not low < middle < high or high < _NEAR * low:
                break
            low, high = (low, middle) if passes(middle) else (middle, high)
        return high
