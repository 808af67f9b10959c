"""vLLM's facts that no line of the table is: code that is run, and weights from elsewhere."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gdscache.errors import WeightsNotFoundError
from gdscache.integrations.vllm import setup
from tests.support import vllm_fields as stand_in


def test_code_counts_where_it_is_run(tmp_path: Path) -> None:
    given = stand_in.Setup(tmp_path)
    given.parts["ModelConfig"].trust_remote_code = False
    before = given.described()
    given.change("code")
    assert given.described() == before


@pytest.mark.parametrize("line", ["code", "processors"])
def test_files_beside_the_configuration_count_where_the_weights_are_elsewhere(tmp_path: Path, line: str) -> None:
    given = stand_in.Setup(tmp_path)
    given.parts["ModelConfig"].model_weights = "s3://bucket/model"
    before = given.described()
    given.change(line)
    assert given.described() != before


def test_processors_count_where_there_are_media(tmp_path: Path) -> None:
    given = stand_in.Setup(tmp_path)
    given.parts["ModelConfig"].multimodal_config = None
    before = given.described()
    given.change("processors")
    assert given.described() == before


def test_weights_from_elsewhere_need_a_name() -> None:
    for load_format in ("tensorizer", "ipc_cache", "modelexpress", "a plugin's"):
        vllm = SimpleNamespace(load_config=SimpleNamespace(load_format=load_format))
        with pytest.raises(WeightsNotFoundError, match=load_format) as raised:
            setup.weights_of(vllm)
        assert "model.weights" in raised.value.hint


def test_weights_from_another_hub_need_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The snapshot of that name in Hugging Face's cache is not what vLLM reads."""
    monkeypatch.setattr(setup, "model_directory", lambda *_: tmp_path)
    monkeypatch.setattr(setup, "weights_served", lambda _, __, elsewhere, source: elsewhere or source())
    model = SimpleNamespace(model="org/name", revision=None)
    vllm = SimpleNamespace(
        load_config=SimpleNamespace(load_format="auto", download_dir=str(tmp_path)), model_config=model
    )
    read: Any = (tmp_path, None)
    assert setup.weights_of(vllm) == read
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "True")
    elsewhere: Any = setup.weights_of(vllm)
    assert elsewhere == {"VLLM_USE_MODELSCOPE": "True"}
    model.model = str(tmp_path)
    assert setup.weights_of(vllm) == read
