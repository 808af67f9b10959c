#!/usr/bin/env bash
# transformers 5.24.0: continuous batching shares the pages of equal prompts, and goes on doing so when the model's
# weights have changed. A page's name is made of its tokens and those before it. `generate_batch(...,
# persistent_manager=True)`, which is meant for calls again and again, frees the requests between two calls and keeps
# the names; so does a manager that stays open. A prompt that was answered before a step of training (or a
# `load_state_dict`, a merge) is computed on keys and values of the old weights. Its answer is that of neither model,
# and nothing is said. Sharing is the default. `allow_block_sharing=False`, or
# `destroy_cached_continuous_batching_manager()` behind each change, gives the new model's answer.
#
# Seen with transformers 5.24.0 and torch 2.13.0 on a CPU, a prompt of 300 tokens of a Llama of random weights, then the
# same with the weights of another: the second answer is not what `generate` says with the new weights where pages are
# shared, and is where they are not or the manager is made again. Fails (exit 1) where that is no longer so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/python" -m pip install -q --no-compile "torch==2.13.0" "transformers==5.24.0" "numpy<2.5" \
    "psutil==7.2.2"
cd "$folder"
"$folder/env/bin/python" - <<'PY'
import logging
import sys

import torch
import transformers
from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM

transformers.logging.set_verbosity_error()
logging.disable(logging.WARNING)
SMALL = {
    "vocab_size": 61, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "initializer_range": 0.3, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0,
}
print("transformers", transformers.__version__, "torch", torch.__version__)


def model_of(seed):
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**SMALL)).eval()


prompt = torch.randint(3, 61, (300,), generator=torch.Generator().manual_seed(0)).tolist()
greedy = GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=-1, pad_token_id=0)
old, new = model_of(7), model_of(8)
known = [model.generate(torch.tensor([prompt]), generation_config=greedy)[0, 300:].tolist() for model in (old, new)]
print("generate          old weights", known[0], "new weights", known[1])
seen = {}
for case in ("default", "not shared", "made again"):
    sharing = {"allow_block_sharing": False} if case == "not shared" else {}
    config = ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=512, **sharing)
    model, answers = model_of(7), []
    for weights in (None, new.state_dict()):
        if weights is not None:
            model.load_state_dict(weights)
            if case == "made again":
                model.destroy_cached_continuous_batching_manager()
        (result,) = model.generate_batch(
            [prompt], generation_config=greedy, continuous_batching_config=config, persistent_manager=True,
            progress_bar=False,
        ).values()
        answers.append(result.generated_tokens)
    model.destroy_cached_continuous_batching_manager()
    seen[case] = [answer == want for answer, want in zip(answers, known, strict=True)]
    print(f"batch, {case:10} old weights {answers[0]} new weights {answers[1]}")
sys.exit(known[0] == known[1] or seen != {
    "default": [True, False], "not shared": [True, True], "made again": [True, True],
})
PY
