"""Models of transformers whose layers keep a state, on a HybridEngine: the same answers as without a cache, and a state
that is wrong is seen in them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    FalconMambaConfig,
    InklingTextConfig,
    JambaConfig,
    Mamba2Config,
    MambaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    ZambaConfig,
)

from gdscache import HybridEngine
from gdscache.errors import GeometryError, SequenceStateError, UnsupportedRequestError
from gdscache.integrations.transformers import PrefixCache, model_section
from gdscache.integrations.transformers_parts import STATES
from tests.support.tiny_transformers import (
    NEW,
    PAGE,
    PROMPT,
    SMALL,
    STATEFUL,
    build,
    cached,
    generate,
    hybrid_options,
    tokens,
)

WHOLE = PROMPT // PAGE * PAGE
MAIN = ["qwen3_next", "lfm2", "falcon_h1"]  # a state and a convolution, a convolution alone, attention in each layer


@pytest.fixture(scope="module")
def models() -> Callable[[str], PreTrainedModel]:
    made: dict[str, PreTrainedModel] = {}

    def model(kind: str) -> PreTrainedModel:
        if kind not in made:
            made[kind] = build(kind)
        return made[kind]

    return model


@pytest.fixture(params=list(STATEFUL))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def model(kind: str, models: Callable[[str], PreTrainedModel]) -> PreTrainedModel:
    return models(kind)


@pytest.fixture
def qwen(models: Callable[[str], PreTrainedModel]) -> PreTrainedModel:
    return models("qwen3_next")


@contextlib.contextmanager
def opened(model: PreTrainedModel, path: Path, **more: Any) -> Iterator[HybridEngine]:
    """An engine that has all of its blocks, and nothing else than sound pages, at the end."""
    with HybridEngine.from_config({**hybrid_options(model, path, cpu="64MiB"), **more}) as engine:
        yield engine
        engine.drain(20)
        for part, free in zip(engine.engines, engine._free, strict=True):
            assert sorted(free) == list(range(part.blocks))
        assert engine.check().problems == ()


def same(got: tuple[torch.Tensor, torch.Tensor], model: PreTrainedModel, ids: torch.Tensor) -> None:
    """The greedy tokens are those without a cache, and the logits differ by rounding alone: by 2e-5 of the largest at
    most, which is seen, of the 1e-4 that is allowed. A state of zeros makes 7e-3 and more: see below."""
    sequences, logits = generate(model, ids, None, got[1].shape[1])
    assert torch.equal(got[0], sequences)
    torch.testing.assert_close(got[1], logits, atol=1e-4 * float(logits.abs().max()), rtol=0)


def answer(engine: HybridEngine, model: PreTrainedModel, ids: torch.Tensor, new: int = NEW) -> tuple[int, torch.Tensor]:
    """Answer a prompt through the cache, as without one, and store it: tokens found, and all tokens."""
    with PrefixCache(engine, model).open(ids) as cache:
        found = cache.cached_tokens
        assert cache.get_seq_length() == found
        got = generate(model, ids, cache, new)
        for handle in cache.commit(got[0]):
            assert not any(handle.result(20).dropped.values())
    engine.drain(20)
    same(got, model, ids)
    return found, got[0]


def parting(n: int, seed: int) -> torch.Tensor:
    """The usual prompt up to token `n`, and others from there on."""
    other = tokens(PROMPT, seed)
    other[:, n] = (tokens()[:, n] + seed) % 61
    return torch.cat([tokens()[:, :n], other[:, n:]], 1)


# -- the model section -------------------------------------------------------------------------------------------------


def test_every_family_is_tried_here() -> None:
    assert {build(kind).config.model_type for kind in STATEFUL} == set(STATES)


def test_the_section_has_the_states_as_the_model_makes_them(qwen: PreTrainedModel) -> None:
    section = model_section(qwen.config, dtype="float32", name="m", page_tokens=PAGE, model=qwen)
    assert section["groups"] == [{"name": "full", "layers": [1]}, {"name": "state", "state": True, "layers": [0, 2]}]
    assert section["planes"] == [
        {"name": "conv", "shape": [64, 4], "dtype": "float32", "layers": [0, 2]},
        {"name": "recurrent", "shape": [4, 8, 8], "dtype": "float32", "layers": [0, 2]},
        {"name": "k", "shape": [2, 16], "dtype": "float32", "layers": [1]},
        {"name": "v", "shape": [2, 16], "dtype": "float32", "layers": [1]},
    ]
    half = build("qwen3_next", dtype="bfloat16")
    section = model_section(half.config, dtype="bfloat16", name="m", model=half)
    assert {plane["name"]: plane["dtype"] for plane in section["planes"]}["recurrent"] == "float32"
    with pytest.raises(GeometryError, match="qwen3_next keeps states") as refused:
        model_section(qwen.config, dtype="float32", name="m")
    assert "model=" in str(refused.value.hint)


def test_a_layer_that_attends_and_keeps_a_state_is_two(models: Callable[[str], PreTrainedModel]) -> None:
    for kind, full, state in (
        ("falcon_h1", [0, 2, 4], [1, 3, 5]),
        ("zamba2", [1, 4], [0, 2, 3, 5]),
        ("nemotron_h", [1], [0]),
    ):
        model = models(kind)
        section = model_section(model.config, dtype="float32", name="m", model=model)
        assert {group["name"]: group["layers"] for group in section["groups"]} == {"full": full, "state": state}


REFUSED: dict[str, tuple[Callable[[], PreTrainedConfig], str]] = {
    "jamba": (lambda: JambaConfig(**SMALL, attn_layer_period=2, attn_layer_offset=1), "begins from an empty state"),
    "zamba": (lambda: ZambaConfig(**SMALL, attn_layer_period=2), "begins from an empty state"),
    "mamba": (lambda: MambaConfig(num_hidden_layers=2), "does not know its length"),
    "mamba2": (lambda: Mamba2Config(num_hidden_layers=2), "does not know its length"),
    "falcon_mamba": (lambda: FalconMambaConfig(num_hidden_layers=2), "does not know its length"),
    "inkling_text": (lambda: InklingTextConfig(num_hidden_layers=2), "keeps its cache in a Linear"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_states_that_cannot_be_had_are_refused_by_name(what: str) -> None:
    config, words = REFUSED[what]
    with pytest.raises(GeometryError, match=rf"of {what} keeps.*{words}|of {what} {words}"):
        model_section(config(), dtype="float32", name="m")


def test_jamba_is_refused_for_a_reason() -> None:
    """Its prefill forgets the recurrent state: when it no longer does, it can be cached."""
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(
        JambaConfig(
            **SMALL, num_key_value_heads=2, attn_layer_period=2, attn_layer_offset=1, num_experts=1, mamba_d_state=8
        )
    ).eval()
    ids = tokens()
    with torch.no_grad():
        cache = DynamicCache(config=model.config)
        model(ids[:, :WHOLE], past_key_values=cache)
        behind = model(ids[:, WHOLE:], past_key_values=cache).logits
        assert float((behind - model(ids).logits[:, WHOLE:]).abs().max()) > 0.1


# -- the same answer ---------------------------------------------------------------------------------------------------


def test_the_answer_is_the_same_cold_warm_and_after_a_restart(
    kind: str, model: PreTrainedModel, tmp_path: Path
) -> None:
    with opened(model, tmp_path) as engine:
        assert answer(engine, model, tokens())[0] == 0
        assert answer(engine, model, tokens())[0] == WHOLE
    with opened(model, tmp_path, cpu=None) as engine:
        found, said = answer(engine, model, tokens())
        assert found == WHOLE
        if kind != "zamba2":  # its decoding differs from its prefill by 4e-3 of the logits, without a cache too
            longer = torch.cat([said, tokens(3, seed=1)], 1)
            assert answer(engine, model, longer)[0] == (PROMPT + NEW - 1) // PAGE * PAGE


def test_a_state_of_zeros_is_seen_in_the_logits(model: PreTrainedModel) -> None:
    """What the tolerance of the other tests would have to hide: 60 times as much, in each kind of state by itself."""
    ids = tokens()
    with torch.no_grad():
        whole = model(ids).logits[:, WHOLE:]
        for states in ("conv_states", "recurrent_states"):
            cache = DynamicCache(config=model.config)
            model(ids[:, :WHOLE], past_key_values=cache)
            found = [one for layer in cache.layers for one in getattr(layer, states, {}).values() if one is not None]
            if not found:
                assert model.config.model_type.startswith("lfm"), "a convolution alone"
                continue
            for state in found:
                state.zero_()
            positions = torch.arange(WHOLE, PROMPT)[None]
            behind = model(ids[:, WHOLE:], past_key_values=cache, position_ids=positions).logits
            assert float((behind - whole).abs().max()) > 6e-3 * float(whole.abs().max()), states


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", [*MAIN, "nemotron_h"])
def test_where_the_calls_are_the_same_the_bits_are(kind: str, dtype: str, tmp_path: Path) -> None:
    """A hit is loaded and goes on as the calls did that stored it."""
    model = build(kind, dtype=dtype)
    with opened(model, tmp_path) as engine, torch.no_grad():
        logits = []
        for found in (0, WHOLE):
            with PrefixCache(engine, model).open(tokens()) as cache:
                assert cache.cached_tokens == found
                made = model(tokens()[:, found:], past_key_values=cache).logits
                logits.append(made[:, WHOLE - found :])
                cache.commit(tokens())
            engine.drain(20)
        assert torch.equal(*logits)


@pytest.mark.parametrize("kind", MAIN)
def test_prompts_of_any_length_are_found_up_to_their_last_token(model: PreTrainedModel, tmp_path: Path) -> None:
    for length in (1, PAGE, PAGE + 1, 3 * PAGE):
        with opened(model, tmp_path / str(length)) as engine:
            ids = tokens(length)
            assert answer(engine, model, ids)[0] == 0
            assert answer(engine, model, ids)[0] == (length - 1) // PAGE * PAGE
            longer = torch.cat([ids, tokens(5, seed=3)], 1)  # without the answer, as where thoughts are left out
            assert answer(engine, model, longer)[0] == length // PAGE * PAGE


@pytest.mark.parametrize("kind", MAIN)
def test_where_prompts_part_the_third_one_begins(model: PreTrainedModel, tmp_path: Path) -> None:
    """The second one finds that the full layers have more than the states, and makes the state there."""
    for at in (3, 2 * PAGE + 3, 3 * PAGE, WHOLE + 2):
        with opened(model, tmp_path / str(at)) as engine:
            answer(engine, model, tokens())
            assert answer(engine, model, parting(at, 1))[0] == (WHOLE if at >= WHOLE else 0)
            assert answer(engine, model, parting(at, 2))[0] == at // PAGE * PAGE


def test_states_are_kept_at_intervals(qwen: PreTrainedModel, tmp_path: Path) -> None:
    for every, found in ((0, 0), (4 * PAGE, 4 * PAGE)):
        with opened(qwen, tmp_path / str(every), store={"window_every": every}) as engine:
            _, said = answer(engine, qwen, tokens(), 6 * PAGE)
            assert answer(engine, qwen, parting(4 * PAGE + 5, 1))[0] == found
            far = torch.cat([said[:, : 9 * PAGE + 2], tokens(9, seed=2)], 1)  # parts within the answer
            assert answer(engine, qwen, far)[0] == (2 * found or WHOLE)


@pytest.mark.parametrize("kind", MAIN)
def test_conversations_grow(model: PreTrainedModel, tmp_path: Path) -> None:
    said = torch.empty((1, 0), dtype=torch.long)
    for turn in range(3):
        with opened(model, tmp_path) as engine:
            before = said.shape[1]
            found, said = answer(engine, model, torch.cat([said, tokens(21, seed=turn)], 1), 2 * PAGE)
            assert found == max(0, before - 1) // PAGE * PAGE, "the last answer too"


@pytest.mark.parametrize("kind", MAIN)
def test_one_cache_serves_several_turns(model: PreTrainedModel, tmp_path: Path) -> None:
    said = tokens(17)
    with opened(model, tmp_path) as engine:
        with PrefixCache(engine, model).open(said) as cache:
            for n in range(3):
                got = generate(model, said, cache)
                same(got, model, said)
                cache.commit(got[0])
                said = torch.cat([got[0], tokens(5, seed=n)], 1)
        assert answer(engine, model, said)[0] == (17 + 3 * NEW + 2 * 5 - 1) // PAGE * PAGE


@pytest.mark.parametrize("chunk", [1, PAGE, 20])
@pytest.mark.parametrize("kind", [*MAIN, "bamba", "qwen3_5"])
def test_a_prompt_in_chunks_leaves_the_same_states(model: PreTrainedModel, tmp_path: Path, chunk: int) -> None:
    """Calls by hand, without positions, and of logits of all tokens or of the last ones."""
    ids = tokens()
    expected = model(ids).logits
    with opened(model, tmp_path) as engine, torch.no_grad():
        for found in (0, WHOLE):
            with PrefixCache(engine, model).open(ids) as cache:
                for first in range(found, PROMPT, chunk):
                    keep = 3 if first == 0 and chunk > 3 else 0
                    got = model(ids[:, first : first + chunk], past_key_values=cache, logits_to_keep=keep).logits
                    wanted = expected[:, first : first + chunk][:, -keep:]
                    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)
                cache.commit(ids)
            engine.drain(20)
            assert cached(engine, model, ids[0]) == WHOLE


def test_a_call_returns_what_it_would_without_a_cache(qwen: PreTrainedModel, tmp_path: Path) -> None:
    ids, base = tokens(), qwen.model
    with opened(qwen, tmp_path) as engine, torch.no_grad():
        whole = qwen(ids).logits
        for keep in (0, 1, 5, 6, PROMPT):
            with PrefixCache(engine, qwen).open(ids) as cache:
                got = qwen(ids, past_key_values=cache, logits_to_keep=keep).logits
            torch.testing.assert_close(got, whole[:, -keep:], atol=1e-4, rtol=1e-4)
        with PrefixCache(engine, qwen).open(ids) as cache:
            logits, *_ = qwen(ids, past_key_values=cache, return_dict=False)
        torch.testing.assert_close(logits, whole, atol=1e-4, rtol=1e-4)
        with PrefixCache(engine, base).open(ids) as cache:
            hidden = base(ids, past_key_values=cache).last_hidden_state
        torch.testing.assert_close(hidden, base(ids).last_hidden_state, atol=1e-4, rtol=1e-4)
        with PrefixCache(engine, qwen).open(ids) as cache:
            got = qwen(ids, past_key_values=cache, output_hidden_states=True, labels=ids)
            assert [one.shape[1] for one in got.hidden_states] == [PROMPT] * 4
            torch.testing.assert_close(got.loss, qwen(ids, labels=ids).loss, atol=1e-4, rtol=1e-4)
            cache.commit(ids)
        engine.drain(20)
        assert cached(engine, qwen, ids[0]) == 0, "that call was not cut, so no state lies on a page's end"


@pytest.mark.parametrize("kind", MAIN)
def test_rows_of_a_batch_start_from_what_all_of_them_have(model: PreTrainedModel, tmp_path: Path) -> None:
    one, two, new = tokens(), parting(2 * PAGE + 3, 1), tokens(seed=6)
    with opened(model, tmp_path) as engine:
        for rows, found in (([one, two], 0), ([two, one], WHOLE), ([one, new], 0), ([new, two, one] * 3, WHOLE)):
            batch = torch.cat(rows)
            with PrefixCache(engine, model).open(batch) as cache:
                assert cache.cached_tokens == found
                sequences, _ = generate(model, batch, cache)
                assert torch.equal(sequences, torch.cat([generate(model, row, None)[0] for row in rows]))
                cache.commit(sequences)
            engine.drain(20)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, contextlib.nullcontext])
def test_a_cache_may_be_opened_in_one_mode_and_used_in_another(
    qwen: PreTrainedModel, tmp_path: Path, mode: Any
) -> None:
    with opened(qwen, tmp_path) as engine:
        for found in (0, WHOLE):
            with mode():
                cache = PrefixCache(engine, qwen).open(tokens())
            with cache:
                assert cache.cached_tokens == found
                cache.commit(generate(qwen, tokens(), cache)[0])
            engine.drain(20)
        assert not any(plane.requires_grad for layer in engine.planes for plane in layer)


# -- states that are bad or gone ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", ["full", "state"])
@pytest.mark.parametrize("kind", MAIN)
def test_a_bad_page_of_any_group_costs_the_hit_and_is_stored_again(
    model: PreTrainedModel, tmp_path: Path, group: str
) -> None:
    with opened(model, tmp_path) as engine:
        names = [g.name for g in engine.groups]
        with PrefixCache(engine, model).open(tokens()) as cache:
            cache.commit(generate(model, tokens(), cache, 1)[0])
    slab = tmp_path / f"groups-{names.index(group)}" / "slab-0.bin"
    data = bytearray(slab.read_bytes())
    at = next(n for n in range(len(data)) if data[n])  # the first page that lies there
    data[at] ^= 0x10
    slab.write_bytes(data)
    with opened(model, tmp_path, cpu=None) as engine:
        assert answer(engine, model, tokens())[0] == 0
        bad = {name: stats["misses"].get("checksum", 0) for name, stats in engine.stats()["pools"].items()}
        assert bad == {name: int(name == group) for name in names}
        assert answer(engine, model, tokens())[0] == WHOLE
    with opened(model, tmp_path, cpu=None) as engine:
        assert answer(engine, model, tokens())[0] == WHOLE


def test_a_state_that_was_evicted_alone_is_a_miss_and_made_again(qwen: PreTrainedModel, tmp_path: Path) -> None:
    with opened(qwen, tmp_path) as engine:
        answer(engine, qwen, tokens())
        states = engine.by_groups["state"]
        assert states.clear()["cpu"] > 0
        assert cached(engine, qwen, tokens()[0]) == 0
        assert answer(engine, qwen, tokens())[0] == 0
        assert answer(engine, qwen, tokens())[0] == WHOLE


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_a_state_is_not_cut_and_an_empty_cache_computes_again(qwen: PreTrainedModel, tmp_path: Path) -> None:
    with opened(qwen, tmp_path) as engine:
        with PrefixCache(engine, qwen).open(tokens()) as cache:
            generate(qwen, tokens(), cache)
            lengths = cache.get_seq_length()
            with pytest.raises(UnsupportedRequestError, match="stands for all tokens"):
                cache.crop(-1)
            assert cache.get_seq_length() == lengths, "all layers or none"
            cache.crop(0)
            with pytest.raises(UnsupportedRequestError, match="assisted generation"):
                cache.activate_past_recording()
            cache.reset()
            got = generate(qwen, tokens(), cache)
            same(got, qwen, tokens())
            cache.commit(got[0])
        engine.drain(20)
        assert answer(engine, qwen, tokens())[0] == WHOLE


@pytest.mark.parametrize("where", [0, 2])
def test_behind_a_call_that_failed_nothing_is_computed_or_published(
    qwen: PreTrainedModel, tmp_path: Path, where: int
) -> None:
    """Some layers have moved on, and others have not: computing again would move the first ones twice."""

    def fail(*_: Any) -> None:
        raise RuntimeError("no memory")

    with opened(qwen, tmp_path) as engine, PrefixCache(engine, qwen).open(tokens()) as cache:
        hook = qwen.model.layers[where].register_forward_hook(fail)
        with pytest.raises(RuntimeError, match="no memory"):
            qwen(tokens(), past_key_values=cache)
        hook.remove()
        with pytest.raises(SequenceStateError, match="did not end"):
            cache.commit(tokens())
        with pytest.raises(SequenceStateError, match="did not end"):
            qwen(tokens(), past_key_values=cache)
        cache.reset()
        same(generate(qwen, tokens(), cache), qwen, tokens())
        assert cached(engine, qwen, tokens()[0]) == 0


def test_an_engine_of_other_states_is_refused(models: Callable[[str], PreTrainedModel], tmp_path: Path) -> None:
    qwen = models("qwen3_next")
    config = hybrid_options(qwen, tmp_path)
    with HybridEngine.from_config(config) as engine, pytest.raises(GeometryError, match="other tokens"):
        PrefixCache(engine, build("gemma3"))
    config["model"]["planes"][1]["dtype"] = "bfloat16"
    with HybridEngine.from_config(config) as engine, PrefixCache(engine, qwen).open(tokens()) as cache:
        with pytest.raises(GeometryError, match="the engine keeps"):
            qwen(tokens(), past_key_values=cache)
        with pytest.raises(SequenceStateError):
            cache.commit(tokens())
