"""Models that rotate keys by the length of their sequence: a request stays on one side of the limit, or is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Phi3Config, PreTrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from gdscache import CacheEngine
from gdscache.errors import InvalidValueError, RopeByLengthError, SequenceStateError, UnsupportedRequestError
from gdscache.integrations.ropes import STEADY, RopeLimit, rope_limit
from gdscache.integrations.transformers import PrefixCache
from tests.support.tiny_transformers import NEW, PAGE, SMALL, generate, options, tokens

LIMIT = 64
LONG: dict[str, Any] = {
    "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": LIMIT,
    "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 4.0, 7.0, 10.0],
}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
CONFIGS: dict[str, PreTrainedConfig] = {
    "longrope": LlamaConfig(**SMALL, num_key_value_heads=2, rope_parameters=dict(LONG)),
    "dynamic": LlamaConfig(**{**SMALL, "max_position_embeddings": LIMIT}, rope_parameters=dict(DYNAMIC)),
    "phi3": Phi3Config(**SMALL, rope_parameters=dict(LONG), original_max_position_embeddings=LIMIT),
}


def build(kind: str) -> PreTrainedModel:
    torch.manual_seed(7)
    return AutoModelForCausalLM.from_config(CONFIGS[kind], dtype=torch.float32).eval()


@pytest.fixture(params=list(CONFIGS))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def open_engine(tmp_path: Path) -> Callable[[str], CacheEngine]:
    return lambda kind: CacheEngine.from_config(options(build(kind), tmp_path))


def answer(engine: CacheEngine, kind: str, n: int, most: int | None) -> int:
    """Answers a prompt of `n` tokens, as without the cache; how many of them were cached. The model is made anew."""
    model = build(kind)
    with PrefixCache(engine, model).open(tokens(n), max_length=most) as cache:
        sequences, logits = generate(model, tokens(n), cache)
        cache.commit(sequences)
        found = cache.cached_tokens
    expected, reference = generate(build(kind), tokens(n), None)
    assert torch.equal(sequences, expected)
    torch.testing.assert_close(logits, reference, atol=1e-4 * float(reference.abs().max()), rtol=0)
    return found


def test_a_request_that_may_cross_the_limit_is_refused(kind: str, open_engine: Callable[[str], CacheEngine]) -> None:
    with open_engine(kind) as engine:
        prefixes = PrefixCache(engine, build(kind))
        for most in (None, LIMIT + 1, 1000):
            with pytest.raises(
                RopeByLengthError, match=r"beyond 6[34] tokens, and a prompt of 48 may grow to"
            ) as raised:
                prefixes.open(tokens(48), max_length=most)
            assert "max_length=N" in raised.value.hint
        with pytest.raises(InvalidValueError, match="max_length is 47"):
            prefixes.open(tokens(48), max_length=47)
        assert engine.stats()["tiers"]["gpu"]["private_slots"] == 0


def test_below_the_limit_a_prefix_is_found_and_right(kind: str, open_engine: Callable[[str], CacheEngine]) -> None:
    most = LIMIT - 1
    with open_engine(kind) as engine:
        assert [answer(engine, kind, 48, most), answer(engine, kind, 48, most)] == [0, 40]
    with open_engine(kind) as engine:
        assert answer(engine, kind, 48, most) == 40


def test_the_call_that_would_cross_the_limit_is_refused_before_it_computes(
    kind: str, open_engine: Callable[[str], CacheEngine]
) -> None:
    with open_engine(kind) as engine:
        model = build(kind)
        with PrefixCache(engine, model).open(tokens(48), max_length=50) as cache:
            with pytest.raises(UnsupportedRequestError, match=r"up to token 51, .* 0 to 50") as raised:
                model.generate(tokens(48), past_key_values=cache, max_new_tokens=9, min_new_tokens=9)
            assert "max_length" in raised.value.hint


def test_the_two_sides_of_longrope_never_meet(open_engine: Callable[[str], CacheEngine]) -> None:
    with open_engine("longrope") as engine:
        assert answer(engine, "longrope", 48, LIMIT) == 0
        assert answer(engine, "longrope", 120, None) == 0, "the keys of 48 tokens are rotated in another way"
        assert answer(engine, "longrope", 120, None) == 112
        assert answer(engine, "longrope", LIMIT - NEW, LIMIT) == 48


def test_frequencies_that_calls_write_are_no_change_and_their_types_are(
    open_engine: Callable[[str], CacheEngine], kind: str
) -> None:
    with open_engine(kind) as engine:
        model = build(kind)
        prefixes = PrefixCache(engine, model)
        before, rope = prefixes.salt(), model.model.rotary_emb
        rope.inv_freq.mul_(2)
        assert prefixes.salt() == before
        rope.to(torch.bfloat16)
        assert prefixes.salt() != before


def test_the_limit_is_that_of_the_configuration_now(open_engine: Callable[[str], CacheEngine]) -> None:
    with open_engine("longrope") as engine:
        model = build("longrope")
        prefixes = PrefixCache(engine, model)
        prefixes.open(tokens(48), max_length=LIMIT).close()
        rope = dict(model.config.rope_parameters, original_max_position_embeddings=LIMIT - 8)
        model.config = copy.deepcopy(model.config)
        model.config.rope_parameters = rope
        with pytest.raises(RopeByLengthError, match="beyond 56 tokens"):
            prefixes.open(tokens(48), max_length=LIMIT)


def test_a_long_prompt_in_parts_would_begin_on_the_short_side(open_engine: Callable[[str], CacheEngine]) -> None:
    with open_engine("longrope") as engine, torch.no_grad():
        model = build("longrope")
        with PrefixCache(engine, model).open(tokens(120)) as cache:
            with pytest.raises(UnsupportedRequestError, match=r"up to token 60, .* 65 to inf"):
                model(tokens(120)[:, :60], past_key_values=cache)
            with pytest.raises(SequenceStateError):
                cache.commit(tokens(120))


@pytest.mark.parametrize("kind", ["dynamic", "phi3"])
def test_where_the_long_side_cannot_be_kept_it_is_refused(kind: str, open_engine: Callable[[str], CacheEngine]) -> None:
    """What dynamic rope does depends on earlier requests; Phi-3's `generate` takes another cache than the given one."""
    with open_engine(kind) as engine, pytest.raises(RopeByLengthError, match="a prompt of 120"):
        PrefixCache(engine, build(kind)).open(tokens(120), max_length=200)


def test_dynamic_rope_remembers_and_below_the_limit_it_does_not(open_engine: Callable[[str], CacheEngine]) -> None:
    with open_engine("dynamic") as engine:
        assert answer(engine, "dynamic", 48, LIMIT - 1) == 0
        model = build("dynamic")
        generate(model, tokens(200), None)
        with PrefixCache(engine, model).open(tokens(48), max_length=LIMIT - 1) as cache:
            assert cache.cached_tokens == 40
            sequences, _ = generate(model, tokens(48), cache)
        assert torch.equal(sequences, generate(build("dynamic"), tokens(48), None)[0])


# -- which models ------------------------------------------------------------------------------------------------------


def config(rope: object) -> PreTrainedConfig:
    found = LlamaConfig(**SMALL)
    found.rope_parameters = rope  # type: ignore[assignment]
    return found


@pytest.mark.parametrize("name", [*ROPE_INIT_FUNCTIONS, "default", "mrope"])
def test_each_kind_of_rope_that_transformers_has_is_known(name: str) -> None:
    limit = rope_limit(config({**LONG, "rope_type": name}))
    assert (limit is None) == (name in STEADY)
    assert limit in (None, RopeLimit("longrope", LIMIT, long=True), RopeLimit("dynamic", 511, long=False))


@pytest.mark.parametrize(
    "rope", [None, {}, {"rope_theta": 1e4}, {"type": "yarn"}, {"full_attention": {"type": "linear"}}]
)
def test_ropes_that_go_by_the_position_alone(rope: Any) -> None:
    assert rope_limit(config(rope)) is None


def test_a_rope_for_each_kind_of_layer() -> None:
    assert rope_limit(config({"full": LONG, "sliding": {"rope_type": "default"}})) == RopeLimit("longrope", LIMIT, True)
    with pytest.raises(RopeByLengthError, match="unequal lengths"):
        rope_limit(config({"full": LONG, "other": {"rope_type": "dynamic"}}))


def test_a_rope_that_is_not_known_is_refused_when_the_cache_is_made(open_engine: Callable[[str], CacheEngine]) -> None:
    with open_engine("longrope") as engine:
        model = build("longrope")
        model.config.rope_parameters = {"rope_type": "spiral"}
        with pytest.raises(RopeByLengthError, match="nothing is known of rope_type 'spiral'"):
            PrefixCache(engine, model)


def test_max_length_holds_for_every_model(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SMALL), dtype=torch.float32).eval()
    refused = pytest.raises(UnsupportedRequestError, match="up to token 57")
    with CacheEngine.from_config(options(model, tmp_path)) as engine:
        cache = PrefixCache(engine, model).open(tokens(48), max_length=48 + PAGE)
        with cache, refused:
            model.generate(tokens(48), past_key_values=cache, max_new_tokens=20, min_new_tokens=20)
