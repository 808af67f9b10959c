#!/usr/bin/env bash
# transformers 5.24.0: a `QuantizedCache` with backend `fp8` takes the scale of each layer from its first call, so that
# the largest key of that call is 448, and keeps it. Larger keys and values that come later are cut to it, and nothing
# says so: torch gives 448 for whatever is larger. So one prompt has another answer by the size of its first piece
# (`prefill_chunk_size`, a short first turn), and a short first piece costs more than float8 itself does. The other
# backends quantise again as they grow. Without quantisation pieces change nothing.
#
# Seen with transformers 5.24.0 and torch 2.13.0 on a CPU, 60 tokens of random weights, a first call of 1, 10 and 59
# tokens and a second one for the rest: 122, 9 and 4 numbers at the limit in the two layers' keys; the logits of the
# rest differ from those of one call by 9.0, 5.2 and 1.1 at most. `generate` in pieces of 1 and 16 tokens and whole
# gives three answers with `fp8` and one without. Fails (exit 1) where that is no longer so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/python" -m pip install -q --no-compile "torch==2.13.0" "transformers==5.24.0" "numpy<2.5"
cd "$folder"
"$folder/env/bin/python" - <<'PY'
import sys
import warnings

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, QuantizedCache

transformers.logging.set_verbosity_error()
warnings.simplefilter("ignore", FutureWarning)
SMALL = {
    "vocab_size": 61, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "initializer_range": 0.3, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0,
}
print("transformers", transformers.__version__, "torch", torch.__version__)
torch.manual_seed(7)
model = LlamaForCausalLM(LlamaConfig(**SMALL)).eval()
ids = torch.randint(3, 61, (1, 60), generator=torch.Generator().manual_seed(0))
cut, off = {}, {}
with torch.no_grad():
    want = model(ids).logits
    for first in (1, 10, 59):
        cache = QuantizedCache("fp8", model.config)
        model(ids[:, :first], past_key_values=cache)
        logits = model(ids[:, first:], past_key_values=cache).logits
        cut[first] = sum(int((layer._quantized_keys[0].float().abs() == 448).sum()) for layer in cache.layers)
        off[first] = float((logits - want[:, first:]).abs().max())
        print(f"first call of {first:2} tokens: {cut[first]} numbers at the limit, logits differ by {off[first]:.1f}")
inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 8}
answers = {}
for quantised in (True, False):
    of_cache = {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}} if quantised else {}
    for piece in (1, 16, None):
        of_piece = {} if piece is None else {"prefill_chunk_size": piece}
        answer = model.generate(**inputs, **of_cache, **of_piece)
        answers[quantised, piece] = tuple(answer[0, 60:].tolist())
        print(f"{'fp8' if quantised else 'not quantised'}, pieces of {piece}: {list(answers[quantised, piece])}")
distinct = [len({answer for (kind, _), answer in answers.items() if kind is quantised}) for quantised in (True, False)]
good = cut[1] > 10 * cut[59] and cut[1] > cut[10] > cut[59] and off[1] > 4 * off[59] and off[10] > 2 * off[59]
sys.exit(not (good and distinct == [3, 1]))
PY
