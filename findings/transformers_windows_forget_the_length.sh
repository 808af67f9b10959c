#!/usr/bin/env bash
# transformers 5.23.0: a `DynamicCache` that is made again from its own items begins at another position. The items of a
# cache are K, V and window of each layer, and `DynamicCache(items)` takes them, so they look like what to save. But a
# sliding layer holds window - 1 tokens, and its length is not among the items: behind it the next token is number
# window - 1. Where the model's first layer slides (Mistral; Gemma 3 and gpt-oss have that order), this is the position
# of every layer, and the answers are wrong without an error. Prompts shorter than the window are restored well.
#
# Seen with transformers 5.23.0 and torch 2.13.0 on a CPU, windows of 24 tokens: behind 20 tokens the logits of the next
# ten are the same bits; behind 100 the length is 23, and the logits differ by 10.8 (Mistral) and 0.5 (Gemma 3) at
# most. The same with `config=`, and with transformers 5.24.0. Fails (exit 1) where that is no longer so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/python" -m pip install -q --no-compile "torch==2.13.0" "transformers==5.23.0" "numpy<2.5"
cd "$folder"
"$folder/env/bin/python" - <<'PY'
import copy
import sys

import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache, Gemma3TextConfig, MistralConfig

WINDOW = 24
SMALL = {
    "vocab_size": 61, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "initializer_range": 0.3, "sliding_window": WINDOW,
}
MODELS = {
    "mistral": MistralConfig(**SMALL),
    "gemma 3": Gemma3TextConfig(**SMALL, layer_types=["sliding_attention", "full_attention"]),
}
print("transformers", transformers.__version__, "torch", torch.__version__)
ids = torch.randint(3, 61, (1, 110), generator=torch.Generator().manual_seed(0))
good = True
for name, config in MODELS.items():
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config).eval()
    for tokens in (20, 100):
        with torch.no_grad():
            cache = DynamicCache(config=model.config)
            model(ids[:, :tokens], past_key_values=cache)
            again = DynamicCache(list(cache))
            of_config = DynamicCache([(layer.keys, layer.values) for layer in cache.layers], config=model.config)
            lengths = [held.get_seq_length() for held in (cache, again, of_config)]
            behind = ids[:, tokens : tokens + 10]
            want, *got = (
                model(behind, past_key_values=held).logits for held in (copy.deepcopy(cache), again, of_config)
            )
        off = [float((logits - want).abs().max()) for logits in got]
        print(f"{name} behind {tokens} tokens: lengths {lengths}, logits differ by {off[0]:.2f}, {off[1]:.2f} at most")
        if tokens < WINDOW:
            good &= lengths == [tokens] * 3 and off == [0.0, 0.0]
        else:
            good &= lengths == [tokens, WINDOW - 1, WINDOW - 1] and min(off) > 0.1
sys.exit(not good)
PY
