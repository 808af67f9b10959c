"""Models with states in vLLM's real engine: one state a sequence, which stands for all tokens before it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.engines import vllm_parts as parts
from tests.engines.vllm_parts import LONG

pytestmark = [
    pytest.mark.engines,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(parts.KIND == "mla", reason="other models than these tests are about"),
]

LLM = {"enable_prefix_caching": True}
SHARED = [{"parts": [[50, 900], [40 + number, 300]]} for number in range(3)]  # they part behind 900 tokens


def ask(*prompts: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """One after the other, none of which finds anything in vLLM's own cache."""
    return [step for prompt in prompts for step in (("reset", {}), ("ask", {"prompts": [prompt]}), ("drain", {}))]


def answers(told: list[Any]) -> list[dict[str, Any]]:
    return [answer for step in told if isinstance(step, list) for answer in step]


@pytest.mark.parametrize("kind", ["gdn", "convolutions"])
def test_a_state_comes_with_what_is_in_front_of_it(kind: str, tmp_path: Path) -> None:
    """Log-probabilities are compared: with a state of zeros the tokens may be equal all the same."""
    model, connector = parts.made(tmp_path, kind), parts.cache(tmp_path / "ssd")
    prompts = [*parts.PROMPTS, *SHARED]
    alone = [("ask", {"prompts": [prompt]}) for prompt in prompts]
    plain = answers(parts.run(tmp_path, model, alone, llm={"enable_prefix_caching": False}).answers)
    steps = [*ask(*prompts), *ask(*prompts), ("groups", {}), ("tell", {})]
    told = parts.run(tmp_path, model, steps, connector, llm=LLM).answers[1:]
    cold, warm = answers(told[: 3 * len(prompts)]), answers(told[3 * len(prompts) : 6 * len(prompts)])
    groups, rest = told[6 * len(prompts) : 6 * len(prompts) + 2]
    assert "state" in {group["keeps"] for group in groups}
    size = max(group["page_tokens"] for group in groups)
    wanted = [(sum(number for _, number in prompt["parts"]) - 1) // size * size for prompt in prompts]
    # The second one that shares 900 tokens finds no state where it parts and has one made, so the third one hits there.
    assert parts.cached(cold)[-3:] == [0, 0, 900 // size * size]
    assert parts.cached(warm) == wanted
    for found in (cold, warm):
        parts.same(found, plain)
    assert rest["leases"] == 0
    assert rest["check"] == []
    shutil.copytree(tmp_path / "ssd", tmp_path / "copy")
    restarted = parts.run(tmp_path, model, ask(*prompts), connector, llm=LLM).answers[1:]
    assert parts.cached(answers(restarted)) == wanted
    parts.same(answers(restarted), plain)
    for number, group in enumerate(groups):
        shutil.rmtree(tmp_path / "ssd")
        shutil.copytree(tmp_path / "copy", tmp_path / "ssd")
        flip = ("flip", {"tier": "ssd", "group": number})
        found = parts.run(tmp_path, model, [("reset", {}), flip, *ask(LONG), *ask(LONG)], connector, llm=LLM).answers
        assert found[2] > 0, f"nothing of group {group['name']} was flipped"
        bad, mended = answers(found[3:])
        assert bad["cached"] < wanted[0], group
        assert mended["cached"] == wanted[0], group
        parts.same([bad, mended], plain[:1] * 2)
