"""How vLLM is set up: what the connector refuses, its options, and what makes the bytes of two servers interchangeable.

Reads vLLM's configuration objects by their attributes; nothing of vLLM is imported.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gdscache import arguments
from gdscache.config import Config
from gdscache.errors import (
    CacheGroupsUnsupportedError,
    ConfigError,
    ConnectorRoleError,
    DynamicScalesError,
    HashSeedError,
    InvalidValueError,
    LoadFailurePolicyError,
    ParallelismUnsupportedError,
    SleepModeUnsupportedError,
    SpeculationUnsupportedError,
    UnknownKeyError,
    WeightUpdatesUnsupportedError,
)
from gdscache.integrations.fetching import ENDING_S
from gdscache.integrations.settings import digest_of, engine_configuration
from gdscache.integrations.vllm.planes import VllmPlanes
from gdscache.integrations.weights import model_directory, weights_identity

_KINDS = ("FullAttentionSpec", "MLAAttentionSpec")
_LONGEST = 3600  # seconds, of what the options say
WEIGHT_METHODS = ("reload_weights",)  # of vLLM's workers, which tell no connector that they write weights
_TILES = frozenset({"amx_tile", "avx512f"})  # of an x86 processor: vLLM packs keys by them


@dataclasses.dataclass(frozen=True)
class Options:
    """`kv_connector_extra_config`.

    `config`: a YAML file, or its sections. `wait_seconds`: how long a request is told "not yet" while its pages come.
    `pin_seconds`: how long fetched pages are kept for a request that waits for its turn. `layerwise`: wait for each
    layer before its attention, where the forward pass is not one CUDA graph; or for all layers before it.
    """

    config: str | Mapping[str, Any]
    wait_seconds: float = 2.0
    pin_seconds: float = 120.0
    layerwise: bool = True

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Options:
        """Raises `ConfigError` subclasses that name the key."""
        known = [field.name for field in dataclasses.fields(cls)]
        if unknown := sorted(set(given) - set(known)):
            raise UnknownKeyError(
                f"kv_connector_extra_config has {', '.join(unknown)}", f"allowed keys: {', '.join(known)}"
            )
        if not isinstance(given.get("config"), (str, Mapping)):
            raise ConfigError(
                "kv_connector_extra_config names no configuration",
                'write one with `gdscache config init vllm`, and pass {"config": "gdscache.yaml"}',
            )
        if not isinstance(given.get("layerwise", True), bool):
            raise InvalidValueError(f"layerwise is {arguments.shown(given['layerwise'])}", "pass true or false")
        times = {
            name: arguments.span(given[name], name, _LONGEST, least)
            for name, least in (("wait_seconds", 0.0), ("pin_seconds", ENDING_S))
            if name in given
        }
        return cls(config=given["config"], layerwise=given.get("layerwise", True), **times)

    def configuration(self, model: Mapping[str, object], weights: Callable[[], str]) -> Config:
        """The engine's, for that model. `weights`: asked for their identity unless the file has `model.weights`."""
        return engine_configuration(self.config, model, weights, "kv_connector_extra_config.config")


def refuse_setup(vllm: Any, cache: Any, environment: Mapping[str, str] = os.environ) -> None:
    """Raise the subclass of `IntegrationError` that names what is not supported.

    `vllm`: vLLM's `VllmConfig`; `cache`: its `KVCacheConfig`.
    """
    transfer, parallel = vllm.kv_transfer_config, vllm.parallel_config
    if transfer.kv_load_failure_policy != "recompute":
        raise LoadFailurePolicyError(
            f"kv_load_failure_policy is {transfer.kv_load_failure_policy!r}: a bad page would end its request",
            'add "kv_load_failure_policy": "recompute" to --kv-transfer-config',
        )
    if transfer.kv_role != "kv_both":
        raise ConnectorRoleError(f"kv_role is {transfer.kv_role!r}", 'this is a cache: set "kv_role": "kv_both"')
    _refuse_ranks(parallel)
    _refuse_groups(cache)
    _refuse_hashes(vllm.cache_config, environment)
    if getattr(vllm.cache_config, "calculate_kv_scales", False):
        raise DynamicScalesError(
            "calculate_kv_scales is on: the first request decides what the bytes of all pages mean",
            "leave it off, and use a checkpoint that has the scales, or kv_cache_dtype auto",
        )
    if vllm.model_config.enable_sleep_mode:
        raise SleepModeUnsupportedError(
            "sleep mode is on: the KV cache's memory would be released while pages are on their way", "leave it off"
        )
    if getattr(vllm, "weight_transfer_config", None) is not None:
        raise WeightUpdatesUnsupportedError(
            "weight_transfer_config is set: pages of the old weights would be served", "leave it out"
        )
    speculative = vllm.speculative_config
    if speculative is not None and speculative.method not in ("ngram", "ngram_gpu"):
        raise SpeculationUnsupportedError(
            f"speculative decoding by {speculative.method!r} has weights of its own",
            "leave it out, or use the method ngram",
        )


def _refuse_ranks(parallel: Any) -> None:
    names = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "decode_context_parallel_size")
    sizes = {name: getattr(parallel, name, 1) for name in (*names, "prefill_context_parallel_size")}
    if wrong := {name: size for name, size in sizes.items() if size != 1}:
        raise ParallelismUnsupportedError(
            ", ".join(f"{name} is {size}" for name, size in wrong.items()),
            "one rank is supported: run one server a GPU, each with an ssd.path of its own",
        )


def _refuse_groups(cache: Any) -> None:
    groups = cache.kv_cache_groups
    kinds = [kind for group in groups for kind in _kinds(group.kv_cache_spec)]
    if len(groups) != 1 or not set(kinds) <= set(_KINDS):
        raise CacheGroupsUnsupportedError(
            f"the KV cache has {len(groups)} groups, of {', '.join(kinds)}; one of {' or '.join(_KINDS)} is supported",
            "use a model whose every layer attends to all tokens",
        )
    block, hashed = groups[0].kv_cache_spec.block_size, getattr(cache, "hash_block_size", None)
    if hashed not in (None, block):
        raise CacheGroupsUnsupportedError(
            f"blocks have {block} tokens, and hashes are of {hashed}", "leave --prefix-match-unit out"
        )


def _kinds(spec: Any) -> list[str]:
    """The kinds of a group's layers, by vLLM's names; several where a group has layers of unequal width."""
    layers = getattr(spec, "kv_cache_specs", None)
    return sorted({type(one).__name__ for one in ([spec] if layers is None else layers.values())})


def _refuse_hashes(cache: Any, environment: Mapping[str, str]) -> None:
    algorithm = cache.prefix_caching_hash_algo
    if algorithm.startswith("xxhash") and "PYTHONHASHSEED" not in environment:
        raise HashSeedError(
            f"prefix_caching_hash_algo is {algorithm!r}, whose seed is drawn anew at each start: nothing that is on "
            "the SSD would be found again",
            "set --prefix-caching-hash-algo sha256_cbor, or the environment variable PYTHONHASHSEED",
        )


def model_of(vllm: Any, cache: Any, planes: VllmPlanes, version: str) -> dict[str, object]:
    """The section `model` of the engine's configuration: what a page is, and all that makes its bytes what they are.

    But for the weights (`weights_of`). `version`: vLLM's, since what a layout's name means is vLLM's affair.
    """
    model, parallel, settings = vllm.model_config, vllm.parallel_config, vllm.cache_config
    algorithm = settings.prefix_caching_hash_algo
    facts: dict[str, object] = {
        "vllm": version,
        "layout": str(cache.kv_cache_layout),
        "kind": " ".join(_kinds(cache.kv_cache_groups[0].kv_cache_spec)),
        "block_size": cache.kv_cache_groups[0].kv_cache_spec.block_size,
        "layers": planes.described,
        "names": sorted(planes.layers),
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "kv_cache_dtype": str(settings.cache_dtype),
        "hf_config": digest_of(model.hf_config.to_dict()),
        "tensor_parallel": [0, parallel.tensor_parallel_size],
        "hash_algorithm": algorithm,
    }
    if planes.tensors[0].device.type == "cpu":
        facts["processor"] = [platform.machine(), *_tiles()]
    if not algorithm.endswith("_cbor"):  # pickle's bytes are of a version of Python
        facts["python"] = f"{sys.version_info.major}.{sys.version_info.minor}"
    salt = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    return {"name": str(model.model), **planes.model(), "salt": salt}


def _tiles(cpuinfo: Path = Path("/proc/cpuinfo")) -> list[str]:
    """What decides how vLLM's attention on a CPU packs keys, as far as the processor has it. Raises `OSError`."""
    lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    flags = next((line for line in lines if line.startswith("flags")), "")
    return sorted(_TILES.intersection(flags.split()))


def weights_of(vllm: Any) -> str:
    """The identity of the weights that vLLM has loaded: of the files that it has read them from.

    vLLM draws dummy weights from a fixed seed, so there the model's configuration says all of them. Raises
    `WeightsNotFoundError`.
    """
    model, load = vllm.model_config, vllm.load_config
    if load.load_format == "dummy":
        return "dummy"
    name = getattr(model, "model_weights", None) or model.model
    return weights_identity(model_directory(str(name), model.revision, load.download_dir))
