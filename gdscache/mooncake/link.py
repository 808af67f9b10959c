"""The connection to a shared pool: its two clients, and the memory registered with the client that moves bytes."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Sequence

from gdscache.errors import TierUnavailableError
from gdscache.mooncake.client import DONE, Client, MooncakeAddress, MooncakeClient, MooncakeQueries
from gdscache.sizes import about

CONNECT_S = 1.0  # seconds that a TCP connection to the master may take
_ANSWERS = 3  # answers in a row of each client: each has connections of its own to a restarted master
Connect = Callable[[MooncakeAddress], tuple[Client, Client]]


def mooncake(address: MooncakeAddress) -> tuple[Client, Client]:
    return MooncakeClient(address), MooncakeQueries(address)


class MooncakeLink:
    """`probe`: a name to ask for, to see whether the pool answers. `come_back(client)` is called when it answers
    (again), before calls begin; False keeps them back. Threads of `Lines` call these, one at a time.

    Memory is registered once: when it is announced, or when the connection is made.
    """

    def __init__(
        self, address: MooncakeAddress, connect: Connect, probe: str, come_back: Callable[[Client], bool]
    ) -> None:
        self.address = address
        self.master = address.master
        self._connect = connect
        self._probe = probe
        self.come_back = come_back
        self._memory: dict[int, int] = {}  # address -> bytes
        self._registering = threading.Lock()
        self._client: Client | None = None
        self._queries: Client | None = None

    def reachable(self) -> bool:
        """Whether a process listens there: the store's own client would try for a minute and a half."""
        host, _, port = self.master.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
        except OSError:
            return False
        return True

    def connect(self) -> Client:
        """The client of all calls. It may take minutes. Raises `GdsCacheError`."""
        client, queries = self._connect(self.address)
        with self._registering, contextlib.ExitStack() as undo:
            undo.callback(queries.close)
            undo.callback(client.close)
            for place, nbytes in self._memory.items():
                _announce(client, place, nbytes)
            self._client, self._queries = client, queries
            undo.pop_all()
        return client

    def register(self, place: int, nbytes: int) -> None:
        with self._registering:
            if place not in self._memory:
                self._memory[place] = nbytes
                if self._client is not None:
                    _announce(self._client, place, nbytes)

    def alive(self) -> bool:
        clients = [client for client in (self._client, self._queries) if client is not None]
        return all(client.exist([self._probe])[0] >= 0 for client in clients for _ in range(_ANSWERS))

    def exist(self, names: Sequence[str]) -> list[int]:
        assert self._queries is not None, "not connected"
        return self._queries.exist(names)

    def leave(self, client: Client) -> None:
        with self._registering:
            for place in self._memory:
                client.unregister(place)
            client.close()
            if self._queries is not None:
                self._queries.close()
            self._client = self._queries = None


def _announce(client: Client, place: int, nbytes: int) -> None:
    code = client.register(place, nbytes)
    if code != DONE:
        raise TierUnavailableError(
            f"{about(nbytes)} of memory cannot be registered with the Mooncake client: code {code}",
            "raise the limit of locked memory (ulimit -l), or use protocol tcp",
        )
