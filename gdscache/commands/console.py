"""The commands' output: tables, figures, a progress bar, sizes, help.

    table = Table("Copies", "page", "way", "GB/s")  # without columns: pairs of a name and a text
    table.add_row("2MiB", "load", figure(31.42))
    show(table, "a line below")

A table is as wide as its cells if the output has room, as a pipe has. On a narrower terminal the widest columns wrap at
words. If the words do not fit side by side, each row becomes a block of lines, one a column. All cells are shown, and a
number stays in one piece with its unit.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import math
import os
import re
import signal
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import typer
import typer.core

from gdscache.arguments import shown
from gdscache.errors import InvalidValueError, printable
from gdscache.sizes import parse_size, significant

Progress = Callable[[int, int, str], None]
"""Called as `progress(done, total, text)` during long work."""

_Function = TypeVar("_Function", bound=Callable[..., Any])

_GAP = "  "
_LONG_WORD = 24  # a longer word, such as a path or a digest, may wrap
_HARD_SPACE = "\N{NO-BREAK SPACE}"
_TOGETHER = re.compile(r"(?<![\w.])[-+~]?[0-9][0-9.,]* [A-Za-z%µ/][\w/%]*|\([^()]{1,20}\)")
_NUMBER = re.compile(r"[-+~<]?[0-9][0-9.,]*( ?[A-Za-z%µ/]+)?( \([^()]*\))?")


def silent(done: int, total: int, text: str) -> None:
    """A progress callback that shows nothing."""


class Table:
    """Rows of texts below a title and column names. Columns of numbers are right-aligned."""

    def __init__(self, title: str = "", *columns: str, caption: str = "") -> None:
        self.title, self.columns, self.caption = title, columns, caption
        self.rows: list[tuple[str, ...]] = []
        self._colors: list[str] = []

    def add_row(self, *cells: str, color: str = "") -> None:
        """A row, which may end before the last column. `color`: of its first cell on a terminal."""
        self.rows.append(tuple(map(printable, cells)))
        self._colors.append(color)

    def lines(self, width: int | None = None) -> list[str]:
        """The table as lines of at most `width` characters. None: full width, without colors. A table without rows has
        no lines."""
        if not self.rows:
            return []
        count = max(map(len, [self.columns, *self.rows]))
        grid = [[_together(cell) for cell in [*row, *[""] * (count - len(row))]] for row in [self.columns, *self.rows]]
        widths = _widths(list(zip(*grid, strict=True)), math.inf if width is None else width - len(_GAP) * (count - 1))
        rows = list(zip(grid[1:], [""] * len(self._colors) if width is None else self._colors, strict=True))
        if widths is None:
            body = [line for row, color in rows for line in _block(row, grid[0], color, width)]
        else:
            columns = zip(*grid[1:], strict=True)
            right = [all(_NUMBER.fullmatch(cell.replace(_HARD_SPACE, " ")) for cell in c if cell) for c in columns]
            head = _beside(grid[0], widths, right, "", low=True) if self.columns else []
            body = head + [line for row, color in rows for line in _beside(row, widths, right, color)]
        around = [_wrap(text, width) for text in (self.title, self.caption)]
        return [line.replace(_HARD_SPACE, " ").rstrip() for line in around[0] + body + around[1]]


def show(*parts: Table | str) -> None:
    """Print tables and texts, separated by empty lines, as wide as the terminal; into a pipe, whole lines."""
    width = None
    if sys.stdout.isatty():
        width = max(_LONG_WORD, os.get_terminal_size(sys.stdout.fileno()).columns or 80)
    texts = [p.lines(width) if isinstance(p, Table) else _wrap(printable(p, lines=True), width) for p in parts]
    text = "\n\n".join("\n".join(lines) for lines in texts if lines)
    print(text)  # `typer.echo` would write UTF-8 in every encoding


def say(found: object, parts: Iterable[Table | str], *, as_json: bool) -> None:
    """Print a command's answer: `found`, which is plain data, as JSON, or the parts of it for people."""
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        show(*parts)


def reason_of(error: BaseException) -> str:
    """The words of an error that a message about a file ends with; of the system's errors without number and file."""
    return str(getattr(error, "strerror", None) or error)


def version_of(distribution: str) -> str:
    """The version of an installed distribution; empty without it."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def figure(value: float, unit: str = "") -> str:
    """A number with three significant digits, and its unit: `31.4 GB/s`."""
    return f"{significant(value)} {unit}".rstrip()


def duration(seconds: float) -> str:
    """A time with three significant digits, in a unit that suits it: `1.25 ms`."""
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if not seconds or abs(seconds) * scale >= 0.9995:
            return figure(seconds * scale, unit)
    return figure(seconds * 1e9, "ns")


def percent(share: float) -> str:
    """A share of 1 with three significant digits: `12.5 %`."""
    return figure(100 * share, "%")


def verdict(part: Mapping[str, Any], relation: str, show_limit: Callable[[Any], str] = "{:g}".format) -> str:
    """Whether a figure has `met` its `target`: `met: at least 0.95`."""
    return f"{'met' if part['met'] else 'MISSED'}: {relation} {show_limit(part['target'])}"


@contextlib.contextmanager
def progress_bar(*, lines: bool = False) -> Iterator[Progress]:
    """A bar on standard error that follows a `Progress`. Without a terminal nothing is drawn; with `lines`, each new
    text is a line."""
    from rich.console import Console
    from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    if not console.is_terminal:
        yield _lines(time.monotonic()) if lines else silent
        return
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda done, total, text: bar.update(task, completed=done, total=total, description=text)


def _lines(begun: float) -> Progress:
    last = ""

    def progress(done: int, total: int, text: str) -> None:
        nonlocal last
        if text != last:
            print(f"{time.monotonic() - begun:.0f} s, {done} of {total}: {text}", file=sys.stderr, flush=True)
        last = text

    return progress


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """End the command on SIGTERM and SIGHUP as on an error, so that its files and processes go too. Further signals
    leave that alone, and `nohup` holds."""
    some = (signal.SIGTERM, signal.SIGHUP)

    def end(number: int, _: object) -> None:
        for one in some:
            signal.signal(one, signal.SIG_IGN)
        sys.exit(128 + number)

    before = {one: signal.signal(one, end) for one in some if signal.getsignal(one) is not signal.SIG_IGN}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


def size_of(text: str, option: str) -> int:
    """The bytes of an option's size. Raises `InvalidValueError`."""
    try:
        return parse_size(text)
    except ValueError as error:
        raise InvalidValueError(f"{option} is {shown(text)}: {error}", f"write {option} 64GiB") from None


def size_option(name: str, text: str, **settings: Any) -> Any:
    """An option whose value is the bytes of a size."""
    return typer.Option(name, help=text, metavar="SIZE", parser=lambda value: size_of(value, name), **settings)


def _together(text: str) -> str:
    """A text whose lines do not break between a number and its unit, or in short parentheses."""
    return _TOGETHER.sub(lambda found: found[0].replace(" ", _HARD_SPACE), text)


def _widths(columns: Sequence[Sequence[str]], room: float) -> list[int] | None:
    """A width for each column, `room` together; None if the columns' words do not fit."""
    widths = [max(map(len, column)) for column in columns]
    least = [
        max((min(len(word), _LONG_WORD) for cell in column for word in cell.split(" ")), default=0)
        for column in columns
    ]
    if sum(least) > room:
        return None
    while sum(widths) > room:
        widest = max((i for i, width in enumerate(widths) if width > least[i]), key=lambda i: widths[i])
        widths[widest] -= 1
    return widths


def _wrap(text: str, width: int | None) -> list[str]:
    if not text or width is None:
        return [text] if text else []
    return textwrap.wrap(text, width, break_on_hyphens=False)


def _beside(
    row: Sequence[str], widths: Sequence[int], right: Sequence[bool], color: str, low: bool = False
) -> list[str]:
    """A row's lines, its cells side by side. `low`: short cells are bottom-aligned."""
    cells = [_wrap(cell, width) for cell, width in zip(row, widths, strict=True)]
    blank = [[""] * (max(map(len, cells)) - len(cell)) for cell in cells]
    columns = [above + cell if low else cell + above for above, cell in zip(blank, cells, strict=True)]
    lines = []
    for texts in zip(*columns, strict=True):
        padded = (t.rjust(w) if to_right else t.ljust(w) for t, w, to_right in zip(texts, widths, right, strict=True))
        first, *others = padded
        lines.append(_GAP.join([_painted(first, color), *others]))
    return lines


def _block(row: Sequence[str], names: Sequence[str], color: str, width: int | None) -> list[str]:
    """A row's lines, its cells below one another."""
    lines = [_painted(line, color) for line in _wrap(row[0], width)]
    for name, cell in zip(names[1:], row[1:], strict=True):
        text = _wrap(f"{name}: {cell}" if name else cell, None if width is None else width - len(_GAP))
        lines += [f"{_GAP}{line}" for line in text if cell]
    return lines


def _painted(text: str, color: str) -> str:
    return typer.style(text, fg=color) if color else text


class App(typer.Typer):
    """A `typer.Typer` whose help shows a flag by its name alone, and a docstring's paragraphs as wide as the terminal.
    Typer's own `--json <bool>` looks like a flag with a value. Without arguments it shows the help."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(cls=_Group, no_args_is_help=True, **settings)

    def command(self, name: str | None = None, **settings: Any) -> Callable[[_Function], _Function]:
        return super().command(name, cls=_Command, **settings)


class _PlainHelp:
    help: str | None

    def __init__(self, *given: Any, **settings: Any) -> None:
        super().__init__(*given, **settings)
        if self.help is not None:  # typer would keep a docstring's line breaks, in the middle of sentences
            self.help = "\n\n".join(" ".join(part.split()) for part in self.help.split("\n\n"))

    def get_params(self, ctx: Any) -> list[Any]:
        parameters: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for parameter in parameters:
            if getattr(parameter, "is_flag", False):
                parameter.metavar = ""
        return parameters


class _Group(_PlainHelp, typer.core.TyperGroup): ...


class _Command(_PlainHelp, typer.core.TyperCommand): ...
