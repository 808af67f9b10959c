"""The settings of vLLM that decide its keys' and values' bytes, as plain facts by name; `fields.toml` lists them with
reasons."""

from __future__ import annotations

import functools
import importlib.resources
import json
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from gdscache.errors import WeightsNotFoundError
from gdscache.integrations.fields import FieldTable, plain
from gdscache.integrations.ropes import ropes
from gdscache.integrations.settings import content_of, contents_of
from gdscache.integrations.vllm.cache_groups import groups_of, kinds_of
from gdscache.integrations.vllm.planes import VllmPlanes
from gdscache.integrations.weights import model_directory, weights_read

# Kinds of rope that rotate a key by its position and the model's configuration alone, in vLLM's own models.
_STEADY_ROPES = frozenset(
    {
        "default", "linear", "ntk", "dynamic", "yarn", "llama3", "mllama4", "proportional", "deepseek_yarn",
        "deepseek_llama_scaling", "mrope", "bailing_mrope", "openpangu",
    }
)  # fmt: skip
_TILES = frozenset({"amx_tile", "avx512f"})  # of an x86 processor: vLLM packs keys by them
# Load formats that read the files of the model's directory. Weights of other formats come from elsewhere.
_FROM_FILES = frozenset(
    {
        "auto", "hf", "safetensors", "pt", "npcache", "instanttensor", "fastsafetensors", "runai_streamer",
        "runai_streamer_sharded", "sharded_state", "mistral", "bitsandbytes", "gguf",
    }
)  # fmt: skip
_PREFIXES = ("VLLM_",)


@functools.cache
def table() -> FieldTable:
    return FieldTable.read(importlib.resources.files("gdscache.integrations.vllm") / "fields.toml")


def model_of(
    vllm: Any, cache: Any, planes: VllmPlanes, version: str, environment: Mapping[str, str]
) -> dict[str, object]:
    """The section `model` of the engine's configuration: a page's sizes, and all facts that decide its bytes except the
    weights (`weights_of`).

    `vllm`: its `VllmConfig`. `cache`: its `KVCacheConfig`. `version`: vLLM's, since a layout's name may change its
    meaning. `environment`: the process's.
    """
    salt = json.dumps(facts_of(vllm, cache, planes, version, environment), sort_keys=True, separators=(",", ":"))
    groups = [
        {**group, "layers": sorted({planes.layers[name] for name in names})}
        for group in groups_of(cache)
        if isinstance(names := group["layers"], list)
    ]
    section = {"name": str(vllm.model_config.model), **planes.model(), "salt": salt}
    return {**section, "groups": groups} if groups else section


def facts_of(
    vllm: Any, cache: Any, planes: VllmPlanes, version: str, environment: Mapping[str, str]
) -> dict[str, object]:
    """All facts that tell namespaces apart, except for the weights, by name; see `model_of`."""
    model, known = vllm.model_config, table()
    media, spec = getattr(model, "multimodal_config", None), cache.kv_cache_groups[0].kv_cache_spec
    facts: dict[str, object] = {
        "vllm": version,
        "layout": str(cache.kv_cache_layout),
        "kind": " ".join(kinds_of(spec)),
        "block_size": spec.block_size,
        "layers": planes.described,
        "names": sorted(planes.layers),
        "ropes_by_length": _ropes_by_length(model),
        "quant_config": _quantisation(getattr(vllm, "quant_config", None)),
        "code": _files(model, "*.py") if model.trust_remote_code else "",
        "content of mm_encoder_fp8_scale_path": content_of(getattr(media, "mm_encoder_fp8_scale_path", None)),
        "accelerator": "rocm" if torch.version.hip else planes.tensors[0].device.type,
        **known.facts([vllm], known.variables(environment, _PREFIXES)),
    }
    if groups := groups_of(cache):
        facts["groups"] = groups
    if media is not None:  # of images, sounds and videos; vLLM's field has the images' settings alone
        facts["processors"] = _files(model, "*processor_config.json")
    if planes.tensors[0].device.type == "cpu":
        facts["processor"] = [platform.machine(), *_tiles()]
    if not vllm.cache_config.prefix_caching_hash_algo.endswith("_cbor"):  # pickle's bytes depend on Python's version
        facts["python"] = f"{sys.version_info.major}.{sys.version_info.minor}"
    return facts


def weights_of(vllm: Any) -> str:
    """The identity of vLLM's weights, from the files that vLLM has read.

    vLLM draws dummy weights from a fixed seed, so the model's configuration identifies them. Raises
    `WeightsNotFoundError`, also for weights that come from elsewhere.
    """
    load_format = str(vllm.load_config.load_format)
    if load_format == "dummy":
        return "dummy"
    if load_format not in _FROM_FILES:
        raise WeightsNotFoundError(
            f"load_format is {load_format!r}: vLLM has weights that are not those of the model's files",
            "set model.weights in the configuration to a text that names them",
        )
    return weights_read(_directory(vllm.model_config, vllm.load_config.download_dir))


def _directory(model: Any, download_dir: str | None = None) -> Path:
    name = getattr(model, "model_weights", None) or model.model
    return model_directory(str(name), model.revision, download_dir)


def _quantisation(config: Any) -> object:
    """The settings of a quantisation, from any source of vLLM's."""
    return None if config is None else [type(config).__name__, plain(getattr(config, "__dict__", {}))]


def _files(model: Any, pattern: str) -> str:
    """A digest of the files with such names beside the model's configuration; its weights may be elsewhere."""
    try:
        return contents_of(model_directory(str(model.model), model.revision), pattern)
    except WeightsNotFoundError:
        return ""


def _ropes_by_length(model: Any) -> list[object]:
    """For each rope that depends on vLLM's configured length: its kind, and that length, or for longrope whether it is
    above the length of training (then the long factors apply). An unknown kind may depend on anything."""
    found: list[object] = []
    for kind, rope in ropes(getattr(model.hf_text_config, "rope_parameters", None)):
        if kind == "longrope":
            found.append([kind, _built_length(model) > rope["original_max_position_embeddings"]])
        elif kind not in _STEADY_ROPES:
            found.append([kind, _built_length(model)])
    return found


def _built_length(model: Any) -> int:
    """The `max_model_len` with which the model's modules were made: the asked one, before a lack of memory shortened
    it."""
    asked = getattr(model, "original_max_model_len", None)
    if asked != -1:
        return int(model.max_model_len)
    return int(model.get_and_verify_max_len(asked))


def _tiles(cpuinfo: Path = Path("/proc/cpuinfo")) -> list[str]:
    """The processor's features by which vLLM's CPU attention packs keys. Raises `OSError`."""
    lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    flags = next((line for line in lines if line.startswith("flags")), "")
    return sorted(_TILES.intersection(flags.split()))
