"""Kernels of csrc/, compiled when an engine opens by cuda-core, which calls NVRTC. The cubins are kept on disk."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from gdscache.cuda.driver import Driver
from gdscache.errors import GdsCacheError, KernelUnavailableError
from gdscache.runtime.files import user_cache, write_whole

INSTALL = "install gdscache[cuda13] or gdscache[cuda12], as torch's CUDA version is"

Function = tuple[int, object]
"""A compiled kernel: its CUkernel, and the object that keeps it loaded."""


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


def find_compiler() -> CudaCore:
    """The installed cuda-core. Raises `KernelUnavailableError` if there is none."""
    try:
        found = importlib.util.find_spec("cuda.core")  # `cuda` alone proves nothing: others put parts into it
    except (ImportError, ValueError):  # ValueError: it is None in sys.modules
        found = None
    if found is None:
        raise KernelUnavailableError("cuda-core is not installed", INSTALL)
    return CudaCore()


class CudaCore:
    """`cuda.core.Program`, and a directory of cubins. torch for CUDA brings the cuda-bindings and NVRTC it needs."""

    def __init__(self) -> None:
        self.version = importlib.metadata.version("cuda-core")

    def nvrtc(self) -> tuple[int, int]:
        """The version of NVRTC. Raises the library's error if there is none."""
        from cuda.bindings import nvrtc

        code, major, minor = nvrtc.nvrtcVersion()
        if int(code):
            raise RuntimeError(f"nvrtcVersion answered {int(code)}")
        return int(major), int(minor)

    def load(self, source: Path, macros: Mapping[str, str], device: torch.device) -> Callable[[str], Function]:
        """Compile `source`, or take it from the cache; the result finds a kernel by its name."""
        from cuda.core import ObjectCode

        major, minor = torch.cuda.get_device_capability(device)
        module = ObjectCode.from_cubin(self._kept(source, macros, f"sm_{major}{minor}"), name=source.name)

        def function(name: str) -> Function:
            kernel = module.get_kernel(name)
            return int(kernel.handle), kernel

        return function

    def compile(self, source: Path, macros: Mapping[str, str], arch: str) -> tuple[bytes, str]:
        """The cubin for `arch` (`sm_90`), and the compiler's output. Needs no GPU and no driver."""
        from io import StringIO

        from cuda.core import Program, ProgramOptions

        options = ProgramOptions(
            name=source.name,
            std="c++17",
            arch=arch,
            include_path=str(source.parent),
            define_macro=list(macros.items()) or None,
            split_compile=0 if self.nvrtc() >= (12, 9) else None,  # a source's kernels on several cores
        )
        log = StringIO()
        compiled = Program(source.read_text(encoding="utf-8"), "c++", options).compile("cubin", logs=log)
        return bytes(compiled.code), log.getvalue()

    def _kept(self, source: Path, macros: Mapping[str, str], arch: str) -> bytes:
        """The cubin from the cache, if it matches the digest before it; else compiled now and cached."""
        key = repr((self.version, self.nvrtc(), source.read_bytes(), sorted(macros.items()), arch))
        name = f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.cubin"
        with contextlib.suppress(OSError):
            kept = (user_cache() / "kernels" / name).read_bytes()
            if hashlib.sha256(kept[32:]).digest() == kept[:32]:
                return kept[32:]
        cubin, _ = self.compile(source, macros, arch)
        with contextlib.suppress(OSError):  # it is compiled again next time
            directory = user_cache() / "kernels"
            directory.mkdir(parents=True, exist_ok=True)
            write_whole(directory / name, hashlib.sha256(cubin).digest() + cubin)
        return cubin


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
