"""When pages go on to the SSD: at once, after hits, or before the CPU tier gives them up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gdscache.config import Config
from gdscache.errors import DeadlineError, InvalidValueError
from gdscache.storage.base import Op
from tests.support.faulty import PLAN, Fault
from tests.support.helpers import WAIT, Host, OpenHost, drop_from, make_config, prompt, quiet
from tests.support.write_parts import dirty, on, written


def stored(host: Host, tokens: list[int], start: int = 0) -> Any:
    report = host.keep(tokens, start).result(WAIT)
    return report


# -- write_through_selective -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("hits", [1, 2, 3])
def test_selective_writes_a_page_after_so_many_hits(policy_host: OpenHost, hits: int) -> None:
    host = policy_host("write_through_selective", hits=hits, cpu=8)
    tokens = prompt(1, 3)
    report = stored(host, tokens)
    assert report.tiers == (("cpu",),) * 3
    assert report.dropped == {}
    for n in range(1, hits + 1):
        assert on(host, "ssd", tokens) == []
        assert host.load(tokens[:8]).tokens == 8  # the last page is not hit
        quiet(host.engine)
        assert on(host, "ssd", tokens) == ([0, 1] if n == hits else [])
    assert host.engine.stats()["stored"] == {"cpu": 3, "ssd": 2}
    host.load(tokens)
    quiet(host.engine)
    assert written() == (2 if hits > 1 else 3), "a clean page was written again, or one that was not hit enough"


def test_selective_counts_hits_of_the_page_and_not_of_its_slot(policy_host: OpenHost) -> None:
    host = policy_host("write_through_selective", hits=2, cpu=2, ssd=12)
    first, second = prompt(1, 2), prompt(2, 2)
    stored(host, first)
    host.engine.lookup(first)
    stored(host, second)  # takes both slots
    host.load(second)
    quiet(host.engine)
    assert on(host, "ssd", second) == []
    host.load(second)
    quiet(host.engine)
    assert on(host, "ssd", second) == [0, 1]


def test_selective_counts_no_hits_of_a_page_that_lay_in_the_slot_of_one_that_a_load_brings(
    policy_host: OpenHost,
) -> None:
    host = policy_host("write_through_selective", hits=2, cpu=2, ssd=12)
    first, second = prompt(1, 2), prompt(2, 2)
    stored(host, first)
    for _ in range(2):
        host.load(first)
    quiet(host.engine)
    stored(host, second)  # takes both slots
    host.engine.lookup(second)
    host.load(first)  # takes them back, out of the SSD
    quiet(host.engine)
    assert on(host, "cpu", first) == on(host, "ssd", first) == [0, 1]
    drop_from(host.engine, "ssd")
    host.load(first)
    quiet(host.engine)
    assert on(host, "ssd", first) == [], "a hit of another page counted"
    host.load(first)
    quiet(host.engine)
    assert on(host, "ssd", first) == [0, 1]


def test_selective_drops_what_finds_no_slot_in_the_cpu_tier(policy_host: OpenHost) -> None:
    host = policy_host("write_through_selective", cpu=2, ssd=12)
    report = stored(host, prompt(1, 4))
    assert report.dropped == {2: "cpu_full", 3: "cpu_full"}
    assert host.engine.stats()["dropped"] == {"cpu_full": 2}


# -- never -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ssd", [None, 12])
def test_pages_that_no_tier_takes_do_not_count_as_present(open_host: OpenHost, ssd: int | None) -> None:
    tokens = prompt(1, 3)
    if ssd is not None:
        host = open_host(cpu=None, ssd=ssd)
        stored(host, tokens[:4])
        host.engine.close()
    host = open_host(cpu=None, ssd=ssd, store={"write_policy": "never"})
    new = 3 if ssd is None else 2
    assert stored(host, tokens).dropped == dict.fromkeys(range(3 - new, 3), "no_tier")
    assert host.engine.stats()["stores"]["present"] == 3 - new
    assert host.engine.stats()["dropped"] == {"no_tier": new}


# -- write_back ------------------------------------------------------------------------------------------------------


def test_write_back_writes_the_coldest_above_the_mark_and_no_more_than_to_the_other(policy_host: OpenHost) -> None:
    host = policy_host("write_back", cpu=8)  # more than 4 dirty pages: down to 2
    old, new = prompt(1, 3), prompt(2, 3)
    stored(host, old)
    assert (dirty(host), written()) == (3, 0)
    assert on(host, "ssd", old) == []
    stored(host, new)  # 6 dirty: 4 go, the three old ones and the head of the new
    assert on(host, "ssd", old) == [0, 1, 2]
    assert len(on(host, "ssd", new)) in (1, 2, 3), "a prefix was not written from its head on"
    assert on(host, "ssd", new) == list(range(len(on(host, "ssd", new))))
    assert dirty(host) == 6 - written()
    assert dirty(host) <= 2


def test_write_back_writes_a_page_once(policy_host: OpenHost) -> None:
    host = policy_host("write_back", cpu=8)
    for seed in (1, 2, 1, 2, 1):
        stored(host, prompt(seed, 3))
        host.engine.lookup(prompt(seed, 3))
    host.engine.flush(WAIT)
    host.engine.flush(WAIT)
    assert sorted(PLAN.moved[Op.WRITE]) == sorted(set(PLAN.moved[Op.WRITE]))
    assert (written(), dirty(host)) == (6, 0)
    assert host.engine.stats()["stored"] == {"cpu": 6, "ssd": 6}


def test_dirty_pages_are_not_evicted_and_others_pass_by(policy_host: OpenHost) -> None:
    host = policy_host("write_back", cpu=4, watermarks=(0.99, 0.99))
    kept, clean, other = prompt(1, 3), prompt(2, 1), prompt(3, 3)
    stored(host, kept)  # three dirty pages of four
    with host.engine.manager.lock:
        [held] = host.engine.manager.landing.index.take_free(1)  # as if it were pinned
    report = stored(host, other)  # no slot is free and no page may go: by the bounce reserve to the SSD
    assert report.tiers == (("ssd",),) * 3
    assert on(host, "cpu", kept) == [0, 1, 2]
    assert host.load(other).bytes_by_tier.keys() == {"ssd"}
    assert on(host, "cpu", kept) == [0, 1, 2], "a load pushed out a page that is nowhere else"
    with host.engine.manager.lock:
        host.engine.manager.landing.index.free([held])
    host.engine.flush(WAIT)
    stored(host, clean)
    assert host.load(other).tokens == 12
    assert on(host, "cpu", other) == [0, 1, 2], "a clean page did not make room"
    assert on(host, "ssd", kept) == [0, 1, 2]


@pytest.mark.parametrize("drain", [True, False])
def test_close_writes_what_is_dirty_or_drops_it(policy_host: OpenHost, drain: bool) -> None:
    host = policy_host("write_back", cpu=8)
    tokens = prompt(1, 3)
    stored(host, tokens)
    host.engine.close(drain=drain)
    assert written() == (3 if drain else 0)
    again = policy_host("write_back", cpu=8)
    assert again.load(tokens).tokens == (12 if drain else 0)


def test_a_page_that_cannot_be_written_is_dropped_once_and_may_be_evicted(policy_host: OpenHost) -> None:
    host = policy_host("write_back", cpu=8)
    tokens = prompt(1, 3)
    stored(host, tokens)
    with PLAN.rule(Op.WRITE, Fault.EIO):
        host.engine.flush(WAIT)
    assert host.engine.stats()["dropped"] == {"io_error": 3}
    assert dirty(host) == 0
    assert on(host, "cpu", tokens) == [0, 1, 2]
    assert on(host, "ssd", tokens) == []
    tried = written()
    host.engine.flush(WAIT)
    assert written() == tried, "it is tried for ever"


def test_clear_takes_dirty_pages_along(policy_host: OpenHost) -> None:
    host = policy_host("write_back", cpu=8)
    stored(host, prompt(1, 3))
    assert host.engine.clear() == {"cpu": 3, "ssd": 0}
    assert dirty(host) == 0
    host.engine.flush(WAIT)
    assert written() == 0
    stored(host, prompt(1, 3))
    host.engine.invalidate(host.engine.namespace())
    assert dirty(host) == 0


def test_flush_says_when_it_is_not_done_in_time(policy_host: OpenHost) -> None:
    host = policy_host("write_back", cpu=8)
    stored(host, prompt(1, 3))
    with PLAN.rule(Op.WRITE, Fault.HANG), pytest.raises(DeadlineError, match=r"after 0\.2 s"):
        host.engine.flush(0.2)
    host.engine.flush(WAIT)
    assert (written(), dirty(host)) == (3, 0)


def test_flush_goes_on_behind_pages_that_are_refused(policy_host: OpenHost) -> None:
    host = policy_host("write_back", cpu=16, queue=2, store={"admission": "second_offer"})
    known = prompt(1, 2)
    stored(host, known)
    host.engine.flush(WAIT)  # its first offer
    drop_from(host.engine, "cpu")
    for seed in (2, 3, 4, 1):
        stored(host, prompt(seed, 2))
    host.engine.flush(WAIT)  # a round of two pages: the first three are refused whole
    assert (dirty(host), on(host, "ssd", known)) == (0, [0, 1])


def test_flush_is_drain_for_the_other_policies(policy_host: OpenHost) -> None:
    host = policy_host("write_through_selective", cpu=8)
    stored(host, prompt(1, 3))
    host.engine.flush(WAIT)
    assert written() == 0


# -- all of them -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_what_is_offered_while_it_is_in_flight_is_sent_once(policy_host: OpenHost, policy: str) -> None:
    host = policy_host(policy, cpu=8)
    tokens = prompt(1, 3)
    with PLAN.rule(Op.WRITE, Fault.HANG):
        first = host.store(tokens)
        second = host.store(tokens)
        third = host.store(tokens, start=4)
        for handle in (second, third):
            assert handle.result(WAIT).dropped == {}
    first.result(WAIT)
    host.engine.flush(WAIT)
    assert written() == 3
    assert host.engine.stats()["stored"] == {"cpu": 3, "ssd": 3}


def test_never_writes_nothing(policy_host: OpenHost) -> None:
    host = policy_host("never", cpu=8)
    assert stored(host, prompt(1, 3)).tiers == (("cpu",),) * 3
    host.engine.flush(WAIT)
    assert (written(), dirty(host)) == (0, 0)


@pytest.mark.parametrize("policy", ["write_through_selective", "write_back"])
def test_without_a_cpu_tier_such_policies_are_refused(tmp_path: Path, policy: str) -> None:
    with pytest.raises(InvalidValueError, match=f"store.write_policy is {policy}.*there is none") as caught:
        Config.from_dict(make_config(tmp_path, cpu=None, store={"write_policy": policy}))
    assert "cpu section" in caught.value.hint
