"""A namespace's facts, a line each, and the differing lines of two namespaces."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from gdscache.errors import InvalidValueError
from gdscache.groups.base import Group

COMPARE_SCHEMA = "gdscache.compare/1"


def made_of(fields: Mapping[str, Any]) -> dict[str, str]:
    """A namespace's lines: name → value. A group of layers, and a salt in JSON, have a line for each of their names."""
    lines: dict[str, str] = {}
    for name, value in fields.items():
        if name == "planes":
            lines[name] = _planes(value)
        elif name == "group" and isinstance(value, dict):
            lines |= {f"group.{fact}": _text(one) for fact, one in value.items()}
        elif name in ("salt", "request_salt") and (facts := facts_of(value)) is not None:
            lines |= {f"{name}.{fact}": _text(one) for fact, one in facts.items()}
        else:
            lines[name] = _text(value)
    return dict(sorted(lines.items()))


def compare(report: Mapping[str, Any], one: str, other: str) -> dict[str, Any]:
    """Two namespaces of an `inspect` report, by the first digits of their digests.

    `lines`: each line of either, `differs` first; None if one has no such line. Raises `InvalidValueError` if digits
    name no namespace, several, or one without a description.
    """
    a, b = (_named(report["namespaces"] or [], digits, report["path"]) for digits in (one, other))
    names = sorted({*a["made_of"], *b["made_of"]})
    lines = [{"line": name, "a": a["made_of"].get(name), "b": b["made_of"].get(name)} for name in names]
    for line in lines:
        line["differs"] = line["a"] != line["b"]
    return {
        "schema": COMPARE_SCHEMA,
        "path": report["path"],
        "a": a["digest"],
        "b": b["digest"],
        "lines": sorted(lines, key=lambda line: not line["differs"]),
    }


def _named(namespaces: Sequence[Mapping[str, Any]], digits: str, path: str) -> Mapping[str, Any]:
    # a packed directory and that of its plain pages have the same ones
    namespaces = [*{namespace["digest"]: namespace for namespace in namespaces}.values()]
    found = [namespace for namespace in namespaces if namespace["digest"].startswith(digits.lower())]
    if len(found) != 1:
        there = ", ".join(namespace["digest"][:16] for namespace in namespaces[:8]) or "none"
        raise InvalidValueError(
            f"{digits!r} begins {len(found)} of the {len(namespaces)} namespaces of {path}",
            f"give the first digits of one that `gdscache inspect` shows: {there}",
        )
    if found[0]["made_of"] is None:
        raise InvalidValueError(
            f"namespace {found[0]['digest'][:16]} has no description", "compare one that `inspect` describes"
        )
    return found[0]


def facts_of(salt: object) -> dict[str, Any] | None:
    try:
        found = json.loads(salt) if isinstance(salt, str) else None
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _planes(planes: Any) -> str:
    """The layers' planes; equal successive layers are written once."""
    try:
        layers = [
            ", ".join(" ".join(map(str, (name, list(shape), *types))) for name, shape, *types in layer)
            for layer in planes
        ]
    except (TypeError, ValueError):
        return _text(planes)
    return "; ".join(f"{len(list(run))} x ({what})" for what, run in itertools.groupby(layers))


def kept_by(group: Any) -> str:
    """The tokens that the layers of a namespace's `group` keep (`Group.words`)."""
    try:
        return Group(group["name"], (), 0, group["keeps"], group["span"]).words
    except (KeyError, TypeError, ValueError):
        return _text(group)


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)
