"""The README and docs/: every block of Python and of `bash` runs, in the order of the pages and in one directory.

Blocks of `sh` are those that need a network, a GPU, root or minutes. Their commands are only parsed: options, files and
make targets must exist. Links, and the files and modules that a page names, are followed.
"""

from __future__ import annotations

import itertools
import os
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main

from gdscache.commands.cli import app
from gdscache.metrics import FAMILIES
from tests.support.places import ROOT
from tests.support.processes import program

FIRST = [ROOT / "README.md", ROOT / "docs" / "embedding.md", ROOT / "docs" / "howto.md"]  # in which a newcomer reads
PAGES = [*FIRST, *(page for page in sorted((ROOT / "docs").rglob("*.md")) if page not in FIRST)]
BLOCK = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
LANGUAGES = {"python", "bash", "sh", "yaml", "sql", "text"}
LINK = re.compile(r"\[[^\]\n]*\]\(([^)\s]+)\)")
NAMED_FILE = re.compile(r"`((?:gdscache|csrc|docs|examples|configs|tools)/[\w./*{},-]*|\w+/\w+\.py)`")
NAMED_TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
NAMED_MODULE = re.compile(r"`(gdscache(?:\.\w+)+)(?![\w/.])")


def blocks(page: Path) -> list[tuple[str, str]]:
    """The language and the text of every block of a page; indented blocks (of lists) as they stand in them."""
    found = BLOCK.findall(page.read_text(encoding="utf-8"))
    return [(language, re.sub(r"(?m)^ {2,4}(?=\S)", "", text) if text[:1] == " " else text) for language, text in found]


def runs(page: Path) -> bool:
    return any(language in ("python", "bash") for language, _ in blocks(page))


def script(page: Path, *, shell: bool) -> str:
    """A page as one program: its Python, with its `bash` blocks at their places."""
    parts = ["import subprocess as _shell"]
    for language, text in blocks(page):
        if language == "python":
            parts.append(text)
        elif language == "bash" and shell:
            parts.append(f"_shell.run(['bash', '-euc', {text!r}], check=True)")
    return "\n".join(parts)


@pytest.fixture(scope="module")
def newcomer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory and home that all pages share, as those of somebody who reads one after the other."""
    return tmp_path_factory.mktemp("newcomer")


def run(page: Path, directory: Path, *, shell: bool = True) -> str:
    file = directory / "page.py"
    file.write_text(script(page, shell=shell), encoding="utf-8")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    surroundings = {"HOME": str(directory), "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "80", "PATH": path}
    done = program(str(file), cwd=directory, seconds=280, **surroundings)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=() if page.name == "README.md" else pytest.mark.suite, id=page.stem)
        for page in PAGES
        if runs(page)
    ],
)
def test_the_blocks_of_a_page_run_as_they_stand(page: Path, newcomer: Path) -> None:
    text = page.read_text(encoding="utf-8")
    first = run(page, newcomer)
    promised = re.findall(r"the second time it prints `(.*?)`", text)
    assert promised or page.name != "README.md"
    second = run(page, newcomer, shell=False) if promised else ""
    for words in promised:
        assert words in second
        assert words not in first


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_block_has_a_language(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert len(re.findall(r"(?m)^ *```", text)) == 2 * len(blocks(page))
    assert {language for language, _ in blocks(page)} <= LANGUAGES


def commands(page: Path) -> Iterator[list[str]]:
    """The commands in the `sh` blocks of a page, as words."""
    for language, text in blocks(page):
        if language == "sh":
            for line in text.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True) if line.count("'") % 2 == 0 else []
                if words:
                    yield words


def wrong(words: list[str]) -> str:
    """What is wrong with a command of gdscache: the parser's message. Values are not looked at."""
    command = typer.main.get_command(app)
    words = list(itertools.takewhile(lambda word: word not in ("&&", "|", ">", ">>", "&"), words[1:]))
    context, name = None, "gdscache"
    while True:
        try:
            context = command.make_context(name, words, parent=context)
        except Exception as error:  # noqa: BLE001  (typer may bring a click of its own)
            kind = type(error).__name__
            return "" if kind in ("BadParameter", "FileError", "Exit") else f"{kind}: {error}"
        if not hasattr(command, "resolve_command"):
            return ""
        rest = [*getattr(context, "_protected_args", []), *context.args]
        try:
            name, command, words = command.resolve_command(context, rest)
        except Exception as error:  # noqa: BLE001
            return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_commands_of_a_page_exist(page: Path) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for words in commands(page):
        if words[0] == "gdscache":
            assert not wrong(words), words
        elif words[0] == "python" and words[1].endswith(".py"):
            assert (ROOT / words[1]).is_file(), words
        elif words[0] == "make":
            assert re.search(rf"(?m)^{words[1]}:", makefile), words


def test_a_wrong_command_is_found() -> None:
    assert "NoSuchOption" in wrong(["gdscache", "doctor", "--no-such-thing"])
    assert "UsageError" in wrong(["gdscache", "no-such-command"])
    assert "MissingParameter" in wrong(["gdscache", "verify"])
    assert not wrong(["gdscache", "config", "check", "FILE"])


def anchors(page: Path) -> set[str]:
    """The names that headings of a page can be linked by."""
    text = BLOCK.sub("", page.read_text(encoding="utf-8"))
    headings = re.findall(r"(?m)^#+ (.+)$", text)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, *sorted(ROOT.glob("[A-Z]*.md"))], ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(BLOCK.sub("", page.read_text(encoding="utf-8"))):
        if link.startswith(("https://", "http://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_files_and_modules_that_are_named_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for name in NAMED_FILE.findall(text):
        for one in expanded(name):
            places = (ROOT.glob(one.rstrip("/")), (ROOT / "gdscache").glob(one))  # the second for a short name
            assert one.endswith(".so") or any(map(list, places)), name
    for name, test in NAMED_TEST.findall(text):
        assert f"def {test}(" in (ROOT / name).read_text(encoding="utf-8"), f"{name} has no {test}"
    for name in set(NAMED_MODULE.findall(text)) - loggers():
        assert is_module(name), name


def expanded(name: str) -> list[str]:
    """`a/{b,c}.py` as `a/b.py` and `a/c.py`."""
    found = re.fullmatch(r"(.*)\{(.*)\}(.*)", name)
    return [f"{found[1]}{part}{found[3]}" for part in found[2].split(",")] if found else [name]


def is_module(name: str) -> bool:
    """Whether `gdscache.a.b` is a module, a package, or something that `gdscache/a` defines. Imports nothing."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        place = ROOT.joinpath(*parts[:count])
        file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
        file = file if file.is_file() else place.with_suffix(".pyi")  # of the library
        if file.is_file():
            source = file.read_text(encoding="utf-8")
            return count == len(parts) or re.search(rf"\b{parts[count]}\b", source) is not None
    return False


def test_every_page_is_reached_from_the_readme() -> None:
    reached, new = set(), {ROOT / "README.md"}
    while new:
        page = new.pop()
        reached.add(page)
        links = [link.partition("#")[0] for link in LINK.findall(page.read_text(encoding="utf-8")) if "://" not in link]
        found = {(page.parent / link).resolve() for link in links if link.endswith(".md")}
        new |= found - reached
    assert set(PAGES) <= reached


def loggers() -> set[str]:
    found = set()
    for path in (ROOT / "gdscache").rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        found |= set(re.findall(r'getLogger\("(gdscache[\w.]*)"\)', source))
        if "getLogger(__name__)" in source:
            found.add(".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"))
    return found


# Of vLLM's connector, whose module imports vLLM.
CONNECTOR = (
    "loads", "begun_pages", "offered_pages", "unstored_pages", "bad_pages", "deferred", "late", "blocks_awaited",
    "scheduler_seconds", "worker_seconds", "steps",
)  # fmt: skip


def test_metrics_and_loggers_that_are_named_exist() -> None:
    text = (ROOT / "docs" / "howto.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"(?s)\| logger \| says \|\n(.*?)\n\n", text)
    named = {name for row in table.splitlines() for name in re.findall(r"`([\w.]+)`", row.split("|")[1])}
    assert named
    assert named == loggers()
    known = {f"{one.sample}{end}" for one in FAMILIES for end in ("", *("_bucket", "_count", "_sum"))}
    known |= {"gdscache_open"} | {f"gdscache_{name}_total" for name in CONNECTOR}
    for page in PAGES:
        named = re.findall(r"\b(gdscache_[a-z_]*[a-z])\b[`{ \[]", page.read_text(encoding="utf-8"))
        assert set(named) <= known, page
