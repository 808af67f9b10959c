#!/usr/bin/env bash
# kvpress 0.5.5 with transformers 5.2.0: `generate` with `prefill_chunk_size` inside a press compresses the first chunk
# alone, and the tokens of later chunks attend to tokens behind them. A press acts where a call begins at the first
# position. Behind it the cache is shorter than the positions say, and the causal mask of the next chunk is made of
# positions: a token sees as many tokens ahead of it as were dropped. So keys, values and answers are those of no causal
# model, and a ratio of 0.5 is one of a quarter for a prompt of two chunks. Nothing is raised or warned of. Without a
# press chunks change nothing, and a press with the prompt in one call keeps the order.
#
# Seen with kvpress 0.5.5 (`KnormPress`, ratio 0.5), transformers 5.2.0 and torch 2.13.0 on a CPU, two prompts of 64
# tokens that differ in the last one, a Llama of random weights. Tokens before the last whose keys of the second layer
# differ: none without a press, whole or in chunks of 32 and 16, and none with one in one call; with a press 15 in
# chunks of 32, from token 47 on, and 7 in chunks of 16, from token 55 on. Of the prompt 32 tokens are held in one call,
# 48 in chunks of 32, 56 in chunks of 16. Fails (exit 1) where that is no longer so. kvpress imports `datasets` for a
# press that is not used here; an empty module takes its place.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/python" -m pip install -q --no-compile "torch==2.13.0" "transformers==5.2.0" "numpy<2.5" \
    "requests==2.34.2" "cachetools==5.5.2" "fire==0.6.0" "tqdm==4.70.1"
"$folder/env/bin/python" -m pip install -q --no-compile --no-deps "kvpress==0.5.5"
cd "$folder"
"$folder/env/bin/python" - <<'PY'
import contextlib
import importlib.machinery
import importlib.metadata
import sys
import types

import torch
import transformers
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

transformers.logging.set_verbosity_error()
sys.modules["datasets"] = datasets = types.ModuleType("datasets")
datasets.__spec__, datasets.load_dataset = importlib.machinery.ModuleSpec("datasets", None), None
from kvpress import KnormPress

SMALL = {
    "vocab_size": 61, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "initializer_range": 0.3, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0,
}
print("kvpress", importlib.metadata.version("kvpress"), "transformers", transformers.__version__)
torch.manual_seed(7)
model = LlamaForCausalLM(LlamaConfig(**SMALL)).eval()
prompt = torch.randint(3, 61, (1, 64), generator=torch.Generator().manual_seed(0))
other = prompt.clone()
other[0, -1] = 3 + (other[0, -1] - 2) % 58


computed = []
model.model.layers[1].self_attn.k_proj.register_forward_hook(lambda module, given, keys: computed.append(keys[0]))


def keys(tokens, chunk, press):
    """The second layer's keys of the prompt as they were computed, and how many tokens are held behind it."""
    cache = DynamicCache(config=model.config)
    computed.clear()
    with KnormPress(compression_ratio=0.5)(model) if press else contextlib.nullcontext():
        pieces = {"prefill_chunk_size": chunk} if chunk else {}
        model.generate(
            tokens, attention_mask=torch.ones_like(tokens), past_key_values=cache, max_new_tokens=1, do_sample=False,
            **pieces,
        )
    return torch.cat(computed), cache.layers[1].keys.shape[2]


seen = {}
for press in (False, True):
    for chunk in (None, 32, 16):
        (one, held), (two, _) = keys(prompt, chunk, press), keys(other, chunk, press)
        assert len(one) == 64
        changed = ((one - two).abs().amax(1) > 1e-4).tolist()
        seen[press, chunk] = held, sum(changed[:-1])
        print(f"{'press' if press else 'plain'}, chunks of {chunk}: {held} tokens held; keys of {sum(changed[:-1])} "
              f"tokens differ besides the last, the first of all that differ is {changed.index(True)}")
plain = [seen[False, chunk] for chunk in (None, 32, 16)]
held = [seen[True, chunk][0] for chunk in (None, 32, 16)]
ahead = [seen[True, chunk][1] for chunk in (None, 32, 16)]
sys.exit(plain != [(64, 0)] * 3 or held != [32, 48, 56] or ahead[0] > 0 or min(ahead[1:]) < 5)
PY
