"""Stand-ins for CUDA's and cuFile's libraries, built from sources, and a GPU's memory that is the host's.

Processes import this that must be quick to start: no torch here.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import importlib.util
import mmap
import shutil
import subprocess
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self, TypeVar

from tests.support.places import ROOT, SUPPORT

SOURCES = SUPPORT / "stand_ins"
_HOST = ROOT / "csrc" / "host"
CUFILE = _HOST / "tests" / "fake_cufile.cc"
ANY = -1  # offset


class Fault(enum.IntEnum):
    """As in fake_cufile.h."""

    ERROR = 1
    ERRNO = 2
    SHORT = 3
    MORE = 4
    LIE = 5
    WAIT = 6
    FEWER = 7


class Call(enum.IntEnum):
    """What may be refused, as in fake_cufile.h."""

    DRIVER = 0
    HANDLE = 1
    BUFFER = 2


HANG = -1  # in place of an error's code: the call does not return
NO_DRIVER, NOT_ON_THIS_FILE, TOO_MUCH_MEMORY, IO_FAILED = 5001, 5027, 5016, 5011  # errors of cuFile


def missing(*modules: str) -> str:
    """Why the stand-ins cannot be used here, or an empty string."""
    for module in modules:
        if importlib.util.find_spec(module) is None:
            return f"{module} is not installed"
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        pass
    else:
        return "a real libcuda.so.1 is here, which the stand-in would hide"
    return "" if _compiler("cc") and _compiler("c++") else "no compiler for the stand-ins"


def build(folder: Path) -> None:
    for name, source, options in (
        ("libcuda.so.1", SOURCES / "libcuda.c", ["-DSTAND_IN_GPU"]),
        ("libcudart.so.13", SOURCES / "libcudart.c", [f"-Wl,--version-script={SOURCES / 'libcudart.map'}"]),
        ("libcufile.so.0", CUFILE, ["-std=c++20", "-pthread", f"-I{_HOST}"]),
    ):
        compiler = _compiler("c++" if source.suffix == ".cc" else "cc")
        command = [compiler, "-shared", "-fPIC", f"-Wl,-soname,{name}", *options]
        subprocess.run([*command, "-o", folder / name, source], check=True, timeout=60)


def _compiler(name: str) -> str | None:
    return shutil.which(name) or shutil.which({"cc": "gcc", "c++": "g++"}[name])


class GpuBytes:
    """A flat contiguous uint8 CUDA tensor, as far as transports look at one; `memory` is its bytes."""

    dtype = "torch.uint8"
    device = types.SimpleNamespace(type="cuda", index=0)

    def __init__(self, memory: memoryview) -> None:
        self.memory = memory
        self.nbytes = memory.nbytes
        self.shape = (self.nbytes,)

    def dim(self) -> int:
        return 1

    def is_contiguous(self) -> bool:
        return True

    def numel(self) -> int:
        return self.nbytes

    def data_ptr(self) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self.memory))

    def __getitem__(self, part: slice) -> Self:
        return type(self)(self.memory[part])

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        pointer = (self.data_ptr(), False)
        return {"shape": self.shape, "typestr": "|u1", "data": pointer, "strides": None, "version": 3}


Kind = TypeVar("Kind", bound=GpuBytes)


class FakeCufile:
    """What the stand-in for cuFile can be told, and says."""

    def __init__(self, cufile: ctypes.CDLL) -> None:
        self.cufile, long = cufile, ctypes.c_long
        cufile.fake_cufile_fault.argtypes = [ctypes.c_int, ctypes.c_int, long, long, ctypes.c_int]
        for name in ("calls", "moves", "living"):
            cufile[f"fake_cufile_{name}"].restype = long

    def fault(self, write: bool, kind: Fault, value: int = 0, offset: int = ANY, times: int = 1) -> None:
        """What happens to the next `times` reads (or writes) at that offset."""
        assert self.cufile.fake_cufile_fault(int(write), int(kind), value, offset, times) == 0

    def refuse(self, call: Call, code: int) -> None:
        """These calls fail with that code, or hang."""
        self.cufile.fake_cufile_refuse(int(call), code)

    def release(self) -> None:
        self.cufile.fake_cufile_release()

    @contextlib.contextmanager
    def well_after(self) -> Iterator[None]:
        try:
            yield
        finally:
            self.release()

    def count_in(self, path: Path) -> None:
        """Count reads and writes in that file as the nvidia-fs driver does."""
        self.cufile.fake_cufile_stats(str(path).encode())

    def moves(self) -> int:
        return sum(int(self.cufile.fake_cufile_moves(op)) for op in (0, 1))

    def waiting(self) -> int:
        return int(self.cufile.fake_cufile_waiting())

    def living(self) -> int:
        return int(self.cufile.fake_cufile_living())

    def calls(self, call: Call) -> int:
        return int(self.cufile.fake_cufile_calls(int(call)))


class StandIns(FakeCufile):
    """The libraries of `build`, in this process for good: load them before kvikio or NIXL, which then find these."""

    def __init__(self, folder: Path) -> None:
        self._cuda, _, cufile = (
            ctypes.CDLL(str(folder / name), ctypes.RTLD_GLOBAL)
            for name in ("libcuda.so.1", "libcudart.so.13", "libcufile.so.0")
        )
        super().__init__(cufile)

    def gpu_memory(self, nbytes: int, kind: type[Kind] = GpuBytes) -> Kind:
        return self.announce(kind(memoryview(mmap.mmap(-1, nbytes))))

    def announce(self, gpu: Kind) -> Kind:
        """This is GPU memory: at most 64 times a process."""
        self._cuda.stand_in_gpu_memory(ctypes.c_void_p(gpu.data_ptr()), ctypes.c_size_t(gpu.nbytes))
        return gpu
