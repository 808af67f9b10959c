"""A small Llama, and an engine for it that ends with all of its pages sound and given back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from gdscache import CacheEngine
from tests.support.tiny_transformers import build, options


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return build("llama")


@pytest.fixture
def engine(model: PreTrainedModel, tmp_path: Path) -> Iterator[CacheEngine]:
    with CacheEngine.from_config(options(model, tmp_path)) as engine:
        yield engine
        engine.drain(20)
        assert engine.stats()["tiers"]["gpu"]["private_slots"] == 0
        assert engine.check().problems == ()
