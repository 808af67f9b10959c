"""The tier over a shared pool, against one of the tests' own: what it shares, what goes wrong, who never waits."""

from __future__ import annotations

import hashlib
import itertools
import random
import threading
import time
from collections.abc import Collection, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gdscache import CacheEngine, Config, PageHashes, PageStatus
from gdscache.errors import EngineClosedError, InvalidValueError, TierUnavailableError
from gdscache.integrations.fetching import PinningCache
from gdscache.integrations.sglang.loads import LoadTable
from gdscache.integrations.sglang.pages import PageLinks
from gdscache.integrations.sglang.served import SinglePool
from gdscache.integrations.vllm.requests import RequestTable
from gdscache.metrics.table import FAMILIES
from gdscache.mooncake import client as pool_link
from gdscache.mooncake import tier as pool_tier
from gdscache.mooncake.client import MooncakeAddress
from gdscache.mooncake.tier import PREFIX, SIDE_BY_SIDE, TRAILER_BYTES, MooncakeFiles, MooncakeTier
from gdscache.moves import PrefetchEnd
from gdscache.tiers.manager import WATCH_S
from gdscache.tiers.quarantine import AGAIN_S
from tests.support.fake_pool import EXTENT, POOLS, FakeClient, FakeMooncakeTier, FakePool, pool_entry
from tests.support.helpers import WAIT, Host, OpenHost, drop_from, make_config, prompt, quiet, settle, until

PAGES = 4
_ports = itertools.count(1)


@pytest.fixture
def master(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    name = f"fake:{next(_ports)}"
    POOLS[name] = FakePool()
    monkeypatch.setattr(pool_link.Lines, "_reachable", lambda lines: not POOLS[lines.address.master].dead)
    monkeypatch.setattr(pool_link, "PROBE_S", 0.005)
    monkeypatch.setattr(pool_link, "PROBES_S", 0.05)
    yield name
    del POOLS[name]


@pytest.fixture
def pool(master: str) -> FakePool:
    return POOLS[master]


@pytest.fixture
def opens(open_host: OpenHost, master: str) -> OpenHost:
    """`opens(**make_config arguments)`: an engine with the pool. `options`: of its tier."""

    def opens(**arguments: Any) -> Host:
        entry = pool_entry(master, **arguments.pop("options", {}))
        return open_host(**{"cpu": 16, "ssd": None, "tiers": [entry]} | arguments)

    return opens


@pytest.fixture
def host(opens: OpenHost) -> Host:
    return opens()


def tier_of(host: Host) -> MooncakeTier:
    return cast(MooncakeTier, host.engine.manager.tiers["mooncake"])


def state(host: Host) -> dict[str, Any]:
    return cast(dict[str, Any], host.engine.stats()["tiers"]["mooncake"])


def ready(host: Host) -> None:
    until(lambda: state(host)["state"] == "ready", "the pool is there")


def is_off(host: Host) -> bool:
    family = next(family for family in FAMILIES if family.name == "gdscache_tier_switched_off")
    return bool(family.read(host.engine.stats())[("mooncake",)])


def stored(host: Host, seed: int = 1, pages: int = PAGES, salt: str = "") -> list[int]:
    tokens = prompt(seed, pages)
    host.keep(tokens, salt=salt)
    return tokens


def fetched(host: Host, tokens: list[int], salt: str = "") -> int:
    """Bring what the pool has of a prompt, load it, and look at the bytes; the pages that came."""
    host.engine.prefetch(tokens, salt=salt).result(WAIT)
    report = host.load(tokens, salt=salt)
    assert all(status is PageStatus.LOADED for status in report.pages)
    return len(report.pages)


# -- sharing ---------------------------------------------------------------------------------------------------------


def test_what_one_engine_stores_another_one_finds(opens: OpenHost, host: Host) -> None:
    other = opens()
    tokens = prompt(1, PAGES)
    assert all({*tiers} == {"cpu", "mooncake"} for tiers in host.store(tokens).result(WAIT).tiers)
    assert other.engine.lookup(tokens).tokens == 0
    found = other.engine.prefetch(tokens)
    assert found.result(WAIT).pages == {"loaded": PAGES}
    assert found.tiers == ("mooncake",) * PAGES
    assert other.load(tokens).bytes_by_tier == {"cpu": PAGES * other.layout.page_bytes}


def test_lookups_and_loads_do_not_see_it(host: Host, pool: FakePool) -> None:
    tokens = stored(host)
    drop_from(host.engine, "cpu")
    calls = dict(pool.calls)
    assert host.engine.lookup(tokens).tokens == 0
    assert host.load(tokens).pages == ()
    assert host.engine.manager.peek(host.engine.pages(tokens)) == []
    assert host.engine.pin(tokens, 1.0).tokens == 0
    assert dict(pool.calls) == calls
    assert fetched(host, tokens) == PAGES


def test_lookups_wake_no_thread_for_the_pool(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """An SSD tier's lock is looked after by another thread, which costs a lookup 2 ms where threads are busy."""
    tokens = stored(host)
    posted: list[object] = []
    monkeypatch.setattr(host.engine.manager.calls, "post", posted.append)
    time.sleep(2 * WATCH_S)
    assert host.engine.lookup(tokens).tokens == 4 * PAGES
    assert posted == []


def test_pages_of_the_ssd_and_of_the_pool_are_one_prefix(opens: OpenHost, tmp_path: Any) -> None:
    other = opens(ssd=32, path=tmp_path / "other")
    host = opens(ssd=32, path=tmp_path / "mine")
    tokens = stored(other, pages=6)
    host.keep(tokens[:12])
    drop_from(host.engine, "cpu", "mooncake")
    assert host.engine.lookup(tokens).tiers == ("ssd",) * 3
    found = host.engine.prefetch(tokens)
    assert found.result(WAIT).end is PrefetchEnd.COMPLETE
    assert found.tiers == ("ssd",) * 3 + ("mooncake",) * 3
    assert len(host.load(tokens).pages) == 6


def test_a_prefetch_with_pins_holds_what_came(opens: OpenHost, host: Host, pool: FakePool) -> None:
    tokens = stored(host)
    other = opens()
    pool.answers.clear()
    found = other.engine.prefetch(tokens, pin=60.0)
    assert (found.asking, found.verified) == (True, 0)
    assert not found.hit().pages
    time.sleep(0.2)
    pool.answers.set()
    assert found.result(WAIT).seconds >= 0.2, "they count from the call"
    assert found.verified == PAGES * 4
    hit = found.hit()
    blocks = other.take(PAGES)
    assert other.finish(other.engine.load(hit, blocks), blocks, [p.key for p in hit.pages]).tokens == PAGES * 4
    found.release()


def test_names_carry_the_namespace(host: Host, pool: FakePool) -> None:
    stored(host, 1)
    stored(host, 1, salt="tenant")
    directories = {name.rsplit("/", 1)[0] for name in pool.objects}
    assert directories == {f"gdscache1/{host.engine.namespace(salt).hex()}" for salt in ("", "tenant")}
    keys = {page.key.hex() for salt in ("", "tenant") for page in host.engine.pages(prompt(1, PAGES), salt)}
    assert {name.rsplit("/", 1)[1] for name in pool.objects} == keys


def test_memory_is_registered_once_and_all_pieces_lie_in_it(opens: OpenHost, host: Host, pool: FakePool) -> None:
    other = opens()
    tokens = [stored(host, seed) for seed in range(3)]
    for some in tokens:
        assert fetched(other, some) == PAGES
    # Of each engine: the CPU tier, the bounce reserve, the trailers.
    assert len(pool.registered) == 2 * 3
    assert pool.strays == 0
    sizes = sorted(nbytes for _, nbytes in pool.registered)
    assert sizes.count(16 * EXTENT) == 2


def test_a_call_has_as_many_pages_as_it_may(opens: OpenHost, pool: FakePool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gdscache.mooncake.tier.BATCH_PAGES", 3)
    host, other = (opens(cpu=32, bounce=32) for _ in range(2))
    tokens = stored(host, pages=16)
    assert pool.largest == 3
    pool.largest = 0
    assert fetched(other, tokens) == 16
    assert pool.largest == 3
    assert pool.calls["get"] >= 6


# -- asking ----------------------------------------------------------------------------------------------------------


def test_a_page_is_asked_for_once_a_prefetch(opens: OpenHost, host: Host, pool: FakePool) -> None:
    tokens = stored(host, pages=8)
    pool.asked.clear()  # before it was put
    other = opens()
    found = other.engine.prefetch(tokens, pin=60.0)
    until(found.done, "it ends")
    for _ in range(50):
        assert found.verified == 8 * 4
        other.engine.lookup(tokens)
        found.wait()
    assert set(pool.asked.values()) == {1}
    found.release()


def test_who_has_it_all_asks_nobody(host: Host, pool: FakePool) -> None:
    tokens = stored(host)
    before = pool.calls["exist"]
    assert host.engine.prefetch(tokens).result(WAIT).pages == {"present": PAGES}
    assert pool.calls["exist"] == before


def test_a_page_that_exists_and_cannot_be_got_is_a_miss(opens: OpenHost, host: Host, pool: FakePool) -> None:
    tokens = stored(host)
    other = opens()
    lost = next(name for name in pool.objects if name.endswith(host.engine.pages(tokens)[2].key.hex()))
    pool.lost.add(lost)
    report = other.engine.prefetch(tokens).result(WAIT)
    assert report.pages == {"loaded": 3, "io_error": 1}
    assert report.tokens == 2 * 4
    assert other.load(tokens).pages == (PageStatus.LOADED,) * 2
    assert state(other)["state"] == "ready"  # of one owner, not of the master
    pool.lost.clear()
    assert fetched(other, tokens) == PAGES


def test_a_page_is_not_given_up_for_reads_of_the_one_before_it(host: Host, pool: FakePool) -> None:
    now = [0.0]
    reads = host.engine.manager.quarantine.failed_reads
    reads.clock = lambda: now[0]
    for round_ in range(2):
        tokens, others = stored(host, 1, 1), stored(host, 2, 1)
        drop_from(host.engine, "cpu")
        assert fetched(host, others) == 1
        now[0] += 1.0
        pool.lost = {name for name in pool.objects if name.endswith(host.engine.pages(tokens)[0].key.hex())}
        assert host.engine.prefetch(tokens).result(WAIT).pages == {"io_error": 1}
        assert (state(host)["quarantine"]["failing_pages"], state(host)["pages"]) == (1, 2), round_
        host.engine.clear()
        pool.lost.clear()
        now[0] += AGAIN_S
    assert state(host)["quarantine"]["failing_pages"] == 0


def test_a_name_that_leads_to_nothing_goes(host: Host, pool: FakePool) -> None:
    tokens = stored(host)
    drop_from(host.engine, "cpu")
    pool.objects.clear()
    assert host.engine.prefetch(tokens).result(WAIT).pages == {}
    assert state(host)["pages"] == 0


# -- bytes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["extent", "sums", "key", "magic"])
def test_a_flipped_bit_is_a_miss_and_the_object_goes(opens: OpenHost, host: Host, pool: FakePool, where: str) -> None:
    tokens = stored(host)
    other = opens()
    victim = next(name for name in pool.objects if name.endswith(host.engine.pages(tokens)[1].key.hex()))
    raw = bytearray(pool.objects[victim])
    raw[{"extent": 77, "magic": EXTENT, "key": EXTENT + 20, "sums": EXTENT + 96}[where]] ^= 4
    pool.objects[victim] = bytes(raw)
    report = other.engine.prefetch(tokens).result(WAIT)
    assert report.tokens == 4
    assert report.pages["loaded"] == PAGES - 1
    assert len(other.load(tokens).pages) == 1
    moved = state(other)["moved"]
    assert (moved["got"], moved["spoiled"]) == (PAGES - 1, 1)  # though all came by one call
    until(lambda: victim not in pool.objects, "it goes, so that a good one finds its place")
    stored(other)
    assert victim in pool.objects
    third = opens()
    assert fetched(third, tokens) == PAGES


@pytest.mark.parametrize("more", [-EXTENT, -1, 1])
def test_an_object_of_another_size_is_a_miss_and_goes(opens: OpenHost, host: Host, pool: FakePool, more: int) -> None:
    tokens, other = stored(host), opens()
    victim = next(name for name in pool.objects if name.endswith(host.engine.pages(tokens)[1].key.hex()))
    pool.objects[victim] = (pool.objects[victim] + bytes(1))[: EXTENT + TRAILER_BYTES + more]
    assert other.engine.prefetch(tokens).result(WAIT).pages == {"loaded": PAGES - 1, "checksum": 1}
    until(lambda: victim not in pool.objects, "it goes, so that a good one finds its place")
    stored(other)
    assert fetched(opens(), tokens) == PAGES


def test_a_page_under_another_pages_name_is_a_miss(opens: OpenHost, host: Host, pool: FakePool) -> None:
    tokens, others = stored(host, 1), stored(host, 2)
    swapped = [host.engine.pages(some)[0].key.hex() for some in (tokens, others)]
    names = [next(name for name in pool.objects if name.endswith(key)) for key in swapped]
    pool.objects[names[0]], pool.objects[names[1]] = pool.objects[names[1]], pool.objects[names[0]]
    other = opens()
    assert fetched(other, tokens) == 0
    assert fetched(other, others) == 0


def test_bytes_of_another_computation_are_as_good(opens: OpenHost, pool: FakePool) -> None:
    """Two engines compute a page, with other bytes: the pool has the first one's, and whoever gets them, gets those."""
    first, second = opens(), opens()
    second.data = lambda key: first.data(key) ^ 1
    tokens = stored(first)
    stored(second)
    drop_from(second.engine, "cpu")
    second.data = first.data
    assert fetched(second, tokens) == PAGES


# -- a full pool -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_a_page_with_an_end_does_not_go_where_nothing_would_end_it(
    opens: OpenHost, pool: FakePool, policy: str
) -> None:
    host, other = opens(store={"write_policy": policy}), opens()
    tokens = prompt(1, PAGES)
    report = host.keep(tokens, ttl=60.0).result(WAIT)
    host.engine.flush(WAIT)
    assert (pool.objects, report.dropped) == ({}, {})
    assert host.engine.manager.tiers["cpu"].index.dirty_pages == 0
    host.keep(tokens, ttl=60.0).result(WAIT)
    assert host.engine.stats()["stores"]["present"] == PAGES  # nothing is missing anywhere
    if policy == "write_through":
        stored(host)  # for ever
        assert fetched(other, tokens) == PAGES


def test_a_full_pool_is_tried_again(host: Host, pool: FakePool) -> None:
    stored(host, 1, 6)
    pool.room = 6
    report = host.store(prompt(2, PAGES)).result(WAIT)
    assert all({*tiers} == {"cpu", "mooncake"} for tiers in report.tiers)
    assert state(host)["moved"]["waits"] >= 1
    assert "full" not in state(host)["moved"]


def test_what_stays_full_drops_and_counts(host: Host, pool: FakePool) -> None:
    pool.room, pool.evicts = 2, False
    report = host.store(prompt(1, PAGES)).result(WAIT)
    assert [{*tiers} for tiers in report.tiers] == [{"cpu", "mooncake"}] * 2 + [{"cpu"}] * 2
    assert state(host)["moved"]["full"] == 2
    assert pool.calls["put"] <= 8  # a bounded number of times
    assert state(host)["state"] == "ready"
    quiet(host.engine)
    assert host.engine.stats()["tiers"]["mooncake"]["pages"] == 2


# -- a dead master ---------------------------------------------------------------------------------------------------


def test_a_dead_master_is_called_once_then_left_alone(host: Host, pool: FakePool) -> None:
    stored(host)
    pool.dead = True
    report = host.store(prompt(2, PAGES)).result(WAIT)
    assert all({*tiers} == {"cpu"} for tiers in report.tiers)
    until(lambda: state(host)["state"] == "open", "the breaker opens")
    puts, asked = pool.calls["put"], pool.calls["exist"]
    for seed in range(3, 8):
        host.store(prompt(seed, 2)).result(WAIT)
        found = host.engine.prefetch(prompt(100 + seed, 2))
        assert not found.asking
        assert found.result(WAIT).pages == {}
    assert pool.calls["put"] == puts
    assert pool.calls["exist"] == asked
    assert state(host)["opened"] == 1
    assert {*host.store(prompt(9, 2)).result(WAIT).dropped.values()} == {"switched_off"}
    assert is_off(host)
    pool.restart()
    ready(host)
    assert not is_off(host)


def test_it_comes_back_by_itself(opens: OpenHost, host: Host, pool: FakePool) -> None:
    tokens = stored(host)
    other = opens()
    assert fetched(other, tokens) == PAGES
    pool.dead = True
    for some in (host, other):
        some.engine.prefetch(prompt(50, 2)).result(WAIT)
        until(lambda some=some: state(some)["state"] == "open", "the breaker opens")  # type: ignore[misc]
    pool.restart()
    for some in (host, other):
        ready(some)
        assert state(some)["pages"] == 0  # what it knew is forgotten there
    tokens = stored(host, 9)
    assert fetched(other, tokens) == PAGES
    assert len(pool.registered) == 2 * 3  # the clients are the same, and so is what is registered with them


def test_other_calls_go_between_the_names_that_it_forgets(
    opens: OpenHost, pool: FakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_tier, "PIECE", 2)
    host, pieces = opens(), list[int]()
    ready(host)
    stored(host, pages=5)
    index = tier_of(host).index
    evict = index.evict
    monkeypatch.setattr(index, "evict", lambda n: pieces.append(evict(n)) or pieces[-1])
    tier_of(host)._lines.open("a test says so")
    ready(host)
    assert pieces == [2, 2, 1]


def test_an_engine_opens_without_a_master_and_finds_it_later(opens: OpenHost, pool: FakePool) -> None:
    pool.dead = True
    host = opens()
    assert state(host)["state"] == "connecting"
    assert all({*tiers} == {"cpu"} for tiers in host.store(prompt(1, PAGES)).result(WAIT).tiers)
    pool.dead = False
    ready(host)
    assert len(pool.registered) == 3
    tokens = stored(host, 2)
    assert fetched(opens(), tokens) == PAGES


def test_an_engine_that_found_no_master_gives_all_memory_back(
    opens: OpenHost, pool: FakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_tier, "_OPEN_S", 0.05)
    pool.dead = True
    host = opens()
    trailers = tier_of(host).io._trailers
    host.engine.close()
    with pytest.raises(EngineClosedError):
        trailers.view.release()


@pytest.mark.parametrize("what", ["put", "get", "ask"])
def test_a_call_that_hangs_holds_nobody(opens: OpenHost, host: Host, pool: FakePool, what: str) -> None:
    tokens = stored(host)
    other = opens(options={"deadline": 0.3})
    local = stored(other, 7, 2)
    gate = pool.answers if what == "ask" else pool.gate
    gate.clear()
    if what == "put":
        handles = []
        for n in range(SIDE_BY_SIDE):
            handles.append(other.store(prompt(10 + n, PAGES)))
            until(lambda n=n: pool.calls["put"] == 3 + n, "the put is under way")
        other.store(prompt(4, 2))
        until(lambda: state(other)["moved"].get("refused") == 2, "what waits behind it is refused")
        assert not any(handle.done() for handle in handles)
    else:
        found = other.engine.prefetch(tokens)
    until(lambda: state(other)["state"] == "open", "the breaker opens")
    assert len(other.load(local).pages) == 2  # what is here is served
    assert not other.engine.prefetch(prompt(5, 2)).asking
    later = other.store(prompt(3, 2)).result(WAIT)
    assert all({*tiers} == {"cpu"} for tiers in later.tiers)
    gate.set()
    ready(other)
    if what == "put":
        assert not any(handle.result(WAIT).dropped for handle in handles)  # late, and there
    else:
        found.result(WAIT)
        assert fetched(other, tokens) == PAGES
    quiet(other.engine)


def ended(tier: Any, before: Collection[threading.Thread] = ()) -> None:
    """Close a tier again whose call has hung, or its threads are there in the tests behind it. `before`: of others."""

    def over() -> bool:
        tier.close()
        return not [t for t in threading.enumerate() if t.name.startswith("gdscache-pool-") and t not in before]

    until(over, "its threads end")


def test_an_engine_closes_while_a_call_hangs(opens: OpenHost, pool: FakePool) -> None:
    host = opens(options={"deadline": 0.05}, deadline=0.2)
    pool.gate.clear()
    host.store(prompt(1, PAGES))
    until(lambda: state(host)["state"] == "open", "the breaker opens")
    tier = host.engine.manager.tiers["mooncake"]
    host.engine.manager.close_s = 0.1
    closing = threading.Thread(target=host.engine.close)
    closing.start()
    closing.join(WAIT)
    assert not closing.is_alive()
    pool.gate.set()
    ended(tier)


def test_it_closes_while_a_probe_begins(opens: OpenHost, pool: FakePool, monkeypatch: pytest.MonkeyPatch) -> None:
    begins, before, start = threading.Event(), threading.enumerate(), threading.Thread.start

    def slow(thread: threading.Thread) -> None:
        if thread.name == "gdscache-pool-probe":
            begins.set()
            time.sleep(0.2)
        start(thread)

    monkeypatch.setattr(pool_tier, "_OPEN_S", 0.05)
    pool.dead = True
    tier = tier_of(opens(options={"deadline": 0.05}))
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", slow)
        assert begins.wait(WAIT)
        tier.close()
    ended(tier, before)


# -- removing --------------------------------------------------------------------------------------------------------


def test_a_clear_reaches_the_pool(opens: OpenHost, host: Host, pool: FakePool) -> None:
    tokens = stored(host)
    other = opens()
    assert fetched(other, tokens) == PAGES
    drop_from(host.engine, "mooncake")  # its index does not know what it has put any more
    host.engine.clear()
    assert not pool.objects
    assert host.engine.prefetch(tokens).result(WAIT).pages == {}


@pytest.mark.parametrize("ssd", [None, 32])
def test_a_clear_reaches_what_earlier_processes_put(opens: OpenHost, pool: FakePool, ssd: int | None) -> None:
    """Of salts, those that the SSD's catalogue names."""
    before = opens(ssd=ssd)
    stored(before)
    stored(before, 2, salt="tenant" if ssd else "")
    before.engine.close()
    assert len(pool.objects) == 2 * PAGES
    after = opens(ssd=ssd)
    ready(after)
    after.engine.clear()
    assert not pool.objects


def test_an_invalidated_namespace_goes_and_others_stay(host: Host, pool: FakePool) -> None:
    stored(host, 1)
    stored(host, 1, salt="tenant")
    host.engine.invalidate(host.engine.namespace("tenant"))
    assert {name.split("/")[1] for name in pool.objects} == {host.engine.namespace().hex()}


def test_what_was_cleared_while_the_master_was_dead_never_comes_back(host: Host, pool: FakePool) -> None:
    tokens = stored(host)
    pool.dead = True
    host.engine.clear()
    assert state(host)["removals_owed"] >= 1
    assert pool.objects
    pool.dead = False  # it was only away: it has forgotten nothing
    ready(host)
    assert not pool.objects
    assert host.engine.prefetch(tokens).result(WAIT).pages == {}
    stored(host, 2)
    assert pool.objects


@pytest.mark.parametrize("deadline", [WAIT, 0.1])
def test_a_put_that_was_under_way_in_a_clear_goes_again(opens: OpenHost, pool: FakePool, deadline: float) -> None:
    host = opens(deadline=deadline)  # the put ends in time, or late
    pool.gate.clear()
    handle = host.store(prompt(1, PAGES))
    until(lambda: pool.calls["put"] == 1, "the put is under way")
    clearing = threading.Thread(target=host.engine.clear)
    clearing.start()
    clearing.join(WAIT)
    if deadline < WAIT:
        assert {*handle.result(WAIT).dropped.values()} == {"deadline"}
    pool.gate.set()
    handle.result(WAIT)
    quiet(host.engine)
    until(lambda: state(host)["moved"].get("put") == PAGES, "the put ends")
    until(lambda: not pool.objects, "what came too late goes")


def test_a_put_that_hangs_through_a_clear_and_its_removal_goes_too(opens: OpenHost, pool: FakePool) -> None:
    """It ends while the breaker is open, and no call may begin."""
    host, other = opens(options={"deadline": 0.3}), opens()
    tokens = prompt(1, PAGES)
    pool.gate.clear()
    handle = host.store(tokens)
    until(lambda: state(host)["state"] == "open", "the breaker opens")
    host.engine.clear()
    until(lambda: pool.calls["remove_matching"] and not state(host)["removals_owed"], "the removal is done")
    pool.gate.set()
    handle.result(WAIT)
    ready(host)
    assert state(host)["moved"]["put"] == PAGES
    assert not pool.objects
    assert [fetched(some, tokens) for some in (host, other)] == [0, 0]


@pytest.mark.parametrize("fails", [False, True])
def test_a_page_that_was_cleared_before_its_put_began_goes_again(
    host: Host, pool: FakePool, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """Also where the put fails, since its answer is lost, and the page is there."""
    began, gate, whole, one = threading.Event(), threading.Event(), MooncakeFiles._put, FakeClient.put

    def late(files: MooncakeFiles, *call: Any) -> Any:
        began.set()
        assert gate.wait(WAIT)
        return whole(files, *call)

    def put(client: FakeClient, *call: Any) -> list[int]:
        codes = one(client, *call)
        pool.dead = fails
        return codes if not fails else [pool_link.NO_MASTER] * len(codes)

    monkeypatch.setattr(MooncakeFiles, "_put", late)
    monkeypatch.setattr(FakeClient, "put", put)
    handle = host.store(prompt(1, PAGES))
    assert began.wait(WAIT)
    host.engine.clear()
    gate.set()
    handle.result(WAIT)
    quiet(host.engine)
    assert len(pool.objects) == PAGES or not fails
    pool.dead = False
    until(lambda: not pool.objects, "what came too late goes")
    until(lambda: not state(host)["removals_owed"], "and nothing else is owed")


def test_a_late_put_of_pages_that_another_engine_has_put_removes_none(
    opens: OpenHost, host: Host, pool: FakePool
) -> None:
    late, tokens = opens(deadline=0.2), stored(host)
    pool.answers.clear()
    assert {*late.store(tokens).result(WAIT).dropped.values()} == {"deadline"}
    late.engine.invalidate(bytes(32))  # of others
    pool.answers.set()
    until(lambda: state(late)["moved"].get("existed") == PAGES, "the put ends")
    settle(late.engine)
    assert len(pool.objects) == PAGES
    drop_from(host.engine, "cpu")
    assert fetched(host, tokens) == PAGES


def test_a_late_put_removes_nothing_of_a_later_one(
    opens: OpenHost, pool: FakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, gate, whole = opens(deadline=0.3), threading.Event(), FakeClient.put
    tokens = prompt(1, PAGES)

    def put(client: FakeClient, *call: Any) -> list[int]:
        assert pool.calls["put"] or gate.wait(WAIT)
        return whole(client, *call)

    monkeypatch.setattr(FakeClient, "put", put)
    assert {*host.store(tokens).result(WAIT).dropped.values()} == {"deadline"}
    pool.calls["put"] = 1
    drop_from(host.engine, "cpu")
    assert not host.store(tokens).result(WAIT).dropped
    gate.set()
    until(lambda: state(host)["moved"]["put"] == 2 * PAGES, "both have ended")
    settle(host.engine)
    assert len(pool.objects) == state(host)["pages"] == PAGES


@pytest.mark.parametrize("when", ["raised", "between"])
def test_a_removal_that_did_not_begin_or_broke_off_is_tried_again(
    host: Host, pool: FakePool, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """The library raises, or the clear comes when the pool has answered again and is not yet used."""
    tokens, tier, whole, answered = stored(host), tier_of(host), FakeClient.remove_matching, list[object]()

    def removed(client: FakeClient, pattern: str) -> int:
        monkeypatch.setattr(FakeClient, "remove_matching", whole)
        raise RuntimeError("the library's own error")

    def back(client: Any, whole: Any = tier._lines.come_back) -> Any:
        found = whole(client)
        if not answered:
            answered.append(host.engine.clear())
        return found

    if when == "raised":
        monkeypatch.setattr(FakeClient, "remove_matching", removed)
        host.engine.clear()
    else:
        monkeypatch.setattr(tier._lines, "come_back", back)
        tier._lines.open("a test")
        until(lambda: bool(answered), "the clear has come")
    until(lambda: not pool.objects, "they go")
    ready(host)
    assert fetched(host, tokens) == state(host)["removals_owed"] == 0
    assert all({*tiers} == {"cpu", "mooncake"} for tiers in host.store(prompt(2, PAGES)).result(WAIT).tiers)


@pytest.mark.parametrize("salts", [8, 12])
def test_many_namespaces_are_cleared_with_few_removals(
    host: Host, pool: FakePool, monkeypatch: pytest.MonkeyPatch, salts: int
) -> None:
    """With more than are told apart, everything of gdscache's goes."""
    monkeypatch.setattr(pool_tier, "_NAMESPACES", 8)
    monkeypatch.setattr(pool_tier, "_PATTERNS", 4)
    other, tier = f"{PREFIX}/{bytes(32).hex()}/{bytes(32).hex()}", tier_of(host)
    pool.objects[other] = b""
    for n in range(salts):
        stored(host, 1, 1, salt=f"user {n}" if n else "")
    assert len(pool.objects) == salts + 1
    assert len(tier._namespaces) <= 8 + 1
    host.engine.clear()
    assert {*pool.objects} == ({other} if salts <= 8 else set())
    assert pool.calls["remove_matching"] == (2 if salts <= 8 else 1)
    pool.dead = True
    for n in range(20):
        host.engine.invalidate(host.engine.namespace(f"user {n}"))
    assert state(host)["removals_owed"] <= 8


def test_a_clear_during_the_removal_of_another_one_removes_again(
    host: Host, pool: FakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another engine has put a page in between."""
    stored(host)
    (name, *_), tier = pool.objects, tier_of(host)
    again = threading.Thread(target=host.engine.clear)
    whole = FakeClient.remove_matching

    def removed(client: FakeClient, pattern: str) -> int:
        found = whole(client, pattern)
        if again.ident is None:
            pool.objects[name] = b""
            again.start()
            until(lambda: tier._cleared == 2, "the second clear has begun")
        return found

    monkeypatch.setattr(FakeClient, "remove_matching", removed)
    host.engine.clear()
    again.join(WAIT)
    assert not pool.objects
    assert state(host)["removals_owed"] == 0


def test_a_clear_goes_through_namespaces_while_a_store_names_one(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    stored(host)
    tier, naming = tier_of(host), list[threading.Thread]()
    whole = pool_tier._directory

    def directory(namespace: bytes) -> str:
        if not naming:
            naming.append(threading.Thread(target=tier.describe_namespace, args=(bytes(32), {})))
            naming[0].start()
            naming[0].join(0.2)
        return whole(namespace)

    monkeypatch.setattr(pool_tier, "_directory", directory)
    host.engine.clear()
    naming[0].join(WAIT)
    assert bytes(32) in tier._namespaces


# -- the adapters ----------------------------------------------------------------------------------------------------


def hashes_of(seed: int, pages: int) -> list[bytes]:
    return [hashlib.sha256(f"{seed} {n}".encode()).digest() for n in range(pages)]


@pytest.fixture
def pair(opens: OpenHost, host: Host) -> tuple[Host, list[bytes]]:
    """An engine that has nothing, and the hashes of pages that another one has put."""
    hashes = hashes_of(1, PAGES)
    host.keep(PageHashes(hashes))
    return opens(), hashes


def request_of(hashes: list[bytes]) -> Any:
    tokens = 4 * len(hashes) + 1
    return SimpleNamespace(request_id="r", num_tokens=tokens, num_computed_tokens=0, block_hashes=hashes)


def test_vllms_requests_wait_for_the_answer_and_get_the_pages(pair: tuple[Host, list[bytes]], pool: FakePool) -> None:
    other, hashes = pair
    table = RequestTable(PinningCache(other.engine, 60.0), 4, wait=WAIT)
    request = request_of(hashes)
    pool.answers.clear()
    table.add(request)
    assert table.ask(request, 0) == (None, False)
    pool.answers.set()
    until(lambda: table.ask(request, 0)[0] is not None, "the pages come")
    assert table.ask(request, 0) == (PAGES * 4, False)
    blocks = other.take(PAGES)
    table.place(request, blocks, PAGES * 4)
    assert table.hit_sources(request) == {"mooncake": PAGES}
    (order,) = table.take_loads()
    hit = order.fetch.checked(order.first, len(order.blocks))
    keys = [page.key for page in other.engine.pages(PageHashes(hashes))]
    assert other.finish(other.engine.load(hit, blocks), blocks, keys).tokens == PAGES * 4
    order.fetch.release()
    assert list(table.stores({"r": 1}, lambda name: blocks)) == []  # nothing of it is new


@pytest.mark.parametrize("what", ["absent", "dead", "full"])
def test_vllms_requests_go_on_without_it(pair: tuple[Host, list[bytes]], pool: FakePool, what: str) -> None:
    other, hashes = pair
    if what == "absent":
        hashes = hashes_of(2, PAGES)
    elif what == "dead":
        pool.dead = True
    pins = [other.engine.prefetch(stored(other, 5, 8), pin=60.0)] if what == "full" else []
    table = RequestTable(PinningCache(other.engine, 60.0), 4, wait=WAIT)
    request = request_of(hashes)
    table.add(request)
    until(lambda: table.ask(request, 0)[0] is not None, "an answer")
    assert table.ask(request, 0) == (0, False)
    table.place(request, other.take(PAGES), 0)
    for pin in pins:
        pin.release()
    table.clear()


@pytest.mark.parametrize("found", [True, False])
def test_sglangs_lookup_waits_for_the_answer_while_nothing_else_runs(
    pair: tuple[Host, list[bytes]], pool: FakePool, found: bool
) -> None:
    other, hashes = pair
    cache, links = SinglePool(other.engine, 60.0), PageLinks()
    hashes = hashes if found else hashes_of(2, PAGES)
    busy = LoadTable(cache, links, wait=WAIT, alone=lambda: False)
    pool.answers.clear()
    assert busy.lookup("busy", [some.hex() for some in hashes]) == 0
    pool.answers.set()
    busy.reset()
    table = LoadTable(cache, links, wait=WAIT, alone=lambda: True)
    keys = [some.hex() for some in hashes]
    assert table.lookup("r", keys) == (PAGES if found else 0)
    blocks = other.take(PAGES)
    assert table.load("r", keys, lambda: blocks) is found
    for queued in table.take():
        names = [page.key for page in other.engine.pages(links.named(keys))]
        assert other.finish(other.engine.load(queued.hit(), blocks), blocks, names).tokens == PAGES * 4
        queued.fetch.release()


# -- faults at random ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_whatever_happens_no_byte_is_wrong(opens: OpenHost, pool: FakePool, seed: int) -> None:
    """`Host` compares every page that a load calls good."""
    rng = random.Random(seed)
    hosts = [opens(options={"pages": 20, "deadline": 0.5}, cpu=12) for _ in range(2)]
    pool.room = 24
    for _ in range(120):
        host, tokens = rng.choice(hosts), prompt(rng.randrange(8), rng.randint(1, 5))
        match rng.randrange(9):
            case 0 | 1:
                host.store(tokens)
            case 2 | 3 | 4:
                host.engine.prefetch(tokens).result(WAIT)
                host.load(tokens)
            case 5:
                pool.dead = not pool.dead
            case 6 if pool.objects:
                name = rng.choice(list(pool.objects))
                raw = bytearray(pool.objects[name])
                raw[rng.randrange(len(raw) - TRAILER_BYTES + 128)] ^= 1 << rng.randrange(8)
                pool.objects[name] = bytes(raw)
            case 7 if pool.objects:
                pool.lost ^= {rng.choice(list(pool.objects))}
            case 8:
                drop_from(host.engine, "cpu")
    pool.restart()
    pool.lost.clear()
    pool.room = 1 << 30
    for host in hosts:
        ready(host)
        quiet(host.engine)
    tokens = stored(hosts[0], 77)
    assert fetched(hosts[1], tokens) == PAGES
    for host in hosts:
        settle(host.engine)


# -- the configuration -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"master": "nowhere"}, {"replicas": 0}, {"segment": "lots"}, {"deadline": 0}, {"deadline": "2"},
        {"protocol": 7}, {"protocol": "tpc"}, {"protocol": "rpc_only"}, {"master": "host:²"}, {"master": "host:\u0663"},
        {"segment": "1MiB"}, {"segment": (16 << 20) - 1}, {"hostname": ""}, {"metadata": ""},
    ],
)  # fmt: skip
def test_what_is_no_pool_is_refused(tmp_path: Any, master: str, options: dict[str, Any]) -> None:
    config = make_config(tmp_path, ssd=None, tiers=[pool_entry(master, **options)])
    with pytest.raises(InvalidValueError):
        CacheEngine.from_config(Config.from_dict(config))


@pytest.mark.parametrize(
    "error", [TierUnavailableError("no such device", "see the test"), RuntimeError("no such device")]
)
def test_what_cannot_be_used_is_said_once_a_minute(
    opens: OpenHost, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    """Also an error of the client's library, as one line."""
    tries = itertools.count()

    def refuses(*_: Any) -> Any:
        next(tries)
        raise error

    monkeypatch.setattr(FakeMooncakeTier, "connection", lambda _: refuses)
    opens()
    until(lambda: next(tries) > 10, "it is tried again and again")
    assert sum("no such device" in line for line in caplog.messages) == 1
    assert not any(record.exc_info for record in caplog.records)


def test_a_refused_tier_leaves_no_thread_and_no_client(
    tmp_path: Any, master: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, before, files = list[FakeClient](), threading.enumerate(), MooncakeFiles.__init__

    def connect(address: MooncakeAddress, _: object) -> tuple[FakeClient, FakeClient]:
        made.extend((FakeClient(POOLS[address.master]), FakeClient(POOLS[address.master])))
        return made[-2], made[-1]

    def late(*arguments: Any) -> None:
        until(lambda: bool(made), "it is connected")
        files(*arguments)

    monkeypatch.setattr(FakeMooncakeTier, "connection", lambda _: connect)
    monkeypatch.setattr(MooncakeFiles, "__init__", late)
    monkeypatch.setattr(FakeClient, "register", lambda *_: -5)
    with pytest.raises(TierUnavailableError, match="locked memory"):
        CacheEngine.from_config(Config.from_dict(make_config(tmp_path, ssd=None, tiers=[pool_entry(master)])))
    assert [client.closed for client in made] == [True, True]
    until(lambda: not [t for t in threading.enumerate() if t not in before], "its threads end")


@pytest.mark.parametrize(("code", "known"), [(1, True), (0, False), (-1, True)])
def test_a_name_is_forgotten_where_the_pool_says_that_it_has_no_such_page(host: Host, code: int, known: bool) -> None:
    tier, (page,) = tier_of(host), host.engine.pages(stored(host, pages=1))
    with tier.lock:
        tier._note([page], [code])
        assert tier.index.has(page.key) == known


def test_it_is_refused_where_nothing_could_come_back(tmp_path: Any, master: str, pool: FakePool) -> None:
    config = make_config(tmp_path, cpu=None, ssd=12, tiers=[pool_entry(master)])
    with pytest.raises(TierUnavailableError, match="CPU tier"):
        CacheEngine.from_config(Config.from_dict(config))
    assert pool.registered  # it was open, and is not any more: its client says so where memory is left


def test_a_prefetch_that_is_cancelled_while_it_asks_is_over(host: Host, pool: FakePool) -> None:
    tokens = stored(host)
    drop_from(host.engine, "cpu")
    pool.answers.clear()
    found = host.engine.prefetch(tokens, pin=60.0)
    assert found.asking
    found.cancel()
    assert found.result(WAIT).end is PrefetchEnd.CANCELLED
    assert not found.asking
    pool.answers.set()
    assert fetched(host, tokens) == PAGES


def test_an_engine_closes_while_it_asks(opens: OpenHost, host: Host, pool: FakePool) -> None:
    tokens, before = stored(host), threading.enumerate()
    other = opens(options={"deadline": 0.2})
    pool.answers.clear()
    found, tier = other.engine.prefetch(tokens), other.engine.manager.tiers["mooncake"]
    other.engine.close()
    assert found.result(WAIT).end is PrefetchEnd.CLOSED
    pool.answers.set()
    ended(tier, before)
