#!/usr/bin/env bash
# PEFT 0.21.2 with transformers 5.24.0: `generate` of a model with prefix tuning is the base model's, and one with
# prompt tuning or P-tuning has its virtual tokens in front of every token of the answer. transformers 5.24.0 renamed
# `past_key_values` to `cache`. Calls with the old name go on to work, but PEFT looks for the cache of `generate` under
# that name, finds none at any step, and takes each for the first. The keys and values of a prefix go to the model
# beside the other cache, and are dropped there with a FutureWarning about two names, which does not say what is lost.
# Virtual tokens are computed again before each token, at later positions, so the cache grows by all of them a token; of
# this nothing is said at all. Calls of the model without `generate`, which training and evaluation are made of, have
# the prefix, so what was tuned looks well until it serves. transformers 5.23.0 is right, and so is 5.24.0 with
# `use_cache=False` for virtual tokens.
#
# Seen with peft 0.21.2, torch 2.13.0 on a CPU and a Llama of random weights, 5 virtual tokens, a prompt of 20 and an
# answer of 6. With 5.23.0 it is that of calls of the whole sequence for all three, and the cache holds 30 tokens. With
# 5.24.0 none is: prefix tuning gives the base model's answer and a cache of 25, the others have 55 in the cache. Fails
# (exit 1) where that is no longer so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/python" -m pip install -q --no-compile "torch==2.13.0" "transformers==5.24.0" "peft==0.21.2" \
    "accelerate==1.15.0" "numpy<2.5"
"$folder/env/bin/python" -m pip install -q --no-compile --no-deps --target "$folder/before" "transformers==5.23.0"
cd "$folder"
cat >tuned.py <<'PY'
import importlib.metadata
import json

import torch
import transformers
from peft import PrefixTuningConfig, PromptEncoderConfig, PromptTuningConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

VIRTUAL, PROMPT, ANSWER = 5, 20, 6
KINDS = {
    "prefix tuning": PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=VIRTUAL),
    "prompt tuning": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=VIRTUAL),
    "P-tuning": PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=VIRTUAL, encoder_hidden_size=32),
}
prompt = torch.randint(3, 61, (1, PROMPT), generator=torch.Generator().manual_seed(1))


def base():
    torch.manual_seed(7)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=61, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.3, bos_token_id=1, eos_token_id=None, pad_token_id=0,
    )).eval()


def tuned(kind):
    model = get_peft_model(base(), kind).eval()
    torch.manual_seed(3)
    for name, values in model.named_parameters():
        if "prompt_encoder" in name and values.ndim == 2:
            values.normal_()
    return model


def generated(model):
    got = model.generate(
        input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=ANSWER, do_sample=False,
        return_dict_in_generate=True,
    )
    cache = getattr(got, "cache", None) or got.past_key_values
    return got.sequences[0, PROMPT:].tolist(), cache.get_seq_length()


def called(model):
    """The answer by calls of the whole sequence."""
    tokens = prompt
    for _ in range(ANSWER):
        logits = model(input_ids=tokens, attention_mask=torch.ones_like(tokens)).logits
        tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], 1)
    return tokens[0, PROMPT:].tolist()


print("peft", importlib.metadata.version("peft"), "transformers", transformers.__version__, "torch", torch.__version__)
seen = {}
with torch.no_grad():
    plain, _ = generated(base())
    for name, kind in KINDS.items():
        model = tuned(kind)
        (answer, held), wanted = generated(model), called(model)
        print(f"{name}: generated {answer}, by calls {wanted}, {held} tokens in the cache; the base model's {plain}")
        seen[name] = [answer == wanted, answer == plain, held]
with open(f"{transformers.__version__}.json", "w") as file:
    json.dump(seen, file)
PY
PYTHONPATH="$folder/before" "$folder/env/bin/python" -W ignore tuned.py 2>"$folder/log" || { tail "$folder/log"; exit 1; }
"$folder/env/bin/python" -W ignore tuned.py 2>"$folder/log" || { tail "$folder/log"; exit 1; }
"$folder/env/bin/python" - <<'PY'
import json
import sys

before, behind = (json.load(open(f"{version}.json")) for version in ("5.23.0", "5.24.0"))
others = dict.fromkeys(("prompt tuning", "P-tuning"), [False, False, 55])
sys.exit(
    before != dict.fromkeys(("prefix tuning", "prompt tuning", "P-tuning"), [True, False, 30])
    or behind != {"prefix tuning": [False, True, 25], **others}
)
PY
