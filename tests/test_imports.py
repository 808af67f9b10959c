"""What importing costs: no GPU library, no toolchain, little time; and which modules do without torch."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

import gdscache

PACKAGE = Path(gdscache.__file__).parent
OPTIONAL = ["cupy", "kvikio", "nixl", "transformers", "matplotlib", "mooncake", "pylibcudf", "numba", "typer", "rich"]
LIGHT = [
    "layout",
    "keys",
    "policy",
    "config",
    "errors",
    "checksum",
    "sizes",
    "tiers.base",
    "tiers.index",
    "tiers.manager",
]


def python(code: str, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **env}, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def test_import_takes_no_optional_library_in() -> None:
    out = python(f"import sys, gdscache; print([m for m in {OPTIONAL} if m in sys.modules])")
    assert out.strip() == "[]"


def test_import_works_where_no_optional_library_is() -> None:
    blocked = "".join(f"sys.modules[{name!r}] = None;" for name in OPTIONAL)
    assert python(f"import sys;{blocked} import gdscache; print(gdscache.CacheEngine.__name__)").split() == [
        "CacheEngine"
    ]


def test_import_starts_nothing() -> None:
    code = (
        "import os, threading, torch; fds = set(os.listdir('/proc/self/fd')); import logging;"
        "handlers = list(logging.root.handlers); import gdscache;"
        "print(threading.active_count(), set(os.listdir('/proc/self/fd')) - fds, logging.root.handlers == handlers,"
        " torch.cuda.is_initialized())"
    )
    assert python(code).split() == ["1", "set()", "True", "False"]


@pytest.mark.parametrize("name", LIGHT)
def test_arithmetic_and_bookkeeping_need_no_torch(name: str) -> None:
    """`import gdscache.x` runs `gdscache/__init__.py`, which needs torch; an empty package of that path does not."""
    code = (
        "import importlib, sys, types; sys.modules['torch'] = None;"
        f"package = types.ModuleType('gdscache'); package.__path__ = [{str(PACKAGE)!r}];"
        "sys.modules['gdscache'] = package;"
        f"importlib.import_module('gdscache.{name}');"
        f"print([m for m in {OPTIONAL[:6]} if m in sys.modules])"
    )
    assert python(code).strip() == "[]"


def test_import_is_fast_beyond_torch() -> None:
    code = "import time, torch, numpy; start = time.perf_counter(); import gdscache; print(time.perf_counter() - start)"
    seconds = statistics.median(float(python(code)) for _ in range(3))
    assert seconds < 0.8, f"import gdscache takes {seconds:.2f} s beyond torch"
