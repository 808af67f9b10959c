#!/usr/bin/env bash
# AIBrix KVCache 0.8.0: its L1 cache, with the default policy S3FIFO, keeps the tokens of every block that it has ever
# evicted. S3-FIFO has a list of names without pages (ghosts), as long as the main list. Here its length is counted in
# bytes of pages, of which a ghost has none, so nothing is ever taken from it. Each name holds the whole prompt's
# tokens. A process that serves new prompts grows without end, beyond the capacity that it was given, and `len(cache)`
# does not count it. And a block that comes back after any time is taken for a frequent one and goes to the main list,
# which is what the policy is there to prevent. LRU and FIFO, chosen by `AIBRIX_KV_CACHE_OL_L1_CACHE_EVICTION_POLICY`,
# stay as they are.
#
# Seen with aibrix-kvcache 0.8.0 and torch 2.13.0 on a CPU, a cache of 8 blocks, prompts of 4,096 tokens of which one
# block is put: S3FIFO has 17 MiB of Python's memory more behind each 1,000 prompts, and calls the first one, put again
# behind 3,000 others, hot; LRU and FIFO have 0.5 MiB more at most, and do not. Fails (exit 1) where that is no longer
# so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/python" -m pip install -q --no-compile "torch==2.13.0" "numpy==2.4.6"
"$folder/env/bin/python" -m pip install -q --no-compile --no-deps "aibrix-kvcache==0.8.0" "cityhash==0.4.10" \
    "more-itertools==11.1.0" "msgspec==0.22.0" "redis==6.0.0" "sortedcontainers==2.4.0" "tqdm==4.70.1" \
    "validators==0.35.0" "zstandard==0.25.0" "nvtx==0.2.15" "uvloop==0.23.0" "netifaces==0.11.0" "requests==2.34.2" \
    "urllib3==2.8.0" "idna==3.20" "certifi" "charset-normalizer==3.5.3" "pyyaml==6.0.4"
cd "$folder"
TQDM_DISABLE=1 "$folder/env/bin/python" - <<'PY'
import importlib.metadata
import logging
import sys
import tracemalloc

import torch
from aibrix_kvcache import KVCacheBlockLayout, KVCacheBlockSpec, KVCacheTensorSpec, TokenListView
from aibrix_kvcache.l1 import L1Cache
from aibrix_kvcache.memory import TensorPoolAllocator

logging.disable(logging.WARNING)
print("aibrix-kvcache", importlib.metadata.version("aibrix-kvcache"), "torch", torch.__version__)
BLOCK, BLOCKS, PROMPT = 16, 8, 4096
spec = KVCacheBlockSpec(
    BLOCK, torch.float16, KVCacheBlockLayout.LCND, KVCacheTensorSpec(heads=[0], layers=[0], head_size=8)
)
page = torch.zeros(spec.block_shape, dtype=torch.float16)
seen = {}
for policy in ("S3FIFO", "LRU", "FIFO"):
    hot = []
    cache = L1Cache(
        policy, BLOCKS * spec.block_nbytes, TensorPoolAllocator.create(capacity_nbytes=1 << 20), spec,
        on_hot_access=lambda key, value: (hot.append(key), value.ref_down()),
    )


    def put(number):
        tokens = TokenListView([number] * PROMPT)
        assert cache.put(None, tokens[:BLOCK], [page]).is_ok()


    tracemalloc.start()
    grown = []
    put(0)
    for thousand in range(3):
        before = tracemalloc.get_traced_memory()[0]
        for number in range(1, 1001):
            put(1000 * thousand + number)
        grown.append((tracemalloc.get_traced_memory()[0] - before) / (1 << 20))
    tracemalloc.stop()
    assert not hot and cache.exists(None, TokenListView([0] * BLOCK)).is_not_found()
    put(0)
    seen[policy] = grown, len(hot)
    print(f"{policy:6} {len(cache)} bytes of pages; grown by {', '.join(f'{mib:.1f}' for mib in grown)} MiB; the first "
          f"prompt again is {'hot' if hot else 'new'}")
good = all(14 < mib < 20 for mib in seen["S3FIFO"][0]) and seen["S3FIFO"][1] == 1
sys.exit(not (good and all(max(seen[other][0]) < 1 and seen[other][1] == 0 for other in ("LRU", "FIFO"))))
PY
