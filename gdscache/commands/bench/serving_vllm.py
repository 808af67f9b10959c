"""A run of vLLM, offline: `python -m gdscache.commands.bench.serving_vllm ORDER ANSWERS`. See serving.py."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

from gdscache.commands.bench import serving_run

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")


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


def main() -> None:
    from vllm import LLM, SamplingParams, TokensPrompt

    answers = serving_run.Answers()
    order = answers.order
    way = order["way"]
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
        max_model_len=order["tokens"] + 64,
        max_num_batched_tokens=order["tokens"] + 64,
        max_num_seqs=serving_run.CLIENTS,
        enforce_eager=not order["graphs"],
        compilation_config=GRAPHS if order["graphs"] else None,
        block_size=order["page_tokens"],
        **given,
    )
    answers.say(opened_s=time.monotonic() - started)

    def sampling(tokens: int) -> Any:
        return SamplingParams(max_tokens=tokens, temperature=0.0, detokenize=False, ignore_eos=True)

    def generate(prompts: Sequence[list[int]], tokens: int) -> list[int]:
        asked = [TokensPrompt(prompt_token_ids=p) for p in prompts]
        return [found.num_cached_tokens or 0 for found in llm.generate(asked, sampling(tokens), use_tqdm=False)]

    serving_run.measure(answers, generate, llm.reset_prefix_cache)
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
