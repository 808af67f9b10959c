#!/usr/bin/env bash
# OpenVINO GenAI 2026.4.1: with prefix caching off, Granite 4's hybrid (`granitemoehybrid`, Mamba-2 beside attention)
# loses its recurrent states behind the prompt. Each token of the answer is computed as if nothing had been read but
# what attention and the convolutions hold: the first one is right, and the rest is another model's text. Off is what a
# `SchedulerConfig` says until `enable_prefix_caching` is set, in `ContinuousBatchingPipeline` and `LLMPipeline` alike.
# An option that should decide about time and memory decides about the answer. Nothing is raised or warned of. With
# prefix caching, whole or in part found, with `ATTENTION_BACKEND="SDPA"`, and in an `LLMPipeline` that is given no
# `SchedulerConfig` (an x86 CPU's has prefix caching), it answers as transformers does.
#
# Seen with openvino-genai 2026.4.1.0, openvino 2026.4.1 and transformers 5.5.4 on a CPU, random weights in float32,
# prompts of 150, 100 and 7 tokens, 8 tokens each. Off: other answers than those of transformers, and the same eight
# tokens as from transformers where the recurrent states are set to 0 before each one. On: transformers' answers, the
# first time and again. Fails (exit 1) where that is no longer so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/python" -m pip install -q --no-compile "torch==2.13.0" "transformers==5.5.4" "numpy<2.5" \
    "openvino==2026.4.1" "nncf==3.4.0" "scipy==1.17.1" "scikit-learn==1.9.1" "requests==2.34.2"
"$folder/env/bin/python" -m pip install -q --no-compile --no-deps "openvino-genai==2026.4.1.0" \
    "openvino-tokenizers==2026.4.1.0" "optimum-intel==2.2.0" "optimum==2.3.0"
cd "$folder"
"$folder/env/bin/python" - 2>"$folder/log" <<'PY' || { tail "$folder/log"; exit 1; }
import importlib.metadata
import sys

import openvino
import openvino_genai
import torch
import transformers
from openvino_tokenizers import convert_tokenizer
from optimum.intel import OVModelForCausalLM
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM, PreTrainedTokenizerFast

print(
    "openvino-genai", importlib.metadata.version("openvino-genai"), "openvino", openvino.__version__, "transformers",
    transformers.__version__,
)
SMALL = {
    "vocab_size": 61, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "initializer_range": 0.3, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0,
    "layer_types": ["mamba", "attention"] * 2, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8,
    "num_local_experts": 0, "shared_intermediate_size": 32,
}
EXACT = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
torch.manual_seed(7)
model = GraniteMoeHybridForCausalLM(GraniteMoeHybridConfig(**SMALL)).eval()
model.save_pretrained("torch")
OVModelForCausalLM.from_pretrained("torch", export=True, compile=False, load_in_8bit=False).save_pretrained("model")
words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(61)}, unk_token="w0"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
words = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", pad_token="w0", eos_token="w2")
for name, one in zip(("tokenizer", "detokenizer"), convert_tokenizer(words, with_detokenizer=True)):
    openvino.save_model(one, f"model/openvino_{name}.xml")


def reference(ids, forgets):
    """transformers' answer, and the one where the recurrent states are set to 0 before each token."""
    with torch.no_grad():
        said = model(ids, use_cache=True)
        cache, answer = said.past_key_values, [int(said.logits[0, -1].argmax())]
        while len(answer) < 8:
            for layer in cache.layers:
                if forgets and getattr(layer, "recurrent_states", None) is not None:
                    layer.recurrent_states = torch.zeros_like(layer.recurrent_states)
            said = model(torch.tensor([answer[-1:]]), past_key_values=cache, use_cache=True)
            answer.append(int(said.logits[0, -1].argmax()))
    return answer


def pipeline(caching=None, **options):
    if caching is not None:
        options["scheduler_config"] = openvino_genai.SchedulerConfig()
        options["scheduler_config"].enable_prefix_caching = caching
        options["scheduler_config"].cache_size = 1
    return openvino_genai.LLMPipeline("model", "CPU", **EXACT, **options)


def answers(of):
    config = openvino_genai.GenerationConfig(max_new_tokens=8, ignore_eos=True, do_sample=False)
    return [list(of.generate(openvino.Tensor(prompt.numpy()), config).tokens[0]) for prompt in PROMPTS]


ids = torch.randint(3, 61, (1, 150), generator=torch.Generator().manual_seed(0))
PROMPTS = [ids, ids[:, :100], ids[:, 20:27]]
right, forgotten = ([reference(prompt, forgets) for prompt in PROMPTS] for forgets in (False, True))
print("transformers:", *right)
print("with recurrent states of 0:", *forgotten)
seen, off = {}, openvino_genai.SchedulerConfig().enable_prefix_caching
for name, options in {
    "as a SchedulerConfig says": {"caching": off}, "prefix caching": {"caching": True}, "no SchedulerConfig": {},
    "SDPA": {"ATTENTION_BACKEND": "SDPA"},
}.items():
    one = pipeline(**options)
    first, again = answers(one), answers(one)
    seen[name] = "right" if first == again == right else "states of 0" if first == again == forgotten else "other"
    print(f"{name}: {seen[name]}", *first)
sys.exit(off or list(seen.values()) != ["states of 0", "right", "right", "right"])
PY
