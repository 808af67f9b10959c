"""The configuration of a replay: a file or a model's name, and keys that are set."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from gdscache.arguments import shown
from gdscache.commands.replay.trace import BLOCK_TOKENS
from gdscache.config import Config, described_elsewhere
from gdscache.config.file import YamlLoader, read_mapping
from gdscache.config.model import ModelConfig
from gdscache.errors import InvalidValueError

_PARTS = 32  # of a page, if it is packed
_ALL = {"name": "all", "layers": [0]}
_PLACES: dict[str, dict[str, Any]] = {  # directories, which are not used, and may be of another machine
    "ssd": {"path": "simulated", "stripes": []},
    "status": {"path": "simulated"},
}


def _model(row: int, groups: Sequence[Mapping[str, Any]] = (), state: int = 0) -> dict[str, Any]:
    """A model as one layer, with `row` bytes of bfloat16 for a token in all its layers that keep the same tokens. With
    `state`, a second layer has a state of so many bytes."""
    parts = {"values": "bfloat16", "parts": [row // _PARTS] * _PARTS}  # one part has no more than 2^24 values
    planes: list[dict[str, Any]] = [{"name": "rows", "shape": [row], "dtype": "uint8", "layers": [0], **parts}]
    if state:
        planes.insert(0, {"name": "state", "shape": [state], "dtype": "uint8", "layers": [1]})
    layers = {"name": "replay", "layers": len(planes), "page_tokens": BLOCK_TOKENS}
    return {**layers, "planes": planes, "groups": list(groups)}


def _windows(count: int, tokens: int) -> list[dict[str, Any]]:
    return [{"name": f"window {n}", "layers": [0], "window": tokens} for n in range(count)]


def _states(count: int) -> list[dict[str, Any]]:
    return [{"name": f"state {n}", "layers": [1], "state": True} for n in range(count)]


MODELS = {  # hybrid models in groups with vLLM's number of layers
    "llama-3-8b": _model(2 * 2 * 32 * 8 * 128),
    "llama-3-70b": _model(2 * 2 * 80 * 8 * 128),
    "qwen3-32b": _model(2 * 2 * 64 * 8 * 128),
    "deepseek-v3": _model(2 * 61 * (512 + 64)),
    "gemma-3-4b": _model(5 * 2 * 2 * 4 * 256, [_ALL, *_windows(6, 1024)]),
    "gpt-oss-20b": _model(12 * 2 * 2 * 8 * 64, [_ALL, *_windows(1, 128)]),
    "qwen3-next-80b": _model(12 * 2 * 2 * 2 * 256, [_ALL, *_states(3)], state=12 * 2_146_304),
    "lfm2-1.2b": _model(6 * 2 * 2 * 8 * 64, [_ALL, *_states(2)], state=5 * 8_192),
}


def base_of(file: Path | None, model: str) -> dict[str, Any]:
    """The keys of a configuration file, or buffers with room for a page of each of `MODELS`; and the named model if the
    file describes none. Raises a `ConfigError`, or `InvalidValueError` for an unknown model."""
    fields: dict[str, Any] = {"gpu": {"staging": "1GiB"}, "host_buffer": "1GiB"}
    if file is not None:
        fields = dict(read_mapping(file))
    if described_elsewhere(fields.get("model")):
        if model not in MODELS:
            raise InvalidValueError(f"no model is named {shown(model)}", f"--model is one of {', '.join(MODELS)}")
        fields["model"] = {**MODELS[model], **(fields.get("model") or {})}
    return fields


def config_of(base: Mapping[str, Any], sets: Sequence[str]) -> Config:
    """The configuration with keys of it set, in order: `store.queue=8GiB`, with a value as in YAML. Raises a
    `ConfigError` for a configuration that an engine would reject, and `InvalidValueError`."""
    fields = dict(base)
    for text in sets:
        key, equals, value = text.partition("=")
        if not equals:
            raise InvalidValueError(f"--set {shown(text)} has no value", "write --set store.queue=8GiB")
        try:
            _set(fields, key.strip(), YamlLoader(value).get_single_data())
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            message = f"--set {shown(text)} is not YAML: {error}"
            raise InvalidValueError(message, "write --set store.queue=8GiB") from None
    for section, places in _PLACES.items():
        if isinstance(fields.get(section), Mapping):
            fields[section] = {**fields[section], **places}
    return Config.from_dict(fields, source="the configuration")


def page_tokens_of(model: ModelConfig) -> int:
    """Tokens of a workload's pages: those of the model's pages; with groups, as many as divide the pages of each, since
    an engine makes the names of all groups' pages from digests of so many tokens."""
    groups = model.layer_groups()
    return math.gcd(BLOCK_TOKENS, *(group.page_tokens for group in groups)) if groups else model.page_tokens


def _set(fields: dict[str, Any], key: str, value: object) -> None:
    *sections, last = key.split(".")
    for section in sections:
        inner = fields.get(section)
        fields[section] = fields = dict(inner) if isinstance(inner, Mapping) else {}
    fields[last] = value
