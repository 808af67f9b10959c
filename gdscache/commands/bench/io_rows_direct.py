"""Comparisons of `gdscache bench io` for the direct route: cuFile by the library, against a loop of the same calls."""

from __future__ import annotations

import tempfile
from pathlib import Path

from gdscache.commands.bench import io_cache
from gdscache.commands.bench.io_engine import ColdEngine
from gdscache.commands.bench.io_rows import Place, Row, extents, row
from gdscache.commands.bench.io_ways import OpenWay
from gdscache.commands.bench.measure import interleave
from gdscache.commands.bench.neighbours import LABELS, beside
from gdscache.sizes import MIB
from gdscache.storage.base import Op

TARGET, BESIDE_TARGET = 0.95, 0.55
_SSD = {"transport": "cufile", "gds": "auto", "route": "direct"}
_PAGE = 1 * MIB


def direct_reads(place: Place) -> list[Row]:
    """SSD → GPU by cuFile with calls of 1 MiB: extents that Python submits, and an engine's cold loads, which it does
    not; against a loop in C++ of the same calls with as many threads, and beside a thread that runs Python."""
    rows = []
    with OpenWay("cufile", place.file, place.threads, place.nbytes, place.device) as way:
        label = "direct GPU reads of 1 MiB extents"
        ways = {"ours": extents(place, way), "loop": lambda: way.run_bare(Op.READ, _PAGE, place.threads)}
        found = interleave(ways, place.repeat, place.progress, label)
        state = io_cache.state([place.file], direct=way.transport.direct)
        figures = found["ours"], f"bare cuFile loop, {place.threads} threads, 1 MiB", found["loop"]
        rows.append(row(place, label, _PAGE, figures, TARGET, transport=way.transport.name, cache=state))
    with (
        tempfile.TemporaryDirectory(dir=place.directory) as name,
        ColdEngine(Path(name), _PAGE, place.nbytes, place.threads, place.device, _SSD) as engine,
        OpenWay("cufile", engine.slab, place.threads, engine.nbytes, place.device) as way,
    ):
        label = "SSD → GPU direct, cold, 1 MiB pages"
        loops = {"ours": engine.load, "loop": lambda: way.run_bare(Op.READ, _PAGE, place.threads)}
        loops["beside"] = beside("busy", engine.load)
        found = interleave(loops, place.repeat, place.progress, label)
        engine.blank()
        engine.load()
        engine.check()
        state = io_cache.state([engine.slab], direct=engine.direct)
        figures = found["ours"], f"bare cuFile loop, {place.threads} threads, 1 MiB", found["loop"]
        more = {"nbytes": engine.nbytes, "transport": engine.transport["name"], "cache": state}
        rows.append(row(place, label, _PAGE, figures, TARGET, **more))
        figures = found["beside"], "alone", found["ours"]
        rows.append(row(place, f"{label}, beside {LABELS['busy']}", _PAGE, figures, BESIDE_TARGET, **more))
    return rows
