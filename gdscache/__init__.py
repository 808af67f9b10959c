"""gdscache: a KV cache of transformers on three tiers: GPU, host memory and SSD."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gdscache.config import Config as Config
    from gdscache.config import load_config as load_config
    from gdscache.engine.engine import CacheEngine as CacheEngine
    from gdscache.engine.engine import CheckReport as CheckReport
    from gdscache.engine.hybrid import HybridEngine as HybridEngine
    from gdscache.engine.hybrid_handles import HybridHit as HybridHit
    from gdscache.engine.sequence import Sequence as Sequence
    from gdscache.errors import CapacityError as CapacityError
    from gdscache.errors import ConfigError as ConfigError
    from gdscache.errors import DeadlineError as DeadlineError
    from gdscache.errors import EngineClosedError as EngineClosedError
    from gdscache.errors import GdsCacheError as GdsCacheError
    from gdscache.errors import LoadFailedError as LoadFailedError
    from gdscache.errors import PoolFullError as PoolFullError
    from gdscache.errors import StorageError as StorageError
    from gdscache.load.handle import Gap as Gap
    from gdscache.load.handle import LayerwiseLoad as LayerwiseLoad
    from gdscache.load.plan import LoadReport as LoadReport
    from gdscache.moves import PageStatus as PageStatus
    from gdscache.moves import PrefetchEnd as PrefetchEnd
    from gdscache.pages.hit import Hit as Hit
    from gdscache.pages.keys import PageHashes as PageHashes
    from gdscache.prefetch.handle import Prefetch as Prefetch
    from gdscache.prefetch.handle import PrefetchReport as PrefetchReport
    from gdscache.ranks.address import RankAddress as RankAddress
    from gdscache.ranks.rank import Rank as Rank
    from gdscache.store.handle import StoreHandle as StoreHandle
    from gdscache.store.handle import StoreReport as StoreReport
    from gdscache.tiers.pins import Pin as Pin

__version__ = "0.2.0"

# By module, imported on first use (PEP 562): the engine imports torch, which takes longer than most commands.
_BY_HOME = {
    "config": "Config load_config",
    "engine.engine": "CacheEngine CheckReport",
    "engine.hybrid": "HybridEngine",
    "engine.hybrid_handles": "HybridHit",
    "engine.sequence": "Sequence",
    "errors": "CapacityError ConfigError DeadlineError EngineClosedError GdsCacheError LoadFailedError PoolFullError "
    "StorageError",
    "load.handle": "Gap LayerwiseLoad",
    "load.plan": "LoadReport",
    "moves": "PageStatus PrefetchEnd",
    "pages.hit": "Hit",
    "pages.keys": "PageHashes",
    "prefetch.handle": "Prefetch PrefetchReport",
    "ranks.address": "RankAddress",
    "ranks.rank": "Rank",
    "store.handle": "StoreHandle StoreReport",
    "tiers.pins": "Pin",
}
_HOMES = {name: home for home, names in _BY_HOME.items() for name in names.split()}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
