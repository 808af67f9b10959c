"""The CUDA kernels' compiler and build, and the page copier that an engine would use."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch

from gdscache.commands.doctor.facts import Asked, Facts
from gdscache.commands.doctor.report import Row, Verdict, answer, comes_to
from gdscache.kernels import jit
from gdscache.kernels.compiler import CudaCore
from gdscache.kernels.copies import open_copies
from gdscache.kernels.cuda import FORMS, SOURCE
from gdscache.pages.planes import PagedPlanes


def nvrtc_version(compiler: CudaCore) -> str:
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
