"""What the SGLang integrations refuse when SGLang starts: each setting and each model by name, with what to change."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gdscache import errors
from gdscache.errors import CacheGroupsUnsupportedError, IntegrationError, MediaUnsupportedError, RopeByLengthError
from gdscache.integrations.sglang.setup import refuse_components, refuse_model, refuse_setup

LIMIT = 4096
LONG = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}


@pytest.mark.parametrize(
    ("change", "error", "hint"),
    [
        *(
            ({name: 2}, "ParallelismUnsupportedError", "--tp-size alone")
            for name in ("pp_size", "attn_cp_size", "dcp_size", "dwdp_size")
        ),
        *(
            ({name: 2}, "ParallelismUnsupportedError", "one server a copy of the model")
            for name in ("dp_size", "attn_dp_size", "moe_dp_size")
        ),
        ({"nnodes": 2}, "ParallelismUnsupportedError", "one server a host"),
        ({"speculative_algorithm": "EAGLE"}, "SpeculationUnsupportedError", "NGRAM"),
        ({"enable_lora": True}, "AdaptersUnsupportedError", "--enable-lora"),
        ({"is_embedding": True}, "EmbeddingsUnsupportedError", "leave the cache out"),
        ({"lora_paths": ["a=b"]}, "AdaptersUnsupportedError", "--enable-lora"),
        ({"enable_memory_saver": True}, "SleepModeUnsupportedError", "leave it out"),
        ({"disaggregation_mode": "prefill"}, "ConnectorRoleError", "leave it out"),
        ({"dllm_algorithm": "LowConfidence"}, "AttentionUnsupportedError", "leave the cache out"),
        ({"enable_mis": True}, "AttentionUnsupportedError", "--enable-mis"),
        *(
            ({name: True}, "CacheLayoutUnsupportedError", "leave it out")
            for name in ("enable_int8_mamba_checkpoint", "enable_linear_replayssm", "enable_linear_replayssm_spec")
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)  # fmt: skip
def test_settings(change: dict[str, Any], error: str, hint: str) -> None:
    with pytest.raises(getattr(errors, error)) as raised:
        refuse_setup(SimpleNamespace(**change))
    assert hint in raised.value.hint
    assert isinstance(raised.value, IntegrationError)
    ((name, value),) = change.items()
    assert f"{name} is {value!r}" in raised.value.message


def test_settings_that_are_not_refused() -> None:
    refuse_setup(SimpleNamespace())
    refuse_setup(SimpleNamespace(speculative_algorithm="NGRAM", tp_size=1, dcp_size=None, disaggregation_mode="null"))
    refuse_setup(SimpleNamespace(enable_lora=False, lora_paths=[], dllm_algorithm=None))


@pytest.mark.parametrize("name", ["tp_size", "ep_size"])
def test_ranks_of_one_host_are_served(name: str) -> None:
    for count in (2, 4, 8):
        refuse_setup(SimpleNamespace(**{name: count}, nnodes=1, pp_size=1))


def test_components() -> None:
    params = SimpleNamespace(swa_gates_prefix_match=True)
    for names in (["FULL"], ["FULL", "SWA"], ["FULL", "MAMBA"], ["FULL", "MAMBA", "SWA"]):
        refuse_components(names, params)
    for names in (["FULL", "C128"], ["SWA"], ["MAMBA", "SWA"], []):
        with pytest.raises(CacheGroupsUnsupportedError, match="FULL, SWA and MAMBA"):
            refuse_components(names, params)
    params.swa_gates_prefix_match = False
    refuse_components(["FULL", "MAMBA"], params)
    with pytest.raises(CacheGroupsUnsupportedError, match="not in SGLang's tree"):
        refuse_components(["FULL", "SWA"], params)


# -- models ----------------------------------------------------------------------------------------------------------


def model(rope: dict[str, Any] | None = None, tokens: int = 2 * LIMIT, impl: str = "auto", **changes: Any) -> Any:
    """As SGLang's `ModelConfig`. The model was trained with `LIMIT` tokens; requests have up to `tokens`."""
    text = {"rope_parameters": rope, "original_max_position_embeddings": LIMIT, "max_position_embeddings": 32 * LIMIT}
    given = {"is_multimodal": False, "is_encoder_decoder": False, "model_impl": impl, "context_len": tokens}
    return SimpleNamespace(**{**given, "hf_text_config": SimpleNamespace(**text), **changes})


@pytest.mark.parametrize("name", ["is_multimodal", "is_encoder_decoder"])
def test_models_that_take_images(name: str) -> None:
    with pytest.raises(MediaUnsupportedError) as raised:
        refuse_model(model(**{name: True}))
    assert "--language-model-only" in raised.value.hint


@pytest.mark.parametrize(
    "rope",
    [
        None,
        {},
        {"rope_theta": 1e4},
        *({"rope_type": kind, "factor": 2.0} for kind in ("default", "linear", "yarn", "llama3", "proportional")),
        {"type": "yarn", "factor": 2.0},
        {"full_attention": {"rope_type": "yarn"}, "sliding_attention": {"rope_type": "default"}},
    ],
    ids=str,
)
def test_ropes_that_go_by_the_position(rope: dict[str, Any] | None) -> None:
    refuse_model(model(rope))


@pytest.mark.parametrize(
    "rope",
    [
        LONG,
        {"type": "longrope"},
        {**LONG, "original_max_position_embeddings": LIMIT},
        {"full_attention": LONG, "sliding_attention": {"rope_type": "default"}},
    ],
    ids=str,
)
def test_longrope_is_refused_unless_every_request_is_on_one_side(rope: dict[str, Any]) -> None:
    with pytest.raises(RopeByLengthError) as raised:
        refuse_model(model(rope, LIMIT + 1))
    assert "'longrope'" in raised.value.message
    assert f"--context-length {LIMIT}," in raised.value.hint
    refuse_model(model(rope, LIMIT))


@pytest.mark.parametrize("told", [100, 32 * LIMIT])
def test_of_two_limits_the_shorter_one_counts(told: int) -> None:
    """One is the rope's, and one is beside it."""
    rope, limit = {**LONG, "original_max_position_embeddings": told}, min(told, LIMIT)
    refuse_model(model(rope, limit))
    with pytest.raises(RopeByLengthError, match=f"{limit + 1} tokens"):
        refuse_model(model(rope, limit + 1))


def test_a_rope_without_a_limit_has_that_of_the_model() -> None:
    text = {"rope_parameters": LONG, "max_position_embeddings": 100}
    refuse_model(model(tokens=100, hf_text_config=SimpleNamespace(**text)))
    with pytest.raises(RopeByLengthError, match="101"):
        refuse_model(model(tokens=101, hf_text_config=SimpleNamespace(**text)))


def test_dynamic_rope_goes_by_the_length_in_code_of_transformers_alone() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0}
    refuse_model(model(rope, impl="sglang"))
    refuse_model(model(rope, _resolved_model_impl=SimpleNamespace(value="sglang")))
    for impl in ("auto", "transformers"):
        refuse_model(model(rope, LIMIT, impl))
        with pytest.raises(RopeByLengthError) as raised:
            refuse_model(model(rope, impl=impl))
        assert "--model-impl sglang" in raised.value.hint


def test_a_rope_that_is_not_known_goes_by_the_length() -> None:
    for tokens in (1, LIMIT, 2 * LIMIT):
        with pytest.raises(RopeByLengthError, match="'newest'") as raised:
            refuse_model(model({"rope_type": "newest"}, tokens))
        assert "leave the cache out" in raised.value.hint
