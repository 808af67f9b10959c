"""SGLang's settings as stand-ins, with every field that our table knows; and what one of its lines does."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from gdscache.integrations.fields import ENVIRONMENT
from gdscache.integrations.sglang import setup
from gdscache.integrations.sglang.planes import PoolPlanes
from tests.support import adapter_fields

VERSION = "0.5.23"
_VALUES: Mapping[str, object] = {"load_format": "dummy"}
LOOKED_AT = {*setup.FILES, "model_path", "download_dir"}  # harmless by name: their content is held


class ServerArgs(SimpleNamespace):
    """By the name of SGLang's."""


class ModelConfig(SimpleNamespace):
    """By the name of SGLang's."""


def kind_of(name: str, **facts: Any) -> Any:
    """An object as one of SGLang's class of that name is read."""
    return type(name, (SimpleNamespace,), {})(**facts)


def of_class(owner: str, *kinds: str) -> list[str]:
    return adapter_fields.of_class(setup.table(), owner, *kinds)


def lines(folder: Path) -> list[str]:
    """Every line that is held, whatever holds it."""
    by_hand = ["sglang", "config.json", "code", *(f"content of {name}" for name in setup.FILES)]
    return [*by_hand, *setup.table().named("held")]


class Setup:
    """A server, its model and its pool, in a folder that has the files they name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "model").mkdir(exist_ok=True)
        fields = of_class("ServerArgs", "held", "harmless") + list(setup.FILES)
        self.server = ServerArgs(**{**dict.fromkeys(fields, "x"), **_VALUES, "model_path": str(folder / "model")})
        self.model = ModelConfig(**dict.fromkeys(of_class("ModelConfig", "held", "harmless"), "x"))
        self.server.revision = self.server.download_dir = None
        self.version = VERSION
        self.planes = planes()
        self.environment: dict[str, str] = {}
        for name in setup.FILES:
            setattr(self.server, name, str(folder / name))
        for file in self._files().values():
            if not file.exists() or file.read_text() != "x":  # to truncate a file costs ten times as much as to read it
                file.write_text("x")

    def _files(self) -> dict[str, Path]:
        contents = {f"content of {name}": self.folder / name for name in setup.FILES}
        return {"config.json": self.folder / "model/config.json", "code": self.folder / "model/code.py", **contents}

    def change(self, line: str) -> None:
        owner, _, name = line.rpartition(".")
        if line in (files := self._files()):
            files[line].write_text("another")
        elif owner == ENVIRONMENT:
            self.environment[name] = "another"
        elif owner:
            setattr(self.server if owner == "ServerArgs" else self.model, name, "another")
        else:
            self.version = "another"

    def described(self) -> dict[str, object]:
        """The section `model` of the engine's configuration."""
        with mock.patch.object(setup.os, "environ", self.environment):
            section = setup.model_of(self.server, self.model, self.planes, self.version)
        return {**section, "weights": "w"}


def tensors() -> list[tuple[torch.Tensor, ...]]:
    return planes().tensors


def planes() -> PoolPlanes:
    layer = {name: torch.zeros((24, 4, 512), dtype=torch.uint8) for name in "kv"}
    return PoolPlanes.of([layer], {"pool": "p", "layout": "l", "dtype": "d", "page": [1]})
