"""A run of vLLM or SGLang, offline: `python -m gdscache.commands.bench.serving_run ENGINE ORDER ANSWERS`.

A run is a process with one engine and one way of keeping the KV cache. Runs of a stage open their engines at the same
time (`serving.py`). Each reports that it is ready, and measures alone in its turn.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from gdscache.commands.config_init import hicache_storage, sglang_linker, vllm_transfer
from gdscache.runtime.files import write_whole

WORDS = 4000  # upper bound of token ids
CLIENTS = 64  # requests at a time
GRAPHS = [1, 2, 4, 8, 16, 24, 32, 48, CLIENTS]  # batch sizes of decode steps with a CUDA graph
SETTLE_S, PAUSE_S = 4.0, 2.0  # for background stores to end; after a load of traffic
DOCUMENTS, USES, PART, ANSWER = 48, 3, 2048, 16  # requests that share the first half of their prompt
SPARE = 64  # tokens of an engine beyond the longest prompt


def words(seed: str, number: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(10, WORDS) for _ in range(number)]


def prompt(beginning: int, end: int, order: dict[str, Any]) -> list[int]:
    """`order["tokens"]` tokens; the first `order["cached"]` depend on `beginning` alone."""
    cached = order["cached"]
    return words(f"beginning {beginning}", cached) + words(f"end {end}", order["tokens"] - cached)


def shared_prompts(part: int, turn: int) -> list[list[int]]:
    """Prompts of two parts, in random order; `USES` prompts share each first part."""
    found = [
        words(f"document {turn} {document}", part) + words(f"question {turn} {document} {use}", part)
        for use in range(USES)
        for document in range(DOCUMENTS)
    ]
    random.Random(turn).shuffle(found)
    return found


def traffic(order: dict[str, Any]) -> Iterator[tuple[str, list[list[int]]]]:
    """Loads of both kinds in turns, `order["turns"]` of each: prompts with and without a common part."""
    for turn in range(order["turns"]):
        yield "shared", shared_prompts(order["part"], turn)
        yield "lone", [words(f"lone {turn} {number}", 2 * order["part"]) for number in range(DOCUMENTS)]


Generate = Callable[[Sequence[list[int]], int], Sequence[int]]  # prompts, tokens to answer: cached tokens of each


class Answers:
    """A run's order and results. Results are written at once, so that a run that is killed or meets a full disk keeps
    them."""

    def __init__(self) -> None:
        self.order: dict[str, Any] = json.loads(Path(sys.argv[2]).read_text())
        self._path = Path(sys.argv[3])
        self._found: dict[str, Any] = {}

    def say(self, **found: Any) -> None:
        self._found |= found
        write_whole(self._path, json.dumps(self._found).encode())

    def add(self, name: str, value: object) -> None:
        self.say(**{name: [*self._found.get(name, []), value]})

    def wait_for_turn(self) -> None:
        """Report that everything is open. Returns in this run's turn."""
        Path(f"{self._path}.ready").touch()
        while not Path(f"{self._path}.go").exists():
            time.sleep(0.05)


def rate(generate: Generate, name: str, prompts: list[list[int]], answers: Answers) -> None:
    """Requests a second, all submitted at once; and the share of the prompts' tokens that were cached in any place."""
    start = time.perf_counter()
    cached = generate(prompts, ANSWER)
    answers.add(f"{name}_requests_per_s", len(prompts) / (time.perf_counter() - start))
    answers.add(f"{name}_cached", sum(cached) / sum(map(len, prompts)))


def first_tokens(generate: Generate, forget: Callable[[], object], answers: Answers) -> None:
    """Milliseconds to the first token, and the number of cached tokens, of `order["repeat"]` prompts each way.
    `forget()` empties the engine's own GPU cache."""
    order = answers.order
    found: dict[str, Any] = {}

    def turn(name: str, number: int, end: int) -> None:
        asked, start = prompt(number, end, order), time.perf_counter()
        (cached,) = generate([asked], 1)
        ms = (time.perf_counter() - start) * 1e3
        row = found.setdefault(name, {"ms": [], "cached": []})
        row["ms"].append(ms)
        row["cached"].append(cached)
        answers.say(first=found)

    generate([prompt(98, 98, order)], 1)  # kernels are loaded
    if not order["restarted"]:
        for n in range(order["repeat"]):
            turn("recomputed", n, n)
            if order["groups"]:  # windows and states are kept at places where two prompts have parted
                turn("parted", n, 200 + n)
            turn("resident", n, 100 + n)
        if order["way"] == "none":
            return
    time.sleep(SETTLE_S)  # after a restart, too: the first prompt is stored
    for n in range(order["repeat"]):
        if not order["restarted"]:
            forget()
        turn("loaded", n, order["ends"] + n)


def measure(
    answers: Answers,
    generate: Generate,
    forget: Callable[[], object] = lambda: None,
    after: Callable[[], object] = lambda: None,
) -> None:
    """Measure a run's order in its turn. First tokens come before the traffic, which evicts their pages. `after()` is
    called before the first load of traffic, and after each."""
    answers.wait_for_turn()
    first_tokens(generate, forget, answers)
    if not answers.order["traffic"]:
        return
    generate(shared_prompts(answers.order["part"], -1)[: CLIENTS // 2], ANSWER)  # compiles the kernels of traffic
    after()
    for kind, prompts in traffic(answers.order):
        rate(generate, kind, prompts, answers)
        time.sleep(PAUSE_S)
        after()


def tiers(order: dict[str, Any]) -> dict[str, Any]:
    """gdscache's sections, as `gdscache config init` writes them."""
    path = f"{order['folder']}/gds-{order['way']}"
    return {
        "cpu": {"capacity": order["cpu"]},
        "ssd": {"path": path, "capacity": order["ssd"], "threads": order["threads"]},
        "host_buffer": order["host_buffer"],
        "load": {"verify": "once", "gate": "enforcing"},
    }


# -- vLLM --------------------------------------------------------------------------------------------------------------


def transfer(order: dict[str, Any]) -> Any:
    """vLLM's own offloading to CPU memory, or with files below it; or ours."""
    from vllm.config import KVTransferConfig

    way, folder = order["way"], order["folder"]
    if way == "gdscache":
        return KVTransferConfig(**vllm_transfer(tiers(order)))
    extra: dict[str, Any] = {"cpu_bytes_to_use": order["cpu"]}
    if way == "files":
        files = {"type": "fs", "root_dir": f"{folder}/vllm"}
        extra |= {"spec_name": "TieringOffloadingSpec", "block_size": 64, "secondary_tiers": [files]}
    return KVTransferConfig(kv_connector="OffloadingConnector", kv_role="kv_both", kv_connector_extra_config=extra)


# vLLM's default: one graph for a decode-only step; without a compiler, which would take a minute for each engine.
VLLM_GRAPHS = {"backend": "eager", "cudagraph_mode": "FULL_AND_PIECEWISE", "cudagraph_capture_sizes": GRAPHS}


def vllm(answers: Answers) -> None:
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import LLM, SamplingParams, TokensPrompt

    order, way = answers.order, answers.order["way"]
    given: dict[str, Any] = {} if way == "none" else {"kv_transfer_config": transfer(order)}
    if order["gpu"]:
        given |= {"kv_cache_memory_bytes": order["kv_cache"], "gpu_memory_utilization": 0.1}
        given["attention_config"] = {"backend": "FLASH_ATTN"}
    else:
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; else it takes all free memory
    if order["states"]:
        given |= {"enable_prefix_caching": True, "mamba_cache_mode": "align"}
    if order["preset"] == "qwen3-next":
        given["gdn_prefill_backend"] = "triton"  # the default needs FlashInfer
    if order["tp"] > 1:
        given |= {"tensor_parallel_size": order["tp"], "distributed_executor_backend": "mp"}
    started = time.monotonic()
    llm = LLM(
        order["model"],
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype="bfloat16",
        max_model_len=order["tokens"] + SPARE,
        max_num_batched_tokens=order["tokens"] + SPARE,
        max_num_seqs=CLIENTS,
        enforce_eager=not order["graphs"],
        compilation_config=VLLM_GRAPHS if order["graphs"] else None,
        block_size=order["page_tokens"],
        **given,
    )
    answers.say(opened_s=time.monotonic() - started)

    def sampling(tokens: int) -> Any:
        return SamplingParams(max_tokens=tokens, temperature=0.0, detokenize=False, ignore_eos=True)

    def generate(prompts: Sequence[list[int]], tokens: int) -> list[int]:
        asked = [TokensPrompt(prompt_token_ids=p) for p in prompts]
        return [found.num_cached_tokens or 0 for found in llm.generate(asked, sampling(tokens), use_tqdm=False)]

    measure(answers, generate, llm.reset_prefix_cache)
    llm.llm_engine.engine_core.shutdown()


# -- SGLang ------------------------------------------------------------------------------------------------------------


def caching(order: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `sglang.Engine` for a way of keeping the KV cache."""
    way, folder = order["way"], order["folder"]
    if way == "linker":
        config = sglang_linker(tiers(order))
        config["linker_extra_config"]["ssd_wait"] = 5.0
        return {
            "enable_unified_cache_external_linker": True,
            "unified_cache_external_linker_backend": "dynamic",
            "unified_cache_external_linker_config": config,
        }
    if way == "none":
        return {}
    given: dict[str, Any] = {
        "enable_hierarchical_cache": True,
        "hicache_size": max(1, (order["cpu"] >> 30) // order["tp"]),  # GiB of each rank; 0 is a share of the GPU's
        "hicache_mem_layout": "page_first",
        "hicache_io_backend": "kernel",
        "hicache_storage_prefetch_policy": order["policy"],
    }
    if way == "hicache":
        os.environ["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] = f"{folder}/hicache"
        os.makedirs(f"{folder}/hicache", exist_ok=True)
        return given | {"hicache_storage_backend": "file"}
    extra = hicache_storage({name: tiers(order)[name] for name in ("ssd", "host_buffer", "load")})
    return given | {
        "hicache_storage_backend": "dynamic",
        "hicache_storage_backend_extra_config": json.dumps(extra),
    }


def drop_files(order: dict[str, Any], began: float) -> None:
    """Delete HiCache's files: its file backend has no bound, and a RAM disk has no room for all pages of the
    traffic."""
    if order["way"] != "hicache":
        return
    for file in Path(order["folder"], "hicache").iterdir():
        with contextlib.suppress(FileNotFoundError):
            if file.stat().st_mtime >= began:
                file.unlink()


def sglang(answers: Answers) -> None:
    from sglang import Engine

    order = answers.order
    started = time.monotonic()
    # Engines that open side by side take memory of a GPU at different times. SGLang would take that for another user.
    os.environ.setdefault("SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK", "0")
    engine = Engine(
        model_path=order["model"],
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        attention_backend="triton",
        sampling_backend="pytorch",
        disable_cuda_graph=not order["graphs"],
        disable_prefill_cuda_graph=True,
        cuda_graph_bs_decode=GRAPHS,
        page_size=order["page_tokens"],
        mem_fraction_static=0.9,  # of free memory; the number of tokens is the bound
        max_total_tokens=order["gpu_tokens"],
        tp_size=order["tp"],
        disable_custom_all_reduce=True,  # with several GPUs SGLang would compile its kernels at each start
        context_length=order["tokens"] + SPARE,
        chunked_prefill_size=order["tokens"] + SPARE,
        max_prefill_tokens=order["tokens"] + SPARE,
        max_running_requests=CLIENTS,
        schedule_policy="lpm",
        log_level="warning",
        # A running request uses three states: its own, and two that are kept in turns.
        **({"max_mamba_cache_size": 4 * CLIENTS} if order["states"] else {}),
        **caching(order),
    )
    answers.say(opened_s=time.monotonic() - started)

    def generate(prompts: Sequence[list[int]], tokens: int) -> list[int]:
        sampling = {"max_new_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
        found = engine.generate(input_ids=list(prompts), sampling_params=sampling)
        return [one["meta_info"].get("cached_tokens") or 0 for one in found]

    began = 0.0

    def after() -> None:
        nonlocal began
        began = began or time.time()
        drop_files(order, began)

    # No flush: it would also empty HiCache's host memory and torch's, which the next prompt would allocate again. The
    # GPU has room for two prompts, so the third evicts the first one.
    measure(answers, generate, after=after)
    engine.shutdown()


if __name__ == "__main__":  # SGLang starts processes by spawn
    {"vllm": vllm, "sglang": sglang}[sys.argv[1]](Answers())
