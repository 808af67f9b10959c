"""gdscache installs beside the newest inference engines, by its own metadata (tools/engine_pins.py asks the index)."""

from __future__ import annotations

import re
import tomllib
from datetime import date
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.support.places import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PINS = tomllib.loads((ROOT / "tools" / "engine_pins.toml").read_text(encoding="utf-8"))
OURS = [*PROJECT["dependencies"], *(text for extra in PROJECT["optional-dependencies"].values() for text in extra)]


def by_name(requirements: list[str]) -> dict[str, SpecifierSet]:
    """The specifiers of each distribution, those of several lines together."""
    found: dict[str, SpecifierSet] = {}
    for text in requirements:
        requirement = Requirement(text)
        name = canonicalize_name(requirement.name)
        found[name] = found.get(name, SpecifierSet()) & requirement.specifier
    return found


def meet(one: SpecifierSet, other: SpecifierSet) -> bool:
    """Whether some version suits both: one that either names, one just beside it, or a very late one."""
    named = [Version(s.version.removesuffix(".*")) for s in (*one, *other)]
    tried = [*named, *(Version(f"{v}.1") for v in named), *(Version(f"{v}a0") for v in named if not v.pre)]
    return any((one & other).contains(v, prereleases=True) for v in [*tried, Version("99999")])


@pytest.mark.parametrize(
    ("one", "other", "met"),
    [
        (">=2.6", "==2.14.1", True), (">=2.6,<2.14", "==2.14.1", False), (">=1.26", "<=2.2.6", True),
        (">=5,<5.16", "<5.21.0,>=5.16.1", False), (">=3", "<3", False), ("!=14.1.0,>=14.0.1", "", True),
    ],
)  # fmt: skip
def test_specifiers_that_meet(one: str, other: str, met: bool) -> None:
    assert meet(SpecifierSet(one), SpecifierSet(other)) is met


@pytest.mark.parametrize("engine", PINS["engine"], ids=lambda engine: engine["name"])
def test_our_requirements_meet_those_of_an_engine(engine: dict[str, Any]) -> None:
    ours, theirs = by_name(OURS), by_name(engine["requires"])
    assert theirs.keys() <= ours.keys(), "the list holds what both ask for"
    unmet = {name: (str(ours[name]), str(theirs[name])) for name in theirs if not meet(ours[name], theirs[name])}
    assert not unmet


def test_the_list_says_what_it_was_taken_from() -> None:
    assert isinstance(PINS["looked_up"], date)
    for engine in PINS["engine"]:
        assert isinstance(engine["released"], date)
        assert engine["released"] <= PINS["looked_up"]
        assert engine["file"].startswith(f"{engine['name'].replace('-', '_')}-{engine['version']}-")
        assert any(text.startswith("torch") for text in engine["requires"])


def test_torch_has_no_upper_bound_and_what_was_tested_has() -> None:
    bounds = by_name(PROJECT["dependencies"])
    assert all(s.operator in (">=", "!=") for specifiers in bounds.values() for s in specifiers)
    text = (ROOT / "tools" / "constraints.txt").read_text(encoding="utf-8")
    tested = by_name([line for line in text.splitlines() if line and not line.startswith("#")])
    assert bounds.keys() <= tested.keys()
    assert all(meet(bounds[name], tested[name]) for name in bounds)
    for line in re.findall(r"^\S+", text, re.MULTILINE):
        assert line.startswith("#") or re.search(r"<|==", line), line
