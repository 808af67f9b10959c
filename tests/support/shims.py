"""Small libraries in C that stand before those of the system (LD_PRELOAD), and processes under them."""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.support.places import ROOT, SUPPORT


def built_once(name: str, sources: Sequence[Path], command: Callable[[], Sequence[object]]) -> Path:
    """A library that `command` makes, once for these sources."""
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:16]
    path = ROOT / "build" / "tests" / f"{name}-{digest}.so"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_suffix(f".{os.getpid()}")
        subprocess.run([*map(str, command()), "-o", str(fresh)], check=True)
        fresh.replace(path)
    return path


@functools.cache
def shim(name: str) -> Path:
    """`NAME.c` of this folder as a library, built once for that source. Skips where there is no compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("g++")
    if compiler is None:
        pytest.skip(f"no C compiler to build {name}.c with")
    source = SUPPORT / f"{name}.c"
    return built_once(name, [source], lambda: [compiler, "-shared", "-fPIC", "-O1", "-x", "c", source, "-ldl"])


def under(shims: list[Path], script: str, *arguments: object, seconds: float = 500) -> str:
    """What a script of this folder, or `-c`, prints under these shims; it has to end well."""
    command = [sys.executable, script if script == "-c" else SUPPORT / script, *map(str, arguments)]
    environment = os.environ | {"LD_PRELOAD": ":".join(map(str, shims)), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=environment, check=False)
    assert done.returncode == 0, f"status {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    return done.stdout
