#!/usr/bin/env bash
# SGLang 0.5.23 with Mooncake 0.3.13.post1: HiCache's Mooncake backend takes a part of a page for all of it. An object
# is named by its tokens, the model's path, the rank and K or V. The number of ranks is not in the name, nor the type of
# the cache or the layout of host memory, which are in no check either. A read answers how many bytes came, and SGLang
# takes every number above 0 for a page. So where servers share a store, as its documentation proposes, or one comes
# back with other settings while the store lives on: the only rank of one server reads what rank 0 of two has stored,
# half of the heads, and the rest of its page is whatever lay there. A cache of bfloat16 takes one of float8 in the same
# way, and `page_first_direct` one of `page_first`, whole and in another order. The model computes on it. Nothing is
# raised or warned of. The other way round, an object that is too large, is a miss. An `extra_backend_tag` of its own
# for each setting keeps them apart; `tp_lcm_size` with `page_head`, on all servers, lets other numbers of ranks share.
# The file backend has the ranks in its names; NIXL's, too.
#
# Seen with sglang 0.5.23, mooncake-transfer-engine-non-cuda 0.3.13.post1 and torch 2.13.0 on a CPU, one page of 4
# tokens, its K of 16 numbers for each of two heads, over -1: of two ranks' rank 0 one rank gets 16 numbers, the page
# counts as read, and 16 are -1. Of float8 16 of 32 are -1 as well. Of the other layout all come, 24 in another place.
# With a tag nothing is found. One rank's page is a miss for two. Fails (exit 1) where that is no longer so. Host memory
# is a tensor here, laid out as SGLang's pools are; the `__init__` modules of the packages, which need a GPU's kernels,
# are left out.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/python" -m pip install -q --no-compile "torch==2.13.0" "numpy==2.4.6"
"$folder/env/bin/python" -m pip install -q --no-compile --no-deps "sglang==0.5.23" \
    "mooncake-transfer-engine-non-cuda==0.3.13.post1" "requests==2.34.2" "urllib3==2.8.0" "idna==3.20" "certifi" \
    "charset-normalizer==3.5.3"
cd "$folder"
"$folder/env/bin/python" - 2>"$folder/log" <<'PY' || { tail "$folder/log"; exit 1; }
import importlib.metadata
import importlib.util
import logging
import pathlib
import socket
import subprocess
import sys
import time
import types
import unittest.mock

import mooncake
import torch

root = pathlib.Path(importlib.util.find_spec("sglang").origin).parent
for name in ("", ".srt", ".srt.utils", ".srt.mem_cache", ".srt.mem_cache.storage",
             ".srt.mem_cache.storage.mooncake_store"):
    module = types.ModuleType(f"sglang{name}")
    module.__path__ = [str(root.joinpath(*name.split(".")))]
    sys.modules[f"sglang{name}"] = module
for name in ("mem_cache.hybrid_cache", "mem_cache.hybrid_cache.linker_pool_assembler", "mem_cache.pool_host",
             "mem_cache.pool_host.mla", "observability", "observability.metrics_collector"):
    sys.modules[f"sglang.srt.{name}"] = unittest.mock.MagicMock(__path__=[], HostTensorAllocator=object)
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.storage.mooncake_store.mooncake_store import MooncakeStore

print("sglang", importlib.metadata.version("sglang"), "mooncake",
      importlib.metadata.version("mooncake-transfer-engine-non-cuda"), "torch", torch.__version__)
TOKENS, LAYERS, DIM = 4, 2, 2
warned = []


class Warned(logging.Handler):
    def emit(self, record):
        warned.append(record)


logging.getLogger().addHandler(Warned(logging.WARNING))


class Pool:
    """Host memory of one page: K and V, each in the order of the layout."""

    def __init__(self, heads, dtype=torch.bfloat16, layout="page_first"):
        self.layout, self.page_size = layout, TOKENS
        outer = (TOKENS, LAYERS) if layout == "page_first" else (LAYERS, TOKENS)
        self.kv_buffer = torch.full((2, *outer, heads, DIM), -1.0).to(dtype)

    def values(self, part):
        """K or V as [token, layer, head, number], whatever the layout."""
        values = self.kv_buffer[part]
        return values if self.layout == "page_first" else values.transpose(0, 1)

    def fill(self):
        values = self.values(0)
        numbers = 1 + torch.arange(values.numel()).view(values.shape)
        for part in range(2):
            self.values(part).copy_(numbers)
        return self

    def get_ksize_per_token(self):
        return self.kv_buffer[0].nbytes // TOKENS

    def get_page_buffer_meta(self, indices):
        return [part.data_ptr() for part in self.kv_buffer], [part.nbytes for part in self.kv_buffer]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def backend(pool, ranks, tag=None):
    """The backend of rank 0 of so many ranks."""
    extra = {"master_server_address": f"127.0.0.1:{port}", "metadata_server": "P2PHANDSHAKE", "protocol": "tcp",
             "local_hostname": "127.0.0.1", "global_segment_size": str(64 << 20), "extra_backend_tag": tag}
    store = MooncakeStore(HiCacheStorageConfig(
        tp_rank=0, tp_size=ranks, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1, is_mla_model=False,
        enable_storage_metrics=False, is_page_first_layout=pool.layout == "page_first", model_name="org/model",
        extra_config=extra,
    ))
    store.register_mem_pool_host(pool)
    stores.append(store)
    return store


port = free_port()
master = subprocess.Popen(
    [str(pathlib.Path(mooncake.__file__).parent / "mooncake_master"), "-rpc_address=127.0.0.1", f"-rpc_port={port}",
     "-metrics_host=127.0.0.1", f"-metrics_port={free_port()}"],
    stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
)
stores, seen = [], {}
try:
    for _ in range(300):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                break
        time.sleep(0.1)
    page = torch.arange(TOKENS)
    for case, stored, read in (
        ("the same", (Pool(2), 1), (Pool(2), 1)),
        ("two ranks, read by one", (Pool(1), 2), (Pool(2), 1)),
        ("one rank, read by two", (Pool(2), 1), (Pool(1), 2)),
        ("float8, read as bfloat16", (Pool(2, torch.float8_e4m3fn), 1), (Pool(2), 1)),
        ("page_first, read as page_first_direct", (Pool(2), 1), (Pool(2, layout="page_first_direct"), 1)),
    ):
        assert backend(stored[0].fill(), stored[1]).batch_set_v1([case], page) == [True]
        reader = backend(*read)
        found, got = reader.batch_exists([case]), reader.batch_get_v1([case], page)[0]
        keys = read[0].values(0).float()
        kept = int((keys == -1).sum())
        seen[case] = found, got, kept
        print(f"{case:38} found: {found}, read: {got}, not written: {kept} of {keys.numel()} numbers")
    moved = int((keys != stored[0].values(0).float()).sum())
    print("numbers that are another's, behind the last one:", moved)
    tagged = backend(Pool(2), 1, tag="bfloat16, one rank").batch_exists(["two ranks, read by one"])
    print("with a tag of its own:", tagged, "found; warnings:", len(warned))
finally:
    for store in stores:
        store.store.close()
    master.kill()
    master.wait()
sys.exit(tagged != 0 or bool(warned) or moved != 24 or seen != {
    "the same": (1, True, 0), "two ranks, read by one": (1, True, 16), "one rank, read by two": (1, False, 16),
    "float8, read as bfloat16": (1, True, 16), "page_first, read as page_first_direct": (1, True, 0),
})
PY
