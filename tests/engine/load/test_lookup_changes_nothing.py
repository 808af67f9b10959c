"""A lookup starts no write and takes no lease, whatever the policies; what it earns a page comes with a load or store.

At the public face: configurations, lookups, what the transport was asked for, `stats()`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gdscache.storage.base import Op
from tests.support.faulty import PLAN
from tests.support.helpers import WAIT, Host, OpenHost, make_config, prompt, quiet, settle
from tests.support.pairs import pairs

POLICIES = ("write_through", "write_through_selective", "write_back", "never")
ADMISSIONS = ("all", "second_offer", "tinylfu")
HITS = 2
LOOKUPS = 5  # of each prompt: more than any policy here wants
LEDGER = ("stored", "dropped", "refused", "stores", "loaded")


@pytest.fixture
def open_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Host]]:
    PLAN.reset()
    monkeypatch.setattr("gdscache.store.plan.WATERMARKS", (0.1, 0.2))
    hosts: list[Host] = []

    def opened(policy: str, admission: str, **options: Any) -> Host:
        store = {"write_policy": policy, "admission": admission}
        config = make_config(
            tmp_path / "cache", transport="tests.support.faulty:FaultyTransport", store=store, **options
        )
        hosts.append(Host(config, 128))
        return hosts[-1]

    yield opened
    PLAN.reset()
    for host in hosts:
        settle(host.engine)
        host.engine.close()


def written() -> int:
    return len(PLAN.moved[Op.WRITE])


def state(host: Host) -> dict[str, Any]:
    """What a lookup must leave as it is."""
    stats = host.engine.stats()
    tiers = {
        name: {k: tier.get(k) for k in ("pages", "free_slots", "dirty_pages", "evictions")}
        for name, tier in stats["tiers"].items()
    }
    return {"leases": stats["leases"], "queue": stats["store_queue"], "tiers": tiers, "written": written()} | {
        name: stats.get(name) for name in LEDGER
    }


@pytest.mark.parametrize(("policy", "admission", "ssd"), pairs(POLICIES, ADMISSIONS, [4, 12]))  # pages: full, with room
def test_a_lookup_starts_no_write_and_takes_no_lease(
    open_host: OpenHost, policy: str, admission: str, ssd: int
) -> None:
    host = open_host(policy, admission, cpu=8, ssd=ssd)
    prompts = [prompt(seed, 3) for seed in range(3)]
    for tokens in prompts:
        host.keep(tokens).result(WAIT)
    before = state(host)
    assert before["leases"] == []
    found = [host.engine.lookup(tokens).tokens for tokens in prompts]
    for _ in range(LOOKUPS):
        for tokens, cached in zip(prompts, found, strict=True):
            assert host.engine.lookup(tokens).tokens == cached
            assert state(host) == before, "a lookup changed more than recency"
    quiet(host.engine)
    assert state(host) == before, "a lookup started something"


def then_load(host: Host, earned: list[int], other: list[int]) -> None:
    host.load(earned)


def then_load_something_else(host: Host, earned: list[int], other: list[int]) -> None:
    host.load(other)


def then_store(host: Host, earned: list[int], other: list[int]) -> None:
    host.store(other).result(WAIT)


def then_flush(host: Host, earned: list[int], other: list[int]) -> None:
    host.engine.flush(WAIT)


@pytest.mark.parametrize("then", [then_load, then_load_something_else, then_store, then_flush])
@pytest.mark.parametrize("admission", ADMISSIONS)
def test_hits_earn_their_write_with_the_next_load_or_store(
    open_host: OpenHost, admission: str, then: Callable[[Host, list[int], list[int]], None]
) -> None:
    host = open_host("write_through_selective", admission, cpu=8, ssd=12)
    earned, other = prompt(1, 3), prompt(2, 2)
    host.store(earned).result(WAIT)
    for _ in range(1 if admission == "second_offer" else 0):  # the first offer of two
        for _ in range(HITS):
            host.engine.lookup(earned)
        then(host, earned, other)
        quiet(host.engine)
        assert written() == 0, "the admission was passed over"
    for _ in range(HITS - 1):
        host.engine.lookup(earned[:8])
    if admission != "second_offer":
        then_store(host, earned, prompt(3, 1))
        quiet(host.engine)
        assert written() == 0, "written before it had its hits"
    host.engine.lookup(earned[:8])
    assert written() == 0
    then(host, earned[:8], other)
    quiet(host.engine)
    assert written() >= 2, "the hits of two pages earned nothing"
    index = host.engine.stats()["tiers"]["ssd"]
    assert index["pages"] == written()


def test_what_was_refused_is_offered_again_after_a_hit(open_host: OpenHost) -> None:
    """`write_through` behind an admission: a hit makes it worth another offer, which the next load makes."""
    host = open_host("write_through", "second_offer", cpu=8, ssd=12)
    tokens = prompt(1, 3)
    host.keep(tokens).result(WAIT)
    assert written() == 0
    host.engine.lookup(tokens)
    quiet(host.engine)
    assert written() == 0, "the lookup offered it itself"
    host.load(tokens)
    quiet(host.engine)
    assert written() == 3
    assert host.engine.stats()["tiers"]["ssd"]["pages"] == 3


def test_what_was_noted_and_is_gone_earns_nothing(open_host: OpenHost) -> None:
    host = open_host("write_through_selective", "all", cpu=2, ssd=12)
    tokens = prompt(1, 2)
    host.store(tokens).result(WAIT)
    for _ in range(HITS):
        host.engine.lookup(tokens)
    assert host.engine.clear()["cpu"] == 2
    host.keep(prompt(2, 2)).result(WAIT)
    assert written() == 0
