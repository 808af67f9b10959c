"""The settings of SGLang that decide its keys' and values' bytes, as plain facts by name; `fields.toml` lists them with
reasons."""

from __future__ import annotations

import functools
import importlib.resources
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from gdscache.errors import WeightsNotFoundError
from gdscache.integrations.fields import FieldTable
from gdscache.integrations.settings import content_of, contents_of
from gdscache.integrations.sglang.planes import PoolPlanes
from gdscache.integrations.weights import model_directory

# Files whose content counts, by the fields of `ServerArgs` that name them.
FILES = ("quantization_param_path", "decrypted_config_file", "rl_quant_profile", "modelopt_checkpoint_restore_path")
_PREFIXES = ("SGLANG_", "SGL_")


class ServerArgs(SimpleNamespace):
    """SGLang's settings after its own decisions; its class `ServerArgs` has the given ones."""


def resolved(server: Any) -> Any:
    """The settings that SGLang runs with. `server`: its `ServerArgs`."""
    decided = getattr(server, "resolved_dict", None)
    return ServerArgs(**decided()) if callable(decided) else server


@functools.cache
def table() -> FieldTable:
    return FieldTable.read(importlib.resources.files("gdscache.integrations.sglang") / "fields.toml")


def facts_of(
    server: Any, model: Any, planes: PoolPlanes, version: str, environment: Mapping[str, str]
) -> dict[str, object]:
    """All facts that tell namespaces apart, except for the weights, by name.

    `server`: see `resolved`. `model`: SGLang's `ModelConfig`. `environment`: the process's.
    """
    known = table()
    return {
        "sglang": version,
        **planes.described,
        "config.json": content_of(_model_file(server)),
        "code": _code(server),
        **{f"content of {name}": content_of(getattr(server, name, None)) for name in FILES},
        **known.facts([server, model], known.variables(environment, _PREFIXES)),
    }


def directory_of(server: Any) -> Path:
    """The model's directory. Raises `WeightsNotFoundError`."""
    found: Path = model_directory(
        str(server.model_path), getattr(server, "revision", None), getattr(server, "download_dir", None)
    )
    return found


def _model_file(server: Any) -> Path | None:
    try:
        return directory_of(server) / "config.json"
    except WeightsNotFoundError:
        return None


def _code(server: Any) -> str:
    """A digest of the model's own Python: SGLang's backend for transformers' models runs it, trusted or not."""
    try:
        return contents_of(directory_of(server), "*.py")
    except WeightsNotFoundError:
        return ""
