"""The namespace under vLLM: each line of the table changes it, and nothing else does."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from gdscache import CacheEngine, PageHashes
from gdscache.config import Config
from gdscache.errors import WeightsNotFoundError
from gdscache.integrations.fields import ENVIRONMENT
from gdscache.integrations.vllm import facts
from tests.support import vllm_fields as stand_in

HASHES = PageHashes([bytes([number]) * 32 for number in range(3)])
with tempfile.TemporaryDirectory() as _folder:
    LINES = stand_in.lines(Path(_folder))
OPENED = [line for line in LINES if not line.startswith(ENVIRONMENT)]  # the others' namespaces are compared


def opened(folder: Path, described: dict[str, object]) -> CacheEngine:
    """The engine that a server with these settings opens."""
    sections = {
        "model": described,
        "ssd": {"path": str(folder / "ssd"), "capacity": "1MiB", "transport": "posix", "gds": "off", "threads": 1},
        "host_buffer": "64KiB",
    }
    return CacheEngine(Config.from_dict(sections), [(tensor,) for tensor in stand_in.planes().tensors])


def restarted(folder: Path, described: dict[str, object]) -> int:
    """The pages that a restarted server finds."""
    with opened(folder, described) as engine:
        return engine.lookup(HASHES).tokens // 16


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with three pages of the plain setup."""
    folder = tmp_path_factory.mktemp("vllm")
    with opened(folder, stand_in.Setup(folder).described()) as engine:
        assert not engine.store(HASHES, [0, 1, 2]).result(60).dropped
        engine.drain(60)
    return folder


def namespace(line: str | None, folder: Path) -> dict[str, object]:
    given = stand_in.Setup(folder)
    if line is not None:
        given.change(line)
    return given.described()


def differences(line: str, folder: Path) -> set[str]:
    """The facts that differ where that line does."""
    plain, found = (json.loads(str(namespace(one, folder)["salt"])) for one in (None, line))
    return {name for name in {*plain, *found} if plain.get(name) != found.get(name)}


def test_a_restart_of_the_same_setup_finds_its_pages(stored: Path) -> None:
    assert restarted(stored, namespace(None, stored)) == 3


@pytest.mark.parametrize("line", OPENED)
def test_another_value_of_a_line_finds_nothing(line: str, stored: Path) -> None:
    other = namespace(line, stored)
    assert other != namespace(None, stored)
    assert restarted(stored, other) == 0


def test_each_line_alone_makes_the_difference(stored: Path) -> None:
    assert {line: differences(line, stored) for line in LINES} == {line: {line} for line in LINES}


@pytest.mark.soak
@pytest.mark.parametrize("line", LINES)
def test_a_line_that_is_taken_out_is_missed(line: str, stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with stand_in.without(line, monkeypatch):
        assert differences(line, stored) == set()
        if line in OPENED:
            with pytest.raises(AssertionError):
                test_another_value_of_a_line_finds_nothing(line, stored)


def test_what_is_harmless_keeps_the_namespace(stored: Path) -> None:
    plain, given = namespace(None, stored), stand_in.Setup(stored)
    by_hand = {"model", "model_weights", "revision", "max_model_len", "original_max_model_len", "quant_config"}
    for line in facts.table().named("harmless"):
        if line.split(".")[1] not in by_hand:  # what they come to is looked at
            given.change(line)
    assert given.described() == plain


def test_a_field_that_nobody_knows_is_held(stored: Path) -> None:
    plain = namespace(None, stored)
    for line in ("VllmConfig.new", "ModelConfig.new", "MultiModalConfig.new", "environment.VLLM_NEW"):
        assert differences(line, stored) == {line}
    assert namespace("environment.OTHER", stored) == plain, "none of vLLM's"


def test_code_counts_where_it_is_run(stored: Path) -> None:
    given = stand_in.Setup(stored)
    given.parts["ModelConfig"].trust_remote_code = False
    before = given.described()
    given.change("code")
    assert given.described() == before


def test_weights_from_elsewhere_need_a_name(stored: Path) -> None:
    for load_format in ("tensorizer", "ipc_cache", "modelexpress", "a plugin's"):
        vllm = SimpleNamespace(load_config=SimpleNamespace(load_format=load_format))
        with pytest.raises(WeightsNotFoundError, match=load_format) as raised:
            facts.weights_of(vllm)
        assert "model.weights" in raised.value.hint
