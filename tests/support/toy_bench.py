"""Benches of made-up cases, each with a row, a table, a plot and a sentence."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from gdscache.commands.bench import kit, rows
from gdscache.commands.bench.measure import series
from gdscache.commands.console import Table
from gdscache.errors import CapacityError

SERIES = series((1.0, 2.0, 3.0))
TOY = rows.compared("a toy", SERIES, "another", series((4.0, 2.0, 6.0)), 0.75)


def toy(actions: Mapping[str, Callable[[], Any]], name: str = "toy") -> kit.Bench:
    """A bench of these cases, whose rows are those of `r`."""

    def measured(run: kit.Run, settings: kit.Settings, directory: Path) -> None:
        run.plan(list(actions))
        for case, action in actions.items():
            run.case(case, lambda action=action: {"r": [{"value": action(), **TOY}]})

    def lines(report: kit.Report) -> list[rows.Line]:
        return [(f"load of {row['case']}", row) for row in report["r"]]

    def shown(report: kit.Report) -> list[Table]:
        return [rows.lines_table("Toys", lines(report))]

    def drawn(report: kit.Report, figure: Any) -> None:
        rows.bars(figure.subplots(), lines(report))

    def bottom(report: kit.Report) -> list[str]:
        return [f"{name} <moves> {len(report['r'])} & more."]

    return kit.Bench(name, f"gdscache.bench.{name}/1", {"r": []}, measured, shown, drawn, bottom=bottom)


def interrupted() -> NoReturn:
    raise KeyboardInterrupt


def broken() -> NoReturn:
    raise CapacityError("the disk is\nfull", "free some")


def never() -> NoReturn:
    raise AssertionError("measured again")
