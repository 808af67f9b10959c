"""Prefetches that own pins, and loads of what they hold: room for all or a clear no, and no load that fails."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from gdscache import CacheEngine, Hit, PageHashes, Prefetch
from gdscache.errors import EngineClosedError, InvalidValueError, SequenceStateError, SlotCountError, TokensError
from gdscache.index.table import PageState
from gdscache.moves import Move
from gdscache.pages.keys import Page
from gdscache.prefetch import queue as prefetching
from gdscache.storage.base import Op
from gdscache.tiers.pins import Claim
from tests.support.bare_manager import Clock, bare_manager
from tests.support.faulty import PLAN, Fault
from tests.support.helpers import (
    LONG,
    MHA,
    PACKED,
    WAIT,
    Host,
    OpenHost,
    drop_from,
    expected,
    kept,
    make_config,
    prompt,
    quiet,
    read_page,
    settle,
    stored,
    together,
    until,
)
from tests.support.pages import lose
from tests.support.slow_prefetch import FAULTY, PAGEWISE, slow_host, stocked


def roomy(model: dict[str, Any], pages: int) -> dict[str, Any]:
    """The model, and tiers of so many pages if it packs them: those that do not fit have a sixteenth, and eight slots
    at most."""
    return {"model": model} | (dict.fromkeys(("cpu", "ssd", "bounce"), pages) if model is PACKED else {})


def press(host: Host) -> None:
    """Evict from the CPU tier all that can go."""
    drop_from(host.engine, "cpu")


def load(host: Host, hit: Hit) -> int:
    """Load a hit, with the bytes checked, and the slots that nobody named; the tokens that were promised."""
    blocks = host.take(len(hit.pages))
    begun = host.engine.load(hit, blocks)
    promised = begun.tokens
    report = host.finish(begun, blocks, [page.key for page in hit.pages])
    assert report.tokens == promised
    return promised


def pinned(host: Host) -> tuple[int, int]:
    stats = host.engine.stats()["prefetch"]
    return stats["pinned_pages"], stats["promised_pages"]


# -- what is held ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("face", "model"), [("tokens", MHA), ("hashes", MHA), ("tokens", PACKED)])
def test_what_was_brought_stays_and_is_loaded_from_memory(
    open_host: OpenHost, device: str, face: str, model: dict[str, Any]
) -> None:
    host = slow_host(open_host, device=device, **roomy(model, 128))
    tokens: Any = prompt(1, 6, extra=1)
    if face == "hashes":
        tokens = PageHashes([n.to_bytes(32, "big") for n in range(6)], 25)
    host.keep(tokens)
    in_memory = host.engine.lookup(tokens).tiers
    assert ("cpu_plain" in in_memory) == (model is PACKED)
    press(host)
    on_files = host.engine.lookup(tokens).tiers
    prefetch = host.engine.prefetch(tokens, pin=60.0)
    assert prefetch.result(WAIT).end.value == "complete"
    press(host)
    assert prefetch.verified == 24
    hit = prefetch.hit()
    assert (hit.start, hit.tokens, hit.tiers, hit.checked, hit.pays) == (0, 24, in_memory, True, 24)
    with PLAN.rule(Op.READ, Fault.HANG):
        assert load(host, hit) == 24
    assert pinned(host) == (6, 0)
    prefetch.release()
    assert pinned(host) == (0, 0)
    assert (prefetch.verified, prefetch.hit().tokens) == (0, 0)
    press(host)
    assert host.engine.lookup(tokens).tiers == on_files


def test_what_is_verified_grows_page_by_page(open_host: OpenHost) -> None:
    host, tokens = stocked(open_host, 5)
    with (
        PLAN.rule(Op.READ, Fault.HANG, skip=3, times=1) as fourth,
        PLAN.rule(Op.READ, Fault.HANG, skip=1, times=1) as second,
    ):
        prefetch = host.engine.prefetch(tokens, pin=60.0)
        until(lambda: PLAN.held == 1, "the second page hangs")
        assert prefetch.verified == 4
        assert pinned(host) == (1, 4)
        second.release()
        until(lambda: prefetch.verified == 12, "two more")
        press(host)
        assert load(host, prefetch.hit()) == 12
        fourth.release()
    assert prefetch.result(WAIT).tokens == prefetch.verified == 20
    prefetch.release()


def test_pages_found_in_memory_are_held_at_once(open_host: OpenHost) -> None:
    """Behind a gap, too: they stay until the gap is filled."""
    host, tokens = stocked(open_host, 6)
    host.load(tokens)
    lose(host.engine, tokens, [2], "cpu")
    with PLAN.rule(Op.READ, Fault.HANG) as only:
        prefetch = host.engine.prefetch(tokens, pin=60.0)
        assert prefetch.verified == 8
        assert pinned(host) == (5, 1)
        press(host)
        until(lambda: PLAN.held == 1, "the page in the gap is read")
        only.release()
    assert prefetch.result(WAIT).pages == {"present": 5, "loaded": 1}
    assert prefetch.verified == 24
    prefetch.release()
    assert pinned(host) == (0, 0)


@pytest.mark.parametrize("by", ["release", "cancel", "with"])
def test_whatever_ends_it_lets_go(open_host: OpenHost, by: str) -> None:
    host, tokens = stocked(open_host, 6)
    with PLAN.rule(Op.READ, Fault.HANG, skip=2) as rule:
        if by == "with":
            with host.engine.prefetch(tokens, pin=60.0) as prefetch:
                until(lambda: PLAN.held == 1, "the third page hangs")
        else:
            prefetch = host.engine.prefetch(tokens, pin=60.0)
            until(lambda: PLAN.held == 1, "the third page hangs")
            getattr(prefetch, by)()
            prefetch.release()
        assert pinned(host) == (0, 0)
        assert (prefetch.verified, prefetch.hit().tokens, prefetch.done()) == (0, 0, False)
        rule.release()
    report = prefetch.result(WAIT)
    assert (report.end.value, report.pages) == ("cancelled", {"loaded": 3, "left": 3})
    assert pinned(host) == (0, 0)
    settle(host.engine)


def test_its_time_is_up(open_host: OpenHost, monkeypatch: pytest.MonkeyPatch) -> None:
    host = slow_host(open_host)
    now = [0.0]
    pins = host.engine.manager.pins
    monkeypatch.setattr(pins, "clock", lambda: now[0])
    tokens = stored(host, 1, 4)
    prefetch = host.engine.prefetch(tokens, pin=1e6)
    prefetch.result(WAIT)
    now[0] = 1e6 - 1
    assert prefetch.verified == 16
    hit = prefetch.hit()
    now[0] = 1e6
    assert (prefetch.verified, prefetch.hit().tokens) == (0, 0)
    assert pinned(host)[0] == 0
    assert load(host, hit) == 16, "nothing has evicted them yet"
    press(host)
    assert load(host, hit) == 0


def test_one_that_hangs_ends_when_its_time_is_up(open_host: OpenHost) -> None:
    host, tokens = stocked(open_host, 6, deadline=0.3)
    with PLAN.rule(Op.READ, Fault.HANG, skip=2):
        prefetch = host.engine.prefetch(tokens, pin=0.2)
        until(prefetch.done, "it ends")
        until(lambda: pinned(host) == (0, 0), "it lets go")
    assert prefetch.result(0).end.value in ("deadline", "error")
    assert prefetch.verified == 0


def test_while_loads_go_on_its_time_ends_it(open_host: OpenHost) -> None:
    """It has had no turn yet."""
    host = slow_host(open_host)
    tokens, other = stored(host, 1, 4), stored(host, 2, 2)
    with PLAN.rule(Op.READ, Fault.HANG) as rule:
        begun, blocks, keys = host.begin(other)
        first = host.engine.prefetch(tokens[:4], pin=60.0)
        prefetch = host.engine.prefetch(tokens[8:] + tokens, pin=0.05)
        late = host.engine.prefetch(tokens, start=4, pin=0.15)
        assert prefetch.result(WAIT).end.value == "complete"  # nothing of it is cached
        assert late.result(WAIT).end.value == "deadline"
        rule.release()
    host.finish(begun, blocks, keys)
    first.release()


# -- room ------------------------------------------------------------------------------------------------------------


def test_who_asks_first_has_room_and_nobody_waits(open_host: OpenHost) -> None:
    host = slow_host(open_host)
    one, two, three = stored(host, 1, 8), stored(host, 2, 8), stored(host, 3, 2)
    with PLAN.rule(Op.READ, Fault.HANG) as rule:
        a = host.engine.prefetch(one, pin=60.0)
        b = host.engine.prefetch(two, pin=60.0)
        c = host.engine.prefetch(three, pin=60.0)
        assert pinned(host) == (0, 12)
        assert c.result(0).end.value == "no_room"
        assert c.result(0).pages == {"left": 2}
        rule.release()
    assert (a.result(WAIT).end.value, a.verified) == ("complete", 32)
    report = b.result(WAIT)
    assert (report.end.value, report.pages, b.verified) == ("no_room", {"loaded": 4, "left": 4}, 16)
    press(host)
    assert (load(host, a.hit()), load(host, b.hit()), load(host, c.hit())) == (32, 16, 0)
    a.release()
    again = host.engine.prefetch(two, pin=60.0)
    assert again.result(WAIT).end.value == "complete"
    assert again.verified == 32
    b.release()
    assert again.verified == 32
    again.release()
    assert pinned(host) == (0, 0)


def test_pins_of_callers_and_of_prefetches_share_the_room(open_host: OpenHost) -> None:
    host = slow_host(open_host)
    one, two = stored(host, 1, 8), stored(host, 2, 8)
    host.load(one)
    with host.engine.pin(one, 60.0) as pin:
        assert pin.tokens == 32
        prefetch = host.engine.prefetch(two, pin=60.0)
        assert prefetch.result(WAIT).end.value == "no_room"
        assert prefetch.verified == 16
    other = stored(host, 3, 8)
    with PLAN.rule(Op.READ, Fault.HANG) as rule:
        third = host.engine.prefetch(other, pin=60.0)
        assert pinned(host) == (4, 8)
        host.load(two[:16])
        with host.engine.pin(two, 60.0) as pin:
            assert pin.tokens == 32, "on the SSD it has room"
            assert pinned(host) == (4, 8)
        third.release()
        rule.release()
    prefetch.release()


def test_the_quota_of_other_prefetches_is_not_asked(open_host: OpenHost) -> None:
    host = slow_host(open_host, limits=dataclasses.replace(PAGEWISE, prefetch_share=0.05))  # a page
    one, two = stored(host, 1, 4), stored(host, 2, 6)
    assert host.engine.prefetch(one).result(WAIT).end.value == "quota"
    with host.engine.prefetch(two, pin=60.0) as prefetch:
        assert prefetch.result(WAIT).end.value == "complete"
        stats = host.engine.stats()["prefetch"]
        assert (stats["held_pages"], stats["pinned_pages"], stats["pin_quota_pages"]) == (1, 6, 12)
    assert host.engine.stats()["prefetch"]["held_pages"] == 1


def test_a_bad_page_ends_it_and_what_lies_behind_is_given_up(open_host: OpenHost) -> None:
    host, tokens = stocked(open_host, 6)
    host.load(tokens)
    lose(host.engine, tokens, (1, 2), "cpu")
    with PLAN.rule(Op.READ, Fault.FLIP, skip=1):
        prefetch = host.engine.prefetch(tokens, pin=60.0)
        report = prefetch.result(WAIT)
    assert (report.end.value, prefetch.verified) == ("error", 8)
    assert pinned(host) == (2, 0)
    assert load(host, prefetch.hit()) == 8
    prefetch.release()


# -- loads of it -----------------------------------------------------------------------------------------------------


def test_such_a_load_is_not_hashed_and_has_no_deadline(open_host: OpenHost, monkeypatch: pytest.MonkeyPatch) -> None:
    host, tokens = stocked(open_host, 4, load={"verify": "always"})
    prefetch = host.engine.prefetch(tokens, pin=60.0)
    prefetch.result(WAIT)
    moves: list[Move] = []
    begin = host.engine._parts.executor.begin

    def noted(move: Move, *rest: Any) -> Any:
        moves.append(move)
        return begin(move, *rest)

    monkeypatch.setattr(host.engine._parts.executor, "begin", noted)
    assert load(host, prefetch.hit()) == 16
    assert host.load(tokens).tokens == 16
    checked, usual = moves
    assert checked.seconds == math.inf
    assert [way.sums for way in checked.ways] == [None]
    assert usual.seconds <= WAIT
    assert all(way.sums is not None for way in usual.ways)
    prefetch.release()


def test_prefetches_do_not_wait_for_such_a_load(open_host: OpenHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads nothing of the disk."""
    host = slow_host(open_host)
    one, two = stored(host, 1, 4), stored(host, 2, 4)
    with host.engine.prefetch(one, pin=60.0) as prefetch:
        prefetch.result(WAIT)
        hit, blocks = prefetch.hit(), host.take(4)
        lane, put_off = host.engine.loader._lane, list[Any]()
        with monkeypatch.context() as patch:
            patch.setattr(lane, "start", lambda *steps: put_off.append(steps))
            begun = host.engine.load(hit, blocks)
            with host.engine.manager.lock:
                assert host.engine.loader.loads == 0
            patch.setattr(prefetching, "DEMAND_PAUSE_S", 1000.0)
            assert host.engine.prefetch(two).result(WAIT).end.value == "complete"
        lane.start(*put_off[0])
        host.finish(begun, blocks, [page.key for page in hit.pages])


def test_it_takes_a_page_of_memory_alone(open_host: OpenHost) -> None:
    """Released too early: what is on the SSD only is not read, and the answer says so."""
    host, tokens = stocked(open_host, 6)
    prefetch = host.engine.prefetch(tokens, pin=60.0)
    prefetch.result(WAIT)
    hit = prefetch.hit()
    prefetch.release()
    lose(host.engine, tokens, [3], "cpu")
    before = len(PLAN.moved[Op.READ])
    assert load(host, hit) == 12
    assert len(PLAN.moved[Op.READ]) == before
    press(host)
    assert load(host, hit) == 0


@pytest.mark.parametrize("how", ["clear", "invalidate"])
def test_a_page_that_was_invalidated_is_not_loaded(open_host: OpenHost, how: str) -> None:
    host, tokens = stocked(open_host, 4)
    prefetch = host.engine.prefetch(tokens, pin=60.0)
    prefetch.result(WAIT)
    hit = prefetch.hit()
    if how == "clear":
        host.engine.clear()
    else:
        host.engine.invalidate(host.engine.namespace())
    assert (prefetch.verified, prefetch.hit().tokens) == (0, 0)
    assert load(host, hit) == 0
    host.data = lambda key: expected(host.layout, key[::-1])  # other weights
    host.keep(tokens)
    assert prefetch.verified == 0, "it does not own what was stored since"
    assert load(host, hit) == 16, "the pages of today"
    prefetch.release()
    settle(host.engine)


def test_many_requests_are_one_load(open_host: OpenHost) -> None:
    host = slow_host(open_host)
    one, two = stored(host, 1, 4), stored(host, 2, 3)
    with host.engine.prefetch(one, pin=60.0) as a, host.engine.prefetch(two, pin=60.0) as b:
        a.result(WAIT), b.result(WAIT)
        lose(host.engine, two, [1], "cpu")
        hits = [a.hit(start=8), a.hit(), b.hit()]
        assert [hit.tokens for hit in hits] == [8, 16, 4]
        blocks = [host.take(len(hit.pages)) for hit in hits]
        begun = host.engine.load_many(list(zip(hits, blocks, strict=True)))
        assert begun.tokens_by_request == (8, 16, 4)
        assert [r.tokens for r in begun.results()] == [8, 16, 4]
        for hit, some in zip(hits, blocks, strict=True):
            for page, block in zip(hit.pages, some, strict=True):
                assert np.array_equal(read_page(host.planes, host.layout, [block]), host.data(page.key))
            host.give(some)
        usual = host.engine.lookup(one)
        with pytest.raises(InvalidValueError, match="hits of lookup"):
            host.engine.load_many([(usual, [0]), (a.hit(), [1])])
        with pytest.raises(SlotCountError):
            host.engine.load(b.hit(), [0, 1])


def test_a_hit_begins_where_it_is_told_to(open_host: OpenHost) -> None:
    host, tokens = stocked(open_host, 6)
    with host.engine.prefetch(tokens, start=8, pin=60.0) as prefetch:
        prefetch.result(WAIT)
        assert prefetch.verified == 16
        names = tuple(host.engine.pages(tokens))
        for start in (8, 12, 20, 24, 400):
            hit = prefetch.hit(start)
            assert (hit.start, hit.pages) == (start, names[start // 4 :])
        assert prefetch.hit().start == 8
        for bad in (4, 9, -4, "8", None.__class__):
            with pytest.raises(TokensError):
                prefetch.hit(bad)  # type: ignore[arg-type]


def test_a_hit_has_a_tier_for_each_page_also_while_its_claim_is_cut(
    open_host: OpenHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = open_host(cpu=24)
    tokens = prompt(1, 8)
    host.keep(tokens)
    good = Claim.good.fget
    assert good is not None

    def cut(claim: Claim) -> int:
        found = int(good(claim))
        claim.cut(5)
        return found

    with host.engine.prefetch(tokens, pin=WAIT) as prefetch:
        prefetch.result(WAIT)
        monkeypatch.setattr(Claim, "good", property(cut))
        hit = prefetch.hit()
        assert len(hit.tiers) == len(hit.pages)
        monkeypatch.undo()


def test_a_prefetch_of_a_hit_brings_its_pages_and_no_more(open_host: OpenHost) -> None:
    host = slow_host(open_host)
    tokens = prompt(1, 8)
    host.keep(tokens, salt="x")
    press(host)
    found = host.engine.lookup(tokens, start=8, salt="x")
    some = dataclasses.replace(found, pages=found.pages[:3])
    with host.engine.prefetch(some, pin=60.0) as prefetch:
        assert prefetch.result(WAIT).pages == {"loaded": 3}
        hit = prefetch.hit()
        assert (hit.start, hit.pages, prefetch.verified) == (8, found.pages[:3], 12)
        assert load(host, hit) == 12
        assert prefetch.hit(16).pages == found.pages[2:3]
    assert host.engine.lookup(tokens, salt="x").tiers == ("ssd",) * 2 + ("cpu",) * 3 + ("ssd",) * 3
    assert host.engine.prefetch(found).result(WAIT).pages == {"present": 3, "loaded": 3}
    for wrong in ({"start": 4}, {"salt": "x"}):
        with pytest.raises(InvalidValueError, match="a hit is given with"):
            host.engine.prefetch(found, **wrong)  # type: ignore[arg-type]


# -- who may ask -----------------------------------------------------------------------------------------------------


def test_pins_need_a_tier_in_memory_and_planes(open_host: OpenHost, tmp_path: Path) -> None:
    with pytest.raises(InvalidValueError, match="no CPU tier"):
        open_host(cpu=None).engine.prefetch(prompt(1, 2), pin=1.0)
    with CacheEngine.from_config(make_config(tmp_path / "own")) as engine, pytest.raises(SequenceStateError):
        engine.prefetch(prompt(1, 2), pin=1.0)


def test_without_pins_there_is_no_such_hit(open_host: OpenHost) -> None:
    host, tokens = stocked(open_host, 2)
    prefetch = host.engine.prefetch(tokens)
    prefetch.result(WAIT)
    assert prefetch.verified == 0
    with pytest.raises(InvalidValueError, match="no pins"):
        prefetch.hit()
    prefetch.release()


def test_without_an_ssd_it_holds_what_is_there(open_host: OpenHost) -> None:
    host, tokens = kept(open_host, 5, ssd=None, cpu=24)
    with host.engine.prefetch(tokens, pin=60.0) as prefetch:
        assert (prefetch.done(), prefetch.result().end.value, prefetch.verified) == (True, "complete", 20)
        press(host)
        assert load(host, prefetch.hit()) == 20


def test_a_handle_of_a_closed_engine(open_host: OpenHost) -> None:
    host, tokens = stocked(open_host, 4)
    with host.engine.prefetch(tokens, pin=60.0) as prefetch:
        prefetch.result(WAIT)
        hit = prefetch.hit()
        host.engine.close()
        with pytest.raises(EngineClosedError):
            host.engine.load(hit, [0, 1, 2, 3])
    prefetch.release()
    assert prefetch.verified == 0


# -- the books, against a model --------------------------------------------------------------------------------------

NAMESPACE = b"n" * 32
SLOTS = 12
ROADS = [(0, 1, 2, 3, 4, 5), (0, 1, 6, 7, 8), (9, 10, 11, 12, 13, 14)]


def page_of(number: int) -> Page:
    return Page(bytes([number]) * 32, NAMESPACE, NAMESPACE)


@dataclasses.dataclass
class Asked:
    """What the model knows of a claim: the pages that found room, and which of them it holds, by their ages."""

    claim: Claim
    until: float
    pages: list[int]
    holds: dict[int, list[int]]
    settled: bool = False


class ClaimsMachine(RuleBasedStateMachine):
    """Claims on a tier of 12 slots, of which they have 6. A page of the model has a number, and an age: one that was
    dropped and came back is another."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.manager = bare_manager(SLOTS, self.clock)
        self.index = self.manager.landing.index
        self.there: dict[int, int] = {}  # pages, and their ages
        self.ages = 0
        self.owed: set[int] = set()  # pages that are expected, and for which no page that is held has taken room
        self.asked: list[Asked] = []

    def held(self) -> set[tuple[int, int]]:
        return {(n, age) for asked in self.asked for n, ages in asked.holds.items() for age in ages}

    def expected(self) -> set[int]:
        return {n for asked in self.asked for n in asked.pages if not asked.settled and n not in asked.holds}

    def room(self) -> int:
        return SLOTS // 2 - len(self.held()) - len(self.owed)

    @contextlib.contextmanager
    def letting_go(self) -> Iterator[None]:
        """Room of a page that others expect is theirs from then on."""
        before = self.held()
        yield
        self.owed |= {number for number, _ in before - self.held()}
        self.owed &= self.expected()

    def expire(self) -> None:
        self.manager.expire()
        with self.letting_go():
            self.asked = [asked for asked in self.asked if asked.until > self.clock.now]

    @rule(number=st.integers(0, 14))
    def comes(self, number: int) -> None:
        """A page is stored, or read."""
        with self.manager.lock:
            self.expire()
            if number in self.there:
                return
            slots = self.index.allocate(1)
            if slots is None:
                assert len(self.index._entries) + len(self.index._leaving) == SLOTS
                return
            self.index.insert(page_of(number), slots[0], PageState.VERIFIED)
            self.ages += 1
            self.there[number] = self.ages
            self.notice()

    def notice(self) -> None:
        """What was evicted is gone."""
        self.there = {n: age for n, age in self.there.items() if page_of(n).key in self.index}

    @rule(road=st.sampled_from(ROADS), seconds=st.integers(1, 5))
    def claim(self, road: tuple[int, ...], seconds: int) -> None:
        with self.manager.lock:
            self.expire()
            held, room, pages, holds = self.held(), self.room(), list[int](), dict[int, list[int]]()
            for number in road:
                there = number in self.there
                new = (number, self.there[number]) not in held if there else number not in self.owed
                if new and room <= 0:
                    break
                room -= new
                pages.append(number)
                if there:
                    holds[number] = [self.there[number]]
                else:
                    self.owed.add(number)
            claim = self.manager.pins.claim([page_of(n) for n in road], seconds, 1, ["cpu"] * len(road))
        assert [page.key[0] for page in claim.pages] == pages
        self.asked.append(Asked(claim, self.clock.now + seconds, pages, holds))

    @rule(data=st.data())
    def lands(self, data: st.DataObject) -> None:
        """The prefetch says that some of its pages are there; it need not be so."""
        self.expire()
        under_way = [asked for asked in self.asked if not asked.settled and asked.pages]
        if not under_way:
            return
        asked = data.draw(st.sampled_from(under_way))
        numbers = data.draw(st.lists(st.integers(0, len(asked.pages) - 1), unique=True))
        if data.draw(st.booleans()):
            for number in numbers:
                self.comes(asked.pages[number])
        with self.manager.lock:
            for number in (asked.pages[i] for i in numbers):
                if number not in self.there or self.there[number] in asked.holds.get(number, ()):
                    continue
                page = number, self.there[number]
                if page in self.held() or number in self.owed or self.room() > 0:
                    asked.holds.setdefault(number, []).append(page[1])
                    self.owed.discard(number)
            self.manager.pins.fill(asked.claim, numbers)

    @rule(data=st.data())
    def settles(self, data: st.DataObject) -> None:
        self.expire()
        if self.asked:
            asked = data.draw(st.sampled_from(self.asked))
            with self.manager.lock, self.letting_go():
                self.manager.pins.keep_run(asked.claim)
                asked.pages = asked.pages[: self.good(asked)]
                asked.holds = {n: ages for n, ages in asked.holds.items() if n in asked.pages}
                asked.settled = True
                assert (asked.claim._lease in self.manager.pins._pins) == bool(asked.pages)
                if not asked.pages:
                    self.asked = [other for other in self.asked if other is not asked]

    @rule(data=st.data())
    def ends(self, data: st.DataObject) -> None:
        self.expire()
        if self.asked:
            with self.letting_go():
                asked = self.asked.pop(data.draw(st.integers(0, len(self.asked) - 1)))
                for _ in range(2):
                    asked.claim.release()
            assert (asked.claim.good, asked.claim.tokens) == (0, 0)

    @rule(number=st.integers(0, 14))
    def drops(self, number: int) -> None:
        """A page is invalidated, or found bad."""
        with self.manager.lock:
            entry = self.index.get(page_of(number).key)
            assert (entry is not None) == (number in self.there)
            if entry is not None:
                self.index.drop(entry)
                del self.there[number]

    @rule()
    def pressed(self) -> None:
        with self.manager.lock:
            self.expire()
            self.index.evict(SLOTS)
            self.notice()
        assert {n for n, age in self.held() if self.there.get(n) == age} == set(self.there)

    @rule(seconds=st.integers(1, 3))
    def waits(self, seconds: int) -> None:
        self.clock.now += seconds

    def good(self, asked: Asked) -> int:
        there = [self.there.get(n) in asked.holds.get(n, ()) for n in asked.pages]
        return there.index(False) if False in there else len(there)

    @invariant()
    def adds_up(self) -> None:
        for asked in self.asked:
            assert asked.claim.good == (self.good(asked) if asked.until > self.clock.now else 0)
        with self.manager.lock:
            self.expire()
            pins, held = self.manager.pins, self.held()
            assert {key[0] for key in pins._promised["cpu"]} == self.expected()
            assert {key[0] for key in pins._owed["cpu"]} == self.owed
            on_time = {n for n, age in held if self.there.get(n) == age}
            at = {entry.slot: entry.key[0] for entry in self.index}
            assert {at[slot] for slot in pins._held["cpu"] if slot not in self.index._leaving} == on_time
            assert len(pins._held["cpu"]) == len(held)
            assert len(held) + len(self.owed) <= SLOTS // 2
            leased = [slot for lease in self.manager._leases for _, _, slots in lease.runs() for slot in slots]
            assert Counter(leased) == pins._held["cpu"]
            assert {entry.slot for entry in self.index if entry.leases} == {*leased} - {*self.index._leaving}
            assert self.index.check() == []
            assert bool(self.manager._leases) == bool(self.asked)


TestClaims = ClaimsMachine.TestCase
# A few steps tell little here, and cost little.
TestClaims.settings = settings(max_examples=max(40, settings.default.max_examples), stateful_step_count=50)


def test_room_of_a_page_is_theirs_who_expect_it_when_it_is_let_go() -> None:
    """Steps that the machine draws too rarely to miss a check of them; and those of the next test."""
    manager, pages = bare_manager(SLOTS, Clock()), [page_of(number) for number in range(SLOTS // 2)]
    pins, index = manager.pins, manager.landing.index
    with manager.lock:
        one, two, three = (pins.claim(some, 60.0, 1, ["cpu"] * len(some)) for some in (pages, pages[:1], pages[:1]))
        index.insert(pages[0], index.take_free(1)[0], PageState.VERIFIED)
        for claim in (one, two):
            pins.fill(claim, [0])
        assert (one.good, two.good) == (1, 1), "no room is left, and a page that is held needs none"
        for claim in (one, two):
            pins.end(claim)
        assert pins.describe() == {"pinned_pages": 0, "promised_pages": 1, "pin_quota_pages": 6}
        pins.fill(three, [0])
        assert pins.describe() == {"pinned_pages": 1, "promised_pages": 0, "pin_quota_pages": 6}


def test_a_page_that_was_dropped_while_it_was_held_has_no_room_for_what_comes_in_its_place() -> None:
    manager, page = bare_manager(SLOTS, Clock()), page_of(0)
    pins, index = manager.pins, manager.landing.index
    with manager.lock:
        claim = pins.claim([page], 60.0, 1, ["cpu"])
        for _ in range(2):
            entry = index.insert(page, index.take_free(1)[0], PageState.VERIFIED)
            pins.fill(claim, [0])
            index.drop(entry)
            pins.claim([page_of(number) for number in range(1, 6)], 60.0, 1, ["cpu"] * 5)
        assert pins.describe() == {"pinned_pages": 1, "promised_pages": 5, "pin_quota_pages": 6}


# -- an engine, against what it says ---------------------------------------------------------------------------------

actions = st.lists(
    st.tuples(
        st.sampled_from(["store", "prefetch", "load", "hit", "release", "press", "clear", "invalidate", "fault"]),
        st.integers(0, 2),
        st.integers(0, 6),
    ),
    max_size=25,
)


@given(actions)
def test_a_load_of_what_is_held_brings_it_whatever_happens(steps: list[tuple[str, int, int]]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        config = make_config(Path(directory), cpu=12, ssd=40, transport=FAULTY)
        host = Host(config, limits=PAGEWISE)
        with host.engine as engine:
            handles: list[Prefetch] = []
            hits: list[tuple[Prefetch, Hit]] = []
            for action, which, pages in steps:
                _step(host, engine, handles, hits, action, which, pages)
                for handle in handles:
                    assert handle.verified <= handle.tokens or not handle.done()
                assert sum(pinned(host)) <= 6
            for handle in handles:
                handle.release()
            assert pinned(host) == (0, 0)
            settle(engine)


def _step(
    host: Host,
    engine: CacheEngine,
    handles: list[Prefetch],
    hits: list[tuple[Prefetch, Hit]],
    action: str,
    which: int,
    pages: int,
) -> None:
    tokens = prompt(7, 2) + prompt(which, pages)  # prompts have two pages in common
    if action == "store":
        host.keep(tokens)
    elif action == "prefetch":
        handles.append(engine.prefetch(tokens, pin=60.0))
        handles[-1].result(WAIT)
    elif action == "fault" and handles:
        with PLAN.rule(Op.READ, Fault.FLIP, skip=pages, times=1):
            handles.append(engine.prefetch(tokens, pin=60.0))
            handles[-1].result(WAIT)
    elif action == "hit" and handles:
        handle = handles[which % len(handles)]
        hits.append((handle, handle.hit()))
    elif action == "load" and hits:
        handle, hit = hits[which % len(hits)]
        there = load(host, hit)
        assert there <= hit.tokens
        assert there >= min(hit.tokens, handle.verified)
    elif action == "release" and handles:
        handles.pop(which % len(handles)).release()
    elif action == "press":
        before = [handle.verified for handle in handles]
        press(host)
        assert [handle.verified for handle in handles] == before
    elif action == "clear":
        engine.clear()
        assert not any(handle.verified for handle in handles)
    elif action == "invalidate":
        engine.invalidate(engine.namespace())
        assert not any(handle.verified for handle in handles)


@pytest.mark.parametrize("seconds", [0.4, *LONG])
@pytest.mark.parametrize("model", [MHA, PACKED], ids=["unpacked", "packed"])
def test_many_threads_load_what_they_hold(open_host: OpenHost, model: dict[str, Any], seconds: float) -> None:
    """Under pressure, clears and damage: what is on its way comes, each byte of it."""
    host = slow_host(open_host, **{"blocks": 256, "cpu": 32, "ssd": 64, **roomy(model, 256)})
    prompts = [prompt(n % 3, 2) + prompt(10 + n, n % 5) for n in range(8)]
    for tokens in prompts:
        host.store(tokens)
    quiet(host.engine)
    over, loads = time.monotonic() + seconds, Counter[int]()
    slots = [host.take(8) for _ in range(6)]

    def work(number: int) -> None:
        rng = random.Random(number)
        while time.monotonic() < over or not (loads.total() or time.monotonic() > over + WAIT):
            if number == len(slots):
                time.sleep(0.01)
                press(host)
                if rng.random() < 0.05:
                    host.engine.clear()
                if rng.random() < 0.3:
                    host.store(rng.choice(prompts))
                continue
            with host.engine.prefetch(rng.choice(prompts), pin=rng.choice([0.01, 60.0])) as prefetch:
                if rng.random() < 0.8:
                    prefetch.result(WAIT)
                hit = prefetch.hit()
                if not hit.tokens:
                    continue
                begun = host.engine.load(hit, slots[number][: len(hit.pages)])
                if rng.random() < 0.5:
                    prefetch.release()
                report = begun.result(WAIT)
                assert report.tokens == begun.tokens
                for page, block in zip(hit.pages[: report.tokens // 4], slots[number], strict=False):
                    assert np.array_equal(read_page(host.planes, host.layout, [block]), host.data(page.key))
                loads[number] += 1

    together(work, len(slots) + 1)
    assert loads.total()
    for blocks in slots:
        host.give(blocks)
    settle(host.engine)
