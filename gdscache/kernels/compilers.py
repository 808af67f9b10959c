"""The compilers of CUDA sources: cuda-core if installed, else CuPy. Both call NVRTC, and are imported only here.

cuda-core is small, and compiles only; this module keeps the cubins on disk. CuPy keeps compiled kernels itself. It
names them after the source file, the options and NVRTC's version, but not after the included headers, so a digest of
all of csrc/ is among the macros.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import os
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from gdscache.errors import KernelUnavailableError
from gdscache.runtime.files import user_cache, write_whole

INSTALL = "install gdscache[cuda13] or gdscache[cuda12], as torch's CUDA version is"

Function = tuple[int, object]
"""A compiled kernel: its CUfunction or CUkernel, which the driver launches alike, and the object that keeps it
loaded."""

_environment = threading.Lock()


class Compiler(Protocol):
    """Compiles a source for a device. `module`: the module that it imports, which takes a moment."""

    name: str
    module: str
    version: str

    def nvrtc(self) -> tuple[int, int]:
        """The version of NVRTC. Raises the library's error if there is none."""

    def cache(self) -> str:
        """The directory of compiled kernels. Raises `KernelUnavailableError` if none can be written."""

    def load(self, source: Path, macros: Mapping[str, str], device: torch.device) -> Callable[[str], Function]:
        """Compile `source`, or take it from the cache; the result finds a kernel by its name."""


def find_compiler() -> Compiler:
    """cuda-core if it is installed, else CuPy. Raises `KernelUnavailableError` if neither is.

    An installed compiler that does not work is not passed over: its error says why.
    """
    if _installed("cuda", "core"):
        return CudaCore()
    if _installed("cupy"):
        return Cupy()
    raise KernelUnavailableError("neither cuda-core nor CuPy is installed", INSTALL)


def _installed(name: str, part: str = "") -> bool:
    """Whether a module can be found. `cuda` alone proves nothing: other distributions put parts into it."""
    try:
        found = importlib.util.find_spec(name) is not None
        return found and (not part or importlib.util.find_spec(f"{name}.{part}") is not None)
    except (ImportError, ValueError):  # ValueError: it is None in sys.modules
        return False


class CudaCore:
    """`cuda.core.Program`, and a directory of cubins. torch for CUDA brings the cuda-bindings and NVRTC it needs."""

    name, module = "cuda-core", "cuda.core"

    def __init__(self) -> None:
        self.version = importlib.metadata.version("cuda-core")

    def nvrtc(self) -> tuple[int, int]:
        from cuda.bindings import nvrtc

        code, major, minor = nvrtc.nvrtcVersion()
        if int(code):
            raise RuntimeError(f"nvrtcVersion answered {int(code)}")
        return int(major), int(minor)

    def cache(self) -> str:
        wanted = os.path.join(user_cache(), "kernels")
        return wanted if _usable(wanted) else str(private_directory("GDSCACHE_CACHE_DIR"))

    def load(self, source: Path, macros: Mapping[str, str], device: torch.device) -> Callable[[str], Function]:
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
        file = Path(self.cache()) / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.cubin"
        with contextlib.suppress(OSError):
            kept = file.read_bytes()
            if hashlib.sha256(kept[32:]).digest() == kept[:32]:
                return kept[32:]
        cubin, _ = self.compile(source, macros, arch)
        with contextlib.suppress(OSError):
            write_whole(file, hashlib.sha256(cubin).digest() + cubin)
        return cubin


class Cupy:
    name, module = "cupy", "cupy"

    def __init__(self) -> None:
        with cache_directory():
            import cupy

        self.version = str(cupy.__version__)

    def nvrtc(self) -> tuple[int, int]:
        from cupy.cuda import nvrtc

        major, minor = nvrtc.getVersion()
        return major, minor

    def cache(self) -> str:
        with cache_directory():
            return str(Path(os.environ.get("CUPY_CACHE_DIR") or "~/.cupy/kernel_cache").expanduser())

    def load(self, source: Path, macros: Mapping[str, str], device: torch.device) -> Callable[[str], Function]:
        import cupy

        options = ["-std=c++17", f"-I{source.parent}", *(f"-D{name}={value}" for name, value in macros.items())]
        if self.nvrtc() >= (12, 9):
            options.append("--split-compile=0")
        with cache_directory(), torch.cuda.device(device):
            module: Any = cupy.RawModule(code=source.read_text(encoding="utf-8"), options=tuple(options))
            module.compile()

        def function(name: str) -> Function:
            with torch.cuda.device(device):
                found = module.get_function(name)
                return int(found.kernel.ptr), found

        return function


@contextlib.contextmanager
def cache_directory() -> Iterator[None]:
    """A block with a directory that cupy may write: its own choice, or this user's below the system's temporary one.

    cupy cannot even be imported without a cache directory (a service without a home).
    """
    with _environment:
        if "CUPY_CACHE_DIR" in os.environ or _usable(os.path.expanduser("~/.cupy/kernel_cache")):
            yield
            return
        os.environ["CUPY_CACHE_DIR"] = str(private_directory("CUPY_CACHE_DIR"))
        try:
            yield
        finally:
            del os.environ["CUPY_CACHE_DIR"]


def _usable(path: str) -> bool:
    """Whether files can be made there; tried, since permissions alone do not tell (root, network file systems)."""
    try:
        if os.path.isabs(path):  # else this user has no known home
            os.makedirs(path, exist_ok=True)
            with tempfile.TemporaryFile(dir=path):
                return True
    except OSError:
        return False
    return False


def private_directory(variable: str) -> Path:
    """A directory below the system's temporary one that only this user can write. `variable` names another place.

    Raises `KernelUnavailableError`.
    """
    try:
        path = Path(tempfile.gettempdir()) / f"gdscache-{os.getuid()}"
        path.mkdir(mode=0o700, exist_ok=True)
        found = path.lstat()
    except OSError as error:
        raise KernelUnavailableError(f"no place for compiled kernels: {error}", f"set {variable}") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise KernelUnavailableError(f"{path} is not a directory that only this user can use", f"set {variable}")
    return path
