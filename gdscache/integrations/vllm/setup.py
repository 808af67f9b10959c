"""The setup of vLLM: the connector's options, refused settings, requests to leave alone, and the settings that decide
the bytes of keys and values, as plain facts by name; `fields.toml` lists them with reasons."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import platform
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version

from gdscache import arguments
from gdscache.errors import (
    AdaptersUnsupportedError,
    CacheTypeUnsupportedError,
    HashSeedError,
    MediaUnsupportedError,
    ParallelismUnsupportedError,
    RopeByLengthError,
    SpeculationUnsupportedError,
    WeightsNotFoundError,
)
from gdscache.integrations.fetching import ENDING_S
from gdscache.integrations.fields import plain, table_in
from gdscache.integrations.ropes import rope_limit, ropes
from gdscache.integrations.settings import config_named, content_of, contents_of, switches_of
from gdscache.integrations.vllm.cache_groups import groups_of, kinds_of, layers_of, refuse_groups, states_of
from gdscache.integrations.vllm.planes import VllmPlanes
from gdscache.integrations.weights import commit_of, model_directory, weights_served

_DIGEST = re.compile(r"[0-9a-f]{64}|[0-9a-f]{128}")  # of vLLM's hashers: blake3, SHA-256, SHA-512
_LONGEST = 3600  # seconds, of an option's time
_PLAIN_BESIDE_LORA = "0.33"  # of vLLM: on a CPU, earlier ones take an adapter for requests without one
_SCALED = "int8_per_token_head", "fp8_per_token_head"  # types with scales in the blocks that a GPU has run
WEIGHT_METHODS = ("reload_weights", "reset_weights")  # methods of vLLM's workers that write weights, untold


@dataclasses.dataclass(frozen=True)
class Options:
    """`kv_connector_extra_config`.

    `config`: a YAML file, or its sections. `wait_seconds`: the longest time of "not yet" answers to a request.
    `pin_seconds`: the longest time of pins for a waiting request. `layerwise`: wait for each layer before its
    attention, if the forward pass is not one CUDA graph; otherwise for all layers before the pass. `media`: also cache
    requests with images, sounds or videos; only for clients that do not name media themselves (`multi_modal_uuids`).
    `untried`: also serve models whose caches follow the contract but were run on no GPU.
    """

    config: str | Mapping[str, Any]
    wait_seconds: float = 2.0
    pin_seconds: float = 120.0
    layerwise: bool = True
    media: bool = False
    untried: bool = False

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Options:
        """Raises `ConfigError` subclasses that name the key."""
        known = [field.name for field in dataclasses.fields(cls)]
        config = config_named(given, known, "kv_connector_extra_config", "vllm")
        switches = switches_of(given, "layerwise", "media", "untried")
        times: dict[str, Any] = {
            name: arguments.span(given[name], name, _LONGEST, least)
            for name, least in (("wait_seconds", 0.0), ("pin_seconds", ENDING_S))
            if name in given
        }
        return cls(config, **switches, **times)


def refuse_setup(vllm: Any, cache: Any, environment: Mapping[str, str] = os.environ, version: str = "") -> None:
    """Raise the `IntegrationError` subclass of an unsupported setting.

    `vllm`: vLLM's `VllmConfig`; `cache`: its `KVCacheConfig`.
    """
    refuse_config(vllm, environment, version)
    refuse_groups(cache, untried=_untried(vllm))
    _refuse_ropes(vllm.model_config)  # last: vLLM may shorten the length until its caches exist


def refuse_config(vllm: Any, environment: Mapping[str, str] = os.environ, version: str = "") -> None:
    """The checks of `refuse_setup` that need no KV cache. `version`: vLLM's; "" is the newest."""
    transfer, parallel = vllm.kv_transfer_config, vllm.parallel_config
    cache, model = vllm.cache_config, vllm.model_config
    owners = {"KVTransferConfig": transfer, "ParallelConfig": parallel, "CacheConfig": cache, "ModelConfig": model}
    table().refuse(VllmConfig=vllm, **owners)
    hosts = getattr(parallel, "nnodes_within_dp", getattr(parallel, "nnodes", 1))
    if hosts != 1:
        raise ParallelismUnsupportedError(
            f"the ranks of an engine are on {hosts} hosts (nnodes is {getattr(parallel, 'nnodes', hosts)})",
            "leave --nnodes out: run one server a host, with as many GPUs as that has",
        )
    algorithm = cache.prefix_caching_hash_algo
    if algorithm.startswith("xxhash") and "PYTHONHASHSEED" not in environment:
        raise HashSeedError(
            f"prefix_caching_hash_algo is {algorithm!r}, whose seed is drawn anew at each start: nothing that is on "
            "the SSD would be found again",
            "set --prefix-caching-hash-algo sha256_cbor, or the environment variable PYTHONHASHSEED",
        )
    kept_as = getattr(cache, "cache_dtype", "auto")
    if "per_token_head" in kept_as and kept_as not in _SCALED and not _untried(vllm):
        raise CacheTypeUnsupportedError(
            f"kv_cache_dtype is {kept_as}, which no GPU has run with this connector; {' and '.join(_SCALED)} are "
            "supported",
            'use one of these; to try it, add "untried": true to kv_connector_extra_config, and compare answers',
        )
    speculative = vllm.speculative_config
    if speculative is not None and speculative.method not in ("ngram", "ngram_gpu"):
        raise SpeculationUnsupportedError(
            f"speculative decoding by {speculative.method!r} has weights of its own",
            "leave it out, or use the method ngram",
        )
    on_cpu = vllm.lora_config is not None and vllm.device_config.device_type == "cpu"
    if on_cpu and version and Version(version) < Version(_PLAIN_BESIDE_LORA):
        raise AdaptersUnsupportedError(
            f"vLLM {version} computes requests without an adapter by the last adapter, beside requests with one",
            f"leave --enable-lora out, or use vLLM {_PLAIN_BESIDE_LORA} or later",
        )


def _untried(vllm: Any) -> bool:
    return (vllm.kv_transfer_config.kv_connector_extra_config or {}).get("untried") is True


def separate(parallel: Any) -> bool:
    """Whether workers are processes of their own."""
    return bool(getattr(parallel, "distributed_executor_backend", None) == "mp")


def tells_events(vllm: Any) -> bool:
    """Whether vLLM publishes KV events."""
    events = getattr(vllm, "kv_events_config", None)
    return events is not None and bool(events.enable_kv_cache_events)


def variables_of(parallel: Any) -> dict[str, str]:
    """Variables for the configuration's texts: the number of this replica of a data-parallel engine.

    vLLM calls each replica of a dense model rank 0 of 1, and keeps its number in `data_parallel_index`.
    """
    index = getattr(parallel, "data_parallel_index", getattr(parallel, "data_parallel_rank", 0))
    return {"GDSCACHE_DP_RANK": str(index)}


def shard_of(vllm: Any, cache: Any, rank: int) -> int:
    """A tensor-parallel rank's part of the heads. Ranks with equal bytes have one shard.

    Latents (MLA) are on all ranks. With more ranks than key heads, consecutive ranks have the same head. If layers may
    differ in their heads, all ranks are taken to differ.
    """
    ranks: int = vllm.parallel_config.tensor_parallel_size
    specs, model = [group.kv_cache_spec for group in cache.kv_cache_groups], vllm.model_config
    if {kind for spec in specs for kind in kinds_of(spec)} == {"MLAAttentionSpec"}:
        return 0
    layers = [layer for spec in specs for layer in layers_of(spec)]
    uneven = getattr(model.hf_text_config, "block_configs", None) or getattr(
        getattr(model, "model_arch_config", None), "per_layer_overrides", None
    )
    if uneven or any(getattr(layer, "num_kv_heads", 0) != 1 for layer in layers):
        return rank
    heads: int = model.get_total_num_kv_heads()
    return rank // (ranks // heads) if 0 < heads < ranks and ranks % heads == 0 else rank


def refuse_media(vllm: Any) -> None:
    """Raise `MediaUnsupportedError` if vLLM names media by a counter, which starts anew with the process."""
    media = vllm.model_config.multimodal_config
    if media is not None and media.mm_processor_cache_gb == 0 and not vllm.cache_config.enable_prefix_caching:
        raise MediaUnsupportedError(
            "mm_processor_cache_gb is 0 and prefix caching is off, and media is true: vLLM then names an image by a "
            "counter",
            'leave one of them on, or "media" out of kv_connector_extra_config',
        )


def _refuse_ropes(model: Any) -> None:
    """vLLM may run a model by transformers' code, whose ropes depend on the requests that are computed together."""
    if not model.using_transformers_backend():
        return
    limit = rope_limit(model.hf_text_config)
    if limit is not None and model.max_model_len > limit.most:
        raise RopeByLengthError(
            f"rope_type is {limit.kind!r}, and transformers' code of the model rotates keys in another way beyond "
            f"{limit.most} tokens; max_model_len is {model.max_model_len}",
            f"set --max-model-len {limit.most}, or --model-impl vllm",
        )


def leaves_alone(request: Any, *, media: bool) -> str:
    """The reason to neither load nor store a request, or "": its name does not identify its keys and values.

    An adapter keeps its name when it is loaded anew. A medium's name is a digest of its content, or its client's; a
    client's name hashed with settings also looks like a digest. `media`: no client names media, so every digest is of
    content. vLLM's hash has the bytes of embeddings, and neither their type nor the positions at which tokens stand.
    """
    if getattr(request, "lora_request", None) is not None:
        return "adapter"
    if getattr(request, "prompt_embeds", None) is not None:
        return "embeddings"
    features = getattr(request, "mm_features", None)
    if features and not (media and all(_DIGEST.fullmatch(one.identifier) for one in features)):
        return "media"
    return ""


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


table = functools.partial(table_in, "gdscache.integrations.vllm", "fields.toml")


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
    quantisation = getattr(vllm, "quant_config", None)  # from any source of vLLM's
    facts: dict[str, object] = {
        "vllm": version,
        "layout": str(cache.kv_cache_layout),
        "kind": " ".join(kinds_of(spec)),
        "block_size": spec.block_size,
        "layers": planes.described,
        "names": sorted(planes.layers),
        "ropes_by_length": _ropes_by_length(model),
        "quant_config": quantisation and [type(quantisation).__name__, plain(getattr(quantisation, "__dict__", {}))],
        "code": _files(model, "*.py") if model.trust_remote_code else "",
        "content of mm_encoder_fp8_scale_path": content_of(getattr(media, "mm_encoder_fp8_scale_path", None)),
        "accelerator": "rocm" if torch.version.hip else planes.tensors[0].device.type,
        **known.facts([vllm], known.variables(environment, _PREFIXES)),
    }
    if groups := groups_of(cache):
        facts["groups"] = groups
    if states := states_of(cache):
        facts["states"] = plain(states)
    if str(getattr(model.hf_text_config, "model_type", "")).startswith("llama4"):
        given = model.try_get_generation_config() | model.override_generation_config
        facts["attn_temperature_tuning"] = given.get("attn_temperature_tuning", _built_length(model) > 32768)
    if media is not None:  # of images, sounds and videos; vLLM's field has the images' settings alone
        facts["processors"] = _files(model, "*processor_config.json")
    if planes.tensors[0].device.type == "cpu":
        facts["processor"] = [platform.machine(), *_tiles()]
    if not vllm.cache_config.prefix_caching_hash_algo.endswith("_cbor"):  # pickle's bytes depend on Python's version
        facts["python"] = f"{sys.version_info.major}.{sys.version_info.minor}"
    return facts


def weights_of(vllm: Any) -> str:
    """See `weights_served`."""
    load_format = str(vllm.load_config.load_format)
    elsewhere = {} if load_format in _FROM_FILES else {"load_format": load_format}
    scope = os.environ.get("VLLM_USE_MODELSCOPE", "")  # another hub, whose files of this name may be others
    if not elsewhere and scope.strip().lower() in ("1", "true") and not Path(vllm.model_config.model).exists():
        elsewhere["VLLM_USE_MODELSCOPE"] = scope

    def source() -> tuple[Path, str | None]:
        model = vllm.model_config
        other = getattr(model, "model_weights", None)
        found = model_directory(str(other or model.model), model.revision, vllm.load_config.download_dir)
        return found, None if other or getattr(model, "hf_config_path", None) else commit_of(model)

    return weights_served("vLLM", load_format, elsewhere, source)


def _files(model: Any, pattern: str) -> str:
    """A digest of the files with such names beside the model's configuration; its weights may be elsewhere."""
    try:
        return contents_of(model_directory(str(model.model), model.revision), pattern)
    except WeightsNotFoundError:
        return ""


def _ropes_by_length(model: Any) -> list[object]:
    """For each rope that depends on vLLM's configured length: its kind, and that length, or for longrope whether it is
    above the length of training (then the long factors apply). An unknown kind may depend on anything. A dynamic one
    divides the length by that of training if it is given."""
    found: list[object] = []
    for kind, rope in ropes(getattr(model.hf_text_config, "rope_parameters", None)):
        if kind == "longrope":
            found.append([kind, _built_length(model) > rope["original_max_position_embeddings"]])
        elif kind not in _STEADY_ROPES or "max_trained_positions" in rope:
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
