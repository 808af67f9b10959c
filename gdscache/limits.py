"""What numbers may be at most, each by what it is used for, and what an engine has no key for. Constants only."""

from __future__ import annotations

import dataclasses

# A wait of a thread takes up to 2**63 nanoseconds (`threading.TIMEOUT_MAX`, 292 years) on 64-bit Linux, and what is
# waited for may be a sum of several times. This is 31 years.
MAX_SECONDS = 1_000_000_000

# Things that are numbered or counted become fields of 32 bits, signed, in ranks, kernels and tables.
MAX_COUNT = (1 << 31) - 1

# The extent of a page moves in one request: Linux reads and writes no more in one call (MAX_RW_COUNT).
MAX_EXTENT_BYTES = (1 << 31) - 4096

MAX_LAYERS = 4096
MAX_DEVICE_INDEX = 127  # torch keeps the index of a device in a signed byte

KEY_BYTES = 32  # of the key of a page, and of the digest of a namespace

# Pages that go on to a tier of files at once: 512 MiB, but no more than 512 unless these are less than 128 MiB, and 8
# always. A batch costs a millisecond of Python however few it has, and keeps locks the longer the more it has.
BATCH_BYTES, BATCH_PAGES, SMALL_BATCH_BYTES, LEAST_BATCH = 512 << 20, 512, 128 << 20, 8


@dataclasses.dataclass(frozen=True)
class EngineLimits:
    """What is fixed in an engine. `CacheEngine(limits=...)` takes others, for trials of small tiers."""

    load_threads: int = 4  # loads that run at once
    prefetch_bytes: int = 128 << 20  # of one chunk of a prefetch, a page at least
    prefetch_first: int = 32 << 20  # of its first one while its tier is not measured; the next has twice as many
    prefetch_chunks: int = 3  # that move at once; a load may have to wait for them
    prefetch_share: float = 0.5  # of the CPU tier's slots, for prefetched pages that no load has used; a page at least
    ssd_reserve: int = 64  # free slots kept ready, so that no eviction waits for a commit; an eighth of them at most
    write_hits: int = 2  # of a page before `write_through_selective` writes it, 255 at most
    admission_offers: int = 2  # at which of them `second_offer` lets a page in


LIMITS = EngineLimits()
