"""Help that shows a flag by its name alone, and a docstring's paragraphs as wide as the terminal.

Typer's own is `--json <bool>`, which reads as if the flag took a value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import typer.core

_Function = TypeVar("_Function", bound=Callable[..., Any])


class App(typer.Typer):
    """A `typer.Typer` with that help, which it shows when it gets no arguments."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(cls=_Group, no_args_is_help=True, **settings)

    def command(self, name: str | None = None, **settings: Any) -> Callable[[_Function], _Function]:
        return super().command(name, cls=_Command, **settings)


class _Group(typer.core.TyperGroup):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.help = _joined(self.help)

    def get_params(self, ctx: Any) -> list[Any]:
        return _untyped(super().get_params(ctx))


class _Command(typer.core.TyperCommand):
    def __init__(self, name: str | None, **settings: Any) -> None:
        super().__init__(name, **settings)
        self.help = _joined(self.help)

    def get_params(self, ctx: Any) -> list[Any]:
        return _untyped(super().get_params(ctx))


def _joined(text: str | None) -> str | None:
    """Each paragraph in one line. Typer would show a docstring's own ends of lines, in the middle of sentences."""
    return None if text is None else "\n\n".join(" ".join(part.split()) for part in text.split("\n\n"))


def _untyped(parameters: list[Any]) -> list[Any]:
    for parameter in parameters:
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
    return parameters
