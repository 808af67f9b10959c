"""A namespace's facts, a line each, and two namespaces to compare."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from gdscache.errors import InvalidValueError
from gdscache.groups.base import Group

COMPARE_SCHEMA = "gdscache.compare/2"


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


def compare(namespaces: Sequence[Mapping[str, Any]], pair: Sequence[str]) -> dict[str, Any]:
    """Of the `namespaces` of `inspect`, the two whose digests begin with these digits.

    Raises `InvalidValueError` if digits name no namespace, several, or one without a description.
    """
    each = {namespace["digest"]: namespace for namespace in namespaces}  # a directory of plain pages has the same
    found = []
    for digits in pair:
        named = [namespace for digest, namespace in each.items() if digest.startswith(digits.lower())]
        if len(named) != 1 or named[0]["made_of"] is None:
            there = ", ".join(digest[:16] for digest, one in [*each.items()][:8] if one["made_of"]) or "none"
            lacks = ", which has no description" if len(named) == 1 else ""
            raise InvalidValueError(
                f"{digits!r} begins {len(named)} of {len(each)} namespaces{lacks}",
                f"give the first digits of one that `gdscache inspect` describes: {there}",
            )
        found += named
    return {"schema": COMPARE_SCHEMA, "namespaces": found}


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
