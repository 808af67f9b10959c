"""Clients of a Mooncake Store: objects by name, put from and got into registered memory, many at a time.

Each call answers per object, in the store's own codes. Calls have no deadline: with the master dead each takes 4 s (see
`mooncake/calls.py`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import socket
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Self

from gdscache import arguments
from gdscache.errors import InvalidValueError, MissingPackageError, TierUnavailableError
from gdscache.sizes import about, parse_size

if TYPE_CHECKING:
    from types import ModuleType

DONE = 0
NO_SPACE = -200  # the pool is full; asking evicts an object, so trying again is worth it
MISFIT = -600
GONE = -704
LEASED = -706
LEASE_OVER = -707
TRANSFER_FAILED = -800  # the process with the bytes does not send or take them
NO_MASTER = -900
CODES = {
    NO_SPACE: "the pool is full",
    MISFIT: "the object is of another size",
    GONE: "the object is not there",
    LEASED: "the object is leased",
    LEASE_OVER: "the lease ended before the transfer",
    TRANSFER_FAILED: "the transfer failed",
    NO_MASTER: "the master does not answer",
}
_MOST_REPLICAS = 64
_QUERIES = "rpc_only"
CONNECT_S = 1.0  # seconds that a TCP connection to the master may take
_ANSWERS = 3  # answers in a row of each client: each has connections of its own to a restarted master
_LOCAL_BUFFER = 16 << 20  # for unregistered memory, which is not used here


@dataclasses.dataclass(frozen=True, slots=True)
class MooncakeAddress:
    """The address of the pool, and this process's part in it.

    `master`: host:port of `mooncake_master`. `metadata`: a metadata server, or `P2PHANDSHAKE`. `hostname`: the name by
    which the others reach this process. `segment`: bytes of memory that it contributes. `devices`: RDMA devices,
    comma-separated.
    """

    master: str
    protocol: str = "tcp"
    devices: str = ""
    metadata: str = "P2PHANDSHAKE"
    hostname: str = "127.0.0.1"
    segment: int = 0
    replicas: int = 1
    tenant: str = "default"

    def checked(self) -> Self:
        host, _, port = str(self.master).rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise InvalidValueError(f"the mooncake tier's master is {self.master!r}", "give host:port")
        arguments.whole(self.replicas, "the mooncake tier's replicas", 1, _MOST_REPLICAS)
        for key in ("protocol", "devices", "metadata", "hostname", "tenant"):
            arguments.text(getattr(self, key), f"the mooncake tier's {key}")
        return self


def size_of(segment: object) -> int:
    try:
        return parse_size(segment)
    except ValueError as error:
        raise InvalidValueError(f"the mooncake tier's segment: {error}", 'give bytes, or text as "4GiB"') from error


class MooncakeClient:
    """A connection to the pool, by the package `mooncake-transfer-engine`. Thread-safe. `pieces`: `(address, bytes)` of
    each object's parts, in order. Each call returns a code an object, or raises the library's `RuntimeError`.

    Making one takes a minute and a half if the master does not answer. Raises `TierUnavailableError`, and the errors of
    `load_package`.
    """

    def __init__(self, address: MooncakeAddress) -> None:
        store = load_package()
        self._store: Any = store.MooncakeDistributedStore()
        self._how: Any = store.ReplicateConfig()
        self._how.replica_num = address.replicas
        code = self._store.setup(
            local_hostname=address.hostname,
            metadata_server=address.metadata,
            global_segment_size=address.segment,
            local_buffer_size=0 if address.protocol == _QUERIES else _LOCAL_BUFFER,  # it crashes with some
            protocol=address.protocol,
            rdma_devices=address.devices,
            master_server_addr=address.master,
            tenant_id=address.tenant,
        )
        if code:
            raise TierUnavailableError(
                f"the Mooncake client cannot be set up with master {address.master}, protocol {address.protocol}: "
                f"code {code}",
                "see its output on stderr; docs/scale_out.md has the ports that must be open",
            )

    def exist(self, names: Sequence[str]) -> list[int]:
        """1 if an object exists, 0 if not, else a code. Each 1 keeps it from eviction for some seconds."""
        return list(self._store.batch_is_exist(list(names)))

    def put(self, names: Sequence[str], pieces: Sequence[Sequence[tuple[int, int]]]) -> list[int]:
        """`DONE`, also if an object of that name exists, which stays as it is."""
        return list(self._store.batch_put_from_multi_buffers(list(names), *_columns(pieces), self._how))

    def get(self, names: Sequence[str], pieces: Sequence[Sequence[tuple[int, int]]]) -> list[int]:
        return list(self._store.batch_get_into_multi_buffers(list(names), *_columns(pieces)))

    def remove(self, names: Sequence[str]) -> list[int]:
        return list(self._store.batch_remove(list(names), True))

    def remove_matching(self, pattern: str) -> int:
        """Remove the objects whose names match a regular expression; returns their number, or a code."""
        return int(self._store.remove_by_regex(pattern, True))

    def register(self, address: int, nbytes: int) -> int:
        """Announce memory that objects are put from and got into, once."""
        return int(self._store.register_buffer(address, nbytes))

    def unregister(self, address: int) -> int:
        return int(self._store.unregister_buffer(address))

    def close(self) -> None:
        self._store.close()


def _columns(pieces: Sequence[Sequence[tuple[int, int]]]) -> tuple[list[list[int]], list[list[int]]]:
    return [[at for at, _ in some] for some in pieces], [[nbytes for _, nbytes in some] for some in pieces]


def load_package() -> ModuleType:
    """The package's module. Raises `MissingPackageError`, which names the missing part."""
    try:
        return importlib.import_module("mooncake.store")
    except ModuleNotFoundError as error:
        raise MissingPackageError(
            f"the tier of a shared pool needs the package mooncake-transfer-engine: {error}",
            "install gdscache[mooncake]; on a machine without CUDA, mooncake-transfer-engine-non-cuda",
        ) from error
    except ImportError as error:  # a missing shared library
        raise MissingPackageError(
            f"the package mooncake-transfer-engine cannot be loaded: {error}",
            "it needs libibverbs.so.1 (Debian: libibverbs1), and with libcuda.so.1 missing the package "
            "mooncake-transfer-engine-non-cuda instead",
        ) from error


Connect = Callable[[MooncakeAddress], tuple[MooncakeClient, MooncakeClient]]


def mooncake(address: MooncakeAddress) -> tuple[MooncakeClient, MooncakeClient]:
    """A client that moves bytes, and one that only asks: it listens nowhere."""
    asks = dataclasses.replace(address, protocol=_QUERIES, devices="", segment=0)
    return MooncakeClient(address), MooncakeClient(asks)


class MooncakeLink:
    """The connection to the pool: one client that moves bytes, with the memory registered with it, and one that asks.

    `probe`: a name to ask for, to see whether the pool answers. `come_back(client)` is called when it answers
    (again), before calls begin; False keeps them back. Threads of `Lines` call these, one at a time.

    Memory is registered once: when it is announced, or when the connection is made.
    """

    def __init__(
        self, address: MooncakeAddress, connect: Connect, probe: str, come_back: Callable[[MooncakeClient], bool]
    ) -> None:
        self.address = address
        self.master = address.master
        self._connect = connect
        self._probe = probe
        self.come_back = come_back
        self._memory: dict[int, int] = {}  # address -> bytes
        self._registering = threading.Lock()
        self._client: MooncakeClient | None = None
        self._queries: MooncakeClient | None = None

    def reachable(self) -> bool:
        """Whether a process listens there: the store's own client would try for a minute and a half."""
        host, _, port = self.master.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
        except OSError:
            return False
        return True

    def connect(self) -> MooncakeClient:
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

    def leave(self, client: MooncakeClient) -> None:
        with self._registering:
            for place in self._memory:
                client.unregister(place)
            client.close()
            if self._queries is not None:
                self._queries.close()
            self._client = self._queries = None


def _announce(client: MooncakeClient, place: int, nbytes: int) -> None:
    code = client.register(place, nbytes)
    if code != DONE:
        raise TierUnavailableError(
            f"{about(nbytes)} of memory cannot be registered with the Mooncake client: code {code}",
            "raise the limit of locked memory (ulimit -l), or use protocol tcp",
        )
