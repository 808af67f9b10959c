"""What vLLM's names of a prefix do not hold for the life of a directory: the built length, media, adapters."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gdscache.errors import InvalidValueError, MediaUnsupportedError, RopeByLengthError
from gdscache.integrations.vllm.planes import planes_of
from gdscache.integrations.vllm.setup import Options, facts_of, leaves_alone, model_of, refuse_media, refuse_setup
from tests.support.vllm_setup import setup

LONG = {"rope_type": "longrope", "original_max_position_embeddings": 1024, "short_factor": [], "long_factor": []}


def facts(rope: Any, **lengths: int) -> Any:
    """What the namespace has of ropes, for a server with these lengths."""
    changes = {f"model_config__{name}": value for name, value in lengths.items()}
    vllm, cache = setup(model_config__hf_text_config__rope_parameters=rope, **changes)
    tensors = {"0": torch.zeros(4, 2, 16, 8, dtype=torch.bfloat16)}
    salt = model_of(vllm, cache, planes_of(tensors, 4, 16, "LBNHC"), "0.33.0", {})["salt"]
    assert isinstance(salt, str)
    return json.loads(salt)["ropes_by_length"]


# -- the length that a model was built with ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "long"), [(512, False), (1024, False), (1025, True), (4096, True)], ids=lambda value: str(value)
)
def test_longrope_has_the_side_that_vllm_was_started_on(length: int, long: bool) -> None:
    assert facts(LONG, max_model_len=length, original_max_model_len=length) == [["longrope", long]]


def test_a_length_that_memory_shortened_is_not_the_one_that_was_built() -> None:
    """-1 asks for what fits; the modules are made before vLLM knows what that is."""
    assert facts(LONG, max_model_len=600, original_max_model_len=-1) == [["longrope", True]]  # 4,096 were built
    assert facts({"rope_type": "spiral"}, max_model_len=600, original_max_model_len=-1) == [["spiral", 4096]]


def test_an_unknown_rope_has_the_length_itself() -> None:
    """And a dynamic one that divides the length: PLaMo 3 and MiniMax M2 build ropes by `max_model_len`."""
    trained = {"rope_type": "dynamic", "factor": 2.0, "max_trained_positions": 256}
    assert facts(trained, max_model_len=512) == [["dynamic", 512]]
    assert facts({"rope_type": "spiral"}, max_model_len=2048) == [["spiral", 2048]]
    both = {"full_attention": {"rope_type": "spiral"}, "other": {"rope_type": "default"}}
    assert facts(both, max_model_len=512) == [["spiral", 512]]


@pytest.mark.parametrize("kind", ["default", "linear", "dynamic", "yarn", "llama3", "mrope"])
def test_other_ropes_are_the_same_for_servers_of_any_length(kind: str) -> None:
    assert facts({"rope_type": kind}, max_model_len=512) == []
    assert facts(None) == []


@pytest.mark.parametrize(("kind", "most"), [("longrope", 1024), ("dynamic", 4095)])
def test_transformers_code_is_kept_to_one_side(kind: str, most: int) -> None:
    lengths = {"model_config__hf_text_config__rope_parameters": {**LONG, "rope_type": kind}}
    for length, backend, refused in ((most, True, False), (most + 1, True, True), (most + 1, False, False)):
        vllm, cache = setup(
            **lengths,
            model_config__using_transformers_backend=lambda it=backend: it,
            model_config__max_model_len=length,
        )
        if refused:
            with pytest.raises(RopeByLengthError, match=f"max_model_len is {length}") as raised:
                refuse_setup(vllm, cache, {})
            assert f"--max-model-len {most}" in raised.value.hint
        else:
            refuse_setup(vllm, cache, {})


# -- Llama 4's attention ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "asked", "file", "given", "tuned"),
    [
        (32768, 32768, {}, {}, False),
        (32769, 32769, {}, {}, True),
        (600, -1, {}, {}, True),  # 65,536 were built
        (600, 600, {"attn_temperature_tuning": True}, {}, True),
        (65536, 65536, {"attn_temperature_tuning": True}, {"attn_temperature_tuning": False}, False),
    ],
)
def test_llama_4_tunes_its_attention_by_the_length_unless_it_is_told(
    length: int, asked: int, file: dict[str, Any], given: dict[str, Any], tuned: bool
) -> None:
    llama = {
        "max_model_len": length,
        "original_max_model_len": asked,
        "get_and_verify_max_len": lambda _: 65536,
        "hf_text_config__model_type": "llama4_text",
        "try_get_generation_config": lambda: file,
        "override_generation_config": given,
    }
    vllm, cache = setup(**{f"model_config__{name}": value for name, value in llama.items()})
    planes = planes_of({"0": torch.zeros(4, 2, 16, 8, dtype=torch.bfloat16)}, 4, 16, "LBNHC")
    assert facts_of(vllm, cache, planes, "0.33.0", {})["attn_temperature_tuning"] is tuned
    vllm.model_config.hf_text_config.model_type = "llama"
    assert "attn_temperature_tuning" not in facts_of(vllm, cache, planes, "0.33.0", {})


# -- what a request is made of -----------------------------------------------------------------------------------------


def request(*identifiers: str, adapter: object = None) -> Any:
    return SimpleNamespace(lora_request=adapter, mm_features=[SimpleNamespace(identifier=one) for one in identifiers])


DIGEST = "0123456789abcdef" * 4


@pytest.mark.parametrize(
    ("of", "media", "why"),
    [
        (request(), False, ""),
        (request(adapter=object()), True, "adapter"),
        (SimpleNamespace(prompt_embeds=object(), mm_features=[]), True, "embeddings"),
        (request(DIGEST), False, "media"),
        (request(DIGEST, DIGEST * 2), True, ""),
        (request(DIGEST, "renderer0-mm-1-image-0"), True, "media"),
        (request("my cat"), True, "media"),
        (request(DIGEST.upper()), True, "media"),
        (request(f"adapter:{DIGEST}"), True, "media"),
    ],
)
def test_requests_whose_names_say_less_than_they_are_made_of(of: Any, media: bool, why: str) -> None:
    assert leaves_alone(of, media=media) == why


def test_media_is_an_option() -> None:
    assert not Options.of({"config": "x"}).media
    assert Options.of({"config": "x", "media": True}).media
    with pytest.raises(InvalidValueError, match="media is 1"):
        Options.of({"config": "x", "media": 1})


@pytest.mark.parametrize("gigabytes", [0, 4])
@pytest.mark.parametrize("caching", [False, True])
def test_media_that_a_counter_names_are_refused(gigabytes: float, caching: bool) -> None:
    media = SimpleNamespace(mm_processor_cache_gb=gigabytes)
    vllm, _ = setup(model_config__multimodal_config=media, cache_config__enable_prefix_caching=caching)
    if gigabytes or caching:
        refuse_media(vllm)
    else:
        with pytest.raises(MediaUnsupportedError, match="by a counter") as raised:
            refuse_media(vllm)
        assert "media" in raised.value.hint
    refuse_media(setup(model_config__multimodal_config=None, cache_config__enable_prefix_caching=False)[0])
