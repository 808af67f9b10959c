"""Models of transformers that are a few kilobytes, and their answers through the cache."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from gdscache import CacheEngine, HybridEngine
from gdscache.config import ModelConfig
from gdscache.integrations.transformers import PrefixCache, model_section

PAGE = 8

NEW = 9

PROMPT = 45  # 5 full pages and a tail

SMALL = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 512, "initializer_range": 0.2, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": None,
}  # fmt: skip

GQA = {"num_key_value_heads": 2, "head_dim": 16}
LATENT = {"kv_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 16, "num_key_value_heads": 4}
EXPERTS = {"num_experts_per_tok": 4, "moe_intermediate_size": 16}  # all of 4: rounding cannot flip a choice
GROUPS = {"n_group": 2, "topk_group": 2}  # of experts

CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SMALL, num_key_value_heads=2),
    "qwen3": lambda: transformers.Qwen3Config(**SMALL, **GQA),
    "deepseek": lambda: transformers.DeepseekV3Config(
        **SMALL, **LATENT, **EXPERTS, **GROUPS, n_routed_experts=4, first_k_dense_replace=1, q_lora_rank=16
    ),
}

WINDOW = 20  # tokens: no multiple of a page

SLIDING = {**SMALL, "num_key_value_heads": 2, "sliding_window": WINDOW}

SHARED = {
    "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": 61,
}  # fmt: skip

UNEVEN = ("gemma4", "mimo_v2_flash")  # models whose layers have heads of unequal shapes or numbers

WINDOWED = {  # models that have layers of a sliding window
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **SLIDING, head_dim=16, layer_types=["sliding_attention", "full_attention", "sliding_attention"]
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(**SLIDING, head_dim=16, num_local_experts=2, num_experts_per_tok=2),
    "mistral": lambda: transformers.MistralConfig(**SLIDING),
    "gemma2": lambda: transformers.Gemma2Config(**SLIDING, head_dim=16),
    "qwen2": lambda: transformers.Qwen2Config(**SLIDING, use_sliding_window=True, max_window_layers=1),
    "cohere2": lambda: transformers.Cohere2Config(**SLIDING, sliding_window_pattern=2),
    # Heads of two shapes; the last two layers of Gemma's have the keys and values of others.
    "gemma4": lambda: transformers.Gemma4TextConfig(
        **{**SLIDING, **SHARED}, head_dim=16, global_head_dim=32, hidden_size_per_layer_input=8
    ),
    "gemma3n": lambda: transformers.Gemma3nTextConfig(
        **{**SLIDING, **SHARED},
        head_dim=16,
        hidden_size_per_layer_input=8,
        laurel_rank=8,
        altup_num_inputs=2,
        activation_sparsity_pattern=[0.0] * 4,
    ),
    "mimo_v2_flash": lambda: transformers.MiMoV2FlashConfig(
        **SLIDING, **EXPERTS, head_dim=16, v_head_dim=8, n_routed_experts=4
    ),
    "llama4": lambda: transformers.Llama4TextConfig(
        **{**SMALL, "num_hidden_layers": 4},
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size_mlp=48,
        attention_chunk_size=WINDOW,
        moe_layers=[],
    ),
}

LINEAR = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
LINEAR_HEADS = {**LINEAR, "linear_head_dim": 16}
CONV = {"layer_types": ["conv", "full_attention", "conv"]}
DELTA = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 16, "num_key_value_heads": 2}
MOE = {**EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 16}

STATEFUL = {  # models that have layers with a state
    "qwen3_next": lambda: transformers.Qwen3NextConfig(**SMALL, **GQA, **LINEAR, **DELTA, **MOE),
    "lfm2": lambda: transformers.Lfm2Config(**SMALL, **CONV, num_key_value_heads=2),
    "bamba": lambda: transformers.BambaConfig(**SMALL, **MAMBA, attn_layer_indices=[1]),
    "falcon_h1": lambda: transformers.FalconH1Config(**SMALL, **MAMBA, mamba_d_ssm=64),
    "granitemoehybrid": lambda: transformers.GraniteMoeHybridConfig(
        **SMALL, **MAMBA, **LINEAR, num_local_experts=4, num_experts_per_tok=4, shared_intermediate_size=16
    ),
    "nemotron_h": lambda: transformers.NemotronHConfig(
        **{**SMALL, "num_hidden_layers": None},
        **EXPERTS,
        **GQA,
        layers_block_type=["linear_attention", "mlp", "full_attention", "moe"],
        mamba_num_heads=4,
        mamba_head_dim=16,
        ssm_state_size=8,
        n_groups=2,
        chunk_size=16,
        n_routed_experts=4,
        moe_shared_expert_intermediate_size=16,
    ),
    "zamba2": lambda: transformers.Zamba2Config(
        **{**SMALL, "num_hidden_layers": 4},
        num_key_value_heads=4,
        layers_block_type=["linear_attention", "hybrid", "linear_attention", "hybrid"],
        mamba_d_state=8,
        n_mamba_heads=4,
        mamba_headdim=16,
        chunk_size=16,
    ),
    "kimi_linear": lambda: transformers.KimiLinearConfig(
        **SMALL, **LATENT, **EXPERTS, **GROUPS, **LINEAR_HEADS, linear_num_heads=4, num_local_experts=4
    ),
    "bailing_hybrid": lambda: transformers.BailingHybridConfig(
        **SMALL, **LATENT, **EXPERTS, **GROUPS, **LINEAR_HEADS, num_experts=4
    ),
    "olmo_hybrid": lambda: transformers.OlmoHybridConfig(**SMALL, **DELTA, **LINEAR, num_key_value_heads=2),
    "qwen3_5": lambda: transformers.Qwen3_5TextConfig(**SMALL, **GQA, **LINEAR, **DELTA),
    "qwen3_5_moe": lambda: transformers.Qwen3_5MoeTextConfig(**SMALL, **GQA, **LINEAR, **DELTA, **MOE),
    "lfm2_moe": lambda: transformers.Lfm2MoeConfig(
        **SMALL, **EXPERTS, **CONV, num_experts=4, num_dense_layers=1, num_key_value_heads=2
    ),
    "lfm3": lambda: transformers.Lfm3Config(
        **SLIDING, head_dim=16, layer_types=["conv", "sliding_attention", "full_attention"]
    ),
}


def build(kind: str, device: str = "cpu", dtype: str = "float32", seed: int = 7) -> PreTrainedModel:
    torch.manual_seed(seed)
    try:
        config = (CONFIGS | WINDOWED | STATEFUL)[kind]()
    except AttributeError as error:  # older versions lack some models
        pytest.skip(f"transformers {transformers.__version__}: {error}")
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model.to(device=device, dtype=getattr(torch, dtype)).eval()


def tokens(n: int = PROMPT, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 61, (1, n), generator=torch.Generator().manual_seed(seed))


def options(
    model: PreTrainedModel,
    path: Path,
    *,
    name: str = "m",
    weights: str = "",
    gpu: int = 64,
    cpu: int | None = 64,
    pack: str = "auto",
) -> dict[str, Any]:
    """A configuration with room for `gpu` and `cpu` pages."""
    section = model_section(model.config, dtype=model.dtype, name=name, weights=weights, page_tokens=PAGE)
    section["pack"] = pack
    layout = ModelConfig(**section).layout()
    return {
        "model": section,
        "gpu": {"device": str(model.device), "capacity": gpu * layout.plane_bytes},
        "cpu": None if cpu is None else {"capacity": cpu * layout.extent_bytes},
        "ssd": {"path": str(path), "capacity": 256 * layout.extent_bytes, "threads": 2},
        "host_buffer": "1MiB",
    }


def hybrid_options(
    model: PreTrainedModel, path: Path, *, gpu: str = "1MiB", cpu: str | None = "16MiB", pack: str = "auto"
) -> dict[str, Any]:
    section = model_section(model.config, dtype=model.dtype, name="m", page_tokens=PAGE, model=model)
    return {
        "model": section | {"pack": pack},
        "gpu": {"device": str(model.device), "capacity": gpu},
        "cpu": None if cpu is None else {"capacity": cpu},
        "ssd": {"path": str(path), "capacity": "16MiB", "threads": 2},
        "host_buffer": "16MiB",
    }


def generate(
    model: PreTrainedModel, ids: torch.Tensor, cache: DynamicCache | None, new: int = NEW
) -> tuple[torch.Tensor, torch.Tensor]:
    """Greedy tokens (rows, prompt + new) and the logits of the new ones (rows, new, vocabulary), on the host."""
    out = model.generate(
        ids.to(model.device),
        past_key_values=cache,
        max_new_tokens=new,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return out.sequences.cpu(), torch.stack(out.logits, 1).float().cpu()


def serve(engine: CacheEngine, model: PreTrainedModel, ids: torch.Tensor, salt: str = "") -> dict[str, Any]:
    """Answer a prompt through the cache and store it: tokens, logits, and what the cache found, with its bytes."""
    with PrefixCache(engine, model).open(ids, salt=salt) as cache:
        found, sources, prefix = cache.cached_tokens, cache.sources, digest(cache, cache.cached_tokens)
        sequences, logits = generate(model, ids, cache)
        for handle in cache.commit(sequences):
            assert not handle.result(20).dropped
        whole = [digest(cache, n) for n in range(0, ids.shape[1], PAGE)]
    engine.drain(20)
    return {"found": found, "sources": sources, "prefix": prefix, "tokens": sequences, "logits": logits, "pages": whole}


def cached(engine: CacheEngine | HybridEngine, model: PreTrainedModel, ids: torch.Tensor, salt: str = "") -> int:
    """Tokens of a prompt that the engine has pages of, of this model."""
    return engine.lookup(ids.cpu(), salt=PrefixCache(engine, model).salt(salt)).tokens


def digest(cache: DynamicCache, n: int) -> str:
    """Names the bytes of the first `n` tokens in all layers."""
    hasher = hashlib.sha256()
    for layer in cache.layers if n else ():
        for states in (layer.keys, layer.values):
            hasher.update(states[:, :, :n].contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return hasher.hexdigest()
