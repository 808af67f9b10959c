"""Signals at chosen messages between a leader and its ranks, and a leader in a process of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import Counter
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from gdscache import CacheEngine, RankAddress
from gdscache.ranks import executor, wire
from gdscache.ranks.channel import Channel
from gdscache.ranks.wire import Fields
from tests.support.helpers import WAIT, drop_from
from tests.support.processes import Child

ANSWERS = ("answer", "ended", "row", "closed", "lock_lost")


class Point(NamedTuple):
    """A message: the `number`th whose `kind` is what it says (`move`, `ended`, ...), or an order (`load`, `store`).
    `place`: `before` or `behind` it is sent or heard; when `half` of it is sent."""

    kind: str
    place: str = "before"
    number: int = 1
    signal: int = signal.SIGKILL


class Trap:
    """Signals its own process at a point; `seen` counts messages and orders by kind."""

    def __init__(self, point: Point | None = None) -> None:
        self.seen: Counter[str] = Counter()
        self.point = point
        send, begin = Channel.send, Channel.begin

        def sending(channel: Channel, message: bytes, descriptors: Sequence[int] = ()) -> bool:
            kind = _kind_of(wire.unpack(message))
            self.at(kind, "before")
            if self._due(kind, "half"):
                channel._socket.sendall(message[: len(message) // 2])
                self._fire()
            sent = send(channel, message, descriptors)
            self.at(kind, "behind")
            return sent

        def beginning(channel: Channel) -> None:
            heard = channel._hear

            def hearing(fields: Fields) -> None:
                kind = _kind_of(fields)
                self.at(kind, "before")
                heard(fields)
                self.at(kind, "behind")

            channel._hear = hearing  # type: ignore[method-assign]
            begin(channel)

        Channel.send, Channel.begin = sending, beginning  # type: ignore[method-assign]

    def at(self, kind: str, place: str) -> None:
        """Somebody has come there."""
        self.seen[kind] += place == "before"
        if self._due(kind, place):
            self._fire()

    def _due(self, kind: str, place: str) -> bool:
        point = self.point
        if point is None or (point.kind, point.place) != (kind, place):
            return False
        self.point = point._replace(number=point.number - 1)
        return point.number == 1

    def _fire(self) -> None:
        os.kill(os.getpid(), self.point.signal)
        time.sleep(WAIT if self.point.signal == signal.SIGKILL else 0)  # nothing more is done


def _kind_of(fields: Fields) -> str:
    return str(fields.get("do") or next(kind for kind in ANSWERS if kind in fields))


def lead(line: Connection, config: dict[str, Any], addresses: list[RankAddress], point: Point | None) -> None:
    """A leader's process: does what it is told over the line."""
    trap = Trap(point)
    executor._SPENT, executor.GRACE_S = 1, 0.2
    with CacheEngine.from_config(config, ranks=addresses) as engine:
        line.send("open")
        for what, *given in iter(line.recv, ("close",)):
            if what == "store":
                handle = engine.store(*given)
                trap.at("store", "before")
                line.send(handle.order)
                trap.at("store", "behind")
                line.send(all("ssd" in tiers for tiers in handle.result(WAIT).tiers))
            elif what == "load":
                tokens, blocks, told = given
                hit = engine.lookup(tokens)
                load = engine.load(hit, blocks[: len(hit.pages)])
                trap.at("load", "before")
                line.send((load.order, [page.key for page in hit.pages]))
                trap.at("load", "behind")
                if not told:
                    load.cancel()
                line.send([status.value for status in load.result(WAIT).pages])
            elif what == "keys":
                line.send([page.key for page in engine.pages(*given)])
            elif what == "cool":
                drop_from(engine, "cpu")
                line.send(None)
            elif what == "check":
                line.send(engine.check().problems)
    line.send(trap.seen)


class LeaderProcess(Child):
    def __init__(self, config: dict[str, Any], addresses: list[RankAddress], point: Point | None = None) -> None:
        super().__init__(lead, config, addresses, point)

    def ask(self, *what: Any) -> Any:
        """What it answers. Raises `EOFError` where it has been killed."""
        with contextlib.suppress(BrokenPipeError):
            self.send(what)
        return self.hear()

    def hear(self) -> Any:
        try:
            return self.receive()
        except ConnectionResetError:
            raise EOFError from None

    def ended(self) -> int | None:
        self.join()
        return self.process.exitcode
