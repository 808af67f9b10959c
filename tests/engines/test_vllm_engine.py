"""The connector in vLLM's real engine: the tokens are those without a cache, whatever happens to ours."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from gdscache.commands.inspect.reading import inspect
from gdscache.disk.catalog_file import slab_extent
from tests.engines import vllm_parts as parts
from tests.engines.vllm_script import DRAIN, METRICS, RESET, TELL, Answers, ask, at_rest

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

BLOCK = 32
FAULTY = "tests.support.faults:FaultyTransport"


def whole(prompt: dict[str, Any], block: int = BLOCK) -> int:
    """Tokens of a prompt that can be cached: full blocks, and one token is left to compute."""
    return (sum(number for _, number in prompt["parts"]) - 1) // block * block


def filled(folder: Path, model: Path, **changes: Any) -> dict[str, Any]:
    """A directory with the pages of all prompts; how a connector is told of it."""
    parts.run(folder, model, [ask(*parts.PROMPTS), DRAIN], parts.cache(folder / "ssd"))
    return parts.cache(folder / "ssd", **changes)


def test_prefixes_salts_and_chunks(model: Path, plain: Answers, tmp_path: Path) -> None:
    salts = [parts.salted(parts.LONG, salt) for salt in ("a", "b", "a")]
    steps = [ask(*parts.PROMPTS), DRAIN, RESET, ask(*parts.PROMPTS), RESET, ask(*salts[:2]), DRAIN, RESET, ask(*salts)]
    steps += [DRAIN, METRICS, TELL, ("reset", {"connector": True}), ask(*parts.PROMPTS)]
    connector = parts.cache(tmp_path / "ssd")
    found = parts.run(tmp_path, model, steps, connector).answers[1:]
    first, again, salted, salted_again, emptied = found[0], found[3], found[5], found[8], found[13]
    assert parts.cached(first) == [0, 992, 0, 0]  # the second begins as the first: vLLM's own prefix cache
    assert parts.cached(again) == [whole(prompt) for prompt in parts.PROMPTS]
    assert parts.cached(salted) == [0, 0]
    assert parts.cached(salted_again) == [whole(parts.LONG)] * 3
    assert parts.cached(emptied) == [0, 992, 0, 0]
    for answers in (first, again, emptied):
        parts.same(answers, plain)
    for answers in (salted, salted_again):
        parts.same(answers, plain[:1] * len(answers))
    assert found[12] is True
    at_rest(found[11])
    metrics = found[10]
    assert metrics["vllm:gdscache_begun_pages"] > 0
    assert metrics["vllm:gdscache_offered_pages"] > 0
    assert any("host" in name and value for name, value in metrics.items()), metrics
    restarted = parts.run(tmp_path, model, [ask(parts.LONG)], connector).answers[1]
    assert parts.cached(restarted) == [0]  # of weights that no file has, as far as anybody knows
    parts.same(restarted, plain[:1])


def test_prompts_of_a_step_that_begin_alike(model: Path, tmp_path: Path) -> None:
    """The second begins with the blocks that the first fills in the same step. All their pages are stored."""
    prompts = [{"parts": [["beginning", 128], [end, 64]], "tokens": 2} for end in ("one", "two")]
    steps = [ask(*prompts, together=True), DRAIN, TELL, RESET, ask(*prompts, together=True)]
    found = parts.run(tmp_path, model, steps, parts.cache(tmp_path / "ssd")).answers[1:]
    assert parts.cached(found[0]) == [0, 128]
    assert found[2]["pages"]["cpu"] == (128 + 2 * 64) // BLOCK
    assert parts.cached(found[4]) == [whole(prompt) for prompt in prompts]
    parts.same(found[4], found[0])


def test_a_page_that_the_last_step_fills_is_stored(model: Path, tmp_path: Path) -> None:
    prompt = {"parts": [[0, 4 * BLOCK + 25]], "tokens": 8}
    connector = parts.cache(tmp_path / "ssd")
    found = parts.run(tmp_path, model, [ask(prompt), DRAIN, TELL], connector).answers[1:]
    assert found[2]["pages"]["cpu"] == 5


def test_after_a_restart_without_a_prefix_cache_of_vllm(model: Path, plain: Answers, tmp_path: Path) -> None:
    connector = filled(tmp_path, model)
    steps = [ask(*parts.PROMPTS), ask(*parts.PROMPTS, together=True), METRICS, TELL]
    for layerwise in (True, False):
        connector["layerwise"] = layerwise
        found = parts.run(tmp_path, model, steps, connector, llm={"enable_prefix_caching": False}).answers[1:]
        for answers in found[:2]:
            assert parts.cached(answers) == [whole(prompt) for prompt in parts.PROMPTS]
            parts.same(answers, plain)
        assert any("disk" in name and value for name, value in found[2].items()), found[2]
        at_rest(found[3])


def test_packed_pages(model: Path, plain: Answers, tmp_path: Path) -> None:
    """`model.pack`: the tokens are those without a cache, out of the CPU tier and after a restart, in fewer bytes."""
    connector = parts.cache(tmp_path / "ssd", model={"pack": "on"})
    steps = [ask(*parts.PROMPTS), DRAIN, RESET, ask(*parts.PROMPTS), METRICS, TELL]
    found = parts.run(tmp_path, model, steps, connector).answers[1:]
    again = parts.run(tmp_path, model, [ask(*parts.PROMPTS), DRAIN, TELL], connector).answers[1:]
    assert parts.cached(found[3]) == parts.cached(again[0]) == [whole(prompt) for prompt in parts.PROMPTS]
    for answers in (found[0], found[3], again[0]):
        parts.same(answers, plain)
    for told in (found[5], again[2]):
        at_rest(told)
    extent, fields = slab_extent(tmp_path / "ssd"), inspect(tmp_path / "ssd")["namespaces"][0]["fields"]
    assert fields["packed"] == 1
    _, (width,), _, values, _ = fields["planes"][0][0]
    assert values == "bfloat16"
    assert extent is not None
    assert extent < 0.83 * width * fields["page_tokens"] * fields["layers"]


def test_in_a_process_of_its_own(model: Path, plain: Answers, tmp_path: Path) -> None:
    """As `vllm serve` has it: scheduler and worker in one child of the process that asks.

    On a CPU vLLM gives the worker a process of its own, a rank then, where the variable is "1" to the letter.
    """
    for name in ("1",) if torch.cuda.is_available() else ("1", "01"):
        connector = parts.cache(tmp_path / f"ssd{name}")
        for hits in (0, 1):
            environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": name}
            found = parts.run(tmp_path, model, [ask(*parts.PROMPTS)], connector, environment=environment).answers[1]
            assert parts.cached(found)[:1] == [hits * whole(parts.LONG)]
            parts.same(found, plain)


@pytest.mark.skipif(parts.KIND == "mla", reason="every test has latents then")
@pytest.mark.parametrize("kind", ["mla", "uneven"])
def test_other_models(plain: Answers, tmp_path: Path, kind: str) -> None:
    """Multi-head latent attention, and layers of unequal width: the same tokens, after a restart too."""
    model = parts.made(tmp_path, kind)
    alone = parts.run(tmp_path, model, [ask(*parts.PROMPTS)], llm={"enable_prefix_caching": False}).answers[1]
    assert min(parts.drift(a, b) for a, b in zip(alone, plain, strict=True)) > parts.DRIFT, "another model"
    connector = filled(tmp_path, model)
    found = parts.run(tmp_path, model, [ask(*parts.PROMPTS), DRAIN, TELL], connector).answers[1:]
    blocks = (BLOCK, 16)  # vLLM takes another block for latents than it is asked for, by the processor
    assert parts.cached(found[0]) in [[whole(prompt, block) for prompt in parts.PROMPTS] for block in blocks]
    parts.same(found[0], alone)
    at_rest(found[2])


@pytest.mark.skipif(parts.KIND == "mla", reason="latents have types of their own")
@pytest.mark.parametrize(
    ("kept_as", "another"),
    [
        ("fp8", "fp8_e5m2"),
        ("fp8_e5m2", "fp8"),
        ("int8_per_token_head", "fp8_per_token_head"),
        ("fp8_per_token_head", "int8_per_token_head"),
    ],
)
def test_quantised_caches(model: Path, tmp_path: Path, kept_as: str, another: str) -> None:
    """From the CPU tier and after a restart. A server that keeps another type of as many bytes finds none of them."""
    if "head" in kept_as and not torch.cuda.is_available():
        pytest.skip("vLLM has these types on a GPU alone")
    if "e5m2" in kept_as and torch.cuda.is_available():
        pytest.skip("vLLM's FlashAttention has no fp8_e5m2")
    connector, llm = parts.cache(tmp_path / "ssd"), {"kv_cache_dtype": kept_as}
    alone = parts.run(tmp_path, model, [ask(*parts.PROMPTS)], llm={**llm, "enable_prefix_caching": False}).answers[1]
    steps = [ask(*parts.PROMPTS), DRAIN, RESET, ask(*parts.PROMPTS), TELL]
    for hits in (False, True):
        found = parts.run(tmp_path, model, steps, connector, llm=llm).answers[1:]
        assert parts.cached(found[0])[::2] == [hits * whole(prompt) for prompt in parts.PROMPTS[::2]]
        assert parts.cached(found[3]) == [whole(prompt) for prompt in parts.PROMPTS]
        parts.same(found[0], alone)
        parts.same(found[3], alone)
        at_rest(found[4])
    if "e5m2" not in another or not torch.cuda.is_available():
        other = parts.run(tmp_path, model, [ask(parts.LONG)], connector, llm={"kv_cache_dtype": another}).answers[1]
        assert parts.cached(other) == [0]


@pytest.mark.skipif(parts.KIND == "mla", reason="every test has latents then")
def test_windows_as_one_group_of_full_attention(tmp_path: Path) -> None:
    """Of Gemma 3: without its hybrid manager vLLM keeps all tokens of all layers."""
    model, connector = parts.made(tmp_path, "windows"), parts.cache(tmp_path / "ssd")
    llm = {"disable_hybrid_kv_cache_manager": True}
    alone = parts.run(tmp_path, model, [ask(*parts.PROMPTS)], llm={**llm, "enable_prefix_caching": False}).answers[1]
    parts.run(tmp_path, model, [ask(*parts.PROMPTS), DRAIN], connector, llm=llm)
    found = parts.run(tmp_path, model, [ask(*parts.PROMPTS), DRAIN, TELL], connector, llm=llm).answers[1:]
    assert parts.cached(found[0]) == [whole(prompt) for prompt in parts.PROMPTS]
    parts.same(found[0], alone)
    at_rest(found[2])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs want a GPU")
@pytest.mark.parametrize("mode", ["FULL_AND_PIECEWISE", "PIECEWISE"])
def test_cuda_graphs(model: Path, tmp_path: Path, mode: str) -> None:
    """A prompt of which one token is left to compute is a step that only decodes. With full graphs nothing in its pass
    asks for layers."""
    graphs = {"backend": "eager", "cudagraph_mode": mode, "cudagraph_capture_sizes": [1, 2, 4, 8]}
    llm = {"enforce_eager": False, "compilation_config": graphs}
    prompts = [*parts.PROMPTS, {"parts": [[4, 20 * BLOCK + 1]]}]
    alone = parts.run(tmp_path, model, [ask(*prompts)], llm={**llm, "enable_prefix_caching": False}).answers[1]
    steps = [ask(*prompts), DRAIN, RESET, ask(*prompts), RESET, ask(*prompts, together=True), TELL]
    run = parts.run(tmp_path, model, steps, parts.cache(tmp_path / "ssd"), llm=llm)
    assert "Overriding cudagraph_mode" not in run.log
    first, again, together, told = (run.answers[1:][place] for place in (0, 3, 5, 6))
    assert parts.cached(again) == [whole(prompt) for prompt in prompts]
    for answers in (first, again, together):
        parts.same(answers, alone)
    at_rest(told)


def test_a_pool_so_small_that_requests_are_preempted(model: Path, tmp_path: Path) -> None:
    """Like is compared with like: the same requests, side by side, in the same pool, without a cache."""
    prompts: list[dict[str, Any]] = [{"parts": [[seed, 500]], "most": 250} for seed in (10, 11, 12)]
    llm = {"num_gpu_blocks_override": 56, "max_num_seqs": 3, "max_model_len": 1024}
    steps = [ask(*prompts, together=True), RESET, ask(*prompts, together=True)]
    undisturbed = parts.run(tmp_path, model, steps[:1], llm={"max_num_seqs": 3, "max_model_len": 1024}).answers[1]
    found = parts.run(tmp_path, model, [*steps, DRAIN, TELL, METRICS], parts.cache(tmp_path / "ssd"), llm=llm)
    for answers in (found.answers[1], found.answers[3]):
        for number, (a, b) in enumerate(zip(answers, undisturbed, strict=True)):
            assert a["why"] == "length"
            assert a["tokens"] == b["tokens"], number
    at_rest(found.answers[5])
    assert found.answers[6]["vllm:num_preemptions"] > 0


def _slab(directory: Path) -> Path:
    return max((path for path in directory.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def test_flipped_bytes_on_the_ssd(model: Path, plain: Answers, tmp_path: Path) -> None:
    """Every page on the SSD is bad; then some are, by a transport that flips bits as it reads."""
    connector = filled(tmp_path, model)
    flips = {"rules": [{"fault": "flip", "op": "read", "rate": 0.04, "bit": 5}], "inner": "posix", "seed": 3}
    few = parts.cache(tmp_path / "ssd", ssd={"transport": FAULTY})
    found = parts.run(tmp_path, model, [ask(*parts.PROMPTS), DRAIN, TELL], few, faults=flips).answers[1:]
    parts.same(found[0], plain)
    assert 0 < sum(parts.cached(found[0])) < sum(whole(prompt) for prompt in parts.PROMPTS)
    at_rest(found[2])
    parts.flip(_slab(tmp_path / "ssd"), 64 << 10)
    found = parts.run(tmp_path, model, [ask(*parts.PROMPTS), DRAIN, TELL], connector).answers[1:]
    parts.same(found[0], plain)
    assert parts.cached(found[0]) == [0, 992, 0, 0]
    at_rest(found[2])


SMALL = {"cpu": {"capacity": "2MiB"}}  # eight pages of 256 KiB


def test_no_room_in_the_cpu_tier(model: Path, plain: Answers, tmp_path: Path) -> None:
    """Pages then go between steps, straight to their blocks; a bad one is computed, with what follows it."""
    connector = filled(tmp_path, model, **SMALL)
    steps = [ask(*parts.PROMPTS), RESET, ask(*parts.PROMPTS, together=True), DRAIN, TELL, METRICS]
    found = parts.run(tmp_path, model, steps, connector).answers[1:]
    assert parts.cached(found[0]) == [whole(prompt) for prompt in parts.PROMPTS]
    for answers in (found[0], found[2]):
        parts.same(answers, plain)
    at_rest(found[4])
    flips = {"rules": [{"fault": "flip", "op": "read", "rate": 0.1, "bit": 5}], "inner": "posix", "seed": 3}
    bad = parts.cache(tmp_path / "ssd", **SMALL, ssd={"transport": FAULTY})
    found = parts.run(tmp_path, model, steps, bad, faults=flips).answers[1:]
    for answers in (found[0], found[2]):
        parts.same(answers, plain)
    assert found[5]["vllm:gdscache_bad_pages"] > 0
    at_rest(found[4])


def test_a_disk_that_hangs(model: Path, plain: Answers, tmp_path: Path) -> None:
    """A request is told "not yet" for `wait_seconds`, then it is computed; one that is aborted leaves nothing."""
    filled(tmp_path, model)
    hangs = {"rules": [{"fault": "hang", "op": "read", "skip": 3}], "inner": "posix"}
    connector = parts.cache(tmp_path / "ssd", ssd={"transport": FAULTY}, options={"wait_seconds": 3})
    steps = [("abort", {"prompt": parts.LONG, "steps": 20}), ask(*parts.PROMPTS), ("release", {}), DRAIN, TELL]
    found = parts.run(tmp_path, model, [*steps, METRICS], connector, faults=hangs).answers[1:]
    assert found[0]["said"] == 0
    assert found[0]["seconds"] > 20 * 0.002, "the scheduler spins"
    parts.same(found[1], plain)
    assert max(answer["seconds"] for answer in found[1]) < 15
    at_rest(found[4])
    assert found[5]["vllm:gdscache_late"] > 0


def test_writes_that_hang(model: Path, plain: Answers, tmp_path: Path) -> None:
    """Stores get stuck behind the SSD, in a CPU tier and a pool of blocks that are soon full; requests do not."""
    hangs = {"rules": [{"fault": "hang", "op": "write", "skip": 2}], "inner": "posix"}
    connector = parts.cache(tmp_path / "ssd", cpu={"capacity": "16MiB"}, ssd={"transport": FAULTY})
    steps = [ask(*parts.PROMPTS), ask(*parts.PROMPTS, together=True), RESET, ask(*parts.PROMPTS), ("release", {}), TELL]
    llm = {"num_gpu_blocks_override": 66}
    found = parts.run(tmp_path, model, steps, connector, faults=hangs, llm=llm).answers[1:]
    for answers in (found[0], found[1], found[3]):
        parts.same(answers, plain)
        assert max(answer["seconds"] for answer in answers) < 15
    assert found[5]["check"] == []


def test_a_full_disk(model: Path, plain: Answers, tmp_path: Path) -> None:
    full = {"rules": [{"fault": "enospc", "op": "write", "skip": 20}], "inner": "posix"}
    connector = parts.cache(tmp_path / "ssd", ssd={"transport": FAULTY})
    steps = [ask(*parts.PROMPTS), DRAIN, RESET, ask(*parts.PROMPTS), TELL]
    found = parts.run(tmp_path, model, steps, connector, faults=full).answers[1:]
    for answers in (found[0], found[3]):
        parts.same(answers, plain)
    assert parts.cached(found[3]) == [whole(prompt) for prompt in parts.PROMPTS]  # the CPU tier has them
    at_rest(found[4])
    found = parts.run(tmp_path, model, [ask(*parts.PROMPTS), TELL], parts.cache(tmp_path / "ssd")).answers[1:]
    parts.same(found[0], plain)
    at_rest(found[1])


def test_a_killed_engine(model: Path, plain: Answers, tmp_path: Path) -> None:
    connector = parts.cache(tmp_path / "ssd")
    killed = parts.run(tmp_path, model, [ask(*parts.PROMPTS[:2]), ("die", {})], connector, fails=True)
    assert killed.status == -9
    found = parts.run(tmp_path, model, [ask(*parts.PROMPTS), DRAIN, TELL], connector).answers[1:]
    parts.same(found[0], plain)
    assert parts.cached(found[0])[0] > 0
    at_rest(found[2])


def test_other_weights_find_nothing(model: Path, plain: Answers, tmp_path: Path) -> None:
    connector = filled(tmp_path, model)
    kept = {path.name: path.read_bytes() for path in model.iterdir()}
    times = {path.name: path.stat() for path in model.iterdir()}
    try:
        parts.made(model.parent, parts.KIND, seed=1)
        found = parts.run(tmp_path, model, [ask(parts.LONG)], connector).answers[1]
        assert parts.cached(found) == [0]
        assert parts.drift(found[0], plain[0]) > parts.DRIFT, "the weights are others"
    finally:
        for name, content in kept.items():
            (model / name).write_bytes(content)
            os.utime(model / name, ns=(times[name].st_atime_ns, times[name].st_mtime_ns))


def test_weights_that_are_reloaded(model: Path, tmp_path: Path) -> None:
    """vLLM's own cache has pages of the old ones until it is reset; until ours is, nothing is loaded or stored."""
    (tmp_path / "other").mkdir()
    other = parts.made(tmp_path / "other", parts.KIND, seed=1)
    (wanted,) = parts.run(tmp_path, other, [ask(parts.LONG)]).answers[1]
    both: tuple[str, dict[str, Any]] = ("reset", {"connector": True})
    again = [ask(parts.LONG), DRAIN, RESET]
    steps = [ask(parts.LONG), DRAIN, ("reload", {"model": str(other)}), RESET, *again, *again, both, *again, *again]
    steps += [("zero", {}), RESET, ask(parts.LONG)]
    ended = parts.run(tmp_path, model, [*steps, TELL], parts.cache(tmp_path / "ssd"))
    found = [answer for answer in ended.answers[1:] if isinstance(answer, list)]
    assert [parts.cached(answers) for answers in found] == [[0], [0], [0], [0], [whole(parts.LONG)], [0]]
    for answers in found[1:-1]:
        parts.same(answers, [wanted])
    for name in ("reload_weights", "reset_weights"):
        assert f"{name}: nothing is loaded or stored until reset_prefix_cache" in ended.log
    at_rest(ended.answers[-2])


@pytest.mark.parametrize(
    ("wrong", "error", "hint"),
    [
        ({"policy": "fail"}, "LoadFailurePolicyError", 'add "kv_load_failure_policy": "recompute"'),
        (
            {"llm": {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"}},
            "ParallelismUnsupportedError",
            "leave --pipeline-parallel-size, --decode-context-parallel-size",
        ),
    ],
)
def test_what_is_refused_says_what_to_change(
    model: Path, tmp_path: Path, wrong: dict[str, Any], error: str, hint: str
) -> None:
    """In the last line, before vLLM has loaded any weights, also where its engine is another process."""
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    ended = parts.run(tmp_path, model, [], parts.cache(tmp_path / "ssd"), environment=environment, fails=True, **wrong)
    assert ended.status != 0
    message, last = ended.log.strip().splitlines()[-2:]
    assert error in message
    assert hint in last
    assert "Loading weights" not in ended.log


def test_the_example(model: Path, tmp_path: Path) -> None:
    config = tmp_path / "gdscache.yaml"
    config.write_text(f"cpu: {{capacity: 64MiB}}\nssd: {{path: {tmp_path / 'ssd'}, capacity: 128MiB, gds: off}}\n")
    command = [str(parts.PYTHON), str(parts.ROOT / "examples/vllm_offline.py"), str(model), str(config)]
    environment = {**os.environ, **parts.SETTINGS, "PYTHONPATH": parts.path()}
    told = []
    for _ in range(2):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=parts.LIMIT_S)
        assert done.returncode == 0, done.stdout + done.stderr
        told.append([line.partition(": ")[2] for line in done.stdout.splitlines() if " tokens cached, answer" in line])
    assert [line.startswith("0 of 1540") for line in told[0]] == [True] + [False] * 5
    assert not any(line.startswith("0 of") for line in told[1])
    assert [line.partition("answer")[2] for line in told[0]] == [line.partition("answer")[2] for line in told[1]]


def test_the_log_looks_like_vllm_s_own(model: Path, tmp_path: Path) -> None:
    """A page that rots on the SSD is one line, with all that an operator needs, and so are a summary and a request."""
    connector = filled(tmp_path, model, log={"summary": 0.5, "requests": 0.1})
    parts.flip(_slab(tmp_path / "ssd"), 64 << 10)
    run = parts.run(tmp_path, model, [ask(parts.LONG), DRAIN, ask(parts.LONG), DRAIN], connector)
    head = r"\(\S* pid=\d+\) {level} \d\d-\d\d \d\d:\d\d:\d\d \[.*{file}:\d+\] "
    place = re.escape(str(tmp_path / "ssd"))
    bad = rf"page [0-9a-f]{{64}} in slot \d+ of the ssd tier \({place}\) did not come \(checksum\)"
    lines = [
        ("WARNING", "limited_log.py", bad),
        (
            "INFO",
            "journal.py",
            rf"{place}: a request that missed pages: request \S+, pages that were cached, not loaded: "
            r"tokens 0 to [\d,]+ (bad on ssd \(checksum\)|cached on cpu)",
        ),
        (
            "INFO",
            "journal.py",
            rf"{place}: in \d+ s \d+ lookups of \d+ pages, hit .* %.*, missed .* %.*, loaded .*, stored .*",
        ),
    ]
    for level, file, text in lines:
        found = re.findall(head.format(level=level, file=re.escape(file)) + text, run.log, re.MULTILINE)
        assert found, (text, run.log[-8000:])
    assert len(re.findall(bad, run.log)) == 1


def test_a_load_is_in_the_trace_of_its_request(model: Path, tmp_path: Path) -> None:
    connector = parts.cache(tmp_path / "ssd")
    connector["config"]["traces"] = True
    steps = [ask(parts.LONG), DRAIN, RESET, ("traced", {"prompt": parts.LONG, "trace": 11})]
    [span] = parts.run(tmp_path, model, steps, connector).answers[4]
    assert (span["name"], span["trace"]) == ("gdscache.load", 11)
    assert span["attributes"]["gdscache.pages"] == 46
    assert span["attributes"]["gdscache.tiers"] == ["cpu"]
