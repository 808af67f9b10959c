"""HiCache whole on a CPU: SGLang's radix tree, its host pools, its controller with its threads, and our storage below.

Pages come from the storage into the host pools; what moves between those and a GPU needs a GPU. See `sglang_rig`.
"""

from __future__ import annotations

import json
import time
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from sglang.srt.managers import cache_controller
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.pool_host import base, common
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import CacheRequestHandle, UnifiedRadixCache

from tests.engines import sglang_host_rig as host
from tests.engines import sglang_hybrid_rig as hybrids
from tests.engines import sglang_rig as rig

BATCH = 8  # pages of one call; 128 of SGLang's, which the pool here has not
WINDOW, WINDOW_PAGES = 8, 2
COMPONENTS = {"swa": ComponentType.SWA, "mamba": ComponentType.MAMBA}
# The pools beside that of all tokens: K and V, latents, and hybrid models.
KINDS: dict[str, list[str]] = {"mha": [], "mla": [], "swa": ["swa"], "mamba": ["mamba"], "all": ["swa", "mamba"]}
HYBRIDS = [kind for kind, beside in KINDS.items() if beside]
ROOM: dict[str, Any] = {"ssd": {"capacity": "32MiB"}, "host_buffer": "4MiB", "store": {"window_every": 64}}


class HiCacheRig(host.PoolRig):
    """A tree with a host pool, and our storage below. `policy`: of HiCache, for a request whose pages come; `kind`:
    of `KINDS`.

    Bytes of a page follow from its key, pool and rank, and from `weights`: a number. With several `ranks` each is a
    process, which makes one of these as rank number `rank`, and calls it as all of them do, in one order.
    """

    def __init__(
        self,
        folder: Path,
        policy: str = "wait_complete",
        *,
        timeout: float = 0.3,
        kind: str = "mha",
        rank: int = 0,
        ranks: int = 1,
        **changes: Any,
    ) -> None:
        self.kind, self.rank, self.weights, self.packed = kind, rank, 0, "model" in changes
        if not torch.distributed.is_initialized():
            where = f"file://{folder}/group"
            torch.distributed.init_process_group("gloo", init_method=where, rank=rank, world_size=ranks)
        common._cuda_host_register = lambda *arguments, **more: None  # page-locking is CUDA's
        base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0  # of the machine, which pools as small as these leave it
        cache_controller.STORAGE_BATCH_SIZE = BATCH
        for name, values in ROOM.items():
            given = changes.get(name, values)
            changes[name] = {**values, **given} if isinstance(given, dict) else given
        config = rig.sections(folder, cpu=None, **changes)
        more = {"prefetch_threshold": rig.PAGE, "prefetch_timeout_base": timeout, "prefetch_timeout_per_ki_token": 0}
        args = rig.server_args(
            folder,
            {"sliding_window": WINDOW} if "swa" in KINDS[kind] else None,
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
        group: Any = torch.distributed.group.WORLD
        if kind in HYBRIDS:
            args._mamba_cache_chunk_size = rig.PAGE
            components = ["FULL", *(name.upper() for name in KINDS[kind])]
            params = hybrids.params(components, rig.TOKENS, 2, 64, WINDOW, group)
        else:
            params = rig.tree_params(rig.device_pool(kind), tp_cache_group=group)
        self.tree = UnifiedRadixCache(params)
        self.tree.init_hicache(args, params)
        controller = self.tree.cache_controller
        self.pool, self.storage = controller.storage_host_pool, controller.storage_backend
        self.beside: dict[str, Any] = {}
        for name in KINDS[kind]:
            entries = controller.mem_pool_host.entry_map.items()
            self.beside[name] = next(entry.host_pool for found, entry in entries if str(found.value) == name)

    # -- bytes ---------------------------------------------------------------------------------------------------------

    def unfit(self, key: str, name: str = "kv") -> bool:
        """Of packed pages, one of eight does not fit into a packed extent; of windows one of four."""
        return self.packed and name != "mamba" and int(key[:12], 16) % (4 if name == "swa" else 8) == 0

    def content(self, key: str, name: str, pool: Any) -> torch.Tensor:
        """The bytes of a page, or a state, whenever it is computed. Latents are the same on all ranks."""
        own = 0 if self.kind == "mla" else self.rank
        number = int(key[:12], 16) * 8 + own * 4 + ["kv", "swa", "mamba"].index(name)
        source = torch.Generator().manual_seed(number + (self.weights << 52))
        like = pool.get_data_page(0, flat=True).view(torch.uint8)
        if self.packed and name != "mamba" and not self.unfit(key, name):
            return torch.randn(like.numel() // 2, generator=source).bfloat16().view(torch.uint8).view(like.shape)
        return torch.randint(0, 256, like.shape, generator=source, dtype=torch.uint8)

    def compute(self, tokens: Sequence[int], *, ends: Sequence[int] = (), before: Sequence[int] = ()) -> None:
        """Pages of these tokens behind `before` are computed and backed up by HiCache's own thread, as a node of its
        tree. `ends`: numbers of the pages behind which a window and a state are kept. The pools are empty behind it."""
        head = self.keys(before)
        keys = self.keys([*before, *tokens])[len(head) :]
        slots = self.pool.alloc(len(keys) * rig.PAGE)
        self._fill("kv", self.pool, slots[:: rig.PAGE].tolist(), keys)
        extra, held = [], []
        for name, pool in self.beside.items() if ends else ():
            each, reach = (rig.PAGE, WINDOW_PAGES) if name == "swa" else (1, 1)
            some = [keys[n] for n in sorted({n for end in ends for n in range(max(0, end - reach + 1), end + 1)})]
            own = pool.alloc(len(some) * each)
            self._fill(name, pool, own[::each].tolist(), some)
            held.append((pool, own))
            policy = PoolHitPolicy.TRAILING_PAGES
            extra.append(PoolTransfer(name=PoolName(name), host_indices=own, keys=some, hit_policy=policy))
        controller, more = self.tree.cache_controller, {"extra_pools": extra} if extra else {}
        controller.write_storage(slots, list(tokens), hash_value=keys, prefix_keys=head, **more)
        rig.until(lambda: not controller.ack_backup_queue.empty(), "the backup ends")
        controller.ack_backup_queue.get()
        self.pool.free(slots)
        for pool, own in held:
            pool.free(own)
        self.wipe()
        self.meet()

    def _fill(self, name: str, pool: Any, places: Sequence[int], keys: Sequence[str]) -> None:
        for place, key in zip(places, keys, strict=True):
            like = pool.get_data_page(place, flat=True)
            pool.set_from_flat_data_page(place, self.content(key, name, pool).view(like.dtype))

    def wipe(self) -> None:
        for pool in (self.pool, *self.beside.values()):
            buffer = pool.kv_buffer
            for part in buffer if isinstance(buffer, list) else [buffer]:
                part.zero_()

    def transfers(self, keys: Sequence[str]) -> list[PoolTransfer]:
        """HiCache's own for these pages, the last window and the last state, into the first slots of each pool."""
        found = [PoolTransfer(name=PoolName.KV, keys=[*keys], host_indices=self.slots(range(len(keys))))]
        for name in self.beside:
            some = keys[-WINDOW_PAGES:] if name == "swa" else keys[-1:]
            slots = self.slots(range(len(some))) if name == "swa" else torch.arange(len(some))
            policy = PoolHitPolicy.TRAILING_PAGES
            found.append(PoolTransfer(name=PoolName(name), keys=[*some], host_indices=slots, hit_policy=policy))
        return found

    def same(self, transfers: Sequence[PoolTransfer]) -> None:
        """The slots hold these pages."""
        for one in transfers:
            name = str(one.name.value)
            pool, each = self.beside.get(name, self.pool), 1 if name == "mamba" else rig.PAGE
            for place, key in zip(one.host_indices[::each].tolist(), one.keys, strict=True):
                self._same(name, pool, place, key)

    def holds(self, tokens: Sequence[int], pages: int) -> None:
        """The tree's only prompt has the first pages of these tokens, and what is beside them at the end."""
        keys, places, beside = self.keys(tokens)[:pages], list[int](), {name: list[int]() for name in self.beside}
        node = self.tree.tree_core.root_node
        while node.children:
            (node,) = node.children.values()
            places += _places(node.component_data[ComponentType.FULL].host_value, rig.PAGE)
            for name, found in beside.items():
                found += _places(node.component_data[COMPONENTS[name]].host_value, rig.PAGE if name == "swa" else 1)
        assert len(places) == pages, (len(places), pages)
        for place, key in zip(places, keys, strict=True):
            self._same("kv", self.pool, place, key)
        for name, pool in self.beside.items() if pages else ():
            wanted = keys[-WINDOW_PAGES:] if name == "swa" else keys[-1:]
            assert len(beside[name]) >= len(wanted), (name, len(beside[name]), len(wanted))
            for place, key in zip(beside[name][-len(wanted) :], wanted, strict=True):
                self._same(name, pool, place, key)

    def _same(self, name: str, pool: Any, place: int, key: str) -> None:
        now = pool.get_data_page(place, flat=True).view(torch.uint8)
        assert torch.equal(now, self.content(key, name, pool)), (name, place, "a wrong byte")

    # -- requests ------------------------------------------------------------------------------------------------------

    def begin(self, rid: str, tokens: Sequence[int]) -> CacheRequestHandle | None:
        """A request comes: what the storage has of it is fetched. None where nothing is."""
        request, found = CacheRequestHandle(rid, 0), self.match(tokens)
        self.tree.prefetch_from_storage(request, found.last_host_node, array("q", tokens), prefix_keys=[])
        return request if self.tree.has_ongoing_prefetch(request) else None

    def wait(self, request: CacheRequestHandle | None) -> float:
        """Until its policy lets the request run, as the scheduler asks in each step; the seconds it took."""
        start = time.monotonic()
        if request is not None:
            rig.until(lambda: self.tree.check_prefetch_progress(request) or self.poll(), "the request may run")
        return time.monotonic() - start

    def hit(self, tokens: Sequence[int]) -> int:
        """Pages of these tokens that the pool has."""
        return int(self.match(tokens).host_hit_length) // rig.PAGE

    def came(self, rid: str, tokens: Sequence[int]) -> int:
        """A request comes and may run; how many of its first pages it has now, on all ranks. Checks the bytes of all
        pools. The tree is empty before and behind it."""
        self.wipe()
        self.wait(self.begin(rid, tokens))
        pages = self.hit(tokens)
        self.holds(tokens, pages)
        self.agree(pages)
        self.tree.reset()
        return pages

    def poll(self) -> None:
        self.tree.check_hicache_events()

    def match(self, tokens: Sequence[int]) -> Any:
        return self.tree.match_prefix(MatchPrefixParams(key=rig.Rig.key(tokens)))

    def until_all(self, done: Callable[[], bool], what: str) -> None:
        """Until it is so on all ranks."""

        def all_done() -> bool:
            least = torch.tensor(int(done()))
            torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN)
            return bool(least)

        rig.until(all_done, what)

    def agree(self, value: int) -> None:
        """The value is the same on all ranks."""
        for op in (torch.distributed.ReduceOp.MIN, torch.distributed.ReduceOp.MAX):
            torch.distributed.all_reduce(found := torch.tensor(value), op)
            assert int(found) == value

    def meet(self) -> None:
        """All ranks are here."""
        torch.distributed.barrier()

    def close(self) -> None:
        self.tree.shutdown()
        self.storage.close()


def _places(slots: torch.Tensor | None, each: int) -> list[int]:
    return [] if slots is None else slots[::each].tolist()
