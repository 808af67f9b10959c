"""How bytes go between host memory and the GPU: page-locking, the copy engine, the calibration, the paths."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator

import torch

from gdscache.commands.doctor.facts import Asked, Facts, Kept
from gdscache.commands.doctor.report import Row, Verdict, answer, attempt
from gdscache.cuda.driver import Driver
from gdscache.cuda.host_memory import HostBuffer
from gdscache.kernels.copy_engine import CopyEngine
from gdscache.kernels.cuda import SHORTEST, can_look
from gdscache.movers import calibration as calibrate
from gdscache.movers import choice as paths
from gdscache.movers.choice import Calibration, Direction, Paths
from gdscache.pages.layout import PageLayout
from gdscache.sizes import about

PINNED_BYTES = 64 << 20

DIRECTIONS: tuple[Direction, ...] = ("load", "store")


def pin_seconds() -> float:
    """Page-lock some memory and see how long it takes. Raises `PinnedMemoryError` with the cause where it cannot be."""
    began = time.perf_counter()
    with HostBuffer(PINNED_BYTES, "on"):  # "auto" would go on without, and leave the cause to the log
        return time.perf_counter() - began


def find_calibration(gpu: torch.device, *, recalibrate: bool) -> Kept:
    """The calibration of a GPU. Raises `KernelUnavailableError` and others where it has to be made and cannot be."""
    driver = Driver(gpu)
    engine = CopyEngine(driver)
    key = calibrate.calibration_key(driver, engine)
    found = None if recalibrate else paths.read(key)
    cached = found is not None
    if found is None:
        found = calibrate.calibrated(driver, engine, fresh=True)
    place = attempt(lambda: str(paths.cache_file(key)))
    return Kept(found, place.value or place.cause, cached, paths.read(key) == found)


def copy_rows(facts: Facts, asked: Asked) -> Iterator[Row]:
    """Page-locking, `cpu.pin`; the copy engine; the calibration; the ways of loads and stores."""
    lack: Verdict = "warn" if facts.has_gpu else "info"
    shown = f"{about(PINNED_BYTES)} in {{:.3f}} s".format
    yield from answer("page-locking", facts.pinned, lack, show=shown)
    if asked.config.cpu is not None:
        yield _pin_row(asked.config.cpu.pin, facts)
    for row in answer("copy engine", facts.api, lack):
        hint = "a driver for CUDA 12.8 or newer takes batches: one call a piece is slow for small pieces"
        yield row if row.data != "single" else dataclasses.replace(row, verdict="warn", next_step=hint)
    if facts.calibration is not None and facts.calibration.value is not None:
        yield from _calibration_rows(facts.calibration.value)
    else:
        yield from answer("calibration", facts.calibration, lack)
    if asked.given and facts.mover is not None and facts.mover.value is not None:
        yield from _path_rows(facts, facts.mover.value[0], asked)


def _pin_row(wanted: str, facts: Facts) -> Row:
    works = facts.pinned.value is not None
    pinned = works and wanted != "off"
    verdict: Verdict = "ok" if pinned else "info"
    if wanted == "on" and not works:
        verdict = "fail"
    elif wanted == "auto" and not works and facts.has_gpu:
        verdict = "warn"
    hint = "set cpu.pin to auto or off" if verdict == "fail" else "see page-locking"
    value = f"{wanted}: {'page-locked' if pinned else 'pageable'}"
    return Row("cpu.pin", value, verdict, hint if verdict in ("fail", "warn") else "", {"pinned": pinned})


def _calibration_rows(kept: Kept) -> Iterator[Row]:
    rates = kept.calibration
    data = {"cached": kept.cached, "kept": kept.kept, "seconds": rates.seconds, "file": kept.file, "key": rates.key}
    took = f"{'cached, once measured' if kept.cached else 'measured now'} in {rates.seconds:.2f} s"
    if kept.kept:
        yield Row("calibration", f"{took}: {kept.file}", "ok", data=data)
    else:
        value = f"{took}, and again by every engine: it cannot be kept ({kept.file})"
        yield Row("calibration", value, "warn", "set GDSCACHE_CACHE_DIR to a directory that can be written", data)
    both = {direction: rates.rates(direction) for direction in DIRECTIONS}
    for size in sorted(rates.load.staged):
        yield _speeds(f"staged, pieces of {about(size)}", {d: r.staging(size) for d, r in both.items()}, size)
    for size in sorted(rates.load.copy_engine):
        yield _speeds(f"copy engine, pieces of {about(size)}", {d: r.engine(size) for d, r in both.items()}, size)
    yield _speeds("zero-copy kernel", {d: r.zero_copy for d, r in both.items()})
    borders = {direction: _automatic(rates).crossover(direction) for direction in DIRECTIONS}
    texts = [f"{d}: {'never' if size is None else f'from {about(size)} on'}" for d, size in borders.items()]
    yield Row("staged", ", ".join(texts), data=borders)


def _speeds(name: str, speeds: dict[Direction, float], size: int | None = None) -> Row:
    value = ", ".join(f"{direction} {rate:.1f} GB/s" for direction, rate in speeds.items())
    return Row(name, value, data=speeds if size is None else {"bytes": size, **speeds})


def _automatic(calibration: Calibration) -> Paths:
    return Paths("auto", "auto", lambda: calibration)


def _path_rows(facts: Facts, mover: str, asked: Asked) -> Iterator[Row]:
    """The path of this model's pages, with the paths that the configuration names."""
    config = asked.config
    if config.cpu is None and config.ssd is None:
        yield Row("paths", "no tier below the GPU pool: nothing is copied")
        return
    if config.cpu is None:
        yield Row("host_buffer", "pages pass through it, except where the SSD is reached from GPU memory")
    pinned = facts.pinned.value is not None and (config.cpu is None or config.cpu.pin != "off")
    sums: dict[Direction, bool] = {"load": config.load.verify == "always", "store": True}
    kept = facts.calibration.value if facts.calibration else None
    for direction, wanted in sums.items():
        name = f"{direction} path"
        if mover != "cuda":
            yield Row(name, f"none, pages are copied by {mover}")
        elif not pinned:
            yield Row(name, "staged, since host memory is pageable")
        elif kept is None:
            yield Row(name, "unknown, since there is no calibration", "warn", "see calibration")
        else:
            yield from model_paths(config.model.layout(), direction, kept.calibration, sums=wanted)


def model_paths(layout: PageLayout, direction: Direction, calibration: Calibration, *, sums: bool) -> Iterator[Row]:
    """The paths of pages of this layout in a pool of the engine's own: of all layers, a group as loads take them, one.

    `sums`: checksums are wanted.
    """
    bounds, pieces = layout.layer_bounds, layout.pieces
    sums = sums and all(end - start >= SHORTEST for start, end in bounds)
    fused = not can_look(layout)
    smallest = min(range(layout.n_layers), key=lambda layer: bounds[layer][1] - bounds[layer][0])
    parts = {"all layers": range(layout.n_layers), "one layer": range(smallest, smallest + 1)}
    group = layout.layer_groups[0]
    if direction == "load" and 1 < len(group) < layout.n_layers:
        parts[f"{len(group)} layers"] = group
    for label, layers in parts.items():
        span = bounds[layers.stop - 1][1] - bounds[layers.start][0]
        run = min(piece.nbytes for layer in layers for piece in pieces[layer])
        path = _automatic(calibration).choose(direction, span, run, sums=sums, fused=fused)
        aside = "; checksums on the host" if sums and fused and path == "copy_engine" else ""
        value = f"{path} ({about(span)} together in an extent, {about(run)} in the planes{aside})"
        data = {"path": path, "layers": len(layers), "extent_bytes": span, "plane_bytes": run}
        yield Row(f"{direction} path, {label}", value, "ok", data=data)
