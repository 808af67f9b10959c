"""The model of these tests, and what it answers without a cache: made once."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from tests.engines import vllm_parts as parts


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the model."""
    return parts.made(tmp_path_factory.mktemp("model"), parts.KIND)


@pytest.fixture(scope="session")
def plain(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What vLLM answers to `parts.PROMPTS` without a connector and without its own prefix cache."""
    result = parts.run(
        tmp_path_factory.mktemp("plain"),
        model,
        [("ask", {"prompts": parts.PROMPTS})],
        llm={"enable_prefix_caching": False},
    )
    answers: list[dict[str, Any]] = result.answers[1]
    assert parts.cached(answers) == [0] * len(parts.PROMPTS)
    for a, b in itertools.combinations(answers, 2):
        assert parts.drift(a, b) > 2 * parts.DRIFT, "prompts that answer alike prove nothing"
    return answers
