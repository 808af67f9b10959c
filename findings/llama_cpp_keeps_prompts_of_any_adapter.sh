#!/usr/bin/env bash
# llama.cpp of October 2026 (its server, in xllamacpp 2026.10.11549): prompts that are kept in host memory are found by
# requests with other LoRA adapters. A request chooses adapters by `lora`, and a slot whose adapters change forgets its
# tokens, so the same prompt with another adapter, right behind the first, is computed anew. But when a slot takes
# another prompt, it leaves its own in host memory (`--cache-ram`, on by default, 8 GiB), by its tokens alone. A later
# request that begins with them gets it back, whatever adapters it chose and whatever it was computed with: keys and
# values are those of one adapter, and the answer goes on with another. Nothing is said. Servers with several adapters
# have this with each system prompt that all share; slots of their own (`id_slot`) do not keep adapters apart.
# `--cache-ram 0` does, and so does `"cache_prompt": false` in each request. An issue on adapters and cached prompts is
# open (ggml-org/llama.cpp 26207).
#
# Seen with xllamacpp 2026.10.11549 on a CPU, a Llama of random weights, one slot, two adapters of keys and values, a
# prompt of 80 tokens asked with none, and again with an adapter. Next: computed anew, the answer of a new server.
# Behind another prompt of the same adapter: 79 tokens are cached and the answer differs, with either adapter; with
# `--cache-ram 0` 0 tokens, and the answer of a new server. Fails (exit 1) where that is no longer so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/python" -m pip install -q --no-compile --no-deps "xllamacpp==2026.10.11549" "gguf==0.19.0" \
    "numpy==2.4.6" "pyyaml==6.0.4" "tqdm==4.70.1" "requests==2.34.2" "urllib3==2.8.0" "idna==3.20" "certifi" \
    "charset-normalizer==3.5.3"
cd "$folder"
"$folder/env/bin/python" - 2>"$folder/log" <<'PY' || { tail "$folder/log"; exit 1; }
import importlib.metadata
import json
import socket
import sys
import urllib.request

import gguf
import numpy as np
import xllamacpp

print("xllamacpp", importlib.metadata.version("xllamacpp"), "gguf", importlib.metadata.version("gguf"))
LAYERS, WIDTH, HEADS, KEYS, DIM, INNER, VOCABULARY, RANK = 3, 64, 4, 2, 16, 96, 300, 4
ADAPTERS = "one.gguf", "two.gguf"


def close(file):
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()


def model(path):
    """A Llama of random weights, with a token for each byte and some more."""
    random, file = np.random.default_rng(0), gguf.GGUFWriter(path, "llama")
    file.add_context_length(2048)
    file.add_embedding_length(WIDTH)
    file.add_block_count(LAYERS)
    file.add_feed_forward_length(INNER)
    file.add_head_count(HEADS)
    file.add_head_count_kv(KEYS)
    file.add_layer_norm_rms_eps(1e-6)
    file.add_rope_dimension_count(DIM)
    file.add_vocab_size(VOCABULARY)
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    file.add_tokenizer_model("llama")
    file.add_token_list(pieces + [f"w{number}" for number in range(VOCABULARY - len(pieces))])
    file.add_token_scores([0.0] * VOCABULARY)
    file.add_token_types([2, 3, 3] + [6] * 256 + [1] * (VOCABULARY - len(pieces)))
    file.add_bos_token_id(1)
    file.add_eos_token_id(2)
    shapes = {"token_embd": (VOCABULARY, WIDTH), "output": (VOCABULARY, WIDTH), "output_norm": (WIDTH,)}
    for layer in range(LAYERS):
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in {
            "attn_norm": (WIDTH,), "attn_q": (HEADS * DIM, WIDTH), "attn_k": (KEYS * DIM, WIDTH),
            "attn_v": (KEYS * DIM, WIDTH), "attn_output": (WIDTH, HEADS * DIM), "ffn_norm": (WIDTH,),
            "ffn_gate": (INNER, WIDTH), "ffn_up": (INNER, WIDTH), "ffn_down": (WIDTH, INNER),
        }.items()}
    for name, shape in shapes.items():
        weight = random.standard_normal(shape) * 1.2 / shape[-1] ** 0.5 if len(shape) > 1 else np.ones(shape)
        file.add_tensor(f"{name}.weight", weight.astype(np.float32))
    close(file)


def adapter(path, seed):
    """A LoRA adapter of the keys and values of all layers."""
    random, file = np.random.default_rng(seed), gguf.GGUFWriter(path, "llama")
    file.add_type(gguf.GGUFType.ADAPTER)
    file.add_string("adapter.type", "lora")
    file.add_float32("adapter.lora.alpha", RANK)
    for layer in range(LAYERS):
        for name in ("attn_k", "attn_v"):
            for part, shape in (("a", (RANK, WIDTH)), ("b", (KEYS * DIM, RANK))):
                weight = random.standard_normal(shape) * 0.4
                file.add_tensor(f"blk.{layer}.{name}.weight.lora_{part}", weight.astype(np.float32))
    close(file)


def server(**options):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    params, adapters = xllamacpp.CommonParams(), []
    params.model.path, params.port = "model.gguf", port
    params.n_ctx, params.n_parallel, params.warmup, params.cpuparams.n_threads = 1024, 1, False, 1
    for path in ADAPTERS:
        adapters.append(xllamacpp.CommonAdapterLoraInfo())
        adapters[-1].path, adapters[-1].scale = path, 0.0
    params.lora_adapters = adapters
    for name, value in options.items():
        setattr(params, name, value)
    return xllamacpp.Server(params)


def answer(to, prompt, chosen):
    """The answer's tokens with one adapter or none, and how many tokens of the prompt were cached."""
    scales = [{"id": number, "scale": float(number == chosen)} for number in range(len(ADAPTERS))]
    body = {
        "prompt": prompt, "lora": scales, "n_predict": 8, "temperature": 0, "top_k": 1, "return_tokens": True,
        "ignore_eos": True,
    }
    request = urllib.request.Request(
        to.listening_address + "/completion", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        said = json.load(response)
    return said["tokens"], said["timings"]["cache_n"]


model("model.gguf")
for number, path in enumerate(ADAPTERS):
    adapter(path, number + 5)
random = np.random.default_rng(3)
prompt, other = random.integers(259, VOCABULARY, 80).tolist(), random.integers(259, VOCABULARY, 90).tolist()
new = {chosen: answer(server(), prompt, chosen)[0] for chosen in (0, 1)}
seen = {}
for options in ({}, {"cache_ram_mib": 0}):
    for between in (False, True):
        for chosen in (0, 1):
            to = server(**options)
            answer(to, prompt, None)
            if between:
                answer(to, other, chosen)
            got, cached = answer(to, prompt, chosen)
            seen[bool(options), between, chosen] = cached, got == new[chosen]
            print(f"{options or 'by default'}, adapter {chosen}, {'behind another prompt' if between else 'next'}: "
                  f"{cached} tokens cached, the answer of a new server: {got == new[chosen]}")
sys.exit(seen != {key: (79, False) if key[:2] == (False, True) else (0, True) for key in seen})
PY
