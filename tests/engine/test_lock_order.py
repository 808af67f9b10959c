"""Locks are taken in one order, whatever an engine is doing: nothing can wait for itself in a circle.

The order is that of docs/architecture.md. Locks that guard one thing each are the last, and none is taken behind them.
"""

from __future__ import annotations

import dataclasses
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from gdscache.engine import opening as build
from gdscache.storage.base import Op
from tests.support.faults import FaultRule
from tests.support.faulty import PLAN, Fault
from tests.support.helpers import SMALL, WAIT, Host, OpenHost, drop_from, prompt, quiet

ORDER = ("order", "alone", "commit", "manager", "leaf")
_held = threading.local()
_wrong: list[str] = []


class Ranked(threading._RLock):  # type: ignore[misc, name-defined]
    """A lock that says when it is taken out of order."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def _taken(self) -> None:
        held: list[Ranked] = _held.__dict__.setdefault("locks", [])
        if self not in held:
            above = [lock.name for lock in held if ORDER.index(lock.name) >= ORDER.index(self.name)]
            if above:
                _wrong.append(f"{self.name} behind {above} in {threading.current_thread().name}")
        held.append(self)

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        taken = bool(super().acquire(blocking, timeout))
        if taken:
            self._taken()
        return taken

    __enter__ = acquire

    def release(self) -> None:
        held = _held.locks
        del held[len(held) - 1 - held[::-1].index(self)]
        super().release()

    def _release_save(self) -> Any:
        kept = [lock for lock in _held.locks if lock is not self]
        saved = len(_held.locks) - len(kept)
        _held.locks = kept
        return saved, super()._release_save()

    def _acquire_restore(self, state: Any) -> None:
        saved, inner = state
        super()._acquire_restore(inner)
        _held.locks += [self] * saved


@pytest.fixture(autouse=True)
def _fresh() -> None:
    _wrong.clear()


def watched(host: Host) -> None:
    parts = host.engine._parts
    manager = parts.manager
    parts.loader.order = Ranked("order")  # type: ignore[assignment]
    manager.clearing.alone = Ranked("alone")  # type: ignore[assignment]
    manager.ssd._commit_lock = Ranked("commit")  # type: ignore[assignment]
    manager.busy._lock = Ranked("leaf")  # type: ignore[assignment]
    parts.bounces[0].stores._changed = threading.Condition(Ranked("leaf"))  # type: ignore[arg-type]


@pytest.mark.parametrize("cpu", [8, None])
@pytest.mark.parametrize("seed", range(3))
def test_locks_are_taken_in_one_order(
    open_host: OpenHost, monkeypatch: pytest.MonkeyPatch, cpu: int | None, seed: int
) -> None:
    monkeypatch.setattr(build, "threading", SimpleNamespace(RLock=lambda: Ranked("manager")))
    host = open_host(
        cpu=cpu,
        ssd=16,
        bounce=4,
        transport="tests.support.faulty:FaultyTransport",
        deadline=0.2,
        limits=dataclasses.replace(SMALL, load_threads=2),
    )
    monkeypatch.undo()
    watched(host)
    draw = random.Random(seed)
    prompts = [prompt(number, 3) for number in range(3)]
    for tokens in prompts:
        host.store(tokens)
    quiet(host.engine)

    def loads() -> None:
        for _ in range(8):
            begun = host.begin(draw.choice(prompts))
            begun[0].result(WAIT)
            host.finish(*begun)

    def others() -> None:
        engine = host.engine
        for _ in range(6):
            what = draw.choice(["clear", "invalidate", "check", "prefetch", "evict", "stats"])
            if what == "clear":
                engine.clear()
            elif what == "invalidate":
                engine.invalidate(engine.namespace("another"))
            elif what == "check":
                engine.manager.check()
            elif what == "prefetch":
                engine.prefetch(draw.choice(prompts)).cancel()
            elif what == "evict" and cpu is not None:
                drop_from(engine, "cpu")
            else:
                engine.stats()
            time.sleep(0.002)

    PLAN.add(FaultRule(Fault.DELAY, Op.READ, rate=0.3, seconds=0.3))  # later than the deadline
    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(loads), threads.submit(others)]:
            done.result(4 * WAIT)
    PLAN.reset()
    host.engine.close()
    assert not _wrong, _wrong[:5]


def test_a_lock_out_of_order_is_seen() -> None:
    with Ranked("manager"), Ranked("commit"):
        pass
    assert _wrong == [f"commit behind ['manager'] in {threading.current_thread().name}"]
