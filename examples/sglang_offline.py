"""SGLang with gdscache, offline: prompts with a common prefix, which comes from the cache, also after a restart.

    gdscache config init sglang
    python examples/sglang_offline.py MODEL gdscache.yaml

Run it twice: the second run prints the number of tokens of each prompt that came from the SSD. docs/sglang.md lists
supported settings.
"""

from __future__ import annotations

import argparse
import random

import sglang


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder, or a name on the hub")
    parser.add_argument("config", help="a configuration of gdscache without a section `model`")
    parser.add_argument("--tokens", type=int, default=1500, help="tokens of the common prefix")
    parser.add_argument("--page-size", type=int, default=64, help="tokens of a page")
    given = parser.parse_args()

    engine = sglang.Engine(
        model_path=given.model,
        skip_tokenizer_init=True,
        page_size=given.page_size,
        schedule_policy="lpm",
        enable_unified_cache_external_linker=True,
        unified_cache_external_linker_backend="dynamic",
        unified_cache_external_linker_config={
            "linker": "GdsCacheLinker",
            "linker_module_path": "gdscache.integrations.sglang.linker",
            # A lone request waits up to 1 s for the SSD; a busy server never does.
            "linker_extra_config": {"config": given.config, "ssd_wait": 1.0},
        },
    )
    words = random.Random(0)
    prefix = [words.randrange(10, 500) for _ in range(given.tokens)]
    prompts = [[*prefix, *(number,) * 40] for number in (11, 12, 13)]
    sampling = {"max_new_tokens": 8, "temperature": 0.0, "ignore_eos": True}
    for turn in ("first", "SGLang's own cache flushed"):
        for prompt in prompts:
            answer = engine.generate(input_ids=prompt, sampling_params=sampling)
            cached = answer["meta_info"].get("cached_tokens", 0)
            print(f"{turn}: {cached} of {len(prompt)} tokens cached, answer {list(answer['output_ids'])}")
        engine.flush_cache()
    engine.shutdown()


if __name__ == "__main__":  # SGLang starts processes by spawn
    main()
