"""HiCache whole on a CPU for hybrid models: SGLang's tree with windows or states, its host pools, our storage below."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from tests.engines import sglang_hicache_rig as hicache
from tests.engines import sglang_hybrid_rig as hybrids
from tests.engines import sglang_rig as rig

WINDOW, WINDOW_PAGES = 8, 2
COMPONENTS = {"swa": ComponentType.SWA, "mamba": ComponentType.MAMBA}
KINDS = {"swa": ["swa"], "mamba": ["mamba"], "all": ["swa", "mamba"]}  # the pools beside that of all tokens


class PoolsRig(hicache.HiCacheRig):
    """`kind`: of `KINDS`. Bytes of a page follow from its key, pool and rank."""

    def __init__(
        self,
        folder: Path,
        kind: str,
        *,
        policy: str = "wait_complete",
        rank: int = 0,
        ranks: int = 1,
        timeout: float = 0.3,
        **changes: Any,
    ) -> None:
        model = {"sliding_window": WINDOW} if "swa" in KINDS[kind] else None
        self.packed = "model" in changes
        args = self.join(folder, policy, rank, ranks, timeout, model, changes)
        args._mamba_cache_chunk_size = rig.PAGE
        self.rank = rank
        components = ["FULL", *(name.upper() for name in KINDS[kind])]
        params = hybrids.params(components, rig.TOKENS, 2, 64, WINDOW, torch.distributed.group.WORLD)
        self.tree = UnifiedRadixCache(params)
        self.tree.init_hicache(args, params)
        controller = self.tree.cache_controller
        self.pool, self.storage = controller.storage_host_pool, controller.storage_backend
        entries = {str(name.value): entry.host_pool for name, entry in controller.mem_pool_host.entry_map.items()}
        self.beside = {name: entries[name] for name in KINDS[kind]}

    def content(self, key: str, name: str, pool: Any) -> torch.Tensor:
        """The bytes of a page, or a state, whenever it is computed. Where pages are packed, one of eight does not fit,
        of windows one of four."""
        number = int(key[:12], 16)
        source = torch.Generator().manual_seed(number * 8 + self.rank * 4 + ["kv", "swa", "mamba"].index(name))
        like = pool.get_data_page(0, flat=True).view(torch.uint8)
        if self.packed and name != "mamba" and number % (4 if name == "swa" else 8):
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
        controller = self.tree.cache_controller
        controller.write_storage(slots, list(tokens), hash_value=keys, prefix_keys=head, extra_pools=extra)
        rig.until(lambda: not controller.ack_backup_queue.empty(), "the backup ends")
        controller.ack_backup_queue.get()
        self.pool.free(slots)
        for pool, own in held:
            pool.free(own)

    def _fill(self, name: str, pool: Any, places: Sequence[int], keys: Sequence[str]) -> None:
        for place, key in zip(places, keys, strict=True):
            like = pool.get_data_page(place, flat=True)
            pool.set_from_flat_data_page(place, self.content(key, name, pool).view(like.dtype))

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

    def all_here(self) -> bool:
        """All ranks are."""
        torch.distributed.barrier()
        return True

    def wipe(self) -> None:
        for pool in (self.pool, *self.beside.values()):
            buffer = pool.kv_buffer
            for part in buffer if isinstance(buffer, list) else [buffer]:
                part.zero_()

    def came(self, rid: str, tokens: Sequence[int]) -> int:
        """A request comes and may run; how many of its first pages it has now. Checks the bytes of all pools."""
        self.wipe()
        request = self.begin_any(rid, tokens)
        if request is not None:
            self.wait(request)
        pages = int(self.match(tokens).host_hit_length) // rig.PAGE
        self._check(self.keys(tokens)[:pages], pages)
        return pages

    def begin_any(self, rid: str, tokens: Sequence[int]) -> Any:
        """A request comes; None where nothing of it is fetched."""
        request, found = hicache.CacheRequestHandle(rid, 0), self.match(tokens)
        self.tree.prefetch_from_storage(request, found.last_host_node, array("q", tokens), prefix_keys=[])
        return request if self.tree.has_ongoing_prefetch(request) else None

    def _check(self, keys: Sequence[str], pages: int) -> None:
        """The tree's only prompt: pages of all tokens, and what is beside them at the end."""
        places, beside = list[int](), {name: list[int]() for name in self.beside}
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


def _places(slots: torch.Tensor | None, each: int) -> list[int]:
    return [] if slots is None else slots[::each].tolist()
