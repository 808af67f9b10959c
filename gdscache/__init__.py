"""gdscache: a GPUDirect Storage tiered cache engine for the KV cache of transformers."""

from gdscache.config import Config, load_config
from gdscache.engine import CacheEngine, CheckReport, Hit
from gdscache.errors import GdsCacheError
from gdscache.loading import LayerwiseLoad, LoadReport
from gdscache.sequence import Sequence
from gdscache.storing import StoreHandle, StoreReport
from gdscache.tiers.manager import PageStatus

__version__ = "0.1.0"

__all__ = [
    "CacheEngine",
    "CheckReport",
    "Config",
    "GdsCacheError",
    "Hit",
    "LayerwiseLoad",
    "LoadReport",
    "PageStatus",
    "Sequence",
    "StoreHandle",
    "StoreReport",
    "load_config",
]
