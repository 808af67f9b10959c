#!/usr/bin/env bash
# mlx-lm 0.32.2: in a batch, a shorter prompt of five model types gets the state of another one, and keeps it. Prompts
# that are processed together are padded at their ends. Mamba, Jamba, RecurrentGemma and RWKV-7 take the padding into
# their states, and Nemotron-H takes its state from behind the padding, where it is nothing. So the answer to a request
# depends on who else asked at that time. The server batches each model whose caches can be merged, eight prompts at a
# time (`--prompt-concurrency`), and keeps the cache for the next turn (`LRUPromptCache`), which goes on from that state
# in any company. Nothing is raised or warned of. With `prefill_batch_size=1` (`--prompt-concurrency 1`) these five are
# right. Llama, LFM2, Mamba-2 and Granite's hybrid are right in any batch. Gemma 2 is wrong in another way: each of its
# heads of keys takes the mask of one request, where there are as many requests as such heads (4 of the model with 2
# billion weights, 8 with 9). Any other number of requests above 1 raises.
#
# Seen with mlx-lm 0.32.2 and mlx 0.32.4 on a CPU, random weights, prompts of 40 and 20 tokens, 8 tokens of answer, in
# a batch and alone. Both answers are the same for the four; that of 20 tokens differs for the five, and so do the next
# turn's logits from its cache, by 6.5 (Mamba), 4.5 (Jamba), 10.5 (RecurrentGemma), 1.9 (RWKV-7) and 2.6 (Nemotron-H) at
# most; with prompts one by one both are the same. Gemma 2 with 2 heads of keys: the answer to 40 tokens differs, and
# three prompts raise. Fails (exit 1) where that is no longer so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/python" -m pip install -q --no-compile "mlx[cpu]==0.32.4" "numpy==2.4.6" \
    "transformers==5.24.0" "jinja2==3.1.6"
"$folder/env/bin/python" -m pip install -q --no-compile --no-deps "mlx-lm==0.32.2"
cd "$folder"
"$folder/env/bin/python" - <<'PY'
import copy
import importlib
import importlib.metadata
import sys

import mlx.core as mx
from mlx.utils import tree_map_with_path
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.models.cache import make_prompt_cache

print("mlx", importlib.metadata.version("mlx"), "mlx-lm", importlib.metadata.version("mlx-lm"))
SMALL = {
    "vocab_size": 61, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "attention_bias": False,
    "max_position_embeddings": 512, "tie_word_embeddings": True, "mlp_bias": False, "layer_norm_epsilon": 1e-6,
}
CONVOLUTION = {"conv_kernel": 4, "use_bias": False, "use_conv_bias": True, "state_size": 8}
MAMBA = {f"mamba_{name}": number for name, number in {
    "n_heads": 8, "d_head": 16, "d_state": 8, "d_conv": 4, "n_groups": 1, "expand": 2, "chunk_size": 16,
    "proj_bias": False, "conv_bias": True,
}.items()}
MODELS = {
    "llama": {}, "lfm2": {
        "norm_eps": 1e-6, "conv_bias": False, "conv_L_cache": 3, "block_dim": 64, "block_ff_dim": 96,
        "block_multiple_of": 8, "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": False,
        "layer_types": ["conv", "full_attention"] * 2,
    },
    "mamba2": CONVOLUTION | {
        "num_heads": 8, "expand": 2, "n_groups": 1, "time_step_limit": (0.0, 100.0), "time_step_rank": 4,
        "residual_in_fp32": False, "chunk_size": 16, "time_step_min": 0.001, "time_step_max": 0.1, "rms_norm": True,
    },
    "granitemoehybrid": MAMBA | {
        "layer_types": ["mamba", "attention"] * 2, "num_local_experts": 4, "num_experts_per_tok": 2,
        "shared_intermediate_size": 32, "embedding_multiplier": 1.0, "attention_multiplier": 0.25,
        "logits_scaling": 1.0, "residual_multiplier": 1.0, "position_embedding_type": "rope",
    },
    "mamba": CONVOLUTION | {"time_step_rank": 4, "expand": 2},
    "jamba": {
        "attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_offset": 1, "expert_layer_period": 2,
        "mamba_d_conv": 4, "mamba_d_state": 8, "mamba_expand": 2, "num_experts": 4, "num_experts_per_tok": 2,
        "mamba_dt_rank": 4,
    },
    "recurrent_gemma": {
        "lru_width": 64, "attention_window_size": 24, "conv1d_width": 4, "logits_soft_cap": 30.0,
        "block_types": ["recurrent", "attention"], "embeddings_scale_by_sqrt_dim": True,
    },
    "rwkv7": {"num_heads": 4, "norm_eps": 1e-5} | dict.fromkeys(
        ("a_low_rank_dim", "v_low_rank_dim", "gate_low_rank_dim", "decay_low_rank_dim"), 8
    ),
    "nemotron_h": CONVOLUTION | {
        "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 1, "mamba_proj_bias": False,
        "hybrid_override_pattern": "M*M-", "mlp_hidden_act": "relu2", "time_step_limit": (0.0, 100.0),
    },
    "gemma2": {"query_pre_attn_scalar": 16},
}
NEXT = mx.random.randint(3, 61, (1, 10), key=mx.random.key(99))


def weight(name, empty):
    """Random matrices, and steps of time that are as small as in trained models."""
    if name.endswith("dt_bias"):
        return mx.full(empty.shape, -4.0)
    return mx.random.normal(empty.shape) * (1.3 / empty.shape[-1] ** 0.5) if empty.ndim > 1 else empty


def make(name):
    module = importlib.import_module(f"mlx_lm.models.{name}")
    mx.random.seed(3)
    model = module.Model(module.ModelArgs.from_dict(SMALL | MODELS[name] | {"model_type": name}))
    model.update(tree_map_with_path(weight, model.parameters()))
    model.eval()
    return model


def alone(model, prompt):
    cache = make_prompt_cache(model)
    return [int(token) for token, _ in generate_step(mx.array(prompt), model, max_tokens=8, prompt_cache=cache)], cache


def together(model, prompts, **options):
    batch, answers, caches = BatchGenerator(model, max_tokens=8, **options), {}, {}
    names = batch.insert(prompts)
    while said := batch.next_generated():
        for one in said:
            answers.setdefault(one.uid, []).append(one.token)
            caches[one.uid] = one.prompt_cache
    batch.close()
    return [(answers[name], caches[name]) for name in names]


def compare(model, lengths, **options):
    """Of each prompt: whether its answer is that alone, and how far the next turn's logits are off."""
    prompts = [mx.random.randint(3, 61, (length,), key=mx.random.key(length)).tolist() for length in lengths]
    try:
        got = together(model, prompts, **options)
    except ValueError as error:
        return str(error)[:40]
    seen = []
    for prompt, (answer, cache) in zip(prompts, got):
        want, kept = alone(model, prompt)
        off = mx.abs(model(NEXT, cache=copy.deepcopy(kept)) - model(NEXT, cache=copy.deepcopy(cache))).max()
        seen.append((answer == want, round(float(off), 1)))
    return seen


SAME = [(True, 0.0)] * 2
good = True
for name in MODELS:
    model = make(name)
    batch, one_by_one = compare(model, (40, 20)), compare(model, (40, 20), prefill_batch_size=1)
    print(f"{name:16} in a batch {batch}, prompts one by one {one_by_one}")
    if name == "gemma2":
        three = compare(model, (40, 30, 20))
        print(f"{name:16} three in a batch: {three}")
        good &= not batch[0][0] and batch[0][1] > 1 and "broadcast" in three
    elif name in ("llama", "lfm2", "mamba2", "granitemoehybrid"):
        good &= batch == one_by_one == SAME
    else:
        good &= batch[0] == SAME[0] and not batch[1][0] and batch[1][1] > 1 and one_by_one == SAME
sys.exit(not good)
PY
