"""One run of vLLM, offline, as ordered: `python vllm_run.py ORDER ANSWERS`. See bench.py."""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import parts

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
SCHEDULER = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished_all_groups",
)
WORKER = (
    "handle_preemptions",
    "bind_connector_metadata",
    "start_load_kv",
    "wait_for_layer_load",
    "save_kv_layer",
    "wait_for_save",
    "get_transfer_results",
    "get_finished",
    "get_block_ids_with_load_errors",
    "get_kv_connector_stats",
    "build_connector_worker_meta",
    "clear_connector_metadata",
)


def transfer(order: dict[str, Any]) -> Any:
    """vLLM's own offloading to CPU memory, or with files below it; or ours."""
    from vllm.config import KVTransferConfig

    way, folder = order["way"], order["folder"]
    if way == "gdscache":
        config = {
            "cpu": {"capacity": order["cpu"]},
            "ssd": {"path": f"{folder}/gds", "capacity": order["ssd"], "threads": order["threads"]},
            "host_buffer": order["host_buffer"],
            "load": {"verify": "once", "gate": "enforcing"},  # as `gdscache config init vllm` writes
        }
        return KVTransferConfig(
            kv_connector="GdsCacheConnector",
            kv_connector_module_path="gdscache.integrations.vllm",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={"config": config},
        )
    extra: dict[str, Any] = {"cpu_bytes_to_use": order["cpu"]}
    if way == "files":
        files = {"type": "fs", "root_dir": f"{folder}/vllm"}
        extra |= {"spec_name": "TieringOffloadingSpec", "block_size": 64, "secondary_tiers": [files]}
    return KVTransferConfig(kv_connector="OffloadingConnector", kv_role="kv_both", kv_connector_extra_config=extra)


# vLLM's default, one graph for a step that only decodes; without a compiler, which would take a minute an engine.
GRAPHS = {"backend": "eager", "cudagraph_mode": "FULL_AND_PIECEWISE", "cudagraph_capture_sizes": parts.GRAPHS}
EMPTY = "save_kv_layer"  # does nothing: what it takes is what a clock around a call takes


class Steps:
    """Seconds that the connector's calls take of each step, of its scheduler's side and of its worker's.

    A step has two calls a layer that do nothing where nothing is loaded, so the clocks would be most of the figure.
    What they take is left out, by what they mostly take around `EMPTY`. A call within another counts once.
    """

    def __init__(self) -> None:
        from gdscache.integrations.vllm.connector import GdsCacheConnector

        self._inside = False
        self._clear()
        for side, names in (("scheduler", SCHEDULER), ("worker", WORKER)):
            for name in names:
                setattr(GdsCacheConnector, name, self._timed(side, name, getattr(GdsCacheConnector, name)))

    def _clear(self) -> None:
        self.sides: dict[str, list[list[float]]] = {"scheduler": [[0.0, 0]], "worker": [[0.0, 0]]}  # seconds, and calls
        self.calls: Counter[str] = Counter()  # seconds by the name of the call
        self.empty: list[float] = []  # seconds of calls of `EMPTY`

    def _timed(self, side: str, name: str, method: Any) -> Any:
        def call(*arguments: Any, **more: Any) -> Any:
            if self._inside:
                return method(*arguments, **more)
            self._inside = True
            start = time.perf_counter()
            try:
                return method(*arguments, **more)
            finally:
                spent = time.perf_counter() - start
                self._inside = False
                step = self.sides[side][-1]
                step[0] += spent
                step[1] += 1
                self.calls[name] += spent  # type: ignore[assignment]
                if name == EMPTY:
                    self.empty.append(spent)
                if name == "build_connector_meta":  # the end of the scheduler's part of a step
                    computes = arguments[1].total_num_scheduled_tokens > 0
                    for found in self.sides.values():
                        found[-1:] = [found[-1], [0.0, 0]] if computes else [[0.0, 0]]  # else it waits for pages

        return call

    def told(self) -> dict[str, float]:
        """Of steps that computed something since the last call, in microseconds; means of calls are over all steps."""
        steps, clock = len(self.sides["worker"]), statistics.median(self.empty or [0.0])
        found = {"steps": float(steps), "clock": clock * 1e6}
        for side, of in self.sides.items():
            seconds = [max(0.0, spent - clock * calls) for spent, calls in of]
            found |= {side: statistics.median(seconds) * 1e6, f"{side} mean": statistics.fmean(seconds) * 1e6}
            found[f"{side} with clocks"] = statistics.median(spent for spent, _ in of) * 1e6
        found |= {name: seconds * 1e6 / steps for name, seconds in self.calls.items()}
        self._clear()
        return found


def thread_seconds() -> dict[str, float]:
    """CPU seconds of this process's threads, by their names."""
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    found: dict[str, float] = {}
    for task in Path("/proc/self/task").iterdir():
        name = names.get(int(task.name)) or (task / "comm").read_text().strip()
        user, system = (task / "stat").read_text().rpartition(")")[2].split()[11:13]
        found[name] = found.get(name, 0.0) + (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
    return found


def main() -> None:
    from vllm import LLM, SamplingParams, TokensPrompt

    answers = parts.Answers()
    order = answers.order
    way = order["way"]
    steps = Steps() if way == "gdscache" else None
    given: dict[str, Any] = {} if way == "none" else {"kv_transfer_config": transfer(order)}
    if order["gpu"]:
        given |= {"kv_cache_memory_bytes": order["kv_cache"], "gpu_memory_utilization": 0.1}
        given["attention_config"] = {"backend": order["attention"]}
    else:
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; else it takes all memory that is free
    started = time.monotonic()
    llm = LLM(
        order["model"],
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype="bfloat16",
        max_model_len=order["tokens"] + 64,
        max_num_batched_tokens=order["tokens"] + 64,
        max_num_seqs=parts.CLIENTS,
        enforce_eager=not order["graphs"],
        compilation_config=GRAPHS if order["graphs"] else None,
        block_size=order["block"],
        **given,
    )
    answers.say(opened_s=time.monotonic() - started)

    def sampling(tokens: int) -> Any:
        return SamplingParams(max_tokens=tokens, temperature=0.0, detokenize=False, ignore_eos=True)

    def generate(prompts: Sequence[list[int]], tokens: int) -> list[int]:
        asked = [TokensPrompt(prompt_token_ids=p) for p in prompts]
        return [found.num_cached_tokens or 0 for found in llm.generate(asked, sampling(tokens), use_tqdm=False)]

    answers.wait_for_turn()
    parts.first_tokens(generate, llm.reset_prefix_cache, answers)
    if order["traffic"]:
        parts.warm_up(generate, order)
        for name, prompts in parts.traffic(order):
            if steps is not None:
                steps.told()
            before = thread_seconds()
            parts.rate(generate, name, prompts, answers)
            spent = {thread: s - before.get(thread, 0.0) for thread, s in thread_seconds().items()}
            if steps is not None:
                answers.add(f"{name}_step_us", steps.told())
                answers.add(f"{name}_thread_s", {thread: s for thread, s in spent.items() if s > 0.05})
            time.sleep(2)
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
