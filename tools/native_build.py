"""Compile csrc/host into the module `gdscache._native`: by the machine's compiler, else by the one of `ziglang`.

    python tools/native_build.py               beside the sources, unless it is newer than they are
    python tools/native_build.py PYTHON...     for other interpreters, which need nothing but Python's headers
    python tools/native_build.py --requires    requirements that pip must install first: none, or ziglang

Setuptools compiles by the same functions (pyproject.toml names the commands below): beside the sources for an editable
install, into the wheel otherwise. From CPython 3.12 on, one module by the stable ABI serves every version; 3.11 has one
of its own. Of csrc/host only bind/ knows Python, by nanobind, whose own source is compiled in.
"""

from __future__ import annotations

import functools
import importlib.util
import json
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
from typing import Any, NamedTuple

from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "csrc" / "host"
BINDINGS = SOURCES / "bind"
TESTS = SOURCES / "tests"
HOOKS = TESTS / "bind"  # beside the sources alone: no wheel has them
MODULE = "_native"
ZIG = "ziglang>=0.17"
NANOBIND = "nanobind>=3.1,<4"
GLIBC = "2.28"  # of the wheels that `make wheels` builds: RHEL 8, Debian 10, Ubuntu 20.04
WHEELS = {f"manylinux_{GLIBC.replace('.', '_')}_{machine}": machine for machine in ("x86_64", "aarch64")}

INCLUDE = f"-I{SOURCES}"
_COMPILE = ("-std=c++20", "-O3", "-fPIC", "-pthread", "-fvisibility=hidden", "-Wall", "-Wextra", INCLUDE)
_NANOBIND = ("-DNDEBUG", "-DNB_COMPACT_ASSERTIONS")
_STABLE = (
    "-DPy_LIMITED_API=0x030C0000",
    "-include",
    "stdio.h",
)  # Python.h then leaves out stdio.h, which nanobind needs
_THEIRS = ("-w", "-fno-strict-aliasing")  # of nanobind's own source
_LINK = ("-shared", "-pthread", "-Wl,-s")
_WRAP = ("-Wl,--wrap=malloc", "-Wl,--wrap=free")  # see base/memory.cc
_PROBE = """
#include <linux/io_uring.h>
#include <atomic>
#include <span>
io_uring_getevents_arg patience{0, 0, 0, IORING_REGISTER_IOWQ_MAX_WORKERS};
struct Aggregate { int first, second; };
using Pair = int __attribute__((vector_size(8)));
int f(std::span<const int> s) { return std::atomic<int>(Aggregate(s[0], 1).first); }
Pair turned(Pair pair) { return __builtin_shufflevector(pair, pair, 1, 0); }
"""


_ASK = """
import json, sys, sysconfig
stable = sys.implementation.name == "cpython" and sys.version_info >= (3, 12)
stable = stable and not sysconfig.get_config_var("Py_GIL_DISABLED")
version = ".".join(map(str, sys.version_info[:2]))
print(json.dumps([version, sysconfig.get_path("include"), sysconfig.get_config_var("EXT_SUFFIX"), stable]))
"""


class BuildError(SystemExit):
    """The library cannot be built. The message has the cause, and the package to install."""


class Python(NamedTuple):
    """An interpreter that the module is compiled for. `stable`: by the stable ABI of 3.12."""

    executable: str
    version: str
    headers: str
    suffix: str
    stable: bool

    def file(self, machine: str | None = None) -> str:
        """The module's file name, for this machine or another architecture."""
        if self.stable:
            return f"{MODULE}.abi3.so"
        return MODULE + (self.suffix.replace(os.uname().machine, machine) if machine else self.suffix)

    def library(self) -> Path:
        return ROOT / "gdscache" / self.file()


@functools.cache
def python(executable: str = sys.executable) -> Python:
    """The facts of an interpreter, from itself."""
    try:
        asked = subprocess.run([executable, "-c", _ASK], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        raise BuildError(f"error: {executable} is no Python that runs: name one that does") from None
    return Python(executable, *json.loads(asked.stdout))


LIBRARY = python().library()


@functools.cache
def system_compiler() -> tuple[str, ...]:
    """`$CXX`, or this machine's C++ compiler; empty if none links C++20, by headers of Linux 5.15 or later."""
    named = shlex.split(os.environ.get("CXX", ""))
    for command in (named,) if named else (["c++"], ["g++"], ["clang++"]):
        if shutil.which(command[0]) and _links(command):
            return tuple(command)
    if named:
        lacks = "builds no C++20 library, or has headers of a Linux before 5.15"
        raise BuildError(f"error: CXX is {shlex.join(named)}, which {lacks}: set CXX to one that does")
    return ()


def _links(command: Sequence[str]) -> bool:
    with tempfile.TemporaryDirectory() as work:
        (Path(work) / "probe.cc").write_text(_PROBE, encoding="utf-8")
        build = [*command, *_COMPILE, *_LINK, *_static(command), "probe.cc", "-o", "probe.so"]
        return not subprocess.run(build, cwd=work, capture_output=True, check=False).returncode


def _static(command: Sequence[str]) -> tuple[str, ...]:
    """Link the compiler's own library statically, so that no other version of it has to fit. zig does that itself."""
    return () if "ziglang" in command else ("-static-libstdc++", "-static-libgcc")


def requires() -> list[str]:
    """The requirements of a build on this machine."""
    return [] if system_compiler() else [ZIG]


def compiler(machine: str | None = None) -> tuple[str, ...]:
    """The compiler's command: for this machine, or with `machine` for any Linux of that architecture with GLIBC."""
    if machine is None and (found := system_compiler()):
        return found
    if importlib.util.find_spec("ziglang") is None:
        raise BuildError("error: there is no C++ compiler: install one (c++), or pip install ziglang, and try again")
    target = () if machine is None else ("-target", f"{machine}-linux-gnu.{GLIBC}")
    return (sys.executable, "-m", "ziglang", "c++", *target)


def bindings(of: Python) -> tuple[Path, tuple[str, ...]]:
    """nanobind's own source, and the flags for its headers and Python's."""
    nanobind = importlib.util.find_spec("nanobind")
    if nanobind is None or nanobind.origin is None:
        raise BuildError(f'error: there is no nanobind: pip install "{NANOBIND}", and try again')
    if not Path(of.headers, "Python.h").exists():
        raise BuildError(
            f"error: Python {of.version} has no headers ({of.headers}/Python.h): install python{of.version}-dev "
            f"(Debian, Ubuntu) or python{of.version}-devel (Fedora, RHEL), and try again"
        )
    folder = Path(nanobind.origin).parent
    places = (folder / "include", folder / "ext" / "robin_map" / "include", of.headers)
    flags = [word for place in places for word in ("-isystem", str(place))]
    return folder / "src" / "nb_combined.cpp", (*flags, *_NANOBIND, *(_STABLE if of.stable else ()))


def plain_sources() -> list[Path]:
    """The sources compiled into the module without Python's headers."""
    return [source for source in sorted(SOURCES.glob("*/*.cc")) if source.parent not in (BINDINGS, TESTS)]


def common_headers(command: Sequence[str], sources: Sequence[Path], header: Path, more: str = "") -> list[str]:
    """Compile the standard headers of all sources once, and those whose names match `more`, as `header` in a folder of
    its own. Returns the compiler's flags for them, which go before any other header's."""
    texts = [source.read_text(encoding="utf-8") for source in (*sources, *SOURCES.rglob("*.h"))]
    names = {name for text in texts for name in re.findall(rf"^#include <([a-z_]+{more})>", text, re.MULTILINE)}
    header.write_text("".join(f"#include <{name}>\n" for name in sorted(names)), encoding="utf-8")
    _run([*command, "-x", "c++-header", str(header), "-o", f"{header}.gch"])
    return ["-include", str(header)]


def build(library: Path, machine: str | None = None, of: Python | None = None) -> None:
    """Compile all sources, each in a process, one a processor at a time, and link them."""
    of = of or python()
    command, (theirs, known) = compiler(machine), bindings(of)
    with tempfile.TemporaryDirectory() as work:
        if machine is not None:
            known = (*known, "-isystem", str(_debian_headers(of, machine, Path(work))))
        # the longest first
        sources = [(theirs, (*known, *_THEIRS)), *((source, known) for source in sorted(BINDINGS.glob("*.cc")))]
        sources += [(source, ()) for source in plain_sources()]
        if library.parent == ROOT / "gdscache" and (hooks := sorted(HOOKS.glob("*.cc"))):
            sources += [*((source, known) for source in hooks), (TESTS / "faulty_disk.cc", ())]
        headers: dict[tuple[str, ...], list[str]] = {}
        if "ziglang" not in command:
            for flags, header, more in (((), "plain.h", ""), (known, "bound.h", r"|nanobind/[\w/]+\.h")):
                own = [source for source, others in sources if others == flags]
                headers[flags] = common_headers([*command, *_COMPILE, *flags], own, Path(work, header), more)
        jobs, plain, bound = [], list[str](), list[str]()
        for n, (source, flags) in enumerate(sources):
            made = str(Path(work, f"{n}.o"))
            jobs.append([*command, *_COMPILE, *headers.get(flags, ()), *flags, "-c", str(source), "-o", made])
            (bound if flags else plain).append(made)
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            for _ in pool.map(_run, jobs):
                pass
        linked, names = Path(work, of.file(machine)), Path(work, "names")
        names.write_text(f"{{ global: PyInit_{MODULE}; local: *; }};\n", encoding="ascii")
        link = [*command, *_LINK, *_WRAP, *_static(command), *plain]
        # A module may leave Python's symbols undefined. So the part without them is linked alone first.
        _run([*link, "-Wl,-z,defs", "-o", str(Path(work, "alone.so"))])
        _run([*link, *bound, f"-Wl,--version-script={names}", "-o", str(linked)])
        if machine is not None:
            _check_glibc(linked)
        if machine in (None, os.uname().machine):
            _run([of.executable, "-I", "-c", f"import sys; sys.path.insert(0, {work!r}); import {MODULE}"])
        library.parent.mkdir(parents=True, exist_ok=True)
        fresh = library.with_name(f"{library.name}.{os.getpid()}")  # a process that has the old one open keeps it
        shutil.copyfile(linked, fresh)
        fresh.replace(library)


def _debian_headers(of: Python, machine: str, work: Path) -> Path:
    """A folder for Debian's headers outside their own folder, by the name of an architecture."""
    headers = Path(of.headers)
    beside = headers.parent / f"{os.uname().machine}-linux-gnu" / headers.name / "pyconfig.h"
    if beside.exists():  # one for 64 bits serves the other
        target = work / f"{machine}-linux-gnu" / headers.name
        target.mkdir(parents=True)
        shutil.copy(beside, target)
    return work


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode or done.stderr:
        print(f"{shlex.join(command)}\n{done.stderr}", file=sys.stderr)
    if done.returncode:
        raise BuildError(f"error: {command[0]} ended with status {done.returncode}")


def _check_glibc(library: Path) -> None:
    """Check that no symbol is of a later C library than the wheel's tag says."""
    versions = {tuple(map(int, v.split(b"."))) for v in re.findall(rb"GLIBC_(\d+\.\d+)", library.read_bytes())}
    if versions and max(versions) > tuple(map(int, GLIBC.split("."))):
        raise BuildError(f"error: the library needs glibc {max(versions)}, and its wheel says {GLIBC}")


def is_fresh(library: Path = LIBRARY) -> bool:
    """Whether the library beside the sources is newer than all of them."""
    inputs = [Path(__file__), *SOURCES.glob("*/*.*"), *HOOKS.glob("*.*")]
    return library.exists() and library.stat().st_mtime > max(file.stat().st_mtime for file in inputs)


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
        for stale in Path(self.build_lib, "gdscache").glob(f"{MODULE}*.so"):  # of an earlier wheel
            stale.unlink()
        build(self._library(), self._machine())

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        return [*super().get_outputs(include_bytecode), str(self._library())]

    def _machine(self) -> str | None:
        return wheel_machine(_platform(self.get_finalized_command("bdist_wheel")))

    def _library(self) -> Path:
        return Path(self.build_lib, "gdscache", python().file(self._machine()))


class BdistWheel(bdist_wheel):
    """A wheel of one architecture: for CPython 3.12 and later, or for the building version."""

    def finalize_options(self) -> None:
        self.distribution.has_ext_modules = lambda: True  # installs everything where such wheels go
        super().finalize_options()

    def get_tag(self) -> tuple[str, str, str]:
        interpreter, abi, _ = ("cp312", "abi3", "") if python().stable else super().get_tag()
        return interpreter, abi, _platform(self)


def _platform(wheel: Any) -> str:
    platform: str = wheel.plat_name or sysconfig.get_platform()
    return platform.replace("-", "_").replace(".", "_")


def main() -> int:
    if sys.argv[1:] == ["--requires"]:
        print(" ".join(requires()))
        return 0
    for of in map(python, sys.argv[1:] or [sys.executable]):
        if not is_fresh(of.library()):
            print(f"== {of.library().relative_to(ROOT)}", flush=True)
            build(of.library(), of=of)
    return 0


if __name__ == "__main__":
    sys.exit(main())
