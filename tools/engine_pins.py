"""Check that gdscache installs beside the newest inference engines: their pins, from the package index.

    python tools/engine_pins.py

For each engine of engine_pins.toml uv resolves gdscache's own requirements together with the engine's for the same
distributions, for a Linux machine, and installs nothing. It reads the metadata of wheels, and downloads none.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PINS = ROOT / "tools" / "engine_pins.toml"
LIMIT_S = 120.0  # one resolution; it took 9 to 20 s
TARGET = ["--python-version", "3.12", "--python-platform", "x86_64-manylinux_2_34"]


def wishes() -> Iterator[tuple[str, list[str]]]:
    """Each engine (name and version), and gdscache's and its requirements together."""
    ours = list(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"])
    for engine in tomllib.loads(PINS.read_text(encoding="utf-8"))["engine"]:
        yield f"{engine['name']} {engine['version']}", ours + engine["requires"]


def main() -> int:
    failed = []
    for engine, requirements in wishes():
        command = [sys.executable, "-m", "uv", "pip", "compile", "-q", "-o", os.devnull, *TARGET, "-"]
        began = time.monotonic()
        try:
            wanted = "\n".join(requirements)
            done = subprocess.run(command, input=wanted, capture_output=True, text=True, timeout=LIMIT_S)
            status, why = done.returncode, done.stderr.strip()
        except subprocess.TimeoutExpired:
            status, why = -1, f"no answer within {LIMIT_S:.0f} s"
        print(f"{engine:18} {'resolves' if status == 0 else 'FAILED'}  {time.monotonic() - began:5.1f} s", flush=True)
        if status:
            print(why, file=sys.stderr)
            failed.append(engine)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
