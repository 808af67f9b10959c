"""The command `gdscache make-trace`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from gdscache.commands.console import check_writable
from gdscache.errors import InvalidValueError


def make_trace(
    kind: Annotated[str, typer.Argument(help="Kind of traffic: agents, chat, rag, batch, drift or tenants.")],
    file: Annotated[Path, typer.Argument(help="Trace file to write. A name that ends with .gz is compressed.")],
    seed: Annotated[int, typer.Option(help="Seed of the random numbers. Each seed gives other traffic.")] = 0,
    seconds: Annotated[float, typer.Option(help="Length of the traffic, in seconds.")] = 3600.0,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file without asking.")] = False,
) -> None:
    """Write made-up traffic as a trace in Mooncake's format, for `gdscache replay` and other readers of that format."""
    from gdscache.commands.replay.synthetic import generate, write_trace

    check_writable(file, "FILE")
    if file.is_file() and not force:
        if not sys.stdin.isatty():
            raise InvalidValueError(f"{file} is there already", "give --force to write over it, or another name")
        typer.confirm(f"{file} is there already. Write over it?", abort=True)
    requests = generate(kind, seed, seconds)
    write_trace(file, requests)
    typer.echo(f"{len(requests):,} requests of {seconds:g} s in {file}")
