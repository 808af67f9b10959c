"""Can the CUDA kernels be built, and what would an engine copy pages with?"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from gdscache.commands.doctor.facts import Asked, Facts, Found, KernelFacts, MoverFacts, attempt
from gdscache.commands.doctor.report import Row, Verdict, answer
from gdscache.kernels import jit
from gdscache.kernels.cuda import FORMS, SOURCE
from gdscache.movers import open_mover
from gdscache.pages.planes import PagedPlanes


def find_kernels(gpu: torch.device | None) -> KernelFacts:
    """cupy, NVRTC, and a build for `gpu`."""
    cupy: Found[str] = attempt(find_cupy)
    nvrtc: Found[str] = attempt(find_nvrtc) if cupy.value else Found(None, "not tried: no cupy")
    built: Found[float] = attempt(lambda: build_seconds(gpu)) if gpu else Found(None, "not tried: no GPU")
    return KernelFacts(cupy, nvrtc, attempt(find_cache), built)


def find_cupy() -> str:
    """cupy's version. Raises what importing it does, mostly `ImportError`."""
    with jit.cache_directory():
        import cupy

        return str(cupy.__version__)


def find_nvrtc() -> str:
    """The version of the NVRTC that cupy loads. Raises a `RuntimeError` where it finds none."""
    from cupy.cuda import nvrtc

    return ".".join(map(str, nvrtc.getVersion()))


def find_cache() -> str:
    """Where cupy keeps compiled kernels. Raises `KernelUnavailableError` where there is no place for them."""
    with jit.cache_directory():
        return str(Path(os.environ.get("CUPY_CACHE_DIR") or "~/.cupy/kernel_cache").expanduser())


def build_seconds(gpu: torch.device) -> float:
    """Build the kernels and see how long it takes: far less where cupy has them on disk."""
    began = time.perf_counter()
    jit.build(SOURCE, FORMS, gpu, VECTOR=16)
    return time.perf_counter() - began


def find_mover(asked: Asked, device: torch.device) -> MoverFacts:
    """What an engine would copy this model's pages with: it is opened for a moment, for a pool of one page."""
    planes = PagedPlanes.allocate(asked.config.model.layout(), 1, device)
    mover = open_mover(planes, asked.config.gpu)
    try:
        found = mover.describe()
    finally:
        mover.close()
    return MoverFacts(found["name"], found["cause"])


def kernel_rows(facts: Facts, asked: Asked) -> Iterator[Row]:
    """cupy, NVRTC, the build; `gpu.kernels`."""
    found = facts.kernels
    lack: Verdict = "warn" if facts.has_gpu else "info"
    major = (facts.gpu.torch_cuda or "").partition(".")[0]
    extra = f"install gdscache[cuda{major}]" if major else "install gdscache[cuda13] or gdscache[cuda12]"
    nvrtc = "install NVRTC (nvidia-cuda-nvrtc) for cupy's CUDA version" if found.cupy.value else ""
    yield answer("cupy", found.cupy, lack, extra)
    yield answer("NVRTC", found.nvrtc, lack, nvrtc)
    yield answer("kernels", found.built, lack, show=lambda seconds: f"built in {seconds:.2f} s")
    yield answer("kernel cache", found.cache, lack)
    yield _implementation(facts, asked)


def _implementation(facts: Facts, asked: Asked) -> Row:
    """What `gpu.kernels` comes to."""
    name, wanted, mover = "gpu.kernels", asked.config.gpu.kernels, facts.mover.value
    if mover is None:
        # Without a device there is nothing to say, and `gpu.device` has failed already.
        verdict: Verdict = "fail" if facts.gpu.device.value or wanted == "on" else "info"
        hint = facts.mover.hint or "an engine would not open here now: see the cause"
        return Row(name, f"{wanted}: {facts.mover.cause}", verdict, hint)
    value = f"{wanted}: pages are copied by {mover.name}" + (f", since {mover.cause}" if mover.cause else "")
    data = {"implementation": mover.name, "cause": mover.cause}
    if mover.name == "copy_engine" and wanted == "auto":
        return Row(name, value, "warn", facts.kernels.built.hint, data)
    return Row(name, value, "ok" if mover.name == "cuda" else "info", data=data)
