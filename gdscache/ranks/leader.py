"""The leader's view of an engine's ranks: connections, calls, and ranks that are away or lost."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import secrets
import threading
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

import numpy as np

import gdscache
from gdscache import errors
from gdscache.errors import GdsCacheError, IOFailedError, RankError, RankLostError, RankMismatchError
from gdscache.ranks import wire
from gdscache.ranks.address import RankAddress
from gdscache.ranks.channel import Channel, connected
from gdscache.ranks.wire import Fields

CONNECT_S = 30.0  # seconds for a rank to be there and answer "hello"
OPEN_S = 600.0  # seconds for a rank to allocate its memory and files
GRACE_S = 2.0  # seconds after a deadline until a rank without an answer is away
_log = logging.getLogger("gdscache.ranks")


class Link:
    """One rank. `facts`: the rank's answer to "hello"."""

    def __init__(self, address: RankAddress) -> None:
        self.address = address
        self.rank, self.shard = address.rank, address.shard
        self.facts: Fields = {}
        self.channel: Channel
        self.lost = ""  # why it is lost for good; "" while it is not
        self.left = False  # it was closed
        self.overdue: set[int] = set()

    @property
    def who(self) -> tuple[int, object]:
        return self.rank, self.facts.get("pid", "?")


class RankSet:
    """All ranks of an engine. `heard(link, fields)` gets messages that are no answer, in a thread of the link.

    `absent` says why nothing is loaded or stored for now: a rank is away, or lost.
    """

    def __init__(self, addresses: Sequence[RankAddress], model: Fields, gpu: Fields) -> None:
        """Connect to all of them, whose planes must be those of `model`; `gpu`: the section of the configuration.

        Raises `RankError` if one cannot be reached, or they are no set: ranks 0 to n - 1, shards from 0 on, each with
        the same number of ranks; `RankMismatchError`, and the ranks' own errors.
        """
        _check(addresses)
        self.leader = secrets.token_hex(8)
        self.links: list[Link] = []
        self.shards = 1 + max(address.shard for address in addresses)
        self.absent = ""
        self.heard: Callable[[Link, Fields], object] = lambda link, fields: None
        self.gone: Callable[[Link], object] = lambda link: None  # called when a rank is lost
        self._lock = threading.Lock()
        self._closed = False

        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            for address in sorted(addresses, key=lambda address: address.rank):
                link = Link(address)
                heard, lost = functools.partial(self._heard, link), functools.partial(self.lose, link)
                connection = connected(address.name, f"rank {link.rank}", CONNECT_S)
                link.channel = Channel(connection, f"leader-{link.rank}", heard, lost)
                self.links.append(link)
                link.channel.begin()
            self._greet(model, gpu)
            undo.pop_all()

    def _greet(self, model: Fields, gpu: Fields) -> None:
        told = {"version": gdscache.__version__, "protocol": wire.PROTOCOL, "leader": self.leader}
        for link, answer in self.call("hello", told | {"model": model, "gpu": gpu}, seconds=CONNECT_S):
            link.facts = answer
        for name in ("blocks", "block_tokens"):
            found = {link.facts[name] for link in self.links}
            if len(found) > 1:
                raise RankMismatchError(
                    f"the ranks' planes have {sorted(found)} {name}", "attach planes of one shape on all ranks"
                )

    @property
    def owners(self) -> list[Link]:
        """The first rank of each shard, which has its files."""
        return [next(link for link in self.links if link.shard == shard) for shard in range(self.shards)]

    @property
    def replicas(self) -> int:
        """The number of ranks with equal bytes."""
        return len(self.links) // self.shards

    def of_shard(self, shard: int) -> list[Link]:
        return [link for link in self.links if link.shard == shard]

    # -- calls ---------------------------------------------------------------------------------------------------------

    def call(
        self, do: str, fields: Fields, links: Sequence[Link] | None = None, *, seconds: float = OPEN_S
    ) -> list[tuple[Link, Fields]]:
        """Ask ranks at the same time, all by default; returns their answers. Raises the first rank's error, and
        `RankLostError` if one does not answer."""
        asked = [(link, link.channel.ask(do, fields)) for link in (self.links if links is None else links)]
        return [(link, _answer(link, number, seconds)) for link, number in asked]

    def share(self, fields: Fields, links: Sequence[Link]) -> list[Fields]:
        """Have the first rank make a memory, and the others map the same one."""
        first, others = links[0], links[1:]
        made = _answer(first, first.channel.ask("memory", {**fields, "share": bool(others)}), OPEN_S)
        given = made["descriptors"] or ()
        try:
            mapped = {**fields, "share": False}
            return [made, *(_answer(link, link.channel.ask("memory", mapped, given), OPEN_S) for link in others)]
        finally:
            for descriptor in given:
                os.close(descriptor)

    def tell(self, number: int, what: bytes) -> None:
        message = wire.pack({"do": "told", "number": number, "what": np.frombuffer(what, np.uint8)})
        for link in self.links:
            link.channel.send(message)

    # -- messages of ranks ---------------------------------------------------------------------------------------------

    def _heard(self, link: Link, fields: Fields) -> None:
        if "closed" in fields:
            link.left = True
        elif "answer" not in fields:
            self.heard(link, fields)
        for descriptor in fields.get("descriptors") or ():  # of an answer that came too late
            os.close(descriptor)

    def lose(self, link: Link, why: str) -> None:
        """A rank has gone for good: its moves have ended, and nothing is loaded or stored any more."""
        with self._lock:
            if self._closed or link.lost:
                return
            link.lost = f"is lost: {why}"
            self._look()
        if link.left:
            _log.warning("rank %d (process %s) was closed: nothing is loaded or stored any more", *link.who)
        else:
            _log.error(
                "rank %d (process %s) is lost: %s. Nothing is loaded or stored any more; requests are computed. Start "
                "the engine anew",
                *link.who,
                why,
            )
        self.gone(link)

    def late(self, link: Link, number: int, owing: Container[int]) -> None:
        """A move has not ended on a rank in time. `owing`: the ranks that have not answered yet."""
        with self._lock:
            if link.rank not in owing:
                return
            first = not link.overdue and not link.lost
            link.overdue.add(number)
            self._look()
        if first:
            _log.error("rank %d (process %s) does not answer: nothing is loaded or stored until it does", *link.who)

    def answered(self, link: Link, number: int) -> None:
        with self._lock:
            if number not in link.overdue:
                return
            link.overdue.discard(number)
            back = not link.overdue and not link.lost
            self._look()
        if back:
            _log.warning("rank %d answers again", link.rank)

    def _look(self) -> None:
        """Update `absent`. The lock is held, so that it changes together with the links."""
        lost, away = any(link.lost for link in self.links), any(link.overdue for link in self.links)
        self.absent = "rank_lost" if lost else "rank_away" if away else ""

    def describe(self) -> list[dict[str, Any]]:
        with self._lock:
            links = [(link, bool(link.lost), len(link.overdue)) for link in self.links]
        return [
            {
                "rank": link.rank,
                "shard": link.shard,
                "pid": link.facts.get("pid"),
                "device": link.facts.get("device"),
                "state": "lost" if lost else "away" if overdue else "running",
                "overdue": overdue,
            }
            for link, lost, overdue in links
        ]

    def close(self) -> None:
        """Have the ranks end their work, and disconnect; may be called again."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        for link in self.links:
            link.channel.send(wire.pack({"do": "close"}))
        for link in self.links:
            link.channel.close()


def _check(addresses: Sequence[RankAddress]) -> None:
    given = [*addresses] if isinstance(addresses, Iterable) else []
    if not given or any(not isinstance(address, RankAddress) for address in given):
        kinds = ", ".join(sorted({type(address).__name__ for address in given})) or "nothing"
        raise RankError(f"ranks holds {kinds}, not RankAddress", "pass Rank.address of each process, as ranks=[...]")
    numbers, shards = sorted(a.rank for a in given), [a.shard for a in given]
    if numbers != [*range(len(given))]:
        raise RankError(f"the ranks are {numbers}", "number them 0 to n - 1, each once")
    counts = {shards.count(shard) for shard in range(max(shards) + 1)}
    if min(shards) < 0 or len(counts) > 1:
        raise RankError(f"the ranks' shards are {shards}", "give each shard, from 0 on, to as many ranks")


def _answer(link: Link, number: int, seconds: float) -> Fields:
    found = link.channel.answer(number, seconds)
    if found is None:
        raise RankLostError(
            f"rank {link.rank} {link.lost or f'has not answered within {seconds:g} s'}",
            f"see the log of its process{'' if link.lost else '; it serves one leader at a time'}",
        )
    if "error" in found:
        raise _error(found)
    return found


def _error(fields: Fields) -> GdsCacheError:
    kind = getattr(errors, str(fields["error"]), RankError)
    if not (isinstance(kind, type) and issubclass(kind, GdsCacheError)):
        kind = RankError
    if issubclass(kind, IOFailedError):
        return kind(fields["message"], fields["hint"], fields.get("errno"))
    try:
        return kind(fields["message"], fields["hint"])
    except TypeError:  # a class that takes more
        return RankError(fields["message"], fields["hint"])
