"""A channel: messages in order, descriptors with them, and one word when the other end has gone."""

from __future__ import annotations

import os
import random
import socket
import struct
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from gdscache.errors import RankProtocolError
from gdscache.ranks import channel as channels
from gdscache.ranks import wire
from gdscache.ranks.channel import Channel
from gdscache.ranks.wire import Fields
from tests.support.helpers import WAIT, until


class End:
    """One end: what it hears, and why it was lost."""

    def __init__(self, connection: socket.socket) -> None:
        self.heard: list[Fields] = []
        self.descriptors: list[int] = []
        self.lost: list[str] = []
        self.wait = threading.Event()
        self.wait.set()
        self.channel = Channel(connection, "test", self._hear, self.lost.append)
        self.channel.begin()

    def _hear(self, fields: Fields) -> None:
        self.wait.wait(WAIT)
        self.heard.append(fields)
        self.descriptors += fields.get("descriptors") or ()


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, End]]:
    """A bare socket, and the channel at its other end."""
    here, there = socket.socketpair()
    end = End(there)
    yield here, end
    here.close()
    end.channel.close()


def test_messages_come_in_order_and_whole() -> None:
    here, there = map(End, socket.socketpair())
    sizes = [random.Random(0).choice((0, 8, 100, 1 << 18, 3 << 18)) for _ in range(60)]
    for number, size in enumerate(sizes):
        assert here.channel.send(wire.pack({"n": number, "some": np.full(size, number % 251, np.uint8)}))
    until(lambda: len(there.heard) == len(sizes), "all are heard")
    for number, (fields, size) in enumerate(zip(there.heard, sizes, strict=True)):
        assert fields["n"] == number
        assert fields["some"].tolist() == [number % 251] * size
    here.channel.close()
    until(lambda: there.lost == ["it has ended"], "the end is said")
    assert here.lost == []  # who closes is not told
    assert not there.channel.send(wire.pack({}))
    there.channel.close()


def test_descriptors_belong_to_their_message() -> None:
    here, there = map(End, socket.socketpair())
    for number in range(3):
        file = os.memfd_create(f"{number}")
        os.write(file, b"%d" % number)
        here.channel.send(wire.pack({"n": number, "descriptors": number % 2}), [file] if number % 2 else [])
        until(lambda number=number: len(there.heard) == number + 1, "it is heard")  # type: ignore[misc]
        os.close(file)
    assert [os.pread(file, 9, 0) for file in there.descriptors] == [b"1"]
    for file in there.descriptors:
        os.close(file)
    here.channel.close()
    there.channel.close()


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "message"),
        (bytes(64), "message"),
        (wire.HEAD.pack(b"gdsr", 8, 1 << 40), "message"),
        (wire.HEAD.pack(b"gdsr", 8, 24) + b"not json", "message"),
        (wire.HEAD.pack(b"gdsr", 8, 24) + b"[{},3]  ", "message"),
        (wire.pack({"n": 2, "descriptors": "one"}), "ValueError"),
    ],
)
def test_what_is_no_message_ends_the_connection(pair: tuple[socket.socket, End], data: bytes, why: str) -> None:
    bare, end = pair
    bare.sendall(wire.pack({"n": 1}) + data)
    until(lambda: len(end.lost) == 1, "it is lost")
    assert end.heard == [{"n": 1}]
    assert why in end.lost[0]


@pytest.mark.parametrize("cut", [0, 1, 15, 16, 20])
def test_half_a_message_is_none(pair: tuple[socket.socket, End], cut: int) -> None:
    bare, end = pair
    bare.sendall(wire.pack({"n": 1})[:cut])
    bare.shutdown(socket.SHUT_WR)
    until(lambda: end.lost == ["it has ended"], "it is lost")
    assert end.heard == []


def test_who_does_not_read_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing waits for it, and what waits to be sent is bounded."""
    monkeypatch.setattr(channels, "MOST_WAITING", 4 << 20)
    here, there = map(End, socket.socketpair())
    there.wait.clear()
    message, sent = wire.pack({"some": np.zeros(1 << 20, np.uint8)}), 0
    while here.channel.send(message):
        sent += 1
        assert sent < 32
    assert sent >= 4
    until(lambda: here.lost == ["it does not read its messages"], "it is given up")
    there.wait.set()
    here.channel.close()
    there.channel.close()


def test_a_callback_that_fails_costs_its_message_alone(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[int] = []

    def hear(fields: Fields) -> None:
        heard.append(fields["n"])
        if fields["n"] == 0:
            raise ValueError("no such thing")

    bare, there = socket.socketpair()
    channel = Channel(there, "test", hear, lambda why: None)
    channel.begin()
    bare.sendall(wire.pack({"n": 0}) + wire.pack({"n": 1}))
    until(lambda: heard == [0, 1], "both are heard")
    assert "no such thing" in caplog.text
    bare.close()
    channel.close()


def test_another_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = socket.socketpair()
    pid, uid, _ = struct.unpack("3i", there.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    assert (pid, uid) == (os.getpid(), os.geteuid())
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    with pytest.raises(RankProtocolError, match=f"process {pid} of user {uid}"):
        Channel(there, "test", lambda fields: None, lambda why: None)
    here.close()
    there.close()
