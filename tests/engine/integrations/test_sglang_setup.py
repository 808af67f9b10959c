"""The options of the SGLang integrations, and pools as planes."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gdscache import HybridEngine, errors
from gdscache.integrations.sglang.planes import device_planes, grouped_planes, host_planes
from gdscache.integrations.sglang.setup import LinkerOptions, configuration, storage_config_of
from tests.support.fake_pool import pool_entry
from tests.support.sglang_fields import kind_of

PAGE, PAGES, LAYERS = 4, 5, 3


def server(**changes: Any) -> Any:
    given = {
        "model_path": "org/model", "load_format": "auto", "tp_size": 1, "speculative_algorithm": None,
        "enable_lora": None, "disaggregation_mode": "null",
    }  # fmt: skip
    return SimpleNamespace(**{**given, **changes})


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def mha(**changes: Any) -> Any:
    rows = (PAGES * PAGE, 2, 8)
    given: dict[str, Any] = {
        "k_buffer": [zeros(*rows) for _ in range(LAYERS)],
        "v_buffer": [zeros(*rows) for _ in range(LAYERS)],
        "kv_cache_layout": "nhd",
        "dtype": torch.bfloat16,
    }
    return kind_of("MHATokenToKVPool", **{**given, **changes})


def host(kind: str, layout: str, **changes: Any) -> Any:
    size, rows = PAGES * PAGE, (LAYERS, 2, 8)
    shapes = {
        "page_first": (size, *rows),
        "page_first_direct": (PAGES, LAYERS, PAGE, 2, 8),
        "page_head": (PAGES, 2, PAGE, LAYERS, 8),
        "layer_first": (LAYERS, size, 2, 8),
    }
    shape = shapes[layout] if kind == "mla" else (2, *shapes[layout])
    given = {"kv_buffer": zeros(*shape), "layout": layout, "size": size, "page_size": PAGE, "dtype": torch.bfloat16}
    return kind_of(f"{kind.upper()}TokenToKVPoolHost", **{**given, **changes})


# -- options ---------------------------------------------------------------------------------------------------------

SECTIONS: dict[str, Any] = {"cpu": {"capacity": "1MiB"}, "ssd": {"path": "/tmp/x", "capacity": "1MiB"}}
ONLY_SSD: dict[str, Any] = {"ssd": SECTIONS["ssd"]}


@pytest.mark.parametrize(
    ("given", "error", "told"),
    [
        ({}, errors.ConfigError, "gdscache config init sglang"),
        ({"config": 3}, errors.ConfigError, "gdscache config init sglang"),
        ({"config": SECTIONS, "ssd_wiat": 1}, errors.UnknownKeyError, "ssd_wiat"),
        ({"config": SECTIONS, "ssd_wait": -1}, errors.InvalidValueError, "ssd_wait"),
        ({"config": SECTIONS, "pin_seconds": "long"}, errors.InvalidValueError, "pin_seconds"),
        ({"config": SECTIONS, "pin_seconds": 10}, errors.InvalidValueError, "more than 10.02"),
        ({"config": SECTIONS, "ssd_wait": 60}, errors.InvalidValueError, "pin_seconds is 60"),
        ({"config": SECTIONS, "untried": "yes"}, errors.InvalidValueError, "untried is 'yes'"),
    ],
)
def test_options_that_are_wrong(given: dict[str, Any], error: type[errors.GdsCacheError], told: str) -> None:
    with pytest.raises(error) as raised:
        LinkerOptions.of(given)
    assert told in str(raised.value)


def test_options() -> None:
    assert LinkerOptions.of({"config": "a.yaml"}) == LinkerOptions("a.yaml", 0.02, 60.0)
    assert LinkerOptions.of({"config": "a.yaml", "ssd_wait": 0}).ssd_wait == 0


def test_options_of_the_storage() -> None:
    own = {"backend_name": "x", "module_path": "y", "class_name": "z", "interface_v1": 1}
    assert storage_config_of({**own, "config": "a.yaml"}) == "a.yaml"
    with pytest.raises(errors.UnknownKeyError, match="gone"):
        storage_config_of({**own, "config": "a.yaml", "gone": 1})
    with pytest.raises(errors.InterfaceUnsupportedError) as raised:
        storage_config_of({"config": "a.yaml", "interface_v1": 0})
    assert "interface_v1" in raised.value.hint
    with pytest.raises(errors.ConfigError) as missing:
        storage_config_of(own)
    assert "sglang-hicache" in missing.value.hint


def opened(sections: dict[str, Any], *, cpu: bool, **changes: Any) -> Any:
    planes = device_planes(mha(), PAGE)
    given = server(load_format="dummy", **changes)
    return configuration(sections, given, SimpleNamespace(), planes, "0.5.23", "it", cpu=cpu)


def test_tiers_that_each_of_them_needs() -> None:
    assert opened(SECTIONS, cpu=True).model.weights == "dummy"
    assert opened(ONLY_SSD, cpu=False).cpu is None
    shared = opened({**SECTIONS, "ssd": None, "tiers": [pool_entry("127.0.0.1:1")]}, cpu=True)
    assert (shared.ssd, len(shared.tiers)) == (None, 1)
    for sections, cpu in ((ONLY_SSD, True), (SECTIONS, False), ({}, False)):
        with pytest.raises(errors.ConfigError, match=r"section `(cpu|ssd)`"):
            opened(sections, cpu=cpu)


# -- planes ----------------------------------------------------------------------------------------------------------


def test_device_pools_are_planes_without_a_copy() -> None:
    pool = mha()
    planes = device_planes(pool, PAGE)
    assert [[tuple(t.shape) for t in layer] for layer in planes.tensors] == [[(PAGES, PAGE, 32)] * 2] * LAYERS
    planes.tensors[1][1][3, 2] = 7
    assert pool.v_buffer[1].view(torch.uint8)[3 * PAGE + 2].unique().tolist() == [7]
    assert planes.model()["planes"] == [
        {"name": "k", "shape": [32], "layers": [0, 1, 2], "values": "bfloat16"},
        {"name": "v", "shape": [32], "layers": [0, 1, 2], "values": "bfloat16"},
    ]
    latent = kind_of("MLATokenToKVPool", kv_buffer=[zeros(PAGES * PAGE, 1, 9)] * LAYERS, dtype=torch.bfloat16)
    (plane,) = device_planes(latent, PAGE).model()["planes"]  # type: ignore[misc]
    assert plane == {"name": "latent", "shape": [18], "layers": [0, 1, 2], "values": "bfloat16"}


@pytest.mark.parametrize(
    ("kind", "layout"),
    [*itertools.product(("mha", "mla"), ("page_first", "page_first_direct")), ("mha", "page_head")],
)
def test_host_pools_are_planes_without_a_copy(kind: str, layout: str) -> None:
    pool = host(kind, layout)
    planes = host_planes(pool)
    (layer,) = planes.tensors
    assert [tuple(t.shape) for t in layer] == [(PAGES, PAGE, LAYERS * 32)] * (1 if kind == "mla" else 2)
    layer[-1][3] = 9
    part = pool.kv_buffer if kind == "mla" else pool.kv_buffer[1]
    page = part[3 * PAGE : 4 * PAGE] if layout == "page_first" else part[3]
    assert page.view(torch.uint8).unique().tolist() == [9]
    assert int((pool.kv_buffer.view(torch.uint8) == 9).sum()) >= page.numel()


@pytest.mark.parametrize(
    "pool",
    [
        mha(kv_cache_layout="hnd"),
        mha(k_scale_buffer=[1]),
        mha(post_capture_active=True),
        mha(k_buffer=[zeros(18, 2, 8)] * LAYERS),
        mha(k_buffer=[zeros(2, 20, 8).transpose(0, 1)] * LAYERS),
        kind_of("MHATokenToKVPoolFP4"),
    ],
    ids=["hnd", "scales", "late memory", "part of a page", "strided", "fp4"],
)
def test_device_pools_that_are_none(pool: Any) -> None:
    with pytest.raises(errors.CacheLayoutUnsupportedError):
        device_planes(pool, PAGE)


@pytest.mark.parametrize(
    "pool",
    [
        host("mha", "layer_first"),
        host("mha", "page_first", dcp_size=2),
        host("mha", "page_first", kv_buffer=zeros(2, PAGES * PAGE + 1, LAYERS, 2, 8)),
        SimpleNamespace(layout="page_first"),
    ],
    ids=["layer_first", "dcp", "other sizes", "another pool"],
)
def test_host_pools_that_are_none(pool: Any) -> None:
    with pytest.raises(errors.CacheLayoutUnsupportedError):
        host_planes(pool)


# -- hybrid models -----------------------------------------------------------------------------------------------------


def states(layers: dict[int, int], **changes: Any) -> Any:
    """A pool of requests with states: two tensors of a convolution, and one that recurs."""
    slots, count = 6, len(layers)
    cache = SimpleNamespace(
        conv=[zeros(count, slots, 3, 4), zeros(count, slots, 5)], temporal=zeros(count, slots, 2, 8)
    )
    off = SimpleNamespace(enabled=False)
    given = {"mamba_pool": SimpleNamespace(mamba_cache=cache), "mamba_map": layers}
    return SimpleNamespace(**{**given, "short_conv_pool": off, "ngram_pool": off, **changes})


def linear() -> Any:
    return kind_of("HybridLinearKVPool", full_kv_pool=mha(), full_attention_layer_id_mapping={1: 0, 3: 1, 4: 2})


def windowed() -> Any:
    small = mha(k_buffer=[zeros(3 * PAGE, 2, 8)] * 2, v_buffer=[zeros(3 * PAGE, 2, 8)] * 2)
    where = {0: (0, True), 1: (0, False), 2: (1, True), 3: (1, False), 5: (2, False)}
    return kind_of("SWAKVPool", full_kv_pool=mha(), swa_kv_pool=small, layers_mapping=where)


def test_layers_of_all_pools_are_in_the_order_of_the_model() -> None:
    planes = grouped_planes(windowed(), None, 9, PAGE)
    assert planes.layers == {0: [0], 1: [1], 2: [2], 3: [3], 5: [4]}
    assert planes.groups == [
        {"name": "kv", "layers": [1, 3, 4], "page_tokens": PAGE},
        {"name": "swa", "layers": [0, 2], "page_tokens": PAGE, "window": 10},
    ]
    assert [len(layer[0]) for layer in planes.tensors] == [3, PAGES, 3, PAGES, PAGES]
    model = planes.model()
    assert (model["layers"], model["page_tokens"]) == (5, PAGE)


def test_a_state_is_a_page_of_one_row_without_padding() -> None:
    pool = linear()
    planes = grouped_planes(pool, states({0: 0, 3: 1}), None, PAGE)
    assert planes.layers == {0: [0], 1: [1], 3: [2, 3], 4: [4]}, "layer 3 has keys and a state"
    assert planes.groups[1] == {"name": "mamba", "layers": [0, 3], "page_tokens": PAGE, "state": True}
    assert [*planes.rows[0]] == ["conv", "conv1", "state"]
    assert [tuple(t.shape) for t in planes.tensors[0]] == [(6, 1, 24), (6, 1, 10), (6, 1, 32)]
    opened = {"cpu": {"capacity": "8MiB"}, "host_buffer": "8MiB"}
    config = configuration(opened, server(load_format="dummy"), SimpleNamespace(), planes, "0.5.23", "it", cpu=True)
    with HybridEngine(config, planes.tensors) as engine:
        sizes = {names: part.layout.page_bytes for names, part in engine.by_groups.items()}
        assert sizes == {"kv": LAYERS * 2 * PAGE * 32, "mamba": 2 * 66}
    without = states({0: 0})
    without.mamba_pool.mamba_cache.temporal = zeros(1, 6, 0)
    assert [*grouped_planes(pool, without, None, PAGE).rows[0]] == ["conv", "conv1"], "none that recurs"


@pytest.mark.parametrize("name", ["short_conv_pool", "ngram_pool"])
def test_states_that_are_not_all_in_their_slot(name: str) -> None:
    pool = linear()
    with pytest.raises(errors.CacheLayoutUnsupportedError, match=name):
        grouped_planes(pool, states({0: 0}, **{name: SimpleNamespace(enabled=True)}), None, PAGE)


def test_strided_states_and_other_pools_are_refused() -> None:
    given = states({0: 0, 2: 1})
    given.mamba_pool.mamba_cache.temporal = zeros(6, 2, 2, 8).transpose(0, 1)
    pool = linear()
    with pytest.raises(errors.CacheLayoutUnsupportedError, match="strides"):
        grouped_planes(pool, given, None, PAGE)
    with pytest.raises(errors.CacheLayoutUnsupportedError, match="SWAKVPool and HybridLinearKVPool"):
        grouped_planes(mha(), None, 9, PAGE)
    quantised = windowed()
    quantised.swa_kv_pool.k_scale_buffer = [1]
    with pytest.raises(errors.CacheLayoutUnsupportedError, match="scales"):
        grouped_planes(quantised, None, 9, PAGE)


def test_an_indexer_s_keys_are_untried() -> None:
    latent, keys = zeros(PAGES * PAGE, 1, 9), torch.zeros((PAGES + 1, PAGE * 6), dtype=torch.uint8)
    pool = kind_of(
        "DSATokenToKVPool",
        kv_buffer=[latent] * LAYERS,
        index_k_with_scale_buffer=[keys] * LAYERS,
        dtype=torch.bfloat16,
        index_kpool=1,
    )
    with pytest.raises(errors.CacheLayoutUnsupportedError) as raised:
        device_planes(pool, PAGE)
    assert '"untried": true' in raised.value.hint
    planes = device_planes(pool, PAGE, untried=True)
    assert planes.model()["planes"] == [
        {"name": "latent", "shape": [18], "layers": [0, 1, 2]},
        {"name": "index", "shape": [6], "layers": [0, 1, 2]},
    ]
    assert [len(part) for part in planes.tensors[0]] == [PAGES, PAGES]
    planes.tensors[0][1][2] = 7
    assert keys[2].unique().tolist() == [7]
    pool.index_k_with_scale_buffer = [keys, torch.zeros((0, PAGE * 6), dtype=torch.uint8), keys]
    with pytest.raises(errors.CacheLayoutUnsupportedError, match="2 of 3 layers"):
        device_planes(pool, PAGE, untried=True)
    del pool.index_kpool
    with pytest.raises(errors.CacheLayoutUnsupportedError, match="2 of 3 layers"):
        device_planes(pool, PAGE, untried=True)
