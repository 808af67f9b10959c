"""Reading a configuration file: YAML with plain types only, no key twice, and `on` / `off` as texts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from gdscache.errors import ConfigFileError

MAX_BYTES = 1 << 20  # of a configuration; devices and pipes may be endless
MAX_KEYS = 10_000  # with keys merged in by `<<`, which may double with each line
_BOOL = "tag:yaml.org,2002:bool"


class YamlLoader(yaml.SafeLoader):
    """PyYAML's safe loader, with repeated keys refused and the booleans of YAML 1.2 (`true` and `false` only)."""

    yaml_implicit_resolvers = {  # noqa: RUF012  (PyYAML declares it so)
        first: [(tag, pattern) for tag, pattern in resolvers if tag != _BOOL]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    keys = 0  # keys so far

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        super().flatten_mapping(node)
        self.keys += len(node.value)
        if self.keys > MAX_KEYS:
            problem = f"there are more than {MAX_KEYS:,} keys, including keys merged by `<<`"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        # Checked here, before `<<` is merged in: a key may override a merged one.
        node = super().compose_mapping_node(anchor)
        seen: dict[tuple[str, str], yaml.Mark] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if first := seen.get((key.tag, key.value)):
                problem = f"the key {key.value!r} is there twice, first in line {first.line + 1}"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            seen[key.tag, key.value] = key.start_mark
        return node


YamlLoader.add_implicit_resolver(_BOOL, re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF"))


def _read(path: Path) -> bytes:
    """The file's bytes, also of a device or a pipe; refuses more than a configuration has."""
    with path.open("rb") as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise ConfigFileError(f"{path}: has more than {MAX_BYTES:,} bytes", "a configuration is a few KiB of YAML")
    return content


def read_mapping(path: Path) -> dict[Any, Any]:
    """The one mapping of a YAML file. `~` is expanded. Raises `ConfigFileError`, with the line if known."""
    return read_places(path)[0]


def read_places(path: Path) -> tuple[dict[Any, Any], dict[tuple[int | str, ...], int]]:
    """`read_mapping`, and the lines of its keys, counted from 1: `("cpu", "capacity")`, `("model", "planes", 0)`."""
    try:
        content = _read(path.expanduser())
    except OSError as error:
        raise ConfigFileError(f"{path}: cannot be read: {error.strerror}", "name a YAML file") from None
    except (ValueError, RuntimeError) as error:  # an invalid file name; `~` of an unknown user
        raise ConfigFileError(f"{str(path)!r}: cannot be read: {error}", "name a YAML file") from None
    try:
        loader = YamlLoader(content)
        try:
            node = loader.get_single_node()
            data = None if node is None else loader.construct_document(node)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
        raise ConfigFileError(f"{place}: {error.problem or error.context}", "correct the YAML there") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise ConfigFileError(f"{path}: is not YAML: {reason}", "name a YAML file") from None
    if not isinstance(data, dict):
        kind = "nothing" if data is None else f"a {type(data).__name__}"
        raise ConfigFileError(f"{path}: holds {kind}, not a mapping", "a configuration is a mapping of sections")
    return data, _places(node)


def _places(root: yaml.Node | None) -> dict[tuple[int | str, ...], int]:
    """The lines of the keys below a node. An alias's target is visited once, at its first mention."""
    places: dict[tuple[int | str, ...], int] = {}
    todo: list[tuple[tuple[int | str, ...], yaml.Node | None]] = [((), root)]
    seen: set[int] = set()
    while todo:
        loc, node = todo.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, yaml.MappingNode):
            below = [(key.value, key, value) for key, value in node.value if isinstance(key, yaml.ScalarNode)]
        elif isinstance(node, yaml.SequenceNode):
            below = [(number, value, value) for number, value in enumerate(node.value)]
        else:
            continue
        for name, marked, value in below:
            places[*loc, name] = marked.start_mark.line + 1
            todo.append(((*loc, name), value))
    return places
