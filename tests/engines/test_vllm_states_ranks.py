"""A model with states in vLLM's real engine with tensor parallelism: each rank has its part of every state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engines import vllm_parts as parts
from tests.engines.vllm_parts import EXACT, LONG, OTHER
from tests.engines.vllm_script import DIGITS, DRAIN, METRICS, RESET, TELL, Script, ask, at_rest, each, equal

pytestmark = [
    pytest.mark.engines,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.device_count() < parts.TP, reason="too few GPUs"),
    pytest.mark.skipif(parts.KIND == "mla", reason="another model than these tests are about"),
]

RANKS: dict[str, Any] = {
    "llm": {"tensor_parallel_size": parts.TP, "distributed_executor_backend": "mp", "enable_prefix_caching": True},
    "environment": {"OMP_NUM_THREADS": "1"},
    "limit": 400.0,
}
PROMPTS = [LONG, OTHER, EXACT]
WHOLE = [1472, 672, 992]  # tokens of them that can be cached
SHARED: list[dict[str, Any]] = [{"parts": [[50, 900], [40 + number, 300]]} for number in range(3)]


def test_a_part_of_each_state_on_each_rank(tmp_path: Path) -> None:
    """Cold, from the CPU tier, and from the SSD behind a restart; then bytes of the last rank alone are bad."""
    model, alone = parts.made(tmp_path, "convolutions"), Script()
    for prompt in PROMPTS:
        alone.add("alone", RESET, ask(prompt))
    plain = alone.play(tmp_path, model, None, **RANKS)[0]["alone"]
    script = Script()
    script.add("", ("sizes", {}))
    script.add("cold", *each(PROMPTS))
    script.add("hits", *each(PROMPTS))
    script.add("shared", *each(SHARED))
    script.add("", METRICS, TELL)
    asked, rest = script.play(tmp_path, model, parts.cache(tmp_path / "ssd"), **RANKS)
    states, _ = rest["sizes"][0]
    assert (states["content"], states["extent"]) == (2 * 1_024 // parts.TP, 4096)
    assert parts.cached(asked["cold"]) == [0] * len(PROMPTS)
    assert parts.cached(asked["hits"]) == WHOLE
    assert parts.cached(asked["shared"]) == [0, 0, 896]
    for name in ("cold", "hits"):
        equal(asked[name], plain, DIGITS)
    at_rest(rest["tell"][0])
    assert not rest["metrics"][0].get("vllm:gdscache_bad_pages")
    again = Script()
    again.add("again", *each(PROMPTS))
    for group, zero in ((0, False), (0, True), (1, False)):
        flip = ("flip", {"tier": "ssd", "group": group, "zero": zero})
        again.add("bad", RESET, flip, ask(LONG), DRAIN)
        again.add("mended", RESET, ask(LONG), DRAIN)
    again.add("", TELL)
    asked, rest = again.play(tmp_path, model, parts.cache(tmp_path / "ssd"), **RANKS)
    assert parts.cached(asked["again"]) == WHOLE
    equal(asked["again"], plain, DIGITS)
    assert min(rest["flip"]) > 0
    assert max(parts.cached(asked["bad"])) < WHOLE[0]
    assert parts.cached(asked["mended"]) == WHOLE[:1] * 3
    equal([*asked["bad"], *asked["mended"]], plain[:1] * 6, DIGITS)
    at_rest(rest["tell"][0])
