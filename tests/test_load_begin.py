"""Where a load begins: its first copies and reads are under way without a thread of the loads'."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import fake_gpu
import pytest
from faulty import PLAN, Fault
from helpers import MHA, WAIT, Host, drop_from, prompt, quiet, settle, until

from gdscache import PageStatus
from gdscache.layout import GroupSizes, read_groups
from gdscache.load import run as load_run
from gdscache.moves import native
from gdscache.native.moves import Limits
from gdscache.storage.base import Op

OpenHost = Callable[..., Host]
EVEN = MHA | {"layers": 6, "head_dim": 72}
FAULTY = "faulty:FaultyTransport"
PAGES = 4


class InjectedError(Exception):
    """What a load raises on order."""


@pytest.fixture(autouse=True)
def _small_groups(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    sizes = GroupSizes(least=4096, first=1)
    monkeypatch.setattr(load_run, "copy_groups", lambda layout, pages: read_groups(layout, pages, sizes))
    PLAN.reset()
    yield
    PLAN.reset()


def stored(host: Host, seed: int) -> list[int]:
    tokens = prompt(seed, PAGES)
    host.store(tokens)
    quiet(host.engine)
    return tokens


def begins(host: Host, monkeypatch: pytest.MonkeyPatch, before: Callable[[], None]) -> None:
    """Call `before()` where a load hands its move over."""
    moves = host.engine._parts.executor.moves
    begin = moves.begin

    def call(*args: Any, **options: Any) -> Any:
        before()
        return begin(*args, **options)

    monkeypatch.setattr(moves, "begin", call)


@pytest.mark.parametrize("verify", ["once", "always"])
@pytest.mark.parametrize("gpu", [False, True], ids=["host", "GPU"])
def test_the_layers_of_a_hit_need_no_thread_of_the_loads(
    open_host: OpenHost, monkeypatch: pytest.MonkeyPatch, gpu: bool, verify: str
) -> None:
    """Whatever these are busy with: here the only one waits for a read."""
    if gpu:
        fake_gpu.use(monkeypatch)
    host = open_host(model=EVEN, transport=FAULTY, cpu=16, load={"threads": 1, "verify": verify})
    away = stored(host, 1)
    drop_from(host.engine, "cpu")
    here = stored(host, 2)
    with PLAN.rule(Op.READ, Fault.HANG) as rule:
        slow = host.begin(away)
        until(lambda: rule.met > 0, "a read begins")
        load, blocks, keys = host.begin(here)
        for layer in range(host.layout.n_layers):
            load.wait(layer, WAIT)
        assert not load.done()
    assert host.finish(load, blocks, keys).pages == (PageStatus.LOADED,) * PAGES
    assert host.finish(*slow).pages == (PageStatus.LOADED,) * PAGES
    settle(host.engine)


def test_the_first_reads_are_under_way_when_load_returns(open_host: OpenHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """They do not wait for a thread of the pool, which is busy here."""
    monkeypatch.setattr(native, "LIMITS", Limits(flying=1, foreign_io=1))
    host = open_host(model=EVEN, transport=FAULTY, cpu=16, load={"threads": 1})
    tokens = stored(host, 1)
    drop_from(host.engine, "cpu")
    gate = threading.Event()
    host.engine.loader._lane._threads.submit(lambda: gate.wait(WAIT))
    PLAN.reset()
    load, blocks, keys = host.begin(tokens)
    until(lambda: len(PLAN.moved[Op.READ]) >= 1, "a read begins")
    assert not load.done()
    gate.set()
    assert host.finish(load, blocks, keys).pages == (PageStatus.LOADED,) * PAGES
    settle(host.engine)


def test_a_load_that_breaks_off_while_it_begins_leaves_nothing(
    open_host: OpenHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = open_host(model=EVEN, cpu=16)
    tokens = stored(host, 1)
    broken = True

    def fail() -> None:
        if broken:
            raise InjectedError

    begins(host, monkeypatch, fail)
    hit = host.engine.lookup(tokens)
    blocks = host.take(PAGES)
    with pytest.raises(InjectedError):
        host.engine.load(hit, blocks)
    assert host.engine.stats()["leases"] == []
    host.give(blocks)
    broken = False
    assert host.load(tokens).pages == (PageStatus.LOADED,) * PAGES
    settle(host.engine)


def test_reads_that_were_begun_when_the_call_breaks_off_have_ended(
    open_host: OpenHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = open_host(model=EVEN, transport=FAULTY, cpu=16)
    tokens = stored(host, 1)
    drop_from(host.engine, "cpu")

    def fail(*_: Any) -> None:
        raise InjectedError

    hit, blocks = host.engine.lookup(tokens), host.take(PAGES)
    with monkeypatch.context() as patched:
        patched.setattr(host.engine.loader, "_submit", fail)
        with PLAN.rule(Op.READ, Fault.DELAY, seconds=0.02), pytest.raises(InjectedError):
            host.engine.load(hit, blocks)
        assert host.engine.stats()["leases"] == []
    host.give(blocks)
    assert host.load(tokens).tokens == 4 * PAGES
    settle(host.engine)


def test_close_waits_for_a_load_that_begins(open_host: OpenHost, monkeypatch: pytest.MonkeyPatch) -> None:
    host = open_host(model=EVEN, cpu=16)
    tokens = stored(host, 1)
    begun, gate, found = threading.Event(), threading.Event(), []

    def hold() -> None:
        begun.set()
        assert gate.wait(WAIT)

    begins(host, monkeypatch, hold)
    caller = threading.Thread(target=lambda: found.append(host.begin(tokens)))
    caller.start()
    assert begun.wait(WAIT)
    closer = threading.Thread(target=host.engine.close)
    closer.start()
    closer.join(0.05)
    assert closer.is_alive(), "the tiers were closed under a load"
    gate.set()
    caller.join(WAIT)
    closer.join(WAIT)
    assert not closer.is_alive()
    ((load, _, _),) = found
    assert load.result(WAIT).pages == (PageStatus.LOADED,) * PAGES
