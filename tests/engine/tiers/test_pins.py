"""Pins: prefixes that stay under pressure, for a time, and never more of a tier than half."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from gdscache.errors import InvalidValueError, PoolFullError
from tests.support.bare_manager import set_clock
from tests.support.helpers import WAIT, OpenEngine, OpenHost, prompt, quiet, raising, run, together, tokens_of


def test_a_pinned_prefix_stays_under_pressure(open_host: OpenHost) -> None:
    host = open_host(cpu=8, ssd=8)
    engine, clock = host.engine, set_clock(host.engine)
    tokens = prompt(1, 3)
    host.keep(tokens, priority=-1)
    with engine.pin(tokens, 60) as pin:
        assert pin.tokens == 12
        (lease,) = engine.stats()["leases"]
        assert lease == {"owner": "pin", "pages": 6, "seconds_left": 60.0}
        for i in range(2, 10):
            host.keep(prompt(i, 3))
        assert engine.lookup(tokens).tiers == ("cpu",) * 3
        clock.now += 59
        assert engine.stats()["leases"][0]["seconds_left"] == 1.0
    assert (pin.tokens, engine.stats()["leases"]) == (0, [])
    for i in range(2, 10):
        host.keep(prompt(i, 3))
    assert tokens_of(engine, tokens) == 0
    pin.release()


@pytest.mark.parametrize("what", ["lookup", "load", "store", "prefetch", "stats", "tokens", "pin"])
def test_a_pin_ends_by_itself_when_its_time_is_up(open_host: OpenHost, what: str) -> None:
    host = open_host()
    engine, clock = host.engine, set_clock(host.engine)
    tokens = prompt(1, 3)
    host.keep(tokens)
    hit = engine.lookup(tokens)
    pin = engine.pin(tokens, 60)
    entry = engine.manager.landing.index.get(engine.pages(tokens)[0].key)
    assert entry.leases == 1
    clock.now += 60
    assert entry.leases == 1  # nobody has looked
    if what == "load":
        blocks = host.take(3)
        load = engine.load(hit, blocks)
        load.result()
        load.release_event.synchronize(WAIT)
        host.give(blocks)
        quiet(engine)
    else:
        calls: dict[str, Callable[[], Any]] = {
            "lookup": lambda: engine.lookup(prompt(2, 1)),
            "store": lambda: host.keep(prompt(2, 1)),
            "prefetch": lambda: engine.prefetch(prompt(2, 1)).result(WAIT),
            "stats": engine.stats,
            "tokens": lambda: pin.tokens,
            "pin": lambda: engine.pin(prompt(2, 1), 1).release(),
        }
        calls[what]()
    assert entry.leases == 0
    assert pin.tokens == 0


def test_pins_hold_half_of_a_tier_at_most(open_host: OpenHost) -> None:
    host = open_host(cpu=6, ssd=16)
    engine = host.engine
    one, two = prompt(1, 6), prompt(2, 6)
    host.keep(one)
    first = engine.pin(one, 60)
    assert first.tokens == 24  # 3 pages in the CPU tier, 6 on the SSD
    assert engine.stats()["leases"][0]["pages"] == 9
    host.keep(two)
    second = engine.pin(two, 60)
    assert second.tokens == 8  # the SSD's other 2 pages
    again = engine.pin(one, 60)  # what is pinned may be pinned again
    assert again.tokens == 24
    first.release()
    assert engine.pin(two, 60).tokens == 8
    again.release()
    assert engine.pin(two, 60).tokens == 24
    for i in range(3, 9):
        host.keep(prompt(i, 6))  # the other half is enough to go on
        assert tokens_of(engine, prompt(i, 6)) == 24
    for lease in list(engine.manager.pins._pins.values()):
        lease.release()


def test_a_pin_of_what_is_not_cached_holds_nothing(open_host: OpenHost) -> None:
    host = open_host()
    host.keep(prompt(1, 3))
    engine = host.engine
    assert engine.pin(prompt(2, 3), 60).tokens == 0
    host.store(prompt(3, 3), 4).result(WAIT)
    assert engine.pin(prompt(3, 3), 60).tokens == 0, "its first page is not there"
    assert engine.pin(prompt(1, 3) + prompt(2, 2), 60).tokens == 12
    assert engine.pin(prompt(1, 3), 60, salt="tenant").tokens == 0
    for pin in list(engine.manager.pins._pins.values()):
        pin.release()


@pytest.mark.parametrize("seconds", [0, -1, math.nan, math.inf, True, "60"])
def test_a_pin_needs_a_time(open_host: OpenHost, seconds: Any) -> None:
    engine = open_host().engine
    for pin in (engine.pin, lambda tokens, seconds: engine.prefetch(tokens, pin=seconds)):
        with pytest.raises(InvalidValueError, match=r"(seconds|pin) is"):
            pin(prompt(1, 1), seconds)
    assert engine.stats()["leases"] == []


@pytest.mark.parametrize("how", ["pin", "prefetch"])
def test_a_pin_that_fails_halfway_holds_nothing(open_host: OpenHost, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    host = open_host()
    host.keep(prompt(1, 3))
    engine, index = host.engine, host.engine.manager.tiers["cpu"].index
    last = engine.pages(prompt(1, 3))[-1].key
    get, full = index.get, raising(MemoryError("as ordered"))
    with monkeypatch.context() as patch:
        patch.setattr(index, "get", lambda key: full() if key == last else get(key))  # for `pin`, the others
        patch.setattr(index, "hold_run", full)  # for `prefetch`
        with pytest.raises(MemoryError):
            engine.pin(prompt(1, 3), 60) if how == "pin" else engine.prefetch(prompt(1, 3), pin=60)
    stats = engine.stats()
    assert (stats["leases"], stats["prefetch"]["pinned_pages"], stats["prefetch"]["under_way"]) == ([], 0, 0)
    assert index.evict(3) == 3


@pytest.mark.parametrize("how", ["clear", "invalidate", "expire"])
def test_a_pin_protects_from_eviction_only(open_host: OpenHost, how: str) -> None:
    host = open_host()
    engine, clock = host.engine, set_clock(host.engine)
    tokens = prompt(1, 3)
    host.keep(tokens, ttl=30)
    with engine.pin(tokens, 60) as pin:
        if how == "expire":
            clock.now += 30
        elif how == "clear":
            assert engine.clear() == {"cpu": 3, "ssd": 3}
        else:
            assert engine.invalidate(engine.namespace()) == {"cpu": 3, "ssd": 3}
        assert tokens_of(engine, tokens) == 0
        assert pin.tokens == 0
        assert engine.stats()["tiers"]["cpu"]["free_slots"] == 3
    assert engine.stats()["tiers"]["cpu"]["free_slots"] == 6


def test_a_pool_full_of_pins_is_free_when_their_time_is_up(open_engine: OpenEngine) -> None:
    engine = open_engine(gpu=6)
    clock = set_clock(engine)
    run(engine, prompt(1, 3))
    pin = engine.pin(prompt(1, 3), 60)
    assert pin.tokens == 12
    with pytest.raises(PoolFullError):
        engine.sequence(prompt(2, 4))
    with engine.sequence(prompt(3, 3)) as seq:
        with pytest.raises(PoolFullError):
            seq.append(prompt(4, 1))
        clock.now += 60
        seq.append(prompt(4, 1))
    assert pin.tokens == 0


def test_a_pin_of_a_closed_engine_can_be_left(open_host: OpenHost) -> None:
    host = open_host()
    host.keep(prompt(1, 3))
    with host.engine.pin(prompt(1, 3), 60) as pin:
        host.engine.close()
    assert pin.tokens == 0


def test_many_pins_from_many_threads(open_host: OpenHost) -> None:
    host = open_host(cpu=8, ssd=16)
    engine = host.engine
    host.keep(prompt(1, 4))

    def work(seed: int) -> None:
        for i in range(50):
            with engine.pin(prompt(1, 4), 0.0005 if (i + seed) % 2 else 60) as pin:
                assert pin.tokens in (0, 16)
                engine.lookup(prompt(1, 4))

    together(work, 4)
    assert engine.stats()["leases"] == []
    assert tokens_of(engine, prompt(1, 4)) == 16
