"""A plan from a hit curve alone: hits at two capacities, and a mean by formula. No percentiles, no queues.

What the CPU pool holds is taken to lie on the SSD too, as with `write_through`: an SSD of a size hits what the curve
says of that size, and the CPU pool the part that it says of its own.
"""

from __future__ import annotations

import csv
import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gdscache.commands.replay.plan_rule import DAY, Limits, Rule, binds, keeps, mean_of
from gdscache.errors import GdsCacheError, InvalidValueError
from gdscache.moves.clock import MachineModel
from gdscache.sizes import about, parse_size

_STEPS = 4  # sizes for each doubling


class CurveError(GdsCacheError):
    """A file that is no hit curve. The message names the file, and the line where there is one."""


class Point(NamedTuple):
    """Bytes of a cache, and the share of the prompts' tokens that it has."""

    size: int
    rate: float


class Demand(NamedTuple):
    """Tokens of a prompt, on the mean; requests a second, None where nobody knows, and so nothing is known of wear."""

    prompt_tokens: float
    requests_per_second: float | None


def read_curve(path: Path) -> list[Point]:
    """Points in the order of their sizes: lines `64GiB,0.31` (or `31%`), under a header or not; or the JSON of a plan.

    Raises `CurveError`.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise CurveError(f"{path}: cannot be read: {error}", "give a readable file") from None
    if text.lstrip().startswith("{"):
        try:
            points = [Point(int(row["capacity_bytes"]), float(row["hit_rate"])) for row in json.loads(text)["curve"]]
        except (ValueError, KeyError, TypeError) as error:
            raise CurveError(
                f"{path}: no plan with a curve: {error!r}", "give `gdscache plan --json`, or CSV"
            ) from None
    else:
        points = _lines(path, text)
    points.sort()
    if not points:
        raise CurveError(f"{path}: no point", "write lines of a capacity and a hit rate: 64GiB,0.31")
    for point, after in itertools.pairwise([Point(0, 0.0), *points]):
        if after.size <= point.size:
            raise CurveError(f"{path}: {about(after.size)} is there twice, or no size", "one point a size, above 0")
        if not 0 <= after.rate <= 1:
            raise CurveError(
                f"{path}: a hit rate of {after.rate:g} at {about(after.size)}", "it is 0 to 1, or 0% to 100%"
            )
        if after.rate < point.rate:
            raise CurveError(
                f"{path}: {after.rate:g} at {about(after.size)} is less than {point.rate:g} at {about(point.size)}",
                "more capacity does not hit less: measure both points on the same traffic",
            )
    return points


def _lines(path: Path, text: str) -> list[Point]:
    points: list[Point] = []
    for number, fields in enumerate(csv.reader(text.splitlines()), 1):
        fields = [field.strip() for field in fields]
        if not any(fields) or fields[0].startswith("#") or (not points and number == 1 and not fields[0][:1].isdigit()):
            continue
        try:
            size, rate = fields
            percent = rate.endswith("%")
            points.append(Point(parse_size(size), float(rate.removesuffix("%")) / (100 if percent else 1)))
        except ValueError as error:
            raise CurveError(
                f"{path}:{number}: {','.join(fields)!r}: {error}", "write 64GiB,0.31 or 64GiB,31%"
            ) from None
    return points


def rate_at(points: Sequence[Point], size: float) -> float:
    """Between points along the logarithm of the size; below the first from nothing on; the last one's beyond it."""
    first, last = points[0], points[-1]
    if size <= first.size:
        return first.rate * size / first.size
    if size >= last.size:
        return last.rate
    low, high = next((a, b) for a, b in itertools.pairwise(points) if size <= b.size)
    share = math.log(size / low.size) / math.log(high.size / low.size)
    return low.rate + share * (high.rate - low.rate)


def plan_curve(
    points: Sequence[Point], token_bytes: float, demand: Demand, machine: MachineModel, limits: Limits, rule: Rule
) -> dict[str, Any]:
    """The report of `gdscache plan --curve`. Raises `InvalidValueError`."""
    if not demand.prompt_tokens > 0:
        raise InvalidValueError(f"--prompt-tokens is {demand.prompt_tokens:g}", "set it to the mean of the prompts")
    if demand.requests_per_second is not None and not demand.requests_per_second > 0:
        raise InvalidValueError(f"--requests-per-second is {demand.requests_per_second:g}", "set it to more than 0")
    if limits.of_wear and demand.requests_per_second is None:
        raise InvalidValueError("a curve alone says nothing of wear", "give --requests-per-second with its limit")

    def row(cpu: int, ssd: int) -> dict[str, Any]:
        in_cpu = rate_at(points, cpu)
        hit = rate_at(points, ssd) if ssd else in_cpu
        seconds = (1 - hit) / machine.prefill + in_cpu * token_bytes / machine.link
        seconds += (hit - in_cpu) * token_bytes / min(machine.ssd_read, machine.link)
        written = None
        if demand.requests_per_second is not None:
            written = (1 - hit) * demand.prompt_tokens * demand.requests_per_second * token_bytes * DAY if ssd else 0.0
        return {
            "cpu_bytes": cpu,
            "ssd_bytes": ssd,
            "token_hit_rate": hit,
            "tier_token_hit_rates": {"cpu": in_cpu, "ssd": hit - in_cpu},
            "first_token_seconds": {"mean": demand.prompt_tokens * seconds},
            "ssd_written_bytes_per_day": written,
            "drive_writes_per_day": written / ssd if written is not None and ssd else None,
        }

    most, steps = points[-1].size, _STEPS
    low = (
        min(points[0].size, *(b for b in (limits.cpu, limits.ssd) if b)) if limits.cpu or limits.ssd else points[0].size
    )
    count = max(1, math.ceil(math.log2(most / low) * steps)) if most > low else 0
    sizes = {round(low * (most / low) ** (i / count)) for i in range(count + 1)} if count else {most}
    sizes |= {point.size for point in points}
    cpu, ssd = (_within(sizes, budget) for budget in (limits.cpu, limits.ssd))
    rows = [row(above, below) for above in cpu for below in (0, *ssd) if below > above or not below]
    for found in rows:
        found["within_limits"] = keeps(found, limits)
    forever = row(most, 0)
    allowed = [found for found in rows if found["within_limits"]]
    best = min(mean_of(found) for found in (forever, *allowed))
    target, met = rule.target(allowed, best, limits)
    chosen = rule.choose(allowed, target)
    enough = (1 - rule.within) * points[-1].rate
    knee = min(size for size in sizes if rate_at(points, size) >= enough)
    return {
        "recommended": {**chosen, "above_infinite": mean_of(chosen) / mean_of(forever) - 1},
        "no_cache_first_token_seconds": {"mean": demand.prompt_tokens / machine.prefill},
        "infinite": {
            "token_hit_rate": points[-1].rate,
            "bytes": most,
            "first_token_seconds": forever["first_token_seconds"],
        },
        "target_seconds": target,
        "met": met,
        "binds": binds(rows, chosen, limits, rule, machine, token_bytes, most, met=met, infinite=mean_of(forever)),
        "knee": {"capacity_bytes": knee, "hit_rate": rate_at(points, knee)},
        "curve": [{"capacity_bytes": size, "hit_rate": rate} for size, rate in points],
        "candidates": rows,
    }


def _within(sizes: set[int], budget: int | None) -> list[int]:
    most = max(sizes)
    if budget is None:
        return sorted(sizes)
    return sorted({size for size in sizes if size <= budget} | ({budget} if 0 < budget < most else set()))
