#!/usr/bin/env bash
# transformers 5.24.0: a Falcon that is asked for its attentions attends to later tokens. The default attention is sdpa.
# With `output_attentions=True` the layers compute the products themselves and add the mask to them. The mask is made for
# sdpa, of booleans: True adds 1 to a product, False adds 0, and no token is hidden. So each token of a prompt attends to
# all of them, and to padding. The logits change, `generate` gives other tokens, the keys and values that are cached are
# of such a pass, and the attentions that are returned have weights above the diagonal. Nothing is said. With
# `attn_implementation="eager"` or with alibi (Falcon-RW) a Falcon attends to earlier tokens alone, asked or not.
#
# Seen with transformers 5.24.0 and torch 2.13.0 on a CPU, with Falcons of random weights in the layouts of 7B and 40B:
# another last token of a prompt changes the first token's logits where attentions are asked for with sdpa, also beside a
# padded row, and `generate` answers otherwise than without them. Fails (exit 1) where that is no longer so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/python" -m pip install -q --no-compile "torch==2.13.0" "transformers==5.24.0" "numpy<2.5"
cd "$folder"
"$folder/env/bin/python" - <<'PY'
import logging
import sys

import torch
import transformers
from transformers import FalconConfig, FalconForCausalLM

transformers.logging.set_verbosity_error()
logging.disable(logging.WARNING)
SMALL = {
    "vocab_size": 61, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "initializer_range": 0.3,
    "bos_token_id": 1, "eos_token_id": None,
}
print("transformers", transformers.__version__, "torch", torch.__version__)
kinds = {
    "7B's": {}, "40B's": {"new_decoder_architecture": True, "num_kv_heads": 2}, "alibi": {"alibi": True},
}
prompt = torch.randint(3, 61, (1, 12), generator=torch.Generator().manual_seed(0))
other = prompt.clone()
other[0, -1] = 60 if prompt[0, -1] != 60 else 59
row = torch.cat([torch.tensor([[0]]), prompt[:, 1:]], 1)  # of a batch: its first token is padding
seen = {}
for kind, more in kinds.items():
    for kernel in ("sdpa", "eager"):
        torch.manual_seed(0)
        config = FalconConfig(**SMALL, **more)
        model = FalconForCausalLM._from_config(config, attn_implementation=kernel).eval()
        found = []
        with torch.no_grad():
            for asked in (False, True):
                one, two = (model(ids, output_attentions=asked).logits[0, 0] for ids in (prompt, other))
                moved = (one - two).abs().max().item()
                answer = model.generate(
                    prompt, max_new_tokens=6, do_sample=False, pad_token_id=0, output_attentions=asked,
                    return_dict_in_generate=True,
                ).sequences[0, 12:].tolist()  # of the answers, alibi's are not compared: sums round otherwise
                found.append((moved > 1e-3, answer))
                print(f"{kind:6} {kernel:5} attentions asked for: {asked!s:5} first logits move by {moved:.4f}, {answer}")
            if kernel == "sdpa":
                batch, mask = torch.cat([prompt, row]), torch.ones(2, 12, dtype=torch.long)
                mask[1, 0] = 0
                padded = [
                    model(ids, attention_mask=mask, output_attentions=True).logits[0, 0]
                    for ids in (batch, torch.cat([other, row]))
                ]
                print(f"{kind:6} {kernel:5} beside a padded row: {(padded[0] - padded[1]).abs().max().item():.4f}")
                found.append(((padded[0] - padded[1]).abs().max().item() > 1e-3, []))
        seen[kind, kernel] = [later for later, _ in found], kind == "alibi" or found[0][1] == found[1][1]
sys.exit(seen != {
    ("7B's", "sdpa"): ([False, True, True], False), ("7B's", "eager"): ([False, False], True),
    ("40B's", "sdpa"): ([False, True, True], False), ("40B's", "eager"): ([False, False], True),
    ("alibi", "sdpa"): ([False, False, False], True), ("alibi", "eager"): ([False, False], True),
})
PY
