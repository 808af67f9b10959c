"""Packed pages against the same pages as they are, for `gdscache bench io`: loads out of memory and of a RAM disk."""

from __future__ import annotations

from collections.abc import Callable

from gdscache.commands.bench.io_rows import Place, Row, cold, facts, opened, row
from gdscache.commands.bench.measure import interleave
from gdscache.sizes import MIB, format_size

PAGE = 8 * MIB  # of 64 tokens, as they lie in the planes
COPY_TARGET = 1.18  # of lookup and load, against a page-locked copy of as many logical bytes
TARGETS = {"memory": 1.25, "staying": 1.20, "passing": 1.20}
_LABELS = {
    "memory": "CPU tier → GPU",
    "staying": "RAM disk → GPU via CPU",
    "passing": "RAM disk → GPU past the CPU tier",
}


def packed_loads(place: Place, page_bytes: int) -> list[Row]:
    """Loads of packed pages against loads of unpacked ones, and against one page-locked copy. Bytes are logical."""
    with opened(place, page_bytes) as plain, opened(place, page_bytes, pack=True) as packed:
        ways: dict[str, Callable[[], float]] = {"copy": plain.copy}
        for kind, engine in {"unpacked": plain, "packed": packed}.items():
            ways |= {
                f"staying {kind}": cold(engine, engine.load),
                f"memory {kind}": engine.load_from_cpu,
                f"passing {kind}": cold(engine, engine.load_passing),
            }
        for measure in ways.values():
            measure()
        packed.blank()
        packed.load()
        packed.check()
        found = interleave(ways, place.repeat, place.progress, "packed pages")
        rows = []
        for kind, limit in TARGETS.items():
            what, ours = f"{_LABELS[kind]}, packed {format_size(page_bytes)} pages", found[f"{kind} packed"]
            against = {"unpacked": limit, "copy": COPY_TARGET if kind == "memory" else None}
            for name, least in against.items():
                other = ("a page-locked copy", found["copy"]) if name == "copy" else (name, found[f"{kind} {name}"])
                rows.append(row(place, what, page_bytes, (ours, *other), least, **facts(packed)))
    return rows
