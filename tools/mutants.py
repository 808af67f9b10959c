"""Find checks that no test would miss: each mutant lacks one check, and runs the tests that enter the check's line.

    tools/mutants.py --seed 1 --count 200 --jobs 2 --json mutants.json

1. The tests of `make test` run once, with coverage.py, which records the lines that each test enters; failing tests are
  left out.
2. Checks are found in Python (`gdscache/disk`, `tiers`, `index`: tests of `if`, of conditional expressions and
  comprehensions, operands of `and` and `or`) and in C++ (`csrc/host/moves/moves*`: tests of `if`).
3. Each mutant is a copy of the tree without one of them. Its tests run from the fastest on, until one fails or
  `--seconds` of them have run. For C++ the line's tests are unknown: the tests in C++ and of `tests/unit/moves` run.

A mutant that no test notices is listed with its check; a hanging test counts as noticing. Needs pytest-cov, which `make
mutants` installs.
"""

from __future__ import annotations

import argparse
import ast
import concurrent.futures
import dataclasses
import json
import os
import random
import re
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PYTHON = ("gdscache/disk", "gdscache/tiers", "gdscache/index")
CPP = "csrc/host/moves/moves*.cc"
CPP_SHARE = 5  # one mutant in five is in C++
CPP_TESTS = ("tests/unit/moves",)
DURATIONS = "GDSCACHE_DURATIONS"  # the file in which `pytest_runtest_logreport` writes them
NOT_LONG = "not suite and not soak and not engines and not scale and not gpu"
MOST_TESTS = 400


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A removed check: the text from `start` to `end` of a file becomes `text`."""

    path: str
    line: int
    start: int
    end: int
    text: str
    check: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {' '.join(self.check.split())} -> {self.text}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seconds", type=float, default=60, help="of a mutant's tests at most, as they took once")
    parser.add_argument("--json", type=Path, help="the report's file")
    parser.add_argument("--known", type=Path, help="directory of the coverage data: kept there, or read from there")
    parser.add_argument("--tests", nargs="*", default=["tests"], help="of these the tests of a line are taken")
    parser.add_argument("--only", default="", help="mutants whose line has this in it")
    options = parser.parse_args()
    mutants = [m for m in drawn(options.seed, options.count) if options.only in str(m)]
    with tempfile.TemporaryDirectory() as made:
        known = options.known or Path(made)
        known.mkdir(exist_ok=True)
        if not (known / "durations").exists():
            look(known, options.jobs, options.tests)
        tests = Tests(known, options.seconds)
        report: dict[str, Any] = {"seed": options.seed, "mutants": []}
        done = 0
        with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
            found = {pool.submit(judge, mutant, tests.of(mutant), made): mutant for mutant in mutants}
            for future in concurrent.futures.as_completed(found):
                verdict = future.result()
                done += 1
                report["mutants"].append({"mutant": str(found[future]), "verdict": verdict})
                print(f"{done}/{len(mutants)} {verdict}: {found[future]}", flush=True)
    kinds = [row["verdict"].partition(" ")[0] for row in report["mutants"]]
    report |= {"noticed": kinds.count("noticed"), "unnoticed": kinds.count("unnoticed"), "unrun": kinds.count("unrun")}
    print({name: report[name] for name in ("seed", "noticed", "unnoticed", "unrun")})
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def drawn(seed: int, count: int) -> list[Mutant]:
    rng = random.Random(seed)
    python = [m for root in PYTHON for path in sorted((ROOT / root).glob("*.py")) for m in in_python(path)]
    cpp = [mutant for path in sorted(ROOT.glob(CPP)) for mutant in in_cpp(path)]
    of_cpp = min(len(cpp), count // CPP_SHARE)
    return rng.sample(cpp, of_cpp) + rng.sample(python, min(len(python), count - of_cpp))


def in_python(path: Path) -> Iterator[Mutant]:
    source = path.read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def place(node: ast.expr) -> tuple[int, int]:
        last, end = node.end_lineno or 0, node.end_col_offset or 0
        return starts[node.lineno - 1] + node.col_offset, starts[last - 1] + end

    def mutant(node: ast.expr, text: str) -> Mutant:
        start, end = place(node)
        return Mutant(str(path.relative_to(ROOT)), node.lineno, start, end, text, source[start:end].decode())

    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.If, ast.IfExp)) and "TYPE_CHECKING" not in ast.dump(node.test):
            yield mutant(node.test, "False")
        elif isinstance(node, ast.comprehension):
            yield from (mutant(test, "True") for test in node.ifs)
        elif isinstance(node, ast.BoolOp):
            neutral = "True" if isinstance(node.op, ast.And) else "False"
            yield from (mutant(operand, neutral) for operand in node.values)


def in_cpp(path: Path) -> Iterator[Mutant]:
    source = path.read_text()
    for found in re.finditer(r"\bif \(", source):
        depth, end = 1, found.end()
        while depth:
            depth += {"(": 1, ")": -1}.get(source[end], 0)
            end += 1
        check = source[found.end() : end - 1]
        if ";" not in check and not re.match(r"\s*(const )?\w+[\w:<>*& ]* = ", check):  # declares nothing
            line = source.count("\n", 0, found.start()) + 1
            yield Mutant(str(path.relative_to(ROOT)), line, found.end(), end - 1, f"false && ({check})", check)


def look(known: Path, jobs: int, tests: list[str]) -> None:
    """Record the lines that each test enters, and the tests' durations."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "mutants",
        "-n",
        str(jobs),
        "--dist=loadfile",
        "--timeout=200",
    ]
    command += ["-m", NOT_LONG, "--cov-context=test", "--cov-report=", *(f"--cov={root}" for root in PYTHON)]
    environment = _environment(ROOT) | {
        "COVERAGE_FILE": str(known / "coverage"),
        DURATIONS: str(known / "durations"),
        "COVERAGE_CORE": "ctrace",  # the only one with contexts
    }
    subprocess.run([*command, *tests], cwd=ROOT, env=environment)


def pytest_runtest_logreport(report: Any) -> None:
    """Called by pytest in `look`: note the duration of a passed test."""
    if report.when == "call" and report.passed and DURATIONS in os.environ and "PYTEST_XDIST_WORKER" not in os.environ:
        with open(os.environ[DURATIONS], "a") as file:
            file.write(json.dumps([report.nodeid, report.duration]) + "\n")


class Tests:
    """The tests of each line."""

    def __init__(self, known: Path, seconds: float) -> None:
        from coverage.numbits import register_sqlite_functions

        self._seconds = seconds
        self._took: dict[str, float] = dict(map(json.loads, (known / "durations").read_text().splitlines()))
        self._data = sqlite3.connect(known / "coverage")
        register_sqlite_functions(self._data)

    def of(self, mutant: Mutant) -> list[str]:
        if not mutant.path.endswith(".py"):
            return list(CPP_TESTS)
        entered = self._data.execute(
            "SELECT context FROM line_bits JOIN context ON context.id = context_id JOIN file ON file.id = file_id "
            "WHERE path = ? AND num_in_numbits(?, numbits)",
            (str(ROOT / mutant.path), mutant.line),
        )
        names = {context.rpartition("|")[0] for (context,) in entered}
        ordered = sorted((name for name in names if name in self._took), key=lambda name: self._took[name])
        chosen, seconds = [], 0.0
        for name in ordered[:MOST_TESTS]:
            seconds += self._took[name]
            chosen.append(name)
            if seconds > self._seconds:
                break
        return chosen


def judge(mutant: Mutant, tests: list[str], made: str) -> str:
    """`noticed`, `unnoticed` or `unrun`, and the reason."""
    if not tests:
        return "unrun (no test enters its line)"
    with tempfile.TemporaryDirectory(dir=made) as directory:
        tree = Path(directory) / "tree"
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".*", "__pycache__", "build", "dist"))
        source = (tree / mutant.path).read_bytes()
        (tree / mutant.path).write_bytes(source[: mutant.start] + mutant.text.encode() + source[mutant.end :])
        environment = _environment(tree) | {"TMPDIR": directory}
        if not mutant.path.endswith(".py"):
            script = "import sys; sys.path.insert(0, 'tools'); import native_build as n; n.build(n.LIBRARY)"
            for command in ([sys.executable, "-c", script], [sys.executable, "tools/native_tests.py", "plain"]):
                if fault := _fails(command, tree, environment, 400):
                    return f"noticed by {fault}"
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist"]
        fault = _fails([*command, "-m", NOT_LONG, "--timeout=60", *tests], tree, environment, 400)
        return f"noticed by {fault}" if fault else f"unnoticed by {len(tests)} tests"


def _fails(command: list[str], tree: Path, environment: dict[str, str], seconds: float) -> str:
    """The last output of a failing command; empty if it succeeds."""
    try:
        done = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, errors="replace", timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return "hanging"
    if done.returncode == 0:
        return ""
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return (failed or lines or [f"exit {done.returncode}"])[0 if failed else -1][:160]


def _environment(tree: Path) -> dict[str, str]:
    path = os.pathsep.join([str(tree), str(ROOT / "tools"), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}


if __name__ == "__main__":
    sys.exit(main())
