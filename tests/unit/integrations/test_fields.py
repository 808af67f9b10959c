"""A table of fields: what is held, what is left out, and that what it does not know is held."""

from __future__ import annotations

import dataclasses
import enum
import json
import logging
from pathlib import Path, PurePath
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from gdscache.errors import ConfigError, SleepModeUnsupportedError
from gdscache.integrations.fields import FieldTable, plain

TABLE = """
[held]
Model = ["dtype", "length"]
Cache = ["layout"]
environment = ["ENGINE_LAYOUT"]
[hashed]
Model = ["salt"]
[parts]
Model = ["cache"]
[[refused]]
error = "SleepModeUnsupportedError"
why = "it would sleep"
hint = "leave it off"
fine = ["deeply"]
fields.Cache = ["sleeps"]
[[harmless]]
why = "where"
fields = { Model = ["port"], Cache = ["host"], environment = ["ENGINE_PORT"] }
"""


@dataclasses.dataclass
class Cache:
    layout: str = "a"
    host: str = "h"
    sleeps: bool = False


@dataclasses.dataclass
class Model:
    dtype: Any = torch.bfloat16
    length: int = 5
    salt: str = "s"
    port: int = 1
    cache: Cache | None = dataclasses.field(default_factory=Cache)


@pytest.fixture
def table(tmp_path: Path) -> FieldTable:
    return read(tmp_path, TABLE)


def read(folder: Path, text: str) -> FieldTable:
    file = folder / "fields.toml"
    file.write_text(text)
    return FieldTable.read(file)


FACTS = {"Model.dtype": "dtype:torch.bfloat16", "Model.length": 5, "Cache.layout": "a"}


def test_held_fields_are_facts_and_no_others(table: FieldTable) -> None:
    assert table.facts([Model()]) == FACTS
    assert table.facts([Model(salt="x", port=2, cache=Cache(host="x", sleeps=True))]) == FACTS
    assert table.unknown([Model()]) == []
    assert table.named("harmless") == ["Cache.host", "Model.port", "environment.ENGINE_PORT"]
    assert table.named("held") == ["Cache.layout", "Model.dtype", "Model.length", "environment.ENGINE_LAYOUT"]


def test_a_part_that_is_missing(table: FieldTable) -> None:
    assert table.facts([Model(cache=None)]) == {key: value for key, value in FACTS.items() if "Cache" not in key}


def test_what_the_table_does_not_know_is_held(table: FieldTable, caplog: pytest.LogCaptureFixture) -> None:
    model = Model()
    model.new = 7  # type: ignore[attr-defined]
    model._own = 8  # type: ignore[attr-defined]
    with caplog.at_level(logging.INFO, "gdscache"):
        assert table.facts([model, SimpleNamespace(x=1)], {"ENGINE_X": "1", "ENGINE_PORT": "2"}) == {
            **FACTS,
            "Model.new": 7,
            "SimpleNamespace.x": 1,
            "environment.ENGINE_X": "1",
        }
    assert len(caplog.records) == 1
    assert "Model.new, SimpleNamespace.x, environment.ENGINE_X" in caplog.text
    assert table.unknown([model]) == ["Model.new"]


def test_values_that_are_refused(table: FieldTable) -> None:
    for sleeps in (False, None, "", "deeply"):
        table.refuse(Cache=SimpleNamespace(sleeps=sleeps))
    table.refuse(Cache=SimpleNamespace())
    with pytest.raises(SleepModeUnsupportedError, match="sleeps is True: it would sleep") as raised:
        table.refuse(Cache=Cache(sleeps=True))
    assert raised.value.hint == "leave it off"


def test_a_field_stands_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"Model.length is held, and hashed"):
        read(tmp_path, '[held]\nModel = ["length"]\n[hashed]\nModel = ["length"]')
    with pytest.raises(ConfigError, match="'hold'"):
        read(tmp_path, '[hold]\nModel = ["length"]')


class Color(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 3


class Plain:
    def __repr__(self) -> str:
        return f"<Plain at {hex(id(self))}>"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        ("x", "x"),
        (b"\x01", "01"),
        (Color.RED, "Color.RED"),
        (Level.HIGH, "Level.HIGH"),
        (PurePath("a/b"), "a/b"),
        ({1: [Color.RED], "b": (1, None)}, {"1": ["Color.RED"], "b": [1, None]}),
        ({"b", "a"}, ["a", "b"]),
        (torch.float16, "dtype:torch.float16"),
        (Cache, "tests.unit.integrations.test_fields.Cache"),
        (Cache(), {"": "Cache", "layout": "a", "host": "h", "sleeps": False}),
        (Plain(), "Plain:<Plain>"),
        (read, "tests.unit.integrations.test_fields.read"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_plain_values(value: Any, expected: Any) -> None:
    assert plain(value) == expected
    json.dumps(plain(value))


def test_a_configuration_of_transformers_counts_by_all_that_it_has() -> None:
    one = plain(LlamaConfig(hidden_size=64))
    assert one == plain(LlamaConfig(hidden_size=64))
    assert one.startswith("LlamaConfig:")
    assert one != plain(LlamaConfig(hidden_size=128))
