"""Clients of a Mooncake Store: objects by name, put from and got into registered memory, many at a time.

Each call answers per object, in the store's own codes. A client's calls have no deadline: with the master dead each
takes 4 s. Those of `Lines` have one, from callers' threads or in the background.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import importlib
import json
import logging
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

from gdscache import arguments
from gdscache.errors import GdsCacheError, InvalidValueError, IOFailedError, MissingPackageError, TierUnavailableError
from gdscache.runtime.limited_log import LimitedLog
from gdscache.runtime.threads import Flag, failure_of, log_failure, start
from gdscache.sizes import MIB, about, parse_size
from gdscache.storage.probe import run_child

if TYPE_CHECKING:
    from types import ModuleType


DONE = 0
NO_SPACE = -200  # the pool is full; asking evicts an object, so trying again is worth it
MISFIT = -600
GONE = -704
LEASED = -706
LEASE_OVER = -707
TRANSFER_FAILED = -800  # the process with the bytes does not send or take them, or the object is too short
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
_PROTOCOLS = (  # that some build of the package moves bytes by
    *("tcp", "rdma", "efa", "nvlink", "nvlink_intra", "musa", "hip", "barex", "cxl", "ascend", "ub", "ubshmem", "maca"),
    "sunrise_link",
)
_LEAST_SEGMENT = 16 * MIB
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
        if not host or not (port.isascii() and port.isdecimal()) or not 0 < int(port) < 1 << 16:
            raise InvalidValueError(f"the mooncake tier's master is {self.master!r}", "give host:port")
        arguments.whole(self.replicas, "the mooncake tier's replicas", 1, _MOST_REPLICAS)
        for key in ("protocol", "devices", "metadata", "hostname", "tenant"):
            arguments.text(getattr(self, key), f"the mooncake tier's {key}")
        if self.protocol not in _PROTOCOLS:
            raise InvalidValueError(
                f"the mooncake tier's protocol is {self.protocol!r}", f"give one of {', '.join(_PROTOCOLS)}"
            )
        for key in ("metadata", "hostname"):
            if not getattr(self, key):
                raise InvalidValueError(f"the mooncake tier's {key} is empty", "leave it out, or give one")
        if 0 < self.segment < _LEAST_SEGMENT:
            raise InvalidValueError(
                f"the mooncake tier's segment is {about(self.segment)}", f"give 0, or at least {about(_LEAST_SEGMENT)}"
            )
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
        code = self._store.setup(**_setup(address))
        if code:
            raise _not_set_up(address, f"code {code}")

    def exist(self, names: Sequence[str]) -> list[int]:
        """1 if an object exists, 0 if not, else a code. Each 1 keeps it from eviction for some seconds."""
        return list(self._store.batch_is_exist(list(names)))

    def put(self, names: Sequence[str], pieces: Sequence[Sequence[tuple[int, int]]]) -> list[int]:
        """`DONE`, also if an object of that name exists, which stays as it is."""
        return list(self._store.batch_put_from_multi_buffers(list(names), *_columns(pieces), self._how))

    def get(self, names: Sequence[str], pieces: Sequence[Sequence[tuple[int, int]]]) -> list[int]:
        return list(self._store.batch_get_into_multi_buffers(list(names), *_columns(pieces)))

    def size(self, name: str) -> int:
        """The bytes of an object, or a code."""
        return int(self._store.get_size(name))

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


def _setup(address: MooncakeAddress) -> dict[str, str | int]:
    return {
        "local_hostname": address.hostname,
        "metadata_server": address.metadata,
        "global_segment_size": address.segment,
        "local_buffer_size": 0 if address.protocol == _QUERIES else _LOCAL_BUFFER,  # it crashes with some
        "protocol": address.protocol,
        "rdma_devices": address.devices,
        "master_server_addr": address.master,
        "tenant_id": address.tenant,
    }


def _not_set_up(address: MooncakeAddress, cause: str) -> TierUnavailableError:
    return TierUnavailableError(
        f"the Mooncake client cannot be set up with master {address.master}, protocol {address.protocol}: {cause}",
        "see its output on stderr; docs/scale_out.md has the ports that must be open",
    )


Connect = Callable[[MooncakeAddress, Callable[[], bool]], tuple[MooncakeClient, MooncakeClient]]
_TRIAL_S = 20.0
_TRIAL = """
import json, os, signal, sys
signal.alarm(int(sys.argv[2]))  # if the parent has ended
try:
    from mooncake.store import MooncakeDistributedStore
except ImportError:
    import torch  # its wheel brings CUDA's libraries, as in the parent
    from mooncake.store import MooncakeDistributedStore

store = MooncakeDistributedStore()
code = store.setup(**json.loads(sys.argv[1])) or min(0, *store.batch_is_exist(["gdscache/trial"]))
print(f"code {code}", flush=True)
os._exit(code != 0)  # closing takes seconds
"""


def mooncake(address: MooncakeAddress, wanted: Callable[[], bool]) -> tuple[MooncakeClient, MooncakeClient]:
    """A client that moves bytes, and one that only asks: it listens nowhere.

    Making a client holds the interpreter's lock, where the master stands still for minutes. So a child tries it first,
    without the metadata server: its name there would outlive it, and refuse our client. Raises `TierUnavailableError`
    if that fails, or if the client is not `wanted()` any more.
    """
    how = json.dumps(_setup(dataclasses.replace(address, segment=0, metadata="P2PHANDSHAKE")))
    try:
        cause = run_child(_TRIAL, [how, str(round(_TRIAL_S))], _TRIAL_S).cause
    except OSError as error:
        raise _not_set_up(address, f"no child process for a trial: {error}") from error
    if not cause and not wanted():
        cause = "the engine was closed meanwhile"
    if cause:
        raise _not_set_up(address, cause)
    asks = dataclasses.replace(address, protocol=_QUERIES, devices="", segment=0)
    return MooncakeClient(address), MooncakeClient(asks)


def _announce(client: MooncakeClient, place: int, nbytes: int) -> None:
    code = client.register(place, nbytes)
    if code != DONE:
        raise TierUnavailableError(
            f"{about(nbytes)} of memory cannot be registered with the Mooncake client: code {code}",
            "raise the limit of locked memory (ulimit -l), or use protocol tcp",
        )


PROBE_S, PROBES_S = 0.2, 5.0  # seconds between the first two probes; they double up to the second
State = Literal["connecting", "ready", "open", "ended"]
_T = TypeVar("_T")
_log = logging.getLogger("gdscache.mooncake")


class Lines:
    """The connection to the pool: one client that moves bytes, with the memory registered with it, and one that asks;
    and calls of several kinds, `most` of each at a time, in the callers' threads or in one for background calls. They
    may begin while the breaker is closed (`ready`). A watching thread connects, and opens and closes it.

    A call cannot be interrupted, so its memory is kept until it returns. But if one does not return within its
    deadline, or reports that the master does not answer, the breaker opens: waiting calls are refused at once, and no
    new call begins. A thread probes the pool; when it answers, the breaker closes.

    `probe`: a name to ask for, to see whether the pool answers. `come_back(client)` is called when it answers (again),
    before calls begin. `paid()`: whether they may begin then. `deadline`: seconds of a call. `opened`: how often the
    breaker opened.
    """

    def __init__(
        self,
        address: MooncakeAddress,
        connect: Connect,
        probe: str,
        come_back: Callable[[MooncakeClient], object],
        paid: Callable[[], bool],
        *,
        deadline: float,
        most: int,
    ) -> None:
        self.address = address
        self.changed = threading.Condition()
        self.state: State = "connecting"
        self.opened = 0
        self.counts: Counter[str] = Counter()
        self.longest = 0.0  # seconds of the longest call
        self.come_back = come_back
        self._connect = connect
        self._name = probe
        self._paid = paid
        self._deadline = deadline
        self._most = most
        self._clients: tuple[MooncakeClient, MooncakeClient] | None = None  # that moves bytes, and that asks
        self._memory: dict[int, int] = {}  # address -> bytes
        self._registering = threading.Lock()
        self._waiting: deque[Callable[[], object]] = deque()
        self._running: list[tuple[str, float]] = []  # kind and begin of each call
        self._probing: threading.Thread | None = None
        self._said = LimitedLog()
        self._threads = [
            threading.Thread(target=loop, name=f"gdscache-pool-{name}", daemon=True)
            for name, loop in {"asks": self._serve, "watch": self._watch}.items()
        ]
        start(self._threads, self._end)

    @property
    def ready(self) -> bool:
        return self.state == "ready"

    def open(self, why: str) -> None:
        """No call may begin. May be called again."""
        with self.changed:
            if not self.ready:
                return
            self.state = "open"
            self.opened += 1
            self.changed.notify_all()
        _log.warning("the shared pool %s is left alone until it answers again: %s", self.address.master, why)

    def _end(self) -> None:
        with self.changed:
            self.state = "ended"
            self.changed.notify_all()

    def register(self, place: int, nbytes: int) -> None:
        """Register memory once: now, and when the connection is made. Raises `TierUnavailableError`."""
        with self._registering:
            if place not in self._memory:
                if self._clients is not None:
                    _announce(self._clients[0], place, nbytes)
                self._memory[place] = nbytes

    def exist(self, names: Sequence[str]) -> list[int]:
        """See `MooncakeClient.exist`. Called within a call."""
        assert self._clients is not None, "not connected"
        return self._clients[1].exist(names)

    def call(self, kind: str, work: Callable[[MooncakeClient], _T]) -> _T:
        """`work(client)` in this thread, after others of the kind. Raises `IOFailedError` while the breaker is open."""
        changed = self.changed
        with changed:
            changed.wait_for(lambda: not self.ready or sum(kind == it for it, _ in self._running) < self._most)
            clients = self._clients if self.ready else None
            if clients is None:
                self.counts["refused"] += 1
                raise IOFailedError(f"the shared pool: {CODES[NO_MASTER]}", "see the master's log", errno.EHOSTUNREACH)
            running = kind, time.monotonic()
            self._running.append(running)
            changed.notify_all()  # the watching thread has a new deadline to wait for
        try:
            return work(clients[0])
        finally:
            with changed:
                self._running.remove(running)
                self.counts[kind] += 1
                self.longest = max(self.longest, time.monotonic() - running[1])
                changed.notify_all()

    def begin(self, work: Callable[[MooncakeClient], object], over: Callable[[], object] = lambda: None) -> None:
        def ask() -> None:
            with contextlib.suppress(IOFailedError):
                self.call("asks", work)

        def asked() -> None:
            log_failure(failure_of(ask))
            over()

        with self.changed:
            self._waiting.append(asked)
            self.changed.notify_all()

    def finish(self, work: Callable[[MooncakeClient], _T]) -> _T | None:
        """`begin`, and wait for the call, `deadline` seconds at most; None if it was refused or has not ended."""
        answer: list[_T] = []
        over = Flag()
        with self.changed:  # `_probe` finds the removals that the caller owes, or has ended
            if not self.ready:
                self.counts["refused"] += 1
                return None
        self.begin(lambda client: answer.append(work(client)), over.set)
        over.wait(self._deadline)
        return answer[0] if over.is_set() and answer else None

    def answered(self, codes: object) -> None:
        if codes == NO_MASTER or (isinstance(codes, list) and NO_MASTER in codes):
            self.open("the master does not answer")

    def _serve(self) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(lambda: bool(self._waiting) or self.state == "ended")
                if not self._waiting:
                    return
                ask = self._waiting.popleft()
            ask()
            del ask

    def _refuse_waiting(self) -> None:
        """Run the queued calls while the breaker is open, so that each is refused and none waits behind a hanging
        call."""
        with self.changed:
            asks = list(self._waiting)
            self._waiting.clear()
        for ask in asks:
            ask()

    def _watch(self) -> None:
        pause, next_probe = PROBE_S, 0.0
        while self.state != "ended":
            with self.changed:
                if self.state == "ready" and ((left := self._left()) is None or left > 0):
                    pause = PROBE_S
                    self.changed.wait(left)
                    continue
            if self.ready:
                self.counts["overdue"] += 1
                self.open(f"a call has not ended within {self._deadline:g} s")
            self._refuse_waiting()
            # A thread of its own asks, since that may take long: `close` does not wait for it.
            if time.monotonic() >= next_probe and not (self._probing is not None and self._probing.is_alive()):
                next_probe, pause = time.monotonic() + pause, min(2 * pause, PROBES_S)
                probing = threading.Thread(
                    target=lambda: log_failure(failure_of(self._probe)), name="gdscache-pool-probe", daemon=True
                )
                try:
                    probing.start()
                except RuntimeError as error:  # no thread for now
                    log_failure(error)
                else:
                    self._probing = probing  # `close` waits for it, which it may not before the start
            with self.changed:
                self.changed.wait_for(lambda: self.state in ("ready", "ended"), PROBE_S)

    def _left(self) -> float | None:
        """Seconds until the oldest call is overdue; None without one."""
        began = min((since for _, since in self._running), default=None)
        return None if began is None else began + self._deadline - time.monotonic()

    def _probe(self) -> None:
        """Connect, or find out whether the pool answers again. Calls may begin then, unless one still hangs."""
        try:
            if not self._reachable():
                return
            clients = self._clients
            if clients is None:
                clients = self._join()
                if self.state == "ended":
                    self._leave()
                    return
            elif any(one.exist([self._name])[0] < 0 for one in clients for _ in range(_ANSWERS)):
                return
            self.come_back(clients[0])
        except (GdsCacheError, RuntimeError) as error:  # also the library's
            self._said.say(
                _log,
                logging.ERROR,
                "cannot be used",
                "the shared pool %s cannot be used: %s",
                self.address.master,
                error,
            )
            self._said.flush()
            return
        with self.changed:
            if self.state != "ended" and ((left := self._left()) is None or left > 0) and self._paid():
                words = "is connected" if self.state == "connecting" else "answers again"
                _log.info("the shared pool %s %s", self.address.master, words)
                self.state = "ready"
                self.changed.notify_all()

    def _reachable(self) -> bool:
        """Whether a process listens there: the store's own client would try for a minute and a half."""
        host, _, port = self.address.master.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
        except OSError:
            return False
        return True

    def _join(self) -> tuple[MooncakeClient, MooncakeClient]:
        """Connect, which may take minutes. Raises `GdsCacheError`, also if this was closed meanwhile."""
        client, queries = self._connect(self.address, lambda: self.state != "ended")
        with self._registering, contextlib.ExitStack() as undo:
            undo.callback(queries.close)
            undo.callback(client.close)
            for place, nbytes in self._memory.items():
                _announce(client, place, nbytes)
            self._clients = client, queries
            undo.pop_all()
        return client, queries

    def _leave(self) -> None:
        with self._registering:
            clients, self._clients = self._clients, None
            if clients is not None:
                for place in self._memory:
                    clients[0].unregister(place)
                for client in clients:
                    client.close()

    def close(self) -> bool:
        """Refuse queued calls, end the threads, and leave the pool with our segment; False if a call does not return:
        it may touch the memory. May be called again."""
        self._end()
        until = time.monotonic() + self._deadline
        for thread in self._threads:  # the watching one may begin a probe
            thread.join(max(0.0, until - time.monotonic()))
        ended = not any(thread.is_alive() for thread in self._threads)  # then no other probe begins
        if (probing := self._probing) is not None:
            probing.join(max(0.0, until - time.monotonic()))
            ended = ended and not probing.is_alive()
        with self.changed:
            ended &= self.changed.wait_for(lambda: not self._running, max(0.0, until - time.monotonic()))
        if ended:
            self._leave()
        else:
            _log.error("closed while a call to the shared pool %s hangs: its memory is kept", self.address.master)
        return ended

    def describe(self) -> dict[str, Any]:
        return {
            "master": self.address.master,
            "state": self.state,
            "opened": self.opened,
            "calls": dict(self.counts),
            "longest_call_s": round(self.longest, 3),
        }
