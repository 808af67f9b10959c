"""The layout of the tests: no test is imported, and the tests of `unit` start no thread and no engine."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.support.places import ROOT

TESTS = ROOT / "tests"
KINDS = {"support", "unit", "engine", "gpu", "tools", "soak", "engines", "scale"}
IMPORT = re.compile(r"^ *(?:from (\S+) )?import (\([^)]*\)|.*)", re.MULTILINE)
FILES = sorted(TESTS.rglob("*.py"))
ENGINES = {
    "CacheEngine",
    "HybridEngine",
    "Host",
    "open_engine",
    "open_host",
    "open_face",
    "open_hybrid",
}  # what makes one, by import or as a fixture
THREADS = {"Thread", "Timer", "ThreadPoolExecutor", "ThreadPool"}


def imported(path: Path) -> set[str]:
    """The modules, and the names in them, that a file imports anywhere."""
    found = IMPORT.findall(path.read_text())
    return {name for module, names in found for name in (module, *re.findall(r"[\w.]+", names))}


def named(path: Path) -> set[str]:
    """Names and attributes that a file uses, imports or takes as arguments."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Name | ast.alias):
            found.add(node.id if isinstance(node, ast.Name) else node.name)
        elif isinstance(node, ast.Attribute | ast.arg):
            found.add(node.attr if isinstance(node, ast.Attribute) else node.arg)
    return found


def test_each_file_is_of_a_kind() -> None:
    """`support` has no tests, and tests lie nowhere else than in the folder of a kind."""
    assert {path.relative_to(TESTS).parts[0] for path in FILES if path.parent != TESTS} == KINDS
    assert sorted(path.name for path in TESTS.glob("*.py")) == ["__init__.py", "conftest.py"]
    assert not list((TESTS / "support").rglob("test_*.py"))


def test_no_file_imports_a_test() -> None:
    tests = {path: {name for name in imported(path) if re.search(r"\btest_", name)} for path in FILES}
    assert {path: names for path, names in tests.items() if names} == {}


def test_unit_starts_no_thread_and_no_engine() -> None:
    used = {path: named(path) & (ENGINES | THREADS) for path in (TESTS / "unit").rglob("*.py")}
    assert {path: names for path, names in used.items() if names} == {}
