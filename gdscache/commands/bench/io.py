"""This cache's speed on a disk, against the disk's own. Behind `gdscache bench io`."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import itertools
import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import torch

from gdscache import CacheEngine
from gdscache.commands.bench import kit, machine
from gdscache.commands.bench.figures import Ratios, Row, compared, copy_rate, idle, in_turns, in_words, rate, series
from gdscache.commands.bench.shapes import LLAMAS, token_bytes
from gdscache.commands.console import Progress, silent
from gdscache.config import Config, SsdConfig
from gdscache.cuda.driver import Driver
from gdscache.cuda.host_memory import HostBuffer
from gdscache.errors import (
    CapacityError,
    DeviceError,
    InvalidValueError,
    IOFailedError,
    NativeCallError,
    TransportUnavailableError,
)
from gdscache.native import bare_loop
from gdscache.pages.hit import Hit
from gdscache.pages.planes import PagedPlanes
from gdscache.runtime.files import free_space
from gdscache.sizes import GIB, MIB, about, format_size
from gdscache.storage.base import GDS, Op
from gdscache.storage.files import probe_direct_io
from gdscache.storage.probe import gds_operations

if TYPE_CHECKING:
    from gdscache.extents import HostExtents

THREADS = (1, 2, 4, 8, 16)  # of the bare loop
IO_BYTES = (1 << 20, 4 << 20)  # of its calls
KEPT = 3  # its ways after the scouting round
LEAST = 16 * MIB
ENGINE_THREADS = int(SsdConfig.model_fields["threads"].default)
RAM_THREADS = max(ENGINE_THREADS, 12)  # the cores that copy its bytes limit a RAM disk
TRANSPORTS = ("posix", "uring", *GDS)
TARGETS = {4 * MIB: (0.85, 0.92), 1 * MIB: (0.78, 0.88)}  # of stores and cold loads with planes on the host
GPU_TARGET = 0.93  # of cold loads into planes on a GPU
PACKED_PAGE = 8 * MIB  # of 64 tokens, as they lie in the planes
PACKED_LOADS = f"packed loads, {format_size(PACKED_PAGE)} pages"
PACKED = {"memory": "CPU tier → GPU", "staying": "SSD → GPU via CPU", "passing": "SSD → GPU past the CPU tier"}
PACKED_TARGETS = {  # of files on a RAM disk
    ("memory", "unpacked"): 1.25,
    ("memory", "a page-locked copy"): 1.18,
    ("staying", "unpacked"): 1.20,
    ("passing", "unpacked"): 1.20,
}
PATIENCE_S, SLOWEST = 60.0, 10e6  # a transport that takes longer, and a second for each so many bytes, hangs


@dataclasses.dataclass(frozen=True)
class Settings(kit.Settings):
    """`total`: bytes of a round; a figure has `repeat` rounds. `threads`: of the transport; None is the engine's
    default, more on a RAM disk. `transports`: also measured, beside the one that an engine chooses without GPUDirect
    Storage."""

    total: int = 512 * MIB
    repeat: int = 5
    threads: int | None = None
    transports: tuple[str, ...] = ()
    require_gds: bool = False

    @classmethod
    def defaults(cls, *, quick: bool = False, everything: bool = False, **options: Any) -> dict[str, Any]:
        quickly = {"total": LEAST, "repeat": 2, "threads": 4} if quick else {}
        return {"transports": TRANSPORTS if everything else (), **quickly}

    def check(self) -> None:
        """Raises `InvalidValueError` for settings without a measurement."""
        unknown = [name for name in self.transports if name not in TRANSPORTS]
        if unknown:
            raise InvalidValueError(f"unknown transport {unknown[0]!r}", f"choose of {', '.join(TRANSPORTS)}")
        if self.total < LEAST:
            raise InvalidValueError(f"a total of {about(self.total)}", f"use at least {format_size(LEAST)}")
        if self.require_gds and not set(self.transports) & set(GDS):
            raise InvalidValueError("GDS is required of transports without it", "add --transport cufile")


# -- the disk's ceiling ------------------------------------------------------------------------------------------------


class Way(NamedTuple):
    """A loop's threads and bytes for each system call."""

    threads: int
    io_bytes: int

    @property
    def label(self) -> str:
        return f"{self.threads} threads, {self.io_bytes >> 10} KiB"


class BareLoop:
    """Reads or writes the first `total` bytes of a file, each part once, from or to memory of its own.

    Its memory has the size and kind of a tier's: huge pages, page-locked with CUDA (on some devices both make direct
    I/O faster), touched, random bytes. A small reused buffer stays in the processor's cache; it made the loop twice as
    fast on a RAM disk, which no page cache can reach. If the file system refuses `O_DIRECT`, `direct` is False and the
    loop uses the page cache, as the engine's transport does. Reads may go onward to `target`, uint8 (n,), on the host
    or a GPU; the copy engine copies to a GPU, from the loop's page-locked memory.
    """

    def __init__(self, path: Path, total: int, target: torch.Tensor | None = None) -> None:
        self.total, self._path, self._target = total, path, target
        self._driver = Driver(target.device) if target is not None and target.is_cuda else None
        self.direct = not probe_direct_io(path.parent)
        with contextlib.ExitStack() as undo:
            self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_DIRECT if self.direct else 0))
            undo.callback(os.close, self._file)
            if os.fstat(self._file).st_size < total:
                raise InvalidValueError(f"{path} is shorter than {total} bytes", "measure a larger file")
            size = max(IO_BYTES)
            self._buffer = HostBuffer(-(-total // size) * size, "auto", unit=size)
            noise = np.random.default_rng(0).bytes(size)
            for at in range(0, self._buffer.nbytes, size):
                self._buffer.view[at : at + size] = noise
            self._memory = np.frombuffer(self._buffer.view, np.uint8)
            undo.pop_all()

    def run(self, op: Op, way: Way, *, onward: bool = False) -> float:
        """GB/s of one pass. `onward`: each part is also copied to the target. Reads through the page cache are cold."""
        if op is Op.READ and not self.direct:
            machine.drop_cached([self._path])
        nbytes = self.total // way.io_bytes * way.io_bytes
        calls = self._file, op is Op.WRITE, nbytes, way.io_bytes, way.threads
        target = self._target.data_ptr() if onward and self._target is not None else 0
        driver = (None, 0) if not target or self._driver is None else (self._driver.library, self._driver.context)
        try:
            elapsed = bare_loop(*calls, self._memory.ctypes.data, target, *driver)
        except (NativeCallError, DeviceError) as error:
            few = getattr(error, "errno", None) == errno.ENODATA
            cause = f"a call moved less than {way.io_bytes} bytes" if few else error.message
            raise IOFailedError(
                f"the bare {op.value} loop failed: {cause}", "see the kernel log for the device"
            ) from None
        return rate(nbytes, elapsed)

    def scout(self, op: Op, progress: Progress = silent, *, onward: bool = False) -> list[Way]:
        """The `KEPT` best ways of two short rounds, best first."""
        some = [
            way for way in itertools.starmap(Way, itertools.product(THREADS, IO_BYTES)) if way.io_bytes <= self.total
        ]
        ways = {way: functools.partial(self.run, op, way, onward=onward) for way in some}
        whole, self.total = self.total, max(self.total // 4, min(self.total, max(IO_BYTES)))
        try:
            found = in_turns(ways, 2, progress, f"bare {op.value} loop, all ways")
        finally:
            self.total = whole
        return sorted(ways, key=lambda way: max(found[way]), reverse=True)[:KEPT]

    def close(self) -> None:
        os.close(self._file)
        del self._memory
        self._buffer.close()


# -- an engine with its pages on the SSD only --------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Place:
    """The place and size of engines: a round moves `nbytes`, a figure has `repeat` rounds. `threads`: of the
    transport."""

    directory: Path
    nbytes: int
    repeat: int
    threads: int
    device: torch.device
    progress: Progress = silent

    @property
    def on_disk(self) -> bool:
        return not machine.in_memory(self.directory)


class ColdEngine:
    """An engine with attached planes, a CPU tier and an SSD tier (`auto`, no GDS) in a temporary directory, and one
    prompt's pages, of Llama-3-8B's shape.

    Opening stores `place.nbytes` of pages. It needs about 1.3 times as much of disk, twice as much of host memory and
    twice as much on the device.
    """

    def __init__(
        self, place: Place, page_bytes: int, ssd: Mapping[str, Any] | None = None, *, pack: bool = False
    ) -> None:
        """`ssd`: changed keys of the section. `pack`: keep pages packed; their values are drawn then."""
        self.device = place.device
        self.pages = max(1, place.nbytes // page_bytes)
        self.nbytes = self.pages * page_bytes
        self._patience = PATIENCE_S + self.nbytes / SLOWEST
        with contextlib.ExitStack() as undo:
            directory = undo.enter_context(tempfile.TemporaryDirectory(dir=place.directory))
            capacity = (self.pages + self.pages // 4 + 64) * page_bytes
            section = {"path": directory, "capacity": capacity, "threads": place.threads, "gds": "off", **(ssd or {})}
            sections = {
                "model": {**_model(page_bytes), "pack": "on" if pack else "off"},
                "gpu": {"device": str(place.device), "capacity": page_bytes, "staging": max(256 * MIB, 2 * page_bytes)},
                "cpu": {"capacity": self.nbytes + (page_bytes if pack else 0)},  # and a page that cannot be packed
                # with packed pages two of its slots are for pages that cannot be packed
                "host_buffer": max(min(256 * MIB, self.nbytes), (4 if pack else 2) * page_bytes),
                "store": {"queue": self.nbytes},
            }
            config = Config.from_dict({**sections, "ssd": section, "deadline": self._patience})
            layout = config.model.layout()
            self._lying = self.pages * layout.page_bytes
            self._planes = PagedPlanes.allocate(layout, self.pages, place.device).tensors
            undo.callback(self._forget_planes)
            for layer in self._planes:
                for tensor in layer:
                    tensor.normal_() if pack else tensor.fill_(1)
            self.engine = undo.enter_context(CacheEngine.from_config(config, self._planes))
            self._tokens = np.arange(self.pages * layout.page_tokens + 1, dtype=np.uint32)
            self._slots = torch.arange(self.pages)
            for tensor in self._outer():
                tensor[:] = self._pattern(tensor)
            self.store()
            manager = self.engine.manager
            assert manager.cpu is not None, "no CPU tier"
            assert manager.ssd is not None, "no SSD tier"
            self._cpu = manager.cpu
            self.slab = next(iter(manager.ssd.path.glob("slab-*.bin")))
            self.cache = machine.cache_state(self.slab, direct=True)  # of the last load through it
            self._flat: torch.Tensor | None = None
            self._undo = undo.pop_all()

    @property
    def transport(self) -> dict[str, Any]:
        found: dict[str, Any] = self.engine.stats()["tiers"]["ssd"]["transport"]
        return found

    # -- measurements, in GB/s -----------------------------------------------------------------------------------------

    def store(self) -> float:
        """Store every page from the planes, from the call until all are on the SSD. No tier has them before."""
        self.engine.clear()
        start = time.perf_counter()
        report = self.engine.store(self._tokens, self._slots).result(2 * self._patience)
        elapsed = time.perf_counter() - start
        if any("ssd" not in tiers for tiers in report.tiers):
            raise self._failed("not all pages reached the SSD", report.dropped.values())
        return rate(self.nbytes, elapsed)

    def load(self) -> float:
        """Load every page from the SSD into the planes, from the call to the verdict, without the lookup."""
        pages = self.engine.pages(self._tokens)
        with self.engine.manager.lock:
            self._cpu.index.drop_all([page.key for page in pages], {pages[0].namespace})
        if not self.transport["direct"]:  # reads through the page cache are to be cold
            machine.drop_cached([self.slab])
            self.cache = machine.cache_state(self.slab, direct=False)
        hit = self.engine.lookup(self._tokens)
        return self._loaded(lambda: hit, "ssd")

    def load_passing(self) -> float:
        """`load` past the CPU tier: no page stays there, all go through the bounce reserve."""
        loader = self.engine.loader
        before, loader.keep = loader.keep, False
        try:
            return self.load()
        finally:
            loader.keep = before

    def load_from_cpu(self) -> float:
        """Look up and load every page from the CPU tier, into which another load has just brought it."""
        self.load()
        return self._loaded(lambda: self.engine.lookup(self._tokens), "cpu")

    def copy(self) -> float:
        """One copy of the same size from the CPU tier's memory (page-locked with CUDA) to the device."""
        source = cast("HostExtents", self._cpu.extents).rows.view(-1)[: self.nbytes]
        if self._flat is None:
            self._flat = torch.empty_like(source, device=self.device)
            self._flat.fill_(1)
        return copy_rate(source, self._flat)

    def check(self) -> None:
        """Load once more, into overwritten planes, and compare the first and last layer with the stored bytes. Raises
        `IOFailedError`."""
        for layer in self._planes:
            for tensor in layer:
                tensor.zero_()
        idle(self.device)
        self.load()
        for tensor in self._outer():
            if not torch.equal(tensor, self._pattern(tensor)):
                raise IOFailedError("a load gave other bytes than were stored", "please report it")

    # -- inside --------------------------------------------------------------------------------------------------------

    def _loaded(self, hit: Callable[[], Hit], tier: str) -> float:
        start = time.perf_counter()
        report = self.engine.load(hit(), self._slots).result()
        elapsed = time.perf_counter() - start
        if report.bytes_by_tier != {tier: self._lying}:
            what = f"{self._lying} bytes were to come from the {tier} tier: {report.bytes_by_tier}"
            raise self._failed(what, (status.value for status in report.pages))
        return rate(self.nbytes, elapsed)

    def _failed(self, what: str, causes: Iterable[str]) -> IOFailedError:
        counted = ", ".join(f"{cause} {pages}" for cause, pages in Counter(causes).items())
        hint = f"see the log; deadline: the transport hangs, or takes more than {self._patience:.0f} s"
        return IOFailedError(f"{what}; pages: {counted}", hint)

    def _outer(self) -> list[torch.Tensor]:
        return [*self._planes[0], *self._planes[-1]]

    def _pattern(self, tensor: torch.Tensor) -> torch.Tensor:
        """Rows that tell pages apart: the page's number, as far as bfloat16 can count."""
        numbers = torch.arange(self.pages, device=tensor.device) % 251
        return numbers.to(tensor.dtype).view(-1, *[1] * (tensor.dim() - 1)).expand(-1, *tensor.shape[1:])

    def _forget_planes(self) -> None:
        self._planes, self._flat = [], None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def close(self) -> None:
        """Close the engine, delete its files and free all memory."""
        self._undo.close()


def _model(page_bytes: int) -> dict[str, Any]:
    """A model section with pages of `page_bytes`."""
    shape = LLAMAS["8b"]
    return {
        "name": "bench",
        "layers": shape["num_hidden_layers"],
        "kv_heads": shape["num_key_value_heads"],
        "head_dim": shape["head_dim"],
        "page_tokens": page_bytes // token_bytes("8b"),
    }


# -- cases -------------------------------------------------------------------------------------------------------------


def measure(run: kit.Run, settings: Settings, directory: Path) -> None:
    """Measure all cases, the most important first. Files go into a temporary directory, which is deleted. Raises
    `CapacityError` if the disk has too little room."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    needed, free = 3 * settings.total + GIB, free_space(directory)
    if free is not None and free < needed:
        message = f"{directory} has {about(free)} free, {about(needed)} are needed"
        raise CapacityError(message, f"{kit.ELSEWHERE}: --dir, or lower --total")
    some: dict[str, Callable[[Place], list[Row]]] = {}
    for transport, size in itertools.product(("", *settings.transports), TARGETS):
        given: dict[str, Any] = {"page_bytes": size, "transport": transport, "require_gds": settings.require_gds}
        some[_label("stores and loads", transport, size)] = functools.partial(stores_and_loads, **given)
    if settings.everything and device.type == "cuda":
        some[PACKED_LOADS] = packed_loads
    run.plan([*some])
    if settings.everything and device.type == "cpu":
        run.note("cannot", PACKED_LOADS, "torch sees no CUDA device")
    threads = settings.threads or (RAM_THREADS if machine.in_memory(directory) else ENGINE_THREADS)
    with tempfile.TemporaryDirectory(prefix="gdscache-bench-", dir=directory) as made:
        place = Place(Path(made), settings.total, settings.repeat, threads, device, run.progress)
        for name, action in some.items():
            run.case(name, functools.partial(lambda measured: {"comparisons": measured(place)}, action))


# -- comparisons: figures measured in turns ----------------------------------------------------------------------------


def stores_and_loads(place: Place, page_bytes: int, transport: str = "", *, require_gds: bool = False) -> list[Row]:
    """Stores until they are on the SSD, and cold loads, against the bare loop on the same slab.

    `transport`: as `ssd.transport`, with pages straight to the GPU where it may use GPUDirect Storage; empty for `auto`
    without it. `require_gds`: raise an error unless the driver's counters prove it.
    """
    store_target, load_target = TARGETS[page_bytes] if place.device.type == "cpu" else (None, GPU_TARGET)
    ssd = {"transport": transport, "gds": "off"} if transport else {}
    if transport in GDS:
        ssd["gds"] = "on" if require_gds else "auto"
        ssd["route"] = "direct" if place.device.type == "cuda" else "auto"
    counted = gds_operations()
    try:
        opened = ColdEngine(place, page_bytes, ssd)
    except TransportUnavailableError as error:
        if require_gds:
            raise IOFailedError(f"--require-gds: {error.message}", error.hint) from error
        raise
    with closing(opened) as engine, closing(BareLoop(engine.slab, engine.nbytes)) as bare:
        found = []
        for what, op, ours, target in (
            ("cold load", Op.READ, engine.load, load_target),
            ("store", Op.WRITE, engine.store, store_target),
        ):
            label = _label(what, transport, page_bytes)
            ways: dict[str, Callable[[], float]] = {"ours": ours}
            ways |= {way.label: functools.partial(bare.run, op, way) for way in bare.scout(op, place.progress)}
            rates = in_turns(ways, place.repeat, place.progress, label)
            best = max([*ways][1:], key=lambda name: statistics.median(rates[name]))
            least = None if transport or not place.on_disk else target
            found.append(_row(engine, place, label, (rates["ours"], f"bare loop, {best}", rates[best]), least))
        engine.store()  # the bare loop wrote over the pages
        engine.check()
    if require_gds and transport in GDS and gds_operations() == counted:
        raise IOFailedError("--require-gds: nvidia-fs counted no I/O", "see gdscache doctor and docs/gds.md")
    return found


def _label(what: str, transport: str, page_bytes: int) -> str:
    return ", ".join([what, *([transport] if transport else []), f"{format_size(page_bytes)} pages"])


def packed_loads(place: Place, page_bytes: int = PACKED_PAGE) -> list[Row]:
    """Loads of packed pages against loads of unpacked ones, and against one page-locked copy. Bytes are logical."""
    with closing(ColdEngine(place, page_bytes)) as plain, closing(ColdEngine(place, page_bytes, pack=True)) as packed:
        ways: dict[str, Callable[[], float]] = {"copy": plain.copy}
        for kind, engine in {"unpacked": plain, "packed": packed}.items():
            ways |= {
                f"staying {kind}": engine.load,
                f"memory {kind}": engine.load_from_cpu,
                f"passing {kind}": engine.load_passing,
            }
        for measure in ways.values():  # warms up
            measure()
        packed.check()
        found = in_turns(ways, place.repeat, place.progress, "packed pages")
        rows = []
        for kind, what in PACKED.items():
            label, ours = f"{what}, packed {format_size(page_bytes)} pages", found[f"{kind} packed"]
            for against, other in (("unpacked", f"{kind} unpacked"), ("a page-locked copy", "copy")):
                least = None if place.on_disk else PACKED_TARGETS.get((kind, against))
                rows.append(_row(packed, place, label, (ours, against, found[other]), least))
    return rows


def _row(
    engine: ColdEngine, place: Place, what: str, rates: tuple[list[float], str, list[float]], limit: float | None
) -> Row:
    """A row of plain data. `rates`: ours, the reference's name, and its rates."""
    ours, against, others = rates
    return compared(
        what,
        series(ours),
        against,
        series(others),
        limit,
        page_bytes=engine.nbytes // engine.pages,
        bytes=engine.nbytes,
        file_system=machine.storage(place.directory)["file_system"],
        transport=engine.transport["name"],
        threads=place.threads,
        cache=engine.cache,
    )


# -- tables and the plot -----------------------------------------------------------------------------------------------


def panels(report: kit.Report) -> list[Ratios]:
    """This cache's speed on the disk; also of a partial report."""
    return [Ratios("This cache", [*map(_line, report["comparisons"])])]


def bottom(report: kit.Report) -> list[str]:
    """A user's figures: speeds of loads and stores beside the disk's own."""
    found = []
    for what, words in (("cold load", "loads"), ("store", "stores")):
        labels = [_label(what, "", size) for size in TARGETS]
        if some := [row for row in report["comparisons"] if row["what"] in labels]:
            best = max(some, key=lambda row: row["figure"]["median"])
            found.append(in_words(words, best, "that it can"))
    found = [f"Your disk gives this cache {', and '.join(found)}."] if found else []
    missed = sum(not row.get("met", True) for row in report["comparisons"])
    if missed:
        found.append(f"{missed} figures miss their target; docs/performance.md explains the targets.")
    return [" ".join(found)] if found else []


def _line(row: kit.Report) -> tuple[str, kit.Report]:
    cold = "" if row["cache"]["state"] != "kept" else f", page cache KEPT {about(row['cache']['resident_bytes'])}"
    return f"{row['what']}{cold}", row


BENCH = kit.Bench("io", "gdscache.bench.io/5", {"comparisons": []}, Settings, measure, panels, bottom)
