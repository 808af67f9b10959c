"""A run of SGLang, offline: `python -m gdscache.commands.bench.serving_sglang ORDER ANSWERS`. See serving.py."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gdscache.commands.bench import serving_run


def cache(order: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `sglang.Engine` for a way of keeping the KV cache."""
    way, folder = order["way"], order["folder"]
    tiers = {
        "cpu": {"capacity": order["cpu"]},
        "ssd": {"path": f"{folder}/gds-{way}", "capacity": order["ssd"], "threads": order["threads"]},
        "host_buffer": order["host_buffer"],
        "load": {"verify": "once", "gate": "enforcing"},
    }
    if way == "linker":
        return {
            "enable_unified_cache_external_linker": True,
            "unified_cache_external_linker_backend": "dynamic",
            "unified_cache_external_linker_config": {
                "linker": "GdsCacheLinker",
                "linker_module_path": "gdscache.integrations.sglang.linker",
                "linker_extra_config": {"config": tiers, "ssd_wait": 5.0},
            },
        }
    if way == "none":
        return {}
    given: dict[str, Any] = {
        "enable_hierarchical_cache": True,
        "hicache_size": (order["cpu"] >> 30) // order["tp"],  # of each rank
        "hicache_mem_layout": "page_first",
        "hicache_io_backend": "kernel",
        "hicache_storage_prefetch_policy": order["policy"],
    }
    if way == "hicache":
        os.environ["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] = f"{folder}/hicache"
        os.makedirs(f"{folder}/hicache", exist_ok=True)
        return given | {"hicache_storage_backend": "file"}
    extra = {
        "backend_name": "gdscache",
        "module_path": "gdscache.integrations.sglang.storage",
        "class_name": "GdsCacheStorage",
        "interface_v1": 1,
        "hicache_storage_pass_prefix_keys": True,
        "config": {name: tiers[name] for name in ("ssd", "host_buffer", "load")},
    }
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


def main() -> None:
    import sglang

    answers = serving_run.Answers()
    order = answers.order
    started = time.monotonic()
    # Engines that open side by side take memory of a GPU at different times. SGLang would take that for another user.
    os.environ.setdefault("SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK", "0")
    engine = sglang.Engine(
        model_path=order["model"],
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        attention_backend="triton",
        sampling_backend="pytorch",
        disable_cuda_graph=not order["graphs"],
        disable_prefill_cuda_graph=True,
        cuda_graph_bs_decode=serving_run.GRAPHS,
        page_size=order["page_tokens"],
        mem_fraction_static=0.9,  # of free memory; the number of tokens is the bound
        max_total_tokens=order["kv_cache"] * order["tp"] // order["token_bytes"],
        tp_size=order["tp"],
        disable_custom_all_reduce=True,  # with several GPUs SGLang would compile its kernels at each start
        context_length=order["tokens"] + 64,
        chunked_prefill_size=order["tokens"] + 64,
        max_prefill_tokens=order["tokens"] + 64,
        max_running_requests=serving_run.CLIENTS,
        schedule_policy="lpm",
        log_level="warning",
        # A running request uses three states: its own, and two that are kept in turns.
        **({"max_mamba_cache_size": 4 * serving_run.CLIENTS} if order["states"] else {}),
        **cache(order),
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
    serving_run.measure(answers, generate, after=after)
    engine.shutdown()


if __name__ == "__main__":  # SGLang starts processes by spawn
    main()
