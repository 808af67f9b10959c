"""The report of `gdscache bench ttft`: references of its figures, tables and the plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gdscache.commands.bench.measure import target
from gdscache.commands.bench.ttft_cells import NOWHERE, PLACES, SWITCHED, cell_of, usual
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


_LOOKS = {
    (True, False): ("tab:blue", "overlap"),
    (False, False): ("tab:orange", "no overlap"),
    (True, True): ("tab:green", "overlap, gate"),
    (False, True): ("tab:olive", "no overlap, gate"),
}


def plot(report: Row, drawn: Any) -> None:
    """A panel for each prompt length: bars in groups by place and cached share, for the measured cells."""
    cells = [r for r in report["cells"] if r["where"] != NOWHERE]
    lengths = sorted({r["prompt_tokens"] for r in cells}) or [0]
    drawn.set_size_inches(14, 1.5 + 3.5 * len(lengths))
    for axes, length in zip(drawn.subplots(len(lengths), 1, squeeze=False)[:, 0], lengths, strict=True):
        _panel(axes, [r for r in cells if r["prompt_tokens"] == length])
        name = (report["model"] or {}).get("name", "")
        axes.set_title(f"{name}, prompt of {length:,} tokens", fontsize=9)


def _panel(axes: Any, cells: Sequence[Mapping[str, Any]]) -> None:
    groups = sorted({(r["cached_percent"], PLACES.index(r["where"])) for r in cells})
    drawn: set[str] = set()

    def label(text: str) -> str | None:
        if text in drawn:
            return None
        drawn.add(text)
        return text

    for place, (cached, where) in enumerate(groups):
        some = [r for r in cells if (r["cached_percent"], PLACES.index(r["where"])) == (cached, where)]
        for r in some:
            switches = (r["overlap"], r["gate"])
            colour, name = _LOOKS[switches] if r["where"] in SWITCHED else ("tab:grey", "in the pool")
            at = place + (0.2 * (list(_LOOKS).index(switches) - 1.5) if r["where"] in SWITCHED else 0.0)
            ttft = r["ttft_seconds"]
            spread = [[max(ttft["median"] - ttft["min"], 0)], [max(ttft["max"] - ttft["median"], 0)]]
            axes.bar(at, ttft["median"], 0.18, yerr=spread, color=colour, ecolor="black", capsize=2, label=label(name))
        recomputed, ideal = some[0]["recompute_seconds"]["median"], some[0]["ideal_seconds"]
        for value, style, name in ((recomputed, "--", "recomputing"), (ideal, "-", "ideal, max(c, t)")):
            if value is not None:
                axes.plot([place - 0.42, place + 0.42], [value] * 2, style, color="black", label=label(name))
    names = [f"{cached} %\n{PLACES[where].replace('_', ' ')}" for cached, where in groups]
    axes.set_xticks(range(len(groups)), names, fontsize=7)
    axes.set_ylabel("seconds")
    axes.set_ylim(bottom=0)
    if drawn:
        axes.legend(fontsize=7)
