#!/usr/bin/env bash
# AIBrix KVCache 0.8.0: the shared cache (L2) gives an engine the pages of another model. A page's key is a hash of its
# tokens, below a name made of the namespace, the first and last head and layer, the block's size and its layout. The
# configuration has no place for a model, a type or a head's size, and the namespace is `aibrix` until
# `AIBRIX_KV_CACHE_OL_L2_CACHE_NAMESPACE` says otherwise. So a model and its fine-tuned one, or one engine with bfloat16
# and one with float16, that share a store find each other's pages and compute on them. The check of tokens that can be
# switched on agrees, since the tokens are the same; only a size that differs is an error. A namespace for each model
# and type (and version of the weights) keeps them apart.
#
# Seen with aibrix-kvcache 0.8.0 and torch 2.13.0 on a CPU, in the store of files (SHFS): what an engine of bfloat16 put
# for 16 tokens is there for an engine of float16, as other numbers (1 is 1.875), and for one of the same type that was
# meant for other weights, as it was. With a namespace of its own the second engine finds nothing. Fails (exit 1) where
# that is no longer so.
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
"""An engine of one type of KV cache: puts a page of ones, or gets what is there for the same tokens."""
import logging
import sys

import torch
from aibrix_kvcache import (
    BaseKVCacheManager, KVCacheBlockLayout, KVCacheBlockSpec, KVCacheConfig, KVCacheTensorSpec, ModelSpec,
    TokenListView,
)

logging.disable(logging.CRITICAL)
from aibrix_kvcache.memory import TensorPoolAllocator

create = TensorPoolAllocator.create
TensorPoolAllocator.create = staticmethod(lambda **given: create(**given | {"pin_memory": False}))
what, dtype = sys.argv[1], getattr(torch, sys.argv[2])
tensors = KVCacheTensorSpec(heads=[0, 1], layers=[0, 1, 2, 3], head_size=8)
spec = KVCacheBlockSpec(16, dtype, KVCacheBlockLayout.LCND, tensors)
manager = BaseKVCacheManager(KVCacheConfig(spec, ModelSpec(max_model_len=512, max_num_batched_tokens=64)))
tokens = TokenListView(list(range(16)))
if what == "put":
    handle = manager.allocate_for(None, tokens).get()
    for page in handle.to_tensors():
        page.fill_(1)
    print(manager.put(None, tokens, handle).is_ok())
else:
    status = manager.acquire(None, tokens)
    print(status.get()[1].to_tensors()[0].unique().tolist() if status.is_ok() else "nothing")
manager.close()
PY
export TQDM_DISABLE=1 PYTHONWARNINGS=ignore AIBRIX_KV_CACHE_OL_L1_CACHE_ENABLED=0
export AIBRIX_KV_CACHE_OL_L2_CACHE_BACKEND=SHFS AIBRIX_KV_CACHE_OL_SHFS_ROOT="$folder/pages"
export AIBRIX_KV_CACHE_OL_L2_CACHE_INGESTION_TYPE=ALL
engine() { "$folder/env/bin/python" engine.py "$@"; }
"$folder/env/bin/python" -m pip list 2> /dev/null | grep -E "^(aibrix|torch)"
seen="bfloat16 puts ones: $(engine put bfloat16)
float16 finds $(engine get float16)
bfloat16 of other weights finds $(engine get bfloat16)
bfloat16 with a namespace finds $(AIBRIX_KV_CACHE_OL_L2_CACHE_NAMESPACE=mine engine get bfloat16)"
export AIBRIX_KV_CACHE_OL_TOKEN_VALIDATION_ENABLED=1
seen="$seen
bfloat16 with tokens puts ones: $(engine put bfloat16)
float16 checks tokens and finds $(engine get float16)"
echo "$seen"
ls "$folder/pages"
test "$seen" = "bfloat16 puts ones: True
float16 finds [1.875]
bfloat16 of other weights finds [1.0]
bfloat16 with a namespace finds nothing
bfloat16 with tokens puts ones: True
float16 checks tokens and finds [1.875]"
