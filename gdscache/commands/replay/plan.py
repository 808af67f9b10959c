"""Tier sizes: a grid of size pairs, each replayed through all tiers, and a rule that selects one."""

from __future__ import annotations

import dataclasses
import gc
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gdscache.commands.console import Progress, silent
from gdscache.commands.replay import report
from gdscache.commands.replay.bounds import infinite
from gdscache.commands.replay.clock import MachineModel
from gdscache.commands.replay.garbage import uncollected
from gdscache.commands.replay.setup import Asked, Setup, setups
from gdscache.commands.replay.workload import Workload
from gdscache.config import Config
from gdscache.config.pools import PLAIN_PARTS, pool_parts
from gdscache.errors import CapacityError, GeometryError, InvalidValueError
from gdscache.limits import LIMITS
from gdscache.policies.admission import ADMISSIONS
from gdscache.sizes import about

SCHEMA = "gdscache.plan/3"
POINTS = 6  # sizes of each tier in the grid, each twice its predecessor
WITHIN = 0.05  # greatest excess of the mean TTFT over the best, as a share
HOST_PRICE = 20.0  # price of a byte of host memory, in bytes of the SSD
_NEAR = 1.15  # sizes with a smaller ratio count as equal
_REFINED = 3  # runs for each tier, after the grid
_SOME = 0.01  # share of rejected pages from which a warning is shown
DRIVE_WRITES, RATED_YEARS = 1, 5  # drive writes a day over years: the rating of most server drives

Row = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Limits:
    """A plan's limits; None: unlimited. Tier sizes in bytes; bytes `written` to the SSD a day. `first_token`: mean
    seconds over all requests, in place of `WITHIN`."""

    cpu: int | None = None
    ssd: int | None = None
    written: int | None = None
    first_token: float | None = None

    def check(self, page_bytes: int) -> None:
        """Raises `CapacityError` for a budget below one page, and `InvalidValueError` for a limit out of range."""
        for size, option in ((self.cpu, "--cpu-budget"), (self.ssd, "--ssd-budget")):
            if size is not None and size < page_bytes and (size or option == "--cpu-budget"):
                raise CapacityError(
                    f"{option} is {about(size)} and a page {about(page_bytes)}",
                    f"raise {option}, or use smaller pages (model.page_tokens)",
                )
        for value, option in ((self.written, "--writes-a-day"), (self.first_token, "--ttft-target")):
            if value is not None and not 0 < value < math.inf:
                raise InvalidValueError(f"{option} is {value:g}", "set it to more than 0")


def plan(
    workload: Workload,
    times: Sequence[float],
    asked: Asked,
    machine: MachineModel,
    limits: Limits,
    *,
    points: int = POINTS,
    progress: Progress = silent,
) -> dict[str, Any]:
    """The report of `gdscache plan` for a workload of full pages.

    `asked`: model, policies and keys; its capacities are not read. Raises `CapacityError` for a budget below one page,
    and `InvalidValueError` for a workload without pages, and for a wear limit with a trace of zero seconds.
    """
    report.check(workload)
    begun = time.process_time()
    search = _Search(workload, times, asked, machine, limits, progress)
    config = search.configs(1, 2)[0].config
    extent, unique = config.model.layout().extent_bytes, len(workload.names)
    limits.check(extent)
    cpu = grid(unique, points, None if limits.cpu is None else limits.cpu // extent)
    # An SSD for `n` pages needs its reserve, at most an eighth of it, in addition.
    wanted = [n + min(LIMITS.ssd_reserve, n // 7 + 1) for n in grid(unique, points, None)]
    most = wanted[-1] if limits.ssd is None else limits.ssd // extent
    ssd = sorted({min(n, most) for n in wanted} - {0})
    search.run(cpu, ssd)
    chosen, forever = search.chosen, search.forever
    counts = infinite(workload)
    everything = {
        "hit_rate": counts.hits / workload.references,
        "token_hit_rate": counts.hits * workload.page_tokens / workload.tokens,
    }
    progress(1, 1, "done")
    return {
        "schema": SCHEMA,
        "workload": report.describe_workload(workload, times),
        "machine": machine.describe(),
        "model": {
            "page_tokens": workload.page_tokens,
            "page_bytes": extent,
            "token_bytes": extent / workload.page_tokens,
            "packing": packing(config),
        },
        "limits": dataclasses.asdict(limits),
        "recommended": chosen,
        "no_cache_first_token_seconds": search.without,
        "infinite": {**everything, "bytes": unique * extent, "first_token_seconds": forever["first_token_seconds"]},
        "target_seconds": search.target,
        "met": search.met,
        "binds": _binds(search, extent / workload.page_tokens),
        "warnings": _warnings(chosen),
        "candidates": search.rows,
        "problems": sorted({text for row in (*search.rows, forever) for text in row["problems"]}),
        "seconds": time.process_time() - begun,
    }


def packing(config: Config) -> float | None:
    """The tokens that fit with `model.pack` where one fits without it, a part of the sizes left for pages that cannot
    be packed; None if pages are packed, or no page can be."""
    model = config.model
    if model.pack == "on":
        return None
    try:
        packed = model.model_copy(update={"pack": "on"}).pool_layouts()
    except GeometryError:
        return None
    if not any(layout.packed for layout in packed):
        return None
    left = 0.0  # of the bytes of a token, over all pools
    shares = [part.share for part in pool_parts(config)] or [1.0]
    for share, layout, own in zip(shares, model.pool_layouts(), packed, strict=True):
        room = 1 - 1 / PLAIN_PARTS if own.packed else 1
        left += share * own.extent_bytes / layout.extent_bytes / room
    return 1 / left


def grid(most: int, points: int, budget: int | None) -> list[int]:
    """`most`, its half, ... down to `points` sizes, ascending. A smaller `budget` caps them."""
    sizes = {max(1, most >> i) for i in range(points)}
    return sorted(sizes if budget is None else {min(size, budget) for size in sizes} - {0})


def mean_of(row: Row) -> float:
    """Mean seconds to the first token."""
    return float(row["first_token_seconds"]["mean"])


def cost(row: Row) -> float:
    return HOST_PRICE * float(row["cpu_bytes"]) + float(row["ssd_bytes"])


class _Search:
    """The grid, the choice, and smaller sizes near the choice."""

    def __init__(
        self,
        workload: Workload,
        times: Sequence[float],
        asked: Asked,
        machine: MachineModel,
        limits: Limits,
        progress: Progress,
    ) -> None:
        self._work, self._times, self._asked = workload, times, asked
        self.machine, self.limits = machine, limits
        self._progress = progress
        self._known: dict[tuple[int, int], list[dict[str, Any]]] = {}
        self._total = 1
        self.rows: list[dict[str, Any]] = []

    def configs(self, cpu: int, ssd: int) -> list[Setup]:
        """A setup for each searched setting at these sizes: with a wear limit, one for every admission policy."""
        fixed = self.limits.written is None or any(text.startswith("store.admission=") for text in self._asked.sets)
        sets = [text for text in self._asked.sets if ssd or not text.startswith("ssd.")]
        sets += [f"store.admission={name}" for name in (() if fixed or not ssd else ADMISSIONS)]
        asked = dataclasses.replace(self._asked, cpu=(str(cpu),), ssd=(str(ssd) if ssd else "none",), sets=tuple(sets))
        return setups(asked, len(self._work.names))

    def _candidates(self, cpu: int, ssd: int, text: str) -> list[dict[str, Any]]:
        if (cpu, ssd) not in self._known:
            done = len(self._known)

            def step(at: int, of: int, _: str) -> None:
                self._progress(1000 * done + 1000 * at // max(1, of), 1000 * self._total, text)

            self._known[cpu, ssd] = [self._row(cpu, ssd, setup, step) for setup in self.configs(cpu, ssd)]
            self.rows += self._known[cpu, ssd]
        return self._known[cpu, ssd]

    def _row(self, cpu: int, ssd: int, setup: Setup, progress: Progress) -> dict[str, Any]:
        """The result of a pair of tiers."""
        with uncollected():
            found = report.tiers(self._work, self._times, setup, self.machine, progress=progress)
        gc.collect()  # the tiers have reference cycles
        self.without = found["first_token_seconds_no_cache"]
        config, wear = setup.config, found["ssd"] or {}
        extent = config.model.layout().extent_bytes
        tokens = self._work.tokens
        a_day = wear.get("drive_writes_per_day", 0.0)
        written = a_day and a_day * ssd * extent
        if ssd and written is None and self.limits.written is not None:
            raise InvalidValueError("the trace takes no time, so nothing is known of a day", "leave --writes-a-day out")
        return {
            "cpu_pages": cpu,
            "cpu_bytes": cpu * extent,
            "ssd_pages": ssd,
            "ssd_bytes": ssd * extent,
            "admission": config.store.admission if config.ssd else None,
            "write_policy": config.store.write_policy if config.ssd else None,
            "hit_rate": found["hit_rate"],
            "token_hit_rate": found["token_hit_rate"],
            "tier_token_hit_rates": {name: tier["hit_tokens"] / tokens for name, tier in found["tiers"].items()},
            "first_token_seconds": found["first_token_seconds"],
            "ssd_written_bytes": wear.get("written_bytes", 0),
            "ssd_written_bytes_per_day": written,
            "drive_writes_per_day": a_day,
            "write_amplification": wear.get("write_amplification"),
            "dropped_pages": found["stores"]["dropped_pages"],
            "offered_pages": found["stores"]["offered_pages"],
            "ssd_refused_pages": wear.get("refused_pages", {}),
            "ssd_offered_pages": wear.get("offered_pages", 0),
            "within_limits": self.limits.written is None or not ssd or written <= self.limits.written,
            "problems": found["problems"],
        }

    def run(self, cpu: Sequence[int], ssd: Sequence[int]) -> None:
        wanted = [(above, below) for above in cpu for below in (0, *ssd) if below > above or not below]
        self._total = len(wanted) + 1 + 2 * _REFINED
        self.forever = self._candidates(len(self._work.names), 0, "infinite tiers")[0]
        self.rows.clear()
        if (len(self._work.names), 0) in wanted:
            self.rows.append(self.forever)
        for number, (above, below) in enumerate(wanted, 1):
            self._candidates(above, below, f"candidate {number} of {len(wanted)}")
        best = min(mean_of(row) for row in (self.forever, *self.allowed))
        fastest = min(map(mean_of, self.allowed))
        self.target = self.limits.first_token or best * (1 + WITHIN)
        self.met = fastest <= self.target
        if not self.met:
            self.target = fastest * (1 + WITHIN)
        above, below = self.chosen["cpu_pages"], self.chosen["ssd_pages"]
        above = self._smaller([(n, below) for n in cpu], (above, below))[0]
        if below:
            self._smaller([(above, n) for n in ssd if n > above], (above, below))

    @property
    def allowed(self) -> list[dict[str, Any]]:
        return [row for row in self.rows if row["within_limits"]]

    @property
    def chosen(self) -> dict[str, Any]:
        """The cheapest row within the limits that reaches the target."""
        return min(self._reaching(self.allowed), key=lambda row: (cost(row), mean_of(row)))

    def _reaching(self, rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        return [row for row in rows if row["within_limits"] and mean_of(row) <= self.target]

    def _smaller(self, sizes: Sequence[tuple[int, int]], high: tuple[int, int]) -> tuple[int, int]:
        """The smallest pair that reaches the target, between `high`, which reaches it, and the grid's next smaller
        pair."""
        low = max((pair for pair in sizes if pair < high), default=high)
        for _ in range(_REFINED):
            middle = round(math.sqrt(low[0] * high[0])), round(math.sqrt(low[1] * high[1]))
            if not low < middle < high or sum(high) < _NEAR * sum(low):
                break
            reaches = self._reaching(self._candidates(*middle, "smaller sizes"))
            low, high = (low, middle) if reaches else (middle, high)
        return high


def _warnings(chosen: Row) -> list[str]:
    """Risks of the recommendation."""
    a_day = chosen["drive_writes_per_day"]
    if a_day is None or a_day <= DRIVE_WRITES:
        return []
    return [
        f"This traffic would wear the SSD out in {lifetime(a_day)}, if it is built for one drive write a day over "
        f"{RATED_YEARS} years, as most are. Limit the writes with --writes-a-day, or replay the trace with "
        "store.admission: second_offer or tinylfu."
    ]


def lifetime(writes_a_day: float) -> str:
    """A drive's life in words, at `writes_a_day` drive writes a day."""
    days = 365.25 * RATED_YEARS * DRIVE_WRITES / writes_a_day
    return f"{days / 365.25:,.1f} years" if days >= 365.25 else f"{days:,.1f} days"


def _binds(search: _Search, token_bytes: float) -> list[str]:
    """The causes that hold the chosen tiers back, limits first."""
    chosen, limits = search.chosen, search.limits
    found = []
    if not search.met:
        fastest = min(search.allowed, key=mean_of)
        for name, budget in (("cpu", limits.cpu), ("ssd", limits.ssd)):
            if budget and fastest[f"{name}_bytes"] >= 0.9 * budget:
                found.append(f"{name}_budget")
        worn = [mean_of(row) for row in search.rows if not row["within_limits"]]
        if min(worn, default=math.inf) < mean_of(chosen):
            found.append("wear")
        found = found or ["target"]
    for name, refused, offered in (("queue", "dropped_pages", ""), ("ssd_write", "ssd_refused_pages", "ssd_")):
        if chosen[refused].get("queue_full", 0) > _SOME * chosen[f"{offered}offered_pages"]:
            found.append(name)
    if search.machine.ssd_read / token_bytes < search.machine.prefill:
        found.append("ssd_read")
    return [*found, "traffic"] if search.met else found
