#!/usr/bin/env bash
# transformers 5.24.0: a `QuantizedCache` (backend `quanto`; `hqq` has the same class) does with its last tokens, which
# are not quantised yet, what is asked of all. `batch_select_indices` moves their rows and leaves the quantised ones in
# place, so each row has one sequence's beginning and another's end. `crop` takes tokens off them alone, as many as
# there are, and leaves the length as it was: the next token is computed at a position too far. Nothing is raised or
# warned of as long as one token waits to be quantised; with none both raise an IndexError. `is_croppable`, which `crop`
# does not look at, says no to the second one in 5.24.0 (yes in 5.23.0); nothing says so of the first. `reorder_cache`,
# of beams, moves both. A batch from which a request has gone is selected, an answer that is wanted again is cropped.
#
# Seen with transformers 5.24.0, optimum-quanto 0.2.7 and torch 2.13.0 on a CPU, two rows of 30 tokens and ten more, one
# by one. Rows exchanged: the next logits differ by 6.9 at most from those of a cache that was filled so, and below
# 0.001 with `reorder_cache`. `crop(-4)`: length 40, 7.9; `crop(-12)`: length 40, ten tokens gone. A `DynamicCache` has
# lengths of 36 and 28, and differences below 0.001, each time. Fails (exit 1) where that is no longer so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/python" -m pip install -q --no-compile "torch==2.13.0" "transformers==5.24.0" "numpy<2.5"
"$folder/env/bin/python" -m pip install -q --no-compile --no-deps "optimum-quanto==0.2.7" "ninja==1.13.2"
cd "$folder"
"$folder/env/bin/python" - <<'PY'
import importlib.metadata
import sys
import warnings

import torch
import transformers
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, QuantizedCache

transformers.logging.set_verbosity_error()
warnings.simplefilter("ignore", FutureWarning)
SMALL = {
    "vocab_size": 61, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "initializer_range": 0.3, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0,
}
PROMPT, ALL, CLOSE = 30, 40, 1e-3
quanto = importlib.metadata.version("optimum-quanto")
print("transformers", transformers.__version__, "optimum-quanto", quanto, "torch", torch.__version__)
torch.manual_seed(7)
model = LlamaForCausalLM(LlamaConfig(**SMALL)).eval()
ids = torch.randint(3, 61, (2, ALL + 1), generator=torch.Generator().manual_seed(0))
SWAP = torch.tensor([1, 0])


def filled(kind, rows, length):
    """A cache behind a prompt and tokens one by one, which wait to be quantised."""
    cache = DynamicCache(config=model.config)
    if kind == "quantised":
        cache = QuantizedCache("quanto", model.config, nbits=4, q_group_size=16, residual_length=64)
    with torch.no_grad():
        model(rows[:, :PROMPT], past_key_values=cache)
        for at in range(PROMPT, length):
            model(rows[:, at : at + 1], past_key_values=cache)
    return cache


def off(cache, other, rows):
    """The largest difference of the next token's logits behind two caches that should be alike."""
    with torch.no_grad():
        one, two = (model(rows[:, ALL:], past_key_values=held).logits for held in (cache, other))
    return float((one - two).abs().max())


seen = {}
for kind in ("dynamic", "quantised"):
    cropped, twice = filled(kind, ids, ALL), filled(kind, ids, ALL)
    assert cropped.is_croppable == (kind == "dynamic")
    cropped.crop(-4)
    twice.crop(-12)
    selected, reordered = filled(kind, ids, ALL), filled(kind, ids, ALL)
    selected.batch_select_indices(SWAP)
    reordered.reorder_cache(SWAP)
    lengths = cropped.get_seq_length(), twice.get_seq_length()
    waiting = cropped.layers[0].keys.shape[2], twice.layers[0].keys.shape[2]
    diffs = (
        off(cropped, filled(kind, ids, ALL - 4), ids), off(selected, filled(kind, ids[SWAP], ALL), ids[SWAP]),
        off(reordered, filled(kind, ids[SWAP], ALL), ids[SWAP]),
    )
    seen[kind] = lengths, waiting, [diff < CLOSE for diff in diffs]
    print(f"{kind:9} lengths behind crop(-4), crop(-12): {lengths}, of them not quantised {waiting}; logits off by "
          f"{diffs[0]:.4f} (crop), {diffs[1]:.4f} (batch_select_indices), {diffs[2]:.4f} (reorder_cache)")
sys.exit(seen != {
    "dynamic": ((36, 28), (36, 28), [True, True, True]), "quantised": ((40, 40), (6, 0), [False, False, True]),
})
PY
