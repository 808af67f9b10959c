"""The report of `gdscache replay --suite` for people: tables and a plot."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from gdscache.commands.bench.plots import require
from gdscache.commands.bench.report import new_table, verdict

_COLUMNS = ("traces x sizes", "worst", "where", "5th percentile", "geometric mean", "the optimum", "written")


def suite_tables(report: Mapping[str, Any]) -> list[Table]:
    """A table of the orders, one of the default by family, and its targets."""
    orders = new_table(
        "Hits against plain LRU's, 1 % of the references added to both",
        *("policy", *_COLUMNS),
    )
    for name, found in report["policies"].items():
        if found is not None:
            orders.add_row(f"{name} (default)" if name == report["default"] else name, *_cells(found))
    hindsight = report["hindsight"]
    if hindsight is not None:
        orders.add_row("the best of them, in hindsight", "", "", "", "", _ratio(hindsight["geometric_mean"]), "", "")
    tables = [orders]
    for name, families in report["families"].items():
        table = new_table(
            f"{name}, by family",
            *(
                "family",
                "traces x sizes",
                "worst",
                "where",
                "5th percentile",
                "geometric mean",
                "the optimum",
                "written",
            ),
        )
        for family, found in families.items():
            if found is not None:
                table.add_row(family, *_cells(found))
        tables.append(table)
    judged = new_table(f"The default, {report['default']}", "figure", "", "")
    for name, row in report["targets"].items():
        judged.add_row(name.replace("_", " "), f"{row['value']:.4f}", verdict(row, "at least"))
    return [*tables, judged]


def _cells(found: Mapping[str, Any]) -> tuple[str, ...]:
    where = found["worst_row"]
    return (
        f"{found['rows']:,} ({found['rows_with_something_to_gain']:,})",
        f"{found['worst']:.4f}",
        f"{where['family']} {where['seed']}, {where['capacity_pages']:,} of {where['unique_pages']:,}",
        _ratio(found["fifth_percentile"]),
        _ratio(found["geometric_mean"]),
        _ratio(found["optimum_geometric_mean"]),
        f"{found['written_pages'] / found['plain_lru_written_pages']:.3f}",
    )


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def suite_plot(report: Mapping[str, Any], path: Path) -> None:
    """Draw, for each order and family, the worst ratio beside the geometric mean.

    Raises `MissingPackageError` without matplotlib and `InvalidValueError` for a file name of unknown kind.
    """
    matplotlib = require(path)
    names = [name for name, found in report["policies"].items() if found is not None]
    families = report["settings"]["families"]
    figure = matplotlib.figure.Figure(figsize=(11, 2 + 2.4 * len(names)), layout="constrained")
    panels = figure.subplots(len(names), 1, squeeze=False, sharex=True)[:, 0]
    for axes, name in zip(panels, names, strict=True):
        parts = {"all": report["policies"][name], **report["families"][name]}
        drawn = [label for label in ("all", *families) if parts[label] is not None]
        for shift, figure_name, label in ((-0.2, "worst", "worst"), (0.2, "geometric_mean", "geometric mean")):
            values = [parts[family][figure_name] or 1.0 for family in drawn]
            axes.bar([i + shift for i in range(len(drawn))], [v - 1 for v in values], 0.38, bottom=1.0, label=label)
        axes.axhline(1.0, color="0.3", linewidth=0.8)
        axes.set_xticks(range(len(drawn)), drawn, rotation=30)
        axes.set_ylim(0.5, 1.5)
        axes.set_ylabel("hits, of plain LRU's")
        axes.set_title(f"{name} (default)" if name == report["default"] else name, fontsize=10)
        axes.grid(axis="y", alpha=0.3)
    panels[0].legend(loc="upper left", ncols=2, fontsize=8)
    settings = report["settings"]
    last = settings["seed"] + settings["seeds"] - 1
    figure.suptitle(f"Drawn traffic, seeds {settings['seed']} to {last}; 1 % of the references added to hits")
    figure.savefig(path, dpi=120)
