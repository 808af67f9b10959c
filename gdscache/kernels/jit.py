"""Kernels of csrc/, compiled when an engine opens."""

from __future__ import annotations

import hashlib
import importlib.util
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from gdscache.cuda.driver import Driver
from gdscache.errors import GdsCacheError, KernelUnavailableError
from gdscache.kernels.compiler import INSTALL, Function, find_compiler


def _find_sources() -> Path:
    """csrc/: installed as `gdscache.csrc`, or beside the package in a source tree on the path."""
    spec = importlib.util.find_spec("gdscache.csrc")
    if spec is not None and spec.origin is not None:
        return Path(spec.origin).parent
    return Path(__file__).resolve().parents[2] / "csrc"


SOURCES = _find_sources()


def source_digest(sources: Path = SOURCES) -> str:
    """16 hex digits that change with any byte, name or number of the files of csrc/."""
    digest = hashlib.sha256()
    for path in sorted(p for p in sources.iterdir() if p.suffix in (".cu", ".cuh")):
        content = path.read_bytes()
        digest.update(f"{path.name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()[:16]


def defines(sources: Path = SOURCES, **macros: int | str) -> dict[str, str]:
    """The macros of a source: the digest of all sources, and `macros`, which specialise a kernel."""
    return {
        "GDSCACHE_SOURCE": f"0x{source_digest(sources)}ULL",
        **{name: str(value) for name, value in sorted(macros.items())},
    }


class Kernel:
    """One compiled kernel. `form`: the C types of its arguments, in `struct`'s letters.

    Launched by the driver with packed arguments: cuda-core's own launches take three times as long.
    """

    def __init__(self, function: Function, driver: Driver, form: str) -> None:
        self.pointer, self._module = function
        """`pointer`: the driver's handle."""
        self._driver = driver
        self._form = struct.Struct(f"@{form}")

    def launch(self, grid: int, block: int, arguments: Sequence[Any], stream: torch.cuda.Stream) -> None:
        """Queue on `stream`, of the kernel's device. An empty grid is no launch. Arguments are not checked here."""
        if grid > 0:
            self._driver.launch(self.pointer, grid, block, self._form.pack(*arguments), stream.cuda_stream)


def build(
    source: str, forms: Mapping[str, str], device: torch.device, sources: Path = SOURCES, **macros: int | str
) -> dict[str, Kernel]:
    """Kernels of csrc/`source` for one GPU: from a cache on disk, or compiled now (under a second).

    `forms`: the C types of each kernel's arguments by its name, in `struct`'s letters (`P` a pointer, `I` a u32).
    Raises `KernelUnavailableError` with the cause: no compiler, no driver, no NVRTC, a compile error.
    """
    try:
        function = find_compiler().load(sources / source, defines(sources, **macros), device)
        driver = Driver(device)
        return {name: Kernel(function(name), driver, form) for name, form in forms.items()}
    except Exception as error:
        raise KernelUnavailableError(f"cannot build {source}: {_first_lines(error)}", _hint(error)) from error


def _first_lines(error: Exception) -> str:
    if isinstance(error, GdsCacheError):
        return error.message
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' | '.join(lines[:4])}"


def _hint(error: Exception) -> str:
    if isinstance(error, KernelUnavailableError):
        return error.hint
    if isinstance(error, ImportError):
        return INSTALL
    return "see the cause above; gpu.kernels: off chooses the copy engine without asking"
