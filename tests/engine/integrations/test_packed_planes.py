"""Packed pages under the adapters: planes of opaque bytes say the type of their values, and which of them are alike."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gdscache import CacheEngine, Config
from gdscache.config import ModelConfig
from gdscache.errors import GeometryError, PlanesError
from gdscache.integrations.settings import Rows, engine_configuration, planes_section
from gdscache.integrations.sglang.planes import PoolPlanes, device_planes, grouped_planes, host_planes, pools_planes
from gdscache.integrations.vllm.cache_groups import key_elements
from gdscache.integrations.vllm.planes import planes_of
from gdscache.pages.keys import PageHashes
from tests.support.helpers import WAIT
from tests.support.sglang_fields import kind_of

BLOCKS, TOKENS, HEADS, DIM, LAYERS = 8, 16, 2, 64, 3
FAR = 2.0**40  # apart, values need exponents that are in no window together
HASHES = PageHashes([bytes([n]) * 32 for n in range(2)])


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape).bfloat16()


def round_trip(section: dict[str, object], tensors: Any, memory: torch.Tensor, tmp_path: Path) -> None:
    """Pages 1 and 2 come back bit for bit out of the CPU tier, and from the SSD after a restart."""
    given = {
        "model": {"name": "m", "pack": "on", **section},
        "cpu": {"capacity": "4MiB"},
        "ssd": {"path": str(tmp_path / "pages"), "capacity": "8MiB", "transport": "posix"},
    }
    config = Config.from_dict({**given, "deadline": WAIT, "host_buffer": "4MiB"})
    wanted = [tensor[1:3].clone() for layer in tensors for tensor in layer]
    before = memory.clone()
    for restarted in (False, True):
        with CacheEngine(config, tensors) as engine:
            assert engine.layout.page_bytes < 0.87 * engine.layout.plane_bytes
            if not restarted:
                assert not engine.store(HASHES, [1, 2]).result(WAIT).dropped
                engine.flush(WAIT)
                assert "unfit" not in engine.stats()["stores"]
            memory.zero_()
            assert (
                engine.load(engine.lookup(HASHES), [5, 6]).result(WAIT).tokens == len(HASHES) * section["page_tokens"]
            )  # type: ignore[operator]
        assert all(
            torch.equal(t[5:7], one) for t, one in zip((t for layer in tensors for t in layer), wanted, strict=True)
        )
        memory.copy_(before)


@pytest.mark.parametrize("heads", [1, HEADS])
def test_vllms_keys_and_values_are_parts_of_their_own(heads: int, tmp_path: Path) -> None:
    """In host memory a block has the keys of a head, then its values, and so head by head (`cpu_attn.py`)."""
    memory = drawn(LAYERS, BLOCKS, heads, 2, TOKENS, DIM)
    memory[:, :, :, 1] *= FAR
    caches = {f"layer.{n}": one.view(BLOCKS, heads, TOKENS, 2 * DIM) for n, one in enumerate(memory)}
    spec = SimpleNamespace(head_size=DIM)
    cache: Any = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec, layer_names=list(caches))])
    planes = planes_of(caches, BLOCKS, TOKENS, "LBHNC", None, key_elements(cache))
    assert {rows.parts for rows in planes.rows} == {(2 * TOKENS * DIM,) * 2}
    round_trip(planes.model(), [(tensor,) for tensor in planes.tensors], memory, tmp_path)
    one_part = planes_of(caches, BLOCKS, TOKENS, "LBHNC").model()
    config = Config.from_dict({"model": {"name": "m", "pack": "on", **one_part}, "cpu": {"capacity": "4MiB"}})
    with CacheEngine(config, [(tensor,) for tensor in planes.tensors]) as engine:  # else the parts prove nothing
        engine.store(HASHES, [1, 2]).result(WAIT)
        assert engine.stats()["stores"]["unfit"] == 2


def test_keys_and_values_may_take_turns_within_a_token(tmp_path: Path) -> None:
    """As on GPUs: a key and a value of a head and token."""
    memory = drawn(LAYERS, BLOCKS, TOKENS, HEADS, 2, DIM)
    memory[..., 1, :] *= FAR
    tensors = [(one.reshape(BLOCKS, TOKENS, -1).view(torch.uint8),) for one in memory]
    rows = Rows.of(HEADS * 4 * DIM, torch.bfloat16, (2 * DIM, 2 * DIM))
    round_trip(planes_section([{"kv": rows}] * LAYERS, TOKENS), tensors, memory, tmp_path)


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        *itertools.product(("MHATokenToKVPoolHost", "MLATokenToKVPoolHost"), ("page_first", "page_first_direct")),
        ("MHATokenToKVPoolHost", "page_head"),
    ],
)
def test_each_layer_of_sglangs_host_pool_is_a_part(kind: str, layout: str, tmp_path: Path) -> None:
    heads = HEADS if "MHA" in kind else 1
    shape, axis = {
        "page_first": ((BLOCKS * TOKENS, LAYERS, heads, DIM), 1),
        "page_first_direct": ((BLOCKS, LAYERS, TOKENS, heads, DIM), 1),
        "page_head": ((BLOCKS, heads, TOKENS, LAYERS, DIM), 3),
    }[layout]
    memory = drawn(2, *shape) if "MHA" in kind else drawn(*shape)
    memory.select(axis + ("MHA" in kind), 1).mul_(FAR)
    facts = {"kv_buffer": memory, "layout": layout, "size": BLOCKS * TOKENS, "page_size": TOKENS, "dtype": memory.dtype}
    planes = host_planes(kind_of(kind, **facts))
    round_trip(planes.model(), planes.tensors, memory, tmp_path)


@pytest.mark.parametrize("kind", ["MHATokenToKVPool", "MLATokenToKVPool"])
def test_sglangs_device_pools_say_their_type(kind: str, tmp_path: Path) -> None:
    memory = drawn(LAYERS, 2, BLOCKS * TOKENS, HEADS, DIM)
    pools: dict[str, Any] = {"kv_buffer": list(memory[:, 0])}
    if "MHA" in kind:
        memory[:, 1] *= FAR
        pools = {"k_buffer": list(memory[:, 0]), "v_buffer": list(memory[:, 1]), "kv_cache_layout": "nhd"}
    planes = device_planes(type(kind, (SimpleNamespace,), {})(**pools, dtype=memory.dtype), TOKENS)
    round_trip(planes.model(), planes.tensors, memory, tmp_path)


def device_pool(layers: int, dtype: torch.dtype = torch.bfloat16) -> Any:
    k, v = ([drawn(BLOCKS * TOKENS, HEADS, DIM).to(dtype) for _ in range(layers)] for _ in range(2))
    return kind_of("MHATokenToKVPool", k_buffer=k, v_buffer=v, kv_cache_layout="nhd", dtype=dtype)


def host_pool(layers: int) -> Any:
    memory = drawn(2, BLOCKS, layers, TOKENS, HEADS, DIM)
    facts = {"layout": "page_first_direct", "size": BLOCKS * TOKENS, "page_size": TOKENS, "dtype": memory.dtype}
    return kind_of("MHATokenToKVPoolHost", kv_buffer=memory, **facts)


def test_windows_of_sglangs_hybrid_models_are_packed_and_states_and_quantised_pages_are_not() -> None:
    cache = SimpleNamespace(conv=[drawn(2, BLOCKS, 3, 128)], temporal=drawn(2, BLOCKS, 2, 64))
    states = SimpleNamespace(mamba_pool=SimpleNamespace(mamba_cache=cache), mamba_map={0: 0, 2: 1})
    states.short_conv_pool = states.ngram_pool = SimpleNamespace(enabled=False)
    host_states = kind_of(
        "MambaPoolHost",
        temporal_buffer=drawn(BLOCKS, 2, 128),
        conv_buffer=[],
        slot_state_buffers=[],
        layout="page_first",
    )

    def device(windows: torch.dtype) -> PoolPlanes:
        where = {0: (0, True), 1: (0, False), 2: (1, True)}
        pools = {"full_kv_pool": device_pool(1), "swa_kv_pool": device_pool(2, windows)}
        return grouped_planes(kind_of("SWAKVPool", **pools, layers_mapping=where), states, 20, TOKENS)

    def packed(planes: PoolPlanes) -> dict[str, bool]:
        model = ModelConfig.model_validate({"name": "m", "pack": "on", **planes.model()})
        return {name: layout.packed for name, layout in zip(planes.pools(), model.pool_layouts, strict=True)}

    assert packed(device(torch.bfloat16)) == {"kv": True, "swa": True, "mamba": False}
    assert packed(device(torch.float8_e4m3fn)) == {"kv": True, "swa": False, "mamba": False}
    host = pools_planes({"kv": host_pool(1), "swa": host_pool(2), "mamba": host_states}, 20)
    assert packed(host) == {"kv": True, "swa": True, "mamba": False}
    layer = 2 * TOKENS * HEADS * DIM
    assert [host.rows[n]["k"].parts for n in (0, 2)] == [(layer,), (layer, layer)], "each layer is a part"


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float8_e4m3fn, torch.uint8])
def test_other_types_are_refused_by_name(dtype: torch.dtype) -> None:
    section = planes_section([{"kv": Rows.of(256, dtype)}], TOKENS)
    with pytest.raises(GeometryError, match=f"{str(dtype).removeprefix('torch.')}\\) cannot be packed") as raised:
        Config.from_dict({"model": {"name": "m", "pack": "on", **section}, "cpu": {"capacity": "4MiB"}})
    assert "SmolLM2" in raised.value.hint
    Config.from_dict({"model": {"name": "m", **section}, "cpu": {"capacity": "4MiB"}})


def test_parts_that_are_no_runs_of_a_block_are_refused() -> None:
    wide = torch.zeros(BLOCKS, TOKENS, 512, dtype=torch.uint8)
    section = planes_section([{"kv": Rows.of(256, torch.bfloat16, (1024, 1024))}], TOKENS)
    config = Config.from_dict({"model": {"name": "m", "pack": "on", **section}, "cpu": {"capacity": "4MiB"}})
    before = threading.active_count()
    with pytest.raises(PlanesError, match="parts of"):
        CacheEngine(config, [(wide[:, :, :256],)])
    assert threading.active_count() == before
    for parts in ((96,), (127, 129)):
        section = planes_section([{"kv": Rows.of(256, torch.bfloat16, parts)}], 1)
        with pytest.raises(GeometryError, match="cannot be packed"):
            Config.from_dict({"model": {"name": "m", "pack": "on", **section}, "cpu": {"capacity": "4MiB"}})


def test_packing_is_asked_for_where_the_engine_describes_its_model(tmp_path: Path) -> None:
    model = {"name": "m", **planes_section([{"kv": Rows.of(256, torch.bfloat16)}], TOKENS)}
    file = tmp_path / "gdscache.yaml"
    file.write_text("model: {pack: 'on'}\ncpu: {capacity: 4MiB}\n")
    for given in (str(file), {"model": {"pack": "on"}, "cpu": {"capacity": "4MiB"}}):
        assert engine_configuration(given, model, lambda: "w", "it").model.pack == "on"
    with pytest.raises(GeometryError, match=r"it: `model\.layers`"):
        engine_configuration({"model": {"layers": 2}}, model, lambda: "w", "it")
