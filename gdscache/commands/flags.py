"""A `typer.Typer` whose help shows a flag by its name alone: `--json <bool>` reads as if the flag took a value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import typer.core

_Function = TypeVar("_Function", bound=Callable[..., Any])


class App(typer.Typer):
    """A `typer.Typer` of commands whose flags are shown without a type. Help is what it shows without arguments."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(cls=_Group, no_args_is_help=True, **settings)

    def command(self, name: str | None = None, **settings: Any) -> Callable[[_Function], _Function]:
        return super().command(name, cls=_Command, **settings)


class _Group(typer.core.TyperGroup):
    def get_params(self, ctx: Any) -> list[Any]:
        return _untyped(super().get_params(ctx))


class _Command(typer.core.TyperCommand):
    def get_params(self, ctx: Any) -> list[Any]:
        return _untyped(super().get_params(ctx))


def _untyped(parameters: list[Any]) -> list[Any]:
    for parameter in parameters:
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
    return parameters
