#!/usr/bin/env bash
# transformers 5.24.0: assisted generation (`prompt_lookup_num_tokens`, `assistant_model`) does not count what a cache
# holds already. Its first call takes the whole prompt and the draft, whatever part of the prompt `past_key_values`
# has, so the cached part is there twice: the prompt is computed behind itself, at later positions, and the answer is
# that of another prompt. Plain `generate` with the same cache computes the rest alone. Nothing is raised or warned of.
# So a second turn of a conversation that keeps its cache loses both its time and its answer by a draft that should not
# change any answer. A cache that is empty is filled as it should be.
#
# Seen with transformers 5.24.0 and torch 2.13.0 on a CPU, a prompt of 60 tokens of a Llama of random weights, of which
# 0, 40 and 59 are cached. Plain: 60, 20 and 1 tokens in the first call, one answer, 65 tokens held. With four tokens of
# lookup 64 in each first call, with another Llama as the assistant 61: with 40 and 59 cached other answers than plain,
# 105 and 124 tokens held. The same with 5.23.0. Fails (exit 1) where that is no longer so.
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
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

transformers.logging.set_verbosity_error()
SMALL = {
    "vocab_size": 61, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "initializer_range": 0.3, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0,
}
print("transformers", transformers.__version__, "torch", torch.__version__)
PROMPT, NEW = 60, 6


def llama(seed):
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**SMALL)).eval()


model = llama(7)
ids = torch.randint(3, 61, (1, PROMPT), generator=torch.Generator().manual_seed(0))
computed = []
model.model.embed_tokens.register_forward_hook(lambda module, given, output: computed.append(given[0].shape[1]))
WAYS = {"plain": {}, "lookup": {"prompt_lookup_num_tokens": 4}, "assistant": {"assistant_model": llama(8)}}
seen, answers = {}, {}
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    for name, way in WAYS.items():
        for cached in (0, 40, 59):
            cache = DynamicCache(config=model.config)
            if cached:
                with torch.no_grad():
                    model(ids[:, :cached], past_key_values=cache)
            computed.clear()
            output = model.generate(
                ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=NEW, do_sample=False,
                **way,
            )
            answers[name, cached] = output[0, PROMPT:].tolist()
            seen[name, cached] = computed[0], cache.get_seq_length()
            print(f"{name:9} {cached:2} cached, {computed[0]} tokens in the first call, {cache.get_seq_length()} held, "
                  f"answer {answers[name, cached]}")
told = [str(warning.message) for warning in said if not issubclass(warning.category, FutureWarning)]
print("warnings:", told)
plain = answers["plain", 0]
good = all(answers["plain", cached] == plain for cached in (40, 59))
for name in ("lookup", "assistant"):
    good &= answers[name, 0] == plain and all(answers[name, cached] != plain for cached in (40, 59))
    first = 64 if name == "lookup" else 61
    good &= [seen[name, cached] for cached in (0, 40, 59)] == [(first, 65), (first, 105), (first, 124)]
good &= [seen["plain", cached] for cached in (0, 40, 59)] == [(60, 65), (20, 65), (1, 65)]
sys.exit(bool(told) or not good)
PY
