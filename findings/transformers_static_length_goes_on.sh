#!/usr/bin/env bash
# transformers 5.23.0: the length of a `StaticCache`, once asked for, goes on counting. `get_seq_length()` returns the
# layer's own counter, a tensor that the next call of the model adds to in place; of a `DynamicCache`, and of a static
# layer with a window, it is an int. So a length that was taken before a call is that behind it: what the call computed,
# `keys[:, :, before:after]`, is empty, and whoever stores that stores nothing, without an error. `int()` keeps it.
#
# Seen with transformers 5.23.0 and torch 2.13.0 on a CPU, 10 tokens and then 6: the length before the second call is
# 10, and behind it 10 (dynamic), 16 (static) and 10 (static, as an int); 6, 0 and 6 tokens of keys lie between the two
# lengths. The same with 5.24.0. Fails (exit 1) where that is no longer so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/python" -m pip install -q --no-compile "torch==2.13.0" "transformers==5.23.0" "numpy<2.5"
cd "$folder"
"$folder/env/bin/python" - <<'PY'
import sys

import torch
import transformers
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

SMALL = {
    "vocab_size": 61, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
print("transformers", transformers.__version__, "torch", torch.__version__)
model = LlamaForCausalLM(LlamaConfig(**SMALL)).eval()
ids = torch.randint(3, 61, (1, 16), generator=torch.Generator().manual_seed(0))
seen = {}
for name, cache, take in (
    ("dynamic", DynamicCache(config=model.config), lambda length: length),
    ("static", StaticCache(config=model.config, max_cache_len=64), lambda length: length),
    ("static, int", StaticCache(config=model.config, max_cache_len=64), int),
):
    with torch.no_grad():
        model(ids[:, :10], past_key_values=cache)
        before = take(cache.get_seq_length())
        first = int(before)
        model(ids[:, 10:], past_key_values=cache)
    after = cache.get_seq_length()
    seen[name] = first, int(before), cache.layers[0].keys[:, :, before:after].shape[2]
    print(f"{name:11} length {first}, behind the call {int(before)}; {seen[name][2]} tokens from it to the length now")
sys.exit(seen != {"dynamic": (10, 10, 6), "static": (10, 16, 0), "static, int": (10, 10, 6)})
PY
