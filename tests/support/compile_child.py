"""Compiles CUDA sources with the NVRTC of one directory, through cupy. No GPU and no driver are needed.

usage: compile_child.py DIRECTORY MAJOR, with DIRECTORY (of `tools/install_gpu.py --only-nvrtc MAJOR`) on PYTHONPATH.

Reads a JSON list of {name, source, options, arch}. Writes a JSON line {version, cupy}, then one for each compilation
as soon as it is done: {kernels, log}, with what the cubin holds (null: there is none) and what the compiler said.
"""

from __future__ import annotations

import ctypes
import json
import re
import sys
from pathlib import Path
from typing import Any


def load_nvrtc(directory: Path, major: int) -> Any:
    """cupy's wrapper of NVRTC over the library in `directory`, and no other: torch may have brought one as well."""
    (library,) = directory.glob(f"nvidia/*/lib/libnvrtc.so.{major}")
    (builtins,) = library.parent.glob(f"libnvrtc-builtins.so.{major}.*")  # not every version finds its own
    for path in (builtins, library):
        ctypes.CDLL(str(path))  # what is loaded is not looked for elsewhere
    from cupy.cuda import nvrtc

    return nvrtc


def compile_one(nvrtc: Any, job: dict[str, Any]) -> dict[str, Any]:
    """What came of one job: see above."""
    # As cupy.RawModule calls it, but without the directories of cupy's own headers: csrc/ includes nothing of them.
    options = (*job["options"], "-ftz=true", f"-arch=sm_{job['arch']}", "--device-as-default-execution-space")
    program = nvrtc.createProgram(job["source"], job["name"], (), ())
    try:
        nvrtc.compileProgram(program, options)
    except nvrtc.NVRTCError as error:
        return {"kernels": None, "log": f"{error}\n{nvrtc.getProgramLog(program)}"}
    else:
        return {"kernels": kernels(nvrtc.getCUBIN(program)), "log": nvrtc.getProgramLog(program)}
    finally:
        nvrtc.destroyProgram(program)


def kernels(cubin: bytes) -> list[str]:
    """The names of the kernels in a cubin. It is an ELF file, with a section `.text.<name>` for each."""
    assert cubin.startswith(b"\x7fELF")
    return sorted({name.decode() for name in re.findall(rb"\0\.text\.(\w+)(?=\0)", cubin)})


def main(directory: Path, major: int) -> None:
    jobs = json.load(sys.stdin)
    nvrtc = load_nvrtc(directory, major)
    import cupy

    print(json.dumps({"version": nvrtc.getVersion(), "cupy": cupy.__file__}), flush=True)
    for job in jobs:
        print(json.dumps(compile_one(nvrtc, job)), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
