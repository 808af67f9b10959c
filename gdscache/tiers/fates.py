"""Why a page is in no tier: evicted (probably), or a cause that is remembered. In bounded memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence

from gdscache.disk.kept import BAD_KEPT, BadPage
from gdscache.pages.hit import Told
from gdscache.policies.admission import RecentCounter

KEPT = 1 << 14  # the last pages whose causes are remembered: some 3 MiB
LEAST = 1 << 12  # evictions that the smallest cache remembers
_NOTED = 1 << 13  # evicted pages that may wait for `bring_in`


class PageFates:
    """Notes of pages that went, or never came. The manager's lock guards it.

    Evictions are in a filter: at least the last `evictions`, up to twice as many, in memory that never changes: 4 to 8
    bytes for each of `evictions`. It knows all of these, and takes some 2 % of other pages for evicted. `evict` only
    notes keys, which `bring_in` adds later, many at once.
    """

    def __init__(self, evictions: int, kept: int = KEPT) -> None:
        self.evicted = RecentCounter(max(LEAST, evictions))
        self._noted: list[bytes] = []
        self._causes: OrderedDict[bytes, Told] = OrderedDict()
        self.bad: dict[bytes, BadPage] = {}  # the last bad pages, the oldest first
        self._kept = kept

    @property
    def waiting(self) -> int:
        return len(self._noted)

    def evict(self, keys: Collection[bytes]) -> None:
        self._noted += keys
        if len(self._noted) > _NOTED:
            self.bring_in()

    def bring_in(self, most: int | None = None) -> None:
        some = self._noted[:most]
        del self._noted[:most]
        self.evicted.add_all(some)

    def note(self, keys: Sequence[bytes], told: Told) -> None:
        """Why these pages are absent, or will be once they are evicted. The last note counts."""
        causes = self._causes
        for key in keys:
            causes[key] = told
            causes.move_to_end(key)
        while len(causes) > self._kept:
            causes.popitem(last=False)

    def found_bad(self, key: bytes, told: Told, slot: int, place: str, at: float) -> None:
        """The bytes of a page were bad, and its tier has dropped it. `at`: seconds since the epoch."""
        self.bad.pop(key, None)
        self.bad[key] = BadPage(told.tier, told.detail, slot, place, at)
        while len(self.bad) > BAD_KEPT:
            del self.bad[next(iter(self.bad))]

    def forget(self, keys: Sequence[bytes]) -> None:
        if self._causes or self.bad:
            for key in keys:
                self._causes.pop(key, None)
                self.bad.pop(key, None)

    def told(self, key: bytes) -> Told:
        self.bring_in()
        bad, known = self.bad.get(key), self._causes.get(key)
        if bad is not None:
            return Told("bad", bad.tier, bad.cause)
        if known is not None:
            return known
        return Told("evicted") if key in self.evicted else Told("absent")
