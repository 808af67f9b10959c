"""The report of `gdscache bench ttft`: references of its figures, tables and the plot."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gdscache.commands.bench.measure import target
from gdscache.commands.bench.ttft_cells import NOWHERE, PLACES, SWITCHED, cell_of, usual
from gdscache.commands.console import Table, duration, figure, percent, verdict

Row = Mapping[str, Any]

LONG = 32 << 10  # tokens: from this length on hits are compared with the ideal
LEAST_CACHED = 50  # percent
IDEAL_TARGETS = {"cpu": 0.90, "ssd_via_cpu": 0.85}  # max(c, t) / measured
OVERLAP_TARGET = 0.90  # of (c + t) / max(c, t), the greatest gain of overlap
COMPARABLE = (0.3, 0.7)  # range of t / c in which overlap is compared with that gain
RECOMPUTE_TARGET, BETTER_TARGET = (
    1.03,
    1.05,
)  # with the gate: against recomputing, and the better of that and no gate
WAIT_TARGET = 50e-6  # seconds of the host, a layer
MISS_TARGET = 0.02  # of the time without a cache


def verdicts(cells: Sequence[Row], *, judged: bool, ram: bool) -> list[dict[str, Any]]:
    """The figures' verdicts, row by row. `judged`: with targets; `ram`: the SSD tier lies on a RAM disk.

    A row has `name`, `what`, `value`, `relation` (`at least` or `at most`), and if judged `target` and `met`.
    """
    found = [*_ideals(cells, judged=judged, ram=ram), *_overlaps(cells, judged=judged)]
    found += [*_gates(cells, judged=judged), *_waits(cells, judged=judged)]
    for row in (row for row in cells if row["where"] == NOWHERE):
        found.append(_row("miss", _label(row), row["added"], MISS_TARGET, judged, at_least=False))
    return found


def _row(name: str, what: str, value: float, limit: float, judged: bool, *, at_least: bool) -> dict[str, Any]:
    relation = "at least" if at_least else "at most"
    goal = target(value, limit, at_least=at_least) if judged else {}
    return {"name": name, "what": what, "value": value, "relation": relation, **goal}


def _ideals(cells: Sequence[Row], *, judged: bool, ram: bool) -> Iterable[dict[str, Any]]:
    for row in cells:
        limit = IDEAL_TARGETS.get(row["where"])
        if limit is None or row["gate"] or not row["overlap"] or row["ideal_ratio"] is None:
            continue
        hard = judged and row["prompt_tokens"] >= LONG and row["cached_percent"] >= LEAST_CACHED
        counts = hard and (ram or row["where"] != "ssd_via_cpu")
        yield _row("ideal", _label(row), row["ideal_ratio"], limit, counts, at_least=True)


def _overlaps(cells: Sequence[Row], *, judged: bool) -> Iterable[dict[str, Any]]:
    """Overlap against no overlap, as a share of the greatest gain."""
    off = {_key(row): row for row in cells if not row["overlap"] and not row["gate"]}
    for row in cells:
        other = off.get(_key(row))
        if other is None or row["gate"] or not row["overlap"] or not row["transfer_seconds"]:
            continue
        c, t = row["resident_seconds"]["median"], row["transfer_seconds"]
        if COMPARABLE[0] <= t / c <= COMPARABLE[1]:
            won = other["ttft_seconds"]["median"] / row["ttft_seconds"]["median"]
            share = won / ((c + t) / max(c, t))
            yield _row("overlap", f"{_label(row)}, on / off", share, OVERLAP_TARGET, judged, at_least=True)


def _gates(cells: Sequence[Row], *, judged: bool) -> Iterable[dict[str, Any]]:
    ungated = {(_key(row), row["overlap"]): row["ttft_seconds"]["median"] for row in cells if not row["gate"]}
    for row in (row for row in cells if row["gate"]):
        mine, plain = row["ttft_seconds"]["median"], row["recompute_seconds"]["median"]
        yield _row("gate", f"{_label(row)}, / recomputing", mine / plain, RECOMPUTE_TARGET, judged, at_least=False)
        other = ungated.get((_key(row), row["overlap"]))
        if other is not None:
            what = f"{_label(row)}, / the better of recomputing and no gate"
            yield _row("gate better", what, mine / min(plain, other), BETTER_TARGET, judged, at_least=False)


def _waits(cells: Sequence[Row], *, judged: bool) -> Iterable[dict[str, Any]]:
    for row in cells:
        if row["where"] == "cpu" and row["overlap"] and not row["gate"] and row["wait_seconds"] is not None:
            yield _row("wait", _label(row), row["wait_seconds"]["median"], WAIT_TARGET, judged, at_least=False)


def _key(row: Row) -> tuple[int, int, str]:
    return row["prompt_tokens"], row["cached_percent"], row["where"]


def _label(row: Row) -> str:
    return cell_of(row).label


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
    """Every cell beside the ideal, and the verdicts."""
    hits = Table(
        "c: with the prefix in the planes, t: its bytes over the ceiling, ideal: max(c, t) / TTFT",
        *("cell", "TTFT", "c", "t", "ideal", "wait", "tokens"),
    )
    for r in (r for r in report["cells"] if r["where"] != NOWHERE):
        ideal = "" if r["ideal_ratio"] is None else figure(r["ideal_ratio"])
        transfer = "" if r["transfer_seconds"] is None else duration(r["transfer_seconds"])
        waited = "" if r["wait_seconds"] is None else duration(r["wait_seconds"]["median"])
        takes, resident = (duration(r[key]["median"]) for key in ("ttft_seconds", "resident_seconds"))
        hits.add_row(_label(r), takes, resident, transfer, ideal, waited, r["tokens"])
    judged = any("target" in r for r in report["verdicts"])
    held = Table("Verdicts", "row", "what", "value", *(["target"] if judged else []))
    for r in report["verdicts"]:
        value = duration(r["value"]) if r["name"] == "wait" else figure(r["value"])
        limit = duration if r["name"] == "wait" else figure
        said = [verdict(r, r["relation"], limit) if "target" in r else ""] if judged else []
        held.add_row(r["name"], r["what"], value, *said)
    return [hits, held]


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
            spread = [[max(ttft["median"] - ttft["min"], 0)], [max(ttft["p99"] - ttft["median"], 0)]]
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
