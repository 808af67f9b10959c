"""SGLang's facts that no line of the table is: files and pools, what it has decided itself, refused lines, weights."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gdscache import errors
from gdscache.errors import IntegrationError, WeightsNotFoundError
from gdscache.integrations import weights
from gdscache.integrations.sglang import setup
from gdscache.integrations.sglang.setup import refuse_model, refuse_setup, weights_of
from tests.support import sglang_fields as stand_in


def test_the_same_content_in_other_files_is_the_same_namespace(tmp_path: Path) -> None:
    given = stand_in.Setup(tmp_path)
    plain = given.described()
    for name in setup.FILES:
        moved = tmp_path / f"moved {name}"
        moved.write_text("x")
        setattr(given.server, name, str(moved))
    assert given.described() == plain


def test_a_pool_that_lies_otherwise_is_another_namespace(tmp_path: Path) -> None:
    given, plain = stand_in.Setup(tmp_path), stand_in.planes()
    salts = {str(given.described()["salt"])}
    for name in plain.described:
        given.planes = dataclasses.replace(plain, described={**plain.described, name: "another"})
        salts.add(str(given.described()["salt"]))
    assert len(salts) == 1 + len(plain.described)


def test_what_sglang_has_decided_counts_and_not_what_it_was_given() -> None:
    server = SimpleNamespace(attention_backend=None, resolved_dict=lambda: {"attention_backend": "fa3"})
    found = setup.resolved(server)
    assert found.attention_backend == "fa3"
    assert type(found).__name__ == "ServerArgs", "the table knows it by that name"
    assert setup.resolved(found) is found


def test_the_refused_lines_are_those_that_are_refused() -> None:
    ruled = {
        name: getattr(errors, rule["error"])
        for rule in setup.table().rules
        for name in rule["fields"].get("ServerArgs", ())
    }
    assert sorted(ruled) == sorted(stand_in.of_class("ServerArgs", "refused"))
    for name, error in ruled.items():
        with pytest.raises(error, match=name):
            refuse_setup(SimpleNamespace(**{name: "another"}))
    fine: dict[str, Any] = dict.fromkeys(stand_in.of_class("ModelConfig", "refused"), False)
    for name in fine:
        with pytest.raises(IntegrationError):
            refuse_model(SimpleNamespace(**{**fine, name: True}))


def test_the_weights_are_those_of_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "_started", time.time)  # so that what is written here is no change behind the reading

    def server(**changes: Any) -> Any:
        return SimpleNamespace(**{"load_format": "auto", "model_path": str(tmp_path), **changes})

    assert weights_of(server(load_format="dummy")) == "dummy"
    assert weights_of(server(load_format=SimpleNamespace(value="dummy"))) == "dummy"
    with pytest.raises(WeightsNotFoundError):
        weights_of(server())
    (tmp_path / "a.safetensors").write_bytes(b"1")
    first = weights_of(server(weight_cache_mode="off", kt_weight_path=None))
    assert weights_of(server()) == first
    (tmp_path / "a.safetensors").write_bytes(b"22")
    assert weights_of(server()) != first
    elsewhere = {"load_format": "remote_instance", "weight_cache_mode": "client", "kt_weight_path": "/w"}
    for name, value in elsewhere.items():
        with pytest.raises(WeightsNotFoundError, match=f"{name} is '{value}'") as raised:
            weights_of(server(**{name: value}))
        assert "model.weights" in raised.value.hint
