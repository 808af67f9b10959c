"""`gdscache replay --suite`: from the command line's options to the report."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from gdscache.commands.bench.machine import describe
from gdscache.commands.replay import suite
from gdscache.commands.replay.console import show, watched
from gdscache.commands.replay.families import FAMILIES
from gdscache.commands.replay.suite_report import suite_plot, suite_tables


class Drawn(NamedTuple):
    """What is asked for; no families are all of them, no policies the default. `references`: pages of a trace."""

    seed: int
    seeds: int
    references: int
    families: tuple[str, ...]
    policies: tuple[str, ...]


def replay_suite(drawn: Drawn, *, as_json: bool, plot: Path | None) -> None:
    """Draw, replay and show."""
    if plot is not None:
        from gdscache.commands.bench.plots import require

        require(plot)
    families, policies = drawn.families or tuple(FAMILIES), drawn.policies or (suite.DEFAULT,)
    settings = suite.Settings(drawn.seed, drawn.seeds, drawn.references, families, policies)
    found = watched(lambda progress: suite.run(settings, progress), "the suite is not complete")
    report = {"machine": describe(Path()), **found}
    if plot is not None:
        suite_plot(report, plot)
    show(report, suite_tables(report), as_json=as_json, width=160)
