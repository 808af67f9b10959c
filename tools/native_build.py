"""Compile csrc/host into the one library that gdscache loads: by the machine's compiler, else by the one of `ziglang`.

    python tools/native_build.py               gdscache/native/libgdscache_host.so, unless it is newer than its sources
    python tools/native_build.py --requires    what pip must install first: nothing, or ziglang

Setuptools compiles by the same functions (pyproject.toml names the commands below): beside the sources for an editable
install, into the wheel otherwise. The library knows nothing of Python, so that one wheel an architecture serves all.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "csrc" / "host"
NAME = "libgdscache_host.so"
LIBRARY = ROOT / "gdscache" / "native" / NAME
ZIG = "ziglang>=0.17"
GLIBC = "2.28"  # of the wheels that `make wheels` builds: RHEL 8, Debian 10, Ubuntu 20.04
WHEELS = {f"manylinux_{GLIBC.replace('.', '_')}_{machine}": machine for machine in ("x86_64", "aarch64")}

_COMPILE = ("-std=c++20", "-O3", "-fPIC", "-pthread", "-fvisibility=hidden", "-Wall", "-Wextra")
_LINK = ("-shared", "-pthread", "-Wl,-z,defs", "-Wl,-s")
_WRAP = ("-Wl,--wrap=malloc", "-Wl,--wrap=free")  # see memory.cc
_PROBE = "#include <atomic>\n#include <span>\nint f(std::span<const int> s) { return std::atomic<int>(s[0]); }\n"


class BuildError(SystemExit):
    """The library cannot be built. The message says why, and what to install."""


@functools.cache
def system_compiler() -> tuple[str, ...]:
    """`$CXX`, or what this machine calls its C++ compiler; nothing where there is none that links C++20."""
    named = shlex.split(os.environ.get("CXX", ""))
    for command in (named,) if named else (["c++"], ["g++"], ["clang++"]):
        if shutil.which(command[0]) and _links(command):
            return tuple(command)
    if named:
        raise BuildError(f"error: CXX is {shlex.join(named)}, which builds no C++20 library: set CXX to one that does")
    return ()


def _links(command: Sequence[str]) -> bool:
    with tempfile.TemporaryDirectory() as work:
        (Path(work) / "probe.cc").write_text(_PROBE, encoding="utf-8")
        build = [*command, *_COMPILE, *_LINK, *_static(command), "probe.cc", "-o", "probe.so"]
        return not subprocess.run(build, cwd=work, capture_output=True, check=False).returncode


def _static(command: Sequence[str]) -> tuple[str, ...]:
    """The compiler's own library goes into ours, so that no other version of it has to fit. zig does that itself."""
    return () if "ziglang" in command else ("-static-libstdc++", "-static-libgcc")


def requires() -> list[str]:
    """What must be installed where the library is built."""
    return [] if system_compiler() else [ZIG]


def compiler(machine: str | None = None) -> tuple[str, ...]:
    """The command that compiles: for this machine, or with `machine` for any Linux of that architecture with GLIBC."""
    if machine is None and (found := system_compiler()):
        return found
    if importlib.util.find_spec("ziglang") is None:
        raise BuildError("error: there is no C++ compiler: install one (c++), or pip install ziglang, and try again")
    target = () if machine is None else ("-target", f"{machine}-linux-gnu.{GLIBC}")
    return (sys.executable, "-m", "ziglang", "c++", *target)


def build(library: Path, machine: str | None = None) -> None:
    """Compile all sources, a file a process and as many at a time as there are processors, and link them."""
    command = compiler(machine)
    with tempfile.TemporaryDirectory() as work:
        sources = sorted(SOURCES.glob("*.cc"))
        objects = [str(Path(work, source.stem + ".o")) for source in sources]
        jobs = [[*command, *_COMPILE, "-c", str(s), "-o", o] for s, o in zip(sources, objects, strict=True)]
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            for _ in pool.map(_run, jobs):
                pass
        linked, names = Path(work, NAME), Path(work, "names")
        names.write_text("{ global: gdscache_*; local: *; };\n", encoding="ascii")
        _run(
            [*command, *_LINK, *_WRAP, *_static(command), f"-Wl,--version-script={names}", *objects, "-o", str(linked)]
        )
        if machine is not None:
            _check_glibc(linked)
        library.parent.mkdir(parents=True, exist_ok=True)
        fresh = library.with_name(f"{NAME}.{os.getpid()}")  # a process that has the old one open keeps it
        shutil.copyfile(linked, fresh)
        fresh.replace(library)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode or done.stderr:
        print(f"{shlex.join(command)}\n{done.stderr}", file=sys.stderr)
    if done.returncode:
        raise BuildError(f"error: {command[0]} ended with status {done.returncode}")


def _check_glibc(library: Path) -> None:
    """That no symbol is of a later C library than the wheel's tag says."""
    versions = {tuple(map(int, v.split(b"."))) for v in re.findall(rb"GLIBC_(\d+\.\d+)", library.read_bytes())}
    if versions and max(versions) > tuple(map(int, GLIBC.split("."))):
        raise BuildError(f"error: the library needs glibc {max(versions)}, and its wheel says {GLIBC}")


def is_fresh() -> bool:
    """Whether the library beside the sources is newer than all of them."""
    inputs = [Path(__file__), *SOURCES.glob("*.cc"), *SOURCES.glob("*.h")]
    return LIBRARY.exists() and LIBRARY.stat().st_mtime > max(file.stat().st_mtime for file in inputs)


def wheel_machine(platform: str) -> str | None:
    """The architecture of a portable wheel, by its platform's tag; None: this machine's own."""
    if platform.startswith("manylinux") and platform not in WHEELS:
        raise BuildError(f"error: no wheel for {platform}: choose one of {', '.join(WHEELS)}")
    return WHEELS.get(platform)


class BuildPy(build_py):
    """Python's files, and the library with them."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            if not is_fresh():
                build(LIBRARY)
            return
        wheel = self.get_finalized_command("bdist_wheel")
        build(Path(self.build_lib, "gdscache", "native", NAME), wheel_machine(_platform(wheel)))

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        return [*super().get_outputs(include_bytecode), str(Path(self.build_lib, "gdscache", "native", NAME))]


class BdistWheel(bdist_wheel):
    """A wheel for any Python of one architecture."""

    def finalize_options(self) -> None:
        self.distribution.has_ext_modules = lambda: True  # so that all of it is installed where such wheels go
        super().finalize_options()

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", _platform(self)


def _platform(wheel: Any) -> str:
    platform: str = wheel.plat_name or sysconfig.get_platform()
    return platform.replace("-", "_").replace(".", "_")


def main() -> int:
    if sys.argv[1:] == ["--requires"]:
        print(" ".join(requires()))
    elif not is_fresh():
        build(LIBRARY)
    return 0


if __name__ == "__main__":
    sys.exit(main())
