"""The report of `gdscache bench ttft` for vLLM or SGLang: tables, and the plot."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from gdscache.commands.bench.rows import Bar, value_bars
from gdscache.commands.console import Table, figure

Row = Mapping[str, Any]

KINDS = {"shared": "half of each prompt shared", "lone": "nothing shared"}
DISKS = {"ram": "RAM disk", "disk": "disk"}
NAMES = {
    "none": "no cache",
    "cpu": "vLLM's CPU offloading",
    "files": "vLLM's file tier",
    "gdscache": "gdscache",
    "hicache": "HiCache",
    "storage": "gdscache under HiCache",
    "linker": "gdscache's linker",
}
OURS = ("gdscache", "storage", "linker")


def first_bars(report: Row) -> list[Bar]:
    """Milliseconds to the first token, way by way."""
    plain: Row = next((row["first"] for row in report["rows"] if "recomputed" in row.get("first", {})), {})
    bars = [Bar("recomputed", plain["recomputed"]["ms"], "0.6")] if plain else []
    for row in report["rows"]:
        found, names = row.get("first", {}).get("loaded"), [bar.name for bar in bars]
        of = f"\nafter a restart, {DISKS[row['where']]}" if row["restarted"] else ", CPU memory"
        name = NAMES[row["way"]] + of + (f", {row['policy']}" if row["restarted"] and row.get("policy") else "")
        if found and (row["restarted"] or name not in names):  # CPU memory is the same with every lower tier
            bars.append(Bar(f"{name}, again" if name in names else name, found["ms"], _color(row)))
    return [*bars, Bar("resident on the GPU", plain["resident"]["ms"], "0.8")] if "resident" in plain else bars


def traffic_bars(report: Row, kind: str) -> list[Bar]:
    """Requests a second, way by way."""
    bars: list[Bar] = []
    for row in report["rows"]:
        if found := row.get(f"{kind}_requests_per_s"):
            name = NAMES[row["way"]] + (", after a restart" if row["restarted"] else "")
            name += f", {DISKS[row['where']]}" if row["restarted"] or row["where"] == "disk" else ""
            bars.append(Bar(name, found, _color(row)))
    return bars


def _color(row: Row) -> str:
    return "tab:green" if row["way"] in OURS else "0.6" if row["way"] == "none" else "tab:orange"


def tables(report: Row) -> list[Table]:
    """First tokens and requests a second."""
    first = Table(_first_title(report), "way", "ms")
    rates = {kind: Table(f"Requests a second, {words}", "way", "requests/s") for kind, words in KINDS.items()}
    some = [(first, first_bars(report)), *((table, traffic_bars(report, kind)) for kind, table in rates.items())]
    for table, bars in some:
        for bar in bars:
            low, high = figure(min(bar.values)), figure(max(bar.values))
            table.add_row(bar.name.replace("\n", ", "), f"{figure(statistics.median(bar.values))} ({low} to {high})")
    return [first, *rates.values()]


def _first_title(report: Row) -> str:
    return f"Time to first token; {report['settings']['tokens']:,} tokens, 90 % cached"


def bottom(report: Row) -> list[str]:
    """A server user's gain."""
    found = {name: statistics.median(values) for name, values, *_ in first_bars(report)}
    computed, said = found.get("recomputed"), []
    if computed is not None and len(found) > 2:
        loaded = [
            f"{figure(ms)} ms with {name.replace(chr(10), ' ')} ({figure(computed / ms)} times as fast)"
            for name, ms in found.items()
            if name not in ("recomputed", "resident on the GPU")
        ]
        said.append(
            f"A prompt of {report['settings']['tokens']:,} tokens has its first token after {figure(computed)} ms "
            f"where all of it is computed. With 90 % of it cached: {'; '.join(loaded)}."
        )
    for kind, words in KINDS.items():
        rates = [f"{figure(statistics.median(values))} with {name}" for name, values, *_ in traffic_bars(report, kind)]
        if rates:
            said.append(f"Requests a second, {words}: {', '.join(rates)}.")
    return [" ".join(said)] if said else []


def plot(report: Row, drawn: Any) -> None:
    """First tokens, and requests a second below them. Missing figures have no panel."""
    bars = {"first": first_bars(report)} | {kind: traffic_bars(report, kind) for kind in KINDS}
    kinds = [kind for kind in KINDS if bars[kind]]
    rows = [["first"] * 2] * bool(bars["first"]) + [(kinds * 2)[:2]] * bool(kinds)
    drawn.set_size_inches(8, 1 + 0.33 * sum(len(bars[row[0]]) + 3 for row in rows))
    settings, gpus = report["settings"], report["machine"]["gpus"] or ["no GPU"]
    tp, engine = settings["tp"], settings["engine"]
    where = f"{tp} of {len(gpus)} {gpus[0]} an engine" if tp > 1 else gpus[0]
    said = f"{engine} {settings['versions'][engine]}, {where}; bars: medians; dots: single prompts and turns"
    drawn.supxlabel(said, fontsize=8)
    panels = drawn.subplot_mosaic(rows, height_ratios=[len(bars[row[0]]) + 1 for row in rows]) if rows else {}
    for name, axes in panels.items():
        row = next(row for row in rows if name in row)
        longest = max(max(bar.values) for beside in row for bar in bars[beside])  # one scale for a row
        if name == "first":
            value_bars(axes, bars[name], f"ms; {_first_title(report).lower()}", "{:.0f}".format)
        else:
            value_bars(axes, bars[name], "requests a second", "{:.1f}".format)
            axes.set_title(KINDS[name], fontsize=9)
        axes.set_xlim(0, 1.06 * longest)
    if "lone" in panels and [bar[0] for bar in bars["shared"]] == [bar[0] for bar in bars["lone"]]:
        panels["lone"].tick_params(labelleft=False)
