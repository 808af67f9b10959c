"""The GPU: the driver, torch's devices, the kernels, and the copies between it and host memory."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from gdscache.commands.doctor.facts import Asked, Facts, Found, Row, Verdict, answer, attempt, comes_to
from gdscache.cuda.driver import CopyEngine, Driver
from gdscache.cuda.host_memory import HostBuffer
from gdscache.cuda.numa import Placement, gpu_address, placement
from gdscache.errors import DeviceError
from gdscache.kernels import choice as paths
from gdscache.kernels import jit
from gdscache.kernels.choice import Calibration
from gdscache.kernels.copies import open_copies
from gdscache.kernels.cuda import FORMS, SOURCE
from gdscache.pages.planes import PagedPlanes
from gdscache.runtime.files import text_of
from gdscache.sizes import about

DRIVER_VERSION = Path("/proc/driver/nvidia/version")
PINNED_BYTES = 64 << 20


def find_driver() -> Row:
    """Raises `DeviceError` without a driver."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        hint = "on a machine with an NVIDIA GPU, install its driver, and give a container its GPUs"
        raise DeviceError(f"there is no CUDA driver: {error}", hint) from error
    number, text = ctypes.c_int(), ctypes.c_char_p()
    library.cuDriverGetVersion(ctypes.byref(number))
    code = library.cuInit(0)
    if code:
        library.cuGetErrorName(code, ctypes.byref(text))
    cause = f"cuInit answers {code} ({(text.value or b'unknown').decode()})" if code else ""
    found = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", text_of(DRIVER_VERSION))
    return driver_row(number.value, found[0] if found else "", cause)


def driver_row(cuda: int, version: str = "", cause: str = "") -> Row:
    """`cuda`: the newest CUDA version that the driver runs (13000 is 13.0). `version`: the driver's own, if known.
    `cause`: the reason why it finds no GPU."""
    value = ", ".join(filter(None, [version, f"CUDA {cuda // 1000}.{cuda % 1000 // 10}", cause]))
    hint = "see that nvidia-smi works, and that CUDA_VISIBLE_DEVICES names a GPU" if cause else ""
    return Row("driver", value, "warn" if cause else "ok", hint, {"cuda": cuda, "version": version, "cause": cause})


def find_devices() -> tuple[Row, ...]:
    """The GPUs that torch sees, at least one. Raises `DeviceError` with the cause."""
    if torch.version.cuda is None:
        raise DeviceError(f"torch {torch.__version__} was built without CUDA", "install a build of torch with CUDA")
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        cause = str(error).partition("\n")[0]
        raise DeviceError(f"torch sees none: {cause}", "see the driver, and CUDA_VISIBLE_DEVICES") from error
    return tuple(
        device_row(n, torch.cuda.get_device_properties(n), placement(gpu_address(torch.device("cuda", n))))
        for n in range(torch.cuda.device_count())
    )


def device_row(index: int, gpu: Any, place: Placement) -> Row:
    """`gpu`: torch's properties of it. `place`: its NUMA node."""
    memory, capability = gpu.total_memory, f"{gpu.major}.{gpu.minor}"
    value = f"{gpu.name}, compute capability {capability}, {about(memory)}, {gpu.multi_processor_count} SMs"
    value += f", NUMA node {place.node}: its pools and threads lie there" if place.cpus else ""
    hint = f"{place.lacks}: its pools and threads lie anywhere, and copies may be slower" if place.lacks else ""
    data = {"name": gpu.name, "capability": (gpu.major, gpu.minor), "memory_bytes": memory}
    data |= {"processors": gpu.multi_processor_count, "numa": {"node": place.node, "cpus": sorted(place.cpus)}}
    return Row(f"GPU {index}", value, "info" if hint else "ok", hint, data)


def gpu_to_look_at(devices: Found[tuple[Row, ...]], device: Found[str]) -> torch.device | None:
    """The GPU that an engine would use, else the first one; None without a GPU."""
    if not devices.value:
        return None
    wanted = torch.device(device.value or "cuda:0")
    return wanted if wanted.type == "cuda" else torch.device("cuda", 0)


def gpu_rows(facts: Facts, asked: Asked) -> Iterator[Row]:
    driver = facts.driver.value
    lack: Verdict = "warn" if driver else "info"  # a driver implies a GPU
    data = {"version": facts.torch, "cuda": facts.torch_cuda}
    if facts.torch_cuda:
        yield Row("torch", f"{facts.torch}, CUDA {facts.torch_cuda}", "ok", data=data)
    else:
        hint = "install a build of torch with CUDA" if driver else ""
        yield Row("torch", f"{facts.torch}, without CUDA", lack, hint, data)
    yield driver or Row("driver", facts.driver.cause, "info", facts.driver.hint)
    yield from facts.devices.value or ()
    if facts.torch_cuda and not facts.has_gpu:
        yield Row("GPU", facts.devices.cause, lack, facts.devices.hint if driver else "")
    wanted, device = asked.config.gpu.device, facts.device.value
    if device is None:
        yield Row("gpu.device", f"{wanted}: {facts.device.cause}", "fail", facts.device.hint)
    else:
        yield Row("gpu.device", comes_to(wanted, device), "info" if device == "cpu" else "ok", data=device)


# -- kernels -----------------------------------------------------------------------------------------------------------


def nvrtc_version(compiler: jit.CudaCore) -> str:
    """Raises cuda-core's error without NVRTC."""
    return ".".join(map(str, compiler.nvrtc()))


def build_seconds(gpu: torch.device) -> float:
    """Seconds to build the kernels: far fewer if they are on disk."""
    began = time.perf_counter()
    jit.build(SOURCE, FORMS, gpu, VECTOR=16)
    return time.perf_counter() - began


def find_mover(asked: Asked, device: torch.device) -> tuple[str, str]:
    """The page copier that an engine would use for this model, and the reason against a faster one. Opens it for a pool
    of one page."""
    planes = PagedPlanes.allocate(asked.config.model.layout(), 1, device)
    with contextlib.closing(open_copies(planes, asked.config.gpu)) as copies:
        found = copies.describe()
    return found["name"], found["cause"]


def kernel_rows(facts: Facts, asked: Asked) -> Iterator[Row]:
    lack: Verdict = "warn" if facts.has_gpu else "info"
    major = (facts.torch_cuda or "").partition(".")[0]
    extra = f"install gdscache[cuda{major}]" if major else "install gdscache[cuda13] or gdscache[cuda12]"
    yield from answer("compiler", facts.compiler, lack, extra)
    yield from answer("NVRTC", facts.nvrtc, lack, "install NVRTC (nvidia-cuda-nvrtc) for the compiler's CUDA version")
    yield from answer("kernels", facts.built, lack, show=lambda seconds: f"built in {seconds:.2f} s")
    name, wanted = "gpu.kernels", asked.config.gpu.kernels
    if facts.mover is None:  # without a device: the row of `gpu.device` has failed already
        yield Row(name, f"{wanted}: not tried", "fail" if wanted == "on" else "info", "see gpu.device")
    elif facts.mover.value is None:
        hint = facts.mover.hint or "an engine would not open here now: see the cause"
        yield Row(name, f"{wanted}: {facts.mover.cause}", "fail", hint)
    else:
        mover, cause = facts.mover.value
        value = f"pages are copied by {mover}" + (f", since {cause}" if cause else "")
        verdict: Verdict = "ok" if mover == "cuda" else "info"
        if mover == "copy_engine" and wanted == "auto":
            verdict = "warn"
        hint = facts.built.hint if facts.built and verdict == "warn" else ""
        yield Row(name, comes_to(wanted, value), verdict, hint, {"implementation": mover, "cause": cause})


# -- copies ------------------------------------------------------------------------------------------------------------


def pin_seconds() -> float:
    """Seconds to page-lock `PINNED_BYTES`. Raises `PinnedMemoryError` with the cause."""
    began = time.perf_counter()
    with HostBuffer(PINNED_BYTES, "on"):  # "auto" would fall back, and only log the cause
        return time.perf_counter() - began


def find_calibration(gpu: torch.device, *, recalibrate: bool) -> Row:
    """A GPU's calibration. Raises `KernelUnavailableError` and others if a new one fails."""
    driver = Driver(gpu)
    engine = CopyEngine(driver)
    key = paths.calibration_key(driver, engine)
    found = None if recalibrate else paths.read(key)
    cached = found is not None
    if found is None:
        found = paths.calibrated(driver, engine, fresh=True)
    place = attempt(lambda: str(paths.cache_file(key)))
    return calibration_row(found, place.value or place.cause, cached=cached, kept=paths.read(key) == found)


def calibration_row(rates: Calibration, file: str, *, cached: bool, kept: bool) -> Row:
    """`cached`: read from disk. `kept`: on disk for the next start."""
    data = {"cached": cached, "kept": kept, "file": file, **dataclasses.asdict(rates)}
    took = f"{'cached, once measured' if cached else 'measured now'} in {rates.seconds:.2f} s"
    if kept:
        return Row("calibration", f"{took}: {file}", "ok", data=data)
    value = f"{took}, and again by every engine: it cannot be kept ({file})"
    return Row("calibration", value, "warn", "set GDSCACHE_CACHE_DIR to a directory that can be written", data)


def copy_rows(facts: Facts, asked: Asked) -> Iterator[Row]:
    lack: Verdict = "warn" if facts.has_gpu else "info"
    shown = f"{about(PINNED_BYTES)} in {{:.3f}} s".format
    yield from answer("page-locking", facts.pinned, lack, show=shown)
    for row in answer("copy engine", facts.api, lack):
        hint = "a driver for CUDA 12.8 or newer takes batches: one call a piece is slow for small pieces"
        yield row if row.data != "single" else dataclasses.replace(row, verdict="warn", next_step=hint)
    if facts.calibration is not None and facts.calibration.value is not None:
        yield facts.calibration.value
    else:
        yield from answer("calibration", facts.calibration, lack)
