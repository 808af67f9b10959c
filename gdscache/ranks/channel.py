"""A connection between a leader and a rank on one host: a Unix socket between processes of one user."""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence

from gdscache.errors import RankError, RankProtocolError
from gdscache.ranks import wire
from gdscache.ranks.wire import Fields
from gdscache.runtime.threads import Flag, failure_of, log_failure, start

MOST_WAITING = 64 << 20  # most unsent bytes, while the other end does not read
_READ = 1 << 18
_FDS = 4
_PEER = struct.Struct("3i")  # pid, uid, gid

Heard = Callable[[Fields], object]


class Channel:
    """Sends and receives messages, in order. Thread-safe.

    `heard(fields)` is called in a thread of the channel, one message at a time. The field `descriptors`, sent as their
    number, then lists the descriptors that came with it; the callee closes them. `lost(why)` is called once, in that
    thread, when the other end has gone or sends invalid bytes; not after `close`. Answers to calls go to `answer`, and
    to `heard` if their call has given up; it is `overdue` until then.
    """

    def __init__(self, connection: socket.socket, name: str, heard: Heard, lost: Callable[[str], object]) -> None:
        """Raises `RankProtocolError` if the other end is another user's."""
        check_peer(connection)
        self._socket = connection
        self._heard = heard
        self._lost = lost
        self._lock = threading.Lock()
        self._waiting: collections.deque[tuple[memoryview, tuple[int, ...]]] = collections.deque()
        self._bytes = 0  # bytes in `_waiting`
        self._closed = False
        self._why = ""  # why the other end is given up
        self._numbers = itertools.count(1)
        self._calls: dict[int, tuple[Flag, list[Fields]]] = {}
        self.overdue: set[int] = set()
        self._more = threading.Semaphore(0)
        self._threads = [
            threading.Thread(target=self._read, name=f"gdscache-{name}", daemon=True),
            threading.Thread(target=self._write, name=f"gdscache-{name}-out", daemon=True),
        ]

    def begin(self) -> None:
        """Receive from now on. Raises `ThreadStartError`."""
        start(self._threads, self._shut)

    def send(self, message: bytes, descriptors: Sequence[int] = ()) -> bool:
        """Send, at once or by the channel's thread: never waits. False if the channel is closed, or its other end has
        gone or is given up; `lost` is then called.

        The descriptors stay the caller's, and must stay open until the other end has answered.
        """
        with self._lock:
            if self._closed or self._why:
                return False
            left = memoryview(message)
            if not self._waiting:
                with contextlib.suppress(BlockingIOError):
                    sent = _send(self._socket, left, descriptors, socket.MSG_DONTWAIT)
                    if sent is None:
                        return False  # the reading thread notices
                    left, descriptors = left[sent:], () if sent else descriptors
            if left:
                self._waiting.append((left, tuple(descriptors)))
                self._bytes += len(left)
                self._more.release()
                if self._bytes > MOST_WAITING:  # the reading thread reports it
                    self._why = "it does not read its messages"
                    with contextlib.suppress(OSError):
                        self._socket.shutdown(socket.SHUT_RDWR)
                    return False
        return True

    def ask(self, do: str, fields: Fields, descriptors: Sequence[int] = ()) -> int:
        """Send a call; returns its number, for `answer`. Never waits."""
        number, flag = next(self._numbers), Flag()
        self._calls[number] = flag, []
        if not self.send(wire.pack({**fields, "do": do, "call": number, "descriptors": len(descriptors)}), descriptors):
            flag.set()
        return number

    def answer(self, number: int, seconds: float) -> Fields | None:
        """The answer to a call; None if none comes within `seconds`, or the other end has gone."""
        flag, found = self._calls[number]
        flag.wait(seconds)
        with self._lock:
            del self._calls[number]
            if not found:
                self.overdue.add(number)
        return found[0] if found else None

    def _hear(self, fields: Fields) -> None:
        number = fields.get("answer")
        with self._lock:
            call = self._calls.get(number) if isinstance(number, int) else None
            if call is not None:
                call[1].append(fields)
            elif isinstance(number, int):
                self.overdue.discard(number)
        if call is None:
            self._heard(fields)
        else:
            call[0].set()

    def close(self) -> None:
        """Receive and send nothing more; may be called again. Waits for its threads, unless one of them calls it."""
        self._shut()
        for thread in self._threads:
            if thread is not threading.current_thread() and thread.ident is not None:
                thread.join()
        self._socket.close()

    def _shut(self) -> None:
        with self._lock:
            self._closed = True
            self._waiting.clear()
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            self._more.release()

    def _write(self) -> None:
        while True:
            self._more.acquire()
            with self._lock:
                if self._closed:
                    return
                left, descriptors = self._waiting[0]
            sent = _send(self._socket, left, descriptors, 0)  # the only wait
            with self._lock:
                if self._closed or sent is None:
                    return
                self._bytes -= sent
                self._waiting.popleft()
                if sent < len(left):
                    self._waiting.appendleft((left[sent:], ()))
                    self._more.release()

    def _read(self) -> None:
        error, why = failure_of(self._read_on), ""
        if isinstance(error, RankProtocolError):
            why = error.message
        elif error is not None:
            why = f"its connection is broken: {getattr(error, 'strerror', repr(error))}"
        with self._lock:
            told, self._closed = self._closed, True
            self._more.release()
        if not told:
            log_failure(failure_of(functools.partial(self._lost, self._why or why or "it has ended")))
        for flag, _ in [*self._calls.values()]:  # no answer comes any more
            flag.set()

    def _read_on(self) -> None:
        buffer, descriptors = bytearray(), list[int]()
        while True:
            data, fds, _, _ = socket.recv_fds(self._socket, _READ, _FDS)
            descriptors += fds
            if not data:
                return
            buffer += data
            at = 0
            while len(buffer) - at >= wire.HEAD.size:
                stop = at + wire.length(memoryview(buffer)[at : at + wire.HEAD.size])
                if stop > len(buffer):
                    break
                fields, at = wire.unpack(bytes(memoryview(buffer)[at:stop])), stop
                if count := int(fields.get("descriptors", 0)):
                    fields["descriptors"], descriptors = descriptors[:count], descriptors[count:]
                log_failure(failure_of(functools.partial(self._hear, fields)))
            del buffer[:at]


def _send(to: socket.socket, data: memoryview, descriptors: Sequence[int], flags: int) -> int | None:
    """Bytes sent; None if the other end has gone. Raises `BlockingIOError`."""
    try:
        return socket.send_fds(to, [data], list(descriptors), flags) if descriptors else to.send(data, flags)
    except BlockingIOError:
        raise
    except OSError:
        return None


class Door:
    """Gives each connection to an abstract socket to `serve`, in one thread, until it is closed."""

    def __init__(self, name: str, thread: str, serve: Callable[[socket.socket], object]) -> None:
        """Raises `RankError` without a socket, and `ThreadStartError`."""
        self._serve = serve
        self._listening = listening(name)
        self._thread = threading.Thread(target=self._accept, name=thread, daemon=True)
        start([self._thread], self.shut)

    def shut(self) -> None:
        """Accept no more connections; may be called again."""
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    def close(self) -> None:
        """`shut`, and wait for the thread."""
        self.shut()
        self._thread.join()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return
            log_failure(failure_of(functools.partial(self._serve, connection)))


def listening(name: str) -> socket.socket:
    """A socket of this name that listens. The name is abstract: it goes with its process, in a network namespace. Both
    ends check each other's user (`check_peer`), since it has no file mode. Raises `RankError`."""
    with contextlib.ExitStack() as undo:
        try:
            found = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC))
            found.bind("\0" + name)
            found.listen(16)
        except OSError as error:
            raise RankError(f"no socket {name}: {error.strerror}", "allow more open files (ulimit -n)") from error
        undo.pop_all()
    return found


def connected(name: str, who: str, patience: float = 0.0) -> socket.socket:
    """A connection to the socket of this name, which may be made within `patience` seconds. Raises `RankError`, which
    names `who` cannot be reached."""
    until = time.monotonic() + patience
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            connection.connect("\0" + name)
            return connection
        except OSError as error:
            connection.close()
            if time.monotonic() >= until or not isinstance(error, (ConnectionRefusedError, FileNotFoundError)):
                raise RankError(
                    f"{who} cannot be reached at {name}: {error.strerror}",
                    "start every rank on this host before the leader, as the same user",
                ) from error
        time.sleep(0.05)


def check_peer(connection: socket.socket) -> None:
    pid, uid, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    if uid != os.geteuid():
        raise RankProtocolError(
            f"process {pid} of user {uid} has connected, and this one is of user {os.geteuid()}",
            "run the leader and its ranks as one user",
        )
