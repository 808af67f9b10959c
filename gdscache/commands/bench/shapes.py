"""Shapes of models with random weights, as in transformers' configurations. Nothing is downloaded."""

from __future__ import annotations

from typing import Any

FULL, WINDOW, LINEAR = "full_attention", "sliding_attention", "linear_attention"
MOST_POSITIONS = 131_072  # tokens of a sequence
STATES = ("qwen3-next", "granite-4-h-micro")  # shapes of models with a state
_LLAMA_KEYS = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size",
)  # fmt: skip
_LLAMA_SIZES = {
    "tiny": (256, 704, 4, 4, 4, 64, 4096),
    "1b": (2048, 8192, 16, 32, 8, 64, 128_256),
    "8b": (4096, 14_336, 32, 32, 8, 128, 128_256),
    "70b": (8192, 28_672, 80, 64, 8, 128, 128_256),
}
LLAMAS = {name: dict(zip(_LLAMA_KEYS, sizes, strict=True)) for name, sizes in _LLAMA_SIZES.items()}
HYBRIDS: dict[str, dict[str, Any]] = {
    "gemma-3-4b": {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "hidden_size": 2560,
        "intermediate_size": 10_240, "num_hidden_layers": 34, "num_attention_heads": 8, "num_key_value_heads": 4,
        "head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 1024,
        "layer_types": [FULL if layer % 6 == 5 else WINDOW for layer in range(34)], "rope_local_base_freq": 10_000.0,
        "hidden_activation": "gelu_pytorch_tanh", "vocab_size": 262_208,
    },
    "gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": 2880,
        "intermediate_size": 2880, "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8,
        "head_dim": 64, "sliding_window": 128, "layer_types": [WINDOW, FULL] * 12, "num_local_experts": 32,
        "num_experts_per_tok": 4, "experts_per_token": 4, "swiglu_limit": 7.0, "attention_bias": True,
        "vocab_size": 201_088,
    },
    # Qwen3-Next with 32 of its 512 experts: a token still passes 10 of them.
    "qwen3-next": {
        "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "hidden_size": 2048,
        "intermediate_size": 5120, "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 2,
        "head_dim": 256, "partial_rotary_factor": 0.25,
        "layer_types": [FULL if layer % 4 == 3 else LINEAR for layer in range(48)], "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
        "linear_num_value_heads": 32, "num_experts": 32, "num_experts_per_tok": 10, "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512, "decoder_sparse_step": 1, "norm_topk_prob": True,
        "mlp_only_layers": [], "vocab_size": 151_936,
    },
    "granite-4-h-micro": {
        "architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid", "hidden_size": 2048,
        "intermediate_size": 8192, "shared_intermediate_size": 8192, "num_hidden_layers": 40,
        "layer_types": [FULL if layer % 10 == 5 else LINEAR for layer in range(40)], "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 64, "position_embedding_type": "nope", "num_local_experts": 0,
        "num_experts_per_tok": 0, "mamba_n_heads": 64, "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 128,
        "mamba_d_conv": 4, "mamba_expand": 2, "mamba_chunk_size": 256, "mamba_conv_bias": True,
        "mamba_proj_bias": False, "vocab_size": 100_352,
    },
}  # fmt: skip
_OF_ALL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "head_dim": 128, "rms_norm_eps": 1e-05,
    "rope_theta": 500_000.0, "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
    "hidden_act": "silu", "tie_word_embeddings": False, "max_position_embeddings": MOST_POSITIONS,
}  # fmt: skip


def model_config(name: str) -> dict[str, Any]:
    """The content of a model's `config.json`."""
    found: dict[str, Any] = _OF_ALL | {**LLAMAS, **HYBRIDS}[name]
    return found


def token_bytes(name: str) -> int:
    """Bytes of a token, in bfloat16, in all layers with keys and values; windows are ignored."""
    of = model_config(name)
    layers = sum(kind in (FULL, WINDOW) for kind in of.get("layer_types", [FULL] * of["num_hidden_layers"]))
    found: int = 2 * layers * of["num_key_value_heads"] * of["head_dim"] * 2
    return found
