#!/usr/bin/env bash
# llama.cpp of October 2026 (its server, in xllamacpp 2026.10.11549): a slot that was saved by one model is restored
# into another. `/slots/0?action=save` writes the tokens, keys and values of a conversation, and what must fit a cache:
# the number of layers, the rows' sizes and types. The model's weights are not among it, nor how its keys are rotated.
# So behind a fine-tuned or merged version of the same shape, a newer file under the same name, or the same file with
# another `--rope-freq-base` or `--rope-scaling`, a restore answers success with the number of tokens, and the next
# prompt that begins with them is computed on the other model's keys and values. The answer is that of neither. Nothing
# is said. Another type of cache (`--cache-type-k`) is refused. Files of slots, of which a folder holds those of all
# servers that were started with it, need the model's digest and all settings of RoPE in their names, chosen by whoever
# saves them.
#
# Seen with xllamacpp 2026.10.11549 on a CPU, Llamas of random weights, a prompt of 60 tokens saved and one of 80 that
# begins with it, asked of a server that restored the slot and of one that did not. The same model: one answer, 60
# tokens out of the slot. Other weights, and the same weights with `--rope-freq-base 500000`: 67 tokens restored, 60 out
# of the slot, another answer. With keys as bfloat16, of the same size: refused. Fails (exit 1) where that is no longer
# so.
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
import urllib.error
import urllib.request

import gguf
import numpy as np
import xllamacpp

print("xllamacpp", importlib.metadata.version("xllamacpp"), "gguf", importlib.metadata.version("gguf"))
LAYERS, WIDTH, HEADS, KEYS, DIM, INNER, VOCABULARY = 3, 64, 4, 2, 16, 96, 300


def write(path, seed):
    """A Llama of random weights, with a token for each byte and some more."""
    random, file = np.random.default_rng(seed), gguf.GGUFWriter(path, "llama")
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
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()


def server(path, **options):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    params = xllamacpp.CommonParams()
    params.model.path, params.port, params.slot_save_path = path, port, "./"
    params.n_ctx, params.n_parallel, params.warmup, params.cpuparams.n_threads = 512, 1, False, 1
    for name, value in options.items():
        setattr(params, name, value)
    return xllamacpp.Server(params)


def call(to, path, **body):
    request = urllib.request.Request(
        to.listening_address + path, json.dumps(body).encode(), {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        return json.load(error)


def answer(to, prompt):
    """The answer's tokens, and how many of the prompt came out of the slot."""
    said = call(
        to, "/completion", prompt=prompt, n_predict=8, temperature=0, top_k=1, id_slot=0, return_tokens=True,
        ignore_eos=True,
    )
    return said["tokens"], said["timings"]["cache_n"]


write("one.gguf", 0)
write("other.gguf", 1)
tokens = np.random.default_rng(3).integers(259, VOCABULARY, 80).tolist()
first = server("one.gguf")
answer(first, tokens[:60])
print("saved:", call(first, "/slots/0?action=save", filename="slot")["n_saved"], "tokens")
seen = {}
for name, path, options in (
    ("the same model", "one.gguf", {}), ("other weights", "other.gguf", {}),
    ("another base of RoPE", "one.gguf", {"rope_freq_base": 500000.0}),
    ("keys as bfloat16", "one.gguf", {"cache_type_k": xllamacpp.ggml_type.GGML_TYPE_BF16}),
):
    fresh, restored = answer(server(path, **options), tokens)[0], server(path, **options)
    said = call(restored, "/slots/0?action=restore", filename="slot")
    again, cached = answer(restored, tokens)
    seen[name] = said.get("n_restored"), cached, again == fresh
    print(f"{name:20} restored: {seen[name][0]}, out of the slot: {cached}, the answer of the model: {again == fresh}",
          said.get("error", {}).get("message", ""))
sys.exit(seen != {
    "the same model": (67, 60, True), "other weights": (67, 60, False), "another base of RoPE": (67, 60, False),
    "keys as bfloat16": (None, 0, True),
})
PY
