#!/usr/bin/env bash
# transformers 5.23.0: where the sequence outgrows a `StaticCache`, a layer that keeps all tokens raises, and a model of
# which every layer has a window gives other answers. A sliding layer takes the smaller of window and `max_cache_len` as
# its window and goes on by rolling, so each token attends to `max_cache_len` tokens in place of its window. Nothing is
# raised or warned of, and the length goes on counting beyond `get_max_length()`. Mistral is such a model; with one full
# layer, as in Gemma 3, it raises.
#
# Seen with transformers 5.23.0 and torch 2.13.0 on a CPU, 60 tokens of random weights, windows of 48: with
# `max_cache_len` 48 and 64 Mistral's logits are those of no cache; with 32 those behind the 32nd token differ by 10.9
# at most, and the length says 60 of 32. Gemma 3 and Llama raise an IndexError at the 33rd token. `generate` into a
# cache of 32 answers with other tokens. The same with 5.24.0. Fails (exit 1) where that is no longer so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/python" -m pip install -q --no-compile "torch==2.13.0" "transformers==5.23.0" "numpy<2.5"
cd "$folder"
"$folder/env/bin/python" - <<'PY'
import sys
import warnings

import torch
import transformers
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, MistralConfig, StaticCache

WINDOW, PROMPT, ALL = 48, 20, 60
SMALL = {
    "vocab_size": 61, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "initializer_range": 0.3, "bos_token_id": None, "eos_token_id": None,
}
MODELS = {
    "mistral": MistralConfig(**SMALL, sliding_window=WINDOW),
    "gemma 3": Gemma3TextConfig(
        **SMALL, sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"], pad_token_id=0
    ),
    "llama": LlamaConfig(**SMALL),
}
print("transformers", transformers.__version__, "torch", torch.__version__)
ids = torch.randint(3, 61, (1, ALL), generator=torch.Generator().manual_seed(0))
seen = {}
for name, config in MODELS.items():
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        want = model(ids).logits
    for size in (32, WINDOW, 64):
        cache = StaticCache(config=model.config, max_cache_len=size)
        logits = []
        try:
            with torch.no_grad():
                for start, stop in [(0, PROMPT), *((at, at + 1) for at in range(PROMPT, ALL))]:
                    logits.append(model(ids[:, start:stop], past_key_values=cache).logits)
        except IndexError:
            seen[name, size] = "IndexError", sum(part.shape[1] for part in logits)
        else:
            off = (torch.cat(logits, 1) - want).abs().amax((0, 2))
            wrong = [at for at, value in enumerate(off.tolist()) if value > 0.01]
            seen[name, size] = f"{off.max():.2f}", wrong[0] if wrong else None
            assert int(cache.get_seq_length()) == ALL
        print(f"{name:8} max_cache_len {size}: {seen[name, size][0]}, first at token {seen[name, size][1]}; "
              f"length {int(cache.get_seq_length())} of {cache.get_max_length()}")
    if name == "mistral":
        inputs = {"input_ids": ids[:, :PROMPT], "attention_mask": torch.ones_like(ids[:, :PROMPT])}
        answers = []
        for size in (64, 32):
            cache = StaticCache(config=model.config, max_cache_len=size)
            with warnings.catch_warnings():
                warnings.filterwarnings("error", message=".*(cache|length).*")
                answer = model.generate(**inputs, past_key_values=cache, max_new_tokens=30, do_sample=False)
            answers.append(answer[0, PROMPT:].tolist())
            print(f"{name:8} generate into {size}: {answers[-1]}")
good = answers[0][:12] == answers[1][:12] and answers[0] != answers[1]
for (name, size), (what, at) in seen.items():
    if name != "mistral":
        good &= (what, at) == ("IndexError", size) if size < ALL else float(what) < 0.01
    elif size < WINDOW:
        good &= at == size and float(what) > 1
    else:
        good &= at is None
sys.exit(not good)
PY
