"""Docstrings, comments and the texts of errors name their nouns: at most 1 clause without a noun per 1,000 words.

Such clauses are "what it took" for "the load's slots", "so many" for "n pages", "whoever asks" for "a caller", and
"nobody". They are counted package by package. Questions do not count, nor does anything in backquotes.
"""

from __future__ import annotations

import ast
import functools
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

import gdscache

ROOT = Path(gdscache.__file__).parent
MOST = 1.0  # riddles per 1,000 words

RIDDLE = re.compile(
    r"""
    \bwhat\b(?!\s+to\b)                                         # "what is there", "what a load took"
    | \b(?:whatever|whoever|whomever|whichever)\b
    | (?:^|[.,;:(]\s* | \b(?:for|by|of|to|from|with|and|or|than|is|as|at|on|but|not|only|asks|knows|says|tells)\s+)
      who\b(?!le)                                               # "who has the lock", not "a caller who has"
    | \b(?:nobody|somebody|anybody|everybody|no\s+one|someone)\b
    | \bso\s+(?:many|much)\b(?!\s+that\b)
    | \bthose\s+(?:that|which|who)\b
    | \bthere\s+(?:is|are|was|were)\s*(?:[.,;:)]|$)             # "as many as there are"
    """,
    re.VERBOSE | re.IGNORECASE,
)
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
WORD = re.compile(r"[A-Za-z][\w'’]*|\d[\d.,]*")
CODE = re.compile(r"``[^`]*``|`[^`]*`|^\s*(?:>>>|\.\.\. ).*$", re.MULTILINE)
SENTENCE = re.compile(r"(?<=[.?!])\s+|\n\s*\n")
CPP = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/\*.*?\*/', re.DOTALL)


def riddles(text: str) -> list[str]:
    """The riddle clauses in `text`, each with the words behind it."""
    sentences = SENTENCE.split(CODE.sub("x", text))
    plain = [" ".join(s.split()) for s in sentences if not s.rstrip().endswith("?")]
    return [s[m.start() : m.start() + 60] for s in plain for m in RIDDLE.finditer(s)]


def python_texts(path: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of each docstring and block of comments; of errors.py each string too: messages and hints."""
    source = path.read_text()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and path.name == "errors.py":
            yield node.lineno, node.value
        elif isinstance(node, DOCUMENTED) and path.name != "errors.py" and ast.get_docstring(node):
            yield node.body[0].lineno, ast.get_docstring(node) or ""
    yield from joined(
        (token.start[0], token.string.lstrip("#:! "))
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    )


def cpp_texts(path: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of each block of comments."""
    source = path.read_text()
    yield from joined(
        (source.count("\n", 0, match.start()) + 1, match[0].strip("/*! "))
        for match in CPP.finditer(source)
        if match[0].startswith("/")
    )


def joined(lines: Iterator[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """Comments on consecutive lines as one text: a clause may break at the end of a line."""
    first, last, text = 0, -1, ""
    for line, part in lines:
        if line == last + 1:
            text += "\n" + part
        else:
            yield first, text
            first, text = line, part
        last = line
    yield first, text


def texts(path: Path) -> Iterator[tuple[int, str]]:
    return python_texts(path) if path.suffix == ".py" else cpp_texts(path)


@functools.cache
def packages() -> dict[str, list[Path]]:
    """Package -> its files. The root's modules are the package "gdscache"."""
    found: dict[str, list[Path]] = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).parts
        found.setdefault(parts[0] if len(parts) > 1 else "gdscache", []).append(path)
    found["csrc"] = sorted(p for p in (ROOT.parent / "csrc").rglob("*") if p.suffix in (".h", ".cc", ".cu", ".cuh"))
    for name in ("tools", "examples"):
        found[name] = sorted((ROOT.parent / name).rglob("*.py"))
    return found


@pytest.mark.parametrize("package", sorted(packages()))
def test_texts_name_their_nouns(package: str) -> None:
    words, found = 0, []
    for path in packages()[package]:
        for line, text in texts(path):
            words += len(WORD.findall(text))
            found += [f"{path.relative_to(ROOT.parent)}:{line}: {riddle}" for riddle in riddles(text)]
    rate = 1000 * len(found) / max(words, 1)
    assert len(found) <= max(1.0, MOST * words / 1000), f"{rate:.1f} per 1,000 of {words} words:\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("Frees what the load took.", 1),
        ("What is there, and whoever asks for it.", 2),
        ("Not for who holds the lock. So many\npages that nobody\nneeds.", 3),
        ("As many as there are. Those that came late.", 2),
        ("A thread who has the lock knows what to evict. What is a page?", 0),
        ("`what` is a column; the whole page is so much that it counts.", 0),
        ("There is one page. The pages that the load took.", 0),
    ],
)
def test_a_clause_without_a_noun_counts(text: str, count: int) -> None:
    assert len(riddles(text)) == count


def test_comments_count_in_both_languages(tmp_path: Path) -> None:
    (python := tmp_path / "a.py").write_text('"""What is here."""\nx = "what is"  # what\n# it takes\n')
    (cpp := tmp_path / "a.h").write_text('int x;  // what\n// it takes\nchar s[] = "// what is";  /* whoever */\n')
    assert [riddles(text) for _, text in texts(python) if text] == [["What is here."], ["what it takes"]]
    assert [len(riddles(text)) for _, text in texts(cpp) if text] == [2]
