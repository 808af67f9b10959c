"""Every kernel compiles for every architecture, with the NVRTC of CUDA 12 and that of CUDA 13, on any machine.

The short form takes three architectures: Hopper with every set of macros by CUDA 13, and with one by CUDA 12; the
oldest and the newest with one.
`tools/install_gpu.py --only-nvrtc 12` and `13` install what this needs.
Neither a GPU nor a driver is part of it.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pkgutil
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

import gdscache.kernels
import gdscache.kvcacheio
from gdscache.kernels import jit
from tests.support.places import ROOT, SUPPORT

pytestmark = pytest.mark.suite

ARCHITECTURES = (75, 80, 86, 89, 90, 100, 120)
MAJORS = (12, 13)
FIRST_NVRTC = (12, 8)  # that knows sm_100 and sm_120

Outcome = dict[str, Any]  # of compile_child.py


class Job(NamedTuple):
    """One compilation, out of which the kernels `names` must come."""

    source: str
    names: tuple[str, ...]
    macros: tuple[tuple[str, int | str], ...]
    arch: int

    def __str__(self) -> str:
        macros = ",".join(f"{name}={value}" for name, value in self.macros)
        return f"{self.source}-{macros}-sm_{self.arch}"


@cache
def wrappers() -> dict[str, ModuleType]:
    """The modules of gdscache that have a CUDA source, by the name of that source."""
    packages = [gdscache.kernels, gdscache.kvcacheio]
    names = [one.name for of in packages for one in pkgutil.iter_modules(of.__path__, f"{of.__name__}.")]
    modules = [importlib.import_module(name) for name in names]
    return {module.SOURCE: module for module in modules if hasattr(module, "SOURCE")}


@cache
def all_jobs() -> tuple[Job, ...]:
    """Every source, with every set of macros that its wrapper uses, for every architecture."""
    return tuple(
        Job(source, tuple(getattr(module, "FORMS", ())), tuple(sorted(macros.items())), arch)
        for source, module in sorted(wrappers().items())
        for macros in getattr(module, "VARIANTS", ())
        for arch in ARCHITECTURES
    )


@cache
def some_jobs(major: int) -> tuple[Job, ...]:
    """The short form: every set of macros once, and three architectures."""
    first = {source: tuple(sorted(module.VARIANTS[0].items())) for source, module in wrappers().items()}
    every = {90} if major == MAJORS[-1] else set()
    return tuple(
        job
        for job in all_jobs()
        if job.arch in every or (job.arch in (75, 90, 120) and job.macros == first[job.source])
    )


def directory_of(major: int) -> Path:
    """Where cuda-core and NVRTC for that CUDA version are; skips the test where they are not."""
    tool = runpy.run_path(str(ROOT / "tools" / "install_gpu.py"))
    directory: Path = tool["nvrtc_directory"](major)
    if not directory.is_dir():
        pytest.skip(f"no NVRTC for CUDA {major} here: {sys.executable} tools/install_gpu.py --only-nvrtc {major}")
    return directory


class Compiler:
    """Jobs on their way in a process that has cuda-core and NVRTC of one CUDA version, and nothing else's."""

    def __init__(self, major: int, jobs: Sequence[Job], place: Path) -> None:
        directory = directory_of(major)
        self._outcomes: dict[Job, Outcome] = {}
        self._coming = iter(jobs)
        self._errors = place / f"errors{major}.txt"
        with open(self._errors, "wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, str(SUPPORT / "compile_child.py"), str(directory), str(major)],
                env={**os.environ, "PYTHONPATH": f"{directory}{os.pathsep}{ROOT}"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        try:
            self._start(directory, major, jobs)
        except BaseException:
            self.close()
            raise

    def _start(self, directory: Path, major: int, jobs: Sequence[Job]) -> None:
        told = [
            {
                "path": str(jit.SOURCES / job.source),
                "macros": jit.defines(**dict(job.macros)),
                "arch": job.arch,
            }
            for job in jobs
        ]
        assert self._process.stdin is not None
        with self._process.stdin as pipe:
            pipe.write(json.dumps(told))
        used = self._line()
        assert Path(used["core"]).is_relative_to(directory)
        assert used["version"][0] == major
        assert tuple(used["version"]) >= FIRST_NVRTC

    def _line(self) -> dict[str, Any]:
        line = self._process.stdout.readline()
        assert line, f"the compiler's process ended: {self._errors.read_text(encoding='utf-8')}"
        return dict(json.loads(line))

    def outcome(self, job: Job) -> Outcome:
        """What came of a job, as soon as it is known."""
        while job not in self._outcomes:
            self._outcomes[next(self._coming)] = self._line()
        return self._outcomes[job]

    def close(self) -> None:
        with self._process:  # closes the pipes and waits
            self._process.kill()


def fault(outcome: Outcome, names: Sequence[str]) -> str:
    """What is wrong with a compilation; empty when nothing is."""
    if outcome["kernels"] is None:
        return f"does not compile: {outcome['log']}"
    if missing := set(names) - set(outcome["kernels"]):
        return f"has no {sorted(missing)}, only {outcome['kernels']}"
    if re.search(r"\): warning ", outcome["log"]):
        return f"compiles with warnings: {outcome['log']}"
    return ""


def compilers(jobs: Callable[[int], Sequence[Job]], place: Path) -> Iterator[dict[int, Compiler]]:
    """The jobs of each CUDA version that is here, side by side."""
    with contextlib.ExitStack() as stack:
        started = {}
        for major in MAJORS:
            with contextlib.suppress(pytest.skip.Exception):
                started[major] = stack.enter_context(contextlib.closing(Compiler(major, jobs(major), place)))
        yield started


@pytest.fixture(scope="module")
def compiling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, Compiler]]:
    yield from compilers(some_jobs, tmp_path_factory.mktemp("compile"))


@pytest.fixture(scope="module")
def compiling_all(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, Compiler]]:
    yield from compilers(lambda _: all_jobs(), tmp_path_factory.mktemp("all"))


@pytest.mark.soak
@pytest.mark.parametrize("job", all_jobs(), ids=str)
@pytest.mark.parametrize("major", MAJORS, ids="cuda{}".format)
def test_it_compiles_for_every_architecture(major: int, job: Job, compiling_all: dict[int, Compiler]) -> None:
    test_it_compiles(major, job, compiling_all)


@pytest.mark.parametrize(
    ("major", "job"),
    [pytest.param(major, job, id=f"cuda{major}-{job}") for major in MAJORS for job in some_jobs(major)],
)
def test_it_compiles(major: int, job: Job, compiling: dict[int, Compiler]) -> None:
    directory_of(major)
    found = fault(compiling[major].outcome(job), job.names)
    assert not found, f"{job} with CUDA {major} {found}"


def test_every_source_has_a_wrapper_and_every_wrapper_its_source() -> None:
    assert set(wrappers()) == {path.name for path in jit.SOURCES.glob("*.cu")}


@pytest.mark.parametrize("source", sorted(wrappers()))
def test_a_wrapper_says_what_it_builds(source: str) -> None:
    module = wrappers()[source]
    names, variants = tuple(module.FORMS), module.VARIANTS
    assert names
    assert variants
    assert len(set(names)) == len(names)
    assert len({tuple(sorted(macros.items())) for macros in variants}) == len(variants)
    # A macro that nothing asks for would go unnoticed: the source has defaults.
    text = "".join(path.read_text(encoding="utf-8") for path in [jit.SOURCES / source, *jit.SOURCES.glob("*.cuh")])
    for macro in {macro for macros in variants for macro in macros}:
        assert re.search(rf"\b{macro}\b", text), f"{source} does not know {macro}"
