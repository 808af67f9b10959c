"""The command `gdscache make-trace`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from gdscache.commands.console import check_writable
from gdscache.commands.replay.families import FAMILIES, REFERENCES, drawn
from gdscache.commands.replay.trace import write_trace
from gdscache.errors import InvalidValueError


def make_trace(
    family: Annotated[str, typer.Argument(help=f"Family of traffic: {', '.join(FAMILIES)}.")],
    file: Annotated[Path, typer.Argument(help="Trace file to write. A name that ends with .gz is compressed.")],
    seed: Annotated[int, typer.Option(help="Seed of the parameters and the traffic.")] = 0,
    references: Annotated[int, typer.Option(min=1, help="Page references of the trace.")] = REFERENCES,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file without asking.")] = False,
) -> None:
    """Write drawn traffic as a trace in Mooncake's format, for `gdscache replay` and other readers of that format."""
    check_writable(file, "FILE")
    if file.is_file() and not force:
        if not sys.stdin.isatty():
            raise InvalidValueError(f"{file} is there already", "give --force to write over it, or another name")
        typer.confirm(f"{file} is there already. Write over it?", abort=True)
    requests = drawn(family, seed, references)
    write_trace(file, requests)
    typer.echo(f"{len(requests):,} requests in {file}")
