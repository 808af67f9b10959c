#!/usr/bin/env bash
# transformers 5.24.0: beam search over MiniMax and RecurrentGemma goes on from the states of other beams. Behind each
# token the beams that survive are moved in the cache (`reorder_cache`), keys, values and states alike. MiniMax's cache
# keeps the states of its linear attention beside its layers, where `reorder_cache` does not look; its
# `batch_repeat_interleave` and `batch_select_indices` do. RecurrentGemma keeps its states in the model's modules, where
# no cache is. So keys are one beam's and states another's, and the answer of `generate(num_beams=...)` is not that of
# the model, which `use_cache=False` gives. As its states are in the model, RecurrentGemma also goes on from those of
# whatever was computed last: a second `generate` while the first one streams (two threads, a server) ends its state,
# and the first goes on with an answer that is neither's. Nothing is raised or warned of. One beam, and one request at a
# time, are right.
#
# Seen with transformers 5.24.0 and torch 2.13.0 on a CPU, random weights, 12 prompts of 20 tokens, 12 tokens each.
# Answers of 3 beams that differ with a cache and without: MiniMax 12, RecurrentGemma 7, Qwen3-Next and Llama 0; of one
# beam 0 each. Of one prompt's answer, in whose middle each of 11 others was answered, RecurrentGemma's is another one
# twice, and those of the three never. The same in 5.23.0. Fails (exit 1) where that is no longer so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/python" -m pip install -q --no-compile "torch==2.13.0" "transformers==5.24.0" "numpy==2.4.6"
cd "$folder"
HF_HUB_OFFLINE=1 "$folder/env/bin/python" - <<'PY'
import sys

import torch
import transformers

print("transformers", transformers.__version__, "torch", torch.__version__)
transformers.logging.set_verbosity_error()
torch.set_num_threads(1)
COMMON = {
    "vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "pad_token_id": 0, "eos_token_id": None,
}
MODELS = {
    "Llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig(intermediate_size=96, **COMMON)),
    "Qwen3-Next": (transformers.Qwen3NextForCausalLM, transformers.Qwen3NextConfig(
        intermediate_size=96, moe_intermediate_size=32, shared_expert_intermediate_size=32, num_experts=4,
        num_experts_per_tok=2, linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=16,
        linear_value_head_dim=16, **COMMON,
    )),
    "MiniMax": (transformers.MiniMaxForCausalLM, transformers.MiniMaxConfig(
        intermediate_size=96, num_local_experts=2, num_experts_per_tok=1, block_size=16,
        layer_types=["linear_attention", "full_attention"] * 2, **COMMON,
    )),
    "RecurrentGemma": (transformers.RecurrentGemmaForCausalLM, transformers.RecurrentGemmaConfig(
        intermediate_size=192, lru_width=64, attention_window_size=256, **COMMON,
    )),
}


def answer(prompt, **options):
    return model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False, **options
    )[0, prompt.shape[1]:].tolist()


class Between:
    """Another prompt is answered when the fifth token comes."""

    def __init__(self, prompt):
        self.prompt, self.come = prompt, 0

    def put(self, token):
        self.come += 1
        if self.come == 5:
            answer(self.prompt)

    def end(self):
        pass


seen = {}
for name, (kind, config) in MODELS.items():
    torch.manual_seed(0)
    model = kind(config).eval()
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.copy_(torch.randn(weight.shape, generator=random) * 0.2)
    model.generation_config.eos_token_id = None
    prompts = torch.randint(1, 128, (12, 1, 20), generator=random)
    differ = [
        sum(answer(prompt, num_beams=beams) != answer(prompt, num_beams=beams, use_cache=False) for prompt in prompts)
        for beams in (1, 3)
    ]
    between = sum(answer(prompts[0], streamer=Between(other)) != answer(prompts[0]) for other in prompts[1:])
    seen[name] = *differ, between
    print(f"{name:14} other answers with a cache: {differ[0]} of 12 with one beam, {differ[1]} of 12 with three; with "
          f"another prompt in between: {between} of 11")
sys.exit(seen["Llama"] != (0, 0, 0) or seen["Qwen3-Next"] != (0, 0, 0) or seen["MiniMax"][0] or not seen["MiniMax"][1]
         or seen["MiniMax"][2] or seen["RecurrentGemma"][0] or not all(seen["RecurrentGemma"][1:]))
PY
