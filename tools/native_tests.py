"""Build the C++ test binaries of csrc/host/tests in several ways, and run them.

    python tools/native_tests.py [plain] [thread] [address] [aarch64] [--rounds N]

thread: ThreadSanitizer. address: AddressSanitizer and UndefinedBehaviorSanitizer. Both need the system's compiler, with
its sanitizers. aarch64: for the other architecture, under qemu-user; by a cross compiler, or by ziglang. Kinds that a
machine cannot run are skipped, with the reason. `--rounds`: of all random tests; by default few.

The tests are doctest's. One binary takes its options, and from the environment ROUNDS and FIRST_SEED.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from native_build import INCLUDE, SOURCES, TESTS, common_headers, plain_sources, system_compiler

UNITS = sorted(TESTS.glob("test_*.cc"))
# A CUDA driver and a cuFile, which tests of a GPU open beside their binary.
LIBRARIES = tuple(TESTS / name for name in ("fake_cuda.cc", "fake_cufile.cc"))
DOCTEST = Path("/usr/include/doctest")  # Debian's, for all compilers
WARNINGS = (
    *("-std=c++20", "-g", "-pthread", "-fPIC", "-Wall", "-Wextra", "-Wshadow", "-Werror", INCLUDE),
    *("-isystem", str(DOCTEST), "-DDOCTEST_CONFIG_NO_POSIX_SIGNALS"),  # sanitizers have handlers of their own
)
# GCC warns that its sanitizer does not know fences; ours order stores that it does not see either.
KINDS = {
    "plain": ("-O1", "-g0"),
    "thread": ("-O1", "-fsanitize=thread"),
    # Its check of virtual calls needs a pipe, and a test that uses up all descriptors leaves none.
    "address": (
        *("-O1", "-fsanitize=address,undefined", "-fno-sanitize=vptr"),
        *("-fno-sanitize-recover=all", "-fno-omit-frame-pointer"),
    ),
    "aarch64": ("-O2", "-static"),
}


class SkipError(Exception):
    """This machine cannot run that kind; the message says why."""


def compiler(kind: str) -> list[str]:
    if kind == "aarch64":
        if os.uname().machine == "aarch64":
            raise SkipError("this machine is one: see plain")
        if not (shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")):
            raise SkipError("there is no qemu-aarch64: install qemu-user")
        if shutil.which("aarch64-linux-gnu-g++"):
            return ["aarch64-linux-gnu-g++"]
        if importlib.util.find_spec("ziglang"):
            return [sys.executable, "-m", "ziglang", "c++", "-target", "aarch64-linux-musl"]
        raise SkipError("there is no cross compiler: install g++-aarch64-linux-gnu, or pip install ziglang")
    if not (found := system_compiler()):
        raise SkipError("there is no C++ compiler of the system's")
    return list(found)


def runner(kind: str) -> list[str]:
    if kind == "aarch64":
        return [shutil.which("qemu-aarch64") or "qemu-aarch64-static"]
    if kind == "thread" and shutil.which("setarch"):
        return ["setarch", "-R"]  # its shadow has no place if addresses are drawn with many bits
    return []


def build(kind: str, work: Path) -> list[Path]:
    """The test binaries of a kind, and the libraries that they open beside them."""
    if not DOCTEST.exists():
        raise SkipError("there is no doctest: install doctest-dev")
    command = [*compiler(kind), *WARNINGS, *KINDS[kind]]
    if kind in ("thread", "address"):
        (work / "probe.cc").write_text("int main() {}\n", encoding="utf-8")
        probe = [*command, str(work / "probe.cc"), "-o", str(work / "probe")]
        if subprocess.run(probe, capture_output=True, check=False).returncode:
            raise SkipError(f"{command[0]} has no {kind} sanitizer")
    tests = UNITS
    if "-static" in command:
        print(f"{kind}: no tests of a GPU, which open a driver: a static binary opens nothing")
        tests = [test for test in UNITS if "gpu" not in test.stem]
    sources = [TESTS / "main.cc", *plain_sources(), TESTS / "faulty_disk.cc", *tests]
    objects = [work / f"{source.stem}.o" for source in sources]
    command = [*command, *common_headers(command, sources, work / "standard.h", r"|doctest\.h")]
    jobs = [[*command, "-c", str(s), "-o", str(o)] for s, o in zip(sources, objects, strict=True)]
    shared = [str(o) for o in objects if not o.stem.startswith("test_")]
    binaries = [work / source.stem for source in tests]
    links = [[*command, f"{binary}.o", *shared, "-o", str(binary)] for binary in binaries]
    if tests is UNITS:
        own_sources = [*SOURCES.glob("hash/*.cc"), *SOURCES.glob("pack/*.cc"), SOURCES / "moves" / "pages.cc"]
        sums = [str(work / f"{source.stem}.o") for source in (TESTS / "main.cc", *own_sources)]  # all ask for doctest
        own = ("-shared", "-Wl,-Bsymbolic")
        links += [[*command, *own, str(one), *sums, "-o", str(work / f"lib{one.stem}.so")] for one in LIBRARIES]
    for commands in (jobs, links):
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            for _ in pool.map(run, commands):
                pass
    return binaries


def run(command: list[str]) -> None:
    subprocess.run(command, check=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("kinds", nargs="*", help=f"of {', '.join(KINDS)}; all, where none is named")
    parser.add_argument("--rounds", type=int, help="of the random cases")
    arguments = parser.parse_args()
    if unknown := set(arguments.kinds) - set(KINDS):
        parser.error(f"{', '.join(sorted(unknown))}: choose from {', '.join(KINDS)}")
    if arguments.rounds is not None:
        os.environ["ROUNDS"] = str(arguments.rounds)
    for kind in arguments.kinds or KINDS:
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as work:
            try:
                for binary in build(kind, Path(work)):
                    print(f"{kind} {binary.name}:", end="", flush=True)
                    run([*runner(kind), str(binary), "--minimal"])
                    print(" good")
            except SkipError as reason:
                print(f"{kind}: skipped, {reason}")
                continue
            except subprocess.CalledProcessError as error:
                print(f"\nerror: {shlex.join(error.cmd)} ended with status {error.returncode}", file=sys.stderr)
                return 1
        print(f"{kind}: {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
