"""Comparisons of `gdscache bench io` with the bare loop, in bytes and in CPU seconds, and beside Python threads."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from gdscache.commands.bench.bare import BareLoop, Way, best
from gdscache.commands.bench.io_engine import ColdEngine
from gdscache.commands.bench.io_rows import Metered, Place, Row, cpu_figures, facts, opened, row
from gdscache.commands.bench.measure import Series, interleave
from gdscache.commands.bench.neighbours import BESIDE_TARGETS, LABELS, Neighbour, beside
from gdscache.sizes import MIB, format_size
from gdscache.storage.base import Op

TARGETS = {4 * MIB: (0.85, 0.92), 1 * MIB: (0.78, 0.88)}  # of stores and cold loads with planes on the host
CPU_TARGET, GPU_TARGET = 1.25, 0.93  # GPU_TARGET: of cold loads into planes on a GPU
PROGRESS_TARGET = 0.93
WAIT_TARGET, CALL_TARGET = 2.0, 1.5
_CALLED_PAGE = 1 * MIB
_WORD = {"store": "store", "load": "cold load", "cpu": "CPU tier load", "copy": "plain copy"}


def stores_and_loads(place: Place, page_bytes: int) -> list[Row]:
    """Stores until they are on the SSD, and cold loads, against the bare loop on the same slab. Both, and their CPU
    seconds, also against a loop that copies and sums the same bytes."""
    pages = f"{format_size(page_bytes)} pages"
    with opened(place, page_bytes) as engine:
        planes = np.ones(engine.nbytes, np.uint8)
        rows = []
        with BareLoop(engine.slab, engine.nbytes) as bare:
            for (what, ours), op, limit in zip(_ways(engine).items(), Op, TARGETS[page_bytes][::-1], strict=False):
                rows += _against_bare(place, engine, bare, planes, (f"{_WORD[what]}, {pages}", ours, op, limit))
    return rows


def _against_bare(
    place: Place,
    engine: ColdEngine,
    bare: BareLoop,
    planes: np.ndarray[Any, np.dtype[np.uint8]],
    what: tuple[str, Callable[[], float], Op, float],
) -> list[Row]:
    label, action, op, limit = what
    chosen = bare.scout(op, place.progress)
    layer = engine.layer_bytes
    whole = Way(max(2, chosen[0].threads), max(way.io_bytes for way in chosen))
    metered = {
        "ours": Metered(action, engine.nbytes, engine.prepare if op is Op.READ else engine.forget_all),
        "loop": Metered(lambda: bare.run(op, whole, planes, layer), engine.nbytes),
    }
    found = interleave({**metered, **bare.runs(op, chosen)}, place.repeat, place.progress, label)
    way = best(chosen, found)
    host = place.device.type == "cpu" and place.on_disk
    on_gpu = GPU_TARGET if op is Op.READ and place.on_disk and not host else None
    more = facts(engine, direct=bare.direct)
    figures = found["ours"], f"bare loop, {way.label}", found[way.label]
    copied = f"bare loop that copies and sums, {whole.label}"
    spent = cpu_figures(metered, "bare loop, one copy and the sums")
    return [
        row(place, label, engine.page_bytes, figures, limit if host else on_gpu, **more),
        row(place, label, engine.page_bytes, (found["ours"], copied, found["loop"]), None, **more),
        row(place, f"CPU, {label}", engine.page_bytes, spent, CPU_TARGET if host else None, unit="CPU s/GiB", **more),
    ]


def beside_python(place: Place, page_bytes: int) -> list[Row]:
    """Stores, cold loads and loads from the CPU tier beside Python threads, against the same alone. A plain copy beside
    them shows such a thread's cost to code that needs no lock. Also the busy thread's progress."""
    rows: list[Row] = []
    with opened(place, page_bytes) as engine:
        ways = {**_ways(engine), "cpu": engine.load_from_cpu, "copy": engine.copy}
        more = facts(engine)
        for what, action in ways.items():
            label = f"{_WORD[what]}, {format_size(page_bytes)} pages"
            runs: dict[str, Callable[[], float]] = {"alone": action}
            runs.update((kind, beside(kind, action)) for kind in LABELS)
            if what == "cpu":
                engine.load()
            found = interleave(runs, place.repeat, place.progress, label)
            for kind, limit in BESIDE_TARGETS.items():
                figures = found[kind], "alone", found["alone"]
                host = limit if what != "copy" and place.device.type == "cpu" else None
                rows.append(row(place, f"{label}, beside {LABELS[kind]}", page_bytes, figures, host, **more))
        rows += _progress(place, engine, more)
    return rows


def _progress(place: Place, engine: ColdEngine, more: dict[str, Any]) -> list[Row]:
    """The busy thread's rounds beside cold loads, against its rounds alone."""

    def counted(action: Callable[[], object]) -> Callable[[], float]:
        def run() -> float:
            with Neighbour("busy") as neighbour:
                action()
            return neighbour.progress

        return run

    runs = {"beside": counted(engine.load), "alone": counted(lambda: time.sleep(0.3))}
    found = interleave(runs, place.repeat, place.progress, "progress of the busy thread")
    what = f"{LABELS['busy']}, beside cold loads of {format_size(engine.page_bytes)} pages"
    figures = found["beside"], "alone", found["alone"]
    return [row(place, what, engine.page_bytes, figures, PROGRESS_TARGET, unit="rounds/s", **more)]


def calls_beside_python(place: Place) -> list[Row]:
    """Microseconds of calls beside the busy thread against calls alone: medians and 99th percentiles."""
    alone: list[dict[str, list[float]]] = []
    busy: list[dict[str, list[float]]] = []
    with opened(place, _CALLED_PAGE) as engine:
        more = facts(engine) | {"calls": place.calls}
        engine.load()
        for number in range(place.repeat):
            place.progress(number, place.repeat, "calls")
            alone.append(engine.timed_calls(place.calls))
            with Neighbour("busy"):
                busy.append(engine.timed_calls(place.calls))
    return _call_rows(place, alone, busy, more)


def _call_rows(
    place: Place, alone: list[dict[str, list[float]]], busy: list[dict[str, list[float]]], more: dict[str, Any]
) -> list[Row]:
    rows = []
    slack = 1.5 * sys.getswitchinterval() * 1e6
    for name in alone[0]:
        for percent in (50, 99):
            ours, other = (
                Series(tuple(float(np.percentile(run[name], percent)) * 1e6 for run in runs)) for runs in (busy, alone)
            )
            limit = WAIT_TARGET if name == "wait" else CALL_TARGET if percent == 50 else 1.0
            against = "alone"
            if name != "wait" and percent == 99:
                other, against = Series(tuple(v + slack for v in other.values)), "alone, and 1.5 switch intervals"
            what = f"{name}(), p{percent}, beside {LABELS['busy']}"
            rows.append(row(place, what, _CALLED_PAGE, (ours, against, other), limit, unit="us", **more))
    return rows


def _ways(engine: ColdEngine) -> dict[str, Callable[[], float]]:
    """In the order of `Op`: reads, then writes."""
    return {"load": engine.load, "store": engine.store}
