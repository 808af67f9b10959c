"""HiCache's storage backend: the SSD tier below the pages in SGLang's host memory.

    python -m sglang.launch_server --model-path MODEL --enable-hierarchical-cache --hicache-mem-layout page_first
      --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{"backend_name": "gdscache",
      "module_path": "gdscache.integrations.sglang.storage", "class_name": "GdsCacheStorage", "interface_v1": 1,
      "hicache_storage_pass_prefix_keys": true, "config": "gdscache.yaml"}'

docs/sglang.md lists supported and refused settings. This class passes SGLang's calls on to `host.py`.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from typing import Any

import sglang
import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
from sglang.srt.runtime_context import get_context, get_server_args, process_model_config
from sglang.srt.utils.weight_checker import WeightChecker

from gdscache.config import Config
from gdscache.engine.engine import CacheEngine
from gdscache.engine.hybrid import HybridEngine
from gdscache.engine.packing import as_directory
from gdscache.errors import CacheGroupsUnsupportedError, InterfaceUnsupportedError, ParallelismUnsupportedError
from gdscache.integrations.sglang import setup
from gdscache.integrations.sglang.host import BorrowedPages, HostPages, PoolPages
from gdscache.integrations.sglang.metrics import ToldMetrics
from gdscache.integrations.sglang.planes import KV, PoolPlanes, pools_planes, refuse_pool
from gdscache.integrations.sglang.ranks import RankPlace, storage_group, together
from gdscache.integrations.watching import CallWatch
from gdscache.pages.keys import namespace_digest
from gdscache.ranks.borrower import Borrower

_FLUSH = "clear"  # the host pool's method that ends a flush, and begins a new pool
_log = logging.getLogger("gdscache")


class GdsCacheStorage(HiCacheStorage):  # type: ignore[misc]
    """See the module. Raises the `GdsCacheError` of the first unsupported setting of SGLang.

    Many methods: SGLang's `HiCacheStorage` names the public ones.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any] | None = None) -> None:
        self._server, self._model = setup.resolved(get_server_args()), process_model_config()
        setup.refuse_setup(self._server)
        setup.refuse_model(self._model)
        ranks = storage_config.tp_size
        if storage_config.should_split_heads:
            raise ParallelismUnsupportedError(
                f"tp_lcm_size is {storage_config.tp_lcm_size}, and tp_size is {ranks}: a directory serves one number "
                "of ranks",
                f"leave tp_lcm_size out of {setup.STORAGE_OPTIONS}",
            )
        self._config = setup.storage_config_of(storage_config.extra_config or {})
        self._place = RankPlace(storage_config.tp_rank, ranks, equal=ranks > 1 and storage_config.is_mla_model)
        self._pages: PoolPages | None = None
        self._ends = contextlib.ExitStack()

    def on_host_pools_registered(self) -> None:
        """Open the SSD tier over the pool's memory, on all ranks or on none."""
        self.close()
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            with storage_group(self._place) as group:
                addresses = together(group, self._open_directory)
                if self._place.equal:
                    together(group, lambda: self._borrow(addresses[0]))
            undo.pop_all()

    def _open_directory(self) -> str:
        """Open this rank's own directory. Returns its address if the other ranks have the same bytes, else ""."""
        if not self._place.leads:
            return ""
        planes = self._planes()
        config = self._configuration(planes)
        engine = (HybridEngine if planes.groups else CacheEngine)(config, planes.tensors)
        self._pages = pages = PoolPages.over(engine)
        self._ends.callback(pages.close)
        assert config.ssd is not None, "the SSD tier"
        self._place.claim(config.ssd.path)
        if self._place.rank == 0 and self._server.enable_metrics:  # its figures are those of all ranks
            self._ends.callback(ToldMetrics(engine, self._server).close)
        self._watch(pages, type(self.mem_pool_host))
        kept = pages.pools[KV]
        return kept.lend() if isinstance(kept, HostPages) and self._place.equal else ""

    def _planes(self) -> PoolPlanes:
        pools = {KV: self.mem_pool_host} | {str(name): pool for name, pool in self._registered.items()}
        if self._place.equal and len(pools) > 1:
            raise CacheGroupsUnsupportedError(
                f"the model has host pools {', '.join(sorted(pools))}, and tp_size is {self._place.ranks}: all ranks "
                "have the same latents (MLA), and other states",
                "set --tp-size 1, or leave --hicache-storage-backend out",
            )
        text = self._model.hf_text_config
        return pools_planes(pools, getattr(text, "sliding_window", None))

    def _borrow(self, address: str) -> None:
        if not self._place.leads:
            planes = self._planes()
            config = as_directory(self._configuration(planes))  # the first rank has opened it
            namespace = namespace_digest(config.model.namespace_fields())
            borrower = Borrower(planes.tensors, config, namespace, address, self._place.rank)
            self._pages = PoolPages({KV: BorrowedPages(borrower, config.model.page_tokens)})
            self._ends.callback(self._pages.close)
            self._watch(self._pages, type(self.mem_pool_host))

    def _configuration(self, planes: PoolPlanes) -> Config:
        about = self._server, self._model, planes, sglang.__version__, setup.STORAGE_OPTIONS
        return setup.configuration(self._config, *about, cpu=False, place=self._place)

    def _watch(self, pages: PoolPages, pool: type[Any]) -> None:
        """Watch changes of the weights while `pages` is open, and count those before it in this process."""
        backend = get_context().config_leaf("hicache_storage_backend")
        from_start = backend is not None  # else it was attached to a running server

        def changed(name: str, *_: Any) -> None:
            pages.weights_changed(ends=name == setup.ENDS_UPDATE)

        def flushed(*_: Any) -> None:
            pages.flushed()

        also = {WeightChecker: [setup.RESETS_WEIGHTS]}
        updates = CallWatch(WeightUpdater, setup.WEIGHT_METHODS, changed, changed, also=also, from_start=from_start)
        flushes = CallWatch(pool, [_FLUSH], flushed, flushed, from_start=from_start)
        self._ends.callback(updates.close)
        self._ends.callback(flushes.close)
        if updates.complete and not updates.last():
            return
        pages.weights_changed()
        written = updates.last(
            setup.RESETS_WEIGHTS, *(name for name in setup.WEIGHT_METHODS if name != setup.ENDS_UPDATE)
        )
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
        refuse_pool(str(host_pool_name))
        super().register_mem_host_pool_v2(host_pool, host_pool_name)

    @property
    def _registered(self) -> dict[Any, Any]:
        """SGLang's pools that were registered one by one, by name."""
        return getattr(self, "registered_pools", {})

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        return self._open.pools[KV].exists(keys, _before(extra_info))

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        return self._open.pools[KV].get(keys, self._slots(host_indices), _before(extra_info))

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        return self._open.pools[KV].set(keys, self._slots(host_indices), _before(extra_info))

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        trailing = {
            str(one.name): max(1, len(one.keys or ())) if one.hit_policy == PoolHitPolicy.TRAILING_PAGES else None
            for one in pool_transfers or []
            if one.name != PoolName.KV
        }
        reach, lengths = self._open.lengths(keys, trailing, _before(extra_info))
        result = PoolTransferResult(kv_hit_pages=max(lengths, default=0), extra_pool_hit_pages=reach)
        result.restorable_prefix_pages = lengths
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
        keys, pages = transfer.keys or [], self._open.pools.get(str(transfer.name))
        if pages is None or transfer.host_indices is None:
            return [False] * len(keys)
        slots = self._slots(transfer.host_indices, self._registered.get(transfer.name, self.mem_pool_host))
        return (pages.set if store else pages.get)(keys, slots, _before(extra_info))

    def get(self, *args: Any, **kwargs: Any) -> Any:
        """For all calls that would copy each page once more."""
        raise InterfaceUnsupportedError(
            "get() and set() hand over copies of pages", f'add "interface_v1": 1 to {setup.STORAGE_OPTIONS}'
        )

    batch_get = set = batch_set = get

    def clear(self) -> None:
        self._open.clear()

    def close(self) -> None:
        """Finish accepted stores, and release everything. Repeated calls are fine."""
        self._pages = None
        self._ends.close()

    @property
    def engine(self) -> CacheEngine | HybridEngine:
        """The engine, for `stats()` and the like, of a rank that has one."""
        engine = self._open.engine
        assert engine is not None, "the first rank has it"
        return engine

    @property
    def _open(self) -> PoolPages:
        assert self._pages is not None, "no host pool was registered, or the storage was closed"
        return self._pages

    def _slots(self, host_indices: torch.Tensor, pool: Any = None) -> Sequence[int]:
        """The first token of each page, or the slot of each state. `pool`: SGLang's; by default that of all tokens."""
        found: list[int] = host_indices[:: (pool or self.mem_pool_host).page_size].tolist()
        return found


def _before(extra_info: HiCacheStorageExtraInfo | None) -> Sequence[str]:
    return (extra_info.prefix_keys if extra_info is not None else None) or ()
