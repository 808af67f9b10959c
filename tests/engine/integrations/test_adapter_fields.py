"""The namespace under each engine: each line of its table changes it, and nothing else does."""

from __future__ import annotations

import json
import re
import tempfile
import tomllib
from pathlib import Path
from typing import Any

import pytest

from gdscache import CacheEngine, PageHashes
from gdscache.config import Config
from gdscache.integrations.fields import ENVIRONMENT
from gdscache.integrations.sglang import setup as sglang_setup
from gdscache.integrations.vllm import setup as vllm_setup
from tests.support import sglang_fields, vllm_fields
from tests.support.pairs import one_in

HASHES = PageHashes([bytes([number]) * 32 for number in range(3)])
STAND_INS: dict[str, Any] = {"sglang": sglang_fields, "vllm": vllm_fields}
SETUPS: dict[str, Any] = {"sglang": sglang_setup, "vllm": vllm_setup}
TABLES = {kind: setup.table for kind, setup in SETUPS.items()}
UNKNOWN = {
    "sglang": ["ServerArgs.new", "ModelConfig.new", f"{ENVIRONMENT}.SGLANG_NEW"],
    "vllm": ["VllmConfig.new", "ModelConfig.new", "MultiModalConfig.new", f"{ENVIRONMENT}.VLLM_NEW"],
}
with tempfile.TemporaryDirectory() as _folder:
    LINES = [(kind, line) for kind in STAND_INS for line in STAND_INS[kind].lines(Path(_folder))]
OPENED = [pair for pair in LINES if not pair[1].startswith(ENVIRONMENT)]  # the others' namespaces are compared


def opened(kind: str, folder: Path, described: dict[str, object]) -> CacheEngine:
    """The engine that a server with these settings opens."""
    sections = {
        "model": described,
        "ssd": {"path": str(folder / "ssd"), "capacity": "1MiB", "transport": "posix", "gds": "off", "threads": 1},
        "host_buffer": "64KiB",
    }
    return CacheEngine(Config.from_dict(sections), STAND_INS[kind].tensors())


def restarted(kind: str, folder: Path, described: dict[str, object]) -> int:
    """The pages that a restarted server finds."""
    with opened(kind, folder, described) as engine:
        return engine.lookup(HASHES).tokens // engine.layout.page_tokens


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of each engine, a folder with three pages of the plain setup."""
    folders = {kind: tmp_path_factory.mktemp(kind) for kind in STAND_INS}
    for kind, folder in folders.items():
        with opened(kind, folder, namespace(kind, None, folder)) as engine:
            assert not engine.store(HASHES, [0, 1, 2]).result(60).dropped
            engine.drain(60)
    return folders


def namespace(kind: str, line: str | None, folder: Path) -> dict[str, object]:
    given = STAND_INS[kind].Setup(folder)
    if line is not None:
        given.change(line)
    return dict(given.described())


def facts_in(described: dict[str, object]) -> dict[str, object]:
    return dict(json.loads(str(described["salt"])))


def differences(kind: str, line: str, folder: Path, plain: dict[str, object]) -> set[str]:
    """The facts that differ where that line does from those of the `plain` setup."""
    found = facts_in(namespace(kind, line, folder))
    return {name for name in {*plain, *found} if plain.get(name) != found.get(name)}


@pytest.mark.parametrize("kind", STAND_INS)
def test_a_restart_of_the_same_setup_finds_its_pages(kind: str, stored: dict[str, Path]) -> None:
    assert restarted(kind, stored[kind], namespace(kind, None, stored[kind])) == 3


@pytest.mark.parametrize(("kind", "line"), one_in(4, OPENED))
def test_another_value_of_a_line_finds_nothing(kind: str, line: str, stored: dict[str, Path]) -> None:
    other = namespace(kind, line, stored[kind])
    assert other != namespace(kind, None, stored[kind])
    assert restarted(kind, stored[kind], other) == 0


@pytest.mark.parametrize("kind", STAND_INS)
def test_no_reason_is_of_a_time_when_less_was_served(kind: str) -> None:
    """Several ranks are served, states, and groups of layers."""
    file = Path(str(SETUPS[kind].__file__)).with_name("fields.toml")
    reasons = " ".join(group["why"] for group in tomllib.loads(file.read_text())["harmless"])
    assert not re.search(r"one rank|(states|groups) are refused", reasons)


# Some quantise what ranks or experts exchange, or what is multiplied; the others decide whether these apply.
FLASHINFER = [
    f"{ENVIRONMENT}.{name}" for name in (
        "FLASHINFER_DISABLE_FP4_QUANT_FAST_MATH", "FLASHINFER_NVFP4_4OVER6", "FLASHINFER_NVFP4_4OVER6_E4M3_USE_256",
        "FLASHINFER_NVFP4_4OVER6_ERR_MODE", "FLASHINFER_NVFP4_4OVER6_ERR_USE_FAST_MATH",
        "TRTLLM_DISABLE_FP4_QUANT_FAST_MATH",
    )
]  # fmt: skip
QUANTISE = {
    "sglang": [
        "ServerArgs.boundary_reduction", "ServerArgs.disable_custom_all_reduce",
        "ServerArgs.enable_aiter_allreduce_fusion", "ServerArgs.ep_size",
        f"{ENVIRONMENT}.AITER_FORCE_A8W4", f"{ENVIRONMENT}.AITER_SITUV2_A4W4", f"{ENVIRONMENT}.AITER_SITUV2_A8W4",
        f"{ENVIRONMENT}.ROCM_QUICK_REDUCE_QUANTIZATION",
        f"{ENVIRONMENT}.SGLANG_MORI_COMBINE_DTYPE", f"{ENVIRONMENT}.SGLANG_MORI_DISPATCH_DTYPE",
        f"{ENVIRONMENT}.SGLANG_MORI_MOE_MAX_INPUT_TOKENS",  # rows above it are dropped
    ],
    "vllm": [
        "AttentionConfig.flash_attn_version", "AttentionConfig.mla_prefill_backend",
        "AttentionConfig.sparse_mla_force_mqa",
        "ParallelConfig.all2all_backend", "ParallelConfig.data_parallel_size", "ParallelConfig.enable_eplb",
        "ParallelConfig.enable_expert_parallel", "ParallelConfig.disable_custom_all_reduce",
        f"{ENVIRONMENT}.AITER_BF16_FP8_MOE_BOUND", f"{ENVIRONMENT}.FLA_TRIL_PRECISION",
        f"{ENVIRONMENT}.XHS_VIDEO_JPEG_QUALITY",  # of the frames of a video behind its digest
    ],
}  # fmt: skip


@pytest.mark.parametrize("kind", STAND_INS)
def test_what_quantises_is_held(kind: str) -> None:
    assert {TABLES[kind]().kinds.get(line) for line in QUANTISE[kind] + FLASHINFER} == {"held"}


@pytest.mark.parametrize("kind", STAND_INS)
def test_each_line_alone_makes_the_difference(kind: str, stored: dict[str, Path]) -> None:
    lines = [line for of, line in LINES if of == kind] + UNKNOWN[kind]  # a field that nobody knows is held
    plain = facts_in(namespace(kind, None, stored[kind]))
    assert {line: differences(kind, line, stored[kind], plain) for line in lines} == {line: {line} for line in lines}


@pytest.mark.soak
@pytest.mark.parametrize(("kind", "line"), LINES)
def test_a_line_that_is_taken_out_is_missed(
    kind: str, line: str, stored: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = SETUPS[kind].facts_of

    def some(*given: Any) -> dict[str, object]:
        return {name: value for name, value in kept(*given).items() if name != line}

    monkeypatch.setattr(SETUPS[kind], "facts_of", some)
    assert differences(kind, line, stored[kind], facts_in(namespace(kind, None, stored[kind]))) == set()
    if (kind, line) in OPENED:
        with pytest.raises(AssertionError):
            test_another_value_of_a_line_finds_nothing(kind, line, stored)


@pytest.mark.parametrize("kind", STAND_INS)
def test_what_is_harmless_keeps_the_namespace(kind: str, stored: dict[str, Path]) -> None:
    plain, given = namespace(kind, None, stored[kind]), STAND_INS[kind].Setup(stored[kind])
    for line in TABLES[kind]().named("harmless"):
        if line.split(".")[1] not in STAND_INS[kind].LOOKED_AT:
            given.change(line)
    assert given.described() == plain
    assert namespace(kind, f"{ENVIRONMENT}.OTHER", stored[kind]) == plain, "none of the engine's"
