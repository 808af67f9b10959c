"""What a program does around a cache: torch's modes, assisted generation, copies, and starting anew."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, BloomConfig, PreTrainedModel

from gdscache import CacheEngine
from gdscache.errors import GdsCacheError, SequenceStateError, UnsupportedRequestError
from gdscache.integrations.transformers import PrefixCache
from tests.support.tiny_transformers import NEW, build, cached, generate, options, serve, tokens

Mode = Callable[[], AbstractContextManager[Any]]


# -- modes -------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def default_device() -> Iterator[None]:
    """A device that has no bytes: whatever lands there cannot be read."""
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextlib.contextmanager
def default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


MODES: dict[str, Mode] = {
    "none": contextlib.nullcontext, "inference": torch.inference_mode, "no_grad": torch.no_grad,
    "default device": default_device, "default dtype": default_dtype,
}  # fmt: skip


@pytest.mark.parametrize("opening", MODES)
@pytest.mark.parametrize("using", ["none", "inference"])
def test_an_engine_is_the_same_whatever_mode_it_is_opened_and_used_in(
    device: str, tmp_path: Path, opening: str, using: str
) -> None:
    model = build("llama", device)
    expected, _ = generate(model, tokens(), None)
    with MODES[opening]():
        engine = CacheEngine.from_config(options(model, tmp_path))
    with engine:
        assert not any(plane.is_inference() for layer in range(3) for plane in engine.gpu.planes(layer))
        for found in (0, 40):
            with MODES[using]():
                got = serve(engine, model, tokens())
            assert got["found"] == found
            assert torch.equal(got["tokens"], expected)


@pytest.mark.parametrize("mode", MODES)
def test_what_a_sequence_hands_out_is_on_the_host_in_every_mode(engine: CacheEngine, mode: str) -> None:
    with MODES[mode](), engine.sequence(list(range(40))) as sequence:
        slots = sequence.slots
        assert (slots.device.type, slots.dtype) == ("cpu", torch.int64)
        assert len(set(slots.tolist())) == 5


def test_a_cache_that_is_opened_in_inference_mode_is_used_outside(model: PreTrainedModel, engine: CacheEngine) -> None:
    serve(engine, model, tokens())
    with torch.inference_mode():
        cache = PrefixCache(engine, model).open(tokens())
    with cache:
        assert cache.cached_tokens == 40
        out = model(tokens()[:, 40:], past_key_values=cache)  # with gradients
        out.logits.sum().backward()
        cache.commit(tokens())


@pytest.mark.parametrize("mode", ["default device", "none"])
def test_a_mask_of_lists_is_read_on_the_host(model: PreTrainedModel, engine: CacheEngine, mode: str) -> None:
    ids = tokens().tolist()
    with MODES[mode](), pytest.raises(UnsupportedRequestError, match="hides tokens"):
        PrefixCache(engine, model).open(ids, attention_mask=[[0] + [1] * 44])


# -- assisted generation -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["prompt lookup", "assistant"])
def test_assisted_generation_ends_alike_cold_and_warm(model: PreTrainedModel, engine: CacheEngine, how: str) -> None:
    """It feeds the whole prompt again, so the prefix is let go, and the answer is right."""
    more: dict[str, Any] = {"prompt_lookup_num_tokens": 3} if how == "prompt lookup" else {}
    if how == "assistant":
        more["assistant_model"] = build("llama", seed=8)
    expected, _ = generate(model, tokens(), None)
    for _ in range(3):
        with PrefixCache(engine, model).open(tokens()) as cache:
            out = model.generate(
                tokens(), past_key_values=cache, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, **more
            )
            assert torch.equal(out, expected)
            assert cache.cached_tokens == 0, "nothing of it was used"
            cache.commit(out)
        engine.drain(20)
    assert serve(engine, model, tokens())["found"] == 40, "and what it computed is cached"


def test_a_model_without_positions_gets_the_whole_prompt_again(tmp_path: Path) -> None:
    """Bloom's positions are those of the tensors that it is given, and `generate` gives no mask of ones."""
    torch.manual_seed(3)
    shape = {"vocab_size": 61, "hidden_size": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.2}
    bloom = AutoModelForCausalLM.from_config(
        BloomConfig(**shape, bos_token_id=None, eos_token_id=None, pad_token_id=None), dtype=torch.float32
    ).eval()
    expected, _ = generate(bloom, tokens(), None)
    with CacheEngine.from_config(options(bloom, tmp_path)) as engine:
        for found in (0, 40):
            assert serve(engine, bloom, tokens())["found"] == found
        with PrefixCache(engine, bloom).open(tokens()) as cache:
            out = bloom.generate(
                tokens(), past_key_values=cache, max_new_tokens=NEW, do_sample=False, prompt_lookup_num_tokens=3
            )
            assert (cache.cached_tokens, torch.equal(out, expected)) == (0, True)
            cache.commit(out)


def test_tokens_that_begin_the_prompt_or_continue_it_are_refused(model: PreTrainedModel, engine: CacheEngine) -> None:
    same = torch.full((1, 45), 7)
    serve(engine, model, same)
    more = torch.full((1, 50), 7)
    expected = model(torch.cat([same[:, :40], more], 1)).logits[:, 40:]
    with PrefixCache(engine, model).open(same) as cache:
        assert cache.cached_tokens == 40
        with pytest.raises(UnsupportedRequestError, match="it repeats itself") as caught:
            model(more, past_key_values=cache)
        assert "position_ids" in caught.value.hint
        with torch.no_grad():
            mask = torch.ones(1, 90)
            got = model(more, past_key_values=cache, attention_mask=mask).logits
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def test_other_tokens_than_the_prompts_behind_the_prefix_are_refused(
    model: PreTrainedModel, engine: CacheEngine
) -> None:
    """As PEFT calls a model with virtual tokens: with the last token alone, as if the cache had the others."""
    expected = serve(engine, model, tokens())["tokens"]
    with PrefixCache(engine, model).open(tokens()) as cache:
        with pytest.raises(UnsupportedRequestError, match="other tokens than the prompt's behind the first 40"):
            model(tokens()[:, -1:], past_key_values=cache)
        out, _ = generate(model, tokens(), cache)
    assert torch.equal(out, expected)


def test_positions_that_begin_at_0_before_other_tokens_are_refused(model: PreTrainedModel, engine: CacheEngine) -> None:
    serve(engine, model, tokens())
    with PrefixCache(engine, model).open(tokens()) as cache, torch.no_grad():
        rest = tokens()[:, 40:]
        with pytest.raises(UnsupportedRequestError, match="positions other than 40"):
            model(rest, past_key_values=cache, position_ids=torch.arange(rest.shape[1])[None])


@pytest.mark.parametrize("beyond", [0, 1, 5])
def test_a_cache_of_the_whole_prompt_or_more_is_refused(
    model: PreTrainedModel, engine: CacheEngine, beyond: int
) -> None:
    """`generate` would compute it again (findings/transformers_computes_cached_prompts_again.sh)."""
    held = torch.cat([tokens(), tokens(seed=1)[:, :beyond]], 1)
    with PrefixCache(engine, model).open(tokens()) as cache, torch.no_grad():
        model(held, past_key_values=cache)
        with pytest.raises(UnsupportedRequestError, match=f"positions other than {held.shape[1]}"):
            model.generate(tokens(), attention_mask=torch.ones_like(tokens()), past_key_values=cache, max_new_tokens=2)
        assert cache.get_seq_length() == held.shape[1], "and nothing was computed"


# -- copies, and starting anew -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy, pickle.dumps], ids=["copy", "deepcopy", "pickle"])
def test_a_cache_cannot_be_copied(model: PreTrainedModel, engine: CacheEngine, make: Callable[[Any], Any]) -> None:
    refused = pytest.raises(UnsupportedRequestError, match="neither copied nor pickled")
    with PrefixCache(engine, model).open(tokens()) as cache, refused:
        make(cache)


def reset(cache: Any) -> None:
    cache.reset()


def crop(tokens_left: int) -> Callable[[Any], None]:
    return lambda cache: cache.crop(tokens_left - cache.get_seq_length())


@pytest.mark.parametrize("cut", [reset, crop(40), crop(24), crop(13), crop(1)], ids=["reset", "40", "24", "13", "1"])
@pytest.mark.parametrize("warm", [True, False], ids=["warm", "cold"])
def test_the_same_prompt_again_behind_a_cut_is_committed(
    model: PreTrainedModel, engine: CacheEngine, cut: Callable[[Any], None], warm: bool
) -> None:
    if warm:
        serve(engine, model, tokens())
    expected, _ = generate(model, tokens(), None)
    with PrefixCache(engine, model).open(tokens()) as cache:
        generate(model, tokens(), cache)
        cut(cache)
        sequences, _ = generate(model, tokens(), cache)
        assert torch.equal(sequences, expected)
        cache.commit(sequences)
    engine.drain(20)
    got = serve(engine, model, tokens())
    assert got["found"] == 40
    assert torch.equal(got["tokens"], expected)


def test_another_prompt_behind_a_cut_is_not(model: PreTrainedModel, engine: CacheEngine) -> None:
    serve(engine, model, tokens())
    with PrefixCache(engine, model).open(tokens()) as cache:
        cache.reset()
        generate(model, tokens(seed=5), cache)
        for ids in (tokens(), tokens(seed=5)):
            with pytest.raises(SequenceStateError):
                cache.commit(ids)
    assert issubclass(SequenceStateError, GdsCacheError)
    assert cached(engine, model, tokens(seed=5)[0]) == 0
