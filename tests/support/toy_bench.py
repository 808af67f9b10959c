"""Benches of made-up cases, each with a row, a table, a plot and a sentence."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from gdscache.commands.bench import figures, kit
from gdscache.errors import CapacityError

SERIES = figures.series((1.0, 2.0, 3.0))
TOY = figures.compared("a toy", SERIES, "another", figures.series((4.0, 2.0, 6.0)), 0.75)


def toy(
    actions: Mapping[str, Callable[[], Any]], name: str = "toy", settings: type[kit.Settings] = kit.Settings
) -> kit.Bench:
    """A bench of these cases, whose rows are those of `r`."""

    def measured(run: kit.Run, settings: kit.Settings, directory: Path) -> None:
        run.plan(list(actions))
        for case, action in actions.items():
            run.case(case, lambda action=action: {"r": [{"value": action(), **TOY}]})

    def panels(report: kit.Report) -> list[figures.Ratios]:
        return [figures.Ratios("Toys", [(f"load of {row['case']}", row) for row in report["r"]])]

    def bottom(report: kit.Report) -> list[str]:
        return [f"{name} <moves> {len(report['r'])} & more."]

    return kit.Bench(name, f"gdscache.bench.{name}/1", {"r": []}, settings, measured, panels, bottom)


def interrupted() -> NoReturn:
    raise KeyboardInterrupt


def broken() -> NoReturn:
    raise CapacityError("the disk is\nfull", "free some")


def never() -> NoReturn:
    raise AssertionError("measured again")
