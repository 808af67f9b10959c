"""Reading a configuration file: YAML with plain types only, no key twice, and `on` / `off` as texts; the base of all
config sections; and the translation of pydantic's errors into ours.

Every problem of a file is found and shown at once; the error's class is that of the most likely first cause.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import reprlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, ModelWrapValidatorHandler, ValidationError, ValidationInfo, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, InitErrorDetails, PydanticCustomError

from gdscache.errors import (
    CapacityError,
    ConfigError,
    ConfigFileError,
    GeometryError,
    InvalidValueError,
    UnknownKeyError,
)

MAX_BYTES = 1 << 20  # of a configuration; devices and pipes may be endless
MAX_KEYS = 10_000  # with keys merged in by `<<`, which may double with each line
_BOOL, _INT, _TIME = (f"tag:yaml.org,2002:{kind}" for kind in ("bool", "int", "timestamp"))


class YamlLoader(yaml.SafeLoader):
    """PyYAML's safe loader, with repeated keys refused, and the booleans and integers of YAML 1.2: `on`, `1:30` (90 in
    YAML 1.1), `010` (8 there) and dates are texts."""

    yaml_implicit_resolvers = {  # noqa: RUF012  (PyYAML declares it so)
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in (_BOOL, _INT, _TIME)]
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

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError, ArithmeticError):  # PyYAML's, of `!!bool x` and its like
            problem = f"{_SHORT.repr(node.value)} is not YAML's {node.tag.rpartition(':')[2]}"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from None


YamlLoader.add_implicit_resolver(_BOOL, re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF"))
YamlLoader.add_implicit_resolver(
    _INT, re.compile(r"^(?:[-+]?(?:0|[1-9][0-9_]*)|0x[0-9a-fA-F]+)$"), list("-+0123456789")
)


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


# A misspelt key also looks like a missing one, so it is reported first.
_PRIORITY: tuple[type[ConfigError], ...] = (UnknownKeyError, InvalidValueError, GeometryError, CapacityError)
_BY_NAME = {cause.__name__: cause for cause in _PRIORITY}

NOWHERE: Mapping[tuple[int | str, ...], int] = {}
COLLECT = "gdscache: a caller further out explains the errors"


class ConfigSection(BaseModel):
    """A frozen mapping of known keys. Raises errors of gdscache, never a pydantic `ValidationError`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
    missing_key: ClassVar[type[ConfigError]] = InvalidValueError

    @model_validator(mode="wrap")
    @classmethod
    def _explain(cls, data: Any, handler: ModelWrapValidatorHandler[Any], info: ValidationInfo) -> Any:
        if info.context == COLLECT:
            return handler(data)
        try:
            return handler(data)
        except ValidationError as error:
            raise explain(error, cls, cls.__name__) from None


@dataclasses.dataclass(frozen=True, slots=True)
class _Problem:
    cause: type[ConfigError]
    message: str
    hint: str
    line: int | None = None


def rejected(
    cause: type[ConfigError],
    problems: Mapping[tuple[int | str, ...], tuple[str, str]],
    others: ValidationError | None = None,
) -> ValidationError:
    """The exception of a validator with several problems: a message and a hint for each place below its field.

    `others`: pydantic's own errors of the same field.
    """
    lines: list[InitErrorDetails] = []
    for details in others.errors(include_url=False) if others is not None else ():
        kind, context = details["type"], details.get("ctx", {})
        own = PydanticCustomError(kind, "{message}", context) if kind in _BY_NAME else kind
        lines.append({"type": own, "loc": details["loc"], "input": details["input"], "ctx": context})
    for loc, (message, hint) in problems.items():
        one = PydanticCustomError(cause.__name__, "{message}", {"message": message, "hint": hint})
        lines.append({"type": one, "loc": loc, "input": None})
    return ValidationError.from_exception_data(cause.__name__, lines)


def known_keys(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every dotted key below `model` with its field; the elements of a list are `key[]`."""
    for name, field in model.model_fields.items():
        yield prefix + name, field
        if inner := section_of(field):
            many = "[]" if "tuple" in repr(field.annotation) else ""
            yield from known_keys(inner, f"{prefix}{name}{many}.")


def explain(
    error: ValidationError, model: type[BaseModel], source: str, places: Mapping[tuple[int | str, ...], int] = NOWHERE
) -> ConfigError:
    """One error for all problems of `source`. `places`: the lines of its keys."""
    problems = [_placed(details, model, places) for details in error.errors(include_url=False)]
    problems.sort(key=lambda problem: _PRIORITY.index(problem.cause))
    first = problems[0]
    if len(problems) == 1:
        where = source if first.line is None else f"{source}:{first.line}"
        return first.cause(f"{where}: {first.message}", first.hint)
    lines = [f"{source}: {len(problems)} problems"]
    for problem in problems:
        lines.append(f"  - {'' if problem.line is None else f'line {problem.line}: '}{problem.message}")
        lines += [f"      {line}" for line in problem.hint.splitlines()]
    return first.cause("\n".join(lines), "correct them all; the first ones may have caused the others")


def _placed(details: ErrorDetails, model: type[BaseModel], places: Mapping[tuple[int | str, ...], int]) -> _Problem:
    """A problem with the line of its key, or of the nearest section around it."""
    problem, loc = _problem(details, model), details["loc"]
    while loc and loc not in places:
        loc = loc[:-1]
    return dataclasses.replace(problem, line=places.get(loc))


def _problem(details: ErrorDetails, model: type[BaseModel]) -> _Problem:
    kind, loc, value = details["type"], details["loc"], details["input"]
    context: Mapping[str, Any] = details.get("ctx", {})
    if kind in _BY_NAME:
        return _Problem(_BY_NAME[kind], context["message"], context["hint"])
    if kind in ("extra_forbidden", "invalid_key"):
        loc = (*loc[:-1], str(loc[-1]))
        owner, _ = _lookup(model, loc)
        return _Problem(UnknownKeyError, f"unknown key `{dotted(loc)}`", _nearest(loc, list(owner.model_fields), model))
    key = dotted(loc)
    owner, field = _lookup(model, loc)
    hint = f"`{key}`: {field.description}" if field and field.description else ""
    if key == "model" and kind == "missing":
        hint = "add it (gdscache config print cpu_only has one); only files for an inference engine go without"
    if kind == "missing":
        return _Problem(getattr(owner, "missing_key", InvalidValueError), f"`{key}` is missing", hint)
    if kind == "model_type" and field and (section := section_of(field)):
        allowed, hint = "must be a mapping of keys", f"the keys of `{key}` are {', '.join(section.model_fields)}"
    elif kind == "tuple_type":
        allowed = "must be a list"
    elif kind == "string_type":
        allowed = "must be a text"
        if isinstance(value, (int, float)):
            hint = f"put it in quotes; {hint}" if hint else "put it in quotes"
    elif kind == "value_error":
        allowed = str(context["error"])
    else:
        allowed = re.sub(r"^\w+ should ", "must ", details["msg"])
    return _Problem(InvalidValueError, f"`{key}` is {_SHORT.repr(value)}: {allowed}", hint)


def dotted(loc: tuple[int | str, ...]) -> str:
    """`("model", "planes", 0, "name")` as `model.planes[0].name`."""
    text = ""
    for part in loc:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _lookup(model: type[BaseModel], loc: tuple[int | str, ...]) -> tuple[type[BaseModel], FieldInfo | None]:
    """The section that the last key of `loc` belongs to, and the key's field if there is one."""
    owner, section, field = model, model, None
    for part in loc:
        if isinstance(part, str):
            owner = section
            field = owner.model_fields.get(part)
            section = (section_of(field) if field else None) or owner
    return owner, field


def section_of(field: FieldInfo) -> type[BaseModel] | None:
    """The section that a field holds: itself, one or None, or a list of them."""
    todo: list[Any] = [field.annotation]
    while todo:
        annotation = todo.pop()
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            return annotation
        todo += get_args(annotation)
    return None


def _nearest(loc: tuple[int | str, ...], known: list[str], model: type[BaseModel]) -> str:
    """The probably intended key: of the same section, else of another section, else the nearest of the list."""
    key, parent = str(loc[-1]).lower(), dotted(loc[:-1])
    prefix = f"{parent}." if parent else ""
    if near := difflib.get_close_matches(key, known, n=1):
        return f"did you mean `{prefix}{near[0]}`?"
    everywhere = {name.rpartition(".")[2]: name for name, _ in known_keys(model)}
    if near := difflib.get_close_matches(key, everywhere, n=1, cutoff=0.8):
        return f"did you mean `{everywhere[near[0]]}`? Known here: {', '.join(known)}"
    closest = difflib.get_close_matches(key, known, n=1, cutoff=0.0)
    return f"the nearest key is `{prefix}{closest[0]}`. Known here: {', '.join(known)}" if closest else ""


class _Shortened(reprlib.Repr):
    def repr_int(self, x: int, level: int) -> str:
        # Python writes no integer of more than 4,300 digits; 40 are unreadable already.
        return super().repr_int(x, level) if x.bit_length() <= 128 else f"an integer of {x.bit_length():,} bits"


_SHORT = _Shortened()
_SHORT.maxstring = _SHORT.maxother = 120
