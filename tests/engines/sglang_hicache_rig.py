"""HiCache whole on a CPU: SGLang's radix tree, its host pool, its controller with its threads, and our storage below.

Pages come from the storage into the host pool; what moves between that pool and a GPU needs a GPU. See `sglang_rig`.
"""

from __future__ import annotations

import json
import time
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from sglang.srt.managers import cache_controller
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.pool_host import common
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import CacheRequestHandle, UnifiedRadixCache

from tests.engines import sglang_host_rig as host
from tests.engines import sglang_rig as rig

BATCH = 8  # pages of one call; 128 of SGLang's, which the pool here has not


class HiCacheRig(host.PoolRig):
    """A tree with a host pool, and our storage below. `policy`: one of HiCache's for a request whose pages come.

    With several `ranks` each is a process, which makes one of these as rank number `rank`, and calls it as all of them
    do, in one order.
    """

    def __init__(
        self,
        folder: Path,
        policy: str,
        *,
        timeout: float = 0.3,
        kind: str = "mha",
        rank: int = 0,
        ranks: int = 1,
        **changes: Any,
    ) -> None:
        args = self.join(folder, policy, rank, ranks, timeout, None, changes)
        params = rig.tree_params(rig.device_pool(kind), tp_cache_group=torch.distributed.group.WORLD)
        self.tree = UnifiedRadixCache(params)
        self.tree.init_hicache(args, params)
        self.pool = self.tree.cache_controller.storage_host_pool
        self.storage = self.tree.cache_controller.storage_backend

    @staticmethod
    def join(
        folder: Path,
        policy: str,
        rank: int,
        ranks: int,
        timeout: float,
        model: dict[str, Any] | None,
        changes: dict[str, Any],
    ) -> Any:
        """This process is one of the ranks: SGLang's settings of HiCache with our storage below it. `model`: more of
        its configuration; `changes`: of ours."""
        if not torch.distributed.is_initialized():
            where = f"file://{folder}/group"
            torch.distributed.init_process_group("gloo", init_method=where, rank=rank, world_size=ranks)
        common._cuda_host_register = lambda *arguments, **more: None  # page-locking is CUDA's
        cache_controller.STORAGE_BATCH_SIZE = BATCH
        config = rig.sections(folder, cpu=None, **changes)
        more = {"prefetch_threshold": rig.PAGE, "prefetch_timeout_base": timeout, "prefetch_timeout_per_ki_token": 0}
        args = rig.server_args(
            folder,
            model,
            tp_size=ranks,
            enable_hierarchical_cache=True,
            hicache_ratio=2.0,
            hicache_mem_layout="page_first_direct",
            hicache_io_backend="direct",
            hicache_write_policy="write_through",
            hicache_storage_backend="dynamic",
            hicache_storage_prefetch_policy=policy,
            hicache_storage_backend_extra_config=json.dumps({**host.DYNAMIC, **more, "config": config}),
        )
        rig.runtime_context.get_parallel().override_permanently(tp_rank=rank, tp_size=ranks, pp_rank=0)
        return args

    def store(self, tokens: Sequence[int], seed: int) -> list[torch.Tensor]:
        """Random pages of these tokens, in the storage and no longer in the pool; what they hold."""
        slots = self.pool.alloc(len(tokens))
        pages = self.fill(_pages_of(slots), seed)
        assert all(self.storage.batch_set_v1(self.keys(tokens), slots))
        self.pool.free(slots)
        self.pool.kv_buffer.zero_()
        return pages

    def begin(self, rid: str, tokens: Sequence[int]) -> CacheRequestHandle:
        """A request comes: what the storage has of it is fetched."""
        request, found = CacheRequestHandle(rid, 0), self.match(tokens)
        self.tree.prefetch_from_storage(request, found.last_host_node, array("q", tokens))
        assert self.tree.has_ongoing_prefetch(request)
        return request

    def wait(self, request: CacheRequestHandle) -> float:
        """Until its policy lets the request run, as the scheduler asks in each step; the seconds it took."""
        start = time.monotonic()
        rig.until(lambda: self.tree.check_prefetch_progress(request) or self.poll(), "the request may run")
        return time.monotonic() - start

    def poll(self) -> None:
        self.tree.check_hicache_events()

    def match(self, tokens: Sequence[int]) -> Any:
        return self.tree.match_prefix(MatchPrefixParams(key=rig.Rig.key(tokens)))

    def pages(self, tokens: Sequence[int]) -> list[torch.Tensor]:
        """The host pool's pages of a prompt that is the tree's only one."""
        count, node, found = self.match(tokens).host_hit_length, self.tree.tree_core.root_node, list[int]()
        while node.children:
            (node,) = node.children.values()
            found += _pages_of(node.component_data[ComponentType.FULL].host_value)
        assert len(found) * rig.PAGE == count
        return self.read(found)

    def close(self) -> None:
        self.tree.shutdown()
        self.storage.close()


def _pages_of(slots: torch.Tensor) -> list[int]:
    """The pages of the pool of which these are all tokens."""
    pages: list[int] = (slots[:: rig.PAGE] // rig.PAGE).tolist()
    return pages
