"""What the installed SGLang has of what the integrations were written for, as JSON:  sglang_contract.py [FILE]

The tests run it in SGLang's environment. With FILE it records that version as the one that they are written for.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from sglang.srt.environ import EnvField, Envs
from sglang.srt.runtime_context import process_model_config

from gdscache.integrations.sglang.setup import resolved, table
from tests.engines.sglang_rig import server_args
from tests.engines.vllm_contract import found, members

_CACHE = "sglang.srt.mem_cache"
CLASSES = [
    f"{_CACHE}.hicache_storage:HiCacheStorage",
    f"{_CACHE}.unified_cache.unified_cache_linker:UnifiedCacheLinker",
    f"{_CACHE}.unified_cache.unified_cache_linker:LayerWiseLoadCounter",
    "sglang.srt.model_executor.model_runner_components.weight_updater:WeightUpdater",
]
SOURCES = [  # whose order of calls the integrations rest on
    f"{_CACHE}.unified_cache.unified_cache_linker:UnifiedCacheLinkerWrapper",
    f"{_CACHE}.unified_cache.linker_factory:create_unified_cache_linker",
    # What ranks rest on: lookups and verdicts are intersected, and a load follows the lookup that it is of.
    f"{_CACHE}.unified_radix_cache:UnifiedRadixCache._all_reduce_attn_groups",
    f"{_CACHE}.unified_radix_cache:UnifiedRadixCache.check_hicache_events",
    f"{_CACHE}.unified_radix_cache:UnifiedRadixCache.init_load_back",
    "sglang.srt.managers.cache_controller:HiCacheController._page_get_zero_copy",
    "sglang.srt.managers.cache_controller:HiCacheController._page_set_zero_copy",
    "sglang.srt.managers.cache_controller:HiCacheController.backup_thread_func",  # which ranks store
    "sglang.srt.managers.cache_controller:HiCacheController.attach_storage_backend",  # all ranks open together
    f"{_CACHE}.hybrid_cache.hybrid_cache_controller:HybridCacheController.attach_storage_backend",
    f"{_CACHE}.hybrid_cache.hybrid_cache_controller:HybridCacheController._sync_prefetch_hit_query",
    f"{_CACHE}.hybrid_cache.hybrid_cache_controller:HybridCacheController._page_backup_with_stable_layout",
    f"{_CACHE}.hybrid_cache.hybrid_cache_controller:HybridCacheController._sync_trailing_keys",
    f"{_CACHE}.pool_host.mamba:MambaPoolHost.init_kv_buffer",  # where a state lies
    f"{_CACHE}.unified_radix_cache:UnifiedRadixCache._reset_full",  # a flush ends with the host pool's `clear`
    "sglang.srt.managers.scheduler:Scheduler.attach_hicache_storage_wrapped",  # what is published before, and behind
    "sglang.srt.managers.scheduler:Scheduler.detach_hicache_storage_wrapped",
    "sglang.srt.managers.schedule_policy:SchedulePolicy.calc_priority",  # when requests are looked up
    "sglang.srt.managers.scheduler:Scheduler._get_new_batch_prefill_raw",
    "sglang.srt.managers.scheduler_components.weight_updater:SchedulerWeightUpdaterManager",  # when it flushes
    "sglang.srt.utils.weight_checker:WeightChecker.handle",  # which actions write weights
    f"{_CACHE}.memory_pool:ReqToTokenPool",  # whether a request runs
    "sglang.srt.managers.tp_worker:TpModelWorker.forward_batch_generation",  # names the batch first
    "sglang.srt.model_executor.runner.prefill_cuda_graph_runner:PrefillCudaGraphRunner._wait_for_layer_loads",
]
COMPONENTS = f"{_CACHE}.unified_cache.components"
SOURCES += [  # of hybrid models
    *(
        f"{COMPONENTS}.{module}:{name}.{method}"
        for module, name in (("full", "FullComponent"), ("swa", "SWAComponent"), ("mamba", "MambaComponent"))
        for method in ("build_external_linker_transfer", "update_external_linker_load")
    ),
    f"{COMPONENTS}.mamba:MambaComponent.finalize_match_result_in_tree_core",  # where a state is to be kept
    f"{COMPONENTS}.swa:SWAComponent.prepare_for_caching_req",
    f"{_CACHE}.unified_cache.unified_tree_core:UnifiedTreeCore.build_external_linker_offload_transfers",
    f"{_CACHE}.unified_radix_cache:UnifiedRadixCache.checkpoint_into_tree",
    f"{_CACHE}.swa_memory_pool:SWAKVPool.__init__",
    f"{_CACHE}.memory_pool:HybridReqToTokenPool.mamba2_layer_index",  # waits for the layer
    "sglang.srt.managers.schedule_batch:ScheduleBatch._mamba_radix_cache_v2_req_prepare_for_extend",
    "sglang.srt.model_executor.model_runner:ModelRunner._maybe_execute_deferred_mamba_cow_and_clear",
]
FIELDS = {  # what is read of objects that SGLang hands over
    f"{_CACHE}.hicache_storage:HiCacheStorageConfig": [
        "tp_rank", "tp_size", "pp_size", "attn_cp_size", "dcp_size", "is_mla_model", "extra_config",
    ],
    f"{_CACHE}.hicache_storage:HiCacheStorageExtraInfo": ["prefix_keys"],
    f"{_CACHE}.hicache_storage:PoolTransfer": ["name", "keys", "host_indices", "device_indices", "hit_policy"],
    f"{_CACHE}.hicache_storage:PoolTransferResult": ["kv_hit_pages", "extra_pool_hit_pages", "restorable_prefix_pages"],
    f"{_CACHE}.cache_init_params:CacheInitParams": [
        "page_size", "req_to_token_pool", "token_to_kv_pool_allocator", "sliding_window_size", "swa_gates_prefix_match",
        "tp_cache_group",
    ],
    "sglang.srt.managers.schedule_batch:ScheduleBatch": [
        "reqs", "forward_mode", "hicache_consumer_index", "extend_lens", "prefix_lens",
    ],
    "sglang.srt.server_args:ServerArgs": ["resolved_dict"],  # its fields are in our table, see `_unknown`
}  # fmt: skip


def _fields(kind: type) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else set(dir(kind))


def _unknown() -> list[str]:
    """Fields of SGLang's settings and models, and variables, that our table does not know."""
    with tempfile.TemporaryDirectory() as folder:
        args = server_args(Path(folder))
        found = [resolved(args), process_model_config()]
        registered = {name: "1" for name, value in vars(Envs).items() if isinstance(value, EnvField)}
        return table().unknown(found, registered)


def _source(name: str) -> str:
    module, _, path = name.partition(":")
    first, *rest = path.split(".")
    target: Any = found(f"{module}:{first}")
    for part in rest:
        target = getattr(target, part)
    return hashlib.sha256(inspect.getsource(target).encode()).hexdigest()[:16]


def contract() -> dict[str, Any]:
    import sglang

    fields = {name: {field: field in _fields(found(name)) for field in wanted} for name, wanted in FIELDS.items()}
    return {
        "version": sglang.__version__,
        "classes": {name: members(found(name)) for name in CLASSES},
        "sources": {name: _source(name) for name in SOURCES},
        "fields": fields,
        "unknown": _unknown(),
    }


if __name__ == "__main__":
    text = json.dumps(contract(), indent=1, sort_keys=True) + "\n"
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(text)
    print("CONTRACT", text)
