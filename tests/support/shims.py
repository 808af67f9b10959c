"""Small libraries in C that stand before those of the system (LD_PRELOAD), for processes under test."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.places import SUPPORT


def shim(name: str, directory: Path) -> Path:
    """`NAME.c` of this folder as a library. Skips where there is no compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("g++")
    if compiler is None:
        pytest.skip(f"no C compiler to build {name}.c with")
    path = directory / f"{name}.so"
    source = SUPPORT / f"{name}.c"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-x", "c", "-o", path, source, "-ldl"], check=True)
    return path
