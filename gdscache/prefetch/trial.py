"""Measures tiers of files when an engine opens, for a gate that decides.

Until a tier is measured, every hit is loaded from it. Without this, the first requests after a restart would wait for a
disk that is slower than computing. The measured pages stay in the CPU tier.
"""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gdscache.prefetch.prefetcher import Prefetcher
    from gdscache.tiers.base import DurableTier
    from gdscache.tiers.manager import TierManager

TRIAL_BYTES, TRIALS = 64 << 20, 8  # of one prefetch, and the most prefetches
TRIAL_S = 0.5  # for all of them, so that a hanging disk does not keep an engine from opening


def try_files(manager: TierManager, prefetcher: Prefetcher) -> None:
    """Measure each tier of files that lookups see, that has pages, and that is not measured yet."""
    until = time.monotonic() + TRIAL_S
    for tier in manager.files if manager.landing is not None else ():
        if tier.served:
            _try(manager, prefetcher, tier, until)


def _try(manager: TierManager, prefetcher: Prefetcher, tier: DurableTier, until: float) -> None:
    with manager.lock:
        each = max(1, min(TRIAL_BYTES // prefetcher.layout.extent_bytes, len(tier.index) // TRIALS))
        pages = [entry.page for entry in itertools.islice(tier.index, TRIALS * each)]
    for at in range(0, len(pages), each):
        left = until - time.monotonic()
        if left <= 0 or manager.costs.knows(tier.name):
            break
        with prefetcher.start(pages[at : at + each], pin=TRIAL_S) as trial:
            trial.wait(left)
        manager.busy.tell()
