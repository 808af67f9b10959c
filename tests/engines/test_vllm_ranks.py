"""vLLM's real engine with tensor parallelism: workers in processes of their own, which are ranks of our engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gdscache.commands.inspect.reading import inspect
from tests.engines import vllm_parts as parts
from tests.engines.vllm_script import DRAIN, METRICS, RESET, TELL, ask, at_rest

pytestmark = [
    pytest.mark.engines,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.device_count() < parts.TP, reason="too few GPUs"),
    pytest.mark.skipif(parts.KIND == "mla", reason="another model than these tests are about"),
]

RANKS: dict[str, Any] = {
    "llm": {"tensor_parallel_size": parts.TP, "distributed_executor_backend": "mp"},
    "environment": {"OMP_NUM_THREADS": "1"},
    "limit": 400.0,
}
WHOLE = [1472, 1376, 672, 992]  # tokens of the prompts that can be cached: whole blocks, and one token is computed
PAGES = (sum(WHOLE) - 992) // 32  # of which the second prompt's first are in vLLM's own cache
LAST: dict[str, Any] = {"parts": [[5, 640]]}
ASK, TOGETHER, ASK_LAST = ask(*parts.PROMPTS), ask(*parts.PROMPTS, together=True), ask(LAST)


def filled(folder: Path, model: Path, plain: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A directory with the pages of all prompts, and hits from the CPU tier. What `LAST` answers, which is asked for
    last: what it has computed is stored as vLLM ends."""
    steps = [ASK, DRAIN, RESET, ASK, RESET, TOGETHER, DRAIN, METRICS, TELL, ASK_LAST]
    found = parts.run(folder, model, steps, parts.cache(folder / "ssd"), **RANKS).answers[1:]
    assert parts.cached(found[0]) == [0, 992, 0, 0]
    assert parts.cached(found[3]) == parts.cached(found[5]) == WHOLE
    for answers in (found[0], found[3], found[5]):
        parts.same(answers, plain)
    assert found[7]["vllm:gdscache_begun_pages"] == 2 * PAGES
    at_rest(found[8])
    last: list[dict[str, Any]] = found[9]
    return last


def test_a_head_on_each_rank(model: Path, plain: list[dict[str, Any]], tmp_path: Path) -> None:
    """Then, behind a restart, with a CPU tier that has room for eight pages: bytes of one rank are bad, and it stands
    still for a time."""
    filled(tmp_path, model, plain)
    directory = tmp_path / "ssd"
    slabs = sorted(path.name for path in directory.glob("slab*"))
    assert slabs == [*(f"slab-0.0.{shard}.bin" for shard in range(1, parts.TP)), "slab-0.bin"]
    parts.flip(directory / "slab-0.0.1.bin", 640 << 10)  # ten pages
    connector = parts.cache(directory, cpu={"capacity": "1MiB"})
    connector["config"]["deadline"] = 3
    steps = [ASK, DRAIN, METRICS, ("hang", {"rank": 1, "seconds": 12.0}), RESET, ASK, DRAIN, ("ranks", {}), TELL]
    found = parts.run(tmp_path, model, [*steps, RESET, ASK, DRAIN, TELL], connector, **RANKS).answers[1:]
    for place in (0, 5, 10):
        parts.same(found[place], plain)
    assert found[2]["vllm:gdscache_bad_pages"] > 0
    assert found[2]["vllm:gdscache_begun_pages"] > 0
    assert max(answer["seconds"] for answer in found[5]) < 40
    assert found[7] == ["running"] * parts.TP
    assert sum(parts.cached(found[10])) > sum(WHOLE) // 2
    at_rest(found[8])
    at_rest(found[12])


def test_packed_pages(model: Path, plain: list[dict[str, Any]], tmp_path: Path) -> None:
    """Each rank packs its heads: hits from the CPU tier, and behind a restart."""
    connector = parts.cache(tmp_path / "ssd", model={"pack": "on"})
    found = parts.run(tmp_path, model, [ASK, DRAIN, RESET, ASK, TELL], connector, **RANKS).answers[1:]
    again = parts.run(tmp_path, model, [ASK, DRAIN, TELL], connector, **RANKS).answers[1:]
    assert parts.cached(found[3]) == parts.cached(again[0]) == WHOLE
    for answers in (found[0], found[3], again[0]):
        parts.same(answers, plain)
    for told in (found[4], again[2]):
        at_rest(told)
    slabs = sorted(path.name for path in (tmp_path / "ssd").glob("slab*"))
    assert len(slabs) == parts.TP
    assert inspect(tmp_path / "ssd")["namespaces"][0]["fields"]["packed"] == 1


def test_the_bytes_on_every_rank(model: Path, tmp_path: Path) -> None:
    """They are those of a run without a cache."""
    prompts = [{**prompt, "most": 1} for prompt in parts.PROMPTS[:3]]  # every block of the fourth is not loaded
    ask, look = ("ask", {"prompts": prompts}), ("bytes", {})
    given = {**RANKS, "environment": {**RANKS["environment"], "PYTHONHASHSEED": "0"}}  # for equal hashes of blocks
    plain = parts.run(tmp_path, model, [ask, look], **given).answers[2]
    steps = [ask, DRAIN, RESET, ask, look]
    found = parts.run(tmp_path, model, steps, parts.cache(tmp_path / "ssd"), **given).answers[1:]
    assert parts.cached(found[3]) == WHOLE[:3]
    assert len(plain) == sum(WHOLE[:3]) // 32 - 31  # the second prompt has so many of the first one's
    assert found[4] == plain
    assert {len(of) for of in plain.values()} == {parts.TP}
    assert all(a != b for a, b, *_ in plain.values())


def test_one_head_on_both_ranks(tmp_path: Path) -> None:
    """Their bytes are kept once. Behind a restart they are found; then one rank is killed, and vLLM ends."""
    model = parts.made(tmp_path, "one")
    plain = parts.run(tmp_path, model, [ASK], llm={"enable_prefix_caching": False}).answers[1]
    last = filled(tmp_path, model, plain)
    assert [path.name for path in (tmp_path / "ssd").glob("slab*")] == ["slab-0.bin"]
    steps = [ASK_LAST, ASK, METRICS, DRAIN, TELL, ("kill", {"rank": 1}), ASK_LAST]
    ended = parts.run(tmp_path, model, steps, parts.cache(tmp_path / "ssd"), fails=True, **RANKS)
    assert ended.status != 0
    found = ended.answers[1:]
    assert len(found) == 6, ended.log[-4000:]
    assert parts.cached(found[0]) == [608]
    parts.same(found[0], last)
    assert parts.cached(found[1]) == WHOLE
    parts.same(found[1], plain)
    assert any("disk" in name and value for name, value in found[2].items()), found[2]
    at_rest(found[4])


def test_replicas_have_a_directory_each(model: Path, plain: list[dict[str, Any]], tmp_path: Path) -> None:
    """Two engines of data parallelism, as `vllm serve --data-parallel-size 2` has them: each of them is asked twice."""
    connector = parts.cache(tmp_path / "ssd" / "$GDSCACHE_DP_RANK")
    given = {"replicas": 2, "prompts": parts.PROMPTS, "environment": {"OMP_NUM_THREADS": "1"}, "limit": 400.0}
    found = parts.run(tmp_path, model, [], connector, **given).answers
    assert sorted(path.name for path in (tmp_path / "ssd").iterdir()) == ["0", "1"]
    assert len(found) == 2
    for first, again in found:
        parts.same(first, plain)
        parts.same(again, plain)
        assert parts.cached(again) == WHOLE
