"""The GPU: the driver, torch's devices, and the device of `gpu.device`."""

from __future__ import annotations

import ctypes
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import torch

from gdscache.commands.doctor.facts import Asked, Facts, Gpu, NvidiaDriver
from gdscache.commands.doctor.report import Found, Row, Verdict, comes_to
from gdscache.cuda.numa import gpu_address, placement
from gdscache.errors import DeviceError
from gdscache.runtime.files import text_of
from gdscache.sizes import about

DRIVER_VERSION = Path("/proc/driver/nvidia/version")


def find_driver() -> NvidiaDriver:
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
    return NvidiaDriver(number.value, found[0] if found else "", cause)


def find_devices() -> tuple[Gpu, ...]:
    """The GPUs that torch sees, at least one. Raises `DeviceError` with the cause."""
    if torch.version.cuda is None:
        raise DeviceError(f"torch {torch.__version__} was built without CUDA", "install a build of torch with CUDA")
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        cause = str(error).partition("\n")[0]
        raise DeviceError(f"torch sees none: {cause}", "see the driver, and CUDA_VISIBLE_DEVICES") from error
    found = []
    for index in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(index)
        place = placement(gpu_address(torch.device("cuda", index)))
        found.append(Gpu(p.name, (p.major, p.minor), p.total_memory, p.multi_processor_count, place))
    return tuple(found)


def gpu_to_look_at(devices: Found[tuple[Gpu, ...]], device: Found[str]) -> torch.device | None:
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
    if driver is None:
        yield Row("driver", facts.driver.cause, "info", facts.driver.hint)
    else:
        parts = [driver.version, f"CUDA {driver.cuda // 1000}.{driver.cuda % 1000 // 10}", driver.cause]
        hint = "see that nvidia-smi works, and that CUDA_VISIBLE_DEVICES names a GPU" if driver.cause else ""
        verdict: Verdict = "warn" if driver.cause else "ok"
        yield Row("driver", ", ".join(filter(None, parts)), verdict, hint, dataclasses.asdict(driver))
    for index, found in enumerate(facts.devices.value or ()):
        capability = ".".join(map(str, found.capability))
        value = f"{found.name}, compute capability {capability}, {about(found.memory_bytes)}, {found.processors} SMs"
        place = found.numa
        value += f", NUMA node {place.node}: its pools and threads lie there" if place.cpus else ""
        hint = f"{place.lacks}: its pools and threads lie anywhere, and copies may be slower" if place.lacks else ""
        data = dataclasses.asdict(found) | {"numa": {"node": place.node, "cpus": sorted(place.cpus)}}
        yield Row(f"GPU {index}", value, "info" if hint else "ok", hint, data)
    if facts.torch_cuda and not facts.has_gpu:
        yield Row("GPU", facts.devices.cause, lack, facts.devices.hint if driver else "")
    wanted, device = asked.config.gpu.device, facts.device.value
    if device is None:
        yield Row("gpu.device", f"{wanted}: {facts.device.cause}", "fail", facts.device.hint)
    else:
        yield Row("gpu.device", comes_to(wanted, device), "info" if device == "cpu" else "ok", data=device)
