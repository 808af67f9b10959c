"""Models of transformers with sliding windows on a HybridEngine: the same answers as without a cache, in every place
where a prefix may end."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    DynamicCache,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    T5GemmaConfig,
)

from gdscache import CacheEngine, HybridEngine
from gdscache.config import ModelConfig
from gdscache.errors import GeometryError, InvalidValueError, PoolFullError, SequenceStateError, UnsupportedRequestError
from gdscache.integrations.transformers import PrefixCache, model_section
from tests.support.pairs import pairs
from tests.support.tiny_transformers import (
    NEW,
    PAGE,
    PROMPT,
    SLIDING,
    SMALL,
    WINDOW,
    WINDOWED,
    build,
    cached,
    generate,
    hybrid_options,
    tokens,
)

LONG = WINDOW + 10  # new tokens: the window leaves the prompt
WHOLE = PROMPT // PAGE * PAGE
MAIN = ["gemma3", "gpt_oss", "mistral"]
TWO = [*MAIN[:2], pytest.param(MAIN[2], marks=pytest.mark.suite)]


class Answer(NamedTuple):
    found: int
    sources: dict[str, int]
    tokens: torch.Tensor


@pytest.fixture(params=list(WINDOWED))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def model(kind: str, device: str) -> PreTrainedModel:
    return build(kind, device)


@pytest.fixture(scope="module")
def gemma() -> PreTrainedModel:
    return build("gemma3")


@contextlib.contextmanager
def opened(model: PreTrainedModel, path: Path, **more: Any) -> Iterator[HybridEngine]:
    """An engine that has all of its blocks, and nothing else than sound pages, at the end."""
    with HybridEngine.from_config({**hybrid_options(model, path), **more}) as engine:
        yield engine
        engine.drain(20)
        for part, free in zip(engine.engines, engine._free, strict=True):
            assert sorted(free) == list(range(part.blocks))
        assert engine.check().problems == ()


def same(got: tuple[torch.Tensor, torch.Tensor], model: PreTrainedModel, ids: torch.Tensor, new: int) -> None:
    """The greedy tokens are those without a cache, and the logits differ by rounding alone: up to a near tie, which
    rounding may decide in another way."""
    sequences, logits = generate(model, ids, None, new)
    tolerance = 1e-4 * float(logits.abs().max())
    best = logits.topk(2, -1).values
    ties = ((best[..., 0] - best[..., 1]) <= 2 * tolerance).nonzero()[:, 1]
    agreed = int(ties.min()) if len(ties) else new
    assert torch.equal(got[0][:, : ids.shape[1] + agreed], sequences[:, : ids.shape[1] + agreed])
    torch.testing.assert_close(got[1][:, : agreed + 1], logits[:, : agreed + 1], atol=tolerance, rtol=0)


def answer(engine: HybridEngine, model: PreTrainedModel, ids: torch.Tensor, new: int = NEW, salt: str = "") -> Answer:
    """Answer a prompt through the cache, as without one, and store it."""
    with PrefixCache(engine, model).open(ids, salt=salt) as cache:
        found, sources = cache.cached_tokens, cache.sources
        assert [layer.get_seq_length() for layer in cache.layers] == [found] * len(cache.layers)
        got = generate(model, ids, cache, new)
        for handle in cache.commit(got[0]):
            assert not any(handle.result(20).dropped.values())
    engine.drain(20)
    same(got, model, ids, new)
    return Answer(found, sources, got[0])


def parting(n: int, seed: int, length: int = PROMPT) -> torch.Tensor:
    """The usual prompt up to token `n`, and others from there on."""
    other = tokens(length, seed)
    other[:, n] = (tokens(length)[:, n] + seed) % 61
    return torch.cat([tokens(length)[:, :n], other[:, n:]], 1)


# -- the model section -------------------------------------------------------------------------------------------------


def test_the_section_has_a_group_for_each_window(kind: str) -> None:
    model = build(kind)
    section = model_section(model.config, dtype=model.dtype, name="m", page_tokens=PAGE)
    layout = ModelConfig(**section).layout()
    cache = DynamicCache(config=model.config)
    model(tokens(3), past_key_values=cache)
    windows = {layer: group.get("window") for group in section["groups"] for layer in group["layers"]}
    for number, (planes, layer) in enumerate(zip(layout.layers, cache.layers, strict=True)):
        assert windows[number] == (WINDOW if layer.is_sliding else None)
        for plane, states in zip(planes, (layer.keys, layer.values), strict=True):
            assert plane.shape == (states.shape[1], states.shape[3])
    assert len(section["groups"]) == (1 if kind == "mistral" else 2)


REFUSED: dict[str, tuple[PreTrainedConfig, str]] = {
    "no window at all": (MistralConfig(**{**SLIDING, "sliding_window": 1}), "a window of 1"),
    "later tokens": (Gemma3TextConfig(**SLIDING, use_bidirectional_attention=True), "depend on later tokens"),
    "an encoder": (T5GemmaConfig(), "encoder-decoder"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_keeps_something_else_is_refused(what: str) -> None:
    config, words = REFUSED[what]
    with pytest.raises(GeometryError, match=words):
        model_section(config, dtype="float32", name="m")


def test_a_model_without_windows_has_no_groups() -> None:
    for config in (LlamaConfig(**SMALL), MistralConfig(**{**SLIDING, "sliding_window": None})):
        assert "groups" not in model_section(config, dtype="float32", name="m")


# -- the same answer ---------------------------------------------------------------------------------------------------


def test_the_answer_is_the_same_cold_warm_and_after_a_restart(model: PreTrainedModel, tmp_path: Path) -> None:
    ids = tokens()
    with opened(model, tmp_path) as engine:
        assert answer(engine, model, ids, LONG)[:2] == (0, {})
        assert answer(engine, model, ids, LONG)[:2] == (WHOLE, {"cpu": WHOLE})
        assert answer(engine, model, ids, LONG, "tenant").found == 0
    with opened(model, tmp_path, cpu=None) as engine:
        assert answer(engine, model, ids, LONG)[:2] == (WHOLE, {"ssd": WHOLE})


@pytest.mark.parametrize("kind", TWO)
def test_prompts_of_any_length_are_found_up_to_their_last_token(model: PreTrainedModel, tmp_path: Path) -> None:
    for length in (1, PAGE, PAGE + 1, WINDOW - 1, WINDOW, 5 * PAGE):
        with opened(model, tmp_path / str(length)) as engine:
            ids = tokens(length)
            assert answer(engine, model, ids).found == 0
            assert answer(engine, model, ids).found == (length - 1) // PAGE * PAGE
            longer = torch.cat([ids, tokens(5, seed=3)], 1)  # without the answer, as where thoughts are left out
            assert answer(engine, model, longer).found == length // PAGE * PAGE


@pytest.mark.parametrize("kind", TWO)
def test_where_prompts_part_the_third_one_begins(model: PreTrainedModel, tmp_path: Path, kind: str) -> None:
    """The second one finds that the full layers have more than the windows, and keeps a window there."""
    for at in (3, 2 * PAGE + 3, 3 * PAGE, WHOLE - 1, WHOLE, WHOLE + 2):
        with opened(model, tmp_path / str(at)) as engine:
            answer(engine, model, tokens())
            assert answer(engine, model, parting(at, 1)).found == (WHOLE if at >= WHOLE else 0)
            no_junction = (
                kind == "mistral" and at < WHOLE
            )  # where no layer has all tokens, nothing says where they part
            assert answer(engine, model, parting(at, 2)).found == (0 if no_junction else at // PAGE * PAGE)


@pytest.mark.parametrize("kind", TWO)
def test_windows_are_kept_at_intervals(model: PreTrainedModel, tmp_path: Path) -> None:
    for every, found in ((0, 0), (4 * PAGE, 4 * PAGE)):
        with opened(model, tmp_path / str(every), store={"window_every": every}) as engine:
            answer(engine, model, tokens())
            assert answer(engine, model, parting(4 * PAGE + 5, 1)).found == found


@pytest.mark.parametrize(("kind", "length"), pairs(MAIN[:2], [5, PROMPT]))
def test_conversations_grow_side_by_side(model: PreTrainedModel, tmp_path: Path, length: int) -> None:
    said = {n: torch.empty((1, 0), dtype=torch.long) for n in range(2)}
    for turn in range(3):
        with opened(model, tmp_path) as engine:
            for n in said:
                before = said[n].shape[1]
                prompt = torch.cat([said[n], tokens(length + n, seed=10 * turn + n)], 1)
                found, _, said[n] = answer(engine, model, prompt, LONG)
                assert found == max(0, before - 1) // PAGE * PAGE, "the last answer too"


@pytest.mark.parametrize("kind", TWO)
def test_one_cache_serves_several_turns(model: PreTrainedModel, tmp_path: Path) -> None:
    said = tokens(WINDOW - 3)
    with opened(model, tmp_path) as engine:
        with PrefixCache(engine, model).open(said) as cache:
            for n in range(3):
                got = generate(model, said, cache)
                same(got, model, said, NEW)
                cache.commit(got[0])
                said = torch.cat([got[0], tokens(5, seed=n)], 1)
        assert answer(engine, model, said).found == (WINDOW - 3 + 3 * NEW + 2 * 5 - 1) // PAGE * PAGE


@pytest.mark.parametrize(("kind", "chunk"), pairs(MAIN, [1, PAGE, WINDOW, PROMPT]))
def test_a_prompt_in_chunks_leaves_the_same_windows(model: PreTrainedModel, tmp_path: Path, chunk: int) -> None:
    ids = tokens().to(model.device)
    expected = model(ids).logits
    with opened(model, tmp_path) as engine, torch.no_grad():
        for found in (0, WHOLE):
            with PrefixCache(engine, model).open(ids) as cache:
                assert cache.cached_tokens == found
                for first in range(found, PROMPT, chunk):
                    got = model(ids[:, first : first + chunk], past_key_values=cache).logits
                    torch.testing.assert_close(got, expected[:, first : first + chunk], atol=1e-4, rtol=1e-4)
                for n in range(LONG):  # the window leaves the prompt before it is committed
                    model(tokens(1, seed=n).to(model.device), past_key_values=cache)
                whole = torch.cat([ids.cpu(), *(tokens(1, seed=n) for n in range(LONG))], 1)
                cache.commit(whole)
            engine.drain(20)
        assert cached(engine, model, ids[0]) == WHOLE
        assert cached(engine, model, whole[0]) == (PROMPT + LONG) // PAGE * PAGE


@given(data=st.data())
def test_prompts_of_any_lengths_that_part_anywhere(
    gemma: PreTrainedModel, tmp_path_factory: Any, data: st.DataObject
) -> None:
    length = data.draw(st.integers(1, 70), label="length")
    with opened(gemma, tmp_path_factory.mktemp("pages")) as engine:
        said = [tokens(length)]
        for seed in range(1, 3):
            of = data.draw(st.sampled_from(said), label="continues")
            at = data.draw(st.integers(0, of.shape[1]), label="at")
            said.append(torch.cat([of[:, :at], tokens(data.draw(st.integers(1, 40), label="more"), seed)], 1))
        for prompt in data.draw(st.permutations(said * 2), label="order"):
            answer(engine, gemma, prompt, data.draw(st.sampled_from([1, NEW]), label="new"))


# -- rows --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", TWO)
def test_rows_of_a_batch_start_from_what_all_of_them_have(model: PreTrainedModel, tmp_path: Path) -> None:
    one, two, new = tokens(), parting(2 * PAGE + 3, 1), tokens(seed=6)
    with opened(model, tmp_path) as engine:
        answer(engine, model, one)
        answer(engine, model, two)
        batches = ([one, one], WHOLE), ([one, two], WHOLE), ([one, new], 0), ([new, two], WHOLE)
        for rows, found in batches:
            batch = torch.cat(rows)
            with PrefixCache(engine, model).open(batch) as cache:
                assert cache.cached_tokens == found
                sequences, _ = generate(model, batch, cache)
                assert torch.equal(sequences, torch.cat([generate(model, row, None)[0] for row in rows]))
                cache.commit(sequences)
            engine.drain(20)
        three = parting(2 * PAGE + 3, 2)
        answer(engine, model, three[:, : 3 * PAGE])
        with PrefixCache(engine, model).open(torch.cat([one, three])) as cache:
            assert cache.cached_tokens == 3 * PAGE, "the first row has more, and all rows these"
            sequences, _ = generate(model, torch.cat([one, three]), cache)
            assert torch.equal(sequences[1:], generate(model, three, None)[0])


# -- pages that are bad, pools that are full ---------------------------------------------------------------------------


@pytest.mark.parametrize("group", ["full", f"window-{WINDOW}"])
def test_a_bad_page_of_any_group_costs_the_hit_and_is_stored_again(
    gemma: PreTrainedModel, tmp_path: Path, group: str
) -> None:
    ids = tokens()
    with opened(gemma, tmp_path) as engine:
        groups = [g.name for g in engine.groups]
        with PrefixCache(engine, gemma).open(ids) as cache:
            sequences, _ = generate(gemma, ids, cache, 1)
            cache.commit(sequences)
            layer = next(g.layers[0] for g in engine.groups if g.name == group)
            held = cache.layers[layer]
            start = PROMPT - held.keys.shape[2]
            rows = held.keys[0, :, WHOLE - PAGE - start : WHOLE - start].transpose(0, 1).contiguous().cpu()
    slab = tmp_path / f"groups-{groups.index(group)}" / "slab-0.bin"
    data = bytearray(slab.read_bytes())
    data[data.index(rows.view(torch.uint8).numpy().tobytes()) + 3] ^= 0x10
    slab.write_bytes(data)
    with opened(gemma, tmp_path, cpu=None) as engine:
        assert answer(engine, gemma, ids).found == 0
        assert {name: stats["misses"].get("checksum", 0) for name, stats in engine.stats()["pools"].items()} == {
            name: int(name == group) for name in groups
        }
        assert answer(engine, gemma, ids).found == WHOLE
    with opened(gemma, tmp_path, cpu=None) as engine:
        assert answer(engine, gemma, ids).found == WHOLE


def test_a_full_pool_says_what_to_change_and_holds_nothing(gemma: PreTrainedModel, tmp_path: Path) -> None:
    long = tokens(20 * PAGE)
    with opened(gemma, tmp_path) as engine:
        answer(engine, gemma, long)
    with opened(gemma, tmp_path, gpu={"device": "cpu", "capacity": "64KiB"}) as engine:
        with pytest.raises(PoolFullError, match=r"gpu\.capacity"):
            PrefixCache(engine, gemma).open(long)
        other = tokens(20 * PAGE, seed=1)
        with PrefixCache(engine, gemma).open(other) as cache:
            sequences, _ = generate(gemma, other, cache)
            with pytest.raises(PoolFullError, match=r"gpu\.capacity"):
                cache.commit(sequences)
        assert cached(engine, gemma, other[0]) == 0
        assert answer(engine, gemma, other[:, :20]).found == 0
        assert answer(engine, gemma, other[:, :20]).found == 2 * PAGE


def test_threads_share_the_blocks(gemma: PreTrainedModel, tmp_path: Path) -> None:
    wrong: list[BaseException] = []
    prompts = [tokens(PROMPT, seed=seed) for seed in range(4)]
    expected = [generate(gemma, ids, None)[0] for ids in prompts]
    with opened(gemma, tmp_path, gpu={"device": "cpu", "capacity": "4MiB"}) as engine:  # room for all of them at once
        prefixes = [PrefixCache(engine, gemma) for _ in prompts]

        def converse(n: int) -> None:
            try:
                with torch.no_grad():
                    for _ in range(6):
                        with prefixes[n].open(prompts[n]) as cache:
                            past, made = cache.cached_tokens, prompts[n]
                            for _ in range(NEW):
                                logits = gemma(made[:, past:], past_key_values=cache).logits
                                past, made = made.shape[1], torch.cat([made, logits[:, -1:].argmax(-1)], 1)
                            assert torch.equal(made, expected[n])
                            cache.commit(made)
            except BaseException as error:  # noqa: BLE001  # it is looked at below
                wrong.append(error)

        threads = [threading.Thread(target=converse, args=(n,)) for n in range(len(prompts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert wrong == []


# -- what is refused, and what a program does around it ----------------------------------------------------------------


def test_what_the_ids_do_not_tell_is_refused(gemma: PreTrainedModel, tmp_path: Path) -> None:
    ids, mask = tokens(), torch.ones((1, PROMPT), dtype=torch.long)
    mask[0, 3] = 0
    with opened(gemma, tmp_path) as engine:
        prefixes = PrefixCache(engine, gemma)
        with pytest.raises(UnsupportedRequestError):
            prefixes.open(ids, attention_mask=mask)
        for more in ({"attention_mask": mask}, {"position_ids": torch.arange(1, PROMPT + 1)[None]}):
            with prefixes.open(ids) as cache:
                with pytest.raises(UnsupportedRequestError):
                    gemma(ids, past_key_values=cache, **more)
                with pytest.raises(SequenceStateError):
                    cache.commit(ids)
        with prefixes.open(ids) as cache, pytest.raises(UnsupportedRequestError, match="another module"):
            gemma.model(ids, past_key_values=cache)
        with prefixes.open(ids) as cache, pytest.raises(UnsupportedRequestError, match="rows"):
            gemma.generate(ids, past_key_values=cache, max_new_tokens=2, num_beams=2)
        with prefixes.open(ids) as cache:
            gemma(tokens(seed=3), past_key_values=cache)
            with pytest.raises(SequenceStateError, match="not those that the model computed"):
                cache.commit(ids)
        with pytest.raises(SequenceStateError):
            cache.commit(tokens(seed=3))
        assert cached(engine, gemma, ids[0]) == 0


def test_a_call_that_fails_between_two_layers_publishes_nothing(gemma: PreTrainedModel, tmp_path: Path) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no memory")

    with opened(gemma, tmp_path) as engine, PrefixCache(engine, gemma).open(tokens()) as cache:
        gemma(tokens(), past_key_values=cache)
        hook = gemma.model.layers[2].register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="no memory"):
            gemma(tokens(3), past_key_values=cache)
        hook.remove()
        with pytest.raises(SequenceStateError, match="unequal numbers"):
            cache.commit(tokens())
        assert cached(engine, gemma, tokens()[0]) == 0


def test_another_model_finds_nothing_and_the_same_one_does(tmp_path: Path) -> None:
    model = build("gemma3")
    with opened(model, tmp_path) as engine:
        answer(engine, model, tokens())
        weight = model.model.layers[1].self_attn.k_proj.weight
        with torch.no_grad():
            weight.mul_(2)
        assert answer(engine, model, tokens()).found == 0
        with torch.no_grad():
            weight.div_(2)
        assert answer(engine, model, tokens()).found == WHOLE


def test_an_engine_that_keeps_other_tokens_is_refused(gemma: PreTrainedModel, tmp_path: Path) -> None:
    config = hybrid_options(gemma, tmp_path)
    with pytest.raises(InvalidValueError, match="HybridEngine"):
        CacheEngine.from_config(config)
    with HybridEngine.from_config(config) as engine:
        for other in (build("mistral"), build("llama"), build("llama4")):
            with pytest.raises(GeometryError, match="other tokens"):
                PrefixCache(engine, other)
        with pytest.raises(GeometryError, match="no config"):
            PrefixCache(engine, torch.nn.Linear(2, 2))
        planes = engine.planes
    with HybridEngine.from_config(config, planes) as engine, pytest.raises(GeometryError, match="given its planes"):
        PrefixCache(engine, gemma)


def test_a_plain_engine_that_keeps_all_tokens_serves_windows_too(gemma: PreTrainedModel, tmp_path: Path) -> None:
    config = hybrid_options(gemma, tmp_path)
    del config["model"]["groups"]
    with CacheEngine.from_config(config) as engine:
        for found in (0, WHOLE):
            with PrefixCache(engine, gemma).open(tokens()) as cache:
                assert cache.cached_tokens == found
                got = generate(gemma, tokens(), cache, LONG)
                same(got, gemma, tokens(), LONG)
                cache.commit(got[0])


@pytest.mark.parametrize(("cut", "recording"), pairs([PROMPT + NEW - 2, PROMPT, WHOLE, 24, 13, 1, 0], [True, False]))
def test_behind_a_cut_the_same_prompt_is_committed_or_the_cut_is_refused(
    gemma: PreTrainedModel, tmp_path: Path, cut: int, recording: bool
) -> None:
    with opened(gemma, tmp_path) as engine:
        with PrefixCache(engine, gemma).open(tokens()) as cache:
            if recording:
                cache.activate_past_recording()
            generate(gemma, tokens(), cache)
            lengths = [layer.get_seq_length() for layer in cache.layers]
            if cut == 0:
                cache.reset()
            elif recording or cut >= PROMPT:  # the pages that are held reach farther back than the window
                cache.crop(cut - cache.get_seq_length())
            else:
                with pytest.raises(UnsupportedRequestError, match="was let go"):
                    cache.crop(cut - cache.get_seq_length())
                assert [layer.get_seq_length() for layer in cache.layers] == lengths, "all layers or none"
            past = cache.get_seq_length()
            if past < PROMPT:
                other = parting(past, 7)
                got = generate(gemma, other, cache) if past else generate(gemma, tokens(), cache)
                same(got, gemma, other if past else tokens(), NEW)
                if past:
                    with pytest.raises(SequenceStateError):
                        cache.commit(got[0])
                    return
                cache.commit(got[0])
            else:
                cache.commit(generate(gemma, tokens(), None)[0])
        engine.drain(20)
        assert answer(engine, gemma, tokens()).found == WHOLE


@pytest.mark.parametrize("how", ["prompt lookup", "assistant"])
def test_assisted_generation_ends_alike_cold_and_warm(gemma: PreTrainedModel, tmp_path: Path, how: str) -> None:
    more: dict[str, Any] = {"prompt_lookup_num_tokens": 3} if how == "prompt lookup" else {}
    if how == "assistant":
        more["assistant_model"] = build("gemma3", seed=8)
    expected, _ = generate(gemma, tokens(), None, LONG)
    with opened(gemma, tmp_path) as engine:
        for _ in range(3):
            with PrefixCache(engine, gemma).open(tokens()) as cache:
                out = gemma.generate(
                    tokens(), past_key_values=cache, max_new_tokens=LONG, min_new_tokens=LONG, do_sample=False, **more
                )
                assert torch.equal(out, expected)
                cache.commit(out)
            engine.drain(20)
        assert answer(engine, gemma, torch.cat([expected, tokens(3)], 1)).found == (PROMPT + LONG - 1) // PAGE * PAGE


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, contextlib.nullcontext])
def test_a_cache_may_be_opened_in_one_mode_and_used_in_another(
    gemma: PreTrainedModel, tmp_path: Path, mode: Any
) -> None:
    with opened(gemma, tmp_path) as engine:
        answer(engine, gemma, tokens())
        with mode():
            cache = PrefixCache(engine, gemma).open(tokens())
        with cache:
            out = gemma(tokens()[:, WHOLE:], past_key_values=cache)
            out.logits.sum().backward()
            cache.commit(tokens())
        gemma.zero_grad()
        assert not any(plane.requires_grad for layer in engine.planes for plane in layer)
