"""Addresses of ranks and marks of stores: plain data."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class RankAddress:
    """The address of a rank on this host, for the leader. `shard`: the part of the heads that it holds.

    `name`: of an abstract Unix socket, which goes with its process, in a network namespace.
    """

    name: str
    rank: int
    shard: int


@dataclasses.dataclass(frozen=True, eq=False)
class StoreMark:
    """A store's place in the order of the ranks' streams: its moves come after it. `order`: for `Rank.store`.

    `number`: below 0 for a mark that the caller makes, whose number its ranks know (`Rank.place`).
    """

    number: int
    order: bytes

    def query(self) -> bool:
        """True: the leader has no streams; its order is the order."""
        return True

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def wait(self, stream: object = None) -> None: ...
