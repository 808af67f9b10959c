"""The command `gdscache make-trace`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from gdscache.commands.console import check_writable
from gdscache.errors import InvalidValueError


def make_trace(
    kind: Annotated[str, typer.Argument(help="agents, chat, rag, batch, drift or tenants.")],
    file: Annotated[Path, typer.Argument(help="The trace to write; packed when its name ends with .gz.")],
    seed: Annotated[int, typer.Option(help="Another seed, other traffic of the kind.")] = 0,
    seconds: Annotated[float, typer.Option(help="How long the traffic lasts.")] = 3600.0,
    force: Annotated[
        bool, typer.Option("--force", help="Write over a file that is there, without a question.")
    ] = False,
) -> None:
    """Write made-up traffic of a kind as a trace, for `gdscache replay` and for others that read Mooncake's format."""
    from gdscache.commands.replay.synthetic import generate, write_trace

    check_writable(file, "FILE")
    if file.is_file() and not force:
        if not sys.stdin.isatty():
            raise InvalidValueError(f"{file} is there already", "give --force to write over it, or another name")
        typer.confirm(f"{file} is there already. Write over it?", abort=True)
    requests = generate(kind, seed, seconds)
    write_trace(file, requests)
    typer.echo(f"{len(requests):,} requests of {seconds:g} s in {file}")
