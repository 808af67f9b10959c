"""vLLM's real engine, a restart, and hits from the SSD: the short one, in CI."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines import vllm_parts as parts
from tests.engines.vllm_script import TELL, ask, at_rest

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]


def test_a_restart_finds_its_pages(model: Path, tmp_path: Path) -> None:
    _restart(model, tmp_path)


def test_a_restart_finds_the_pages_of_all_groups(tmp_path: Path) -> None:
    """Layers with windows beside one of full attention."""
    _restart(parts.made(tmp_path, "windows"), tmp_path)


def _restart(model: Path, tmp_path: Path) -> None:
    connector = parts.cache(tmp_path / "ssd")
    first = parts.run(tmp_path, model, [ask(parts.LONG)], connector)
    second = parts.run(tmp_path, model, [ask(parts.LONG), TELL], connector)
    assert parts.cached(first.answers[1]) == [0]
    assert parts.cached(second.answers[1]) == [1472]
    parts.same(second.answers[1], first.answers[1])
    at_rest(second.answers[2])
