"""vLLM's configuration as stand-ins, with every field that our table knows; and what one of its lines does."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gdscache.integrations.fields import ENVIRONMENT
from gdscache.integrations.vllm import setup
from gdscache.integrations.vllm.planes import VllmPlanes, planes_of
from tests.support import adapter_fields
from tests.support.vllm_setup import FullAttentionSpec, MLAAttentionSpec

VERSION = "0.33.0"
OTHER_PYTHON = SimpleNamespace(major=3, minor=99)
LONG = {"rope_type": "longrope", "original_max_position_embeddings": 1024}
# Harmless by name: what they come to is held.
LOOKED_AT = {
    "model", "model_weights", "revision", "max_model_len", "original_max_model_len", "quant_config",
    "override_generation_config",
}  # fmt: skip
# The parts of vLLM's configuration, by the field that has each.
PARTS = {
    "model_config": "ModelConfig", "multimodal_config": "MultiModalConfig", "cache_config": "CacheConfig",
    "parallel_config": "ParallelConfig", "scheduler_config": "SchedulerConfig", "device_config": "DeviceConfig",
    "load_config": "LoadConfig", "attention_config": "AttentionConfig", "kernel_config": "KernelConfig",
    "compilation_config": "CompilationConfig", "kv_transfer_config": "KVTransferConfig",
    "ec_transfer_config": "ECTransferConfig",
}  # fmt: skip


def of_class(owner: str, *kinds: str) -> list[str]:
    return adapter_fields.of_class(setup.table(), owner, *kinds)


def stand_in(owner: str) -> Any:
    """An object of a class of that name, each of whose fields is `x`."""
    fields = dict.fromkeys(of_class(owner, "held", "harmless", "refused", "hashed"), "x")
    return type(owner, (SimpleNamespace,), {})(**fields)


class Setup:
    """A server's configuration and its KV cache, in a folder that has the files they name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "model").mkdir(exist_ok=True)
        for name in ("model/code.py", "model/video_preprocessor_config.json", "scales", "other scales"):
            (folder / name).write_text("x")
        self.vllm = stand_in("VllmConfig")
        self.parts = {owner: stand_in(owner) for owner in PARTS.values()}
        for field in of_class("VllmConfig", "parts"):
            setattr(self.vllm, field, self.parts[PARTS[field]])
        model = self.parts["ModelConfig"]
        model.multimodal_config = self.parts["MultiModalConfig"]
        model.model, model.model_weights, model.revision = str(folder / "model"), "", None
        model.hf_text_config = SimpleNamespace(rope_parameters=LONG, model_type="llama4_text")
        model.try_get_generation_config, model.override_generation_config = dict[str, object], {}
        model.max_model_len = model.original_max_model_len = 2048
        model.multimodal_config.mm_encoder_fp8_scale_path = str(folder / "scales")
        self.parts["CacheConfig"].prefix_caching_hash_algo = "sha256"
        self.vllm.quant_config = SimpleNamespace(bits=8)
        group = SimpleNamespace(layer_names=["layer.0"], kv_cache_spec=FullAttentionSpec(block_size=16))
        self.cache = SimpleNamespace(kv_cache_groups=[group], kv_cache_layout="LBNHC")
        self.version = VERSION
        self.environment: dict[str, str] = {}
        self.planes = planes()
        self.patches: list[tuple[object, str, object]] = []
        self.by_hand: dict[str, Callable[[], object]] = {
            "vllm": lambda: setattr(self, "version", "another"),
            "layout": lambda: setattr(self.cache, "kv_cache_layout", "another"),
            "kind": lambda: setattr(group, "kv_cache_spec", MLAAttentionSpec(block_size=16)),
            "block_size": lambda: setattr(group.kv_cache_spec, "block_size", 32),
            "layers": lambda: self._replace(described=["another"]),
            "names": lambda: self._replace(layers={"another": 0}),
            "ropes_by_length": lambda: setattr(model, "max_model_len", 512),
            "states": lambda: self.patches.append((setup, "states_of", lambda _: ["another"])),
            "attn_temperature_tuning": lambda: model.override_generation_config.update(attn_temperature_tuning=True),
            "quant_config": lambda: setattr(self.vllm.quant_config, "bits", 4),
            "code": lambda: (folder / "model/code.py").write_text("another"),
            "processors": lambda: (folder / "model/video_preprocessor_config.json").write_text("another"),
            "content of mm_encoder_fp8_scale_path": lambda: (folder / "scales").write_text("another"),
            "accelerator": lambda: self.patches.append((torch.version, "hip", "6.0")),
            "processor": lambda: self.patches.append((setup, "_tiles", lambda: ["another"])),
            "python": lambda: self.patches.append((setup, "sys", SimpleNamespace(version_info=OTHER_PYTHON))),
        }

        rope = SimpleNamespace(rope_parameters=LONG, model_type="llama4_text", more=1)
        self.values: dict[str, object] = {  # where "another" would change more than that line
            "ModelConfig.hf_text_config": rope,
            "MultiModalConfig.mm_encoder_fp8_scale_path": str(folder / "other scales"),
        }

    def _replace(self, **changes: Any) -> None:
        self.planes = dataclasses.replace(self.planes, **changes)

    def change(self, line: str) -> None:
        owner, _, field = line.rpartition(".")
        if line in self.by_hand:
            self.by_hand[line]()
        elif owner == ENVIRONMENT:
            self.environment[field] = "another"
        else:
            setattr(self.vllm if owner == "VllmConfig" else self.parts[owner], field, self.values.get(line, "another"))

    def described(self) -> dict[str, object]:
        """The section `model` of the engine's configuration."""
        with pytest.MonkeyPatch.context() as patched:
            for target, name, value in self.patches:
                patched.setattr(target, name, value)
            section = setup.model_of(self.vllm, self.cache, self.planes, self.version, self.environment)
        return {**section, "weights": "w"}


def lines(folder: Path) -> list[str]:
    """Every line that is held, whatever holds it."""
    return [*Setup(folder).by_hand, *setup.table().named("held")]


def tensors() -> list[tuple[torch.Tensor, ...]]:
    return [(tensor,) for tensor in planes().tensors]


def planes() -> VllmPlanes:
    whole = torch.zeros((3, 8, 2, 16, 64), dtype=torch.bfloat16)
    return planes_of({f"layer.{i}": whole[i] for i in range(3)}, 8, 16, "LBHNC")
