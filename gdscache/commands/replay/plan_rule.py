"""What a plan must keep to, and which of its candidates is picked."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from gdscache.errors import CapacityError, InvalidValueError
from gdscache.moves.clock import MachineModel
from gdscache.sizes import about

DAY = 86_400.0  # seconds
_DROPPED = 0.01  # share of the offered pages; less is not worth a word


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a plan must keep to; None is no limit. Bytes; `written`: bytes a day; `drive_writes`: of the SSD tier a day.

    `first_token`: seconds, the mean of all requests; it takes the place of `Rule.within`.
    """

    cpu: int | None = None
    ssd: int | None = None
    written: float | None = None
    drive_writes: float | None = None
    first_token: float | None = None

    def a_day(self, ssd_bytes: int) -> float:
        """Bytes that may be written to an SSD tier of this size in a day."""
        return min(
            math.inf if self.written is None else self.written,
            math.inf if self.drive_writes is None else self.drive_writes * ssd_bytes,
        )

    @property
    def of_wear(self) -> bool:
        return self.written is not None or self.drive_writes is not None

    def describe(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def check(self, page_bytes: int) -> None:
        """Raises `CapacityError` for a budget that holds no page, and `InvalidValueError` for a limit that is none."""
        for name, option in (("cpu", "--cpu-budget"), ("ssd", "--ssd-budget")):
            size = getattr(self, name)
            if size is not None and size < page_bytes and (name == "cpu" or size):
                raise CapacityError(
                    f"{option} is {about(size)} and a page {about(page_bytes)}",
                    f"raise {option}, or use smaller pages (--page-tokens)",
                )
        for name, option in (("written", "--writes-a-day"), ("drive_writes", "--drive-writes")):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise InvalidValueError(f"{option} is {value:g}", "set it to more than 0, or --ssd-budget to 0")
        if self.first_token is not None and not self.first_token > 0:
            raise InvalidValueError(f"--ttft-target is {self.first_token:g}", "set it to more than 0 seconds")


@dataclasses.dataclass(frozen=True)
class Rule:
    """The candidate that costs least, of those whose mean time to the first token is at most `1 + within` times the
    best one's, infinite tiers included. A byte of host memory costs as much as `host_price` bytes of the SSD."""

    within: float = 0.05
    host_price: float = 20.0

    def __post_init__(self) -> None:
        if not 0 <= self.within < math.inf:
            raise InvalidValueError(f"--within is {100 * self.within:g} %", "set it to 0 or more")
        if not 0 < self.host_price < math.inf:
            raise InvalidValueError(f"--host-price is {self.host_price:g}", "set it to more than 0")

    def aim(self, limits: Limits) -> str:
        """What the chosen candidate is to reach."""
        if limits.first_token is not None:
            return f"a mean TTFT of {limits.first_token:g} s"
        return f"a mean TTFT at most {100 * self.within:g} % above the best"

    def describe(self, limits: Limits) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "aim": self.aim(limits)}

    def cost(self, row: Mapping[str, Any]) -> float:
        return self.host_price * float(row["cpu_bytes"]) + float(row["ssd_bytes"])

    def target(self, rows: Sequence[Mapping[str, Any]], best: float, limits: Limits) -> tuple[float, bool]:
        """Seconds that the chosen row may have, and whether that is what was wanted: `best` (seconds), or the limit."""
        wanted = limits.first_token or best * (1 + self.within)
        least = min(mean_of(row) for row in rows)
        return (wanted, True) if least <= wanted else (least * (1 + self.within), False)

    def choose(self, rows: Sequence[Mapping[str, Any]], target: float) -> Mapping[str, Any]:
        return min((row for row in rows if mean_of(row) <= target), key=lambda row: (self.cost(row), mean_of(row)))


def mean_of(row: Mapping[str, Any]) -> float:
    """Seconds to the first token."""
    return float(row["first_token_seconds"]["mean"])


def keeps(row: Mapping[str, Any], limits: Limits) -> bool:
    """Whether a candidate keeps to the limits of wear; the sizes are in the grid already."""
    if not row["ssd_bytes"] or not limits.of_wear:
        return True
    written = row["ssd_written_bytes_per_day"]
    if written is None:
        raise InvalidValueError("the trace takes no time, so nothing is known of a day", "leave the limits of wear out")
    return bool(written <= limits.a_day(row["ssd_bytes"]))


def binds(
    rows: Sequence[Mapping[str, Any]],
    chosen: Mapping[str, Any],
    limits: Limits,
    rule: Rule,
    machine: MachineModel,
    token_bytes: float,
    everything: int,
    *,
    met: bool,
    infinite: float,
) -> list[dict[str, str]]:
    """What keeps the chosen tiers from giving more, the limits first: `what`, for programs, and `text`.

    `met`: the chosen row is what was aimed at. `everything`: bytes that an infinite cache would hold; `infinite`: mean
    seconds to the first token with one.
    """
    found = []

    def add(what: str, text: str) -> None:
        found.append({"what": what, "text": text})

    if not met and limits.first_token is not None and infinite > limits.first_token:
        add("target", f"{rule.aim(limits)} is out of reach: infinite tiers give {infinite:.3g} s")
    elif not met:
        aim = f"{rule.aim(limits)} is not reached"
        fastest = min((row for row in rows if row["within_limits"]), key=mean_of)
        for name in ("cpu", "ssd"):
            budget = getattr(limits, name)
            if budget is not None and budget < everything and fastest[f"{name}_bytes"] >= 0.9 * budget:
                add(f"{name}_budget", f"--{name}-budget, {about(budget)}: {aim}; all pages are {about(everything)}")
        worn = [row for row in rows if not row["within_limits"]]
        if worn and mean_of(best := min(worn, key=mean_of)) < mean_of(chosen):
            written = about(int(best["ssd_written_bytes_per_day"]))
            add(
                "wear",
                f"an SSD of {about(best['ssd_bytes'])} gives {mean_of(best):.3g} s, and writes {written} a day",
            )
        if not found:
            add("target", f"{aim}: no pair of sizes that was tried does it")
    if (full := _full(chosen)) > _DROPPED:
        setting = "raise it" if chosen["cpu_bytes"] else "ssd.admission and store.write_policy write less"
        add("queue", f"store.queue: {100 * full:.0f} % of what is stored finds it full and is dropped; {setting}")
    others = "search others with --admission second_offer,tinylfu --write write_through_selective"
    with_ssd = [row for row in rows if row["ssd_bytes"]]
    if (full := _refused(chosen)) > _DROPPED:
        add("ssd_write", f"the SSD's writes: {100 * full:.0f} % of what is offered to it finds no room; {others}")
    elif not met and with_ssd and not chosen["ssd_bytes"]:
        full = min(max(_full(row), _refused(row)) for row in with_ssd)
        if full > _DROPPED:
            add("ssd_write", f"the SSD's writes: with one, {100 * full:.0f} % of its pages find no room; {others}")
    from_ssd = machine.ssd_read / token_bytes
    if from_ssd < machine.prefill:
        add("ssd_read", f"the SSD reads {from_ssd:,.0f} tokens/s; the prefill, at {machine.prefill:,.0f}, is faster")
    if met:
        add("traffic", "the traffic: more capacity hits little more of it")
    return found


def _full(row: Mapping[str, Any]) -> float:
    """The share of the offered pages that the full queue drops; a plan from a curve knows of none."""
    return float(row["dropped_pages"].get("queue_full", 0) / row["offered_pages"]) if row.get("offered_pages") else 0.0


def _refused(row: Mapping[str, Any]) -> float:
    """The share of what is offered to the SSD that it has no room for; a plan from a curve knows of none."""
    offered = row.get("ssd_offered_pages")
    return float(row["ssd_refused_pages"].get("queue_full", 0) / offered) if offered else 0.0
