"""One run of SGLang's real engine by orders in a JSON file:  sglang_child.py ORDERS ANSWERS

Needs a GPU, and an environment with SGLang and gdscache; the tests start it. As `vllm_child.py`, whose models
and prompts these are: each step is a method below, and what it returns is an answer.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from tests.engines.vllm_child import make_model, tokens_of

ENGINE = {
    "skip_tokenizer_init": True,
    "dtype": "bfloat16",
    "attention_backend": "triton",
    "sampling_backend": "pytorch",
    "disable_cuda_graph": True,
    "page_size": 32,
    "mem_fraction_static": 0.9,  # of what is free; `max_total_tokens` bounds it, so that several runs share a GPU
    "max_total_tokens": 1 << 16,
    "context_length": 2048,
    "chunked_prefill_size": 512,
    "max_running_requests": 64,
    "max_mamba_cache_size": 256,  # states; otherwise they fill what is free
    "schedule_policy": "lpm",
    "log_level": "warning",
    "random_seed": 0,
    "disable_custom_all_reduce": True,  # its kernels would be compiled at each start
}


def cache(way: str, folder: str) -> dict[str, Any]:
    """Arguments of `sglang.Engine` for our linker, or for our storage below HiCache."""
    ssd = {"path": f"{folder}/{way}", "capacity": "2GiB", "transport": "posix", "gds": "off"}
    if way == "linker":
        config = {
            "cpu": {"capacity": "256MiB"},
            "ssd": ssd,
            "host_buffer": "64MiB",
        }  # two states beside other pools' pages
        return {
            "enable_unified_cache_external_linker": True,
            "unified_cache_external_linker_backend": "dynamic",
            "unified_cache_external_linker_config": {
                "linker": "GdsCacheLinker",
                "linker_module_path": "gdscache.integrations.sglang.linker",
                "linker_extra_config": {"config": config, "ssd_wait": 5.0},
            },
        }
    if way == "storage":
        extra = {
            "backend_name": "gdscache", "module_path": "gdscache.integrations.sglang.storage",
            "class_name": "GdsCacheStorage", "interface_v1": 1, "hicache_storage_pass_prefix_keys": True,
            "config": {"ssd": ssd, "host_buffer": "16MiB"},
        }  # fmt: skip
        return {
            "enable_hierarchical_cache": True, "hicache_ratio": 2.0, "hicache_mem_layout": "page_first",
            "hicache_io_backend": "kernel", "hicache_storage_prefetch_policy": "wait_complete",
            "hicache_storage_backend": "dynamic", "hicache_storage_backend_extra_config": json.dumps(extra),
        }  # fmt: skip
    return {}


class Run:
    """An engine of SGLang's, and the steps."""

    def __init__(self, orders: dict[str, Any]) -> None:
        import sglang

        settings = ENGINE | cache(orders["way"], orders["folder"]) | orders.get("engine", {})
        self.engine = sglang.Engine(model_path=orders["model"], **settings)

    def ask(self, prompts: list[dict[str, Any]], together: bool = False) -> list[dict[str, Any]]:
        """Generate for each prompt, one after the other or all at once."""
        found = []
        for batch in [prompts] if together else [[prompt] for prompt in prompts]:
            sampling = [{"max_new_tokens": p.get("most", 8), "temperature": 0.0, "ignore_eos": True} for p in batch]
            results = self.engine.generate(
                input_ids=[tokens_of(p) for p in batch],
                sampling_params=sampling,
                return_logprob=True,
                top_logprobs_num=5,
            )
            for result in results:
                about = result["meta_info"]
                each = about[
                    "output_top_logprobs"
                ]  # log-probability, token and text of the five likeliest, token by token
                found.append(
                    {
                        "tokens": list(result["output_ids"]),
                        "likeliest": [sorted((p for p, *_ in of), reverse=True)[:2] for of in each],
                        "cached": about.get("cached_tokens") or 0,
                        "first": {str(token): p for p, token, *_ in each[0]},
                        "why": (about["finish_reason"] or {}).get("type"),
                    }
                )
        return found

    def reset(self) -> None:
        """Empty SGLang's own cache."""
        self.engine.flush_cache()

    def weights(self, model: str) -> Any:
        """Take another model's weights."""
        return list(self.engine.update_weights_from_disk(model))[:2]

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def close(self) -> None:
        self.engine.shutdown()


def main() -> None:
    orders = json.loads(Path(sys.argv[1]).read_text())
    answers: list[Any] = []

    def tell() -> None:
        Path(sys.argv[2]).write_text(json.dumps(answers))

    if "make" in orders:
        make_model(Path(orders["make"]), orders.get("seed", 0), orders.get("kind", "mha"))
        return
    start = time.monotonic()

    def say(what: str) -> None:
        print(f"{time.monotonic() - start:.1f} s: {orders['way']}: {what}", flush=True)

    say("opens")
    run = Run(orders)
    answers.append({"opened": time.monotonic() - start})
    for name, given in orders["steps"]:
        tell()
        say(name)
        answers.append(getattr(run, name)(**given))
    tell()
    say("over")
    run.close()
    os._exit(0)  # its processes are gone; what they leave behind here is not waited for


if __name__ == "__main__":  # SGLang starts processes by spawn
    main()
