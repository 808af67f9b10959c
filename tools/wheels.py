"""Build the sdist and the wheels of both architectures, and try this machine's in new environments.

    python tools/wheels.py dist [PYTHON...]

One wheel is for CPython 3.11, one with the stable ABI for 3.12 and later. Each is built by a Python of its version, in
an environment of its own: this one, a named one, or python3.11 and so on in the PATH or beside this one, with headers.
A wheel without such a Python is reported at the end as not built.

The wheels are built from the sdist, so a file that the sdist lacks is missed at once; ziglang compiles for both
architectures. This machine's are tried away from the tree. With this Python a new environment has the requirements of
gdscache itself, under tools/constraints.txt, and no extra; there the command answers, the native library computes, and
an example runs; then once more with the lowest versions that pyproject.toml allows, torch's aside. With every other
found Python, the native library computes beside numpy.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
from pathlib import Path

from native_build import WHEELS, ZIG

ROOT = Path(__file__).resolve().parent.parent
TREE = ("gdscache", "configs", "csrc", "tools", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE")
VERSIONS = [(3, minor) for minor in range(11, 20)]
KINDS = {"cp311-cp311": "3.11", "cp312-abi3": "3.12 or later"}
ASK = """
import ensurepip, os, sys, sysconfig
sound = sys.implementation.name == "cpython" and not sysconfig.get_config_var("Py_GIL_DISABLED")
headers = os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h"))
print(*sys.version_info[:2], int(sound and headers))
"""
COMPUTE = "from gdscache.native import best_arm, narrow_tokens; print(best_arm(), narrow_tokens(bytes(16)))"

Version = tuple[int, int]


def run(*command: str | Path, cwd: Path) -> None:
    print("  " + " ".join(str(part) for part in command), flush=True)
    subprocess.run([str(part) for part in command], cwd=cwd, check=True)


def version_of(python: str | Path) -> Version | None:
    """The version of an interpreter that can build and run our wheels; None if it cannot, or does not run."""
    try:
        asked = subprocess.run([python, "-c", ASK], capture_output=True, text=True, check=True).stdout.split()
    except (OSError, subprocess.CalledProcessError):  # pyenv has files for versions that are not chosen
        return None
    version = int(asked[0]), int(asked[1])
    return version if asked[2] == "1" and version in VERSIONS else None


def interpreters(named: list[str]) -> dict[Version, Path]:
    """One interpreter of each version, this one first."""
    base = Path(sys.base_prefix)
    folders = [base / "bin", *sorted(base.parent.glob("*/bin")), *map(Path, os.get_exec_path())]
    candidates = [folder / f"python{x}.{y}" for x, y in VERSIONS for folder in folders]
    found = dict[Version, Path]()
    asked = [Path(sys.executable), *map(Path, named)]
    for python in [*asked, *filter(Path.exists, candidates)]:
        if version := version_of(python):
            found.setdefault(version, python)
        elif python in asked:
            raise SystemExit(f"error: {python} is no CPython 3.11 or later with Python.h and ensurepip: take another")
    return found


def kind_of(version: Version) -> str:
    return "cp311-cp311" if version == (3, 11) else "cp312-abi3"


def environment(python: Path, folder: Path, *install: str | Path) -> Path:
    """A new environment with some packages installed. Returns its interpreter."""
    run(python, "-m", "venv", folder, cwd=folder.parent)
    pip = (folder / "bin" / "python", "-m", "pip", "install", "-q", "-c", ROOT / "tools" / "constraints.txt")
    run(*pip, *install, cwd=folder.parent)
    return folder / "bin" / "python"


def build(target: Path, work: Path, builders: dict[str, Path]) -> dict[str, Path]:
    """The sdist and the wheels into `target`, from a copy of the tree, since setuptools writes beside the sources.

    Returns the wheels of this machine's architecture, by kind.
    """
    source, dist = work / "source", work / "dist"
    source.mkdir()
    for name in TREE:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        else:
            shutil.copy(ROOT / name, source)
    needs = [*tomllib.loads((source / "pyproject.toml").read_text(encoding="utf-8"))["build-system"]["requires"], ZIG]
    unpacked: Path | None = None
    for kind, python in builders.items():
        own = environment(python, work / f"build-{kind}", "build", *needs)
        command = (own, "-m", "build", "--no-isolation", "--outdir", dist)
        if unpacked is None:
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
    return {kind: file for kind in builders for file in ours if f"-{kind}-" in file.name}


def lowest() -> list[str]:
    """The lowest version of each of gdscache's own requirements but torch, whose builds are gigabytes."""
    asked = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    return [one.replace(">=", "==") for one in asked if not one.startswith("torch")]


def try_out(python: Path, wheel: Path, work: Path) -> None:
    """Install the wheel into a new environment, and try it there; again with the lowest versions."""
    own = environment(python, work / "env", wheel)
    try_commands(own, work)
    run(own, "-m", "pip", "install", "-q", *lowest(), cwd=work)
    (work / "lowest").mkdir()
    try_commands(own, work / "lowest")


def try_commands(own: Path, work: Path) -> None:
    """The commands, a bench, README's ten lines and the first example."""
    run(own.with_name("gdscache"), "--version", cwd=work)
    shipped = subprocess.run(
        [own.with_name("gdscache"), "config", "print", "cpu_only"], capture_output=True, check=True
    )
    (work / "gdscache.yaml").write_bytes(shipped.stdout)  # the wheel has configs/
    run(own.with_name("gdscache"), "bench", "io", "--quick", "--dir", work, "--report", work / "io.json", cwd=work)
    run(own, "-c", COMPUTE, cwd=work)
    lines = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Ten lines")[2].split("```python\n")[1]
    home = {**os.environ, "HOME": str(work)}  # the directory of the SSD tier is below it
    for cached in (0, 992):
        said = subprocess.run(
            [own, "-c", lines.partition("```")[0]], cwd=work, env=home, capture_output=True, text=True
        )
        print(f"  README: {said.stdout or said.stderr}", end="", flush=True)
        if said.stdout != f"{cached} of 1000 tokens were cached\n":
            raise SystemExit("error: README's ten lines say something else with the wheel")
    example = Path(shutil.copy(ROOT / "examples" / "quickstart.py", work))
    run(own, "-W", "error", example, cwd=work)


def try_library(python: Path, wheel: Path, folder: Path) -> None:
    """The same for the native library alone: torch for every version would be gigabytes."""
    own = environment(python, folder, "numpy")
    run(own, "-m", "pip", "install", "-q", "--no-deps", wheel, cwd=folder)
    run(own, "-W", "error", "-c", COMPUTE, cwd=folder)


def main() -> int:
    target = Path(sys.argv[1] if len(sys.argv) > 1 else "dist").resolve()
    began = time.monotonic()
    pythons = interpreters(sys.argv[2:])
    builders = {kind_of(version): python for version, python in reversed(pythons.items())}
    with tempfile.TemporaryDirectory() as made:
        work = Path(made)
        try:
            wheels = build(target, work, builders)
            for version, python in pythons.items():
                if python == Path(sys.executable):
                    try_out(python, wheels[kind_of(version)], work)
                else:
                    try_library(python, wheels[kind_of(version)], work / f"env-{version[1]}")
        except subprocess.CalledProcessError as error:
            print(f"error: {error.cmd[0]} ended with status {error.returncode}", file=sys.stderr)
            return 1
    print(f"{', '.join(sorted(file.name for file in target.iterdir()))}: {time.monotonic() - began:.0f} s")
    for kind in KINDS.keys() - builders.keys():
        print(f"no {kind} wheel was built: there is no CPython {KINDS[kind]}; name one (make wheels PYTHONS=...)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
