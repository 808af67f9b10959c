"""The model in plain torch: RMSNorm, rotary embeddings, grouped-query or latent attention over paged planes, SwiGLU.

A batch is rows: tokens of any number of requests, prompts and single tokens alike. Everything but attention works on
all rows at once; attention goes request by request over the places that the request's blocks have.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.nn.attention.bias import CausalBias, causal_lower_right

from gdscache.commands.toy_engine.shape import ModelShape
from gdscache.tracing import OFF, Timeline

Ready = Callable[[], None]


@dataclasses.dataclass(frozen=True)
class Span:
    """One request's rows in a batch, which are the last of its tokens so far. `context`: the places of all of these
    tokens, int64 (tokens,)."""

    rows: slice
    context: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Batch:
    """One step's tokens, their positions, and their places, int64 (rows,). A place is the number of a row in planes
    that are seen as one row of tokens (`KVPool.rows`)."""

    tokens: torch.Tensor
    positions: torch.Tensor
    places: torch.Tensor
    spans: Sequence[Span]


@dataclasses.dataclass(frozen=True)
class _Step:
    """What attention needs beside its input. `ready()` returns when (or queues that) the layer's cached pages are
    there."""

    batch: Batch
    biases: Sequence[CausalBias | None]
    planes: Sequence[torch.Tensor]
    cos: torch.Tensor
    sin: torch.Tensor
    ready: Ready

    def write(self, *rows: torch.Tensor) -> None:
        """Put this batch's rows into the planes."""
        for plane, new in zip(self.planes, rows, strict=True):
            plane.index_copy_(0, self.batch.places, new)

    def attend(self, q: torch.Tensor, attention: Callable[..., torch.Tensor]) -> torch.Tensor:
        """`attention(q, *rows, bias)` of each request, with the rows of all of its tokens so far, (tokens, *row) a
        plane."""
        return torch.cat(
            [
                attention(q[span.rows], *(plane.index_select(0, span.context) for plane in self.planes), bias)
                for span, bias in zip(self.batch.spans, self.biases, strict=True)
            ]
        )


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    """Grouped-query attention; the planes of a layer are K and V, each (places, kv_heads, head_dim)."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.heads = (-1, shape.head_dim)
        query, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, query, bias=shape.qkv_bias)
        self.k_proj = nn.Linear(shape.hidden, kv, bias=shape.qkv_bias)
        self.v_proj = nn.Linear(shape.hidden, kv, bias=shape.qkv_bias)
        self.o_proj = nn.Linear(query, shape.hidden, bias=shape.o_bias)
        self.q_norm = RMSNorm(shape.head_dim, shape.norm_eps) if shape.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(shape.head_dim, shape.norm_eps) if shape.qk_norm else nn.Identity()

    def forward(self, x: torch.Tensor, step: _Step) -> torch.Tensor:
        q = rotate(self.q_norm(self.q_proj(x).unflatten(1, self.heads)), step.cos, step.sin)
        k = rotate(self.k_norm(self.k_proj(x).unflatten(1, self.heads)), step.cos, step.sin)
        step.write(k, self.v_proj(x).unflatten(1, self.heads))
        step.ready()
        out: torch.Tensor = self.o_proj(step.attend(q, attend))
        return out


class LatentAttention(nn.Module):
    """Multi-head latent attention in its plain form: keys and values of the whole context are made anew from the
    latents. The planes of a layer are the latent, (places, rank), and the rope part."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        assert shape.mla is not None, "a shape without latent attention"
        self.mla, self.heads = shape.mla, shape.heads
        self.q_proj = nn.Linear(shape.hidden, shape.heads * (self.mla.nope_dim + self.mla.rope_dim), bias=False)
        self.kv_a_proj = nn.Linear(shape.hidden, self.mla.rank + self.mla.rope_dim, bias=False)
        self.kv_a_norm = RMSNorm(self.mla.rank, shape.norm_eps)
        self.kv_b_proj = nn.Linear(self.mla.rank, shape.heads * (self.mla.nope_dim + self.mla.v_dim), bias=False)
        self.o_proj = nn.Linear(shape.heads * self.mla.v_dim, shape.hidden, bias=False)

    def forward(self, x: torch.Tensor, step: _Step) -> torch.Tensor:
        mla = self.mla
        nope, rope = self.q_proj(x).unflatten(1, (self.heads, -1)).split([mla.nope_dim, mla.rope_dim], dim=2)
        q = torch.cat([nope, rotate(rope, step.cos, step.sin)], dim=2)
        latent, rope = self.kv_a_proj(x).split([mla.rank, mla.rope_dim], dim=1)
        step.write(self.kv_a_norm(latent), rotate(rope[:, None], step.cos, step.sin)[:, 0])
        step.ready()
        out: torch.Tensor = self.o_proj(step.attend(q, self._attend))
        return out

    def _attend(
        self, q: torch.Tensor, latent: torch.Tensor, rope: torch.Tensor, bias: CausalBias | None
    ) -> torch.Tensor:
        nope, v = self.kv_b_proj(latent).unflatten(1, (self.heads, -1)).split([self.mla.nope_dim, self.mla.v_dim], 2)
        k = torch.cat([nope, rope[:, None].expand(-1, self.heads, -1)], dim=2)
        return attend(q, k, v, bias)


class MLP(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=shape.mlp_bias)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=shape.mlp_bias)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=shape.mlp_bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden, shape.norm_eps)
        self.self_attn = LatentAttention(shape) if shape.mla else Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden, shape.norm_eps)
        self.mlp = MLP(shape)

    def forward(self, x: torch.Tensor, step: _Step) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), step)
        out: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Transformer(nn.Module):
    """The whole model. Its parameters are named as in a Hugging Face checkpoint, without the prefix `model.`."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.hidden, shape.norm_eps)
        self.lm_head = None if shape.tied else nn.Linear(shape.hidden, shape.vocab, bias=False)

    def forward(
        self,
        batch: Batch,
        planes: Sequence[Sequence[torch.Tensor]],
        ready: Callable[[int], None] = lambda layer: None,
        timeline: Timeline = OFF,
    ) -> torch.Tensor:
        """Hidden states of all rows, (rows, hidden). Writes their K and V (or latents) into `planes[layer]`, each
        (places, *row).

        `ready(layer)` is called before a layer's attention reads pages that it has not written itself.
        """
        x = self.embed_tokens(batch.tokens)
        angles = batch.positions[:, None] * rope_frequencies(self.shape, x.device)
        cos, sin = angles.cos(), angles.sin()
        cos = torch.cat([cos, cos], dim=1)[:, None].to(x.dtype)
        sin = torch.cat([-sin, sin], dim=1)[:, None].to(x.dtype)
        biases = [causal_bias(span) for span in batch.spans]
        for number, layer in enumerate(self.layers):
            with timeline.compute("layer", x.device, layer=number):
                x = layer(x, _Step(batch, biases, planes[number], cos, sin, functools.partial(ready, number)))
        out: torch.Tensor = self.norm(x)
        return out

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """(rows, hidden) to float32 (rows, vocab)."""
        head = self.embed_tokens if self.lm_head is None else self.lm_head
        return F.linear(hidden, head.weight).float()


def causal_bias(span: Span) -> CausalBias | None:
    """With it a token sees itself and what is before it; a single token sees all."""
    rows = span.rows.stop - span.rows.start
    return causal_lower_right(rows, len(span.context)) if rows > 1 else None


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: CausalBias | None) -> torch.Tensor:
    """Attention of the last `t` of `n` tokens: q (t, heads, dim), k (n, kv_heads, dim), v (n, kv_heads, v_dim) to
    (t, heads * v_dim)."""
    grouped = q.shape[1] != k.shape[1]
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, enable_gqa=grouped)
    return out[0].transpose(0, 1).flatten(1)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of x (rows, heads, dim), halves paired as Hugging Face's Llama pairs them; cos and sin
    (rows, 1, dim), the first half of sin negated."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def rope_frequencies(shape: ModelShape, device: torch.device) -> torch.Tensor:
    """Radians a position, float32 (rope_dim / 2,). Llama 3 divides those of long wavelengths by a factor and blends
    between the two bounds (its published reference code)."""
    exponents = torch.arange(0, shape.rope_dim, 2, dtype=torch.float32, device=device) / shape.rope_dim
    frequencies = 1.0 / shape.rope_theta**exponents
    scaling = shape.rope_scaling
    if scaling is None:
        return frequencies
    turns = scaling.original_tokens * frequencies / (2 * math.pi)  # over the context that the model was trained on
    span = scaling.high_freq_factor - scaling.low_freq_factor
    kept = ((turns - scaling.low_freq_factor) / span).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)
