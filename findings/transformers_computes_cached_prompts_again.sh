#!/usr/bin/env bash
# transformers 5.23.0: `generate` with a cache of the whole prompt computes the prompt again, behind itself. It slices
# the last `prompt - cached` tokens off as new, and a slice of 0 or fewer counts from the other end: a cache that holds
# the whole prompt has all of it computed once more, and one that holds n tokens beyond it (the answer is wanted again)
# has all but its first n. Nothing is raised or warned of; the cache keeps the tokens twice, and the
# answer is that of another prompt. A cache of all tokens but the last answers as without one.
#
# Seen with transformers 5.23.0 and torch 2.13.0 on a CPU, a prompt of 20 tokens of a Llama of random weights, by cached
# tokens: 0, 10 and 19: 20, 10 and 1 tokens computed, the same answer, 25 tokens held. 20, 21 and 25: 20, 19 and 15
# tokens computed, other answers, 45 tokens held. The same with 5.24.0. Fails (exit 1) where that is no longer so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/python" -m pip install -q --no-compile "torch==2.13.0" "transformers==5.23.0" "numpy<2.5"
cd "$folder"
"$folder/env/bin/python" - <<'PY'
import sys
import warnings

import torch
import transformers
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

SMALL = {
    "vocab_size": 61, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "initializer_range": 0.3, "bos_token_id": None, "eos_token_id": None,
}
print("transformers", transformers.__version__, "torch", torch.__version__)
torch.manual_seed(7)
model = LlamaForCausalLM(LlamaConfig(**SMALL)).eval()
prompt = torch.randint(3, 61, (1, 20), generator=torch.Generator().manual_seed(0))
inputs = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt), "max_new_tokens": 6, "do_sample": False}
known = model.generate(**inputs)
computed = []
model.model.register_forward_pre_hook(
    lambda module, args, given: computed.append(given["input_ids"].shape[1]), with_kwargs=True
)
seen = {}
for tokens in (0, 10, 19, 20, 21, 25):
    cache = DynamicCache(config=model.config)
    if tokens:
        with torch.no_grad():
            model(known[:, :tokens], past_key_values=cache)
    computed.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        answer = model.generate(**inputs, past_key_values=cache)
    seen[tokens] = computed[0], bool((answer == known).all()), cache.get_seq_length()
    print(f"{tokens:2} tokens cached: first call of {computed[0]:2} tokens, answer {answer[0, 20:].tolist()}, "
          f"{cache.get_seq_length()} tokens held")
sys.exit(seen != {
    0: (20, True, 25), 10: (10, True, 25), 19: (1, True, 25),
    20: (20, False, 45), 21: (19, False, 45), 25: (15, False, 45),
})
PY
