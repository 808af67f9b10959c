"""Our linker and our storage in SGLang's real engine, on a GPU: the tokens are those without a cache."""

from __future__ import annotations

import json
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engines import vllm_parts as parts
from tests.engines.sglang_parts import PYTHON
from tests.engines.vllm_child import HYBRIDS
from tests.engines.vllm_parts import cached, requests

pytestmark = [
    pytest.mark.engines,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="SGLang's kernels want a GPU"),
    pytest.mark.skipif("torch.cuda.device_count() < TP", reason="too few GPUs"),
]
CHILD = Path(__file__).with_name("sglang_child.py")
KIND = os.environ.get("GDSCACHE_SGLANG_KIND", "mha")  # of the model: mha, mla, or one of `HYBRIDS`
WAYS = ["linker"] if KIND in HYBRIDS else ["linker", "storage"]
of_one_kind = pytest.mark.skipif(
    KIND in HYBRIDS, reason="a hybrid model's hits end where SGLang keeps windows or states"
)
PAGE, LIMIT_S = 32, 400.0
OF_KIND = {"convolutions": {"attention_backend": "fa3", "page_size": 1}}.get(KIND, {})  # SGLang asks for both
REQUESTS = int(os.environ.get("GDSCACHE_SGLANG_REQUESTS", "2000"))
TP = int(os.environ.get("GDSCACHE_SGLANG_TP", "1"))  # GPUs of an engine
BESIDE = {"SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0"}  # engines that open side by side take memory in turns
ALIKE = 0.9  # of the requests have the same tokens: Triton's sums depend on what else is in a batch

Steps = list[tuple[str, dict[str, Any]]]
SETTLE: tuple[str, dict[str, Any]] = ("sleep", {"seconds": 2.0})
RESET: tuple[str, dict[str, Any]] = ("reset", {})


def ask(*prompts: dict[str, Any], **more: Any) -> tuple[str, dict[str, Any]]:
    return "ask", {"prompts": list(prompts), **more}


def child(folder: Path, orders: dict[str, Any]) -> list[Any]:
    """What a run answers."""
    number = len(list(folder.glob("orders*")))
    asked, told, log = (folder / f"{name}{number}" for name in ("orders", "answers", "log"))
    asked.write_text(json.dumps(orders))
    with log.open("w") as out:
        process = subprocess.Popen(
            [str(PYTHON), str(CHILD), str(asked), str(told)],
            stdout=out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": parts.path(), "HF_HUB_OFFLINE": "1", **BESIDE},
            cwd=folder,
            start_new_session=True,
        )
        try:
            status = process.wait(LIMIT_S)
        finally:
            subprocess.run(["pkill", "-9", "-g", str(process.pid)], check=False)
    assert status == 0, log.read_text()[-6000:]
    assert "background work broke off" not in log.read_text(), log.read_text()[-6000:]
    return json.loads(told.read_text()) if told.exists() else []


def run(folder: Path, model: Path, way: str, steps: Steps, **engine: Any) -> list[Any]:
    engine = {"tp_size": TP, **OF_KIND, **engine}
    orders = {"model": str(model), "way": way, "folder": str(folder), "steps": steps, "engine": engine}
    return child(folder, orders)[1:]


def whole(prompt: dict[str, Any]) -> int:
    """Tokens of a prompt that can be cached: full pages, and one token is left to compute."""
    return (sum(number for _, number in prompt["parts"]) - 1) // PAGE * PAGE


def made(folder: Path, seed: int = 0) -> Path:
    if not PYTHON.exists():
        pytest.skip("no SGLang: set GDSCACHE_SGLANG_PYTHON")
    folder.mkdir(exist_ok=True)
    child(folder, {"make": str(folder / "tiny"), "kind": KIND, "seed": seed})
    return folder / "tiny"


@of_one_kind
@pytest.mark.parametrize("way", WAYS)
def test_prefixes_and_a_restart(way: str, tmp_path: Path) -> None:
    model, every = made(tmp_path / "model"), ask(*parts.PROMPTS)
    hits = [whole(prompt) for prompt in parts.PROMPTS]
    plain, resident = run(tmp_path, model, "none", [every, every])
    assert cached(resident) == hits
    steps = [every, SETTLE, RESET, every, ask(*parts.PROMPTS, together=True), SETTLE]
    first, _, _, again, together, _ = run(tmp_path, model, way, steps)
    assert cached(first) == cached(plain) == [0, 992, 0, 0]
    parts.same(first, plain)
    parts.same(together, plain)
    if way == "linker":  # HiCache's own flush begins to fetch from its storage when a request is there
        assert cached(again) == hits
    parts.same(again, [b if b["cached"] == a["cached"] else c for a, b, c in zip(again, resident, plain, strict=True)])
    (restarted,) = run(tmp_path, model, way, [every])
    assert cached(restarted) == hits
    parts.same(restarted, resident)


@of_one_kind
@pytest.mark.parametrize("way", WAYS)
def test_other_weights(way: str, tmp_path: Path) -> None:
    """An update of weights is followed by no hit, and the tokens are those of the new ones."""
    model, other = made(tmp_path / "a"), made(tmp_path / "b", seed=1)
    (wanted,) = run(tmp_path, other, "none", [ask(*parts.PROMPTS)], disable_radix_cache=True)
    steps = [ask(*parts.PROMPTS), SETTLE, ("weights", {"model": str(other)}), ask(*parts.PROMPTS)]
    found = run(tmp_path, model, way, steps)
    assert found[2][0] is True, found[2]
    assert [answer["cached"] for answer in found[3]] == [0, 992, 0, 0]
    parts.same(found[3], wanted)


@pytest.mark.skipif(KIND not in HYBRIDS, reason="GDSCACHE_SGLANG_KIND names no hybrid model")
def test_a_hybrid_model_and_a_restart(tmp_path: Path) -> None:
    """From the CPU tier and from the SSD each prompt begins with what a run without a cache has."""
    model, every = made(tmp_path / "model"), ask(*parts.PROMPTS)
    (plain,) = run(tmp_path, model, "none", [every], disable_radix_cache=True)
    first, _, _, again, _ = run(tmp_path, model, "linker", [every, SETTLE, RESET, every, SETTLE])
    (restarted,) = run(tmp_path, model, "linker", [every])
    for found in (first, again, restarted):
        assert {answer["why"] for answer in found} == {"length"}
        drifts = [parts.first_drift(a, b) for a, b in zip(found, plain, strict=True)]
        print(KIND, cached(found), [round(drift, 4) for drift in drifts])
        assert max(drifts) < parts.DRIFT
    assert min(cached(again)) > 0
    assert cached(restarted) == cached(again)


@pytest.mark.parametrize("way", WAYS)
def test_a_trace_in_a_small_pool(way: str, tmp_path: Path) -> None:
    """Every request ends, and its first token is that of a run without a cache: it did not begin on wrong bytes."""
    model, prompts = made(tmp_path / "model"), requests(REQUESTS)
    every, plain = ask(*prompts, together=True), tmp_path / "plain"
    plain.mkdir()
    with ThreadPoolExecutor() as beside:  # an engine opens in 50 s, and builds kernels for as long at its first prompts
        uncached = beside.submit(run, plain, model, "none", [every], disable_radix_cache=True)
        first, _ = run(tmp_path, model, way, [every, SETTLE], max_total_tokens=16_384)
        (alone,) = uncached.result()
    second, _ = run(tmp_path, model, way, [every, SETTLE], max_total_tokens=16_384)
    for found in (first, second):  # the second run finds the first one's pages on the SSD
        assert {answer["why"] for answer in found} == {"length"}
        drifts = [parts.first_drift(a, b) for a, b in zip(found, alone, strict=True)]
        assert max(drifts) < parts.DRIFT, sorted(drifts)[-5:]
        alike = parts.alike(found, alone)
        print(f"{way}: {len(prompts)} requests, {alike:.2%} alike, {sum(a['cached'] for a in found)} tokens cached")
        assert alike >= ALIKE
        assert sum(answer["cached"] for answer in found) > 0
