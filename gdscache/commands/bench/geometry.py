"""The benchmarks' model: Llama-3-8B's planes, 32 layers of 8 KV heads of 128, in bfloat16."""

from __future__ import annotations

from typing import Any

from gdscache.errors import InvalidValueError

LAYERS, KV_HEADS, HEAD_DIM = 32, 8, 128
TOKEN_BYTES = LAYERS * 2 * KV_HEADS * HEAD_DIM * 2
MOST_TOKENS = 512  # of a page


def model_of(page_bytes: int) -> dict[str, Any]:
    """A model section with pages of `page_bytes`, a multiple of a token's 128 KiB."""
    if page_bytes < TOKEN_BYTES or page_bytes % TOKEN_BYTES or page_bytes > MOST_TOKENS * TOKEN_BYTES:
        raise InvalidValueError(
            f"a page of {page_bytes:,} bytes is no whole number of tokens of {TOKEN_BYTES:,} bytes",
            f"use a multiple of 128KiB, at most {MOST_TOKENS * TOKEN_BYTES >> 20}MiB",
        )
    return {
        "name": "bench",
        "layers": LAYERS,
        "kv_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "page_tokens": page_bytes // TOKEN_BYTES,
    }
