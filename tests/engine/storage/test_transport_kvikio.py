"""kvikio on a machine without a driver."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.places import SUPPORT
from tests.support.transport_parts import has_libcuda


@pytest.mark.suite
def test_kvikio_host_path_with_a_stand_in_driver(tmp_path: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if importlib.util.find_spec("kvikio") is None:
        pytest.skip("kvikio is not installed")
    if has_libcuda():
        pytest.skip("a real libcuda.so.1 is here: the suite runs with that")
    if compiler is None:
        pytest.skip("no C compiler for the stand-in")
    library = tmp_path / "libcuda.so.1"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-o", library, SUPPORT / "stand_ins" / "libcuda.c"], check=True, timeout=60
    )
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    arguments = [
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        "not gpu",
        "-k",
        "TestKvikio",
        f"--basetemp={tmp_path / 'inner'}",
        str(Path(__file__).with_name("test_transports.py")),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments], env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout
    assert " passed" in done.stdout
