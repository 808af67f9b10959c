"""A run of vLLM, offline: `python -m gdscache.commands.bench.serving_vllm ORDER ANSWERS`. See serving.py."""

from __future__ import annotations

import os
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from gdscache.commands.bench import serving_run

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
SCHEDULER = (
    "on_new_request", "get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta",
    "update_connector_output", "request_finished_all_groups",
)  # fmt: skip
WORKER = (
    "handle_preemptions", "bind_connector_metadata", "start_load_kv", "wait_for_layer_load", "save_kv_layer",
    "wait_for_save", "get_transfer_results", "get_finished", "get_block_ids_with_load_errors",
    "get_kv_connector_stats", "build_connector_worker_meta", "clear_connector_metadata",
)  # fmt: skip


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


# vLLM's default: one graph for a decode-only step; without a compiler, which would take a minute for each engine.
GRAPHS = {"backend": "eager", "cudagraph_mode": "FULL_AND_PIECEWISE", "cudagraph_capture_sizes": serving_run.GRAPHS}
ENDS = ("build_connector_meta", "clear_connector_metadata")  # the last call of a step, on either side
EMPTY = "save_kv_layer"  # does nothing: its time is that of the clock around a call


class Steps:
    """Seconds that the connector's calls of one side take in each step.

    A step has two empty calls a layer if nothing is loaded, so the clocks would be most of the figure. Their time is
    subtracted, as measured around `EMPTY`. A call within another counts once.
    """

    def __init__(self, names: Sequence[str]) -> None:
        from gdscache.integrations.vllm.connector import GdsCacheConnector

        self._inside = False
        self._clear()
        for name in names:
            setattr(GdsCacheConnector, name, self._timed(name, getattr(GdsCacheConnector, name)))

    def _clear(self) -> None:
        self._seconds, self._calls, self._computes = 0.0, 0, False  # of this step
        self._steps: list[tuple[float, int]] = []  # of each step with computation
        self.by_name: Counter[str] = Counter()  # seconds by the name of the call
        self.empty: list[float] = []  # seconds of calls of `EMPTY`

    def _timed(self, name: str, method: Any) -> Any:
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
                self._seconds += spent
                self._calls += 1
                self.by_name[name] += spent  # type: ignore[assignment]
                if name == EMPTY:
                    self.empty.append(spent)
                # A step without computation waits for pages, and ends without `wait_for_save`.
                scheduled = name == "build_connector_meta" and arguments[1].total_num_scheduled_tokens > 0
                self._computes |= scheduled or name == "wait_for_save"
                if name in ENDS:
                    self._end_step()

        return call

    def _end_step(self) -> None:
        if self._computes:
            self._steps.append((self._seconds, self._calls))
        self._seconds, self._calls, self._computes = 0.0, 0, False

    def told(self, side: str) -> dict[str, float]:
        """Microseconds of steps with computation since the last call; means of calls are over all steps."""
        steps, clock = self._steps or [(0.0, 0)], statistics.median(self.empty or [0.0])
        seconds = [max(0.0, spent - clock * calls) for spent, calls in steps]
        found = {side: statistics.median(seconds) * 1e6, f"{side} mean": statistics.fmean(seconds) * 1e6}
        found |= {name: spent * 1e6 / len(steps) for name, spent in self.by_name.items()}
        self._clear()
        return found


class TimedWorker:
    """Additions to vLLM's worker: see `worker_extension_cls`."""

    def time_steps(self) -> None:
        self._steps = Steps(WORKER)

    def told_steps(self) -> dict[str, float]:
        return self._steps.told("worker")


def main() -> None:
    from vllm import LLM, SamplingParams, TokensPrompt

    answers = serving_run.Answers()
    order = answers.order
    way = order["way"]
    steps = Steps(SCHEDULER) if way == "gdscache" else None
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
    if steps is not None:
        given["worker_extension_cls"] = "gdscache.commands.bench.serving_vllm.TimedWorker"
    started = time.monotonic()
    llm = LLM(
        order["model"],
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype="bfloat16",
        max_model_len=order["tokens"] + 64,
        max_num_batched_tokens=order["tokens"] + 64,
        max_num_seqs=serving_run.CLIENTS,
        enforce_eager=not order["graphs"],
        compilation_config=GRAPHS if order["graphs"] else None,
        block_size=order["page_tokens"],
        **given,
    )
    answers.say(opened_s=time.monotonic() - started)
    if steps is not None:
        llm.collective_rpc("time_steps")

    def told(kind: str) -> None:
        """Record the steps' times since the last call, on both sides; of the slowest worker."""
        if steps is not None:
            workers = llm.collective_rpc("told_steps")
            found = steps.told("scheduler") | max(workers, key=lambda of: float(of["worker"]))
            if kind:
                answers.add(f"{kind}_step_us", found)

    def sampling(tokens: int) -> Any:
        return SamplingParams(max_tokens=tokens, temperature=0.0, detokenize=False, ignore_eos=True)

    def generate(prompts: Sequence[list[int]], tokens: int) -> list[int]:
        asked = [TokensPrompt(prompt_token_ids=p) for p in prompts]
        return [found.num_cached_tokens or 0 for found in llm.generate(asked, sampling(tokens), use_tqdm=False)]

    serving_run.measure(answers, generate, llm.reset_prefix_cache, told)
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
