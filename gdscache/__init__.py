"""gdscache: a GPUDirect Storage tiered cache engine for the KV cache of transformers."""

from gdscache.config import Config, load_config
from gdscache.engine import CacheEngine, CheckReport, Hit
from gdscache.errors import GdsCacheError
from gdscache.loading import Gap, LayerwiseLoad, LoadReport
from gdscache.prefetch import Prefetch, PrefetchReport
from gdscache.sequence import Sequence
from gdscache.storing import StoreHandle, StoreReport
from gdscache.tiers.keeping import Pin
from gdscache.tiers.manager import PageStatus
from gdscache.tiers.prefetching import PrefetchEnd

__version__ = "0.1.0"

__all__ = [
    "CacheEngine",
    "CheckReport",
    "Config",
    "Gap",
    "GdsCacheError",
    "Hit",
    "LayerwiseLoad",
    "LoadReport",
    "PageStatus",
    "Pin",
    "Prefetch",
    "PrefetchEnd",
    "PrefetchReport",
    "Sequence",
    "StoreHandle",
    "StoreReport",
    "load_config",
]
