"""KV events over ZeroMQ, on vLLM's wire: readers of vLLM's events can read these.

A message has three parts: the topic, the batch's number (8 bytes, big-endian), and msgpack of `[ts, [{"type": name,
**fields}, ...]]`. A reader that missed a number sends it to the replay socket, and gets that batch and all later ones
that are kept, then -1. Needs pyzmq and msgpack: `gdscache[events]`.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections import deque
from typing import Any

from gdscache.errors import InvalidValueError, MissingPackageError
from gdscache.events.base import KVEvent, KVEventBatch

END = (-1).to_bytes(8, "big", signed=True)
KEPT = 10_000  # batches kept for replay


def packed(batch: KVEventBatch) -> bytes:
    """A batch without its number."""
    events = [{"type": type(event).__name__} | _fields(event) for event in batch.events]
    answer: bytes = _package("msgpack").packb([batch.ts, events], use_bin_type=True)
    return answer


def _fields(event: KVEvent) -> dict[str, Any]:
    """An event's fields other than their defaults, as in vLLM."""
    defaults = {field.name: field.default for field in dataclasses.fields(event)}
    return {name: value for name, value in dataclasses.asdict(event).items() if value != defaults[name]}


class ZmqPublisher:
    """See the module; one thread calls it. `kept`: batches kept for replay. Raises `InvalidValueError` for an endpoint
    that cannot be bound."""

    def __init__(self, endpoint: str, replay: str | None, topic: str, kept: int = KEPT) -> None:
        zmq = _package("zmq")
        _package("msgpack")
        self._zmq: Any = zmq
        self._topic = topic.encode()
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=kept)
        self._context = zmq.Context()
        self._out = self._context.socket(zmq.PUB)
        self._again = None if replay is None else self._context.socket(zmq.ROUTER)
        try:
            self._out.bind(endpoint)
            if self._again is not None:
                self._again.set(zmq.SNDHWM, kept + 1)  # a whole replay: the socket drops messages above this number
                self._again.bind(replay)
        except zmq.ZMQError as error:
            self.close()
            raise InvalidValueError(
                f"events.endpoint {endpoint} or events.replay {replay} cannot be bound: {error}",
                "give each rank an endpoint of its own",
            ) from error

    def publish(self, batch: KVEventBatch) -> None:
        payload = packed(batch)
        self._kept.append((batch.seq, payload))
        self._out.send_multipart((self._topic, batch.seq.to_bytes(8, "big"), payload))

    def serve(self) -> None:
        """Answer requests for earlier batches, without long waits."""
        while self._again is not None and self._again.poll(0):
            client, *rest = self._again.recv_multipart()
            first = int.from_bytes(rest[-1], "big")
            for seq, payload in list(self._kept):
                if seq >= first:
                    self._again.send_multipart((client, b"", self._topic, seq.to_bytes(8, "big"), payload))
            self._again.send_multipart((client, b"", b"", END, b""))

    def close(self) -> None:
        for socket in (self._out, self._again):
            if socket is not None:
                socket.close(linger=100)
        self._context.term()


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingPackageError(f"events over ZeroMQ need {name}: {error}", "install gdscache[events]") from error
