"""Numbers that one process finds, and all ranks of a host go by."""

from __future__ import annotations

import contextlib
import secrets
import socket
import struct
from collections.abc import Callable, Sequence

from gdscache.errors import GdsCacheError, RankProtocolError
from gdscache.ranks.address import RankAddress
from gdscache.ranks.channel import check_peer, connected, listening
from gdscache.ranks.leader import CONNECT_S
from gdscache.runtime.threads import log_failure

_NUMBER = struct.Struct("<Q")


class Agreement:
    """Numbers from rank 0's process. Every rank asks for each, in the same order, in one thread.

    They have connections of their own, which break with a process only. So the answers are the same, too, where an
    engine and a rank have lost each other: a number that has been sent cannot be lost.
    """

    def __init__(self, rank: int) -> None:
        self.address = RankAddress(f"gdscache-numbers-{secrets.token_hex(16)}", rank, rank)
        self._ends: list[socket.socket] = []
        self._listening: socket.socket | None = None
        if rank:
            self._listening = listening(self.address.name)

    def connect(self, addresses: Sequence[RankAddress]) -> None:
        """On rank 0: connect to the other ranks, before any asks. Raises `RankError`, and `RankProtocolError` for
        another user's process."""
        for address in addresses:
            self._ends.append(connected(address.name, f"rank {address.rank}", CONNECT_S))
            check_peer(self._ends[-1])

    def of(self, find: Callable[[], int]) -> int:
        """Rank 0's `find()`, 0 or more. 0 on every rank if that fails, and if rank 0's process has ended."""
        if self._listening is not None:
            return self._told(self._listening)
        found = 0
        try:
            found = find()
        except GdsCacheError as error:
            log_failure(error)
        for end in self._ends:
            with contextlib.suppress(OSError):  # its process has ended
                end.sendall(_NUMBER.pack(found))
        return found

    def close(self) -> None:
        """The other ranks get 0 from now on. Repeated calls are fine."""
        for one in (*self._ends, self._listening):
            if one is not None:
                one.close()

    def _told(self, listening: socket.socket) -> int:
        """Wait for the next number, without a limit: a rank that gave up would go by another one than the others."""
        with contextlib.suppress(OSError):
            while not self._ends:
                self._accept(listening)
            told = self._ends[0].recv(_NUMBER.size, socket.MSG_WAITALL)
            if len(told) == _NUMBER.size:
                return int(_NUMBER.unpack(told)[0])
        return 0

    def _accept(self, listening: socket.socket) -> None:
        found, _ = listening.accept()
        try:
            check_peer(found)
        except RankProtocolError as error:
            found.close()
            log_failure(error)
        else:
            self._ends.append(found)
