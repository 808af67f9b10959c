"""Why pages are missing: each cause is reached, and said of the right tokens, on hits, on loads, and by group."""

from __future__ import annotations

import copy
import gc
import weakref
from pathlib import Path
from typing import Any

import pytest

from gdscache import CacheEngine, PageStatus
from gdscache.gate.gate import Decision
from gdscache.load.plan import told_of
from gdscache.pages.hit import CAUSES, Reason
from gdscache.storage.base import Op
from gdscache.tiers.expiry import Expiry
from tests.support.bare_manager import set_clock
from tests.support.dict_tier import DictTier
from tests.support.faulty import PLAN, Fault
from tests.support.helpers import Host, OpenHost, drop_from, kept, make_config, prompt, quiet, until
from tests.support.hybrid import OpenHybrid
from tests.support.pages import FAULTY, lose, offset_of


class Unserved(DictTier):
    """A tier that only prefetches ask."""

    served = False


def missing(host: Host, tokens: list[int], salt: str = "") -> list[Reason]:
    """Why tokens of a request are not in a hit."""
    hit = host.engine.lookup(tokens, salt=salt)
    reasons = hit.reasons()
    assert [reason.first for reason in reasons] == [0, *(reason.stop for reason in reasons)][:-1], (
        "no token is left out"
    )
    assert reasons[-1].stop == len(tokens) // 4 * 4
    assert {reason.cause for reason in reasons} <= CAUSES.keys()
    assert sum(reason.stop - reason.first for reason in reasons if reason.stop <= hit.tokens) == hit.tokens
    found = [reason for reason in reasons if reason.stop > hit.tokens]
    assert hit.missing() == (found[0] if found else None)
    return found


def test_a_hit_says_which_tier_its_tokens_come_from(open_host: OpenHost) -> None:
    host, tokens = kept(open_host, 5, cpu=8, ssd=24)
    lose(host.engine, tokens, [1, 2], "cpu")
    hit = host.engine.lookup([*tokens, 1, 2])
    assert hit.reasons() == (
        Reason(0, 4, "cached", "cpu"),
        Reason(4, 12, "cached", "ssd"),
        Reason(12, 20, "cached", "cpu"),
    )
    assert hit.missing() is None
    assert hit.why is None, "a whole hit costs nothing"
    assert host.engine.lookup(tokens, start=8).reasons()[0].first == 8
    assert host.engine.prefetch(tokens).result(10).tokens == 20


def test_what_was_never_stored_is_absent_and_what_lies_behind_a_gap_is_behind(open_host: OpenHost) -> None:
    host, tokens = kept(open_host, 4, cpu=8, ssd=24)
    assert missing(host, [*tokens, *prompt(7, 2)]) == [Reason(16, 24, "absent")]
    lose(host.engine, tokens, [1])
    assert missing(host, tokens) == [Reason(4, 8, "absent"), Reason(8, 16, "behind", "cpu")]
    host.engine.clear()
    assert missing(host, tokens) == [Reason(0, 16, "absent")]
    assert missing(host, tokens, salt="another") == [Reason(0, 16, "absent")]


def test_a_page_that_comes_behind_the_lookup_says_so(open_host: OpenHost) -> None:
    host = open_host(cpu=8, ssd=None)
    hit = host.engine.lookup(prompt(1, 2))
    host.keep(prompt(1, 2))
    assert hit.missing() == Reason(0, 8, "stored_since", "cpu", "absent")


def test_a_page_that_made_room_for_others_is_probably_evicted(open_host: OpenHost) -> None:
    host = open_host(cpu=None, ssd=4)
    for seed in (1, 2):
        host.keep(prompt(seed, 4))
    assert {reason.cause for reason in missing(host, prompt(1, 4))} == {"evicted"}
    host.keep(prompt(1, 4))
    assert missing(host, prompt(1, 4)) == []
    host.engine.clear()
    assert missing(host, prompt(1, 4))[0].cause == "evicted", "once evicted, it stays in the filter"


def test_a_page_whose_time_is_over_is_expired(open_host: OpenHost) -> None:
    host = open_host(cpu=8, ssd=24)
    clock = set_clock(host.engine)
    host.keep(prompt(1, 3), ttl=10)
    clock.now += 11
    assert missing(host, prompt(1, 3)) == [Reason(0, 12, "expired")]
    assert isinstance(host.engine.manager.expiry, Expiry)


def test_what_the_ssd_refused_says_why_when_it_is_evicted(open_host: OpenHost) -> None:
    host = open_host(cpu=4, ssd=24, store={"admission": "second_offer"})
    for seed in (1, 2):
        host.keep(prompt(seed, 4))
    assert missing(host, prompt(1, 4)) == [Reason(0, 16, "refused", "ssd", "second_offer")]


def test_a_store_that_found_no_room_says_so(open_host: OpenHost) -> None:
    host = open_host(cpu=None, ssd=24, queue=2)
    report = host.store(prompt(1, 5)).result(10)
    assert set(report.dropped.values()) == {"queue_full"}
    quiet(host.engine)
    assert missing(host, prompt(1, 5)) == [Reason(8, 20, "no_room", detail="queue_full")]
    host.keep(prompt(1, 5))
    assert missing(host, prompt(1, 5)) == [Reason(16, 20, "no_room", detail="queue_full")]


@pytest.mark.parametrize(
    ("fault", "status", "behind"),
    [
        (Fault.EIO, PageStatus.IO_ERROR, Reason(8, 12, "behind", "ssd")),
        (Fault.FLIP, PageStatus.CHECKSUM, Reason(4, 8, "bad", "ssd", "checksum")),
    ],
)
def test_a_load_says_which_pages_came_and_why_others_did_not(
    open_host: OpenHost, fault: Fault, status: PageStatus, behind: Reason
) -> None:
    host, tokens = kept(open_host, 4, cpu=None, ssd=24, transport=FAULTY)
    place = offset_of(host.engine, tokens, 1)
    with PLAN.rule(Op.READ, fault, lambda offset: offset == place):
        report = host.load(tokens)
    cause, detail = told_of(status, "ssd").cause, status.value
    assert report.reasons == (
        Reason(0, 4, "cached", "ssd"), Reason(4, 8, cause, "ssd", detail), Reason(8, 16, "cached", "ssd"),
    )  # fmt: skip
    if fault is Fault.EIO:
        lose(host.engine, tokens, [0])
        assert missing(host, tokens) == [
            Reason(0, 4, "absent"), Reason(4, 8, "failing", "ssd"), Reason(8, 16, "behind", "ssd"),
        ]  # fmt: skip
    else:
        assert missing(host, tokens)[0] == behind
        host.keep(tokens)
        assert missing(host, tokens) == [], "what is stored again is not bad"


def test_pages_that_have_gone_since_the_lookup_are_in_the_load_s_reasons(open_host: OpenHost) -> None:
    host, tokens = kept(open_host, 4, cpu=8, ssd=None)
    hit = host.engine.lookup(tokens, start=4)
    lose(host.engine, tokens, [2])
    blocks = host.take(3)
    load = host.engine.load(hit, blocks)
    assert load.tokens == 4
    assert load.result(10).reasons == (
        Reason(4, 8, "cached", "cpu"), Reason(8, 12, "absent"), Reason(12, 16, "behind", "cpu"),
    )  # fmt: skip
    host.give(blocks)


def test_a_batch_has_the_reasons_of_each_request_and_of_all(open_host: OpenHost) -> None:
    host = open_host(cpu=8, ssd=None)
    requests = []
    for seed in (1, 2):
        host.keep(prompt(seed, 2))
        requests.append((host.engine.lookup(prompt(seed, 2)), host.take(2)))
    load = host.engine.load_many(requests)
    one, other = load.results(10)
    assert one.reasons == other.reasons == (Reason(0, 8, "cached", "cpu"),)
    assert load.result().reasons == one.reasons + other.reasons


def test_a_cancelled_load_says_so() -> None:
    causes = {status: told_of(status, "ssd") for status in PageStatus}
    assert {told.cause for told in causes.values()} == {"cached", "bad", "failing", "late", "off", "cancelled"}
    assert causes[PageStatus.CANCELLED] == ("cancelled", "ssd", "cancelled")
    assert causes[PageStatus.RANK_AWAY] == ("off", "ssd", "rank_away")
    assert causes[PageStatus.LOADED] == ("cached", "ssd", "")


def test_a_read_that_hangs_is_late_and_a_store_on_its_way_is_storing(open_host: OpenHost) -> None:
    host, tokens = kept(open_host, 3, cpu=None, ssd=24, bounce=16, transport=FAULTY, deadline=0.5)
    with PLAN.rule(Op.READ, Fault.HANG, times=1):
        load, blocks, _ = host.begin(tokens)
        report = load.result(20)
        late = [reason for reason in report.reasons if reason.cause == "late"]
        assert len(late) == 1
        assert missing(host, tokens)[0] == late[0]
    load.release_event.synchronize(20)
    host.give(blocks)
    quiet(host.engine)
    until(lambda: not missing(host, tokens), "the read has ended")
    with PLAN.rule(Op.WRITE, Fault.HANG, times=2):
        handle = host.store(prompt(2, 2))
        until(lambda: missing(host, prompt(2, 2)) == [Reason(0, 8, "storing", "ssd")], "they have slots")
        handle.result(20)
    until(lambda: host.engine.manager.quarantine.requests == 0, "the writes have ended")
    assert missing(host, prompt(2, 2))[0][2:] == ("no_room", "", "deadline")


def test_a_tier_that_is_switched_off_says_so(open_host: OpenHost) -> None:
    host, tokens = kept(open_host, 3, cpu=None, ssd=24)
    host.engine.manager.quarantine._off.add("")
    assert missing(host, tokens) == [Reason(0, 12, "off", "ssd", "switched_off")]
    host.engine.manager.quarantine.stop("a test says so")
    assert missing(host, tokens) == [Reason(0, 12, "off", "ssd", "lock_lost")]
    host.engine.manager.quarantine._off.clear()
    host.engine.manager.quarantine.stopped = ""
    host.engine.manager.quarantine.absent = lambda: "rank_away"
    assert missing(host, tokens) == [Reason(0, 12, "off", "ssd", "rank_away")]
    host.engine.manager.quarantine.absent = lambda: ""
    assert missing(host, tokens) == []


def test_what_a_gate_left_out_is_the_gate_s(open_host: OpenHost, monkeypatch: pytest.MonkeyPatch) -> None:
    host, tokens = kept(open_host, 4, cpu=8, ssd=None)
    monkeypatch.setattr(host.engine.gate, "decide", lambda *_: Decision(1, 1, 1.0, 0.5))
    assert missing(host, [*tokens, *prompt(9, 1)]) == [Reason(4, 16, "gate", "cpu"), Reason(16, 20, "absent")]


def test_what_only_a_prefetch_asks_is_elsewhere(open_host: OpenHost) -> None:
    tier = {"tier": f"{__name__}:Unserved", "capacity": 24 * 8192}
    host, tokens = kept(open_host, 3, cpu=8, ssd=None, tiers=[tier])
    drop_from(host.engine, "cpu")
    assert missing(host, tokens) == [Reason(0, 12, "elsewhere", "dict")]


def test_a_hit_outlives_its_engine_and_keeps_none_open(tmp_path: Path) -> None:
    host = Host(make_config(tmp_path / "c", cpu=8))
    host.keep(prompt(1, 1))
    hit = host.engine.lookup(prompt(1, 3))
    assert copy.copy(hit) == hit
    host.engine.close()
    assert hit.reasons()[-1].stop == 12
    engine = weakref.ref(host.engine)
    del host
    gc.collect()
    assert engine() is None, "a hit, or the manager's sample of one, keeps its engine"


def test_every_cause_is_documented_and_reached() -> None:
    """By the tests above; this list is what a cause without a test is missing from."""
    reached = {
        "cached", "absent", "behind", "stored_since", "evicted", "expired", "refused", "no_room", "bad", "failing",
        "cancelled", "late", "storing", "off", "gate", "elsewhere",
    }  # fmt: skip
    assert reached == CAUSES.keys()
    page = (Path(__file__).parents[2] / "docs" / "embedding.md").read_text()
    assert [cause for cause in CAUSES if f"| `{cause}` |" not in page] == []


# -- groups ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["together", "apart", "uneven"])
def test_a_hybrid_hit_says_it_by_group(open_hybrid: OpenHybrid, model: str) -> None:
    host = open_hybrid(model)
    tokens = prompt(1, 8)
    host.store(tokens)
    longer = [*tokens, *prompt(9, 4)]
    hit = host.engine.lookup(longer)
    assert hit.tokens == 32
    full, window = (hit.reasons()[name] for name in ("full", "window"))
    assert full == (Reason(0, 32, "cached", "cpu"), Reason(32, 48, "absent"))
    assert window[-1] == Reason(32, 48, "absent")
    needed = hit.pages["window"]
    size = next(group.page_tokens for group in host.groups if group.name == "window")
    assert any(r.cause == "cached" and r.first <= needed.start * size and r.stop == 32 for r in window)
    report = host.load(longer)
    assert report.reasons()["full"] == (Reason(0, 32, "cached", "cpu"),)
    assert report.reasons()["window"] == (Reason(needed.start * size, needed.stop * size, "cached", "cpu"),)
    engines: list[CacheEngine] = host.engine.engines
    drop_from(engines[host.pool_of["full"]], "cpu", "ssd")
    none = host.engine.lookup(tokens)
    assert none.tokens == 0
    assert none.reasons()["full"] == (Reason(0, 32, "evicted"),)
    assert host.engine.nothing().reasons() == {"full": (), "window": ()}


def test_a_hybrid_load_says_which_group_was_bad(open_hybrid: OpenHybrid, slab: Path) -> None:
    host = open_hybrid("apart", cpu=None)
    tokens = prompt(1, 8)
    host.store(tokens)
    slab = slab / f"groups-{[group.name for group in host.groups].index('window')}" / "slab-0.bin"
    slab.write_bytes(bytes(slab.stat().st_size))
    report: Any = host.load(tokens)
    assert report.tokens == 0
    assert {reason.cause for reason in report.reasons()["full"]} == {"cached"}
    assert {reason[2:] for reason in report.reasons()["window"]} == {("bad", "ssd", "checksum")}
    assert "bad" in {reason.cause for reason in host.engine.lookup(tokens).reasons()["window"]}


def test_a_whole_hybrid_hit_that_the_gate_declines_is_the_gate_s(
    open_hybrid: OpenHybrid, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = open_hybrid("apart")
    tokens = prompt(1, 8)
    host.store(tokens)
    monkeypatch.setattr(host.engine.gate, "decide_whole", lambda *_: Decision(0, 0, 0.0, 0.0))
    hit = host.engine.lookup(tokens)
    assert (hit.tokens, hit.declined) == (0, 32)
    assert hit.reasons()["full"] == (Reason(0, 32, "gate", "cpu"),)
