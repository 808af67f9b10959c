"""The contract of a Mooncake Store: objects by name, put from and got into registered memory, many at a time.

`MooncakeClient` is the package `mooncake-transfer-engine`; tests have others. Each call answers per object, in the
store's own codes. Calls have no deadline: with the master dead each takes 4 s (see `mooncake/calls.py`).
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, Self

from gdscache.errors import InvalidValueError, MissingPackageError, TierUnavailableError
from gdscache.sizes import parse_size

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
        if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
            raise InvalidValueError(f"the mooncake tier's master is {self.master!r}", "give host:port")
        if not isinstance(self.replicas, int) or not 1 <= self.replicas <= _MOST_REPLICAS:
            raise InvalidValueError(
                f"the mooncake tier's replicas is {self.replicas!r}", f"give a number from 1 to {_MOST_REPLICAS}"
            )
        for key in ("protocol", "devices", "metadata", "hostname", "tenant"):
            if not isinstance(getattr(self, key), str):
                raise InvalidValueError(f"the mooncake tier's {key} is {getattr(self, key)!r}", "give a text")
        return self


def size_of(segment: object) -> int:
    try:
        return parse_size(segment)
    except ValueError as error:
        raise InvalidValueError(f"the mooncake tier's segment: {error}", 'give bytes, or text as "4GiB"') from error


class Client(Protocol):
    """A connection to the pool. Thread-safe. `pieces`: `(address, bytes)` of each object's parts, in order.

    Each call returns a code an object, or raises the library's `RuntimeError`.
    """

    def exist(self, names: Sequence[str]) -> list[int]:
        """1 if an object exists, 0 if not, else a code. Each 1 keeps it from eviction for some seconds."""
        ...

    def put(self, names: Sequence[str], pieces: Sequence[Sequence[tuple[int, int]]]) -> list[int]:
        """`DONE`, also if an object of that name exists, which stays as it is."""
        ...

    def get(self, names: Sequence[str], pieces: Sequence[Sequence[tuple[int, int]]]) -> list[int]: ...

    def remove(self, names: Sequence[str]) -> list[int]: ...

    def remove_matching(self, pattern: str) -> int:
        """Remove the objects whose names match a regular expression; returns their number, or a code."""
        ...

    def register(self, address: int, nbytes: int) -> int:
        """Announce memory that objects are put from and got into, once."""
        ...

    def unregister(self, address: int) -> int: ...

    def close(self) -> None: ...


class MooncakeClient:
    """A `Client` of the real store. Its `setup` tries for a minute and a half if the master does not answer.

    Raises `TierUnavailableError`, and the errors of `load_package`.
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
        return list(self._store.batch_is_exist(list(names)))

    def put(self, names: Sequence[str], pieces: Sequence[Sequence[tuple[int, int]]]) -> list[int]:
        return list(self._store.batch_put_from_multi_buffers(list(names), *_columns(pieces), self._how))

    def get(self, names: Sequence[str], pieces: Sequence[Sequence[tuple[int, int]]]) -> list[int]:
        return list(self._store.batch_get_into_multi_buffers(list(names), *_columns(pieces)))

    def remove(self, names: Sequence[str]) -> list[int]:
        return list(self._store.batch_remove(list(names), True))

    def remove_matching(self, pattern: str) -> int:
        return int(self._store.remove_by_regex(pattern, True))

    def register(self, address: int, nbytes: int) -> int:
        return int(self._store.register_buffer(address, nbytes))

    def unregister(self, address: int) -> int:
        return int(self._store.unregister_buffer(address))

    def close(self) -> None:
        self._store.close()


class MooncakeQueries(MooncakeClient):
    """A `Client` that only asks: it listens nowhere, and moves no bytes."""

    def __init__(self, address: MooncakeAddress) -> None:
        super().__init__(dataclasses.replace(address, protocol=_QUERIES, devices="", segment=0))


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
