"""What a tier of files takes, tried when an engine opens: for a gate that decides.

Before a tier is measured every hit is loaded from it. So the first requests after a restart would wait for a disk that
is slower than computing. Pages of the tier come to the CPU tier, where a request may want them.
"""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gdscache.prefetch.prefetcher import Prefetcher
    from gdscache.tiers.base import DurableTier
    from gdscache.tiers.manager import TierManager

TRIAL_BYTES, TRIALS = 64 << 20, 8  # of a prefetch, and so many at most
TRIAL_S = 0.5  # for all of them: a disk that hangs keeps nobody from opening


def try_files(manager: TierManager, prefetcher: Prefetcher) -> None:
    """Measure each tier of files that lookups see, that has pages, and of which nothing is known yet."""
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
