"""What a model looks like, as numbers: presets with random weights, and what the config.json of a checkpoint says."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from gdscache import GdsCacheError

ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


class CheckpointError(GdsCacheError):
    """A folder that holds no checkpoint, or one that this engine cannot run."""


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Llama 3's scaling of rotary embeddings: long wavelengths are stretched by `factor`, short ones are kept."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_tokens: int


@dataclasses.dataclass(frozen=True)
class MlaShape:
    """Multi-head latent attention: a token's cache is one latent of `rank` and one rope part, shared by all heads."""

    rank: int
    rope_dim: int
    nope_dim: int
    v_dim: int


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """A decoder of Llama's shape. With `mla`, `kv_heads` and `head_dim` have no meaning."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    norm_eps: float = 1e-5
    rope_theta: float = 500_000.0
    rope_scaling: RopeScaling | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tied: bool = False
    mla: MlaShape | None = None
    dtype: str = "bfloat16"  # of the checkpoint

    @property
    def rope_dim(self) -> int:
        return self.mla.rope_dim if self.mla else self.head_dim

    @property
    def rows(self) -> tuple[tuple[int, ...], ...]:
        """Shape of one token's row in each plane of a layer: K and V, or latent and rope."""
        if self.mla:
            return (self.mla.rank,), (self.mla.rope_dim,)
        return (self.kv_heads, self.head_dim), (self.kv_heads, self.head_dim)

    def cache_geometry(self, dtype: str) -> dict[str, Any]:
        """What the `model` section of a gdscache configuration has to say of this model, cached in `dtype`."""
        section: dict[str, Any] = {"layers": self.layers, "dtype": dtype}
        if self.mla:
            return section | {"kv_lora_rank": self.mla.rank, "rope_dim": self.mla.rope_dim}
        return section | {"kv_heads": self.kv_heads, "head_dim": self.head_dim}


# The sizes of Llama 3.2 1B and Llama 3.1 8B are those of their published config.json.
# `tiny` fits configs/cpu_only.yaml, `8b` configs/llama3_8b.yaml.
PRESETS = {
    "tiny": ModelShape("tiny-llama", 4, 256, 8, 4, 64, 704, 512),
    "mla": ModelShape("tiny-mla", 4, 256, 8, 8, 96, 704, 512, mla=MlaShape(128, rope_dim=32, nope_dim=64, v_dim=64)),
    "1b": ModelShape(
        "llama-3-1b", 16, 2048, 32, 8, 64, 8192, 128_256, rope_scaling=RopeScaling(32.0, 1.0, 4.0, 8192), tied=True
    ),
    "8b": ModelShape(
        "llama-3-8b", 32, 4096, 32, 8, 128, 14_336, 128_256, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 8192)
    ),
}  # fmt: skip


def shape_of_config(config: Mapping[str, Any], where: str) -> ModelShape:
    """The shape that a Hugging Face config.json describes. Raises `CheckpointError` for what this engine cannot run."""
    architecture = next(iter(config.get("architectures") or [config.get("model_type", "unknown")]))
    if architecture not in ARCHITECTURES:
        raise CheckpointError(
            f"{where} is a {architecture}", f"this engine runs {', '.join(ARCHITECTURES)}, or a --preset"
        )
    if refused := _unsupported(config):
        raise CheckpointError(f"{where} ({architecture}) has {'; '.join(refused)}", "this engine has no code for that")
    try:
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        bias = bool(config.get("attention_bias", False))
        qwen2 = architecture == "Qwen2ForCausalLM"
        return ModelShape(
            name=where.rstrip("/").rpartition("/")[2] or architecture,
            layers=config["num_hidden_layers"],
            hidden=hidden,
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or hidden // heads,
            intermediate=config["intermediate_size"],
            vocab=config["vocab_size"],
            norm_eps=config.get("rms_norm_eps", 1e-6),
            rope_theta=_rope(config).get("rope_theta", 10_000.0),
            rope_scaling=_scaling(_rope(config)),
            qkv_bias=bias or qwen2,
            o_bias=bias and not qwen2,
            mlp_bias=bool(config.get("mlp_bias", False)),
            qk_norm=architecture == "Qwen3ForCausalLM",
            tied=bool(config.get("tie_word_embeddings", False)),
            dtype=config.get("dtype") or config.get("torch_dtype") or "float32",
        )
    except KeyError as error:
        raise CheckpointError(f"{where}: its config.json has no {error}", "is it complete?") from None


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """The rope parameters: one mapping since transformers 5, `rope_theta` and `rope_scaling` before."""
    older = {"rope_theta": config.get("rope_theta", 10_000.0)} | (config.get("rope_scaling") or {})
    return dict(config.get("rope_parameters") or older)


def _rope_type(rope: Mapping[str, Any]) -> str:
    return str(rope.get("rope_type") or rope.get("type") or "default")


def _scaling(rope: Mapping[str, Any]) -> RopeScaling | None:
    if _rope_type(rope) == "default":
        return None
    return RopeScaling(
        rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"], rope["original_max_position_embeddings"]
    )


def _unsupported(config: Mapping[str, Any]) -> list[str]:
    """What the model needs that this engine lacks, in words."""
    rope, problems = _rope(config), []
    if _rope_type(rope) not in ("default", "llama3"):
        problems.append(f"rope type {_rope_type(rope)!r} (default and llama3 are supported)")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        problems.append("rotary embeddings of a part of each head")
    if config.get("use_sliding_window") or set(config.get("layer_types") or ()) - {"full_attention"}:
        problems.append("sliding windows")
    if config.get("hidden_act", "silu") != "silu":
        problems.append(f"the activation {config['hidden_act']!r} (silu is supported)")
    if config.get("quantization_config"):
        problems.append("quantized weights")
    return problems
