"""Settings shared by all integrations: the engine's configuration, and digests of an engine's own settings."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gdscache.config import Config, load_config, replaced
from gdscache.config.file import read_mapping
from gdscache.errors import ConfigError, RankMismatchError


def engine_configuration(
    config: str | Mapping[str, Any],
    model: Mapping[str, object],
    weights: Callable[[], str],
    source: str,
    variables: Mapping[str, str] | None = None,
) -> Config:
    """The configuration of a YAML file or its sections, for a model that the inference engine describes.

    `weights`: called for the weights' identity without `model.weights`. `source`: the sections' name in messages.
    `variables`: see `load_config`. Raises `ConfigError` subclasses.
    """
    known = {} if variables is None else variables
    named = _read(config, model, source, known)
    return named if named.model.weights else _read(config, {**model, "weights": weights()}, source, known)


def tiers_named(config: str | Mapping[str, Any]) -> dict[str, str]:
    """The kinds of a configuration's tiers (`Tier.kind`), by name, without tiers of users' classes."""
    sections = read_mapping(Path(config)) if isinstance(config, str) else config
    return {name: kind for name, kind in (("cpu", "memory"), ("ssd", "files")) if sections.get(name) is not None}


def _read(
    config: str | Mapping[str, Any], model: Mapping[str, object], source: str, variables: Mapping[str, str]
) -> Config:
    if isinstance(config, str):
        return load_config(config, model=model, variables=variables)
    if "model" in config:
        raise ConfigError(f"{source} has a section `model`", "leave it out: the inference engine describes its model")
    return Config.from_dict({**replaced(config, variables), "model": dict(model)}, source=source)


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


def planes_section(layers: Sequence[Mapping[str, int]], page_tokens: int) -> dict[str, object]:
    """The keys of a configuration's section `model` for planes of opaque bytes.

    `layers[i]`: the planes of layer `i` by name, with the bytes of a token in each.
    """
    where: dict[tuple[str, int], list[int]] = {}
    for layer, planes in enumerate(layers):
        for name, width in planes.items():
            where.setdefault((name, width), []).append(layer)
    return {
        "dtype": "uint8",
        "layers": len(layers),
        "page_tokens": page_tokens,
        "planes": [{"name": name, "shape": [width], "layers": some} for (name, width), some in where.items()],
    }
