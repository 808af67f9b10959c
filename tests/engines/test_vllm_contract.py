"""The installed vLLM against the one that the connector was written for, and what has changed."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.engines import vllm_parts as parts
from tests.engines.vllm_parts import changes
from tests.support.places import ROOT

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]
HERE = Path(__file__).parent
WRITTEN_FOR: dict[str, Any] = json.loads((HERE / "vllm_contract.json").read_text())


def test_changes_are_told() -> None:
    before = {"a": "function(self)", "b": "function(self)", "c": "property"}
    now = {"a": "function(self, x)", "c": "property", "d": "function()", "restore_kv_caches": "function(self)"}
    assert changes(before, now) == ["a: function(self, x), was function(self)", "b is gone", "d is new: function()"]


def test_the_installed_vllm_is_the_one_that_this_was_written_for() -> None:
    if not parts.PYTHON.exists():
        pytest.skip(parts.MISSING)
    told = subprocess.run(
        [str(parts.PYTHON), str(HERE / "vllm_contract.py")], stdout=subprocess.PIPE, check=True, timeout=parts.LIMIT_S
    )
    now = json.loads(told.stdout[told.stdout.index(b"{") :])
    found = [
        f"{name}: {change}"
        for name, before in WRITTEN_FOR["classes"].items()
        for change in changes(before, now["classes"][name])
    ]
    found += [f"{name} has no {field}" for name, has in now["fields"].items() for field in has if not has[field]]
    assert not found, f"vLLM {now['version']}, written for {WRITTEN_FOR['version']}:\n" + "\n".join(found)


def test_its_fields_are_those_that_the_table_knows() -> None:
    """A field that is not known is held: it costs hits at most. A line for it in fields.toml mends this."""
    if not parts.PYTHON.exists():
        pytest.skip(parts.MISSING)
    told = subprocess.run(
        [str(parts.PYTHON), str(HERE / "vllm_contract.py"), "--names"],
        stdout=subprocess.PIPE,
        check=True,
        timeout=parts.LIMIT_S,
        env={**os.environ, "PYTHONPATH": str(ROOT), "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"},
    )
    found = json.loads(told.stdout[told.stdout.rindex(b"\n{") :])
    assert (found["unknown"], found["restarted"], found["unseen"]) == ([], [], [])
    assert len(found["lines"]) > 40


SCALES = """
import types
import torch
from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl
from vllm.v1.kv_cache_interface import KVQuantMode
from gdscache.integrations.vllm.planes import write_first_scales

cache = torch.zeros(4, 2, 16, 2 * (64 + 4), dtype=torch.int8)  # blocks, heads, tokens, a key and a value with scales
impl = TritonAttentionImpl.__new__(TritonAttentionImpl)
impl.kv_cache_dtype, impl._kv_quant_mode = "int8_per_token_head", KVQuantMode.INT8_PER_TOKEN_HEAD
write_first_scales([types.SimpleNamespace(impl=impl, kv_cache=cache)])
loaded = torch.randint(-128, 127, cache.shape, dtype=torch.int8)
cache.copy_(loaded)
impl._pth_key_value_caches(cache)  # of each forward pass, before it writes or reads the cache
print("kept" if torch.equal(cache, loaded) else "lost", "by scales of", tuple(impl._k_scale_cache.shape))
"""


def test_its_first_forward_pass_keeps_the_scales_of_loaded_blocks() -> None:
    """By the class that writes ones over them in that pass otherwise; a GPU would run the pass."""
    if not parts.PYTHON.exists():
        pytest.skip(parts.MISSING)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
    told = subprocess.run(
        [str(parts.PYTHON), "-c", SCALES], stdout=subprocess.PIPE, check=True, timeout=parts.LIMIT_S, env=environment
    )
    assert told.stdout.decode().endswith("kept by scales of (4, 16, 2)\n")
