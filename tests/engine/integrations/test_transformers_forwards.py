"""What the token ids do not tell is never published: masks, positions, embeddings, images, modules nobody looks at."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    BatchEncoding,
    DynamicCache,
    LlamaConfig,
    LlavaConfig,
    MptConfig,
    OpenAIGPTConfig,
    PreTrainedConfig,
    PreTrainedModel,
    ReformerConfig,
    SiglipVisionConfig,
)

from gdscache import CacheEngine
from gdscache.errors import GeometryError, SequenceStateError, TokensError, UnsupportedRequestError
from gdscache.integrations.transformers import PrefixCache, model_section
from gdscache.integrations.transformers_layers import parts_of, planes_of

from tests.support.tiny_transformers import PAGE, PROMPT, SMALL, build, cached, generate, options, serve, tokens  # isort: skip

PADS = 11


def padded() -> tuple[torch.Tensor, torch.Tensor]:
    """Two prompts of unequal length, padded on the left, and their mask."""
    ids = torch.cat([tokens(), tokens(seed=1)])
    ids[1, :PADS] = 0
    mask = torch.ones_like(ids)
    mask[1, :PADS] = 0
    return ids, mask


def nothing_is_cached(engine: CacheEngine) -> None:
    engine.drain(20)
    assert [tier["pages"] for tier in engine.stats()["tiers"].values()] == [0, 0, 0]


# -- masks -------------------------------------------------------------------------------------------------------------


def test_a_padded_batch_that_was_opened_without_its_mask_publishes_nothing(
    model: PreTrainedModel, engine: CacheEngine
) -> None:
    """Nor does a later request for the same ids, with a mask of ones, get other tokens than without a cache."""
    ids, mask = padded()
    with PrefixCache(engine, model).open(ids) as cache:
        with pytest.raises(UnsupportedRequestError, match="mask that hides tokens"):
            model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=3, do_sample=False)
        with pytest.raises(SequenceStateError):
            cache.commit(ids)
    nothing_is_cached(engine)
    whole = ids[1:]
    expected, _ = generate(model, whole, None)
    for _ in range(2):
        assert torch.equal(serve(engine, model, whole)["tokens"], expected)


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_a_cache_is_watched_by_its_name_before_transformers_5_24_and_since(
    model: PreTrainedModel, engine: CacheEngine, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """`generate` of 5.24 calls the model with `cache`."""
    ids, forward = tokens(), model.forward

    def since(input_ids: torch.Tensor, cache: DynamicCache | None = None, **others: Any) -> Any:
        return forward(input_ids=input_ids, past_key_values=cache, **others)

    if name == "cache":
        monkeypatch.setattr(model, "forward", since)
    assert planes_of(model, parts_of(model.config))
    mask = torch.ones_like(ids)
    mask[0, 3] = 0
    prefixes = PrefixCache(engine, model)
    for expected in (0, PROMPT // PAGE * PAGE):
        with prefixes.open(ids) as cache:
            assert cache.cached_tokens == expected
            with pytest.raises(UnsupportedRequestError, match="hides tokens"):
                model(input_ids=ids[:, expected:], attention_mask=mask, **{name: cache})
            model(input_ids=ids[:, expected:], **{name: cache})
            cache.commit(ids)
        engine.drain(20)


def test_the_mask_that_generate_makes_of_pads_counts(model: PreTrainedModel, engine: CacheEngine) -> None:
    """Without a mask `generate` hides the tokens that are the pad token."""
    ids, _ = padded()
    with PrefixCache(engine, model).open(ids) as cache, pytest.raises(UnsupportedRequestError, match="hides tokens"):
        model.generate(ids, past_key_values=cache, max_new_tokens=2, pad_token_id=0, eos_token_id=60)
    nothing_is_cached(engine)


@pytest.mark.parametrize("hidden", [0, PAGE, PROMPT - 1])
def test_a_mask_that_hides_any_one_token_is_refused(model: PreTrainedModel, engine: CacheEngine, hidden: int) -> None:
    ids, mask = tokens(), torch.ones((1, PROMPT), dtype=torch.long)
    mask[0, hidden] = 0
    for kind in (torch.long, torch.bool, torch.float32):
        with PrefixCache(engine, model).open(ids) as cache:
            with pytest.raises(UnsupportedRequestError, match="hides tokens"):
                model(ids, attention_mask=mask.to(kind), past_key_values=cache)
            assert cache.get_seq_length() == 0
    nothing_is_cached(engine)


@pytest.mark.parametrize("first", [1, PAGE, PROMPT - 1])
def test_a_mask_in_a_later_call_is_refused_and_what_came_before_is_kept(
    model: PreTrainedModel, engine: CacheEngine, first: int
) -> None:
    ids, mask = tokens(), torch.ones((1, PROMPT), dtype=torch.long)
    mask[0, 0] = 0
    with PrefixCache(engine, model).open(ids[:, :first]) as cache:
        model(ids[:, :first], past_key_values=cache)
        with pytest.raises(UnsupportedRequestError, match="hides tokens"):
            model(ids[:, first:], attention_mask=mask, past_key_values=cache)
        cache.commit(ids[:, :first])
    engine.drain(20)
    assert cached(engine, model, ids[0]) == first // PAGE * PAGE


def test_generate_without_a_cache_of_its_own_is_refused_where_no_positions_tell_it(tmp_path: Path) -> None:
    """Each call has all tokens again. MPT's own configuration says so."""
    torch.manual_seed(7)
    config = MptConfig(d_model=32, n_heads=4, n_layers=2, vocab_size=61, max_seq_len=512)
    model, ids = AutoModelForCausalLM.from_config(config).eval(), tokens().clamp(min=2)
    with CacheEngine.from_config(options(model, tmp_path)) as engine:
        for found in (0, 40):
            with PrefixCache(engine, model).open(ids) as cache:
                assert cache.cached_tokens == found
                with pytest.raises(UnsupportedRequestError, match="use_cache=False"):
                    generate(model, ids, cache)
            with PrefixCache(engine, model).open(ids) as cache:
                cache.commit(model.generate(ids, past_key_values=cache, max_new_tokens=3, use_cache=True))
            engine.drain(20)


def test_a_mask_of_ones_is_taken(model: PreTrainedModel, engine: CacheEngine) -> None:
    ids = tokens()
    expected = model(ids).logits
    for found in (0, 40):
        with PrefixCache(engine, model).open(ids, attention_mask=torch.ones_like(ids)) as cache:
            assert cache.cached_tokens == found
            given = {"attention_mask": torch.ones_like(ids), "position_ids": torch.arange(found, PROMPT)[None]}
            logits = model(ids[:, found:], past_key_values=cache, **given).logits
            torch.testing.assert_close(logits, expected[:, found:], atol=1e-4, rtol=1e-4)
            cache.commit(ids)


# -- other things that the ids do not tell -----------------------------------------------------------------------------


def image_tokens(_: PreTrainedModel, ids: torch.Tensor) -> dict[str, Any]:
    return {"input_ids": ids, "pixel_values": torch.zeros(1, 3, 8, 8)}


CALLS: dict[str, tuple[Callable[[PreTrainedModel, torch.Tensor], dict[str, Any]], str]] = {
    "embeddings": (lambda m, ids: {"inputs_embeds": m.get_input_embeddings()(ids)}, "embeddings"),
    "both": (lambda m, i: {"input_ids": i, "inputs_embeds": m.get_input_embeddings()(i)}, "embeddings"),
    "positions": (lambda _, i: {"input_ids": i, "position_ids": torch.arange(1, PROMPT + 1)[None]}, "positions"),
    "cache positions": (lambda _, i: {"input_ids": i, "cache_position": torch.arange(1, PROMPT + 1)}, "positions"),
    "a mask of four dimensions": (
        lambda _, i: {"input_ids": i, "attention_mask": torch.zeros(1, 1, PROMPT, PROMPT)},
        "attention mask of shape",
    ),
    "masks by the kind of layer": (
        lambda _, i: {"input_ids": i, "attention_mask": {"full_attention": None}},
        "attention mask of type dict",
    ),
    "a mask of another length": (
        lambda _, i: {"input_ids": i, "attention_mask": torch.ones(1, PROMPT - 1)},
        "attention mask",
    ),
    "an image": (image_tokens, "pixel_values"),
    "images in a list": (lambda _, i: {"input_ids": i, "images": [torch.zeros(3, 8, 8)]}, "images"),
    "attention to later tokens": (lambda _, i: {"input_ids": i, "is_causal": False}, "is_causal of type bool"),
    "an adapter a row": (lambda _, i: {"input_ids": i, "adapter_names": ["a"]}, "adapter_names of type list"),
    "what nobody knows": (lambda _, i: {"input_ids": i, "new": 1}, "new of type int"),
    "types of tokens": (lambda _, i: {"input_ids": i, "token_type_ids": torch.ones_like(i)}, "token_type_ids"),
}


@pytest.mark.parametrize("kind", CALLS)
def test_what_the_ids_do_not_tell_is_refused_by_name(model: PreTrainedModel, engine: CacheEngine, kind: str) -> None:
    make, words = CALLS[kind]
    ids = tokens()
    with PrefixCache(engine, model).open(ids) as cache:
        with pytest.raises(UnsupportedRequestError, match=words) as caught:
            model(**make(model, ids), past_key_values=cache)
        assert "without this cache" in caught.value.hint
        with pytest.raises(SequenceStateError):
            cache.commit(ids)
    nothing_is_cached(engine)


def test_a_module_that_nobody_looks_at_computes_nothing_into_the_cache(
    model: PreTrainedModel, engine: CacheEngine
) -> None:
    ids, mask = padded()
    with PrefixCache(engine, model).open(ids) as cache:
        for inner in (model.model, build("llama")):
            with pytest.raises(UnsupportedRequestError, match="another module"):
                inner(ids, attention_mask=mask, past_key_values=cache)
    nothing_is_cached(engine)
    with PrefixCache(engine, model.model).open(ids[:1]) as cache:
        model(ids[:1], past_key_values=cache)  # which calls the inner one
        cache.commit(ids[:1])
    engine.drain(20)
    assert cached(engine, model.model, ids[0]) == 40


@pytest.mark.parametrize("kept", [0, 25])
def test_behind_a_reset_or_a_crop_another_module_computes_nothing_into_the_cache(
    model: PreTrainedModel, engine: CacheEngine, kept: int
) -> None:
    ids, other = tokens(), tokens(seed=3)
    with PrefixCache(engine, model).open(ids) as cache:
        model(ids, past_key_values=cache)
        cache.crop(kept - PROMPT) if kept else cache.reset()
        with pytest.raises(UnsupportedRequestError, match="another module"):
            model.model(other[:, kept:], past_key_values=cache)
        model(ids[:, kept:], past_key_values=cache)
        cache.commit(ids)
    engine.drain(20)
    assert cached(engine, model, ids[0]) == 40


def test_ids_other_than_those_computed_are_not_committed(model: PreTrainedModel, engine: CacheEngine) -> None:
    ids, other = tokens(), tokens(seed=3)
    with PrefixCache(engine, model).open(ids) as cache:
        model(other, past_key_values=cache)
        with pytest.raises(SequenceStateError, match="not the tokens that the model computed"):
            cache.commit(ids)
    nothing_is_cached(engine)
    with PrefixCache(engine, model).open(ids[:, :9]) as cache:  # the prompt is right, what follows is not
        model(ids[:, :9], past_key_values=cache)
        for n in range(9, PROMPT):
            model(ids[:, n : n + 1], past_key_values=cache)
        with pytest.raises(SequenceStateError, match="not the tokens that the model computed"):
            cache.commit(torch.cat([ids[:, :20], other[:, 20:]], 1))
        cache.commit(ids)
    engine.drain(20)
    assert cached(engine, model, ids[0]) == 40


def test_tokens_that_were_cropped_and_computed_again_count_as_they_are_now(
    model: PreTrainedModel, engine: CacheEngine
) -> None:
    ids, other = tokens(), tokens(seed=3)
    with PrefixCache(engine, model).open(ids[:, :9]) as cache:
        model(ids[:, :9], past_key_values=cache)
        model(other[:, 9:30], past_key_values=cache)
        cache.crop(12 - 30)
        model(ids[:, 12:], past_key_values=cache)
        made = torch.cat([ids[:, :9], other[:, 9:12], ids[:, 12:]], 1)
        with pytest.raises(SequenceStateError):
            cache.commit(ids)
        cache.commit(made)
    engine.drain(20)
    assert cached(engine, model, made[0]) == 40


def test_the_hook_goes_with_the_cache(model: PreTrainedModel, engine: CacheEngine) -> None:
    hooks = len(model._forward_pre_hooks)
    with PrefixCache(engine, model).open(tokens()) as first, PrefixCache(engine, model).open(tokens(seed=1)) as second:
        assert len(model._forward_pre_hooks) == hooks + 2
        model(tokens(), past_key_values=first)
        model(tokens(seed=1), past_key_values=second)
        model(tokens(), past_key_values=DynamicCache(), attention_mask=padded()[1][1:])  # somebody else's cache
        assert (first.get_seq_length(), second.get_seq_length()) == (PROMPT, PROMPT)
    assert len(model._forward_pre_hooks) == hooks
    gone = PrefixCache(engine, model).open(tokens())
    gone.close()
    left = weakref.ref(gone)
    del gone, first, second
    gc.collect()
    assert left() is None, "a hook keeps the cache"


def test_a_call_beside_a_thread_that_opens_or_closes_a_cache_is_left_alone(
    model: PreTrainedModel, engine: CacheEngine
) -> None:
    """torch takes a hook that is half there, or half gone, to be one without keyword arguments."""
    prefixes = PrefixCache(engine, model)
    with prefixes.open(tokens()), torch.no_grad():
        expected = model(tokens(seed=1)).logits
        ((number, _),) = model._forward_pre_hooks_with_kwargs.items()
        del model._forward_pre_hooks_with_kwargs[number]
        assert torch.equal(model(tokens(seed=1)).logits, expected)
    with prefixes.open(tokens()) as cache, torch.no_grad():
        ((number, _),) = model._forward_pre_hooks_with_kwargs.items()
        del model._forward_pre_hooks_with_kwargs[number]
        with pytest.raises(UnsupportedRequestError, match="the model was called for"):
            model(tokens(), past_key_values=cache)  # nor is a call with the cache itself let through unseen


def test_a_prefix_cache_needs_the_model(model: PreTrainedModel, engine: CacheEngine) -> None:
    for other in (None, model):  # the two in another order
        with pytest.raises(UnsupportedRequestError, match="the engine is of type"):
            PrefixCache(other, model)  # type: ignore[arg-type]
    for wrong in (None, "llama", LlamaConfig(**SMALL)):
        with pytest.raises(UnsupportedRequestError, match="of type"):
            PrefixCache(engine, wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [OpenAIGPTConfig, ReformerConfig])
def test_a_model_that_takes_no_cache_is_refused(engine: CacheEngine, kind: type[PreTrainedConfig]) -> None:
    config = kind(**SMALL, is_decoder=True, axial_pos_embds_dim=[16, 16], d_model=32, n_layer=1, n_head=4)
    with pytest.raises(GeometryError, match="takes no cache: neither"):
        PrefixCache(engine, AutoModelForCausalLM.from_config(config))


def test_what_is_no_token_ids_is_refused_by_its_type(model: PreTrainedModel, engine: CacheEngine) -> None:
    wrong = ["text", b"text", {"input_ids": tokens()}, BatchEncoding({"input_ids": tokens()}), None, 5, [1.5, 2.5]]
    prefixes = PrefixCache(engine, model)
    for ids in (*wrong, {1, 2}, torch.tensor(3), tokens().to("meta"), tokens()[None], tokens().to_sparse(), [None]):
        with pytest.raises(TokensError) as caught:
            prefixes.open(ids)
        assert caught.value.hint
    prefixes.open([[1, 2], [3, 4]], attention_mask=[[1, 1], [1, 1]]).close()
    for mask in ("text", object(), {}, [[1], [1, 2]], torch.ones(2, 2, device="meta"), [[1, 0]]):
        with pytest.raises(UnsupportedRequestError):
            prefixes.open([[1, 2], [3, 4]], attention_mask=mask)
    with prefixes.open(tokens()) as cache:
        model(tokens(), past_key_values=cache)
        for ids in wrong:
            with pytest.raises(TokensError):
                cache.commit(ids)


def test_arguments_that_say_nothing_are_taken(model: PreTrainedModel, engine: CacheEngine) -> None:
    more = {"output_hidden_states": True, "return_dict": True, "images": None, "parts": {"image": None}, "new": []}
    with PrefixCache(engine, model).open(tokens()) as cache:
        model(tokens(), past_key_values=cache, logits_to_keep=1, **more)
        cache.commit(tokens())
    assert cached(engine, model, tokens()[0]) == 40


# -- a model that sees images ------------------------------------------------------------------------------------------


def test_a_model_of_images_is_served_for_text_and_refused_by_name_with_an_image(tmp_path: Path) -> None:
    """Two images under the same ids are two prompts, and their pages would have one name."""
    torch.manual_seed(0)
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlavaConfig(
        vision_config=SiglipVisionConfig(**vision, image_size=8, patch_size=4),
        text_config=LlamaConfig(**SMALL, num_key_value_heads=2),
        image_token_id=60,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    )
    from transformers import LlavaForConditionalGeneration

    llava = LlavaForConditionalGeneration(config).eval()
    ids = tokens() % 60
    ids[0, 5:9] = 60  # as many as an image has patches
    with CacheEngine.from_config(options(llava, tmp_path)) as engine:
        for shade in (0.0, 1.0):
            image = torch.full((1, 3, 8, 8), shade)
            with (
                PrefixCache(engine, llava).open(ids) as cache,
                pytest.raises(UnsupportedRequestError, match="images or audio"),
            ):
                llava.generate(ids, pixel_values=image, past_key_values=cache, max_new_tokens=2)
            with (
                PrefixCache(engine, llava).open(ids) as cache,
                pytest.raises(UnsupportedRequestError, match="pixel_values"),
            ):
                llava(ids, pixel_values=image, past_key_values=cache)
            nothing_is_cached(engine)
        text = tokens(seed=2) % 60
        expected, _ = generate(llava, text, None)
        for found in (0, 40):
            got = serve(engine, llava, text)
            assert (got["found"], torch.equal(got["tokens"], expected)) == (found, True)


@pytest.mark.parametrize("deltas", [None, [[-12]], [[-40]], [[0], [0]]], ids=["none", "-12", "-40", "two rows"])
@pytest.mark.parametrize("by_hand", [True, False], ids=["by hand", "generate"])
def test_text_is_served_where_a_request_with_images_has_shifted_the_models_positions(
    tmp_path: Path, deltas: list[list[int]] | None, by_hand: bool
) -> None:
    """Qwen2.5-VL adds the `rope_deltas` of the request before to a call's positions, where a cache has tokens."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    torch.manual_seed(7)
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    text = {**SMALL, "num_key_value_heads": 2, "rope_parameters": rope}
    qwen = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision)).eval()
    ids = torch.cat([tokens(), tokens(30, seed=3)], 1)
    expected, _ = generate(qwen, ids, None)
    keys = qwen(ids, use_cache=True).past_key_values.layers[-1].keys
    with CacheEngine.from_config(options(qwen, tmp_path)) as engine:
        assert serve(engine, qwen, ids[:, :PROMPT])["found"] == 0
        with PrefixCache(engine, qwen).open(ids) as cache:
            assert cache.cached_tokens == 40
            qwen.model.rope_deltas = None if deltas is None else torch.tensor(deltas)
            if by_hand:
                qwen(ids[:, 40:], past_key_values=cache)
            else:
                assert torch.equal(generate(qwen, ids, cache)[0], expected)
            torch.testing.assert_close(cache.layers[-1].keys[:, :, : ids.shape[1]], keys, atol=1e-4, rtol=1e-4)
            cache.commit(ids)
        with PrefixCache(engine, qwen).open(ids) as cache:
            qwen.model.rope_deltas = torch.tensor([[-12]])
            with pytest.raises(UnsupportedRequestError, match="positions other than"):
                qwen(ids[:, 72:], past_key_values=cache, position_ids=torch.arange(71, 74)[None])


# -- model_section -----------------------------------------------------------------------------------------------------


def refused(config: Any) -> str:
    with pytest.raises(GeometryError) as caught:
        model_section(config, dtype="float32", name="m")
    assert caught.value.hint
    return str(caught.value)


def test_what_is_no_configuration_of_a_language_model_is_refused() -> None:
    for wrong in (None, "llama", {}, object(), PreTrainedConfig()):
        refused(wrong)


@pytest.mark.suite
@pytest.mark.filterwarnings("ignore")
def test_every_configuration_of_transformers_is_described_or_refused_by_name() -> None:
    seen = 0
    for kind in CONFIG_MAPPING:
        try:
            config = CONFIG_MAPPING[kind]()
        except Exception:  # noqa: BLE001  # it has no defaults, or no package that it needs
            continue
        seen += 1
        with contextlib.suppress(GeometryError):
            assert model_section(config, dtype="float32", name="m")["layers"] >= 0
    assert seen > 100
