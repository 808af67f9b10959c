"""What the vLLM connector refuses, by name; its options; its planes; what goes into its namespace."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gdscache import CacheEngine, PageHashes, errors
from gdscache.config import Config
from gdscache.errors import (
    CacheGroupsUnsupportedError,
    CacheLayoutUnsupportedError,
    CacheTypeUnsupportedError,
    ConfigError,
    GdsCacheError,
    InvalidValueError,
    UnknownKeyError,
)
from gdscache.integrations import weights
from gdscache.integrations.settings import engine_configuration
from gdscache.integrations.vllm import setup as vllm_setup
from gdscache.integrations.vllm.cache_groups import layers_of
from gdscache.integrations.vllm.planes import VllmPlanes, planes_of, write_first_scales
from gdscache.integrations.vllm.setup import (
    Options,
    model_of,
    refuse_setup,
    separate,
    shard_of,
    variables_of,
    weights_of,
)
from tests.support.fake_pool import POOLS, FakePool, pool_entry
from tests.support.vllm_setup import FullAttentionSpec, MambaSpec, MLAAttentionSpec, group, setup, uniform


def prefix_lm(group: Any) -> Any:
    layers_of(group.kv_cache_spec)[-1].non_causal = True
    return group


@pytest.mark.parametrize(
    ("change", "error", "hint"),
    [
        ({"kv_transfer_config__kv_load_failure_policy": "fail"}, "LoadFailurePolicyError", "kv_load_failure_policy"),
        ({"kv_transfer_config__kv_role": "kv_producer"}, "ConnectorRoleError", "kv_both"),
        ({"parallel_config__pipeline_parallel_size": 2}, "ParallelismUnsupportedError", "--pipeline-parallel-size"),
        (
            {"parallel_config__decode_context_parallel_size": 2},
            "ParallelismUnsupportedError",
            "--decode-context-parallel-size",
        ),
        (
            {"parallel_config__prefill_context_parallel_size": 2},
            "ParallelismUnsupportedError",
            "--prefill-context-parallel-size",
        ),
        ({"parallel_config__nnodes_within_dp": 2}, "ParallelismUnsupportedError", "--nnodes"),
        ({"parallel_config__distributed_executor_backend": "ray"}, "ParallelismUnsupportedError", "backend mp"),
        ({"parallel_config__distributed_executor_backend": dict}, "ParallelismUnsupportedError", "backend mp"),
        ({"cache__kv_cache_groups": [group(MambaSpec)]}, "CacheGroupsUnsupportedError", "--mamba-cache-mode"),
        ({"cache__kv_cache_groups": [uniform(MambaSpec)]}, "CacheGroupsUnsupportedError", "all layers"),
        ({"cache__hash_block_size": 8}, "CacheGroupsUnsupportedError", "--prefix-match-unit"),
        ({"cache__kv_cache_groups": [prefix_lm(group(FullAttentionSpec))]}, "AttentionUnsupportedError", "leave"),
        ({"cache__kv_cache_groups": [prefix_lm(uniform(FullAttentionSpec))]}, "AttentionUnsupportedError", "leave"),
        ({"cache_config__prefix_caching_hash_algo": "xxhash"}, "HashSeedError", "PYTHONHASHSEED"),
        ({"cache_config__cache_dtype": "int4_per_token_head"}, "CacheTypeUnsupportedError", '"untried": true'),
        ({"model_config__enable_sleep_mode": True}, "SleepModeUnsupportedError", "leave it off"),
        ({"weight_transfer_config": object()}, "WeightUpdatesUnsupportedError", "leave it out"),
        ({"speculative_config": SimpleNamespace(method="eagle")}, "SpeculationUnsupportedError", "ngram"),
    ],
)
def test_what_is_refused(change: dict[str, Any], error: str, hint: str) -> None:
    vllm, cache = setup(**change)
    with pytest.raises(getattr(errors, error)) as raised:
        refuse_setup(vllm, cache, {})
    assert hint in raised.value.hint
    assert issubclass(type(raised.value), errors.IntegrationError)


def test_adapters_on_a_processor_are_refused_where_plain_requests_get_one() -> None:
    vllm, cache = setup(lora_config=object())
    with pytest.raises(errors.AdaptersUnsupportedError, match=r"vLLM 0\.32\.0 computes requests without an adapter"):
        refuse_setup(vllm, cache, {}, "0.32.0")
    refuse_setup(vllm, cache, {}, "0.33.0")
    refuse_setup(*setup(), {}, "0.32.0")
    refuse_setup(*setup(lora_config=object(), device_config__device_type="cuda"), {}, "0.32.0")


@pytest.mark.parametrize("kept_as", ["fp8", "int8_per_token_head", "fp8_per_token_head"])
def test_quantised_caches_that_a_gpu_has_run_are_served(kept_as: str) -> None:
    refuse_setup(*setup(cache_config__cache_dtype=kept_as), {})


def test_scales_per_token_and_head_are_written_before_any_block_is_loaded() -> None:
    made: list[object] = []
    quantised = SimpleNamespace(kv_cache_dtype="fp8_per_token_head", _ensure_scale_caches=made.append)
    plain = SimpleNamespace(kv_cache_dtype="auto", _ensure_scale_caches=made.append)  # a layer that is left out of it
    write_first_scales([SimpleNamespace(), *(SimpleNamespace(impl=one, kv_cache=one) for one in (quantised, plain))])
    assert made == [quantised]
    unknown = SimpleNamespace(impl=SimpleNamespace(kv_cache_dtype="int4_per_token_head"), kv_cache=None)
    with pytest.raises(CacheTypeUnsupportedError, match="scales of loaded blocks"):
        write_first_scales([unknown])


def test_an_indexer_beside_latents_is_served_where_that_is_asked_for() -> None:
    layers = {"attn": MLAAttentionSpec(page_size_bytes=18432), "indexer": MLAAttentionSpec(page_size_bytes=2112)}
    spec = SimpleNamespace(block_size=16, kv_cache_specs=layers)
    own = SimpleNamespace(layer_names=[*layers], kv_cache_spec=spec)
    vllm, cache = setup(cache__kv_cache_groups=[own])
    with pytest.raises(CacheGroupsUnsupportedError, match="indexer") as refused:
        refuse_setup(vllm, cache)
    assert '"untried": true' in str(refused.value.hint)
    vllm.kv_transfer_config.kv_connector_extra_config = {"untried": True}
    refuse_setup(vllm, cache)
    layers["indexer"] = layers["attn"]
    vllm.kv_transfer_config.kv_connector_extra_config = {}
    refuse_setup(vllm, cache)  # one width: latents alone


def test_what_is_not_refused() -> None:
    refuse_setup(*setup(), {})
    refuse_setup(*setup(cache_config__prefix_caching_hash_algo="xxhash"), {"PYTHONHASHSEED": "0"})
    refuse_setup(*setup(cache__kv_cache_groups=[group(MLAAttentionSpec)]), {})
    refuse_setup(*setup(cache__kv_cache_groups=[uniform(FullAttentionSpec)]), {})
    refuse_setup(*setup(speculative_config=SimpleNamespace(method="ngram")), {})
    ranks = {"tensor_parallel_size": 8, "distributed_executor_backend": "mp", "data_parallel_size": 2}
    refuse_setup(*setup(**{f"parallel_config__{name}": value for name, value in ranks.items()}), {})


# -- ranks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "heads", "mine", "shards"),
    [
        (2, 2, 1, [0, 1]),
        (2, 8, 4, [0, 1]),
        (4, 2, 1, [0, 0, 1, 1]),
        (8, 1, 1, [0] * 8),
        (8, 8, 1, list(range(8))),
        (1, 8, 8, [0]),
    ],
)
def test_ranks_with_equal_heads_have_one_shard(ranks: int, heads: int, mine: int, shards: list[int]) -> None:
    spec = FullAttentionSpec(block_size=16, num_kv_heads=mine)
    changes: dict[str, Any] = {"cache__kv_cache_groups": [SimpleNamespace(kv_cache_spec=spec)]}
    changes |= {"parallel_config__tensor_parallel_size": ranks, "model_config__get_total_num_kv_heads": lambda: heads}
    vllm, cache = setup(**changes)
    assert [shard_of(vllm, cache, rank) for rank in range(ranks)] == shards
    vllm.model_config.hf_text_config.block_configs = [object()]  # layers of unequal heads: vLLM counts the first one's
    assert [shard_of(vllm, cache, rank) for rank in range(ranks)] == [*range(ranks)]
    latent = SimpleNamespace(kv_cache_spec=MLAAttentionSpec(block_size=16, num_kv_heads=1))
    cache.kv_cache_groups = [latent]
    assert {shard_of(vllm, cache, rank) for rank in range(ranks)} == {0}


def test_layers_of_which_some_are_replicated() -> None:
    layers = {str(heads): FullAttentionSpec(block_size=16, num_kv_heads=heads) for heads in (1, 2)}
    spec = SimpleNamespace(block_size=16, kv_cache_specs=layers)
    changes: dict[str, Any] = {"cache__kv_cache_groups": [SimpleNamespace(kv_cache_spec=spec)]}
    vllm, cache = setup(
        **changes, parallel_config__tensor_parallel_size=2, model_config__get_total_num_kv_heads=lambda: 1
    )
    assert [shard_of(vllm, cache, rank) for rank in (0, 1)] == [0, 1]


def test_replicas_of_a_server_have_a_directory_each(tmp_path: Path) -> None:
    """By vLLM's own number of the replica, in any text of the configuration."""
    model = model_of(*setup(), planes(), "0.32.0", {})
    file = tmp_path / "gdscache.yaml"
    file.write_text(
        f"ssd: {{path: '{tmp_path}/$GDSCACHE_DP_RANK/kv', stripes: ['{tmp_path}/x${{GDSCACHE_DP_RANK}}']}}\n"
    )
    sections = {
        "ssd": {"path": f"{tmp_path}/$GDSCACHE_DP_RANK/kv", "stripes": [f"{tmp_path}/x${{GDSCACHE_DP_RANK}}"]},
        "events": {"endpoint": "tcp://127.0.0.1:555$GDSCACHE_DP_RANK"},
    }
    for index in (0, 3):
        # vLLM calls a replica of a dense model rank 0 of 1
        vllm, _ = setup(parallel_config__data_parallel_rank=0, parallel_config__data_parallel_index=index)
        variables = variables_of(vllm.parallel_config)
        for given in (str(file), sections):
            config = engine_configuration(given, model, lambda: "w", "it", variables)
            assert [config.ssd.path, *config.ssd.stripes] == [tmp_path / str(index) / "kv", tmp_path / f"x{index}"]
        assert config.events.endpoint == f"tcp://127.0.0.1:555{index}"
    with pytest.raises(InvalidValueError, match="GDSCACHE_DP_RANK is not set"):
        engine_configuration(sections, model, lambda: "w", "it")


def test_workers_in_processes_of_their_own() -> None:
    assert [
        separate(setup(parallel_config__distributed_executor_backend=name)[0].parallel_config) for name in ("mp", "uni")
    ] == [True, False]
    assert not separate(setup()[0].parallel_config)


# -- options ---------------------------------------------------------------------------------------------------------

SECTIONS: dict[str, Any] = {"cpu": {"capacity": "1MiB"}}


@pytest.mark.parametrize(
    ("given", "error", "told"),
    [
        ({}, ConfigError, "gdscache config init vllm"),
        ({"config": 3}, ConfigError, "gdscache config init vllm"),
        ({"config": SECTIONS, "wiat_seconds": 1}, UnknownKeyError, "wiat_seconds"),
        ({"config": SECTIONS, "wait_seconds": -1}, InvalidValueError, "wait_seconds"),
        ({"config": SECTIONS, "pin_seconds": "long"}, InvalidValueError, "pin_seconds"),
        ({"config": SECTIONS, "pin_seconds": 5}, InvalidValueError, "more than 5"),
        ({"config": SECTIONS, "layerwise": "yes"}, InvalidValueError, "layerwise"),
    ],
)
def test_options_that_are_wrong(given: dict[str, Any], error: type[GdsCacheError], told: str) -> None:
    with pytest.raises(error) as raised:
        Options.of(given)
    assert told in str(raised.value)


def test_a_configuration_is_a_file_or_its_sections(tmp_path: Path) -> None:
    model = model_of(*setup(), planes(), "0.32.0", {})
    file = tmp_path / "gdscache.yaml"
    file.write_text("cpu: {capacity: 1MiB}\n")
    by_file = engine_configuration(str(file), model, lambda: "w", "it")
    assert by_file == engine_configuration(SECTIONS, model, lambda: "w", "it")
    assert (by_file.model.page_tokens, by_file.model.weights) == (16, "w")
    file.write_text("model: {weights: mine}\n")
    by_name = engine_configuration(str(file), model, lambda: pytest.fail("they are named"), "it")
    assert by_name.model.weights == "mine"
    with pytest.raises(errors.GeometryError, match=r"`model\.layers`: the inference engine describes its model"):
        engine_configuration({"model": {"layers": 3}}, model, lambda: "w", "it")


def test_a_shared_pool_needs_the_configuration_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(POOLS, "127.0.0.1:1", FakePool())
    monkeypatch.setattr("gdscache.mooncake.client.Lines._reachable", lambda lines: True)
    found = planes()
    sections = {**SECTIONS, "ssd": None, "tiers": [pool_entry("127.0.0.1:1")]}
    config = engine_configuration(sections, model_of(*setup(), found, "0.32.0", {}), lambda: "w", "it")
    with CacheEngine.from_config(config, planes=[[plane] for plane in found.tensors]) as engine:
        report = engine.store(PageHashes([b"a" * 32, b"b" * 32]), [0, 1]).result(60)
        assert report.tiers == (("cpu", "mooncake"),) * 2
    assert len(POOLS["127.0.0.1:1"].objects) == 2


def test_weights_are_known_by_their_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "_started", time.time)  # so that what is written here is no change behind the reading
    vllm, _ = setup(model_config__model=str(tmp_path), model_config__revision=None)
    vllm.load_config = SimpleNamespace(load_format="auto", download_dir=None)
    with pytest.raises(errors.WeightsNotFoundError):
        weights_of(vllm)
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"1")
    before = weights_of(vllm)
    assert weights_of(vllm) == before
    file.write_bytes(b"22")
    assert weights_of(vllm) != before
    vllm.load_config.load_format = "dummy"
    assert weights_of(vllm) == "dummy"


# -- planes and identity ---------------------------------------------------------------------------------------------


def caches(order: tuple[int, ...], layers: int = 3, ratio: int = 1) -> dict[str, torch.Tensor]:
    """Tensors of (blocks, heads, tokens, content) whose memory lies in that order of (layer, block, head, token)."""
    shape = (layers, 8 * ratio, 2, 16 // ratio, 64)
    memory = torch.zeros([shape[i] for i in (*order, 4)], dtype=torch.bfloat16)
    back = [(*order, 4).index(i) for i in range(5)]
    whole = memory.permute(back)
    return {f"layer.{i}": whole[i] for i in range(layers)}


def planes() -> VllmPlanes:
    return planes_of(caches((0, 1, 3, 2)), 8, 16, "LBNHC")


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 1, 3, 2), (1, 0, 2, 3), (1, 0, 3, 2)])
def test_a_block_is_one_run_of_bytes(order: tuple[int, ...]) -> None:
    given = caches(order)
    found = planes_of(given, 8, 16, "x")
    assert [tuple(tensor.shape) for tensor in found.tensors] == [(8, 16, 2 * 64 * 2)] * 3
    for tensor, cache in zip(found.tensors, given.values(), strict=True):
        tensor[5] = 7
        assert bool((cache[5].contiguous().view(torch.uint8) == 7).all())
        assert not bool(cache[4].any())
        assert not bool(cache[6].any())
    Config.from_dict({"model": model_of(*setup(), found, "0.32.0", {}), "cpu": {"capacity": "1MiB"}})


@pytest.mark.parametrize("order", [(0, 2, 1, 3), (1, 2, 0, 3)])
def test_other_layouts_are_refused(order: tuple[int, ...]) -> None:
    with pytest.raises(CacheLayoutUnsupportedError, match="LHBNC") as raised:
        planes_of(caches(order), 8, 16, "LHBNC")
    assert "VLLM_KV_CACHE_LAYOUT" in raised.value.hint


def test_kernel_blocks_are_joined() -> None:
    given = caches((0, 1, 3, 2), ratio=2)
    found = planes_of(given, 8, 16, "LBNHC")
    found.tensors[1][3] = 9
    assert bool((given["layer.1"][6:8].contiguous().view(torch.uint8) == 9).all())
    assert not bool(given["layer.1"][:6].any())
    with pytest.raises(CacheLayoutUnsupportedError):
        planes_of(caches((1, 0, 3, 2), ratio=2), 8, 16, "BLNHC")
    with pytest.raises(CacheLayoutUnsupportedError):
        planes_of(given, 5, 16, "LBNHC")


def test_layers_that_share_their_cache_are_one_plane() -> None:
    given = caches((0, 1, 3, 2))
    found = planes_of({**given, "layer.3": given["layer.0"]}, 8, 16, "LBNHC")
    assert len(found.tensors) == 3
    assert found.layers == {"layer.0": 0, "layer.1": 1, "layer.2": 2, "layer.3": 0}


def test_layers_of_different_widths() -> None:
    given = caches((0, 1, 3, 2), layers=2) | {"wide": torch.zeros(8, 1, 16, 576, dtype=torch.bfloat16)}
    found = planes_of(given, 8, 16, "LBNHC")
    config = Config.from_dict({"model": model_of(*setup(), found, "0.32.0", {}), "cpu": {"capacity": "1MiB"}})
    assert [layer[0].row_bytes for layer in config.model.layout().layers] == [256, 256, 1152]


def test_on_a_cpu_the_processor_is_a_part_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM packs keys into tiles where the processor has AMX, and in columns where it has not."""
    amx, other = tmp_path / "amx", tmp_path / "other"
    amx.write_text("processor\t: 0\nflags\t\t: fpu avx512f avx512fp16 amx_tile\n\nflags\t\t: fpu\n")
    other.write_text("processor\t: 0\nflags\t\t: fpu avx512f\n")
    assert vllm_setup._tiles(amx) == ["amx_tile", "avx512f"]
    assert vllm_setup._tiles(other) == ["avx512f"]
    assert vllm_setup._tiles(Path("/dev/null")) == []
    salts, tiles = [], vllm_setup._tiles
    for file in (amx, other):
        monkeypatch.setattr(vllm_setup, "_tiles", lambda file=file, tiles=tiles: tiles(file))
        salts.append(model_of(*setup(), planes(), "0.32.0", {})["salt"])
    assert salts[0] != salts[1]
