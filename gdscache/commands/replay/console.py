"""What the commands over traces share: lists as options, a run under a progress bar, a report and how it ends."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from gdscache.commands.replay.simulate import Progress
from gdscache.exits import EXIT_FAILED, EXIT_INTERRUPTED


def listed(texts: list[str] | None) -> tuple[str, ...]:
    """Values of an option given several times, with commas, or both; each once."""
    return tuple(dict.fromkeys(part.strip() for text in texts or () for part in text.split(",")))


def watched(work: Callable[[Progress], dict[str, Any]], lost: str) -> dict[str, Any]:
    """Done under a progress bar; Ctrl-C ends it, and says what is `lost`."""
    from gdscache.commands.bench.report import progress_bar

    try:
        with progress_bar() as progress:
            return work(progress)
    except KeyboardInterrupt:
        typer.echo(f"interrupted: {lost}", err=True)
        raise typer.Exit(EXIT_INTERRUPTED) from None


def show(report: Mapping[str, Any], tables: Iterable[Table], *, as_json: bool, width: int) -> None:
    """The report as JSON, or as tables of `width` columns where the output is no terminal."""
    if as_json:
        typer.echo(json.dumps(report, indent=2))
        return
    console = Console(width=None if sys.stdout.isatty() else width, highlight=False, markup=False)
    for number, table in enumerate(tables):
        if number:
            console.print()
        console.print(table)


def end(problems: Sequence[str]) -> None:
    """Say what does not add up, and fail where anything does not."""
    for problem in problems:
        typer.echo(f"does not add up: {problem}", err=True)
    if problems:
        raise typer.Exit(EXIT_FAILED)
