"""Where the environment with SGLang is, and how a process is started in it."""

from __future__ import annotations

import ast
import contextlib
import os
import subprocess
from pathlib import Path

import prometheus_client
import pytest

HERE = Path(__file__).parent

ROOT = HERE.parents[1]

PYTHON = Path(os.environ.get("GDSCACHE_SGLANG_PYTHON", ROOT / ".venv-sglang/bin/python"))
MISSING = f"no SGLang at {PYTHON}: `make engines` makes that environment, or set GDSCACHE_SGLANG_PYTHON"


def start(*arguments: str | Path, log: Path | None = None) -> subprocess.Popen[str]:
    """`log`: a file for what it says, in place of a pipe."""
    if not PYTHON.exists():
        pytest.skip(MISSING)
    paths = [ROOT, ROOT / "tests/support/stand_ins/sglang"]
    settings = {
        **os.environ,
        "PYTHONPATH": ":".join(map(str, paths)),
        "PYTHONUNBUFFERED": "1",
        "GDSCACHE_PROMETHEUS_CLIENT": str(Path(prometheus_client.__file__).parent),
        "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python",  # the other one is built for one version of torch
    }
    with contextlib.ExitStack() as ours:
        return subprocess.Popen(
            [str(PYTHON), *map(str, arguments)],
            stdout=subprocess.PIPE if log is None else ours.enter_context(log.open("w")),
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=settings,
            text=True,
        )


def cases_of(*files: Path) -> dict[str, Path]:
    """The names of the cases in these files, with the file of each."""
    return {
        node.name: file
        for file in files
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.FunctionDef) and any(getattr(d, "id", "") == "case" for d in node.decorator_list)
    }
