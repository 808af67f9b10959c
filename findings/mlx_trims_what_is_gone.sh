#!/usr/bin/env bash
# mlx-lm 0.32.2: two of its caches are cut where what lies in front of the cut is gone. Llama 4's `ChunkedKVCache` keeps
# the last `attention_chunk_size` tokens and says of any length that it can be trimmed. `trim_prompt_cache` takes tokens
# off at the end; those in front, which belong to the chunk of the cut, do not come back. The cut may lie in front of
# all that is held: then these layers go on at another position than the others, while the answer is the number asked
# for or the first layer's. `LRUPromptCache`, the server's, cuts so for each prompt that shares a beginning with a
# longer one. The other way round, a window (`RotatingKVCache`: Gemma 3, gpt-oss) says that it cannot be cut once it is
# full, and `trim_prompt_cache` then answers 0 and cuts no layer at all. Speculative decoding asks before the prompt,
# when nothing is full yet, and does not look at the answer: from the window's length on each refused token stays in all
# layers, and a draft changes the answer. Nothing is raised or warned of. (ml-explore/mlx-lm pull request 1427 on the
# second was closed.) Keep no prompt of Llama 4 that is longer than a chunk, and use no drafts beyond a window.
#
# Seen with mlx-lm 0.32.2 and mlx 0.32.4 on a CPU, random weights. Llama 4 with chunks of 32, 100 tokens in calls of 20,
# cut and gone on with 20 tokens, out of `LRUPromptCache`: at 90 and 70 the logits are those of no cache; at 63, 50 and
# 30 they differ by 2.9, 4.4 and 7.3. Gemma 3 with windows of 32, 60 tokens of answer: behind a prompt of 10 the answer
# with a draft is another one from token 22 on, behind 60 from token 1 on; with windows of 256 it is equal. Fails (exit
# 1) where that is no longer so.
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
from mlx_lm.models import gemma3_text, llama4
from mlx_lm.models.cache import LRUPromptCache, make_prompt_cache

print("mlx-lm", importlib.metadata.version("mlx-lm"), "mlx", importlib.metadata.version("mlx"))


def filled(model, seed):
    mx.random.seed(seed)
    model.update(mlx.utils.tree_map(
        lambda weight: mx.random.normal(weight.shape) * 1.2 / weight.shape[-1] ** 0.5 if weight.ndim > 1 else weight,
        model.parameters(),
    ))
    return model


def gemma(seed, window):
    return filled(gemma3_text.Model(gemma3_text.ModelArgs(
        model_type="gemma3_text", hidden_size=64, num_hidden_layers=4, intermediate_size=96, num_attention_heads=4,
        head_dim=16, num_key_value_heads=2, vocab_size=64, sliding_window=window, sliding_window_pattern=2,
    )), seed)


chunked = filled(llama4.Model(llama4.ModelArgs.from_dict({"model_type": "llama4", "text_config": {
    "model_type": "llama4_text", "attention_bias": False, "attention_chunk_size": 32, "head_dim": 16, "hidden_size": 64,
    "interleave_moe_layer_step": 2, "intermediate_size": 64, "intermediate_size_mlp": 96,
    "max_position_embeddings": 4096,
    "num_attention_heads": 4, "num_experts_per_tok": 1, "num_hidden_layers": 4, "num_key_value_heads": 2,
    "num_local_experts": 2, "rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 10000, "use_qk_norm": True,
    "vocab_size": 64,
}})), 1)
tokens = np.random.default_rng(0).integers(1, 64, 100).tolist()
seen = {}
for cut in (90, 70, 63, 50, 30):
    cache = make_prompt_cache(chunked)
    for start in range(0, 100, 20):
        chunked(mx.array([tokens[start : start + 20]]), cache=cache)
    kept = LRUPromptCache()
    kept.insert_cache("model", tokens, cache)
    other = tokens[:cut] + [1 + token % 63 for token in tokens[cut : cut + 10]] + tokens[:10]
    found, rest = kept.fetch_nearest_cache("model", other)
    offsets = [layer.offset for layer in found]
    logits, fresh = chunked(mx.array([rest]), cache=found), chunked(mx.array([other]))[:, cut:]
    assert len(rest) == 20
    seen[cut] = round(mx.abs(logits - fresh).max().item(), 1)
    print(f"Llama 4, cut at {cut} of 100: lengths of the layers {offsets}, largest difference {seen[cut]}")
for window, length in ((32, 10), (32, 60), (256, 60)):
    target, draft, prompt = gemma(0, window), gemma(5, window), mx.array(tokens[:length])
    plain = [token for token, _ in generate_step(prompt, target, max_tokens=60)]
    drafted = [token for token, _, _ in speculative_generate_step(prompt, target, draft, max_tokens=60)]
    seen[window, length] = next((at for at in range(60) if plain[at] != drafted[at]), None)
    print(f"Gemma 3, window {window}, prompt of {length}: first token that a draft changes: {seen[window, length]}")
sys.exit(max(seen[90], seen[70]) > 0.01 or min(seen[63], seen[50], seen[30]) < 1 or seen[32, 10] is None
         or seen[32, 60] is None or seen[256, 60] is not None)
PY
