"""Hugging Face transformers on gdscache: the same tokens with and without cached prefixes, wherever these come from.
The demo's test has them in another process."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, FalconConfig, LlamaConfig, PreTrainedModel

from gdscache import CacheEngine
from gdscache.config import ModelConfig
from gdscache.errors import (
    GeometryError,
    InvalidValueError,
    PoolFullError,
    SequenceStateError,
    TokensError,
    UnsupportedRequestError,
)
from gdscache.integrations.transformers import OLDEST, PrefixCache, model_section
from gdscache.integrations.transformers_rows import PoolRows
from tests.support.helpers import flip_file
from tests.support.places import ROOT
from tests.support.tiny_transformers import (
    CONFIGS,
    NEW,
    PAGE,
    PROMPT,
    SMALL,
    build,
    cached,
    generate,
    options,
    serve,
    tokens,
)

PLANES = {  # per token and layer, K then V, as transformers 5.23 keeps them
    "llama": ((2, 8), (2, 8)),
    "qwen3": ((2, 16), (2, 16)),
    "deepseek": ((24,), (8,)),
}


@pytest.fixture(params=list(CONFIGS))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["llama", "deepseek"])  # K and V, and latents
def model(request: pytest.FixtureRequest, device: str) -> PreTrainedModel:
    return build(request.param, device)


def assert_same(got: dict[str, Any], reference: tuple[torch.Tensor, torch.Tensor]) -> None:
    """The same greedy tokens, and logits that differ by rounding only. Where rounding decides, the paths may part."""
    sequences, logits = reference
    tolerance = (0.015 if got["coarse"] else 1e-4) * float(logits.abs().max())
    best = logits.topk(2, -1).values
    near_ties = ((best[..., 0] - best[..., 1]) <= 2 * tolerance).nonzero()[:, 1]
    agreed = int(near_ties.min()) if len(near_ties) else NEW
    assert agreed == NEW or got["coarse"], "a seed with a tie: the test would prove little"
    assert agreed > 0
    n = sequences.shape[1] - NEW + agreed
    assert torch.equal(got["tokens"][:, :n], sequences[:, :n])
    torch.testing.assert_close(got["logits"][:, :agreed], logits[:, :agreed], atol=tolerance, rtol=0)


def check(got: dict[str, Any], model: PreTrainedModel, reference: Any, found: int, sources: dict[str, int]) -> None:
    assert (got["found"], got["sources"]) == (found, sources)
    assert_same({**got, "coarse": model.dtype is torch.bfloat16}, reference)


# -- the model section -----------------------------------------------------------------------------------------------


def test_the_section_describes_what_the_model_really_caches(kind: str) -> None:
    model = build(kind)
    cache = DynamicCache(config=model.config)
    model(tokens(3), past_key_values=cache)
    layout = ModelConfig(**model_section(model.config, dtype=model.dtype, name="m", page_tokens=PAGE)).layout()
    assert layout.n_layers == len(cache.layers) == 3
    for planes, layer in zip(layout.layers, cache.layers, strict=True):
        assert tuple(plane.shape for plane in planes) == PLANES[kind]
        for plane, states in zip(planes, (layer.keys, layer.values), strict=True):
            assert states.shape[1] * states.shape[3] * states.element_size() == plane.row_bytes
            assert plane.dtype == "float32"


def test_a_head_of_v_may_have_a_width_of_its_own() -> None:
    config = LlamaConfig(**SMALL, num_key_value_heads=2, head_dim=16, v_head_dim=4)
    section = model_section(config, dtype="bfloat16", name="m")
    assert (section["head_dim"], section["v_head_dim"], section["dtype"]) == (16, 4, "bfloat16")


@pytest.mark.parametrize(
    "more",
    [{"alibi": False}, {"multi_query": False, "alibi": True}, {"new_decoder_architecture": True, "num_kv_heads": 2}],
)
def test_each_kind_of_falcon_is_served(more: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(7)
    config = FalconConfig(**{**SMALL, "intermediate_size": None}, **more)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with CacheEngine.from_config(options(model, tmp_path)) as engine:
        assert [serve(engine, model, tokens())["found"] for _ in range(2)] == [0, 40]


class Wrapper(torch.nn.Module):
    """Hands its calls on, and has no config of its own."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, **given: Any) -> Any:
        return self.inner(**given)


def test_falcon_attends_to_later_tokens_where_it_is_asked_for_attentions(tmp_path: Path) -> None:
    """Its keys depend on them then, as transformers 5.23 computes them: see the first assertion."""
    model = AutoModelForCausalLM.from_config(FalconConfig(**SMALL)).eval()
    asked = {"output_attentions": True}
    short, long = (model(tokens()[:, :n], **asked).logits[:, :20].detach() for n in (20, 40))
    assert float((short - long).abs().max()) > 1e-3
    with CacheEngine.from_config(options(model, tmp_path)) as engine:
        for called in (model, Wrapper(model)):
            cache = PrefixCache(engine, called).open(tokens())
            with cache, pytest.raises(UnsupportedRequestError, match="attends to later tokens") as refused:
                called(input_ids=tokens(), past_key_values=cache, **asked)
            assert "output_attentions" in str(refused.value.hint)
        assert serve(engine, model, tokens())["found"] == 0


def test_an_unknown_element_type_is_refused_by_name() -> None:
    config = LlamaConfig(**SMALL, num_key_value_heads=2, head_dim=16)
    for dtype in ("bf16", torch.float64):
        with pytest.raises(GeometryError, match="an unknown element type") as caught:
            model_section(config, dtype=dtype, name="m")
        assert "bfloat16" in caught.value.hint


def test_another_rope_is_another_namespace() -> None:
    plain, stretched = LlamaConfig(**SMALL), LlamaConfig(**SMALL)
    stretched.rope_parameters = {**plain.rope_parameters, "rope_type": "linear", "factor": 4.0}
    sections = [
        model_section(c, dtype="float32", name="m", weights="1") for c in (plain, LlamaConfig(**SMALL), stretched)
    ]
    assert sections[0] == sections[1]
    assert sections[0]["weights"] != sections[2]["weights"]


# -- the same answer from every tier -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "pack"), [("float32", "off"), ("bfloat16", "off"), ("bfloat16", "on")])
def test_the_answer_is_the_same_from_every_tier(kind: str, device: str, dtype: str, pack: str, tmp_path: Path) -> None:
    model, ids = build(kind, device, dtype), tokens()
    reference = generate(model, ids, None)
    pages = -(-(PROMPT + NEW) // PAGE)
    with CacheEngine.from_config(options(model, tmp_path, gpu=pages, pack=pack)) as engine:
        assert engine.layout.packed == (pack == "on")
        first = serve(engine, model, ids)
        check(first, model, reference, 0, {})
        from_gpu = serve(engine, model, ids)
        check(from_gpu, model, reference, 40, {"gpu": 40})
        serve(engine, model, tokens(seed=1))  # takes the whole GPU pool
        from_cpu = serve(engine, model, ids)
        check(from_cpu, model, reference, 40, {"cpu": 40})
    with CacheEngine.from_config(options(model, tmp_path, cpu=None, pack=pack)) as engine:
        from_ssd = serve(engine, model, ids)
        check(from_ssd, model, reference, 40, {"ssd": 40})
    assert {got["prefix"] for got in (from_gpu, from_cpu, from_ssd)} == {first["pages"][5]}


def test_sources_are_tokens_also_of_pages_that_do_not_fit_packed(tmp_path: Path) -> None:
    """A page of random bits lies between pages of zeros."""
    ids = tokens()[0].tolist()
    with CacheEngine.from_config(options(build("llama", "cpu", "bfloat16"), tmp_path, gpu=6, pack="on")) as engine:
        with engine.sequence(ids[: 5 * PAGE]) as sequence:
            for plane in engine.gpu.planes(0):
                plane.zero_()
                row = plane[sequence.slots[1]].view(torch.int16)
                row.copy_(torch.randint(-(1 << 15), 1 << 15, row.shape, generator=torch.Generator().manual_seed(1)))
            sequence.commit().result(30)
        with engine.sequence([token + 1 for token in ids]):  # takes the whole GPU pool
            pass
        with contextlib.closing(PoolRows(engine, [ids], "")) as rows:
            assert rows.sources == {"cpu": 4 * PAGE, "cpu_plain": PAGE}


def test_a_corrupt_page_is_computed_again(model: PreTrainedModel, tmp_path: Path) -> None:
    ids = tokens()
    reference = generate(model, ids, None)
    with CacheEngine.from_config(options(model, tmp_path)) as engine, PrefixCache(engine, model).open(ids) as cache:
        sequences, _ = generate(model, ids, cache)
        cache.commit(sequences)
        rows = cache.layers[1].keys[0, :, 2 * PAGE : 3 * PAGE].transpose(0, 1).contiguous().cpu()
    slab = tmp_path / "slab-0.bin"
    flip_file(slab, slab.read_bytes().index(rows.view(torch.uint8).numpy().tobytes()) + 3, 4)
    with CacheEngine.from_config(options(model, tmp_path, cpu=None)) as engine:
        got = serve(engine, model, ids)
        assert got["found"] == 2 * PAGE
        check(got, model, reference, 2 * PAGE, got["sources"])
        assert engine.stats()["misses"]["checksum"] == 1
        check(serve(engine, model, ids), model, reference, 40, {"gpu": 40})
    with CacheEngine.from_config(options(model, tmp_path, cpu=None)) as engine:
        check(serve(engine, model, ids), model, reference, 40, {"ssd": 40})  # it was stored again


# -- conversations, batches, plain forward calls -----------------------------------------------------------------------


def test_a_conversation_grows(model: PreTrainedModel, tmp_path: Path) -> None:
    turns = [tokens(20, seed=n) for n in range(4)]
    said, reference = torch.empty((1, 0), dtype=torch.long), torch.empty((1, 0), dtype=torch.long)
    with CacheEngine.from_config(options(model, tmp_path)) as engine:
        prefixes = PrefixCache(engine, model)
        for n, turn in enumerate(turns):
            said, before = torch.cat([said, turn], 1), said.shape[1]
            reference, _ = generate(model, torch.cat([reference, turn], 1), None)
            with prefixes.open(said) as cache:
                assert cache.cached_tokens == max(0, before - 1) // PAGE * PAGE, n  # the last answer too
                said, _ = generate(model, said, cache)
                cache.commit(said)
            assert torch.equal(said, reference)


def test_one_cache_serves_several_turns(model: PreTrainedModel, tmp_path: Path) -> None:
    with CacheEngine.from_config(options(model, tmp_path)) as engine:
        said = tokens(20)
        with PrefixCache(engine, model).open(said) as cache:
            for n in range(3):
                expected, _ = generate(model, said, None)
                said, _ = generate(model, said, cache)
                assert torch.equal(said, expected), n
                cache.commit(said)
                said = torch.cat([said, tokens(5, seed=n)], 1)
        assert cached(engine, model, said[0]) == (20 + 3 * NEW + 2 * 5 - 1) // PAGE * PAGE
        expected, _ = generate(model, said, None)
        assert torch.equal(serve(engine, model, said)["tokens"], expected)


def test_plain_forward_calls_reuse_the_prefix(model: PreTrainedModel, tmp_path: Path) -> None:
    ids = tokens().to(model.device)
    reference = model(ids).logits
    with CacheEngine.from_config(options(model, tmp_path)) as engine:
        for found in (0, 40):
            with PrefixCache(engine, model).open(ids) as cache:
                assert cache.cached_tokens == cache.get_seq_length() == found
                logits = model(
                    ids[:, found:], past_key_values=cache
                ).logits  # autograd is on: nothing may leak into the pool
                torch.testing.assert_close(logits, reference[:, found:], atol=1e-4, rtol=1e-4)
                cache.commit(ids)
            assert not any(plane.requires_grad for plane in engine.gpu.planes(0))


def test_rows_of_a_batch_start_from_their_shortest_prefix(model: PreTrainedModel, tmp_path: Path) -> None:
    long, short, new = tokens(), torch.cat([tokens()[:, :19], tokens(26, seed=5)], 1), tokens(seed=6)
    batch = torch.cat([long, short, long, short])
    expected = torch.cat([generate(model, row[None], None)[0] for row in batch])
    with CacheEngine.from_config(options(model, tmp_path)) as engine:
        serve(engine, model, long)
        with PrefixCache(engine, model).open(batch) as cache:
            assert cache.cached_tokens == 16
            assert cache.sources == {"gpu": 40 + 16 + 40 + 16}
            sequences, _ = generate(model, batch, cache)
            assert torch.equal(sequences, expected)
            cache.commit(sequences)
        engine.drain(20)
        for row in (long, short):
            got = serve(engine, model, row)
            check(got, model, generate(model, row, None), 40, {"gpu": 40})
        with PrefixCache(engine, model).open(torch.cat([long, new])) as cache:
            assert cache.cached_tokens == 0
            assert torch.equal(generate(model, torch.cat([long, new]), cache)[0][0], expected[0])


# -- what must not mix -------------------------------------------------------------------------------------------------


def test_models_weights_and_salts_keep_apart(tmp_path: Path) -> None:
    ids = tokens()
    strangers = [(7, {"name": "a"}), (8, {"name": "a", "weights": "2"}), (9, {"name": "b"})]
    for seed, names in strangers * 2:  # one directory for all; the second time each finds its own
        model = build("llama", seed=seed)
        reference = generate(model, ids, None)
        with CacheEngine.from_config(options(model, tmp_path, **names)) as engine:
            own = cached(engine, model, ids[0])
            check(serve(engine, model, ids), model, reference, min(own, 40), {"ssd": 40} if own else {})
            check(serve(engine, model, ids, "tenant"), model, reference, 0, {})
            assert serve(engine, model, ids, "tenant")["found"] == 40
            tenant = PrefixCache(engine, model).salt("tenant")
            assert engine.invalidate(engine.namespace(tenant))["ssd"] == 6
            assert serve(engine, model, ids)["found"] == 40
    assert own == 40


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def llama(tmp_path: Path) -> Any:
    model = build("llama")
    with CacheEngine.from_config(options(model, tmp_path, gpu=16)) as engine:
        yield model, engine, PrefixCache(engine, model)


def test_padding_ragged_rows_and_salts_of_other_types_are_refused(llama: Any) -> None:
    _, engine, prefixes = llama
    mask = torch.ones((1, PROMPT), dtype=torch.long)
    prefixes.open(tokens(), attention_mask=mask).close()
    mask[0, 0] = 0
    for bad in (lambda: prefixes.open(tokens(), attention_mask=mask), lambda: prefixes.open([[1, 2, 3], [1, 2]])):
        with pytest.raises(UnsupportedRequestError):
            bad()
    for empty in ([], [[]], torch.empty((1, 0), dtype=torch.long), torch.empty((0, 4), dtype=torch.long)):
        with pytest.raises(UnsupportedRequestError):
            prefixes.open(empty)
    for wrong in (tokens()[None], tokens().float(), [[1, -1]]):
        with pytest.raises(TokensError):
            prefixes.open(wrong)
    for salt in (b"tenant", 7, None):
        with pytest.raises(InvalidValueError, match="which is not text"):
            prefixes.open(tokens(), salt=salt)
    assert engine.stats()["tiers"]["gpu"]["private_slots"] == 0


def test_beams_and_returned_sequences_are_refused(llama: Any) -> None:
    model, engine, prefixes = llama
    for more in ({"num_beams": 3}, {"num_return_sequences": 3, "do_sample": True}):
        for _ in range(2):  # the second time with a cached prefix
            with prefixes.open(tokens()) as cache, pytest.raises(UnsupportedRequestError, match="rows"):
                model.generate(tokens(), past_key_values=cache, max_new_tokens=2, **more)
            serve(engine, model, tokens())
    with prefixes.open(tokens()) as cache:
        for call in (cache.reorder_cache, cache.batch_repeat_interleave, cache.batch_select_indices):
            with pytest.raises(UnsupportedRequestError):
                call(torch.tensor([0]))
        with pytest.raises(UnsupportedRequestError):
            cache.layers[0].batch_repeat_interleave(repeats=2)


def test_a_full_pool_says_what_to_change_and_holds_nothing(llama: Any) -> None:
    model, engine, prefixes = llama
    with pytest.raises(PoolFullError, match=r"gpu\.capacity"):
        prefixes.open(torch.cat([tokens(), tokens(seed=1), tokens(seed=2)]))
    assert engine.stats()["tiers"]["gpu"]["private_slots"] == 0
    with prefixes.open(tokens(16 * PAGE)) as cache:
        sequences, _ = generate(model, tokens(16 * PAGE), cache)
        with pytest.raises(PoolFullError):
            cache.commit(sequences)  # no page is left for the answer
        cache.commit(sequences[:, : 16 * PAGE])
    assert cached(engine, model, sequences[0]) == 16 * PAGE
    assert engine.stats()["tiers"]["gpu"]["private_slots"] == 0


def test_commit_takes_the_tokens_of_the_cache_and_no_others(llama: Any) -> None:
    model, engine, prefixes = llama
    ids = tokens()
    with prefixes.open(ids) as cache:
        with pytest.raises(SequenceStateError, match="not every layer"):
            cache.commit(ids)
        model(ids[:, :20], past_key_values=cache)
        with pytest.raises(SequenceStateError, match="20 tokens are computed"):
            cache.commit(ids)
        model(ids[:, 20:], past_key_values=cache)
        for wrong in (ids[:, :-1], tokens(seed=3), torch.cat([ids, ids])):
            with pytest.raises(SequenceStateError):
                cache.commit(wrong)
        assert cached(engine, model, ids[0]) == 0
        cache.commit(ids)
    assert cached(engine, model, ids[0]) == 40
    with pytest.raises(SequenceStateError):
        cache.commit(ids)
    cache.close()


def test_an_older_transformers_is_refused(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, engine, _ = llama
    assert f'"transformers>={OLDEST}"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    monkeypatch.setattr("gdscache.integrations.transformers.transformers.__version__", "5.17.2")
    with pytest.raises(UnsupportedRequestError, match=f"5.17.2 is older than {OLDEST}"):
        PrefixCache(engine, model)


def test_an_engine_of_another_model_is_refused(tmp_path: Path) -> None:
    qwen = build("qwen3")
    for number, stranger in enumerate((build("llama"), build("deepseek"), build("qwen3", dtype="bfloat16"))):
        with (
            CacheEngine.from_config(options(qwen, tmp_path / str(number))) as engine,
            PrefixCache(engine, stranger).open(tokens()) as cache,
            pytest.raises(GeometryError, match="model_section"),
        ):
            generate(stranger, tokens(), cache)
    config = options(qwen, tmp_path / "layers")
    config["model"]["layers"] = 2
    with (
        CacheEngine.from_config(config) as engine,
        PrefixCache(engine, qwen).open(tokens()) as cache,
        pytest.raises(GeometryError, match="layer 2"),
    ):
        generate(qwen, tokens(), cache)
    one_plane = {"name": "m", "layers": 3, "planes": [{"name": "latent", "shape": [32]}]}
    with (
        CacheEngine.from_config({**config, "model": one_plane, "ssd": None}) as engine,
        pytest.raises(GeometryError, match="1 planes"),
    ):
        PrefixCache(engine, qwen)


@pytest.mark.gpu
def test_the_engine_and_the_model_may_lie_on_different_devices(tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    for where, engine_on in (("cpu", "cuda"), ("cuda", "cpu")):
        model = build("llama", where)
        config = options(model, tmp_path / where)
        config["gpu"]["device"] = engine_on
        reference = generate(model, tokens(), None)
        with CacheEngine.from_config(config) as engine:
            check(serve(engine, model, tokens()), model, reference, 0, {})
            check(serve(engine, model, tokens()), model, reference, 40, {"gpu": 40})
