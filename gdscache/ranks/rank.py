"""A process with planes, one of several that a leader's engine moves pages in and out of."""

from __future__ import annotations

import logging
import secrets
import socket
from collections.abc import Callable, Sequence

import torch

from gdscache.cuda.streams import Event, record
from gdscache.errors import EngineClosedError, RankError
from gdscache.load.handle import LayerwiseLoad
from gdscache.load.report import LoadPart
from gdscache.moves import PageStatus
from gdscache.pages.layout import PageLayout
from gdscache.pages.planes import by_layer
from gdscache.ranks import wire
from gdscache.ranks.address import RankAddress
from gdscache.ranks.channel import Door
from gdscache.ranks.loads import Verdicts
from gdscache.ranks.service import Service

_log = logging.getLogger("gdscache.ranks")


class Rank:
    """Planes of this process, `planes[layer][plane]` as `CacheEngine` takes them, for a leader's engine to move.

        rank = gdscache.Rank(planes, rank=1)               # in each process that has planes
        engine = gdscache.CacheEngine.from_config(path, ranks=addresses)   # in one process, the leader
        load = engine.load(hit, slots);  orders = load.order               # the leader decides
        loading = rank.load(orders);     loading.wait(layer)               # each rank, on its own stream

    `rank` counts from 0. `shard`: the part of the heads that the planes have; ranks with equal bytes (latents, heads
    that are replicated) name one shard. By default each rank is a shard of its own. One leader at a time is served;
    behind its end, or its death, another may connect. Raises `RankError` where the address cannot be had.
    """

    def __init__(self, planes: Sequence[Sequence[torch.Tensor]], rank: int = 0, *, shard: int | None = None) -> None:
        self._planes = by_layer(planes)
        name = f"gdscache-rank-{secrets.token_hex(16)}"
        self.address = RankAddress(name, rank, rank if shard is None else shard)
        self._service: Service | None = None
        self._layout: PageLayout | None = None
        self._closed = False
        self._door = Door(name, "gdscache-rank", self._serve)

    def load(self, order: bytes, blocks: Sequence[int] | None = None) -> LayerwiseLoad:
        """Begin a load by a leader's `load.order`, after the current stream's work so far; returns this rank's handle.
        `blocks`: blocks of this rank, in which the leader's numbers are positions; None: the leader's numbers are
        blocks of every rank.

        The handle waits for layers of this rank's planes and has this rank's verdicts: a page that is bad on one rank
        is bad, and each rank's engine has to be told. Never raises for a leader that has gone: its pages are
        `RANK_LOST`.
        """
        fields, arrays = wire.unpack(order)
        service, planes = self._service, self._planes
        if service is not None:
            self._layout = service.layout
        layout = self._layout
        if layout is None:
            raise RankError("no leader has connected to this rank", "open the engine with this rank's address first")
        parts = [LoadPart(pages, first) for pages, first in fields["requests"]]
        handle = LayerwiseLoad(parts, layout, fields["deadline"], checked=fields["checked"])
        event, told = record(planes[0][0].device), fields["move"]
        if told is None:
            Verdicts(0, handle=handle, places=slice(0)).end()
            return handle
        move, places = wire.move_of(told, arrays), arrays.pop(0)
        if service is None or service.leader != fields["leader"]:
            Verdicts(len(places), PageStatus.RANK_LOST, handle, places).end()
        else:
            heard = Verdicts(len(places), handle=handle, places=places)
            service.begin_load(told["id"], move, (event,), heard, None if blocks is None else lambda: blocks)
        return handle

    def store(self, order: bytes) -> None:
        """Take note of a store by a leader's `handle.order`: its blocks may be read after the current stream's work so
        far. Every rank must call it once for each store; an empty order does nothing."""
        if not order:
            return
        fields, _ = wire.unpack(order)
        service = self._service
        if service is not None and service.leader == fields["leader"]:
            service.mark(fields["store"], record(self._planes[0][0].device))

    def place(self, number: int, blocks: Callable[[], Sequence[int]], after: Event = None) -> None:
        """`store` for a store whose mark has this number, below 0, on the leader; before or after the leader begins it.

        `blocks()` waits for this rank's block numbers, in which the leader's numbers are positions; they may be read
        after the event `after`. Every rank must call it once for each such store, and `passed` when it has ended.
        """
        service = self._service
        if service is not None:
            service.mark(number, after, blocks)

    def passed(self, number: int) -> None:
        """A store of `place` has ended."""
        service = self._service
        if service is not None:
            service.forget([number])

    def told(self, number: int, seconds: float) -> bytes:
        """Wait up to `seconds` for the bytes that the leader tells all ranks under this number. b"": none came, or no
        leader is connected.

        Numbers grow: after a call, the bytes of smaller numbers are lost.
        """
        service = self._service
        return b"" if service is None else service.told(number, seconds)

    def left(self, seconds: float) -> bool:
        """Wait until no leader is connected; False after `seconds`."""
        service = self._service
        return service is None or service.over.wait(seconds)

    def close(self) -> None:
        """End moves, free memory and files, and disconnect. The leader's pages miss from then on. May be called
        again."""
        if not self._closed:
            self._closed = True
            self._door.shut()
            service = self._service
            if service is not None:
                service.leave("this rank is being closed")
            self._door.close()

    def __enter__(self) -> Rank:
        if self._closed:
            raise EngineClosedError("the rank is closed", "make a new one")
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _serve(self, connection: socket.socket) -> None:
        service = Service(connection, self._planes, self.address.rank, self.address.shard)
        self._service = service
        if self._closed:
            service.leave("this rank is being closed")
        try:
            service.run()
        finally:
            self._service = None
