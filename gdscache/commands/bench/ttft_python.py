"""The time to first token of hits beside threads of Python. For `gdscache bench ttft`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gdscache.commands.bench.measure import Series
from gdscache.commands.bench.neighbours import LABELS, beside
from gdscache.commands.bench.ttft_answers import series_of
from gdscache.commands.bench.ttft_cells import Cell

if TYPE_CHECKING:
    from gdscache.commands.bench.ttft_client import EngineClient

CACHED = 90  # percent
PLACES = ("cpu", "ssd_via_cpu")


def chosen(cells: Sequence[Cell]) -> list[Cell]:
    """The cells of a group that are measured beside such threads, too."""
    return [c for c in cells if c.cached == CACHED and c.where in PLACES and c.overlap and not c.gate]


def measure(
    client: EngineClient, cells: Sequence[Cell], transfers: Sequence[float | None], repeat: int
) -> list[dict[str, Any]]:
    """Each of `cells` and the prefix resident, in turns beside each kind of thread: rows of plain data.

    `transfers`: the seconds that their bytes take at least. The ideal is the greater of that and of what the forward
    pass takes with the prefix resident beside the same thread, whose launches wait for the lock as well.
    """
    rows = []
    for kind in LABELS:
        resident: list[float] = []
        hits: list[list[float]] = [[] for _ in cells]
        for number in range(repeat + 1):  # the first round warms up
            asked = [(resident, functools.partial(client.resident, cells[0]))]
            asked += [(some, functools.partial(client.hit, cell)) for some, cell in zip(hits, cells, strict=True)]
            for found, ask in asked if number % 2 else reversed(asked):
                answer = beside(kind, ask)()
                if number:
                    found.append(answer.ttft)
        for cell, some, transfer in zip(cells, hits, transfers, strict=True):
            mine, plain = Series(tuple(some)), Series(tuple(resident))
            ideal = None if transfer is None else max(plain.median, transfer)
            rows.append(
                {
                    **cell.describe(),
                    "beside": LABELS[kind],
                    "ttft_seconds": series_of(mine),
                    "resident_seconds": series_of(plain),
                    "transfer_seconds": transfer,
                    "ideal_ratio": None if ideal is None else ideal / mine.median,
                }
            )
    return rows
