#!/usr/bin/env bash
# transformers 5.24.0: `crop` takes tokens back from keys, values and convolutions, and leaves recurrent states as they
# are. A cache of a hybrid model refuses `crop` at first, with the advice to call `activate_past_recording` before it.
# Whoever does has no more error: the length is what it should be, and what comes next is computed on states that have
# seen the tokens which were taken back (a draft that was refused, an answer that is wanted again). Only `is_croppable`,
# which `crop` does not look at, says that it cannot be. LFM2, which has convolutions alone, and windows are taken back
# well.
#
# Seen with transformers 5.24.0 and torch 2.13.0 on a CPU, random weights: 30 tokens, six more, `crop(-6)`, then 30; the
# largest difference of the last 30 tokens' logits to those of one call. Qwen3-Next 7.4, Falcon-H1 7.4, Bamba 0.4; LFM2
# and Mistral below 0.001, and all five without the six tokens and the crop. Fails (exit 1) where that is no longer so.
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
from transformers import (
    AutoModelForCausalLM, BambaConfig, DynamicCache, FalconH1Config, Lfm2Config, MistralConfig, Qwen3NextConfig,
)

transformers.logging.set_verbosity_error()
warnings.simplefilter("ignore", FutureWarning)
HALF, DRAFT, ALL, CLOSE, OFF = 30, 6, 60, 1e-3, 0.1
SMALL = {
    "vocab_size": 61, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "initializer_range": 0.3, "eos_token_id": None,
}
MAMBA = {"mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_chunk_size": 16}
MODELS = {
    "qwen3-next": Qwen3NextConfig(
        **SMALL, head_dim=16, layer_types=["linear_attention", "full_attention"], linear_num_value_heads=4,
        linear_num_key_heads=2, linear_key_head_dim=16, linear_value_head_dim=16, num_experts=2, num_experts_per_tok=1,
        moe_intermediate_size=32, shared_expert_intermediate_size=32,
    ),
    "falcon-h1": FalconH1Config(**SMALL, **MAMBA, head_dim=16, mamba_d_ssm=64, mamba_n_heads=4),
    "bamba": BambaConfig(**SMALL, **MAMBA, attn_layer_indices=[1], mamba_n_heads=8),
    "lfm2": Lfm2Config(**SMALL, layer_types=["conv", "full_attention"]),
    "mistral": MistralConfig(**SMALL, sliding_window=24),
}
print("transformers", transformers.__version__, "torch", torch.__version__)
ids = torch.randint(3, 61, (1, ALL), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def behind_half(model, draft):
    """The logits of the second half, behind the first and `draft` tokens that were taken back; the cache."""
    cache = DynamicCache(config=model.config)
    cache.activate_past_recording()
    for start, stop in ((0, HALF), (HALF, HALF + draft), (HALF, ALL)):
        if stop > start:
            positions = torch.arange(start, stop).unsqueeze(0)
            logits = model(ids[:, start:stop], past_key_values=cache, position_ids=positions).logits
            cache.crop(-draft if stop == HALF + draft > HALF else 0)
    return logits, cache


good = True
for name, config in MODELS.items():
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        want = model(ids).logits[:, HALF:]
        plain = DynamicCache(config=model.config)
        model(ids[:, :HALF], past_key_values=plain)
    try:
        plain.crop(-1)
        refused = "no error"
    except RuntimeError as error:
        refused = "activate_past_recording" in str(error)
    off = [float((behind_half(model, draft)[0] - want).abs().max()) for draft in (DRAFT, 0)]
    cache = behind_half(model, DRAFT)[1]
    print(f"{name:10} advised to record: {refused}; length {cache.get_seq_length()}, croppable {cache.is_croppable}; "
          f"logits differ by {off[0]:.4f}, without a draft by {off[1]:.4f}")
    recurrent = name in ("qwen3-next", "falcon-h1", "bamba")
    good &= refused is True and cache.get_seq_length() == ALL and cache.is_croppable is not recurrent
    good &= (off[0] > OFF) is recurrent and off[1] < CLOSE and (recurrent or off[0] < CLOSE)
sys.exit(not good)
PY
