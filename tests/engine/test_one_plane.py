"""There is one data plane, the native one: what Python has beside it is what every engine uses."""

from __future__ import annotations

import ast
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import pytest

import gdscache
from tests.support.helpers import WAIT, OpenHost, drop_from, prompt

ROOT = Path(gdscache.__file__).parent
SHARE = 0.8  # of the lines of functions, that a default life enters
PARTS = ("moves", "storage/__init__.py", "storage/files.py")
ELSEWHERE = {"foreign.py"}  # for tiers that move their own bytes, which a default engine has none of


def functions(tree: ast.AST, path: str = "") -> Iterator[tuple[str, int, int]]:
    """(name, first line, lines) of the functions in a tree: docstrings do not count, nor do functions of no more."""
    for node in ast.iter_child_nodes(tree):
        inside = path
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            inside = f"{path}{node.name}."
        if isinstance(node, ast.FunctionDef):
            documented = ast.get_docstring(node) is not None
            first = min(part.lineno for part in (node, *node.decorator_list))
            said = last_line(node.body[0]) - node.body[0].lineno + 1 if documented else 0
            body = node.body[1:] if documented else node.body
            if not all(isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant) for part in body):
                yield inside[:-1], first, last_line(node) - first + 1 - said
        yield from functions(node, inside)


def last_line(node: ast.stmt) -> int:
    assert node.end_lineno is not None
    return node.end_lineno


def entered(life: Callable[[], None]) -> set[tuple[str, int]]:
    """(file, first line) of the functions that are entered meanwhile, in whatever thread of Python."""
    found = set()

    def look(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            found.add((frame.f_code.co_filename, frame.f_code.co_firstlineno))

    threading.setprofile(look)
    sys.setprofile(look)
    try:
        life()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return found


def test_a_default_life_enters_most_of_what_python_has_for_bytes(open_host: OpenHost) -> None:
    tokens = prompt(1, 8)

    def life() -> None:
        host = open_host(cpu=16, ssd=40, transport="auto")
        host.keep(tokens)
        assert host.load(tokens).tokens == len(tokens)
        drop_from(host.engine, "cpu")
        assert host.engine.prefetch(tokens).result(WAIT).tokens == len(tokens)
        host.engine.close()
        host = open_host(cpu=16, ssd=40, transport="auto")  # all pages are on the SSD alone
        assert host.load(tokens).tokens == len(tokens)
        host.engine.close()

    seen = entered(life)
    for part in PARTS:
        files = sorted((ROOT / part).glob("*.py")) if (ROOT / part).is_dir() else [ROOT / part]
        found = [
            (lines, (str(file), first) in seen, f"{file.name}: {name}")
            for file in files
            if file.name not in ELSEWHERE
            for name, first, lines in functions(ast.parse(file.read_text()))
        ]
        share = sum(lines for lines, called, _ in found if called) / sum(lines for lines, _, _ in found)
        unused = [f"{name} ({lines})" for lines, called, name in found if not called]
        assert share >= SHARE, f"{part}: {share:.0%} of the lines; never entered: {', '.join(unused)}"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("def f():\n    return 1\n", [("f", 1, 2)]),
        ('def f():\n    """Says.\n\n    More.\n    """\n    return 1\n', [("f", 1, 2)]),
        ('class A:\n    @property\n    def f(self):\n        """Stub."""\n        ...\n', []),
        ("class A:\n    @property\n    def f(self):\n        return 1\n", [("A.f", 2, 3)]),
        (
            "if True:\n    def f():\n        def g():\n            return 1\n        return g\n",
            [("f", 2, 4), ("f.g", 3, 2)],
        ),
    ],
)
def test_the_lines_of_functions_are_counted(text: str, expected: list[tuple[str, int, int]]) -> None:
    assert list(functions(ast.parse(text))) == expected
