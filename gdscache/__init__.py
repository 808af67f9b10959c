"""gdscache: a KV cache of transformers on three tiers: GPU, host memory and SSD."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gdscache.config import Config, load_config
    from gdscache.engine.engine import CacheEngine, CheckReport
    from gdscache.engine.hybrid import HybridEngine
    from gdscache.engine.hybrid_handles import HybridHit
    from gdscache.engine.sequence import Sequence
    from gdscache.errors import (
        CapacityError,
        ConfigError,
        DeadlineError,
        EngineClosedError,
        GdsCacheError,
        LoadFailedError,
        PoolFullError,
        StorageError,
    )
    from gdscache.load.handle import Gap, LayerwiseLoad
    from gdscache.load.report import LoadReport
    from gdscache.moves.base import PageStatus, PrefetchEnd
    from gdscache.pages.hit import Hit
    from gdscache.pages.keys import PageHashes
    from gdscache.prefetch.handle import Prefetch, PrefetchReport
    from gdscache.ranks.address import RankAddress
    from gdscache.ranks.rank import Rank
    from gdscache.store.handle import StoreHandle, StoreReport
    from gdscache.tiers.pins import Pin

__version__ = "0.2.0"

# Name -> module; imported on first use (PEP 562): the engine imports torch, which takes longer than most commands.
_HOMES = {
    "CacheEngine": "engine.engine",
    "CapacityError": "errors",
    "CheckReport": "engine.engine",
    "Config": "config",
    "ConfigError": "errors",
    "DeadlineError": "errors",
    "EngineClosedError": "errors",
    "Gap": "load.handle",
    "GdsCacheError": "errors",
    "Hit": "pages.hit",
    "HybridEngine": "engine.hybrid",
    "HybridHit": "engine.hybrid_handles",
    "LayerwiseLoad": "load.handle",
    "LoadFailedError": "errors",
    "LoadReport": "load.report",
    "PageHashes": "pages.keys",
    "PageStatus": "moves.base",
    "Pin": "tiers.pins",
    "PoolFullError": "errors",
    "Prefetch": "prefetch.handle",
    "PrefetchEnd": "moves.base",
    "PrefetchReport": "prefetch.handle",
    "Rank": "ranks.rank",
    "RankAddress": "ranks.address",
    "Sequence": "engine.sequence",
    "StorageError": "errors",
    "StoreHandle": "store.handle",
    "StoreReport": "store.handle",
    "load_config": "config",
}

__all__ = [
    "CacheEngine",
    "CapacityError",
    "CheckReport",
    "Config",
    "ConfigError",
    "DeadlineError",
    "EngineClosedError",
    "Gap",
    "GdsCacheError",
    "Hit",
    "HybridEngine",
    "HybridHit",
    "LayerwiseLoad",
    "LoadFailedError",
    "LoadReport",
    "PageHashes",
    "PageStatus",
    "Pin",
    "PoolFullError",
    "Prefetch",
    "PrefetchEnd",
    "PrefetchReport",
    "Rank",
    "RankAddress",
    "Sequence",
    "StorageError",
    "StoreHandle",
    "StoreReport",
    "load_config",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
