"""What leader and ranks name each other by: plain data, without what carries it out."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class RankAddress:
    """Where a rank is reached, on this host: plain data for the leader. `shard`: which part of the heads it holds.

    `name`: of an abstract Unix socket, which goes with its process, whatever ends that. It is of a network namespace.
    """

    name: str
    rank: int
    shard: int


def socket_of(address: RankAddress) -> str:
    """What the socket is bound to. Who is at its other end is looked at by both (`Channel`): it has no file's mode."""
    return "\0" + address.name


@dataclasses.dataclass(frozen=True, eq=False)
class StoreMark:
    """A store's place in the order of the ranks' streams: what its moves come behind. `order`: for `Rank.store`.

    `number`: below 0 for one that the caller makes, and whose number its ranks know by themselves (`Rank.place`).
    """

    number: int
    order: bytes

    def query(self) -> bool:
        """Who decides has no streams: whatever its orders come behind is behind it."""
        return True

    def synchronize(self) -> None:
        """There is nothing to wait for."""

    def wait(self, stream: object = None) -> None:
        """There is no stream that could wait."""
