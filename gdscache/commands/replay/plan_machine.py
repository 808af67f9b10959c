"""Rates of a machine from the reports of `gdscache bench io` and `gdscache bench copy`."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gdscache.errors import GdsCacheError

GB = 1e9
_IO, _COPY = "gdscache.bench.io/", "gdscache.bench.copy/"


class BenchReportError(GdsCacheError):
    """A file that is no report of a bench, or lacks the rates."""


def bench_rates(paths: Sequence[Path]) -> dict[str, float]:
    """Bytes a second that the reports have: `ssd_read`, `ssd_write` (the best plain loop of `bench io`), `link` (the
    median of the loads of `bench copy`). A later file wins. Raises `BenchReportError`.
    """
    rates: dict[str, float] = {}
    for path in paths:
        try:
            report = json.loads(path.read_bytes())
            schema = str(report["schema"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise BenchReportError(f"{path}: no report of a bench: {error!r}", "give the JSON of one") from None
        try:
            if schema.startswith(_IO):
                rates |= {f"ssd_{op}": GB * _rate(report["ceilings"][op]) for op in ("read", "write")}
            elif schema.startswith(_COPY):
                loads = [row for row in report["copies"] if row["direction"] == "load" and row["path"] == "auto"]
                rates["link"] = GB * statistics.median(_rate(row) for row in loads)
            else:
                raise BenchReportError(
                    f"{path}: {schema} has no rates for a plan", "give a report of `gdscache bench io` or `bench copy`"
                )
        except (KeyError, TypeError, ValueError, statistics.StatisticsError) as error:
            raise BenchReportError(
                f"{path}: {schema} lacks {error}",
                "run the bench to its end, or give --ssd-read-gbps, --ssd-write-gbps and --link-gbps",
            ) from None
    return rates


def _rate(row: Any) -> float:
    rate = float(row["gb_per_second"]["median"])
    if not rate > 0:
        raise ValueError(f"a rate: {rate:g} GB/s")
    return rate
