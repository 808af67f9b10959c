"""How bytes go between host memory and the GPU: page-locking, the copy engine, the calibration, the paths."""

from __future__ import annotations

import dataclasses
import resource
import time
from collections.abc import Iterator

import torch

from gdscache.commands.doctor.facts import Asked, CalibrationFacts, CopyFacts, Facts, Found, attempt
from gdscache.commands.doctor.report import Row, Verdict, answer
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


def find_copies(gpu: torch.device | None, *, kernels: bool, recalibrate: bool) -> CopyFacts:
    """Page-locking; for `gpu` its copy engine and, where there are `kernels`, the calibration: as kept, or made now."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    api: Found[str] = Found(None, "not tried: no GPU")
    calibration: Found[CalibrationFacts] = Found(None, f"not tried: no {'kernels' if gpu else 'GPU'}")
    if gpu is not None:
        api = attempt(lambda: CopyEngine(Driver(gpu)).api)
    if gpu is not None and kernels:
        calibration = attempt(lambda: find_calibration(gpu, recalibrate=recalibrate))
    return CopyFacts(attempt(pin_seconds), None if limit == resource.RLIM_INFINITY else limit, api, calibration)


def pin_seconds() -> float:
    """Page-lock some memory and see how long it takes. Raises `PinnedMemoryError` with the cause where it cannot be."""
    began = time.perf_counter()
    with HostBuffer(PINNED_BYTES, "on"):  # "auto" would go on without, and leave the cause to the log
        return time.perf_counter() - began


def find_calibration(gpu: torch.device, *, recalibrate: bool) -> CalibrationFacts:
    """The calibration of a GPU. Raises `KernelUnavailableError` and others where it has to be made and cannot be."""
    driver = Driver(gpu)
    engine = CopyEngine(driver)
    key = calibrate.calibration_key(driver, engine)
    found = None if recalibrate else paths.read(key)
    cached = found is not None
    if found is None:
        found = calibrate.calibrated(driver, engine, fresh=True)
    place = attempt(lambda: str(paths.cache_file(key)))
    return CalibrationFacts(found, place.value or place.cause, cached, paths.read(key) == found)


def copy_rows(facts: Facts, asked: Asked) -> Iterator[Row]:
    """Page-locking, `cpu.pin`; the copy engine; the calibration; the ways of loads and stores."""
    found = facts.copies
    lack: Verdict = "warn" if facts.has_gpu else "info"
    yield answer("page-locking", found.pinned, lack, show=lambda seconds: f"{about(PINNED_BYTES)} in {seconds:.3f} s")
    limit = "none" if found.locked_limit is None else f"{about(found.locked_limit)} (ulimit -l)"
    yield Row("locked-memory limit", limit, data=found.locked_limit)
    yield from _pin_row(facts, asked)
    engine = answer("copy engine", found.api, lack)
    if found.api.value == "single":
        hint = "a driver for CUDA 12.8 or newer takes batches: one call a piece is slow for small pieces"
        engine = dataclasses.replace(engine, verdict="warn", next_step=hint)
    yield engine
    yield from _calibration_rows(found.calibration, lack)
    if asked.given:
        yield from _path_rows(facts, asked)


def _pin_row(facts: Facts, asked: Asked) -> Iterator[Row]:
    if asked.config.cpu is None:
        return
    wanted, works = asked.config.cpu.pin, facts.copies.pinned.value is not None
    pinned = works and wanted != "off"
    verdict: Verdict = "ok" if pinned else "info"
    if wanted == "on" and not works:
        verdict = "fail"
    elif wanted == "auto" and not works and facts.has_gpu:
        verdict = "warn"
    value = f"{wanted}: {'page-locked' if pinned else 'pageable'}"
    yield Row("cpu.pin", value, verdict, "set cpu.pin to auto or off" if verdict == "fail" else "", {"pinned": pinned})


def _calibration_rows(found: Found[CalibrationFacts], lack: Verdict) -> Iterator[Row]:
    facts = found.value
    if facts is None:
        yield answer("calibration", found, lack)
        return
    rates = facts.calibration
    data = {"cached": facts.cached, "kept": facts.kept, "seconds": rates.seconds, "file": facts.file, "key": rates.key}
    took = f"{'cached, once measured' if facts.cached else 'measured now'} in {rates.seconds:.2f} s"
    if facts.kept:
        yield Row("calibration", f"{took}: {facts.file}", "ok", data=data)
    else:
        value = f"{took}, and again by every engine: it cannot be kept ({facts.file})"
        yield Row("calibration", value, "warn", "set GDSCACHE_CACHE_DIR to a directory that can be written", data)
    for size in sorted(rates.load.staged):
        speeds = {direction: rates.rates(direction).staging(size) for direction in DIRECTIONS}
        yield Row(f"staged, pieces of {about(size)}", _speeds(speeds), data={"bytes": size, **speeds})
    for size in sorted(rates.load.copy_engine):
        speeds = {direction: rates.rates(direction).engine(size) for direction in DIRECTIONS}
        yield Row(f"copy engine, pieces of {about(size)}", _speeds(speeds), data={"bytes": size, **speeds})
    speeds = {direction: rates.rates(direction).zero_copy for direction in DIRECTIONS}
    yield Row("zero-copy kernel", _speeds(speeds), data=speeds)
    borders = {direction: _automatic(rates).crossover(direction) for direction in DIRECTIONS}
    texts = [f"{d}: {'never' if size is None else f'from {about(size)} on'}" for d, size in borders.items()]
    yield Row("staged", ", ".join(texts), data=borders)


def _automatic(calibration: Calibration) -> Paths:
    return Paths("auto", "auto", lambda: calibration)


def _speeds(rates: dict[Direction, float]) -> str:
    return ", ".join(f"{direction} {rate:.1f} GB/s" for direction, rate in rates.items())


def _path_rows(facts: Facts, asked: Asked) -> Iterator[Row]:
    """The path of this model's pages, with the paths that the configuration names."""
    config, mover = asked.config, facts.mover.value
    if mover is None:
        return
    if config.cpu is None and config.ssd is None:
        yield Row("paths", "no tier below the GPU pool: nothing is copied")
        return
    if config.cpu is None:
        yield Row("host_buffer", "pages pass through it, except where the SSD is reached from GPU memory")
    pinned = facts.copies.pinned.value is not None and (config.cpu is None or config.cpu.pin != "off")
    sums: dict[Direction, bool] = {"load": config.load.verify == "always", "store": True}
    found = facts.copies.calibration.value
    for direction, wanted in sums.items():
        name = f"{direction} path"
        if mover.name != "cuda":
            yield Row(name, f"none, pages are copied by {mover.name}", "info")
        elif not pinned:
            yield Row(name, "staged, since host memory is pageable", "info")
        elif found is None:
            yield Row(name, "unknown, since there is no calibration", "warn")
        else:
            yield from model_paths(config.model.layout(), direction, found.calibration, sums=wanted)


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
