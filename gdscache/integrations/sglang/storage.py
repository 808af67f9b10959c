"""HiCache's storage backend: the SSD tier below the pages that SGLang keeps in host memory.

    python -m sglang.launch_server --model-path MODEL --enable-hierarchical-cache --hicache-mem-layout page_first
        --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{"backend_name": "gdscache",
        "module_path": "gdscache.integrations.sglang.storage", "class_name": "GdsCacheStorage", "interface_v1": 1,
        "hicache_storage_pass_prefix_keys": true, "config": "gdscache.yaml"}'

docs/sglang.md says what works and what is refused. This class only hands over to `sglang_host`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import sglang
import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
from sglang.srt.runtime_context import get_context, get_server_args, process_model_config

from gdscache.engine import CacheEngine
from gdscache.errors import CacheGroupsUnsupportedError, InterfaceUnsupportedError, ParallelismUnsupportedError
from gdscache.integrations.sglang.facts import resolved
from gdscache.integrations.sglang.host import HostPages
from gdscache.integrations.sglang.metrics import ToldMetrics
from gdscache.integrations.sglang.planes import host_planes
from gdscache.integrations.sglang.refused import refuse_model, refuse_setup
from gdscache.integrations.sglang.setup import (
    ENDS_UPDATE,
    STORAGE_OPTIONS,
    WEIGHT_METHODS,
    configuration,
    storage_config_of,
)
from gdscache.integrations.watching import WeightWatch

_FLUSH = "clear"  # the host pool's method that a flush ends with; a new pool begins with it, too
_log = logging.getLogger("gdscache")
_SIZES = ("tp_size", "pp_size", "attn_cp_size", "dcp_size")


class GdsCacheStorage(HiCacheStorage):  # type: ignore[misc]
    """See the module. Raises the `GdsCacheError` that names what this setup of SGLang needs and has not got."""

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any] | None = None) -> None:
        self._server, self._model = resolved(get_server_args()), process_model_config()
        refuse_setup(self._server)
        refuse_model(self._model)
        if wrong := {name: size for name in _SIZES if (size := getattr(storage_config, name, 1)) != 1}:
            raise ParallelismUnsupportedError(
                ", ".join(f"{name} is {size}" for name, size in wrong.items()),
                "one rank is supported: run one server a GPU, each with an ssd.path of its own",
            )
        self._config = storage_config_of(storage_config.extra_config or {})
        self._pages: HostPages | None = None
        self._watches: list[WeightWatch] = []

    # -- pools ---------------------------------------------------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Open the SSD tier over the pool's memory."""
        super().register_mem_pool_host(mem_pool_host)
        planes = host_planes(mem_pool_host)
        config = configuration(
            self._config, self._server, self._model, planes, sglang.__version__, STORAGE_OPTIONS, cpu=False
        )
        self.close()
        self._pages = HostPages(CacheEngine(config, planes.tensors))
        self._told = ToldMetrics(self._pages.engine, self._server)
        self._watch(self._pages, type(mem_pool_host))

    def _watch(self, pages: HostPages, pool: type[Any]) -> None:
        """From now on for as long as it is open; and what came before it, in this process, counts too."""
        from_start = get_context().config_leaf("hicache_storage_backend") is not None  # None: attached to a server
        updates = WeightWatch(
            WeightUpdater,
            WEIGHT_METHODS,
            lambda name: pages.weights_changed(ends=name == ENDS_UPDATE),
            from_start=from_start,
        )
        flushes = WeightWatch(pool, [_FLUSH], lambda name: pages.flushed(), from_start=from_start)
        self._watches = [updates, flushes]
        if updates.complete and not updates.last():
            return
        pages.weights_changed()
        written = updates.last(*(name for name in WEIGHT_METHODS if name != ENDS_UPDATE))
        if written < flushes.last():
            pages.flushed()
        elif not updates.complete:
            _log.warning(
                "the storage was attached while SGLang runs, so it is not known whether the weights are still those of "
                "the files: no page of before is found, nothing is stored until SGLang's cache is flushed "
                "(POST /flush_cache), and nothing of it is found after a restart. Start SGLang with "
                "--hicache-storage-backend to find pages again"
            )

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        if host_pool_name != PoolName.KV:
            raise CacheGroupsUnsupportedError(
                f"the model has a host pool {host_pool_name!s} beside that of K and V",
                "use a model whose every layer attends to all tokens",
            )
        super().register_mem_host_pool_v2(host_pool, host_pool_name)

    # -- one pool ------------------------------------------------------------------------------------------------------

    def exists(self, key: str) -> bool:
        return self._open.exists([key]) == 1

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        return self._open.exists(keys, _before(extra_info))

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        return self._open.get(keys, self._slots(host_indices), _before(extra_info))

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        return self._open.set(keys, self._slots(host_indices), _before(extra_info))

    # -- the same by names of pools ------------------------------------------------------------------------------------

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        found = self.batch_exists(keys, extra_info)
        others = {str(one.name): 0 for one in pool_transfers or [] if one.name != PoolName.KV}
        usable = 0 if others else found  # a pool that is not kept has no page
        result = PoolTransferResult(kv_hit_pages=usable, extra_pool_hit_pages={**others, str(PoolName.KV): found})
        result.restorable_prefix_pages = list(range(1, usable + 1))
        return result

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        return {one.name: self._transfer(one, extra_info, store=False) for one in transfers}

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        return {one.name: self._transfer(one, extra_info, store=True) for one in transfers}

    def _transfer(
        self, transfer: PoolTransfer, extra_info: HiCacheStorageExtraInfo | None, *, store: bool
    ) -> list[bool]:
        keys = transfer.keys or []
        if transfer.name != PoolName.KV or transfer.host_indices is None:
            return [False] * len(keys)
        move = self.batch_set_v1 if store else self.batch_get_v1
        return move(keys, transfer.host_indices, extra_info)

    # -- the oldest calls, which copy each page once more --------------------------------------------------------------

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        raise _copying("get")

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> Any:
        raise _copying("batch_get")

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        raise _copying("set")

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        raise _copying("batch_set")

    # -- the rest ------------------------------------------------------------------------------------------------------

    def clear(self) -> None:
        self._open.clear()

    def close(self) -> None:
        """Finish what was accepted, and give everything back. Twice is fine."""
        watches, self._watches = self._watches, []
        pages, self._pages = self._pages, None
        for watch in watches:
            watch.close()
        if pages is not None:
            self._told.close()
            pages.close()

    @property
    def engine(self) -> CacheEngine:
        """The engine, for `stats()` and the like."""
        return self._open.engine

    @property
    def _open(self) -> HostPages:
        assert self._pages is not None, "no host pool was registered, or the storage was closed"
        return self._pages

    def _slots(self, host_indices: torch.Tensor) -> Sequence[int]:
        found: list[int] = host_indices[:: self.mem_pool_host.page_size].tolist()
        return found


def _before(extra_info: HiCacheStorageExtraInfo | None) -> Sequence[str]:
    return (extra_info.prefix_keys if extra_info is not None else None) or ()


def _copying(name: str) -> InterfaceUnsupportedError:
    return InterfaceUnsupportedError(
        f"{name}() hands over copies of pages", f'add "interface_v1": 1 to {STORAGE_OPTIONS}'
    )
