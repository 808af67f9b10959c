"""A process with planes, one of several that a leader's engine moves pages in and out of.

Its work for the leader: memories, a slab, an executor, and moves between them. It decides nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import gdscache
from gdscache.arrays import Int64Array
from gdscache.config import GpuConfig, ModelConfig
from gdscache.cuda.numa import near
from gdscache.cuda.streams import Event, record
from gdscache.disk.directory import FileLock, lock_slab
from gdscache.disk.slab import Slab, SlabIO
from gdscache.errors import EngineClosedError, GdsCacheError, LockLostError, RankError, RankMismatchError, ShortIOError
from gdscache.extents import HostExtents
from gdscache.kernels.copies import PageCopies, open_copies
from gdscache.load.handle import LayerwiseLoad
from gdscache.load.plan import LoadPart
from gdscache.moves import PLANES, Move, Moving, PageStatus, Priority, Spent
from gdscache.moves.native import Machine, NativeExecutor, Reserve
from gdscache.native import SHORT, take_rows
from gdscache.pages.layout import PLAIN, PageLayout
from gdscache.pages.planes import PagedPlanes, by_layer
from gdscache.ranks import wire
from gdscache.ranks.address import RankAddress
from gdscache.ranks.channel import Channel, Door
from gdscache.ranks.loads import MixedMoving, Verdicts, plain_rows
from gdscache.ranks.place import open_host_transport
from gdscache.ranks.wire import Fields
from gdscache.runtime.threads import Flag, Workers, failure_of, log_failure, once

WAITING = 16
REFUSED_KEPT = 4096  # cancelled moves that are remembered one by one
CLOSE_S = 5.0  # seconds that the end waits for late I/O
_log = logging.getLogger("gdscache.ranks")


_Call = Callable[[Fields], Mapping[str, Any] | None]
Blocks = Callable[[], Sequence[int]]


@dataclasses.dataclass(slots=True)
class _Awaited:
    """What comes under a number: a place in the order of this rank's stream, with `blocks` as in `Service.mark`; or
    `told`, the leader's bytes."""

    event: Event = None
    blocks: Blocks | None = None
    told: bytes = b""
    there: Flag = dataclasses.field(default_factory=Flag)


class Service:
    """Serves one leader over a connection, in `run`. `leave` ends that.

    Many methods: each message of the leader has one.
    """

    def __init__(
        self, connection: socket.socket, planes: Sequence[Sequence[torch.Tensor]], rank: int, shard: int
    ) -> None:
        self.leader = ""  # the leader's id: orders of another leader are refused
        self.layout: PageLayout
        self._given = planes
        self._device = next((tensor.device for layer in planes for tensor in layer), torch.device("cpu"))
        self._rank, self._shard = rank, shard
        self._gpu = GpuConfig()
        self._planes: PagedPlanes
        self._plain: PagedPlanes | None = None  # of packed planes: for pages that do not fit
        self._memories: dict[str, HostExtents] = {}
        self._slots: dict[str, int] = {}
        self._locks: list[FileLock] = []
        self._files: dict[str, SlabIO] = {}
        self._copies: list[PageCopies] = []
        self._executor: NativeExecutor | None = None
        self._moving: dict[int, Moving | None] = {}  # None: its begin is in progress
        self._refused: set[int] = set()  # moves cancelled before they were begun here, or when they had ended
        self._refused_to = 0  # and all moves up to this number that are not begun
        self._marks: dict[int, _Awaited] = {}
        self._told: dict[int, _Awaited] = {}
        self._late = 0  # late rows
        self._lock = threading.Condition()
        self.over = Flag()
        self._why = ""
        making = near(self._device)  # of threads or memory, near the planes' GPU
        self._calls: Mapping[str, _Call] = {
            "hello": self._hello,
            "memory": making(self._add_memory),
            "slab": making(self._add_slab),
            "start": making(self._start),
            "cut": lambda fields: self._files[fields["space"]].cut(),
            "flush": lambda fields: self._files[fields["space"]].flush(),
            "check": lambda fields: {"problems": self._files[fields["space"]].slab.check()},
            "bad": self._bad_slots,
        }
        self._workers = Workers(WAITING, "gdscache-rank")
        try:
            self._channel = Channel(connection, f"rank-{rank}", self._heard, self.leave)
            self._channel.begin()
        except BaseException:
            self._workers.shutdown()
            connection.close()
            raise

    def run(self) -> None:
        self.over.wait()
        if self._why:
            _log.warning("rank %d serves no leader any more: %s", self._rank, self._why)
        self._close()

    def leave(self, why: str) -> None:
        if not self.over.is_set():
            self._why = why
            self.over.set()
            for told in [*self._told.values()]:
                told.there.set()

    # -- messages of the leader ----------------------------------------------------------------------------------------

    def _heard(self, fields: Fields) -> None:
        what = fields.get("do")
        if what == "move":
            self._move(fields)
        elif what == "cancel":
            self._cancel(fields["id"])
        elif what == "forget":
            self.forget(fields["marks"])
        elif what == "told":
            told = self._told.setdefault(fields["number"], _Awaited())
            told.told = fields["what"].tobytes()
            told.there.set()
        elif what == "close":
            self.leave("")
        else:
            self._workers.submit(functools.partial(self._answer, fields))

    def _answer(self, fields: Fields) -> None:
        told: dict[str, Any] = {}
        try:
            told = dict(self._calls[fields["do"]](fields) or {})
        except GdsCacheError as error:
            told = {"error": type(error).__name__, "message": error.message, "hint": error.hint}
            told["errno"] = getattr(error, "errno", None)
        except Exception as error:  # noqa: BLE001 - the leader waits for an answer
            log_failure(error)
            told = {"error": "RankError", "message": f"rank {self._rank}: {error!r}", "hint": "see this rank's log"}
        finally:
            for descriptor in fields["descriptors"] or ():  # a mapped memory has its own
                os.close(descriptor)
        shared = told.pop("shared", ())
        self._channel.send(wire.pack({"answer": fields["call"], "descriptors": len(shared), **told}), shared)

    def _hello(self, fields: Fields) -> Fields:
        if (fields["version"], fields["protocol"]) != (gdscache.__version__, wire.PROTOCOL):
            raise RankMismatchError(
                f"the leader is gdscache {fields['version']} (protocol {fields['protocol']}), and rank {self._rank} is "
                f"{gdscache.__version__} (protocol {wire.PROTOCOL})",
                "install one version for all processes",
            )
        self.layout = ModelConfig(**fields["model"]).layout()
        self._gpu = GpuConfig(**fields["gpu"])
        self._planes = planes = PagedPlanes(self.layout, self._given)
        if self.layout.packed:
            self._plain = PagedPlanes(self.layout.packed_as(packed=False), self._given)
        self._slots[PLANES] = planes.blocks
        self.leader = fields["leader"]
        return {
            "blocks": planes.blocks,
            "block_tokens": planes.block_tokens,
            "device": str(planes.device),
            "pid": os.getpid(),
        }

    def _layout_of(self, space: str) -> PageLayout:
        return self._plain.layout if self._plain is not None and space.endswith(PLAIN) else self.layout

    def _add_memory(self, fields: Fields) -> Fields:
        """Add a pool of slots. `share`: return its descriptor, which ranks with equal bytes get."""
        layout = self._layout_of(fields["space"])
        extents = HostExtents(
            layout,
            fields["slots"] * layout.extent_bytes,
            "auto" if self._planes.device.type == "cuda" else "off",
            fields["setting"],
            descriptor=fields["descriptors"][0] if fields["descriptors"] else None,
            shared=fields["share"],
        )
        self._memories[fields["space"]] = extents
        return {"pinned": extents.buffer.pinned, "shared": [extents.buffer.descriptor] if fields["share"] else ()}

    def _add_slab(self, fields: Fields) -> Fields:
        space, directories = fields["space"], [Path(path) for path in fields["directories"]]
        with contextlib.ExitStack() as undo:
            threads = fields["threads"]
            transport = open_host_transport(fields["transport"], directory=directories[0], threads=threads)
            undo.callback(transport.close)
            if fields["owner"]:
                undo.callback(self._give_locks_back)
                self._hold(directories)
            slab = Slab.open(
                *(directories[0], self._layout_of(space).extent_bytes, fields["slots"], directories[1:]),
                shards=fields["shards"],
                shard=self._shard,
            )
            if fields["owner"]:
                self._hold(directories)
            self._files[space] = files = SlabIO(slab, transport)
            undo.pop_all()
        self._slots[space] = fields["slots"]
        for name, extents in self._memories.items():
            if name.endswith(PLAIN) == space.endswith(PLAIN):
                files.register(extents.buffer.view)
        return {"valid": slab.valid_slots, "transport": _plain(transport.describe()), "files": [*map(str, slab.files)]}

    def _hold(self, directories: Sequence[Path]) -> None:
        for number, where in enumerate(directories):
            lock = lock_slab(where, number, self._shard, held=[lock.path for lock in self._locks])
            self._locks += [] if lock is None else [lock]

    def _give_locks_back(self) -> None:
        locks, self._locks = self._locks, []
        for lock in locks:
            lock.close()

    def _start(self, fields: Fields) -> None:
        plain = None
        with contextlib.ExitStack() as undo:
            if self._plain is not None:
                plain = self._executor_of(self._plain, fields["loads"], PLAIN)
                undo.callback(plain.close)
            self._executor = self._executor_of(self._planes, fields["loads"], "", plain)
            undo.pop_all()

    def _executor_of(
        self,
        planes: PagedPlanes,
        loads: Mapping[str, list[list[int]]],
        ending: str,
        plain: NativeExecutor | None = None,
    ) -> NativeExecutor:
        """Moves pages between these planes and the spaces of one layout."""
        memories = {name: one for name, one in self._memories.items() if name.endswith(PLAIN) == bool(ending)}
        files = {name: one for name, one in self._files.items() if name.endswith(PLAIN) == bool(ending)}
        name = f"bounce{ending}"
        bounce = memories.get(name)
        reserve = None if bounce is None else Reserve(bounce, range(*loads[name][self._rank]), name)
        if bounce is not None:
            for one in files.values():
                one.register(bounce.buffer.view)
        copies = open_copies(planes, self._gpu)
        self._copies.append(copies)
        return NativeExecutor(Machine(copies, memories, files, self._slots, reserve), plain)

    def _bad_slots(self, fields: Fields) -> Fields:
        sums = fields["sums"][:, wire.columns(self._shard, self.layout.n_layers)]
        return {"bad": [*self._memories[fields["space"]].bad_slots(fields["slots"], sums).items()]}

    # -- moves ---------------------------------------------------------------------------------------------------------

    def told(self, number: int, seconds: float) -> bytes:
        """Wait up to `seconds` for the leader's bytes under this number; empty if none come, or the leader has gone.
        Smaller numbers are over."""
        awaited = self._told.setdefault(number, _Awaited())
        if not self.over.is_set():  # after `over` no more bytes come
            awaited.there.wait_awake(seconds)
        for old in [one for one in [*self._told] if one <= number]:
            del self._told[old]
        return awaited.told

    def mark(self, number: int, event: Event, blocks: Blocks | None = None) -> None:
        """`blocks()`: this rank's blocks of the store, if the leader's numbers are positions in them."""
        mark = self._mark(number)
        mark.event, mark.blocks = event, blocks
        mark.there.set()

    def _mark(self, number: int) -> _Awaited:
        mark = self._marks.setdefault(number, _Awaited())
        if self.over.is_set():  # the rank ends, and its store may never come
            mark.there.set()
        return mark

    def forget(self, marks: Iterable[int]) -> None:
        for mark in marks:
            self._marks.pop(mark, None)

    def _move(self, fields: Fields) -> None:
        move, number = wire.move_of(fields["move"]), fields["id"]
        marks = [self._mark(mark) for mark in fields["after"]]
        if not all(mark.there.is_set() and mark.blocks is None for mark in marks):
            self._workers.submit(functools.partial(self._begin_behind, number, move, marks))
        elif self._may_begin(number):
            self._begin(number, move, [mark.event for mark in marks])

    def _may_begin(self, number: int) -> bool:
        """Whether the leader has not cancelled the move. If so, the leader gets only the move's own end from now on."""
        with self._lock:
            if number in self._refused or number <= self._refused_to or self.over.is_set():
                self._refused.discard(number)
                return False
            self._moving[number] = None
            return True

    def _begin_behind(self, number: int, move: Move, marks: Sequence[_Awaited]) -> None:
        """Begin a store's move when this rank's stream has reached the store; tell the leader if it does not in
        time."""
        if not all(mark.there.wait(move.seconds) for mark in marks):
            why = (
                f"rank {self._rank} was not told of the store within {move.seconds:g} s: call Rank.store with its order"
            )
            self._tell(number, why=why)
        elif self._may_begin(number):
            blocks = next((mark.blocks for mark in marks if mark.blocks is not None), None)
            self._begin(number, move, [mark.event for mark in marks], None, blocks)

    def begin_load(
        self, number: int, move: Move, after: Sequence[Event], heard: Verdicts, blocks: Blocks | None
    ) -> None:
        if not self._may_begin(number):
            heard.judged(heard.rows, PageStatus.CANCELLED)
            heard.end()
            return
        columns = wire.columns(self._shard, self.layout.n_layers)
        for way in move.ways:
            way.sums = None if way.sums is None else np.ascontiguousarray(way.sums[:, columns])
        self._begin(number, move, after, heard, blocks)

    def _begin(
        self,
        number: int,
        move: Move,
        after: Sequence[Event],
        heard: Verdicts | None = None,
        blocks: Blocks | None = None,
    ) -> None:
        executor = self._executor
        assert executor is not None, "a move before the start"
        waited = any(event is not None and not event.query() for event in after)
        if heard is None and move.priority < Priority.STORE:
            heard = Verdicts(len(move))
        ended = functools.partial(self._ended, number, move, heard, waited)
        try:
            on_files = any(space in self._files for way in move.ways for space in (way.source, way.target))
            lost = next(filter(None, (lock.lost(thorough=False) for lock in self._locks)), "") if on_files else ""
            if lost:
                self._channel.send(wire.pack({"lock_lost": lost}))
                raise LockLostError(lost)
            if blocks is not None:
                self._place(move, np.asarray(blocks(), np.int64))
            moving = self._begun(executor, move, after, heard)
        except Exception as error:  # noqa: BLE001 - the leader waits for its end
            log_failure(error)
            ended(None, f"rank {self._rank}: {error}")
            return
        with self._lock:
            self._moving[number] = moving
            given_up = number in self._refused
        if given_up:
            moving.cancel()
        if heard is not None and heard.handle is not None:
            heard.handle.carried_by(moving, last=True)
        try:
            self._workers.submit(functools.partial(ended, moving, ""))
        except EngineClosedError:  # this rank ends: when its caller goes on, nothing writes to the planes
            moving.cancel()
            ended(moving, "")

    def _begun(self, executor: NativeExecutor, move: Move, after: Sequence[Event], heard: Verdicts | None) -> Moving:
        """Begin a move by the executor of its pages: packed ones, plain ones, or some of each."""
        plain = executor.plain
        rows = np.empty(0, np.int64) if plain is None else plain_rows(move)
        if plain is None or not len(rows):
            return executor.begin(move, after, heard)
        if len(rows) == len(move):
            return plain.begin(move, after, heard)
        assert heard is not None, "stores and demotions are of one kind of pages"
        return MixedMoving(executor, plain, move, rows, after, heard)

    def _place(self, move: Move, blocks: Int64Array) -> None:
        self._planes.check_blocks(blocks)
        for way in move.ways:
            if way.source == PLANES:
                way.sources = blocks[way.sources]
            if way.target == PLANES:
                way.targets = blocks[way.targets]

    def _ended(
        self, number: int, move: Move, heard: Verdicts | None, waited: bool, moving: Moving | None, why: str
    ) -> None:
        late, told = list[int](), dict[str, Any]()
        if moving is not None and self._executor is not None:
            try:
                end = self._executor.finish(moving.end())
                late, why = [*map(int, end.late)], "" if end.error is None else str(end.error)
                codes = [SHORT if isinstance(e, ShortIOError) else getattr(e, "errno", 0) for e in end.errors.values()]
                failed = [(row, code or errno.EIO) for row, code in zip(end.errors, codes, strict=True)]
                told = {"failed": failed, "late": late, "unfit": [*map(int, end.unfit)]}
            except GdsCacheError as error:
                why = f"rank {self._rank}: {error}"
        if heard is not None:
            told |= {"statuses": heard.statuses, "spent": Spent(time.monotonic() - heard.begun, waited)}
        elif move.priority is Priority.STORE and not why:
            sums = [take_rows(self._memories[way.target].checksums, way.targets) for way in move.ways]
            told["sums"] = np.concatenate(sums)
        self._tell(number, **told, why=why)
        with self._lock:
            self._moving.pop(number, None)
            self._refused.discard(number)
            self._late += len(late)
            self._lock.notify_all()
        if moving is not None and late:
            there = frozenset(late)
            moving.on_end(lambda row: self._late_ended(number, row) if row in there else None)
        if heard is not None:
            heard.end()

    def _late_ended(self, number: int, row: int) -> None:
        with self._lock:
            self._late -= 1
            self._lock.notify_all()
        self._channel.send(wire.pack({"row": row, "of": number}))

    def _tell(self, number: int, **told: Any) -> None:
        """A move has ended: rows that `failed`, with their errno, are `late` or `unfit`; `why` it broke off."""
        nothing = {"failed": (), "late": (), "unfit": (), "why": "", "spent": None, "begun": True}
        self._channel.send(wire.pack({"ended": number, **nothing, **told}))

    def _cancel(self, number: int) -> None:
        with self._lock:
            begun, moving = number in self._moving, self._moving.get(number)
            if moving is None:
                self._refused.add(number)
                if len(self._refused) > REFUSED_KEPT:
                    self._refused_to = min(self._refused)
                    self._refused.discard(self._refused_to)
        if moving is not None:
            moving.cancel()
        elif not begun:
            self._tell(number, begun=False)

    # -- the end -------------------------------------------------------------------------------------------------------

    def _close(self) -> None:
        """End all moves. Late I/O is waited for, for a time; behind that, a thread frees its memory, files and locks
        when it ends."""
        with contextlib.ExitStack() as last_to_first:
            last_to_first.callback(self._channel.close)
            last_to_first.callback(self._channel.send, wire.pack({"closed": True}))
            for mark in [*self._marks.values()]:  # this rank's own threads go on adding some
                mark.there.set()
            log_failure(failure_of(self._workers.shutdown))
            ends = [] if self._executor is None else [self._executor.close]
            ends += [copies.close for copies in self._copies]
            ends += [files.close for files in self._files.values()]
            ends += [*(extents.close for extents in self._memories.values()), self._give_locks_back]
            if not once(lambda: not self._late and not self._moving, self._lock, ends, "gdscache-rank-late", CLOSE_S):
                late = self._late, len(self._moving)
                _log.error("%d pages and %d moves of rank %d are late: memory and files are kept", *late, self._rank)


def _plain(told: Mapping[str, object]) -> dict[str, Any]:
    return {
        key: value if isinstance(value, (str, int, float, bool, type(None))) else str(value)
        for key, value in told.items()
    }


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
        self._closed, self._pid = False, os.getpid()
        self._door = Door(name, "gdscache-rank", self._serve)

    def load(self, order: bytes, blocks: Sequence[int] | None = None) -> LayerwiseLoad:
        """Begin a load by a leader's `load.order`, after the current stream's work so far; returns this rank's handle.
        `blocks`: blocks of this rank, in which the leader's numbers are positions; None: the leader's numbers are
        blocks of every rank.

        The handle waits for layers of this rank's planes and has this rank's verdicts: a page that is bad on one rank
        is bad, and each rank's engine has to be told. Never raises for a leader that has gone: its pages are
        `RANK_LOST`.
        """
        fields, service, planes = wire.unpack(order, "requests"), self._service, self._planes
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
        move, places = wire.move_of(told), told["places"]
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
        fields, service = wire.unpack(order, "store"), self._service
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
        again. Does nothing in a forked child, which has the same sockets."""
        if not self._closed and os.getpid() == self._pid:
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
