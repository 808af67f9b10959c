#!/usr/bin/env bash
# PEFT 0.21.2 with transformers 5.24.0: `generate` with an activated LoRA (aLoRA) and a prompt in pieces adapts tokens
# that should be the base model's. Such an adapter begins at its invocation tokens, so that keys and values in front of
# them are interchangeable with the base model's, as its documentation promises: they are what base and adapters share
# in a cache. `generate` counts once how many tokens there are from the invocation to the prompt's end, and each call of
# the model takes this many of its own last tokens for activated. With `prefill_chunk_size` these are the end of each
# piece, or all of it. So keys in front of the invocation are the adapter's, those behind it are computed on them, and
# whoever stores them for the base model stores wrong ones. With drafts (`prompt_lookup_num_tokens`) the adapter begins
# too late by their length, and with `use_cache=False` by one more token each step. Nothing is raised or warned of. The
# prompt in one call is right, and so is the rest of it behind a cache that ends in front of the invocation.
#
# Seen with peft 0.21.2, transformers 5.24.0 and torch 2.13.0 on a CPU, a Llama of random weights, 60 tokens, the
# invocation at token 40. Tokens whose keys differ from the base model's, in front of the invocation and behind it: 0
# and 20 in one call, 28 and 20 in pieces of 32, 40 and 20 in pieces of 20 and of 1, 0 and 17 with 3 tokens of lookup.
# All but the first have another answer, `use_cache=False` too. The base model has one answer in all these ways. Fails
# (exit 1) where that is no longer so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/python" -m pip install -q --no-compile "torch==2.13.0" "transformers==5.24.0" "peft==0.21.2" \
    "accelerate==1.15.0" "numpy<2.5"
cd "$folder"
"$folder/env/bin/python" - <<'PY'
import sys
import warnings

import peft
import torch
import transformers
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

transformers.logging.set_verbosity_error()
warnings.simplefilter("ignore", FutureWarning)
SMALL = {
    "vocab_size": 61, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "initializer_range": 0.3, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0,
}
LENGTH, INVOKED = 60, 40
print("peft", peft.__version__, "transformers", transformers.__version__, "torch", torch.__version__)
torch.manual_seed(7)
config = LoraConfig(
    task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "k_proj", "v_proj"], alora_invocation_tokens=[1, 2],
)
model = get_peft_model(LlamaForCausalLM(LlamaConfig(**SMALL)).eval(), config).eval()
for name, weight in model.named_parameters():
    if "lora_" in name:
        weight.data.normal_(0, 0.3)
ids = torch.randint(3, 61, (1, LENGTH), generator=torch.Generator().manual_seed(0))
ids[0, INVOKED : INVOKED + 2] = torch.tensor([1, 2])


def generate(**options):
    """The keys of the prompt's tokens in the last layer, and the answer."""
    said = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=8,
        return_dict_in_generate=True, **options,
    )
    keys = said.past_key_values.layers[-1].keys[0, :, :LENGTH] if options.get("use_cache", True) else None
    return keys, said.sequences[0, LENGTH:].tolist()


WAYS = {
    "one call": {}, "pieces of 32": {"prefill_chunk_size": 32}, "pieces of 20": {"prefill_chunk_size": 20},
    "pieces of 1": {"prefill_chunk_size": 1}, "3 tokens of lookup": {"prompt_lookup_num_tokens": 3},
    "no cache": {"use_cache": False},
}
with model.disable_adapter():
    base, of_base = generate()[0], {str(generate(**options)[1]) for options in WAYS.values()}
seen, answers = {}, {}
for name, options in WAYS.items():
    keys, answers[name] = generate(**options)
    if keys is not None:
        other = (keys - base).abs().amax((0, 2)) > 1e-3
        seen[name] = int(other[:INVOKED].sum()), int(other[INVOKED:].sum())
    print(f"{name:18} keys that are not the base model's: {seen.get(name, 'none held')}, answer {answers[name]}")
print("answers of the base model:", *of_base)
good = all((answers[name] == answers["one call"]) == (name == "one call") for name in WAYS) and len(of_base) == 1
sys.exit(not good or seen != {
    "one call": (0, 20), "pieces of 32": (28, 20), "pieces of 20": (40, 20), "pieces of 1": (40, 20),
    "3 tokens of lookup": (0, 17),
})
PY
