"""What came of the requests of `examples/engine.py`: rows, a table, and whether the tokens are the same."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

import rich.box
from rich.table import Table

NO_CACHE = "no cache"
WHERE = {"cold": "nowhere", "pool": "own pool", "cpu": "CPU tier", "ssd": "SSD tier"}
NEAR_TIE = 0.05  # in 16 bits, logits nearer to each other than this may change places from one batch to another


@dataclasses.dataclass(frozen=True)
class Answer:
    """What is kept of a request."""

    phase: str
    source: str  # where most of its cached tokens came from
    reused: int
    ttft: float  # seconds from submission to the first token
    tokens: list[int]
    margins: list[float]


def rows_of(answers: Sequence[Answer], seconds: dict[str, float]) -> list[dict[str, Any]]:
    """A row for each phase and source."""
    groups: dict[tuple[str, str], list[Answer]] = {}
    for answer in answers:
        groups.setdefault((answer.phase, answer.source), []).append(answer)
    base = statistics.median(answer.ttft for answer in answers if answer.phase == NO_CACHE)
    return [
        {
            "phase": phase,
            "source": source,
            "requests": len(members),
            "tokens_reused": sum(member.reused for member in members),
            "ttft_seconds": (ttft := statistics.median(member.ttft for member in members)),
            "speed_up": base / ttft,
            "phase_tokens_per_second": sum(len(a.tokens) for a in answers if a.phase == phase) / seconds[phase],
        }
        for (phase, source), members in groups.items()
    ]


def differences(answers: Sequence[Answer], near_tie: float) -> list[dict[str, Any]]:
    """Where a request's tokens first differ from those without a cache; the later ones follow from that."""
    expected = [answer for answer in answers if answer.phase == NO_CACHE]
    found = []
    for at, answer in enumerate(answers):
        number = at % len(expected)
        plain = expected[number]
        where = next(
            (i for i, pair in enumerate(zip(plain.tokens, answer.tokens, strict=True)) if pair[0] != pair[1]), None
        )
        if where is not None:
            margin = plain.margins[where]
            found.append(
                {"phase": answer.phase, "request": number, "token": where, "margin": margin, "tie": margin <= near_tie}
            )
    return found


def table_of(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(box=rich.box.SIMPLE)
    for column in ("", "from", "requests", "reused", "TTFT", "speed-up", "tokens/s"):
        table.add_column(column, justify="left" if column in ("", "from") else "right", no_wrap=True)
    last = ""
    for row in rows:
        fresh = row["phase"] != last
        last = row["phase"]
        table.add_row(
            last if fresh else "",
            WHERE.get(row["source"], row["source"]),
            str(row["requests"]),
            f"{row['tokens_reused']:,}",
            f"{row['ttft_seconds'] * 1e3:,.0f} ms",
            f"{row['speed_up']:.1f} x",
            f"{row['phase_tokens_per_second']:,.1f}" if fresh else "",
        )
    return table


def verdict_of(different: Sequence[dict[str, Any]]) -> str:
    if not different:
        return "yes"
    if all(entry["tie"] for entry in different):
        return f"yes, but for {len(different)} near ties that 16 bits decide by the size of the batch"
    return "no"
