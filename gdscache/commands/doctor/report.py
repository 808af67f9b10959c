"""What a check answers: rows with a verdict, in sections; and how they are shown."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Generic, Literal, TypeVar

import torch

from gdscache.commands.console import Table
from gdscache.errors import GdsCacheError

Verdict = Literal["ok", "warn", "fail", "info"]
T = TypeVar("T")

_COLORS: dict[Verdict, str] = {"ok": "green", "warn": "yellow", "fail": "red", "info": ""}
_EXPECTED = (ImportError, OSError, MemoryError, RuntimeError, torch.cuda.DeferredCudaCallError)


@dataclasses.dataclass(frozen=True)
class Found(Generic[T]):
    """A fact; or None, the cause, and what to do about it."""

    value: T | None
    cause: str = ""
    hint: str = ""


def attempt(find: Callable[[], T]) -> Found[T]:
    """What `find` returns, or why it could not: errors of gdscache, imports, the system, and CUDA in torch and cupy."""
    try:
        return Found(find())
    except GdsCacheError as error:
        return Found(None, error.message, error.hint)
    except _EXPECTED as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return Found(None, ": ".join([type(error).__name__, *lines[:1]]))


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One answer. `fail`: the configuration would not get what it asks for; `data` is `value` for programs (JSON)."""

    name: str
    value: str
    verdict: Verdict = "info"
    next_step: str = ""
    data: Any = None


def answer(
    name: str, found: Found[T] | None, lack: Verdict, hint: str = "", show: Callable[[T], str] = str
) -> Iterator[Row]:
    """A row for a fact: `ok`; or `lack` with the cause, and what to do where the lack is a defect. None for what was
    not tried."""
    if found is not None and found.value is not None:
        yield Row(name, show(found.value), "ok", data=found.value)
    elif found is not None:
        yield Row(name, found.cause, lack, (found.hint or hint) if lack != "info" else "")


def comes_to(wanted: str, found: str) -> str:
    """A setting and what it comes to, which is said once where it is the same."""
    return found if wanted == found else f"{wanted}: {found}"


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

    def describe(self) -> dict[str, Any]:
        """Plain data: `{"sections": [{"title", "rows": [{"name", "value", ...}]}], "ok"}`."""
        return {"sections": [dataclasses.asdict(section) for section in self.sections], "ok": not self.failed}


def tables(report: Report) -> Iterator[Table]:
    """A table a section; what to do next stands below the row that it is for."""
    for section in report.sections:
        table = Table(section.title)
        for row in section.rows:
            table.add_row(row.verdict, row.name, row.value, color=_COLORS[row.verdict])
            if row.next_step and row.verdict != "ok":
                table.add_row("", "", f"-> {row.next_step}")
        yield table
