"""Stored pages and their fetches, for an adapter's table of requests: a test says when pages come, and how it ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from gdscache import PageHashes

PIN = 660.0  # seconds


def names_of(hashes: PageHashes) -> list[bytes]:
    return [page.key for page in hashes.pages(bytes(32))]


class FakeFetch:
    """A fetch whose pages come when the test says so. `loads`: how often its pages were asked for, to be loaded."""

    asking = False

    def __init__(self, names: list[bytes], cached: int, wanted: int, clock: Callable[[], float]) -> None:
        self.names, self.cached, self.wanted = names, cached, wanted
        self.there, self.ended, self.released, self.loads = 0, wanted == 0, 0, 0
        self.no_room = self.too_slow = False
        self.clock, self.until = clock, clock() + PIN

    def done(self) -> bool:
        return self.ended or self.there >= self.wanted

    def verified(self) -> int:
        assert not self.released
        return 0 if self.lapsed() else self.there

    def loadable(self, pages: int) -> bool:
        return pages <= self.verified()

    def outpaced(self) -> bool:
        return self.too_slow

    def crowded(self) -> bool:
        return self.no_room

    def lapsed(self, within: float = 0.0) -> bool:
        return self.clock() + within >= self.until

    def release(self) -> None:
        self.released += 1

    def sources(self, first: int, pages: int) -> Mapping[str, int]:
        return Counter({"ssd": pages})

    def checked(self, first: int, pages: int) -> list[bytes]:
        assert first + pages <= self.verified(), "a load of pages that are not checked"
        self.loads += 1
        return self.names[first : first + pages]

    unchecked = checked


class FakeCache:
    """The pages that are stored, by their names in some namespace. `asks`: a tier beyond this machine is asked, too.
    `pays_behind`: the fewest pages of the inference engine's behind which the others are worth loading."""

    def __init__(self) -> None:
        self.stored: set[bytes] = set()
        self.fetches: list[FakeFetch] = []
        self.now, self.asks, self.pays_behind = 0.0, False, 0

    def clock(self) -> float:
        return self.now

    def cached(self, hashes: PageHashes) -> int:
        names = names_of(hashes)
        return next((i for i, name in enumerate(names) if name not in self.stored), len(names))

    def waited(self, seconds: float) -> None:
        """A request's wait."""

    def unused(self, request: str, fetch: FakeFetch, first: int, why: str) -> None:
        """A request's pages that it computes."""

    def keys(self, hashes: PageHashes) -> list[bytes]:
        return names_of(hashes)

    def fetch(self, hashes: PageHashes, pages: int, local: int = 0) -> FakeFetch:
        cached = self.cached(hashes)
        wanted = min(pages, cached) if hashes.before + local >= self.pays_behind else local
        self.fetches.append(FakeFetch(names_of(hashes), cached, wanted, self.clock))
        self.fetches[-1].asking = self.asks
        return self.fetches[-1]
