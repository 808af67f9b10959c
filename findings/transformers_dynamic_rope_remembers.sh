#!/usr/bin/env bash
# transformers 5.23.0: a model with `rope_type: dynamic` answers one prompt in two ways. Its rotary embedding keeps the
# longest length that the model object has served, and rotates shorter prompts by it as long as they are above the
# length of training. So what a prompt's keys are depends on the requests in front of it, and a cache of keys that was
# filled by one process is wrong in another. `longrope` depends on the length of the call alone.
#
# Seen with transformers 5.23.0 and torch 2.13.0 on a CPU: the prompt of 100 tokens, before and behind one of 200 tokens:
# the largest difference of the logits is above 0.1 with `dynamic`, and 0 with `default` and `longrope`.
# Fails (exit 1) where that is no longer so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/python" -m pip install -q "torch==2.13.0" "transformers==5.23.0" "numpy<2.5"
cd "$folder"
"$folder/env/bin/python" - <<'PY'
import sys

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

SMALL = {
    "vocab_size": 61, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "initializer_range": 0.3, "max_position_embeddings": 64,
}
ROPES = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "longrope": {
        "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 64,
        "short_factor": [1.0] * 8, "long_factor": [4.0] * 8,
    },
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
}
print("transformers", transformers.__version__, "torch", torch.__version__)
ids = torch.randint(0, 61, (1, 200), generator=torch.Generator().manual_seed(0))
seen = {}
for name, rope in ROPES.items():
    torch.manual_seed(7)
    model = LlamaForCausalLM(LlamaConfig(**SMALL, rope_parameters=rope)).eval()
    with torch.no_grad():
        before = model(ids[:, :100]).logits
        model(ids)
        behind = model(ids[:, :100]).logits
    seen[name] = float((before - behind).abs().max())
    print(f"{name:9} 100 tokens, before and behind 200: logits differ by {seen[name]:.4f} at most")
sys.exit(not (seen["default"] == 0.0 and seen["longrope"] == 0.0 and seen["dynamic"] > 0.1))
PY
