"""Checks' results: rows with a verdict, in sections, and their tables."""

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
    """A fact's value; or None, with the cause and a hint."""

    value: T | None
    cause: str = ""
    hint: str = ""


def attempt(find: Callable[[], T]) -> Found[T]:
    """The result of `find`, or its error: gdscache's, of imports, of the system, of CUDA in torch and cuda-core."""
    try:
        return Found(find())
    except GdsCacheError as error:
        return Found(None, error.message, error.hint)
    except _EXPECTED as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return Found(None, ": ".join([type(error).__name__, *lines[:1]]))


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """`fail`: a setting of the configuration does not take effect. `data`: `value` for programs (JSON)."""

    name: str
    value: str
    verdict: Verdict = "info"
    next_step: str = ""
    data: Any = None


def answer(
    name: str, found: Found[T] | None, lack: Verdict, hint: str = "", show: Callable[[T], str] = str
) -> Iterator[Row]:
    """A fact's row: `ok`, or `lack` with the cause, and the hint if the lack is a defect. No row for a fact that was
    not tried."""
    if found is not None and found.value is not None:
        yield Row(name, show(found.value), "ok", data=found.value)
    elif found is not None:
        yield Row(name, found.cause, lack, (found.hint or hint) if lack != "info" else "")


def comes_to(wanted: str, found: str) -> str:
    """A setting and its result; one word if they are equal."""
    return found if wanted == found else f"{wanted}: {found}"


@dataclasses.dataclass(frozen=True, slots=True)
class Section:
    title: str
    rows: tuple[Row, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """All sections, in display order."""

    sections: tuple[Section, ...]

    @property
    def failed(self) -> tuple[Row, ...]:
        return tuple(row for section in self.sections for row in section.rows if row.verdict == "fail")

    def describe(self) -> dict[str, Any]:
        """Plain data: `{"sections": [{"title", "rows": [{"name", "value", ...}]}], "ok"}`."""
        return {"sections": [dataclasses.asdict(section) for section in self.sections], "ok": not self.failed}


def tables(report: Report) -> Iterator[Table]:
    """One table a section. A row's next step stands below the row."""
    for section in report.sections:
        table = Table(section.title)
        for row in section.rows:
            table.add_row(row.verdict, row.name, row.value, color=_COLORS[row.verdict])
            if row.next_step and row.verdict != "ok":
                table.add_row("", "", f"-> {row.next_step}")
        yield table
