"""SGLang's settings as stand-ins, with every field that our table knows; and what one of its lines does.

A line is a name among the facts, as `ServerArgs.dtype`. `Setup.change` gives that line alone another value. A mutation
(`without`) takes a line out of the facts: then its change must go unnoticed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gdscache.integrations.fields import ENVIRONMENT
from gdscache.integrations.sglang import facts, setup
from gdscache.integrations.sglang.planes import PoolPlanes

VERSION = "0.5.23"
_VALUES: Mapping[str, object] = {"load_format": "dummy"}


class ServerArgs(SimpleNamespace):
    """By the name of SGLang's."""


class ModelConfig(SimpleNamespace):
    """By the name of SGLang's."""


def of_class(owner: str, *kinds: str) -> list[str]:
    """The table's fields of a class."""
    known = facts.table().kinds.items()
    return [name.split(".")[1] for name, kind in known if name.startswith(f"{owner}.") and kind in kinds]


def lines() -> list[str]:
    """Every line that is held, whatever holds it."""
    by_hand = ["sglang", "config.json", *(f"content of {name}" for name in facts.FILES)]
    return [*by_hand, *facts.table().named("held")]


class Setup:
    """A server, its model and its pool, in a folder that has the files they name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "model").mkdir(exist_ok=True)
        fields = of_class("ServerArgs", "held", "harmless") + list(facts.FILES)
        self.server = ServerArgs(**{**dict.fromkeys(fields, "x"), **_VALUES, "model_path": str(folder / "model")})
        self.model = ModelConfig(**dict.fromkeys(of_class("ModelConfig", "held", "harmless"), "x"))
        self.server.revision = self.server.download_dir = None
        self.version = VERSION
        self.environment: dict[str, str] = {}
        for name in facts.FILES:
            setattr(self.server, name, str(folder / name))
        for file in self._files().values():
            if not file.exists() or file.read_text() != "x":  # to truncate a file costs ten times as much as to read it
                file.write_text("x")

    def _files(self) -> dict[str, Path]:
        contents = {f"content of {name}": self.folder / name for name in facts.FILES}
        return {"config.json": self.folder / "model/config.json", **contents}

    def change(self, line: str) -> None:
        """Another value of that line."""
        owner, _, name = line.rpartition(".")
        if line in (files := self._files()):
            files[line].write_text("another")
        elif owner == ENVIRONMENT:
            self.environment[name] = "another"
        elif owner:
            setattr(self.server if owner == "ServerArgs" else self.model, name, "another")
        else:
            self.version = "another"

    def described(self, planes: PoolPlanes, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
        """The section `model` of the engine's configuration."""
        monkeypatch.setattr(setup.os, "environ", self.environment)
        return {**setup.model_of(self.server, self.model, planes, self.version), "weights": "w"}


@contextlib.contextmanager
def without(line: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The mutation: that line is no fact."""
    kept = setup.facts_of

    def some(*given: Any) -> dict[str, object]:
        return {name: value for name, value in kept(*given).items() if name != line}

    with monkeypatch.context() as mutated:
        mutated.setattr(setup, "facts_of", some)
        yield


def planes() -> PoolPlanes:
    """Two planes of a host pool."""
    tensors = (torch.zeros((24, 4, 512), dtype=torch.uint8), torch.zeros((24, 4, 512), dtype=torch.uint8))
    return PoolPlanes([tensors], {"pool": "p", "layout": "l", "dtype": "d", "page": [1]})
