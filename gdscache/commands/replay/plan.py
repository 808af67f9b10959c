"""Tier sizes: a grid of size pairs, each replayed through all tiers, and a rule that selects one."""

from __future__ import annotations

import dataclasses
import functools
import gc
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from gdscache.commands.console import Progress, silent
from gdscache.commands.replay import report
from gdscache.commands.replay.clock import MachineModel
from gdscache.commands.replay.setup import config_of
from gdscache.commands.replay.trace import Workload
from gdscache.config import Config
from gdscache.config.pools import PLAIN_PARTS, pool_parts
from gdscache.errors import CapacityError, GeometryError, InvalidValueError
from gdscache.limits import LIMITS
from gdscache.policies.admission import ADMISSIONS
from gdscache.sizes import about

SCHEMA = "gdscache.plan/4"
POINTS = 6  # sizes of each tier in the grid, each twice its predecessor
WITHIN = 0.05  # greatest excess of the mean TTFT over the best, as a share
HOST_PRICE = 20.0  # price of a byte of host memory, in bytes of the SSD
_NEAR = 1.15  # sizes with a smaller ratio count as equal
_REFINED = 3  # runs for each tier, after the grid
_SOME = 0.01  # share of rejected pages from which a warning is shown

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
    base: Mapping[str, Any],
    sets: Sequence[str],
    machine: MachineModel,
    limits: Limits,
    *,
    points: int = POINTS,
    progress: Progress = silent,
) -> dict[str, Any]:
    """The recommendation for a workload of full pages. `base`, `sets`: model, policies and keys, as for `config_of`;
    capacities in them are not read.

    Raises `CapacityError` for a budget below one page, and `InvalidValueError` for a wear limit with a trace of zero
    seconds.
    """
    config = config_of(base, sets)
    page = report.page_bytes(config.model, workload.page_tokens)
    limits.check(page)
    every = all_pages(config, len(workload.names), page)
    cpu = grid(every, points, None if limits.cpu is None else limits.cpu // page)
    # An SSD for `n` pages needs its reserve, at most an eighth of it, in addition; each pool's share of it is whole.
    reserve = LIMITS.ssd_reserve * every // len(workload.names)
    wanted = [n + min(reserve, n // 7 + 1) for n in grid(every, points, None)]
    most = wanted[-1] if limits.ssd is None else limits.ssd // page
    search = _Search(workload, times, base, sets, machine, limits, page, every, progress)
    search.run(cpu, sorted({min(n, most) for n in wanted} - {0}))
    chosen, forever = search.chosen, search.forever
    progress(1, 1, "done")
    infinite = report.describe_infinite(workload, config.model)
    return {
        "schema": SCHEMA,
        "model": {
            "page_tokens": workload.page_tokens,
            "page_bytes": page,
            "token_bytes": page / workload.page_tokens,
            "packing": packing(config),
        },
        "limits": dataclasses.asdict(limits),
        "recommended": chosen,
        "infinite": {**infinite, "first_token_seconds": forever["first_token_seconds"]},
        "target_seconds": search.target,
        "met": search.met,
        "binds": _binds(search, page / workload.page_tokens),
        "warnings": _warnings(chosen),
        "candidates": search.rows,
    }


def packing(config: Config) -> float | None:
    """The tokens that fit with `model.pack` where one fits without it, a part of the sizes left for pages that cannot
    be packed; None if pages are packed, or no page can be."""
    model = config.model
    if model.pack == "on":
        return None
    try:
        packed = model.model_copy(update={"pack": "on"}).pool_layouts
    except GeometryError:
        return None
    if not any(layout.packed for layout in packed):
        return None
    left = 0.0  # of the bytes of a token, over all pools
    shares = [part.share for part in pool_parts(config)] or [1.0]
    for share, layout, own in zip(shares, model.pool_layouts, packed, strict=True):
        room = 1 - 1 / PLAIN_PARTS if own.packed else 1
        left += share * own.extent_bytes / layout.extent_bytes / room
    return 1 / left


def all_pages(config: Config, names: int, page: int) -> int:
    """The size, in pages of `page` bytes, of a tier whose pools hold all pages of `names` pages of tokens."""
    model, most = config.model, 0.0
    pools = [(len(part.groups), part.share) for part in pool_parts(config)] or [(1, 1.0)]
    for (pages, share), layout in zip(pools, model.pool_layouts, strict=True):
        room: float = names * pages * layout.extent_bytes
        if layout.packed:  # at most a 256th, or eight pages, for pages that do not fit: see `plain_parts`
            room = room * PLAIN_PARTS / (PLAIN_PARTS - 1) + 8 * layout.packed_as(packed=False).extent_bytes
        most = max(most, room / share / page)
    return math.ceil(most)


def grid(most: int, points: int, budget: int | None) -> list[int]:
    """`most`, its half, ... down to `points` sizes, ascending. A smaller `budget` caps them."""
    sizes = {max(1, most >> i) for i in range(points)}
    return sorted(sizes if budget is None else {min(size, budget) for size in sizes} - {0})


def mean_of(row: Row) -> float:
    """Mean seconds to the first token."""
    return float(row["first_token_seconds"]["mean"])


def cost(row: Row) -> float:
    return HOST_PRICE * float(row["cpu_bytes"]) + float(row["ssd_bytes"])


@dataclasses.dataclass
class _Search:
    """The grid, the choice, and smaller sizes near the choice. Sizes are in pages of `page` bytes."""

    workload: Workload
    times: Sequence[float]
    base: Mapping[str, Any]
    sets: Sequence[str]
    machine: MachineModel
    limits: Limits
    page: int
    every: int  # pages of a tier that holds all
    progress: Progress
    rows: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    known: dict[tuple[int, int], list[dict[str, Any]]] = dataclasses.field(default_factory=dict)
    total: int = 1  # runs
    refused: CapacityError | None = None  # of the last pair that is too small for a page of each pool

    @functools.cached_property
    def admissions(self) -> Collection[str]:
        """The policies to try: none without a wear limit, or if `sets` has chosen one."""
        fixed = "admission" in config_of({**self.base, "store": {}}, self.sets).store.model_fields_set
        return () if fixed or self.limits.written is None else ADMISSIONS

    def _candidates(self, cpu: int, ssd: int, text: str) -> list[dict[str, Any]]:
        """A row for a pair of sizes; with a wear limit, one for every admission policy that may be chosen. No row for a
        pair that an engine refuses."""
        if (cpu, ssd) not in self.known:
            self.progress(len(self.known), self.total, text)
            tried = self.admissions if ssd else ()
            more = [[f"store.admission={name}"] for name in tried] or [[]]
            self.known[cpu, ssd] = []
            try:
                self.known[cpu, ssd] = [self._row(cpu, ssd, sets) for sets in more]
            except CapacityError as error:
                self.refused = error
            self.rows += self.known[cpu, ssd]
        return self.known[cpu, ssd]

    def _row(self, cpu: int, ssd: int, sets: Sequence[str]) -> dict[str, Any]:
        """The result of a pair of tiers."""
        sizes = f"cpu.capacity={cpu * self.page}", f"ssd.capacity={ssd * self.page}" if ssd else "ssd=null"
        config = config_of(self.base, [*self.sets, *sets, *sizes])
        found = report.replay(self.workload, self.times, config, self.machine)
        gc.collect()  # the tiers have reference cycles
        written, limit = found["ssd"] and found["ssd"]["written_bytes_per_day"], self.limits.written
        if ssd and written is None and limit is not None:
            raise InvalidValueError("the trace takes no time, so nothing is known of a day", "leave --writes-a-day out")
        return {
            "cpu_bytes": cpu * self.page,
            "ssd_bytes": ssd * self.page,
            "admission": config.store.admission if ssd else None,
            "write_policy": config.store.write_policy if ssd else None,
            "within_limits": limit is None or not ssd or written <= limit,
            **found,
        }

    def run(self, cpu: Sequence[int], ssd: Sequence[int]) -> None:
        wanted = [(above, below) for above in cpu for below in (0, *ssd) if below > above or not below]
        self.total = len(wanted) + 1 + 2 * _REFINED
        self.progress(0, self.total, "infinite tiers")
        self.forever = self._row(self.every, 0, ())
        self.known[self.every, 0] = [self.forever]
        if (self.every, 0) in wanted:
            self.rows.append(self.forever)
        for number, (above, below) in enumerate(wanted, 1):
            self._candidates(above, below, f"candidate {number} of {len(wanted)}")
        if self.refused is not None and not self.rows:
            raise self.refused
        best = min(mean_of(row) for row in (self.forever, *self.allowed))
        fastest = min(map(mean_of, self.allowed))
        self.target = self.limits.first_token or best * (1 + WITHIN)
        self.met = fastest <= self.target
        if not self.met:
            self.target = fastest * (1 + WITHIN)
        above, below = (self.chosen[size] // self.page for size in ("cpu_bytes", "ssd_bytes"))
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
    a_day = chosen["ssd"] and chosen["ssd"]["drive_writes_per_day"]
    if a_day is None or a_day <= report.DRIVE_WRITES:
        return []
    return [
        f"This traffic would wear the SSD out in {report.lifetime(a_day)}, if it is built for one drive write a day "
        f"over {report.RATED_YEARS} years, as most are. Limit the writes with --writes-a-day, or replay the trace with "
        "store.admission: second_offer or tinylfu."
    ]


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
    stores = chosen["stores"]
    if stores["dropped_pages"].get("queue_full", 0) > _SOME * stores["offered_pages"]:
        found.append("queue")
    if ssd := chosen["ssd"]:
        offered = chosen["tiers"]["ssd"]["stored_pages"] + sum(ssd["refused_pages"].values())
        if ssd["refused_pages"].get("queue_full", 0) > _SOME * offered:
            found.append("ssd_write")
    if search.machine.ssd_read / token_bytes < search.machine.prefill and limits.ssd != 0:
        found.append("ssd_read")
    return [*found, "traffic"] if search.met else found
