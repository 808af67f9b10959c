"""The configuration fields of an inference engine that decide its keys and values.

A TOML table beside an adapter classifies every field:

    [held]          in the namespace
    [hashed]        in the engine's own hash of a page
    [parts]         the field is a configuration object itself, and is walked
    [[refused]]     a value that matters is refused at the start: `FieldTable.refuse`, or by code, without an `error`
    [[harmless]]    no key and no value depends on it; `why` says why

Each has a list of fields for every class name. **Unknown fields are held**: a newer engine's new field may cost hits,
but never gives another model's answer.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib.resources
import logging
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.resources.abc import Traversable
from pathlib import PurePath
from typing import Any

from gdscache import errors
from gdscache.errors import ConfigError
from gdscache.integrations.settings import digest_of

ENVIRONMENT = "environment"  # the class of environment variables
_KINDS, _GROUPED = ("held", "hashed", "parts"), ("refused", "harmless")
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+|(?<==)0x[0-9a-fA-F]{6,}")
_log = logging.getLogger("gdscache")


@dataclasses.dataclass(frozen=True)
class FieldTable:
    """One engine's table. `kinds`: `Class.field` → `held`, `hashed`, `refused`, `parts` or `harmless`. `rules`: see
    `refuse`."""

    kinds: Mapping[str, str]
    rules: Sequence[Mapping[str, Any]] = ()

    @classmethod
    def read(cls, file: Traversable) -> FieldTable:
        """Raises `ConfigError` for a field that stands twice, or an unknown key."""
        kinds, table = dict[str, str](), tomllib.loads(file.read_text(encoding="utf-8"))
        for kind, fields in _lines(table):
            for name in (f"{owner}.{field}" for owner, some in fields.items() for field in some):
                if name in kinds:
                    raise ConfigError(f"{name} is {kinds[name]}, and {kind}", f"leave one of them in {file.name}")
                kinds[name] = kind
        return cls(kinds, [rule for rule in table.get("refused", ()) if "error" in rule])

    def refuse(self, **objects: object) -> None:
        """Raise the error of the first rule whose fields are not empty, and have none of the values `fine`. `objects`:
        by the table's names of their classes."""
        for rule in self.rules:
            owners = [(objects[owner], some) for owner, some in rule["fields"].items() if owner in objects]
            fine = rule.get("fine", ())
            given = {name: getattr(one, name, None) for one, some in owners for name in some}
            wrong = [f"{name} is {value!r}" for name, value in given.items() if value and value not in fine]
            if wrong:
                raise getattr(errors, rule["error"])(f"{', '.join(wrong)}: {rule['why']}", rule["hint"])

    def named(self, kind: str) -> list[str]:
        return sorted(name for name, its in self.kinds.items() if its == kind)

    def facts(self, objects: Iterable[object], environment: Mapping[str, str] | None = None) -> dict[str, object]:
        """These objects' facts for the namespace, by `Class.field`, as plain JSON data. `environment`: the engine's set
        variables. Unknown fields are included, and logged."""
        found, unknown = dict[str, object](), list[str]()
        for name, value in self._walk(objects, environment or {}):
            kind = self.kinds.get(name)
            if kind is None:
                unknown.append(name)
            if kind in (None, "held"):
                found[name] = plain(value)
        if unknown:
            _log.info(
                "fields that this version of gdscache does not know are part of the namespace: %s",
                ", ".join(sorted(unknown)),
            )
        return found

    def variables(self, environment: Mapping[str, str], prefixes: tuple[str, ...]) -> dict[str, str]:
        """The engine's part of a process's environment: names with these prefixes, and names in the table."""
        return {
            name: value
            for name, value in environment.items()
            if name.startswith(prefixes) or f"{ENVIRONMENT}.{name}" in self.kinds
        }

    def unknown(self, objects: Iterable[object], environment: Mapping[str, str] | None = None) -> list[str]:
        return sorted(name for name, _ in self._walk(objects, environment or {}) if name not in self.kinds)

    def _walk(self, objects: Iterable[object], environment: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
        for one in objects:
            owner = type(one).__name__
            for field, value in _fields(one):
                name = f"{owner}.{field}"
                if self.kinds.get(name) == "parts":
                    yield from self._walk([value] if value is not None else [], {})
                    value = None if value is None else type(value).__name__
                yield name, value
        yield from ((f"{ENVIRONMENT}.{name}", value) for name, value in environment.items())


@functools.cache
def table_in(package: str, name: str) -> FieldTable:
    return FieldTable.read(importlib.resources.files(package) / name)


def plain(value: Any) -> Any:
    """A value as plain JSON data that is equal in all processes for equal meanings."""
    if value is None or (isinstance(value, (bool, int, float, str)) and not isinstance(value, enum.Enum)):
        return value
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, (PurePath, bytes)):
        return value.hex() if isinstance(value, bytes) else str(value)
    if isinstance(value, Mapping):
        return {str(plain(key)): plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    if isinstance(value, (set, frozenset)):
        return sorted((plain(one) for one in value), key=repr)
    if isinstance(value, type) or (callable(value) and hasattr(value, "__qualname__")):
        return f"{value.__module__}.{value.__qualname__}"
    if callable(to_dict := getattr(value, "to_dict", None)):  # a transformers configuration
        return f"{type(value).__name__}:{digest_of(plain(to_dict()))}"
    if dataclasses.is_dataclass(value):
        return {"": type(value).__name__, **{field: plain(one) for field, one in _fields(value)}}
    return f"{type(value).__name__}:{_ADDRESS.sub('', str(value))}"


def _fields(one: object) -> list[tuple[str, Any]]:
    names = [field.name for field in dataclasses.fields(one)] if dataclasses.is_dataclass(one) else []
    others = [name for name in getattr(one, "__dict__", {}) if name not in names]
    return [(name, getattr(one, name, None)) for name in [*names, *others] if not name.startswith("_")]


def _lines(table: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, list[str]]]]:
    for kind, fields in table.items():
        if kind in _GROUPED:
            yield from ((kind, group["fields"]) for group in fields)
        elif kind in _KINDS:
            yield kind, fields
        else:
            raise ConfigError(f"a table of fields has {kind!r}", f"it may have {', '.join((*_KINDS, *_GROUPED))}")
