"""The compiler of CUDA sources: cuda-core, which calls NVRTC and is imported only here. The cubins are kept on disk."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from gdscache.errors import KernelUnavailableError
from gdscache.runtime.files import user_cache, write_whole

INSTALL = "install gdscache[cuda13] or gdscache[cuda12], as torch's CUDA version is"

Function = tuple[int, object]
"""A compiled kernel: its CUkernel, and the object that keeps it loaded."""


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
