"""Conversations that come back while others run, in a pool so small that requests are preempted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engines import vllm_parts as parts
from tests.engines.vllm_parts import requests

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1800)]

REQUESTS = 40 if not torch.cuda.is_available() else 2000 if parts.KIND in ("mha", "mla") else 1000
ALIKE = 0.995  # of the requests have the same tokens: the sums of a batch are made in another order each time
WORSE = 0.02  # than without our cache in the same pool, where ties may go either way


def test_a_trace_at_a_rate_that_preempts(model: Path, tmp_path: Path) -> None:
    """Every request ends as it does without a cache. What began on wrong bytes would show by its first token."""
    prompts = requests(REQUESTS)
    states = parts.KIND in parts.STATES  # their blocks have some 200 tokens
    many = {"max_num_seqs": 64, "max_num_batched_tokens": 2048}
    small = {**many, "num_gpu_blocks_override": 400 if states else 20 * min(64, REQUESTS // 2)}
    small["enable_prefix_caching"] = True  # vLLM's default, but with states
    given: dict[str, Any] = {"limit": 1200, "environment": parts.WITH_STATES if states else {}}
    steps = [("ask", {"prompts": prompts, "together": True})]
    alone = parts.run(tmp_path, model, steps, llm={**many, "enable_prefix_caching": False}, **given).answers[1]
    least, drift = ALIKE, parts.DRIFT
    if parts.TIES or states:  # a state's sums depend on the batch, on a CPU too
        uncached = parts.run(tmp_path, model, steps, llm=small, **given).answers[1]
        least = parts.alike(uncached, alone) - WORSE
        drift = max(drift, *(parts.first_drift(a, b) for a, b in zip(uncached, alone, strict=True)))
    connector = parts.cache(tmp_path / "ssd", cpu={"capacity": "256MiB"}, ssd={"capacity": "2GiB"})
    for _ in range(2):  # the second run finds the first one's pages on the SSD
        ended = parts.run(tmp_path, model, [*steps, ("drain", {}), ("tell", {})], connector, llm=small, **given)
        found, told = ended.answers[1], ended.answers[3]
        assert [answer["why"] for answer in found] == ["length"] * len(prompts)
        drifts = [parts.first_drift(a, b) for a, b in zip(found, alone, strict=True)]
        assert max(drifts) <= drift, sorted(drifts)[-5:]
        share = parts.alike(found, alone)
        print(f"{len(prompts)} requests, {share:.2%} the same tokens (at least {least:.2%}), first probabilities")
        print(f"{max(drifts):.3f} apart (at most {drift:.3f}), {sum(parts.cached(found))} tokens cached, {told}")
        assert share >= least
        assert sum(parts.cached(found)) > 0
        assert (told["leases"], told["check"]) == (0, [])
