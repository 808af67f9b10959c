"""Configurations from options: the simulated tiers, their sizes and policies."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

import yaml

from gdscache.arguments import shown
from gdscache.commands.replay.trace import BLOCK_TOKENS
from gdscache.config import Config, ModelConfig, StoreConfig
from gdscache.config.file import YamlLoader, read_mapping
from gdscache.errors import InvalidValueError
from gdscache.groups.pools import pools_of
from gdscache.sizes import GIB, MIB, parse_size

TOKEN_BYTES = {  # of a whole model's KV cache in bfloat16
    "llama-3-8b": 2 * 2 * 32 * 8 * 128,
    "llama-3-70b": 2 * 2 * 80 * 8 * 128,
    "qwen3-32b": 2 * 2 * 64 * 8 * 128,
    "deepseek-v3": 2 * 61 * (512 + 64),
}
# Hybrid models, in groups with vLLM's number of layers: (layers of a group, bytes of a token in a layer, groups that
# keep all tokens, groups with a window, the window).
HYBRIDS = {"gemma-3-4b": (5, 2 * 2 * 4 * 256, 1, 6, 1024), "gpt-oss-20b": (12, 2 * 2 * 8 * 64, 1, 1, 128)}
# Models with states, in the same groups: (bytes of a token in all layers that keep all tokens, groups of states, bytes
# of a group's state).
STATEFUL = {
    "qwen3-next-80b": (12 * 2 * 2 * 2 * 256, 3, 12 * 2_146_304),
    "lfm2-1.2b": (6 * 2 * 2 * 8 * 64, 2, 5 * 8_192),
}
MODELS = (*TOKEN_BYTES, *HYBRIDS, *STATEFUL)
_PARTS = 32  # of a page, if it is packed
_MOST_PAGES = 10**15  # 4 KiB pages: half of the largest file


@dataclasses.dataclass(frozen=True)
class Setup:
    """A run's configuration, and the settings in which the runs of a report differ."""

    config: Config
    varied: Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class Asked:
    """The options' values. Capacities are texts: `4GiB`, pages (`5000`), percent of the unique pages (`10%`).

    A tier's tuple is empty without its option; `none` means no such tier. `sets`: keys of the config, with values as in
    YAML (`store.queue=8GiB`); a repeated key is varied.
    """

    config: Path | None = None
    model: str = "llama-3-8b"
    page_bytes: str | None = None
    page_tokens: int = BLOCK_TOKENS
    cpu: tuple[str, ...] = ()
    ssd: tuple[str, ...] = ()
    sets: tuple[str, ...] = ()

    def base(self) -> dict[str, Any]:
        """The config before the other options."""
        if self.config is not None:
            return dict(read_mapping(self.config.expanduser()))
        return _by_hand(self.model, self.page_bytes, self.page_tokens)


def page_tokens_of(asked: Asked) -> int:
    """The page's tokens in the config. Raises a `ConfigError`."""
    model = asked.base().get("model")
    if asked.config is None or not isinstance(model, Mapping):
        return asked.page_tokens
    return _model(dict(model), str(asked.config)).page_tokens


def setups(asked: Asked, unique: int) -> list[Setup]:
    """All runs: every combination of the repeated options. `unique`: distinct pages of the trace. Raises a
    `ConfigError` for a config that an engine would reject, and `InvalidValueError`."""
    base = asked.base()
    given: dict[str, tuple[str, ...]] = {"cpu": asked.cpu, "ssd": asked.ssd}
    for text in asked.sets:
        key, equals, value = text.partition("=")
        if not equals:
            raise InvalidValueError(f"--set {shown(text)} has no value", "write --set store.queue=8GiB")
        name = f"={key.strip()}"  # `--set cpu=null` is not `--cpu`
        given[name] = tuple(dict.fromkeys((*given.get(name, ()), value)))
    varied = [name for name, values in given.items() if len(values) > 1]
    found = []
    for values in itertools.product(*(several or (None,) for several in given.values())):
        run = dict(zip(given, values, strict=True))
        found.append(Setup(_config(asked, base, run, unique), {name.lstrip("="): str(run[name]) for name in varied}))
    return found


def _config(asked: Asked, base: Mapping[str, Any], run: Mapping[str, str | None], unique: int) -> Config:
    fields = copy.deepcopy(dict(base))
    source = "the options" if asked.config is None else str(asked.config)
    for name, value in run.items():  # of the model first: the sizes of all tiers follow from it
        if name.startswith("=model."):
            _set_text(fields, name, value)
    model = _model(fields.get("model"), source)
    extent = unit_bytes(model)
    if asked.config is None:
        fields |= _roomy(sum(layout.extent_bytes for layout in model.pool_layouts()))
    for name, value in run.items():
        if value is None or name.startswith("=model."):
            continue
        if name in ("cpu", "ssd"):
            path = {"path": "simulated"} if name == "ssd" else {}
            room = None if value == "none" else extent * pages_of(value, unique, extent, f"--{name}")
            fields[name] = None if room is None else {**path, **(fields.get(name) or {}), "capacity": room}
        else:
            _set_text(fields, name, value)
    return Config.from_dict(fields, source=source)


def _model(section: object, source: str) -> ModelConfig:
    """The model section alone, with buffers large enough for its pages."""
    return Config.from_dict({"model": section, **_roomy(1 << 40)}, source=source).model


def unit_bytes(model: ModelConfig) -> int:
    """Bytes of a page, the unit of capacities. If only some layers keep all tokens and these have their own planes, a
    page of these layers."""
    groups, layouts = model.layer_groups(), model.pool_layouts()
    whole = [any(groups[g].keeps == "all" for g in pool.groups) for pool in pools_of(groups)]
    return next(
        (layout.extent_bytes for layout, all_ in zip(layouts, whole, strict=False) if all_), layouts[0].extent_bytes
    )


def _set_text(fields: dict[str, Any], name: str, value: str | None) -> None:
    key = name.lstrip("=")
    try:
        _set(fields, key, YamlLoader(value or "").get_single_data())
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        text = shown(f"{key}={value}")
        raise InvalidValueError(f"--set {text} is not YAML: {error}", "write --set store.queue=8GiB") from None


def _set(fields: dict[str, Any], key: str, value: object) -> None:
    *sections, last = key.split(".")
    for section in sections:
        inner = fields.get(section)
        fields[section] = fields = dict(inner) if isinstance(inner, Mapping) else {}
    fields[last] = value


def pages_of(text: str, unique: int, extent: int, option: str) -> int:
    """Pages of a capacity: `5000`, `12.5%` of `unique` pages (rounded down), or `4GiB` in pages of `extent` bytes. At
    least one. Raises `InvalidValueError`."""
    digits, pages = text.strip(), 0
    percent = digits.endswith("%")
    try:
        value = Decimal(digits.removesuffix("%"))
    except InvalidOperation:
        with contextlib.suppress(ValueError):
            pages = max(1, parse_size(digits) // extent)
    else:
        if value.is_finite() and 0 < value <= _MOST_PAGES and (percent or value == int(value)):
            pages = max(1, int(value * unique / 100) if percent else int(value))
    if not pages:
        raise InvalidValueError(
            f"{option} {shown(text)} is no capacity",
            f"write {option} 64GiB, {option} 5000 (pages) or {option} 10%; at most {_MOST_PAGES:,} pages",
        )
    return pages


def _by_hand(model: str, page_bytes: str | None, page_tokens: int) -> dict[str, Any]:
    """A config of one plane with pages of the given bytes. Those of a named model are bfloat16."""
    groups: list[dict[str, Any]] = []
    planes: list[dict[str, Any]] = []
    if page_bytes is None and model in STATEFUL:
        row, states, nbytes = STATEFUL[model]
        groups = [{"name": "all", "layers": [0]}]
        groups += [{"name": f"state {n}", "layers": [1], "state": True} for n in range(states)]
        planes = [{"name": "state", "shape": [nbytes], "dtype": "uint8", "layers": [1]}]
    elif page_bytes is None and model in HYBRIDS:
        layers, each, whole, windows, span = HYBRIDS[model]
        row = layers * each
        groups = [{"name": f"all {n}", "layers": [0]} for n in range(whole)]
        groups += [{"name": f"window {n}", "layers": [0], "window": span} for n in range(windows)]
    elif page_bytes is None:
        if model not in TOKEN_BYTES:
            raise InvalidValueError(f"no model is named {model!r}", f"--model is one of {', '.join(MODELS)}")
        row = TOKEN_BYTES[model]
    else:
        try:
            nbytes = parse_size(page_bytes)
        except ValueError as error:
            raise InvalidValueError(f"--page-bytes {page_bytes!r}: {error}", "write --page-bytes 8MiB") from None
        row, rest = divmod(nbytes, page_tokens)
        if rest or not row:
            raise InvalidValueError(
                f"--page-bytes {page_bytes} is no whole number of bytes for each of {page_tokens} tokens",
                f"use a multiple of {page_tokens}",
            )
    planes.append({"name": "rows", "shape": [row], "dtype": "uint8", "layers": [0]})
    if page_bytes is None:  # parts as of some layers: one part has no more than 2^24 values
        planes[-1] |= {"values": "bfloat16", "parts": [row // _PARTS] * _PARTS}
    section = {"name": "replay", "layers": len(planes), "page_tokens": page_tokens, "planes": planes, "groups": groups}
    return {"model": section}


def _roomy(extent: int) -> dict[str, Any]:
    """Buffers and a queue with room for a few pages, however large."""
    return {
        "gpu": {"device": "cpu", "capacity": max(GIB, extent), "staging": max(256 * MIB, 8 * extent)},
        "host_buffer": max(64 * MIB, 8 * extent),
        "store": {"queue": max(StoreConfig.model_fields["queue"].default, 16 * extent)},
    }
