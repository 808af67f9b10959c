"""What leader and ranks name each other by: plain data, without what carries it out."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class RankAddress:
    """Where a rank is reached, on this host: plain data for the leader. `shard`: which part of the heads it holds."""

    path: str
    rank: int
    shard: int


@dataclasses.dataclass(frozen=True, eq=False)
class StoreMark:
    """A store's place in the order of the ranks' streams: what its moves come behind. `order`: for `Rank.store`."""

    number: int
    order: bytes

    def query(self) -> bool:
        """Who decides has no streams: whatever its orders come behind is behind it."""
        return True

    def synchronize(self) -> None:
        """There is nothing to wait for."""

    def wait(self, stream: object = None) -> None:
        """There is no stream that could wait."""
