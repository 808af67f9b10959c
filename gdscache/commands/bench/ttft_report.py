"""The report of `gdscache bench ttft`: references of its figures, tables and the plot."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gdscache.commands.bench.measure import target
from gdscache.commands.bench.rows import Bar, value_bars
from gdscache.commands.bench.ttft_cells import NOWHERE, PLACES, cell_of, usual
from gdscache.commands.console import Table, duration, figure, percent, verdict

Row = Mapping[str, Any]

LONG = 32 << 10  # tokens: from this length on hits are compared with the ideal
LEAST_CACHED = 50  # percent
IDEAL_TARGETS = {"cpu": 0.90, "ssd_via_cpu": 0.85}  # max(c, t) / measured
MISS_TARGET = 0.02  # of the time without a cache


def judge(row: dict[str, Any], *, ram: bool) -> dict[str, Any]:
    """The row, with `target` and `met` if it is of a long hit, or of a prompt that hit nothing. `ram`: the SSD tier
    lies on a RAM disk."""
    if row["where"] == NOWHERE:
        return row | target(row["added"], MISS_TARGET, at_least=False)
    limit = IDEAL_TARGETS.get(row["where"]) if ram or row["where"] != "ssd_via_cpu" else None
    long = row["prompt_tokens"] >= LONG and row["cached_percent"] >= LEAST_CACHED
    if limit is None or not long or not usual(cell_of(row)) or row["ideal_ratio"] is None:
        return row
    return row | target(row["ideal_ratio"], limit, at_least=True)


# -- tables and the plot -----------------------------------------------------------------------------------------------


def tables(report: Row) -> list[Table]:
    """First tokens by cached share and place, beside computing; also for some of the cells."""
    hits = Table("Time to first token", "prompt", "cached", "from", "first token", "computed", "speed-up")
    for r in _usual(report):
        takes, recomputed = (duration(r[key]["median"]) for key in ("ttft_seconds", "recompute_seconds"))
        cached, where = f"{r['cached_percent']} %", r["where"].replace("_", " ")
        hits.add_row(f"{r['prompt_tokens']:,} tokens", cached, where, takes, recomputed, figure(r["speed_up"]))
    misses = Table("Nothing cached: looked up and stored", "prompt", "takes", "without a cache", "added")
    for r in (r for r in report["cells"] if r["where"] == NOWHERE):
        takes, recomputed = (duration(r[key]["median"]) for key in ("ttft_seconds", "recompute_seconds"))
        misses.add_row(f"{r['prompt_tokens']:,} tokens", takes, recomputed, percent(r["added"]))
    return [hits, misses]


def details(report: Row) -> list[Table]:
    """Every cell beside the ideal."""
    hits = Table(
        "c: with the prefix in the planes, t: its bytes over the ceiling, ideal: max(c, t) / TTFT",
        *("cell", "TTFT", "c", "t", "ideal", "wait", "tokens"),
    )
    for r in (r for r in report["cells"] if r["where"] != NOWHERE):
        ideal = "" if r["ideal_ratio"] is None else figure(r["ideal_ratio"])
        ideal += f" ({verdict(r, 'at least')})" if "met" in r else ""
        transfer = "" if r["transfer_seconds"] is None else duration(r["transfer_seconds"])
        waited = "" if r["wait_seconds"] is None else duration(r["wait_seconds"])
        takes, resident = (duration(r[key]["median"]) for key in ("ttft_seconds", "resident_seconds"))
        hits.add_row(cell_of(r).label, takes, resident, transfer, ideal, waited, r["tokens"])
    return [hits]


def bottom(report: Row) -> list[str]:
    """A user's gain: the longest prompt, 90 % cached, beside computing it; and the cost of a miss."""
    found, some = [], [r for r in _usual(report) if r["cached_percent"] == _TOLD]
    longest = max((r["prompt_tokens"] for r in some), default=0)
    some = [r for r in some if r["prompt_tokens"] == longest and r["where"] in _TOLD_PLACES]
    if some:
        said = []
        for r in some:
            took, times = duration(r["ttft_seconds"]["median"]), figure(r["speed_up"])
            said.append(f"{took} from {_TOLD_PLACES[r['where']]} ({times} times as fast)")
        computed = duration(some[0]["recompute_seconds"]["median"])
        found.append(
            f"A prompt of {longest:,} tokens has its first token after {computed} where all of it is computed. With "
            f"{_TOLD} % of it cached, it has it after {' and '.join(said)}."
        )
    misses = [r for r in report["cells"] if r["where"] == NOWHERE]
    if misses:
        added = max(misses, key=lambda row: row["prompt_tokens"])["added"]
        change = "longer" if added > 0 else "less"
        found.append(f"A prompt that hits nothing takes {percent(abs(added))} {change}, with its pages stored.")
    return [" ".join(found)] if found else []


_TOLD, _TOLD_PLACES = 90, {"cpu": "the CPU tier", "ssd_via_cpu": "the SSD"}


def _usual(report: Row) -> list[Row]:
    """Hits as an engine has them: loads run under the forward pass, and no gate decides."""
    some = [r for r in report["cells"] if r["where"] != NOWHERE and usual(cell_of(r))]
    return sorted(some, key=lambda r: (r["prompt_tokens"], r["cached_percent"]))


_COLORS = {  # by overlap and gate
    (True, False): "tab:blue",
    (False, False): "tab:orange",
    (True, True): "tab:green",
    (False, True): "tab:olive",
}


def plot(report: Row, drawn: Any) -> None:
    """A panel for each prompt length: computing it, and the measured hits by cached share and place."""
    hits = [r for r in report["cells"] if r["where"] != NOWHERE]
    lengths = sorted({r["prompt_tokens"] for r in hits}) or [0]
    drawn.set_size_inches(11, 1 + 0.25 * len(hits) + len(lengths))
    for axes, length in zip(drawn.subplots(len(lengths), 1, squeeze=False)[:, 0], lengths, strict=True):
        some = [r for r in hits if r["prompt_tokens"] == length]
        some.sort(key=lambda r: (r["cached_percent"], PLACES.index(r["where"])))
        bars = [Bar("recomputed", r["recompute_seconds"]["values"], "0.6") for r in some[:1]]
        for r in some:
            name, color = cell_of(r).label.partition(", ")[2], _COLORS[r["overlap"], r["gate"]]
            bars.append(Bar(name, r["ttft_seconds"]["values"], color, r["ideal_seconds"]))
        value_bars(axes, bars, "time to first token, s; line: the ideal, max(c, t)", duration)
        axes.set_title(f"{(report['model'] or {}).get('name', '')}, prompt of {length:,} tokens", fontsize=9)
