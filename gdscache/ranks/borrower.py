"""Planes of this process that get pages from another process's directory: see `Lender`."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

import gdscache
from gdscache.arrays import Int64Array
from gdscache.config import Config
from gdscache.disk.slab import Slab, SlabIO
from gdscache.errors import RankLostError, RankMismatchError
from gdscache.extents import HostExtents
from gdscache.kernels.copies import open_copies
from gdscache.load.plan import STATUSES
from gdscache.moves import PLANES, Move, Moving, PageStatus, Priority, Way
from gdscache.moves.native import Machine, NativeExecutor, Reserve
from gdscache.pages.planes import PagedPlanes
from gdscache.ranks import wire
from gdscache.ranks.channel import Channel, connected
from gdscache.ranks.loads import Verdicts
from gdscache.ranks.place import open_host_transport
from gdscache.ranks.wire import Fields
from gdscache.runtime.threads import log_failure, once

CLOSE_S = 5.0  # seconds that `close` waits for late reads
_log = logging.getLogger("gdscache.ranks")


class Borrower:
    """Thread-safe. `planes[layer][plane]` in host memory, as for `CacheEngine`, with the bytes that the lender's engine
    stores.

    If the lender has gone, or does not answer, its pages are missing; nothing raises.
    """

    def __init__(
        self, planes: Sequence[Sequence[torch.Tensor]], config: Config, namespace: bytes, address: str, rank: int
    ) -> None:
        """`config`: of this rank; `namespace`: of its model; `address`: of a `Lender`. Raises `RankError` if that
        cannot be reached, `RankMismatchError` if it keeps other pages, and the errors of opening its files."""
        self.rank = rank
        self._deadline = config.deadline
        self._layout = layout = config.model.layout()
        self._planes = PagedPlanes(layout, planes)
        self._lock = threading.Condition()
        self._gone = ""
        self._said = False  # the log says that the lender does not answer
        self._left = False  # the lender was closed
        self._loads = 0
        self._late = 0  # late rows
        self._closed, self._pid = False, os.getpid()
        with contextlib.ExitStack() as undo:
            connection = connected(address, "the rank that has the directory")
            self._channel = Channel(connection, f"borrower-{rank}", self._heard, self._lost)
            undo.callback(self._channel.close)
            self._channel.begin()
            about = self._greet(namespace)
            where, threads = Path(about["files"][0]).parent, about["threads"]
            transport = open_host_transport(about["transport"], directory=where, threads=threads)
            files, slots = tuple(map(Path, about["files"])), int(about["slots"])
            self._files = SlabIO(Slab(files, layout.extent_bytes, slots, slots, int(about["stretch"])), transport)
            undo.callback(self._files.close)
            self._bounce = HostExtents(layout, config.host_buffer, "off", "host_buffer")
            undo.callback(self._bounce.close)
            self._files.register(self._bounce.buffer.view)
            self._copies = open_copies(self._planes, config.gpu)
            undo.callback(self._copies.close)
            reserve = Reserve(self._bounce, range(self._bounce.slots))
            memories, own = {"bounce": self._bounce}, {"ssd": self._files}
            self._executor = NativeExecutor(Machine(self._copies, memories, own, {"ssd": slots}, reserve))
            undo.pop_all()

    def _greet(self, namespace: bytes) -> Fields:
        said = {"version": gdscache.__version__, "protocol": wire.PROTOCOL, "namespace": namespace.hex()}
        about = self._ask("hello", said | {"rank": self.rank}, 30.0)
        if about["wrong"]:
            raise RankMismatchError(
                f"rank {self.rank} has {about['wrong']}", "start all ranks with the same files, settings and versions"
            )
        return about

    # -- pages ---------------------------------------------------------------------------------------------------------

    def find(self, hashes: Sequence[bytes], parent: bytes | None, epoch: int) -> int:
        """The number of leading pages that are stored. See `Lender` for the arguments."""
        if not hashes:
            return 0
        try:
            return int(self._ask("find", _named(hashes, parent, epoch), self._deadline)["found"])
        except RankLostError:
            return 0

    def load(self, hashes: Sequence[bytes], parent: bytes | None, epoch: int, blocks: Int64Array) -> list[PageStatus]:
        """Read the leading stored pages into blocks, int64 (pages, blocks_per_page); returns their statuses.

        When it returns, nothing writes to the planes any more. Takes the `deadline` of the configuration twice at most:
        for the lender's answer, and for the reads. Pages without blocks are left out. Raises `SlotRangeError`.
        """
        hashes = hashes[: len(blocks)]
        self._planes.check_blocks(blocks)
        with self._lock:
            if self._closed or not hashes:
                return []
            self._loads += 1
        try:
            return self._load(hashes, parent, epoch, blocks)
        finally:
            with self._lock:
                self._loads -= 1
                self._lock.notify_all()

    def _load(self, hashes: Sequence[bytes], parent: bytes | None, epoch: int, blocks: Int64Array) -> list[PageStatus]:
        try:
            lent = self._ask("lend", _named(hashes, parent, epoch), self._deadline)
        except RankLostError:
            return []
        if not lent["lease"]:
            return []
        slots, sums = lent["slots"], lent["sums"]
        heard, late = Verdicts(len(slots), PageStatus.ABORTED), list[int]()
        moving: Moving | None = None
        try:
            if len(slots):
                way = Way("ssd", PLANES, np.array(slots), blocks[: len(slots)], sums=np.array(sums))
                moving = self._executor.begin(Move(Priority.LOAD, (way,), self._deadline), (), heard)
                end = self._executor.finish(moving.end())
                late = [*map(int, end.late)]
                log_failure(end.error)
        finally:
            self._give_back(lent["lease"], heard, moving, late)
        return [STATUSES[code] for code in heard.statuses.tolist()]

    def _give_back(self, lease: int, heard: Verdicts, moving: Moving | None, late: Sequence[int]) -> None:
        left = {*late}
        self._channel.send(wire.pack({"do": "took", "lease": lease, "free": not left, "statuses": heard.statuses}))
        if moving is None or not left:
            return
        with self._lock:
            self._late += len(left)

        def ended(row: int) -> None:
            with self._lock:
                if row not in left:
                    return
                left.remove(row)
                self._late -= 1
                self._lock.notify_all()
                last = not left
            if last:
                self._free(lease)

        moving.on_end(ended)

    def _free(self, lease: int) -> None:
        self._channel.send(wire.pack({"do": "free", "lease": lease}))

    # -- the lender ----------------------------------------------------------------------------------------------------

    @property
    def away(self) -> str:
        """Why the lender is not asked now; "" if it is."""
        return self._gone or ("it does not answer" if self._channel.overdue else "")

    def _ask(self, do: str, fields: Fields, seconds: float) -> Fields:
        """Raises `RankLostError` if no answer comes in time, and at once while another call has none."""
        if self.away:
            raise RankLostError(f"the lender is not asked: {self.away}", "see the log of its process")
        found = self._channel.answer(self._channel.ask(do, fields), seconds)
        if found is not None:
            return found
        with self._lock:
            first = not self._said and not self._gone and bool(self._channel.overdue)
            self._said = self._said or first
        if first:
            _log.error("rank %d: the rank that has the directory does not answer: its pages are missing", self.rank)
        raise RankLostError(f"the lender has not answered within {seconds:g} s", "see the log of its process")

    def _heard(self, fields: Fields) -> None:
        self._left = self._left or "closed" in fields
        if fields.get("lease"):  # its call has given up
            self._free(fields["lease"])
        with self._lock:
            back = self._said and not self._channel.overdue
            self._said = self._said and not back
        if back:
            _log.warning("rank %d: the rank that has the directory answers again", self.rank)

    def _lost(self, why: str) -> None:
        with self._lock:
            told, self._gone = self._gone or self._closed, why or "it has ended"
        if not told and self._left:
            _log.info("rank %d: the rank that has the directory was closed: its pages are missing", self.rank)
        elif not told:
            _log.error(
                "rank %d: the rank that has the directory is lost: %s. Its pages are missing; requests are computed",
                self.rank,
                why,
            )

    # -- the end -------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Read nothing more, and free everything; memory and files of hanging reads, when these end. May be called
        again. Does nothing in a forked child, which has the same sockets."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            if self._closed:
                return
            self._closed, self._gone = True, self._gone or "this rank is closed"
            self._lock.wait_for(lambda: not self._loads, 2 * self._deadline + CLOSE_S)
        parts = self._channel, self._executor, self._copies, self._files, self._bounce
        ends = [part.close for part in parts]
        if not once(lambda: not self._late and not self._loads, self._lock, ends, "gdscache-borrower-late", CLOSE_S):
            self._channel.close()
            _log.error("rank %d: reads have not ended: their memory and files are kept until they do", self.rank)


def _named(hashes: Sequence[bytes], parent: bytes | None, epoch: int) -> Fields:
    rows = np.frombuffer(b"".join(hashes), np.uint8).reshape(len(hashes), -1)
    return {"hashes": rows, "parent": parent and parent.hex(), "epoch": epoch}
