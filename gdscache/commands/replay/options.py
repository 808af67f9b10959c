"""Shared by `gdscache replay` and `gdscache plan`: options, lists, and a run with a progress bar."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from gdscache.commands import EXIT_FAILED, EXIT_INTERRUPTED
from gdscache.commands.console import Progress, progress_bar
from gdscache.commands.replay.setup import MODELS
from gdscache.errors import InvalidValueError

TIERS, MACHINE = "Tiers", "The machine of the simulation"
MODEL = MODELS[0]

Traces = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="TRACE...",
        help="Files of one trace of requests in Mooncake's format, plain or gzip: see docs/replay.md.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", rich_help_panel=TIERS, help="Configuration file of the model and the policies."),
]
Model = Annotated[
    str,
    typer.Option(
        rich_help_panel=TIERS,
        help=f"Model that sets the bytes of a token, without --config: {', '.join(MODELS)}.",
    ),
]
Sets = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        rich_help_panel=TIERS,
        help="Set a key of the configuration. May be repeated; so may a key: then its values are compared.",
    ),
]
SsdRead = Annotated[
    float, typer.Option("--ssd-read-gbps", rich_help_panel=MACHINE, help="Read speed of the SSD in GB/s, or inf.")
]
SsdWrite = Annotated[
    float, typer.Option("--ssd-write-gbps", rich_help_panel=MACHINE, help="Write speed of the SSD in GB/s, or inf.")
]
Link = Annotated[
    float,
    typer.Option("--link-gbps", rich_help_panel=MACHINE, help="Speed between host and GPU in GB/s, each way, or inf."),
]
Prefill = Annotated[
    float | None,
    typer.Option(
        "--prefill-tokens-per-second",
        rich_help_panel=MACHINE,
        help="Speed of the prefill of one request. Gives the time to first token.",
    ),
]


def check_named(traces: list[Path] | None) -> None:
    """Raises `InvalidValueError` without a trace."""
    if not traces:
        raise InvalidValueError("no trace is named", "name a file of requests; docs/replay.md has its format")


def listed(texts: list[str] | None) -> tuple[str, ...]:
    """The distinct values of an option given several times, with commas, or both."""
    return tuple(dict.fromkeys(part.strip() for text in texts or () for part in text.split(",")))


def watched(work: Callable[[Progress], dict[str, Any]], lost: str) -> dict[str, Any]:
    """Run under a progress bar. Ctrl-C ends the run and reports the part that is `lost`."""
    try:
        with progress_bar() as progress, _quiet_stores():
            progress(0, 1, "reading the trace")
            return work(progress)
    except KeyboardInterrupt:
        typer.echo(f"interrupted: {lost}", err=True)
        raise typer.Exit(EXIT_INTERRUPTED) from None


def print_json(report: Mapping[str, Any]) -> None:
    typer.echo(json.dumps(report, indent=2))


def end(problems: Sequence[str]) -> None:
    """Print the inconsistencies, and exit with `EXIT_FAILED` if there are any."""
    for problem in problems:
        typer.echo(f"does not add up: {problem}", err=True)
    if problems:
        raise typer.Exit(EXIT_FAILED)


@contextlib.contextmanager
def _quiet_stores() -> Iterator[None]:
    """Silence the store's warnings: a run would log one for each tier, and its report has the counts."""
    log = logging.getLogger("gdscache.store")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)
