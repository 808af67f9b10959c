#!/usr/bin/env bash
# mlx-lm 0.32.2: behind an answer with a draft model, a prompt cache holds less than was answered. `generate_step`
# leaves all tokens that it yields in `prompt_cache`. `speculative_generate_step` leaves the last one out where the
# model itself chose it, which is the rule where drafts are refused: it would be computed in the next round. Who goes on
# with the next turn alone (`mlx_lm.chat` does so) has it computed one position too early, behind an answer that lacks
# its last token. With `kv_bits` it is much worse: the quantised cache takes the place of the old one in a copy of the
# list, so the list that was passed keeps the old one, as long as it was when quantisation began, and all tokens behind
# that are lost. Nothing is raised or warned of. The server keeps such caches (`LRUPromptCache`) under all tokens of
# prompt and answer, so the next turn of a conversation takes them for that. Where a draft was used, compare the cache's
# `offset` with the number of tokens, and compute the rest again; do not keep one with `kv_bits`.
#
# Seen with mlx-lm 0.32.2 and mlx 0.32.4 on a CPU, two Llamas of random weights, prompts of 40 tokens and answers of 20,
# which are equal with and without a draft. Held behind them: 60 without, 59 with a draft, 39 with a draft and
# quantisation from token 30 on. The next turn of 10 tokens answers as without any cache behind a plain answer, and
# otherwise behind one with a draft. `LRUPromptCache` that is given the cache under its 60 tokens answers a prompt of 70
# otherwise as well. Fails (exit 1) where that is no longer so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/python" -m pip install -q --no-compile "mlx[cpu]==0.32.4" "numpy==2.4.6" \
    "transformers==5.24.0" "jinja2==3.1.6"
"$folder/env/bin/python" -m pip install -q --no-compile --no-deps "mlx-lm==0.32.2"
cd "$folder"
"$folder/env/bin/python" - <<'PY'
import importlib.metadata
import sys

import mlx.core as mx
import mlx.utils
import numpy as np
from mlx_lm.generate import generate_step, speculative_generate_step
from mlx_lm.models import llama
from mlx_lm.models.cache import LRUPromptCache, make_prompt_cache

print("mlx-lm", importlib.metadata.version("mlx-lm"), "mlx", importlib.metadata.version("mlx"))


def model(seed):
    mx.random.seed(seed)
    made = llama.Model(llama.ModelArgs(
        model_type="llama", hidden_size=64, num_hidden_layers=2, intermediate_size=96, num_attention_heads=2,
        num_key_value_heads=1, head_dim=64, rms_norm_eps=1e-6, vocab_size=64,
    ))
    made.update(mlx.utils.tree_map(
        lambda weight: mx.random.normal(weight.shape) * 1.2 / weight.shape[-1] ** 0.5 if weight.ndim > 1 else weight,
        made.parameters(),
    ))
    return made


target, draft = model(0), model(5)


def plain(prompt, tokens, **options):
    return [token for token, _ in generate_step(mx.array(prompt), target, max_tokens=tokens, **options)]


def drafted(prompt, tokens, **options):
    answer = speculative_generate_step(mx.array(prompt), target, draft, max_tokens=tokens, **options)
    return [token for token, _, _ in answer]


tokens = np.random.default_rng(0).integers(1, 64, 50).tolist()
prompt, turn = tokens[:40], tokens[40:]
bits = {"kv_bits": 8, "quantized_kv_start": 30}
seen = {}
for name, answer, options in (
    ("plain", plain, {}), ("plain, bits", plain, bits), ("draft", drafted, {}), ("draft, bits", drafted, bits),
):
    cache = make_prompt_cache(target) + (make_prompt_cache(draft) if answer is drafted else [])
    first = answer(prompt, 20, prompt_cache=cache, **options)
    held = {layer.offset for layer in cache[:2]}
    kept = LRUPromptCache()
    kept.insert_cache("model", prompt + first, cache)
    found, rest = kept.fetch_nearest_cache("model", prompt + first + turn)
    fresh = plain(prompt + first + turn, 10, **options)
    second, third = (answer(new, 10, prompt_cache=old, **options) for new, old in ((turn, cache), (rest, found)))
    seen[name] = held, second == fresh, third == fresh
    print(f"{name:12} held: {held} of {len(prompt + first)}; the next turn answers as without a cache: "
          f"{second == fresh}; out of LRUPromptCache: {third == fresh}")
    assert first == plain(prompt, 20, **options) and len(rest) == len(turn)
sys.exit(seen.pop("plain, bits")[0] != {60} or seen != {
    "plain": ({60}, True, True), "draft": ({59}, False, False), "draft, bits": ({39}, False, False),
})
PY
