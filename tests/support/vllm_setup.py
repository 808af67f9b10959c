"""vLLM's configuration objects as far as the connector reads them to refuse a setup."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch


class FullAttentionSpec(SimpleNamespace):
    """By the name of vLLM's."""


class MLAAttentionSpec(SimpleNamespace):
    """By the name of vLLM's."""


class MambaSpec(SimpleNamespace):
    """By the name of vLLM's."""

    shapes, dtypes = ((2, 8), (4, 4)), (torch.bfloat16, torch.float16)


def setup(**changes: Any) -> tuple[Any, Any]:
    """vLLM's configuration objects as far as they are read; `changes` are paths such as `cache_config__cache_dtype`."""
    hf_config = SimpleNamespace(to_dict=lambda: {"layers": 4})
    text = SimpleNamespace(rope_parameters={"rope_type": "default"}, max_position_embeddings=4096)
    vllm = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            kv_load_failure_policy="recompute", kv_role="kv_both", kv_connector_extra_config={}
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1, data_parallel_size=1),
        cache_config=SimpleNamespace(prefix_caching_hash_algo="sha256", cache_dtype="auto"),
        model_config=SimpleNamespace(
            enable_sleep_mode=False,
            model="org/model",
            dtype="torch.bfloat16",
            quantization=None,
            trust_remote_code=False,
            hf_config=hf_config,
            hf_text_config=text,
            max_model_len=2048,
            original_max_model_len=2048,
            using_transformers_backend=lambda: False,
            get_and_verify_max_len=lambda asked: 4096,
        ),
        speculative_config=None,
        weight_transfer_config=None,
        lora_config=None,
        device_config=SimpleNamespace(device_type="cpu"),
    )
    group = SimpleNamespace(layer_names=["layer.0"], kv_cache_spec=FullAttentionSpec(block_size=16))
    cache = SimpleNamespace(kv_cache_groups=[group], hash_block_size=16, kv_cache_layout="LBNHC")
    for path, value in changes.items():
        *names, last = path.split("__")
        target: Any = {"vllm": vllm, "cache": cache}.get(names[0] if names else "", vllm)
        for name in names[1:] if names and names[0] in ("vllm", "cache") else names:
            target = getattr(target, name)
        setattr(target, last, value)
    return vllm, cache


def group(kind: type, tokens: int = 16) -> Any:
    return SimpleNamespace(layer_names=["layer.0"], kv_cache_spec=kind(block_size=tokens))


def uniform(kind: type, tokens: int = 16) -> Any:
    """A group of layers of unequal width, the second one of a kind of its own."""
    layers = {"layer.0": FullAttentionSpec(block_size=tokens), "layer.1": kind(block_size=tokens)}
    return SimpleNamespace(
        layer_names=["layer.0"], kv_cache_spec=SimpleNamespace(block_size=tokens, kv_cache_specs=layers)
    )
