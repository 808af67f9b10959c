"""Build the sdist and the wheels of both architectures, and try this machine's in a new environment.

    python tools/wheels.py dist

The wheels are built from the sdist, so a file that the sdist lacks is missed at once; ziglang compiles for both. The
new environment has what gdscache itself requires, under tools/constraints.txt, and no extra; there, away from the
tree, the command answers, the native library computes, and an example runs.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import venv
from pathlib import Path

from native_build import WHEELS

ROOT = Path(__file__).resolve().parent.parent
TREE = ("gdscache", "configs", "csrc", "tools", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE")


def run(*command: str | Path, cwd: Path) -> None:
    print("  " + " ".join(str(part) for part in command), flush=True)
    subprocess.run([str(part) for part in command], cwd=cwd, check=True)


def build(target: Path, work: Path) -> Path:
    """The sdist and the wheels into `target`, from a copy of the tree, since setuptools writes beside the sources.

    The wheel of this machine's architecture.
    """
    source, dist = work / "source", work / "dist"
    source.mkdir()
    for name in TREE:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        else:
            shutil.copy(ROOT / name, source)
    command = (sys.executable, "-m", "build", "--no-isolation", "--outdir", dist)
    run(*command, "--sdist", source, cwd=work)
    (sdist,) = dist.iterdir()
    with tarfile.open(sdist) as packed:
        packed.extractall(work, filter="data")
    unpacked = work / sdist.name.removesuffix(".tar.gz")
    for platform in WHEELS:
        run(*command, "--wheel", f"-C--build-option=--plat-name={platform}", unpacked, cwd=work)
    target.mkdir(parents=True, exist_ok=True)
    built = [Path(shutil.copy(file, target)) for file in sorted(dist.iterdir())]
    ours = [file for file in built if file.name.endswith(f"_{os.uname().machine}.whl")]
    (wheel,) = ours
    return wheel


def try_out(wheel: Path, work: Path) -> None:
    """Install the wheel into a new environment; the command and the first example run there."""
    venv.create(work / "env", with_pip=True)
    python = work / "env" / "bin" / "python"
    run(python, "-m", "pip", "install", "-q", "-c", ROOT / "tools" / "constraints.txt", wheel, cwd=work)
    run(work / "env" / "bin" / "gdscache", "--version", cwd=work)
    run(work / "env" / "bin" / "gdscache", "config", "init", "llama3_8b", cwd=work)  # the wheel has configs/
    run(python, "-c", "from gdscache.native.library import library; print(library().best_arm())", cwd=work)
    example = Path(shutil.copy(ROOT / "examples" / "quickstart.py", work))
    run(python, "-W", "error", example, cwd=work)


def main() -> int:
    target = Path(sys.argv[1] if len(sys.argv) > 1 else "dist").resolve()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as work:
        try:
            try_out(build(target, Path(work)), Path(work))
        except subprocess.CalledProcessError as error:
            print(f"error: {error.cmd[0]} ended with status {error.returncode}", file=sys.stderr)
            return 1
    print(f"{', '.join(sorted(file.name for file in target.iterdir()))}: {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
