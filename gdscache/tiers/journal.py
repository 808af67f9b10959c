"""An engine's lines at INFO: a summary every few minutes, and now and then why a request missed pages.

It has no thread. Threads of the engine that no caller waits for ask after their work whether a line is due.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import Counter
from typing import TYPE_CHECKING

from gdscache.sizes import about

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gdscache.pages.layout import PageLayout
    from gdscache.tiers.manager import TierManager

_log = logging.getLogger("gdscache.summary")
Counts = Counter[tuple[str, str]]
_SUMMED = frozenset(("lookups", "hits", "misses", "bytes_loaded", "stored", "refused", "dropped"))


class Journal:
    """Writes an engine's lines: the ones that wait in its `LimitedLog`, and its own. `tick` is for threads that hold no
    lock and may wait for a slow log.

    `name`: the engine's, in every line. `summary`, `requests`: seconds between two lines of these kinds; 0: none. The
    clock is that of the manager's log.
    """

    def __init__(
        self, manager: TierManager, name: str, layout: PageLayout, *, summary: float = 0.0, requests: float = 0.0
    ) -> None:
        self._manager = manager
        self._name = name
        self._layout = layout
        self._summary, self._requests = summary, requests
        now = manager.log.clock()
        self._since = now
        self._due = now + summary if summary else math.inf
        self._sampled = now if requests else math.inf
        self._before: Counts = Counter()
        self._turn = threading.Lock()

    @property
    def due(self) -> bool:
        """Whether a line is due. Takes no lock."""
        manager, now = self._manager, self._manager.log.clock()
        return now >= self._due or (manager.sample is not None and now >= self._sampled) or manager.log.waiting

    def tick(self) -> None:
        """Write the lines that are due, unless another thread is writing them."""
        self._manager.log.flush()
        now = self._manager.log.clock()
        if self.due and self._turn.acquire(blocking=False):
            try:
                if self._manager.sample is not None and now >= self._sampled:
                    self._sampled = now + self._requests
                    self._tell_request()
                if now >= self._due:
                    self._due = now + self._summary
                    self._sum_up(now)
            finally:
                self._turn.release()

    def _tell_request(self) -> None:
        sample, self._manager.sample = self._manager.sample, None
        if sample is not None and _log.isEnabledFor(logging.INFO):
            _log.info("%s: a request that missed pages: %s", self._name, sample())

    def _sum_up(self, now: float) -> None:
        counts = Counter(self._manager.snapshot())
        seconds, self._since = now - self._since, now
        new, self._before = counts - self._before, counts
        if _SUMMED.intersection(group for group, _ in new) and _log.isEnabledFor(logging.INFO):
            _log.info("%s: in %.0f s %s", self._name, seconds, summed(new, self._layout))


def summed(counts: Mapping[tuple[str, str], int], layout: PageLayout) -> str:
    def of(group: str) -> dict[str, int]:
        found = {name: n for (kind, name), n in counts.items() if kind == group and n > 0}
        return dict(sorted(found.items(), key=lambda one: -one[1]))

    asked = counts.get(("lookups", "pages"), 0)
    parts = [f"{counts.get(('lookups', 'requests'), 0):,} lookups of {asked:,} pages"]
    if asked:
        hits, misses = of("hits"), of("misses")
        found = sum(hits.values())
        parts.append(f"hit {_share(found, asked)}{_each(hits, lambda n: _share(n, asked))}")
        parts.append(f"missed {_share(asked - found, asked)}{_each(misses, '{:,}'.format)}")
    stored = {tier: pages * layout.bytes_in(tier) for tier, pages in of("stored").items()}
    for what, sizes in (("loaded", of("bytes_loaded")), ("stored", stored)):
        parts.append(f"{what} {about(sum(sizes.values()))}{_each(sizes, about)}")
    for group in ("refused", "dropped"):
        causes = of(group)
        parts.append(f"{group} {sum(causes.values()):,} pages{_each(causes, '{:,}'.format)}")
    return ", ".join(parts)


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %"


def _each(found: Mapping[str, int], shown: Callable[[int], str]) -> str:
    return f" ({', '.join(f'{name} {shown(n)}' for name, n in found.items())})" if found else ""
