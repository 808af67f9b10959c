#!/usr/bin/env bash
# LMCache 0.5.6: the serde `fp8` of an L2 adapter damages a cache that is float8 already. vLLM keeps such a cache
# (`--kv-cache-dtype fp8`) as uint8, and LMCache its pages as well. The serde converts whatever it gets to float8 by
# value: it takes each code for a number from 0 to 255, and rounds it to four bits. 208 of the 256 codes come back as
# another one, each store answers success, and no byte is saved. What is read are other keys and values: -1 is -2, 3 is
# 2, 448 is 0. Of a cache whose type says float8_e4m3fn all codes come back, and of bfloat16 what fits. Whoever changes
# a server to float8 takes `"serde": {"type": "fp8"}` out of its adapters.
#
# Seen with lmcache 0.5.6 and torch 2.13.0 on a CPU, stored and loaded by the processor that the adapters use: all 256
# codes as uint8: 208 differ; as float8_e4m3fn and as their bfloat16: 0. The page [1, 1.125, -1, 0.5, -0.375, 3, -2.5,
# 448] as uint8 comes back as [1, 1, -2, 0.5, -0.5, 2, -2, -0]. Fails (exit 1) where that is no longer so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/python" -m pip install -q --no-compile "torch==2.13.0" "numpy==2.4.6" "msgspec==0.22.0" \
    "prometheus_client==0.26.0" "pyyaml" "psutil==7.2.2" "py-cpuinfo==9.0.0" "requests==2.34.2" "aiohttp==3.14.5" \
    "cachetools==8.0.2" "pyzmq==27.3.0" "cryptography==50.0.2" "numba==0.68.1" "sortedcontainers==2.4.0"
"$folder/env/bin/python" -m pip install -q --no-compile --no-deps "lmcache==0.5.6"
cd "$folder"
LMCACHE_TRACK_USAGE=false LMCACHE_LOG_LEVEL=ERROR "$folder/env/bin/python" - <<'PY'
import importlib.metadata
import sys
import time

import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.serde import create_serde_processor
from lmcache.v1.distributed.serde.base import SerdeConfig
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj

print("lmcache", importlib.metadata.version("lmcache"), "torch", torch.__version__)
serde = create_serde_processor(SerdeConfig("fp8"))
KEY = [ObjectKey(bytes(32), "model", 0)]


def held(tensor):
    """A page as LMCache holds it: bytes, with a shape and a type."""
    told = MemoryObjMetadata(
        tensor.shape, tensor.dtype, address=0, phy_size=tensor.nbytes, ref_count=1, fmt=MemoryFormat.KV_2LTD,
        shapes=[tensor.shape], dtypes=[tensor.dtype],
    )
    return TensorMemoryObj(tensor.flatten().view(torch.uint8), told, None)


def ended(query, task):
    while (answer := query(task)) is None:
        time.sleep(0.01)
    assert answer


def back(page):
    """The page as it comes back behind a store and a load."""
    size = serde.estimate_serialized_size(MemoryLayoutDesc([page.shape], [page.dtype]))
    stored, loaded = held(torch.zeros(size, dtype=torch.uint8)), held(torch.zeros_like(page))
    ended(serde.query_serialize_result, serde.submit_serialize([held(page)], [stored], KEY))
    ended(serde.query_deserialize_result, serde.submit_deserialize([stored], [loaded], KEY))
    return loaded.tensor, size


codes = torch.arange(256, dtype=torch.uint8).reshape(2, 1, 16, 8)  # K and V, layers, tokens, width
numbers = codes.view(torch.float8_e4m3fn)
seen = {}
for name, page in (("uint8", codes), ("float8_e4m3fn", numbers), ("bfloat16", numbers.bfloat16())):
    got, size = back(page)
    width = page.element_size()
    same = (got.view(torch.uint8) == page.view(torch.uint8)).reshape(-1, width).all(1)
    seen[name] = int((~same).sum())
    print(f"{name:14} {page.nbytes} bytes, stored as {size}; {seen[name]} of {page.numel()} come back as another")
few = torch.tensor([1, 1.125, -1, 0.5, -0.375, 3, -2.5, 448]).to(torch.float8_e4m3fn)
got = back(few.view(torch.uint8))[0].view(torch.float8_e4m3fn).float().tolist()
print(few.float().tolist(), "comes back as", got)
serde.close()
sys.exit(
    seen != {"uint8": 208, "float8_e4m3fn": 0, "bfloat16": 0}
    or str(got) != "[1.0, 1.0, -2.0, 0.5, -0.5, 2.0, -2.0, -0.0]"
)
PY
