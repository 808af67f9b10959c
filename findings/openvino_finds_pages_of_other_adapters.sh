#!/usr/bin/env bash
# OpenVINO GenAI 2026.4.1: prefix caching gives one LoRA adapter the pages of another. `LLMPipeline` takes adapters anew
# for each call (`GenerationConfig.adapters`), which its documentation offers without making the pipeline again. A page
# is known by its tokens alone. So a prompt that was answered without an adapter, with another one or with another
# `alpha` is found, and the answer is computed on those keys and values: it is that of neither. Nothing is raised or
# warned of. Prefix caching is on in the `LLMPipeline` of an x86 CPU that is given no `SchedulerConfig`, and off in a
# `SchedulerConfig` of one's own until `enable_prefix_caching` says otherwise. Off, or with
# `ATTENTION_BACKEND="SDPA"`, each adapter has its answer.
#
# Seen with openvino-genai 2026.4.1.0 and openvino 2026.4.1 on a CPU, a Llama of random weights, two adapters of keys,
# queries and values. A prompt of 70 tokens is asked of one pipeline with none, the first, the second, half of the first
# and none again. By default the three with adapters differ from those of a new pipeline, and so they do with
# `enable_prefix_caching`. With it off, and with SDPA, all five are the same. Fails (exit 1) where that is no longer so.
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
from openvino_tokenizers import convert_tokenizer
from optimum.intel import OVModelForCausalLM
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

print("openvino-genai", importlib.metadata.version("openvino-genai"), "openvino", openvino.__version__)
SMALL = {
    "vocab_size": 61, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "initializer_range": 0.3, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0,
}
EXACT = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
torch.manual_seed(7)
LlamaForCausalLM(LlamaConfig(**SMALL)).save_pretrained("torch")
OVModelForCausalLM.from_pretrained("torch", export=True, compile=False, load_in_8bit=False).save_pretrained("model")
words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(61)}, unk_token="w0"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
words = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", pad_token="w0", eos_token="w2")
for name, one in zip(("tokenizer", "detokenizer"), convert_tokenizer(words, with_detokenizer=True)):
    openvino.save_model(one, f"model/openvino_{name}.xml")


def adapter(path, seed):
    random = torch.Generator().manual_seed(seed)
    save_file({
        f"base_model.model.model.layers.{layer}.self_attn.{name}.lora_{part}.weight": torch.randn(
            *shape, generator=random
        ) * 0.4
        for layer in range(2) for name, rows in (("q_proj", 64), ("k_proj", 32), ("v_proj", 32))
        for part, shape in (("A", (4, 64)), ("B", (rows, 4)))
    }, path)
    return openvino_genai.Adapter(path)


ONE, TWO = adapter("one.safetensors", 1), adapter("two.safetensors", 2)
ORDER = {"none": [], "first": [(ONE, 1.0)], "second": [(TWO, 1.0)], "half of the first": [(ONE, 0.5)], "none again": []}
prompt = openvino.Tensor(torch.randint(3, 61, (1, 70), generator=torch.Generator().manual_seed(0)).numpy())


def chosen(adapters):
    config = openvino_genai.AdapterConfig()
    for one, alpha in adapters:
        config.add(one, alpha)
    return config


def pipeline(caching=None, **options):
    if caching is not None:
        options["scheduler_config"] = openvino_genai.SchedulerConfig()
        options["scheduler_config"].enable_prefix_caching = caching
        options["scheduler_config"].cache_size = 1
    return openvino_genai.LLMPipeline("model", "CPU", adapters=chosen([(ONE, 1.0), (TWO, 1.0)]), **EXACT, **options)


def answer(of, adapters):
    config = openvino_genai.GenerationConfig(max_new_tokens=8, ignore_eos=True, do_sample=False)
    config.adapters = chosen(adapters)
    return list(of.generate(prompt, config).tokens[0])


seen = {}
for name, options in {
    "by default": {}, "prefix caching": {"caching": True}, "no prefix caching": {"caching": False},
    "SDPA": {"ATTENTION_BACKEND": "SDPA"},
}.items():
    one = pipeline(**options)
    got = {which: answer(one, adapters) for which, adapters in ORDER.items()}
    seen[name] = [got[which] == answer(pipeline(**options), adapters) for which, adapters in ORDER.items()]
    print(f"{name}: the answers are those of a new pipeline:", dict(zip(ORDER, seen[name])))
found, none = [True, False, False, False, True], [True] * 5
sys.exit(seen != {"by default": found, "prefix caching": found, "no prefix caching": none, "SDPA": none})
PY
