"""The copy path between host memory and the GPU: page-locking, copy engine, calibration."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator

import torch

from gdscache.commands.doctor.facts import Asked, Facts, Kept
from gdscache.commands.doctor.report import Row, Verdict, answer, attempt
from gdscache.cuda.driver import Driver
from gdscache.cuda.host_memory import HostBuffer
from gdscache.kernels import calibration as calibrate
from gdscache.kernels import choice as paths
from gdscache.kernels.copy_engine import CopyEngine
from gdscache.sizes import about

PINNED_BYTES = 64 << 20


def pin_seconds() -> float:
    """Seconds to page-lock `PINNED_BYTES`. Raises `PinnedMemoryError` with the cause."""
    began = time.perf_counter()
    with HostBuffer(PINNED_BYTES, "on"):  # "auto" would fall back, and only log the cause
        return time.perf_counter() - began


def find_calibration(gpu: torch.device, *, recalibrate: bool) -> Kept:
    """A GPU's calibration. Raises `KernelUnavailableError` and others if a new one fails."""
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
    lack: Verdict = "warn" if facts.has_gpu else "info"
    shown = f"{about(PINNED_BYTES)} in {{:.3f}} s".format
    yield from answer("page-locking", facts.pinned, lack, show=shown)
    for row in answer("copy engine", facts.api, lack):
        hint = "a driver for CUDA 12.8 or newer takes batches: one call a piece is slow for small pieces"
        yield row if row.data != "single" else dataclasses.replace(row, verdict="warn", next_step=hint)
    if facts.calibration is not None and facts.calibration.value is not None:
        yield _calibration_row(facts.calibration.value)
    else:
        yield from answer("calibration", facts.calibration, lack)


def _calibration_row(kept: Kept) -> Row:
    rates = kept.calibration
    data = {"cached": kept.cached, "kept": kept.kept, "file": kept.file, **dataclasses.asdict(rates)}
    took = f"{'cached, once measured' if kept.cached else 'measured now'} in {rates.seconds:.2f} s"
    if kept.kept:
        return Row("calibration", f"{took}: {kept.file}", "ok", data=data)
    value = f"{took}, and again by every engine: it cannot be kept ({kept.file})"
    return Row("calibration", value, "warn", "set GDSCACHE_CACHE_DIR to a directory that can be written", data)
