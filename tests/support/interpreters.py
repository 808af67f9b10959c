"""Code in a Python of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import gdscache

PACKAGE = Path(gdscache.__file__).parent


def python(code: str, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **env}, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout
