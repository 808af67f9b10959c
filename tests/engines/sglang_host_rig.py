"""SGLang's own host pools on a CPU with our storage below them, made by HiCache's factory. See `sglang_rig`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, HiCacheStorageExtraInfo
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory
from sglang.srt.mem_cache.utils import get_storage_hash_str

from tests.engines import sglang_rig as rig

DYNAMIC = {
    "backend_name": "gdscache",
    "module_path": "gdscache.integrations.sglang.storage",
    "class_name": "GdsCacheStorage",
    "interface_v1": 1,
}
_T = TypeVar("_T")


def host_pool(kind: str, layout: str) -> Any:
    device = rig.device_pool(kind)
    (info,) = device.get_device_pool_infos()
    make = MLATokenToKVPoolHost if kind == "mla" else MHATokenToKVPoolHost
    return make(
        info.buffer_info,
        2.0,
        0,
        rig.PAGE,
        layout,
        pin_memory=False,
        device="cpu",
        device_capacity_tokens=rig.TOKENS,
        start_layer=0,
        end_layer=rig.LAYERS - 1,
        **({"target_layer_num": rig.LAYERS} if kind == "mla" else {}),
    )


def same(now: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    """Pages hold what they are to hold."""
    assert len(now) == len(wanted), (len(now), len(wanted))
    for number, (a, b) in enumerate(zip(now, wanted, strict=True)):
        assert torch.equal(a, b), (number, "a wrong byte")


class PoolRig:
    """The pages of a host pool, and our storage below it."""

    pool: Any
    storage: Any

    def keys(self, tokens: Sequence[int], before: str | None = None) -> list[str]:
        """SGLang's names of the full pages."""
        found = get_storage_hash_str(rig.Rig.key(tokens), before, page_size=rig.PAGE)
        assert isinstance(found, list)
        return found

    def slots(self, pages: Sequence[int]) -> torch.Tensor:
        """The tokens of these pages of the pool."""
        return torch.cat([torch.arange(page * rig.PAGE, (page + 1) * rig.PAGE) for page in pages])

    def fill(self, pages: Sequence[int], seed: int) -> list[torch.Tensor]:
        """Random bytes into pages; what they hold now."""
        source = torch.Generator().manual_seed(seed)
        for page in pages:
            self.pool.set_from_flat_data_page(page * rig.PAGE, self.drawn(source))
        return self.read(pages)

    def drawn(self, source: torch.Generator) -> torch.Tensor:
        """A random page."""
        like = self.pool.get_data_page(0)
        return torch.randn(like.shape, generator=source).to(like.dtype)

    def read(self, pages: Sequence[int]) -> list[torch.Tensor]:
        return [self.pool.get_data_page(page * rig.PAGE).clone() for page in pages]


class HostRig(PoolRig):
    """A host pool, and our storage below it; HiCache's calls are made here."""

    def __init__(
        self,
        folder: Path,
        kind: str = "mha",
        layout: str = "page_first",
        *,
        pool: Any = None,
        at_start: bool = True,
        server: dict[str, Any] | None = None,
        shared: dict[str, Any] | None = None,
        **changes: Any,
    ) -> None:
        """`pool`: an earlier one's, to which a storage is attached again. `at_start`: SGLang was started with one.
        `server`: more of SGLang's settings. `shared`: what it makes of `tp_lcm_size`.
        """
        given = {"hicache_storage_backend": "dynamic"} if at_start else {}
        self.args = rig.server_args(folder, enable_hierarchical_cache=True, **given, **(server or {}))
        self.pool = host_pool(kind, layout) if pool is None else pool
        config = rig.sections(folder, cpu=None, **changes)
        settings = HiCacheStorageConfig(
            tp_rank=0,
            tp_size=1,
            pp_rank=0,
            pp_size=1,
            attn_cp_rank=0,
            attn_cp_size=1,
            is_mla_model=kind == "mla",
            enable_storage_metrics=False,
            is_page_first_layout=layout == "page_first",
            model_name="model",
            extra_config={**DYNAMIC, "config": config},
            **(shared or {}),
        )
        self.storage = StorageBackendFactory.create_backend("dynamic", settings, self.pool)
        self.storage.register_mem_pool_host(self.pool)
        self.storage.register_mem_host_pool_v2(self.pool, "kv")
        self.storage.on_host_pools_registered()

    def backup(self, keys: Sequence[str], pages: Sequence[int], before: Sequence[str] = ()) -> bool:
        """What HiCache's backup thread does with a batch."""
        controller = SimpleNamespace(storage_backend=self.storage)
        info = HiCacheStorageExtraInfo(prefix_keys=list(before))
        return bool(HiCacheController._page_set_zero_copy(controller, list(keys), self.slots(pages), info))

    def prefetch(self, keys: Sequence[str], pages: Sequence[int], before: Sequence[str] = ()) -> int:
        """What HiCache's I/O thread does with a batch: how many of the first pages came."""
        controller = SimpleNamespace(storage_backend=self.storage)
        operation = SimpleNamespace(request_id="r")
        info = HiCacheStorageExtraInfo(prefix_keys=list(before))
        return int(HiCacheController._page_get_zero_copy(controller, operation, list(keys), self.slots(pages), info))

    def flush(self) -> None:
        """What a flush of SGLang's ends with."""
        self.pool.clear()

    def close(self) -> None:
        self.storage.close()


def in_thread(work: Callable[[], _T]) -> _T:
    """As HiCache's threads call, of which a flush begins new ones."""
    found: list[_T] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join(60)
    assert found, "it hangs, or raised"
    return found[0]
