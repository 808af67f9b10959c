"""What a disk gives by each way that bytes can go, and what this cache makes of it. Behind `gdscache bench io`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from gdscache.commands.bench import io_cache, io_rows, io_rows_beside, io_rows_direct, io_rows_engine, io_trial, machine
from gdscache.commands.bench.bare import BareLoop
from gdscache.commands.bench.io_cells import BY_NAME, Settings, cells, key_of
from gdscache.commands.bench.io_measure import Matrix
from gdscache.commands.bench.io_rows import Place, Row
from gdscache.commands.bench.measure import Progress, frozen_heap, silent
from gdscache.errors import CapacityError, GdsCacheError, InvalidValueError
from gdscache.sizes import MIB, about, format_size

Keep = Callable[[dict[str, Any]], None]
"""Called with what was measured so far, after every cell and comparison."""

LEAST = 16 * MIB
_MAY_DIFFER = ("profile", "budget_seconds", "ways", "require_gds")  # between a report and the run that goes on with it


@dataclasses.dataclass(frozen=True)
class Part:
    """A comparison: `cause` says why it cannot run here."""

    name: str
    action: Callable[[Place], list[Row]]
    ram: bool = False
    cause: str = ""


def run(
    directory: Path,
    settings: Settings,
    progress: Progress = silent,
    keep: Keep = lambda found: None,
    done: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """All measurements, as plain data; files go into temporary directories, which are deleted.

    `done`: a report whose cells and comparisons are taken over and not measured again. After Ctrl-C what was measured
    until then, with `complete` false. What raises errors is under `failed`, with the cause, and the rest goes on.

    Raises `TransportUnavailableError` where GPUDirect Storage is required and not proven, `CapacityError` where the
    disk has no room, `InvalidValueError` for settings that measure nothing.
    """
    check(settings)
    bench = _Bench(directory, settings, progress, keep, done or {})
    if settings.require_gds:
        bench.found["gds_proof"] = io_trial.require_gds(directory)
    try:
        bench.measure()
    except KeyboardInterrupt:
        bench.found["interrupted"] = True
    finally:
        keep(bench.found)
    return bench.found


def check(settings: Settings) -> None:
    """Raises `InvalidValueError` for settings that measure nothing."""
    unknown = [name for name in settings.ways if name not in BY_NAME]
    if unknown:
        raise InvalidValueError(f"unknown way {unknown[0]!r}", f"choose of {', '.join(BY_NAME)}")
    if settings.total < LEAST:
        raise InvalidValueError(f"a total of {about(settings.total)}", f"use at least {format_size(LEAST)}")
    if settings.require_gds and not any(BY_NAME[name].cufile for name in settings.ways):
        raise InvalidValueError("GDS is required of ways that do not use it", "add --way cufile")


class Described(Protocol):
    """Settings of a benchmark, as plain data."""

    def describe(self) -> dict[str, Any]: ...


def resumed(path: Path, schema: str, settings: Described, directory: Path, bench: str = "io") -> dict[str, Any]:
    """The report of `bench` that a run goes on with. Raises `InvalidValueError` where it is none, of other settings or
    of another machine or disk."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InvalidValueError(f"--resume {path} cannot be read: {error}", f"name a report of bench {bench}") from None
    if not isinstance(found, dict) or found.get("schema") != schema:
        raise InvalidValueError(f"--resume {path} is no report of bench {bench}", f"its schema is not {schema}")
    wanted, given = found["settings"], settings.describe()
    for key in (key for key in given if key not in _MAY_DIFFER):
        if wanted.get(key) != given[key]:
            raise InvalidValueError(
                f"--resume {path} was measured with {key} {wanted.get(key)}, now it is {given[key]}",
                "give the options of the first run again, or begin a new report with --json",
            )
    here = machine.describe(directory)
    for key in ("cpu", "cores", "gpus", "storage"):
        if found["machine"].get(key) != here[key]:
            raise InvalidValueError(
                f"--resume {path} was measured with {key} {found['machine'].get(key)}, here it is {here[key]}",
                "go on in the same directory of the same machine, or begin a new report with --json",
            )
    return found


def write_json(path: Path, report: Mapping[str, Any]) -> None:
    """Write a report in one step: whoever reads, or goes on after a crash, finds the old one or the new one."""
    text = json.dumps(report, indent=2) + "\n"
    if path.exists() and not path.is_file():  # a pipe or a device
        path.write_text(text)
        return
    file, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.absolute().parent)
    try:
        with open(file, "w") as out:
            out.write(text)
        os.chmod(name, path.stat().st_mode & 0o777 if path.exists() else 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


class _Bench:
    """The measurements in one directory; `found` grows with each."""

    def __init__(
        self, directory: Path, settings: Settings, progress: Progress, keep: Keep, done: Mapping[str, Any]
    ) -> None:
        self.directory, self.settings = directory, settings
        self.found: dict[str, Any] = {
            "complete": False,
            "interrupted": False,
            "gds_proof": "",
            "ways": [],
            "cannot": [],
            "failed": [],
            "ceilings": dict(done.get("ceilings", {})),
            "comparisons": list(done.get("comparisons", [])),
            "cells": list(done.get("cells", [])),
            "left": 0,
        }
        self._progress, self._keep = progress, keep
        self._device = io_trial.device_or_cpu()
        self._begun = time.monotonic()

    def measure(self) -> None:
        """Everything, comparisons first."""
        settings, found = self.settings, self.found
        self._require_room(self.directory, 2 * settings.total + 2 * settings.row_total)
        with tempfile.TemporaryDirectory(prefix="gdscache-bench-", dir=self.directory) as name:
            path = Path(name, "io.bin")
            with path.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, settings.total)
            with BareLoop(path, settings.total) as bare:
                threads = settings.threads_on(ram=io_cache.in_memory(self.directory))
                trials = io_trial.try_ways(settings.ways, Path(name), threads, self._progress)
                found["ways"] = [trial.describe() for trial in trials]
                found["cannot"] = [{"what": BY_NAME[t.way].label, "cause": t.cause} for t in trials if t.cause]
                matrix = Matrix(bare, path, self._device, settings, found, self._progress, self._keep)
                matrix.ceilings()
                for part in self._parts():
                    self._part(part, Path(name), path)
                known = {key_of(cell) for cell in found["cells"]}
                wanted = cells(settings.profile, [t.way for t in trials if not t.cause], settings.total)
                wanted = [cell for cell in wanted if cell.key not in known]
                budget = settings.budget_seconds
                with frozen_heap():
                    matrix.cells(wanted, None if budget is None else self._begun + budget)
        found["complete"] = not found["left"]

    def _parts(self) -> list[Part]:
        gpu = self._device.type == "cuda"
        ram = Path(self.settings.ram_disk)
        cause = "" if gpu else "torch sees no CUDA device"
        if gpu and not (ram.is_dir() and os.access(ram, os.W_OK) and io_cache.in_memory(ram)):
            cause = f"{ram} is no RAM disk that may be written"
        elif gpu and shutil.disk_usage(ram).free < 2 * self.settings.ram_total:
            cause = f"{ram} has less than {about(2 * self.settings.ram_total)} free"
        unasked = {"cause": "the way cufile is not asked for"}
        way = next((way for way in self.found["ways"] if way["way"] == "cufile"), unasked)
        parts = [
            Part("host reads", io_rows.host_reads),
            Part("cold loads", io_rows_engine.cold_loads),
            Part("direct reads", io_rows_direct.direct_reads, cause=way["cause"]),
        ]
        for size in io_rows_engine.ONWARD_TARGETS:
            action = functools.partial(io_rows_engine.loads_from_memory, page_bytes=size)
            parts.append(Part(f"loads from a RAM disk, {format_size(size)} pages", action, ram=True, cause=cause))
        for size in self.settings.pages:
            action = functools.partial(io_rows.file_per_page, page_bytes=size)
            parts.append(Part(f"a file a page, {format_size(size)} pages", action))
        for size in io_rows_beside.TARGETS:
            for name, of in (("stores and loads", io_rows_beside.stores_and_loads),
                             ("beside threads of Python", io_rows_beside.beside_python)):  # fmt: skip
                parts.append(Part(f"{name}, {format_size(size)} pages", functools.partial(of, page_bytes=size)))
        parts.append(Part("calls beside a thread of Python", io_rows_beside.calls_beside_python))
        return [*parts, Part("one call a page", io_rows.call_per_page)]

    def _part(self, part: Part, directory: Path, file: Path) -> None:
        settings, found = self.settings, self.found
        if any(r["part"] == part.name for r in found["comparisons"]):
            return
        if part.cause:
            found["cannot"].append({"what": part.name, "cause": part.cause})
            return
        nbytes = settings.ram_total if part.ram else min(settings.row_total, settings.total)
        with contextlib.ExitStack() as stack:
            if part.ram:
                name = stack.enter_context(tempfile.TemporaryDirectory(prefix="gdscache-bench-", dir=settings.ram_disk))
                directory = Path(name)
            threads = settings.threads_on(ram=io_cache.in_memory(directory))
            repeat, calls = settings.repeat, settings.calls
            place = Place(directory, file, nbytes, repeat, threads, self._device, self._progress, calls)
            try:
                rows = part.action(place)
            except (GdsCacheError, RuntimeError, OSError, MemoryError) as error:
                found["failed"].append({"what": part.name, "cause": io_trial.cause_of(error)})
            else:
                found["comparisons"] += [{"part": part.name, **r} for r in rows]
        self._keep(found)

    def _require_room(self, directory: Path, nbytes: int) -> None:
        free = shutil.disk_usage(directory).free
        if free < nbytes:
            raise CapacityError(f"{directory} has {about(free)} free, {about(nbytes)} are needed", "lower --total")
