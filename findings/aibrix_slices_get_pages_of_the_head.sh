#!/usr/bin/env bash
# AIBrix KVCache 0.8.0: in the shared cache (L2), a slice of a list of tokens has the keys of the list's first tokens. A
# `TokenListView` is sliced without a copy, and the key builders ROLLING_HASH (the default) and RAW hash its whole list
# from the beginning and take the key of the block's number in the slice. So where many prompts lie in one array and
# each is a slice of it, every prompt is stored and found under the keys of the first: the second prompt gets the first
# one's pages, and nothing is raised. The local cache (L1) tells them apart, and the package's connectors for vLLM give
# each prompt a list of its own. SIMPLE_HASH hashes the slice. A view made of a copy (`TokenListView(list(view))`) has
# the right keys, and `AIBRIX_KV_CACHE_OL_TOKEN_VALIDATION_ENABLED=1`, which is off by default, compares tokens when
# pages are read.
#
# Seen with aibrix-kvcache 0.8.0 and torch 2.13.0 on a CPU, in the store of files (SHFS), an array of 32 tokens and a
# page of ones for the first 16: the slice of the other 16 finds that page with ROLLING_HASH and RAW, and nothing with
# SIMPLE_HASH, with tokens that are compared, and as a view of its own. Fails (exit 1) where that is no longer so.
# Memory is not page-locked here, which needs a GPU.
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
cat > engine.py <<'PY'
"""Puts a page of ones for the first 16 of 32 tokens, and gets what is there for the other 16."""
import logging
import os

import torch
from aibrix_kvcache import (
    BaseKVCacheManager, KVCacheBlockLayout, KVCacheBlockSpec, KVCacheConfig, KVCacheTensorSpec, ModelSpec,
    TokenListView,
)
from aibrix_kvcache.memory import TensorPoolAllocator

logging.disable(logging.CRITICAL)
create = TensorPoolAllocator.create
TensorPoolAllocator.create = staticmethod(lambda **given: create(**given | {"pin_memory": False}))
tensors = KVCacheTensorSpec(heads=[0, 1], layers=[0, 1, 2, 3], head_size=8)
spec = KVCacheBlockSpec(16, torch.float16, KVCacheBlockLayout.LCND, tensors)
manager = BaseKVCacheManager(KVCacheConfig(spec, ModelSpec(max_model_len=512, max_num_batched_tokens=64)))
tokens = TokenListView(list(range(32)))
first, second = tokens[:16], tokens[16:]
handle = manager.allocate_for(None, first).get()
for page in handle.to_tensors():
    page.fill_(1)
assert manager.put(None, first, handle).is_ok() and first != second
found = []
for wanted in (second, TokenListView(list(second))):
    status = manager.acquire(None, wanted)
    found.append(str(status.get()[1].to_tensors()[0].unique().tolist()) if status.is_ok() else "nothing")
print(os.environ["AIBRIX_KV_CACHE_OL_L2_CACHE_KEY_BUILDER"], "the slice finds", found[0], "a copy of it", found[1])
manager.close()
PY
export TQDM_DISABLE=1 PYTHONWARNINGS=ignore AIBRIX_KV_CACHE_OL_L1_CACHE_ENABLED=0
export AIBRIX_KV_CACHE_OL_L2_CACHE_BACKEND=SHFS AIBRIX_KV_CACHE_OL_L2_CACHE_INGESTION_TYPE=ALL
export AIBRIX_KV_CACHE_OL_SHFS_ROOT="$folder/pages"
engine() { AIBRIX_KV_CACHE_OL_L2_CACHE_KEY_BUILDER=$1 "$folder/env/bin/python" engine.py; }
"$folder/env/bin/python" -m pip list 2> /dev/null | grep -E "^(aibrix|torch)"
seen="$(engine ROLLING_HASH; engine RAW; engine SIMPLE_HASH)
$(AIBRIX_KV_CACHE_OL_TOKEN_VALIDATION_ENABLED=1 engine ROLLING_HASH)"
echo "$seen"
test "$seen" = "ROLLING_HASH the slice finds [1.0] a copy of it nothing
RAW the slice finds [1.0] a copy of it nothing
SIMPLE_HASH the slice finds nothing a copy of it nothing
ROLLING_HASH the slice finds nothing a copy of it nothing"
