"""Upper bounds of numbers, and constants of an engine without a setting."""

from __future__ import annotations

import dataclasses

# A thread's wait takes up to 2**63 nanoseconds (`threading.TIMEOUT_MAX`, 292 years) on 64-bit Linux, and may be a sum
# of several times. This is 31 years.
MAX_SECONDS = 1_000_000_000

# Counts and numbers become signed fields of 32 bits in ranks, kernels and tables.
MAX_COUNT = (1 << 31) - 1

# The extent of a page moves in one request: Linux reads and writes no more in one call (MAX_RW_COUNT).
MAX_EXTENT_BYTES = (1 << 31) - 4096

MAX_LAYERS = 4096

KEY_BYTES = 32  # of a page's key, and of a namespace's digest

# A batch of writes to a tier of files has 512 MiB, but no more than 512 pages unless these have less than 128 MiB, and
# at least 8 pages. A batch costs a millisecond of Python for any number of pages, and a larger one holds locks longer.
BATCH_BYTES, BATCH_PAGES, SMALL_BATCH_BYTES, LEAST_BATCH = 512 << 20, 512, 128 << 20, 8


@dataclasses.dataclass(frozen=True)
class EngineLimits:
    """Constants of an engine. `CacheEngine(limits=...)` takes others, for trials of small tiers."""

    load_threads: int = 4  # loads that run at once
    prefetch_bytes: int = 128 << 20  # of a prefetch's chunk; at least a page
    prefetch_first: int = 32 << 20  # of its first chunk while the tier is not measured; each next one doubles
    prefetch_chunks: int = 3  # chunks that move at once; a load may have to wait for them
    prefetch_share: float = 0.5  # share of the CPU tier's slots for unused prefetched pages; at least a page
    ssd_reserve: int = 64  # free slots kept ready, at most an eighth of all, so that no eviction waits for a commit
    write_hits: int = 2  # hits of a page before `write_through_selective` writes it, 255 at most
    admission_offers: int = 2  # `second_offer` admits a page at this offer


LIMITS = EngineLimits()
