#!/usr/bin/env bash
# transformers 5.24.0: a checkpoint computes one prompt's keys in two ways, by how it came to be bfloat16. The rope's
# frequencies are a buffer that no file has. `from_pretrained(dtype=torch.bfloat16)` keeps them in float32;
# `from_pretrained(dtype=torch.float32).to(torch.bfloat16)`, and `model.half()` likewise, cast them with the weights. A
# frequency of 8 bits turns a key at place 2,000 by up to two radians too much or too little. All weights are equal to
# the last bit, and so are the configurations but for `dtype`: a cache that names keys by these and the weights' own type
# serves one model the other's.
#
# Seen with transformers 5.24.0 and torch 2.13.0 on a CPU, a Llama with random weights: the first layer's keys of the
# same tokens are at most 0.003 of the largest value apart up to the 15th place, 0.03 up to the 127th, and 0.43 behind
# the 2,000th. Fails (exit 1) where that is no longer so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/python" -m pip install -q --no-compile "torch==2.13.0" "transformers==5.24.0" "numpy<2.5"
cd "$folder"
"$folder/env/bin/python" - <<'PY'
import sys

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

SMALL = {
    "vocab_size": 61, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 1,
    "num_key_value_heads": 1, "initializer_range": 0.3, "max_position_embeddings": 4096,
}
print("transformers", transformers.__version__, "torch", torch.__version__)
torch.manual_seed(0)
LlamaForCausalLM(LlamaConfig(**SMALL)).to(torch.bfloat16).save_pretrained("files")
one = LlamaForCausalLM.from_pretrained("files", dtype=torch.bfloat16)
other = LlamaForCausalLM.from_pretrained("files", dtype=torch.float32).to(torch.bfloat16)
weights = one.state_dict(), other.state_dict()
equal = all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0] | weights[1])
types = [model.model.rotary_emb.inv_freq.dtype for model in (one, other)]
alike = one.config.to_dict() | {"dtype": None} == other.config.to_dict() | {"dtype": None}
print("weights equal:", equal, "configurations equal but for dtype:", alike, types)
ids = torch.randint(0, 61, (1, 2100), generator=torch.Generator().manual_seed(0))
with torch.no_grad():
    keys = [model(ids).past_key_values.layers[0].keys[0, 0].float() for model in (one, other)]
apart = (keys[0] - keys[1]).abs().amax(-1) / keys[0].abs().max()
seen = {name: round(float(apart[part].max()), 3) for name, part in
        {"0 to 15": slice(16), "16 to 127": slice(16, 128), "from 2,000": slice(2000, None)}.items()}
print("keys apart, of the largest value, by place:", seen)
sys.exit(not (equal and alike and seen["0 to 15"] < 0.01 and seen["from 2,000"] > 0.2))
PY
