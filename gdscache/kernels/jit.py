"""Kernels of csrc/, compiled by NVRTC through cupy when an engine opens. Only here and in the doctor is cupy imported.

cupy keeps compiled kernels on disk and names them after the source file, the options and NVRTC's version, but not after
the headers that the source includes: a digest of all of csrc/ is therefore among the options.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import stat
import struct
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from gdscache.cuda.driver import Driver
from gdscache.errors import KernelUnavailableError


def _find_sources() -> Path:
    """csrc/: installed as `gdscache.csrc`, or beside the package in a source tree that is on the path."""
    spec = importlib.util.find_spec("gdscache.csrc")
    if spec is not None and spec.origin is not None:
        return Path(spec.origin).parent
    return Path(__file__).resolve().parents[2] / "csrc"


SOURCES = _find_sources()

_environment = threading.Lock()


def source_digest(sources: Path = SOURCES) -> str:
    """16 hex digits that change with any byte, name or number of the files of csrc/."""
    digest = hashlib.sha256()
    for path in sorted(p for p in sources.iterdir() if p.suffix in (".cu", ".cuh")):
        content = path.read_bytes()
        digest.update(f"{path.name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()[:16]


def options(sources: Path = SOURCES, **macros: int | str) -> tuple[str, ...]:
    """What NVRTC is called with; `macros` specialise a kernel."""
    defines = (f"-D{name}={value}" for name, value in sorted(macros.items()))
    return ("-std=c++17", f"-I{sources}", f"-DGDSCACHE_SOURCE=0x{source_digest(sources)}ULL", *defines)


def parallel(version: tuple[int, int]) -> tuple[str, ...]:
    """Options that let this version of NVRTC compile the kernels of a source on several cores, where it can."""
    return ("--split-compile=0",) if version >= (12, 9) else ()


class Kernel:
    """One compiled kernel. `form` has the C types of its arguments, as `struct` names them.

    Launched by the driver, since cupy takes three times as long.
    """

    def __init__(self, function: Any, driver: Driver, form: str) -> None:
        self._function = function  # keeps the module loaded
        self.pointer = int(function.kernel.ptr)
        """The CUfunction."""
        self._driver = driver
        self._form = struct.Struct(f"@{form}")

    def launch(self, grid: int, block: int, arguments: Sequence[Any], stream: torch.cuda.Stream) -> None:
        """Queue on `stream`, of the kernel's device. An empty grid is no launch. Arguments are not checked here."""
        if grid > 0:
            self._driver.launch(self.pointer, grid, block, self._form.pack(*arguments), stream.cuda_stream)


def build(
    source: str, forms: Mapping[str, str], device: torch.device, sources: Path = SOURCES, **macros: int | str
) -> dict[str, Kernel]:
    """Kernels of csrc/`source` for one GPU: from cupy's cache on disk, or compiled now (under a second).

    `forms`: the C types of each kernel's arguments by its name, as `struct` names them (`P` a pointer, `I` a u32).

    Raises `KernelUnavailableError` with the cause: no cupy, no driver, no NVRTC, a compile error.
    """
    with cache_directory():
        try:
            import cupy

            every = (*options(sources, **macros), *parallel(cupy.cuda.nvrtc.getVersion()))
            with torch.cuda.device(device):
                module = cupy.RawModule(code=(sources / source).read_text(encoding="utf-8"), options=every)
                driver = Driver(device)
                return {name: Kernel(module.get_function(name), driver, form) for name, form in forms.items()}
        except Exception as error:
            raise KernelUnavailableError(f"cannot build {source}: {_first_lines(error)}", _hint(error)) from error


def _first_lines(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' | '.join(lines[:4])}"


def _hint(error: Exception) -> str:
    if isinstance(error, ImportError):
        return "install gdscache[cuda13] or gdscache[cuda12], as torch's CUDA version is"
    return "see the cause above; gpu.kernels: off chooses the copies by torch without asking"


@contextlib.contextmanager
def cache_directory() -> Iterator[None]:
    """Where cupy may write: its own choice, or a directory of this user below the system's temporary one.

    cupy cannot even be imported where it can make no cache directory (a service without a home).
    """
    with _environment:
        if "CUPY_CACHE_DIR" in os.environ or _usable(os.path.expanduser("~/.cupy/kernel_cache")):
            yield
            return
        os.environ["CUPY_CACHE_DIR"] = str(private_directory())
        try:
            yield
        finally:
            del os.environ["CUPY_CACHE_DIR"]


def _usable(path: str) -> bool:
    """Whether files can be made there; tried, since permissions alone do not tell (root, network file systems)."""
    try:
        if os.path.isabs(path):  # else no home is known for this user
            os.makedirs(path, exist_ok=True)
            with tempfile.TemporaryFile(dir=path):
                return True
    except OSError:
        return False
    return False


def private_directory() -> Path:
    """A directory below the system's temporary one that only this user can write. Raises `KernelUnavailableError`."""
    try:
        path = Path(tempfile.gettempdir()) / f"gdscache-{os.getuid()}"
        path.mkdir(mode=0o700, exist_ok=True)
        found = path.lstat()
    except OSError as error:
        raise KernelUnavailableError(f"no place for compiled kernels: {error}", "set CUPY_CACHE_DIR") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise KernelUnavailableError(f"{path} is not a directory of ours alone", "set CUPY_CACHE_DIR")
    return path
