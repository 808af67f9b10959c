"""What numbers may be at most, each by what it is used for. Constants only."""

from __future__ import annotations

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

BATCH_BYTES = 128 << 20  # of pages that go on to a tier of files at once, at most ...
LEAST_BATCH = 8  # ... but so many pages always: a batch costs turns at locks, however few it has
