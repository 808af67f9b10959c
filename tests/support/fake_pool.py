"""A shared pool in memory, with the codes of the real one, and faults on order. `tiers: [pool_entry(...)]`."""

from __future__ import annotations

import ctypes
import re
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from gdscache.mooncake.client import (
    DONE,
    GONE,
    MISFIT,
    NO_MASTER,
    NO_SPACE,
    TRANSFER_FAILED,
    Connect,
    MooncakeAddress,
    MooncakeClient,
)
from gdscache.mooncake.tier import MooncakeTier
from tests.support.helpers import MHA, layout_of

EXTENT = layout_of(MHA).extent_bytes
POOLS: dict[str, FakePool] = {}  # by the masters' addresses


class FakePool:
    """What all clients of a master see. `room`: objects at most. Tests set what goes wrong:

    `dead`: the master is. `lost`: names whose owner is dead, so that they exist and cannot be got. `evicts`: whether a
    put that finds it full makes room for the next one. `gate`: calls that move bytes wait for it; `answers`: questions.
    """

    def __init__(self, room: int = 1 << 30) -> None:
        self.objects: dict[str, bytes] = {}
        self.room = room
        self.dead = False
        self.evicts = True
        self.lost: set[str] = set()
        self.gate = threading.Event()
        self.gate.set()
        self.answers = threading.Event()
        self.answers.set()
        self.calls: Counter[str] = Counter()
        self.asked: Counter[str] = Counter()  # how often each name was asked for
        self.largest = 0  # objects of a call
        self.registered: list[tuple[int, int]] = []
        self.strays = 0  # pieces in memory that nobody has registered
        self.lock = threading.Lock()

    def restart(self) -> None:
        """The master comes back, and has forgotten everything."""
        self.objects.clear()
        self.dead = False


class FakeClient(MooncakeClient):
    def __init__(self, pool: FakePool) -> None:
        self.pool = pool
        self.registered: dict[int, int] = {}
        self.closed = False

    def _begin(self, what: str, names: Sequence[str]) -> bool:
        """Count a call; whether the master answers."""
        assert not self.closed, "a call after close"
        self.pool.calls[what] += 1
        self.pool.largest = max(self.pool.largest, len(names))
        return not self.pool.dead

    def _move(
        self, what: str, names: Sequence[str], pieces: Sequence[Sequence[tuple[int, int]]], one: Callable[..., int]
    ) -> list[int]:
        for at, nbytes in (piece for some in pieces for piece in some):
            inside = any(first <= at and at + nbytes <= first + size for first, size in self.registered.items())
            self.pool.strays += not inside
        answers = self._begin(what, names)
        self.pool.gate.wait(60)
        if not answers or self.pool.dead:
            return [NO_MASTER] * len(names)
        return [one(name, some) for name, some in zip(names, pieces, strict=True)]

    def exist(self, names: Sequence[str]) -> list[int]:
        answers = self._begin("exist", ())
        self.pool.answers.wait(60)
        if not answers:
            return [NO_MASTER] * len(names)
        self.pool.asked.update(names)
        return [int(name in self.pool.objects) for name in names]

    def put(self, names: Sequence[str], pieces: Sequence[Sequence[tuple[int, int]]]) -> list[int]:
        return self._move("put", names, pieces, self._put)

    def _put(self, name: str, pieces: Sequence[tuple[int, int]]) -> int:
        with self.pool.lock:
            if name in self.pool.lost:
                return TRANSFER_FAILED
            if name not in self.pool.objects:
                if len(self.pool.objects) >= self.pool.room:
                    if self.pool.evicts and self.pool.objects:
                        del self.pool.objects[next(iter(self.pool.objects))]
                    return NO_SPACE
                self.pool.objects[name] = b"".join(ctypes.string_at(at, nbytes) for at, nbytes in pieces)
            return DONE

    def get(self, names: Sequence[str], pieces: Sequence[Sequence[tuple[int, int]]]) -> list[int]:
        return self._move("get", names, pieces, self._get)

    def _get(self, name: str, pieces: Sequence[tuple[int, int]]) -> int:
        found = self.pool.objects.get(name)
        if found is None:
            return GONE
        if name in self.pool.lost:
            ctypes.memset(pieces[0][0], 0xEE, pieces[0][1] // 2)  # half of it came
            return TRANSFER_FAILED
        if len(found) != (wanted := sum(nbytes for _, nbytes in pieces)):
            return MISFIT if len(found) > wanted else TRANSFER_FAILED
        at = 0
        for place, nbytes in pieces:
            ctypes.memmove(place, found[at : at + nbytes], nbytes)
            at += nbytes
        return at

    def size(self, name: str) -> int:
        return len(self.pool.objects[name]) if name in self.pool.objects else GONE

    def remove(self, names: Sequence[str]) -> list[int]:
        if not self._begin("remove", names):
            return [NO_MASTER] * len(names)
        return [DONE if self.pool.objects.pop(name, None) is not None else GONE for name in names]

    def remove_matching(self, pattern: str) -> int:
        if not self._begin("remove_matching", ()):
            return NO_MASTER
        found = [name for name in self.pool.objects if re.match(pattern, name)]
        for name in found:
            del self.pool.objects[name]
        return len(found)

    def register(self, address: int, nbytes: int) -> int:
        assert address not in self.registered, "registered twice"
        self.registered[address] = nbytes
        self.pool.registered.append((address, nbytes))
        return DONE

    def unregister(self, address: int) -> int:
        del self.registered[address]
        return DONE

    def close(self) -> None:
        assert not self.registered, "memory is still registered"
        self.closed = True


class FakeMooncakeTier(MooncakeTier):
    """The tier over the fake of its master's address."""

    @classmethod
    def connection(cls) -> Connect:
        return connect


def connect(address: MooncakeAddress, wanted: Callable[[], bool]) -> tuple[MooncakeClient, MooncakeClient]:
    pool = POOLS[address.master]
    return FakeClient(pool), FakeClient(pool)


def pool_entry(where: str, /, pages: int = 64, **options: Any) -> dict[str, Any]:
    told = {"master": where, "deadline": 20.0} | options
    return {"tier": "tests.support.fake_pool:FakeMooncakeTier", "capacity": pages * EXTENT, "options": told}
