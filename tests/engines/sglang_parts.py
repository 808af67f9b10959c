"""Where the environment with SGLang is."""

from __future__ import annotations

import os
from pathlib import Path

HERE = Path(__file__).parent

ROOT = HERE.parents[1]

PYTHON = Path(os.environ.get("GDSCACHE_SGLANG_PYTHON", ROOT / ".venv-sglang/bin/python"))
