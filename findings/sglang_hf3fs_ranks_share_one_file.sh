#!/usr/bin/env bash
# SGLang 0.5.23: HiCache's 3FS backend (`--hicache-storage-backend hf3fs`) gives several processes one file, and each
# has its own idea of what lies where. The file is named by the tensor-parallel rank alone, by default
# `/data/hicache.0.bin`. Replicas (`--dp-size`), ranks of DP attention, stages of a pipeline and other servers of the
# machine have such a rank 0 each. Without a metadata server, as its page for one node has it, each process keeps the
# list of free slots in its own memory, and all of them take the last slot first. So the first page of one is written
# over by the first page of the next, and the read answers success: a prompt gets the keys and values of another one,
# or of other layers. With a metadata server slots are given out once, and names are the tokens' digests with that rank:
# the second stage finds the first one's pages, stores none of its own, and reads the other layers. A server with
# another model and a file of its own finds the first model's names, and reads slots that were never written: zeros.
# Nothing is raised or warned of. The file backend has the model and the stage in its names. A `file_path_prefix` for
# each process, and a metadata server for each model and stage, keep them apart.
#
# Seen with sglang 0.5.23 and torch 2.13.0 on a CPU, the backend's own stand-in for a client of 3FS
# (`use_mock_hf3fs_client`, a plain file), and its own metadata server: what is read, by what the page was filled with.
# One rank, and two of tensor parallelism, read what they stored. Fails (exit 1) where that is no longer so. Host memory
# is a tensor here, and the `__init__` modules of the package, which need a GPU's kernels, are left out.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/python" -m pip install -q --no-compile "torch==2.13.0" "numpy==2.4.6" "fastapi==0.136.3" \
    "uvicorn==0.54.0" "orjson==3.13.0" "requests==2.34.2"
"$folder/env/bin/python" -m pip install -q --no-compile --no-deps "sglang==0.5.23"
cd "$folder"
"$folder/env/bin/python" - 2>"$folder/log" <<'PY' || { tail "$folder/log"; exit 1; }
import importlib.metadata
import importlib.util
import json
import logging
import os
import pathlib
import socket
import sys
import threading
import time
import types
import unittest.mock

import torch

root = pathlib.Path(importlib.util.find_spec("sglang").origin).parent
for name in ("", ".srt", ".srt.mem_cache", ".srt.mem_cache.storage", ".srt.mem_cache.storage.hf3fs"):
    module = types.ModuleType(f"sglang{name}")
    module.__path__ = [str(root.joinpath(*name.split(".")))]
    sys.modules[f"sglang{name}"] = module
for name in ("mem_cache.pool_host", "observability", "observability.metrics_collector"):
    sys.modules[f"sglang.srt.{name}"] = unittest.mock.MagicMock(__path__=[])
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.storage.hf3fs.mini_3fs_metadata_server import Hf3fsMetadataServer
from sglang.srt.mem_cache.storage.hf3fs.storage_hf3fs import HiCacheHF3FS

print("sglang", importlib.metadata.version("sglang"), "torch", torch.__version__)
TOKENS, PAGE = 4, 256  # tokens and bytes
warned = []


class Warned(logging.Handler):
    def emit(self, record):
        warned.append(record.getMessage())


logging.getLogger().addHandler(Warned(logging.WARNING))


class Pool:
    """Host memory of one page."""

    layout, page_size = "layer_first", TOKENS

    def __init__(self):
        self.page = torch.full((PAGE // 2,), -1.0, dtype=torch.bfloat16)

    def get_data_page(self, index, flat=True):
        return self.page

    def get_dummy_flat_data_page(self):
        return torch.zeros_like(self.page)

    def set_from_flat_data_page(self, index, data):
        self.page.copy_(data)


def backend(prefix, url=None, model="org/model", **ranks):
    """The backend of one process, from a configuration file as SGLang makes it."""
    with open("config.json", "w") as file:
        json.dump({"file_path_prefix": os.path.abspath(prefix), "file_size": 16 * PAGE, "numjobs": 1, "entries": 8,
                   "metadata_server_url": url}, file)
    os.environ["SGLANG_HICACHE_HF3FS_CONFIG_PATH"] = "config.json"
    config = HiCacheStorageConfig(**{
        "tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1,
        "is_mla_model": False, "enable_storage_metrics": False, "is_page_first_layout": False, "model_name": model,
        "extra_config": {"use_mock_hf3fs_client": True}, **ranks,
    })
    made = HiCacheHF3FS.from_env_config(PAGE, torch.bfloat16, config)
    made.register_mem_pool_host(Pool())
    return made


def store(one, key, value):
    one.mem_pool_host.page.fill_(value)
    assert all(one.batch_set_v1([key], torch.arange(TOKENS)))


def read(one, key):
    """What a process computes on: the page's values; None where the answer is that there is none."""
    one.mem_pool_host.page.fill_(-1.0)
    found = one.batch_exists([key]) and one.batch_get_v1([key], torch.arange(TOKENS))[0]
    return one.mem_pool_host.page.unique().tolist() if found else None


def server():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    threading.Thread(target=Hf3fsMetadataServer().run, args=("127.0.0.1", port), daemon=True).start()
    while True:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return f"http://127.0.0.1:{port}"
        time.sleep(0.1)


seen = {}
for case, url, one, two, keys in (
    ("one process", None, {}, None, ("first", "second")),
    ("two ranks of tensor parallelism", None, {"tp_size": 2}, {"tp_size": 2, "tp_rank": 1}, ("first", "first")),
    ("two replicas", None, {}, {}, ("first", "second")),
    ("two ranks of DP attention", None, {}, {"dp_rank": 1}, ("first", "second")),
    ("two stages", None, {"pp_size": 2}, {"pp_size": 2, "pp_rank": 1}, ("first", "first")),
    ("two replicas, a server", server(), {}, {}, ("first", "second")),
    ("two stages, a server", server(), {"pp_size": 2}, {"pp_size": 2, "pp_rank": 1}, ("first", "first")),
    ("two models, a server", server(), {}, {"model": "org/other", "prefix": "other"}, ("first", "first")),
):
    warned.clear()
    one = backend(**{"prefix": case, "url": url, **one})
    two = one if two is None else backend(**{"prefix": case, "url": url, **two})
    store(one, keys[0], 1.0)
    if "models" not in case:  # the other model has served nothing yet
        store(two, keys[1], 2.0)
    seen[case] = (read(one, keys[0]), read(two, keys[1]))
    print(f"{case}: stored 1 and 2, read {seen[case][0]} and {seen[case][1]};", f"warnings {warned}")
    assert not warned
right = ([1.0], [2.0])
sys.exit(seen != {
    "one process": right, "two ranks of tensor parallelism": right, "two replicas": ([2.0], [2.0]),
    "two ranks of DP attention": ([2.0], [2.0]), "two stages": ([2.0], [2.0]), "two replicas, a server": right,
    "two stages, a server": ([1.0], [1.0]), "two models, a server": ([1.0], [0.0]),
})
PY
