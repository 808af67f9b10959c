"""The command `gdscache make-trace`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gdscache.errors import InvalidValueError


def make_trace(
    kind: Annotated[str, typer.Argument(help="agents, chat, rag, batch, drift or tenants.")],
    file: Annotated[Path, typer.Argument(help="The trace to write; packed when its name ends with .gz.")],
    seed: Annotated[int, typer.Option(help="Another seed, other traffic of the kind.")] = 0,
    seconds: Annotated[float, typer.Option(help="How long the traffic lasts.")] = 3600.0,
) -> None:
    """Write made-up traffic of a kind as a trace, for `gdscache replay` and for others that read Mooncake's format."""
    from gdscache.commands.replay.synthetic import generate, write_trace

    if file.is_dir() or not file.absolute().parent.is_dir():
        raise InvalidValueError(f"{file} cannot be written", "name a file in a directory that exists")
    requests = generate(kind, seed, seconds)
    write_trace(file, requests)
    typer.echo(f"{len(requests):,} requests of {seconds:g} s in {file}")
