"""Which package may import which. Below the line of a package stands all that it is built on; there are no circles."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import gdscache

ROOT = Path(gdscache.__file__).parent
HOST = ROOT.parent / "csrc" / "host"
BASICS = (
    "arrays",
    "errors",
    "limits",
    "sizes",
    "arguments",
    "histograms",
)  # modules of the root that any package may import
TOOLS = ("commands",)  # nothing imports them

# Package -> packages that it may import, the lowest first.
MAY_IMPORT = {
    "_native": "",  # the library
    "native": "_native",
    "runtime": "",
    "tracing": "runtime",
    "pages": "native",
    "gate": "pages",
    "policies": "native runtime",
    "cuda": "runtime",
    "groups": "native pages",
    "events": "pages runtime",
    "index": "native pages policies",
    "extents": "cuda pages",
    "storage": "cuda native pages runtime",
    "testing": "cuda pages storage",
    "config": "groups pages runtime",
    "kernels": "cuda extents native pages runtime",
    "disk": "gate pages policies runtime storage",
    "moves": "cuda native pages runtime storage tracing",
    "kvcacheio": "cuda kernels",
    "tiers": "config cuda disk extents gate index moves native pages policies runtime storage tracing",
    "metrics": "moves pages policies tiers",
    "mooncake": "cuda index native pages runtime storage tiers",
    "load": "config cuda index moves native pages runtime tiers tracing",
    "store": "cuda index moves native pages runtime tiers",
    "prefetch": "load moves pages runtime",
    "ranks": "config cuda disk extents kernels load moves native pages runtime storage tiers",
    "engine": (
        "config cuda disk events extents gate groups index kernels load metrics moves pages policies prefetch ranks "
        "runtime store tiers tracing"
    ),
    "integrations": "config cuda disk engine events groups load metrics moves pages ranks runtime store",
}
FLOORS = 10  # of packages, the commands' among them

# The same of the rooms of csrc/host. Its tests include any of them.
MAY_INCLUDE = {
    "base": "",
    "hash": "base",
    "pack": "base",
    "cuda": "base",
    "disk": "base cuda hash",
    "moves": "base disk hash pack",
    "gpu": "base cuda hash moves",
    "policies": "base",
    "bind": "base cuda disk gpu hash moves pack policies",
    "tests": "base bind cuda disk gpu hash moves pack policies",
}


def modules() -> dict[str, Path]:
    """All modules of gdscache, by their names without `gdscache.`; a package by its name."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    return [*ast.walk(ast.parse(path.read_text()))]


def imports(path: Path, known: dict[str, Path]) -> Iterator[str]:
    """Modules of gdscache that a file imports, in its functions too; not those for types alone."""
    for_types = {
        node
        for part in nodes(path)
        if isinstance(part, ast.If) and isinstance(part.test, ast.Name) and part.test.id == "TYPE_CHECKING"
        for statement in part.body
        for node in ast.walk(statement)
    }
    for node in nodes(path):
        if node in for_types:
            continue
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "gdscache":
            home = node.module.partition(".")[2]
            for alias in node.names:
                name = f"{home}.{alias.name}".strip(".")
                yield name if name in known else home
        elif isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[2] for alias in node.names if alias.name.split(".")[0] == "gdscache")


@functools.cache
def imported() -> dict[str, set[str]]:
    """By each module: the modules of gdscache that it imports."""
    known = modules()
    return {name: set(imports(path, known)) - {""} for name, path in known.items() if name}


def package(module: str) -> str:
    return module.split(".")[0]


@pytest.mark.parametrize("name", [*MAY_IMPORT, *BASICS])
def test_a_package_imports_what_the_table_allows(name: str) -> None:
    allowed = {name, *MAY_IMPORT.get(name, "").split(), *BASICS}
    wrong = [
        f"{module} imports {other}"
        for module, others in imported().items()
        for other in sorted(others)
        if package(module) == name and package(other) not in allowed
    ]
    assert not wrong
    used = {package(other) for module, others in imported().items() if package(module) == name for other in others}
    assert not allowed - used - {name, *BASICS}, "the table allows what nobody needs"


def test_the_tables_name_everything_once_and_have_no_circle() -> None:
    assert {"_native", *map(package, imported())} == {*MAY_IMPORT, *BASICS, *TOOLS, "__main__"}
    assert {path.name for path in HOST.iterdir()} == MAY_INCLUDE.keys()
    for table in (MAY_IMPORT, MAY_INCLUDE):
        above: set[str] = set()
        for name, allowed in table.items():
            assert set(allowed.split()) <= above, f"{name} stands before what it imports"
            above.add(name)


@pytest.mark.parametrize("room", MAY_INCLUDE)
def test_a_room_of_the_library_includes_what_the_table_allows(room: str) -> None:
    used = {
        other
        for path in (HOST / room).rglob("*.*")
        for other in re.findall(r'^#include "([^"/]*)', path.read_text(), re.MULTILINE)
    }
    assert used - {room} == set(MAY_INCLUDE[room].split())


def test_no_files_import_each_other() -> None:
    """Not inside a package either, and not by way of other files."""
    graph = dict(imported())
    while graph:
        free = [name for name, others in graph.items() if not others & graph.keys() - {name}]
        assert free, f"these import each other: {', '.join(sorted(graph))}"
        for name in free:
            del graph[name]


def test_packages_stand_on_ten_floors() -> None:
    """A package stands one floor above the highest package that it imports. Files of the root are on no floor."""
    below: dict[str, set[str]] = {}
    for module, others in imported().items():
        below.setdefault(package(module), set()).update(package(other) for other in others)
    packages = {name for name in below if (ROOT / name).is_dir()}
    floors: dict[str, int] = {}
    while packages - floors.keys():
        for name in packages - floors.keys():
            if (others := below[name] & packages - {name}) <= floors.keys():
                floors[name] = 1 + max((floors[other] for other in others), default=0)
    assert max(floors.values()) <= FLOORS, sorted((floor, name) for name, floor in floors.items())


# Classes that a package of the engine and a command call by the same name.
TWICE = {
    "Place": "of an event; of a page in a row of bench io",
    "Way": "of pages from space to space; of a bench's bytes",
}


@functools.cache
def classes() -> list[tuple[str, str, bool, int, str]]:
    """Each class: its module and name, whether it stands in the module itself, its methods, its docstring."""
    return [
        (module, node.name, node in nodes(path)[0].body, methods, ast.get_docstring(node) or "")
        for module, path in modules().items()
        for node in nodes(path)
        if isinstance(node, ast.ClassDef)
        for methods in [sum(isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef) for part in node.body)]
    ]


def test_no_two_packages_have_a_public_class_of_one_name() -> None:
    """Each command is a package here, and may have words that other commands have."""
    homes: dict[str, set[str]] = {}
    for module, name, of_module, _, _ in classes():
        if of_module and not name.startswith("_"):
            homes.setdefault(name, set()).add(package(module))
    twice = {name: found for name, found in homes.items() if len(found) > 1}
    assert twice.keys() == TWICE.keys(), twice


MOST_METHODS = 20  # of a class that does not say why it has more


def test_a_class_with_many_methods_says_why() -> None:
    wrong = [
        f"{module}.{name} has {methods}"
        for module, name, _, methods, said in classes()
        if (methods > MOST_METHODS) != ("Many methods: " in said)
    ]
    assert not wrong
