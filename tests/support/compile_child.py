"""Compiles CUDA sources with the NVRTC of one directory, as the package does. Needs neither a GPU nor a driver.

usage: compile_child.py DIRECTORY MAJOR, with DIRECTORY (of `tools/install_gpu.py --only-nvrtc MAJOR`) on PYTHONPATH.

Reads a JSON list of {path, macros, arch}. Writes a JSON line {version, core}, then one for each compilation as soon as
it is done: {kernels, log}, with what the cubin holds (null: there is none) and what the compiler said.
"""

from __future__ import annotations

import ctypes
import json
import re
import sys
from pathlib import Path
from typing import Any


def load_nvrtc(directory: Path, major: int) -> None:
    """Load the NVRTC in `directory`, and no other: torch may have brought one as well."""
    (library,) = directory.glob(f"nvidia/*/lib/libnvrtc.so.{major}")
    (builtins,) = library.parent.glob(f"libnvrtc-builtins.so.{major}.*")  # not every version finds its own
    for path in (builtins, library):
        ctypes.CDLL(str(path))  # what is loaded is not looked for elsewhere


def compile_one(compiler: Any, job: dict[str, Any]) -> dict[str, Any]:
    """What came of one job: see above."""
    try:
        cubin, log = compiler.compile(Path(job["path"]), job["macros"], f"sm_{job['arch']}")
    except Exception as error:  # noqa: BLE001  (whatever the compiler raises is the outcome)
        return {"kernels": None, "log": f"{type(error).__name__}: {error}"}
    return {"kernels": kernels(cubin), "log": log}


def kernels(cubin: bytes) -> list[str]:
    """The names of the kernels in a cubin. It is an ELF file, with a section `.text.<name>` for each."""
    assert cubin.startswith(b"\x7fELF")
    return sorted({name.decode() for name in re.findall(rb"\0\.text\.(\w+)(?=\0)", cubin)})


def main(directory: Path, major: int) -> None:
    jobs = json.load(sys.stdin)
    load_nvrtc(directory, major)
    import cuda.core

    from gdscache.kernels.jit import CudaCore

    compiler = CudaCore()
    print(json.dumps({"version": compiler.nvrtc(), "core": cuda.core.__file__}), flush=True)
    for job in jobs:
        print(json.dumps(compile_one(compiler, job)), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
