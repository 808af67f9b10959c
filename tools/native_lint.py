"""Check csrc by clang-format (.clang-format), and csrc/host without its tests by clang-tidy (.clang-tidy).

    python tools/native_lint.py

Uses the tools beside this Python: `make lint` installs them. Sources for Python are read with its headers.
"""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from native_build import BINDINGS, INCLUDE, ROOT, bindings, plain_sources, python

TOOLS = Path(sys.executable).parent
SUFFIXES = (".cc", ".h", ".cu", ".cuh")


def complaints(command: list[str]) -> str:
    """The output of a command that fails, else ""."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr if done.returncode else ""


def main() -> int:
    known = bindings(python())[1]
    files = [str(path) for path in sorted((ROOT / "csrc").rglob("*")) if path.suffix in SUFFIXES]
    commands = [[str(TOOLS / "clang-format"), "--dry-run", "-Werror", *files]]
    for source in (*sorted(BINDINGS.glob("*.cc")), *plain_sources()):  # the longest first
        flags = ("-std=c++20", INCLUDE, *(known if source.parent == BINDINGS else ()))
        commands.append([str(TOOLS / "clang-tidy"), "--quiet", str(source), "--", *flags])
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        found = [text for text in pool.map(complaints, commands) if text]
    print("".join(found), end="")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
