"""Reads KV events off the wire. Needs `gdscache[events]`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import msgpack
import zmq

from gdscache.events.base import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent, KVEventBatch
from gdscache.events.socket import END

NAMES = {kind.__name__: kind for kind in (BlockStored, BlockRemoved, AllBlocksCleared)}


def unpacked(seq: bytes, payload: bytes) -> KVEventBatch:
    """A batch off the wire; unknown fields are ignored."""
    ts, events, *_ = msgpack.unpackb(payload, raw=False)
    found: list[KVEvent] = []
    for fields in events:
        kind: Any = NAMES[fields["type"]]
        found.append(kind(**{field.name: fields.get(field.name) for field in dataclasses.fields(kind)}))
    return KVEventBatch(int.from_bytes(seq, "big"), ts, found)


class ZmqSubscriber:
    """Reads the events of a `ZmqPublisher`, or of vLLM. One thread uses it."""

    def __init__(self, endpoint: str, replay: str | None = None, topic: str = "") -> None:
        self._context = zmq.Context()
        self._in = self._context.socket(zmq.SUB)
        self._in.connect(endpoint)
        self._in.setsockopt(zmq.SUBSCRIBE, topic.encode())
        self._again = None if replay is None else self._context.socket(zmq.DEALER)
        if self._again is not None:
            self._again.connect(replay)

    def receive(self, seconds: float) -> Iterator[KVEventBatch]:
        """The batches that have come; waits up to `seconds` for the first."""
        while self._in.poll(int(seconds * 1000)):
            _, seq, payload = self._in.recv_multipart()
            yield unpacked(seq, payload)
            seconds = 0.0

    def replay(self, first: int, seconds: float) -> Iterator[KVEventBatch]:
        """The kept batches from number `first` on; waits up to `seconds` for each."""
        if self._again is None:
            return
        self._again.send_multipart((b"", first.to_bytes(8, "big")))
        while self._again.poll(int(seconds * 1000)):
            *_, seq, payload = self._again.recv_multipart()
            if seq == END:
                return
            yield unpacked(seq, payload)

    def close(self) -> None:
        for socket in (self._in, self._again):
            if socket is not None:
                socket.close(linger=0)
        self._context.term()
