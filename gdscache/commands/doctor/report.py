"""What a check answers: rows with a verdict, in sections; and how they are shown."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Literal

from rich.table import Table
from rich.text import Text

from gdscache.commands.doctor.facts import Found, T

Verdict = Literal["ok", "warn", "fail", "info"]

_STYLES: dict[Verdict, str] = {"ok": "green", "warn": "yellow", "fail": "bold red", "info": "dim"}


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One answer. `fail`: the configuration would not get what it asks for; `data` is `value` for programs (JSON)."""

    name: str
    value: str
    verdict: Verdict = "info"
    next_step: str = ""
    data: Any = None


def answer(name: str, found: Found[T], lack: Verdict, hint: str = "", show: Callable[[T], str] = str) -> Row:
    """A row for a fact: `ok`; or `lack` with the cause, and what to do where the lack is a defect."""
    if found.value is not None:
        return Row(name, show(found.value), "ok", data=found.value)
    return Row(name, found.cause, lack, (found.hint or hint) if lack != "info" else "")


@dataclasses.dataclass(frozen=True, slots=True)
class Section:
    """The rows of one check."""

    title: str
    rows: tuple[Row, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """All sections, in the order in which they are shown."""

    sections: tuple[Section, ...]

    @property
    def failed(self) -> tuple[Row, ...]:
        """The rows whose verdict is `fail`."""
        return tuple(row for section in self.sections for row in section.rows if row.verdict == "fail")

    @property
    def ok(self) -> bool:
        return not self.failed

    def describe(self) -> dict[str, Any]:
        """Plain data: `{"sections": [{"title", "rows": [{"name", "value", ...}]}], "ok"}`."""
        return {"sections": [dataclasses.asdict(section) for section in self.sections], "ok": self.ok}


def tables(report: Report) -> Iterator[Table]:
    """A table a section; what to do next stands below the row that it is for."""
    for section in report.sections:
        table = Table(title=section.title, title_justify="left", box=None, show_header=False, pad_edge=False)
        table.add_column(no_wrap=True)
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for row in section.rows:
            table.add_row(Text(row.verdict, _STYLES[row.verdict]), Text(row.name), Text(row.value))
            if row.next_step and row.verdict != "ok":
                table.add_row("", "", Text(f"-> {row.next_step}"))
        yield table
