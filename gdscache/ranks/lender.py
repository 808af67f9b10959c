"""Lends pages of a directory to other processes with the same bytes, each of which reads by itself.

For ranks that reach a page at different times: a `Borrower` asks for pages, reads them from the slab, and reports their
statuses. Their slots are leased until then, and until no read touches them any more.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
import secrets
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gdscache
from gdscache.arrays import integers
from gdscache.disk.slab import Slab
from gdscache.errors import RankError
from gdscache.load.plan import STATUSES, LoadPlan
from gdscache.load.planner import LoadPlanner
from gdscache.pages.keys import Page
from gdscache.pages.layout import PageLayout
from gdscache.ranks import wire
from gdscache.ranks.channel import Channel, Door
from gdscache.ranks.wire import Fields
from gdscache.runtime.threads import Workers, log_failure
from gdscache.tiers.base import DurableTier, checked_sums
from gdscache.tiers.manager import TierManager

Named = Callable[[Sequence[bytes], bytes | None, int], Sequence[Page]]


@dataclasses.dataclass(slots=True, eq=False)
class _Served:
    """One borrower, and its leases by number."""

    channel: Channel = dataclasses.field(init=False)
    rank: int = 0
    leases: dict[int, LoadPlan] = dataclasses.field(default_factory=dict)
    ended: bool = False


class Lender:
    """Serves any number of borrowers until `close`. `address`: a text, for `Borrower`."""

    def __init__(
        self,
        manager: TierManager,
        layout: PageLayout,
        slab: Slab,
        transport: Mapping[str, Any],
        namespace: bytes,
        named: Named,
    ) -> None:
        """`manager`, `layout`: of an engine with an SSD, whose slab is `slab`, and no memory above it. `transport`:
        name and threads for reading the slab. `namespace`: must equal the borrowers'.

        `named(hashes, parent, epoch)`: the pages of hashes of 32 bytes, the first of which follows `parent`; none if
        the borrower's `epoch` is not that of the present weights. Raises `RankError` without a socket.
        """
        self.address = f"gdscache-lender-{secrets.token_hex(16)}"
        self.planner, self._named, self._namespace = LoadPlanner(manager), named, namespace
        self._n_sums = layout.n_sums
        self._about = {
            "files": [str(file) for file in slab.files],
            "slots": slab.slots,
            "stretch": slab.stretch,
            **transport,
        }
        self._tier: DurableTier = manager.files[0]
        self._served: list[_Served] = []
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._closed, self._pid = False, os.getpid()
        with contextlib.ExitStack() as undo:
            self._workers = Workers(2, "gdscache-lender")
            undo.callback(self._workers.shutdown)
            self._door = Door(self.address, "gdscache-lender", self._serve)
            undo.pop_all()

    def close(self) -> None:
        """Lend nothing more, and take lent pages back. Call it before the engine is closed; may be called again. Does
        nothing in a forked child, which has the same sockets."""
        if os.getpid() != self._pid:
            return
        self._closed = True
        self._door.close()
        with self._lock:
            served = [*self._served]
        for one in served:
            one.channel.send(wire.pack({"closed": True}))
            self._end(one)
        self._workers.shutdown()

    def _serve(self, connection: socket.socket) -> None:
        one = _Served()
        with contextlib.ExitStack() as undo:
            undo.callback(connection.close)
            heard, lost = functools.partial(self._heard, one), functools.partial(self._end, one)
            one.channel = Channel(connection, "lender", heard, lost)
            undo.pop_all()
        with self._lock:
            self._served.append(one)
        one.channel.begin()

    def _end(self, one: _Served, why: str = "") -> None:
        """A borrower reads nothing more, or has ended: take its pages back. May be called again."""
        with self._lock:
            one.ended, leases = True, [*one.leases.values()]
            one.leases.clear()
            self._served = [other for other in self._served if other is not one]
        one.channel.close()
        for plan in leases:
            self.planner.abandon(plan)

    # -- messages of borrowers -----------------------------------------------------------------------------------------

    def _heard(self, one: _Served, fields: Fields) -> None:
        if fields["do"] == "took":
            with self._lock:
                plan = one.leases.get(fields["lease"])
            if plan is not None and len(fields["statuses"]) <= len(plan):
                self._took(plan, fields["statuses"])
        if fields["do"] == "free" or fields.get("free"):
            with self._lock:
                plan = one.leases.pop(fields["lease"], None)
            if plan is not None:
                self.planner.abandon(plan)
        elif fields["do"] != "took":
            one.rank = fields.get("rank", one.rank)
            if not self._closed:
                self._workers.submit(functools.partial(self._answer, one, fields))

    def _answer(self, one: _Served, fields: Fields) -> None:
        told: Fields = {"found": 0, "lease": 0}
        try:
            if fields["do"] == "hello":
                told = self._greet(fields)
            elif fields["do"] == "find":
                tiers = self.planner.manager.peek(self._pages(fields))
                told = {"found": next((n for n, name in enumerate(tiers) if name != self._tier.name), len(tiers))}
            elif pages := self._pages(fields):
                told = self._lend(one, pages)
        except Exception as error:  # noqa: BLE001 - a borrower waits for the answer
            log_failure(error)
        one.channel.send(wire.pack({"answer": fields["call"], **told}))  # its thread notices if the borrower has gone

    def _greet(self, fields: Fields) -> Fields:
        same = {"version": gdscache.__version__, "protocol": wire.PROTOCOL, "namespace": self._namespace.hex()}
        wrong = [
            f"{name} {fields.get(name)}, where the lender has {value}"
            for name, value in same.items()
            if fields.get(name) != value
        ]
        return {"wrong": "; ".join(wrong), **self._about}

    def _pages(self, fields: Fields) -> Sequence[Page]:
        hashes, parent = [row.tobytes() for row in fields["hashes"]], fields["parent"]
        return self._named(hashes, parent and bytes.fromhex(parent), fields["epoch"]) if hashes else ()

    def _lend(self, one: _Served, pages: Sequence[Page]) -> Fields:
        planner, tier = self.planner, self._tier
        plan = planner.plan([pages], f"rank {one.rank}", keep=False)
        try:
            # of packed pages, those that do not fit lie in another slab
            entries = plan.entries(range(next((r.rows.start for r in plan.runs if r.tier is not tier), len(plan))))
            if not tier.at_hand(entries):
                tier.learn(entries)
            there = next((n for n, entry in enumerate(entries) if not tier.at_hand([entry])), len(entries))
            sums = checked_sums(tier, entries[:there], self._n_sums)
            assert sums is not None, "pages without checksums"
            with self._lock:
                if one.ended:
                    raise RankError(f"rank {one.rank} has gone", "see the log of its process")
                one.leases[number := next(self._numbers)] = plan
        except BaseException:
            planner.abandon(plan)
            raise
        return {"lease": number, "slots": integers(plan.slots[:there]), "sums": sums}

    def _took(self, plan: LoadPlan, statuses: wire.Array) -> None:
        codes = statuses.tolist()
        for code in {*codes}:
            rows = integers([row for row, found in enumerate(codes) if found == code])
            self.planner.finish(plan, rows, STATUSES[code])
        if not self._closed:
            self._workers.submit(self._tier.commit_deletions)
