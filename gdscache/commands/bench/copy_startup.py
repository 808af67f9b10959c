"""A process's one-time costs, each in a fresh interpreter: the kernel build, the page-locking of a pool."""

from __future__ import annotations

import importlib
import tempfile
import time
from pathlib import Path
from typing import Any

from gdscache.commands.bench.measure import Series, child, paired, target, turns
from gdscache.commands.console import Progress, silent

FIRST_BUILD_TARGET = 1.0  # seconds
LATER_BUILD_TARGET = 0.1
PINNING_TARGET = 0.5  # as a share of torch's time


def kernel_build(rounds: int, progress: Progress = silent) -> dict[str, Any]:
    """Seconds until the page kernels of some planes are launchable: with nothing cached, and in the next process.
    Imports of torch and the compiler are excluded; `with_import_seconds` includes the compiler's."""
    found: dict[str, list[dict[str, float]]] = {"first": [], "later": []}
    for number in range(rounds):
        with tempfile.TemporaryDirectory(prefix="gdscache-bench-") as name:
            caches = {"CUDA_CACHE_PATH": str(Path(name) / "driver")}
            caches |= {variable: str(Path(name) / "ours") for variable in ("CUPY_CACHE_DIR", "GDSCACHE_CACHE_DIR")}
            for kind, measured in found.items():
                progress(number, rounds, f"kernel build: {kind} process")
                measured.append(child("copy_startup", "build_kernels", environment=caches))
    progress(rounds, rounds, "kernel build")
    report: dict[str, Any] = {}
    for kind, limit in (("first", FIRST_BUILD_TARGET), ("later", LATER_BUILD_TARGET)):
        seconds = Series(tuple(run["seconds"] for run in found[kind]))
        whole = Series(tuple(run["with_import_seconds"] for run in found[kind]))
        report[kind] = {
            "seconds": seconds.describe(),
            "with_import_seconds": whole.describe(),
            **target(seconds.median, limit, at_least=False),
        }
    return report


def pinning(nbytes: int, pairs: int, progress: Progress = silent) -> dict[str, Any]:
    """Seconds to allocate `nbytes` of zeroed, page-locked host memory: our pool, in turns with torch's."""
    done = 0

    def seconds(way: str) -> float:
        nonlocal done
        progress(done, 2 * pairs, f"pinning: {way}")
        done += 1
        return float(child("copy_startup", "pin", way, nbytes)["seconds"])

    ours, other = turns(lambda: seconds("gdscache"), lambda: seconds("torch"), pairs)
    progress(done, 2 * pairs, "pinning")
    against = paired(ours, other)
    return {
        "bytes": nbytes,
        "seconds": Series(tuple(ours)).describe(),
        "torch_seconds": Series(tuple(other)).describe(),
        **against,
        **target(against["ratio"], PINNING_TARGET, at_least=False),
    }


# -- in the children ---------------------------------------------------------------------------------------------------


def build_kernels() -> dict[str, float]:
    """Build the page kernels of a small pool. Returns the time."""
    import torch

    from gdscache.commands.bench.copy_cells import GQA
    from gdscache.commands.bench.copy_gpu import require_gpu
    from gdscache.kernels.compilers import find_compiler
    from gdscache.kernels.cuda import PageKernels
    from gdscache.pages.planes import PagedPlanes

    device = require_gpu()
    planes = PagedPlanes.allocate(GQA.layout(16), 4, device)
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    importlib.import_module(find_compiler().module)
    imported = time.perf_counter()
    PageKernels(planes)
    torch.cuda.synchronize(device)
    end = time.perf_counter()
    return {"seconds": end - imported, "with_import_seconds": end - start}


def pin(way: str, nbytes: int) -> dict[str, float]:
    """Allocate page-locked memory one way. Returns the time."""
    import torch

    from gdscache.commands.bench.copy_gpu import require_gpu
    from gdscache.cuda.host_memory import HostBuffer

    device = require_gpu()
    torch.zeros(1, device=device)
    HostBuffer(4096, "on").close()
    torch.empty(4096, dtype=torch.uint8, pin_memory=True)
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    if way == "torch":
        torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        elapsed = time.perf_counter() - start
    else:
        buffer = HostBuffer(nbytes, "on")
        elapsed = time.perf_counter() - start
        buffer.close()
    return {"seconds": elapsed}
