"""The namespace under SGLang: each line of the table changes it, and nothing else does."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gdscache import CacheEngine
from gdscache.config import Config
from gdscache.errors import IntegrationError, WeightsNotFoundError
from gdscache.integrations import weights
from gdscache.integrations.sglang import facts
from gdscache.integrations.sglang.host import HostPages
from gdscache.integrations.sglang.refused import RULES, refuse_model, refuse_setup
from gdscache.integrations.sglang.setup import weights_of
from tests.support import sglang_fields as stand_in

KEYS = [hashlib.sha256(bytes([number])).hexdigest() for number in range(3)]
SLOTS = [0, 4, 8]
LINES = stand_in.lines()
OPENED = [line for line in LINES if not line.startswith("environment.")]  # the others' namespaces are compared


def pages(folder: Path, described: dict[str, object]) -> HostPages:
    """A storage as SGLang starts it."""
    sections = {
        "model": described,
        "ssd": {"path": str(folder / "ssd"), "capacity": "1MiB", "transport": "posix", "gds": "off", "threads": 1},
        "host_buffer": "64KiB",
    }
    return HostPages(CacheEngine(Config.from_dict(sections), stand_in.planes().tensors))


def restarted(folder: Path, described: dict[str, object]) -> int:
    """The pages that a restarted server finds."""
    again = pages(folder, described)
    found = again.exists(KEYS)
    again.close()
    return found


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with three pages of the plain setup."""
    folder = tmp_path_factory.mktemp("sglang")
    with pytest.MonkeyPatch.context() as monkeypatch:
        first = pages(folder, stand_in.Setup(folder).described(stand_in.planes(), monkeypatch))
        assert first.set(KEYS, SLOTS) == [True] * 3
        first.close()
    return folder


def namespace(line: str | None, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    given = stand_in.Setup(folder)
    if line is not None:
        given.change(line)
    return given.described(stand_in.planes(), monkeypatch)


def test_a_restart_of_the_same_setup_finds_its_pages(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert restarted(stored, namespace(None, stored, monkeypatch)) == 3


@pytest.mark.parametrize("line", OPENED)
def test_another_value_of_a_line_finds_nothing(line: str, stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = namespace(line, stored, monkeypatch)
    assert other["salt"] != namespace(None, stored, monkeypatch)["salt"]
    assert restarted(stored, other) == 0


def test_each_line_alone_makes_the_difference(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = facts_in(namespace(None, stored, monkeypatch))
    for line in LINES:
        assert differences(line, stored, monkeypatch, plain) == {line}


@pytest.mark.soak
@pytest.mark.parametrize("line", LINES)
def test_a_line_that_is_taken_out_is_missed(line: str, stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with stand_in.without(line, monkeypatch):
        assert differences(line, stored, monkeypatch) == set()
        with pytest.raises(AssertionError):
            test_another_value_of_a_line_finds_nothing(line, stored, monkeypatch)


def differences(
    line: str, stored: Path, monkeypatch: pytest.MonkeyPatch, plain: dict[str, object] | None = None
) -> set[str]:
    """The facts that differ where that line does. `plain`: those of the plain setup, where somebody has them."""
    plain = plain or facts_in(namespace(None, stored, monkeypatch))
    found = facts_in(namespace(line, stored, monkeypatch))
    return {name for name in {*plain, *found} if plain.get(name) != found.get(name)}


def facts_in(described: dict[str, object]) -> dict[str, object]:
    found: dict[str, object] = json.loads(str(described["salt"]))
    return found


def test_what_is_harmless_keeps_the_namespace(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = namespace(None, stored, monkeypatch)
    given = stand_in.Setup(stored)
    for line in facts.table().named("harmless"):
        if line.split(".")[1] not in (*facts.FILES, "model_path", "download_dir"):  # what they name is looked at
            given.change(line)
    assert given.described(stand_in.planes(), monkeypatch) == plain
    for name in facts.FILES:  # the same content elsewhere
        moved = stored / f"moved {name}"
        moved.write_text("x")
        setattr(given.server, name, str(moved))
    assert given.described(stand_in.planes(), monkeypatch) == plain


def test_a_pool_that_lies_otherwise_is_another_namespace(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = stand_in.planes()
    salts = [stand_in.Setup(stored).described(plain, monkeypatch)["salt"]]
    for name in plain.described:
        other = dataclasses.replace(plain, described={**plain.described, name: "another"})
        salts.append(stand_in.Setup(stored).described(other, monkeypatch)["salt"])
    assert len(set(map(str, salts))) == 1 + len(plain.described)


def test_a_field_that_nobody_knows_is_held(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = namespace(None, stored, monkeypatch)
    for line in ("ServerArgs.new", "ModelConfig.new", "environment.SGLANG_NEW"):
        found = namespace(line, stored, monkeypatch)
        assert found != plain
        assert facts_in(found)[line] == "another"
    assert namespace("environment.OTHER", stored, monkeypatch) == plain, "none of SGLang's"


def test_what_sglang_has_decided_counts_and_not_what_it_was_given() -> None:
    server = SimpleNamespace(attention_backend=None, resolved_dict=lambda: {"attention_backend": "fa3"})
    found = facts.resolved(server)
    assert found.attention_backend == "fa3"
    assert type(found).__name__ == "ServerArgs", "the table knows it by that name"
    assert facts.resolved(found) is found


def test_the_refused_lines_are_those_that_are_refused() -> None:
    ruled = {name: rule for rule in RULES for name in rule.fields}
    assert sorted(ruled) == sorted(stand_in.of_class("ServerArgs", "refused"))
    for name, rule in ruled.items():
        with pytest.raises(rule.error, match=name):
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
