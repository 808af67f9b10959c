"""Admission to the SSD: counters against exact ones, the budget over every window, refusals and what is said."""

from __future__ import annotations

import itertools
import logging
import random
import re
from fractions import Fraction
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gdscache.config import Config, StoreConfig
from gdscache.errors import CapacityError, InvalidValueError
from gdscache.pages.keys import Page
from gdscache.policies.admission import (
    ADMISSIONS,
    REMEMBERED,
    Admission,
    BloomFilter,
    EnduranceBudget,
    FrequencySketch,
    RecentCounter,
    SecondOffer,
    TinyLFU,
)
from gdscache.runtime.limited_log import LimitedLog
from tests.support.admission_models import DAY, ExactAdmission, ExactBudget, ExactFrequency, ExactRecent
from tests.support.bare_manager import Clock
from tests.support.helpers import MHA, Host, OpenHost, drop_from, kept, layout_of, make_config, prompt, quiet
from tests.support.index_machine import name

NAMESPACE = b"n" * 32
EXTENT = 1 << 20


def page(i: object, parent: bytes = NAMESPACE) -> Page:
    return Page(name(i), parent, NAMESPACE)


def prefix(seed: object, n: int) -> list[Page]:
    """The first `n` pages of a prompt."""
    pages: list[Page] = []
    for i in range(n):
        pages.append(Page(name(seed, i), pages[-1].key if pages else NAMESPACE, NAMESPACE))
    return pages


def gate(
    admission: str = "all",
    slots: int = 64,
    extent: int = EXTENT,
    endurance: int | None = None,
    offers: int = 2,
    log: LimitedLog | None = None,
    clock: Clock | None = None,
) -> Admission:
    return Admission(admission, slots, extent, endurance, clock=clock or Clock(), offers=offers, log=log)


# -- Bloom filter ----------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 400)), st.integers(0, 60), st.sampled_from([8, 16]))
def test_a_bloom_filter_never_forgets(numbers: list[int], keys: int, bits: int) -> None:
    there = BloomFilter(keys, bits)
    added = set()
    for i in numbers:
        known = there.add(name(i))
        assert known or i not in added
        added.add(i)
        assert name(i) in there
    assert all(name(i) in there for i in added)
    there.clear()
    assert not any(name(i) in there for i in range(401))


@pytest.mark.parametrize(("bits", "most"), [(8, 0.06), (16, 0.015)])
@pytest.mark.parametrize("keys", [4096, 1000])
def test_a_full_bloom_filter_is_seldom_wrong(bits: int, most: float, keys: int) -> None:
    there = BloomFilter(keys, bits)
    size = there.nbytes
    for i in range(keys):
        there.add(name(i))
    wrong = sum(name(i) in there for i in range(keys, keys + 10_000))
    assert wrong <= most * 10_000
    assert keys * bits / 8 <= there.nbytes == size < 2 * keys * bits / 8


# -- recent counter --------------------------------------------------------------------------------------------------

_runs = st.lists(st.tuples(st.integers(0, 19), st.integers(1, 40)), max_size=30)


@given(_runs, st.integers(1, 3), st.integers(150, 300))
def test_the_recent_counter_is_an_exact_one_while_keys_are_few(
    runs: list[tuple[int, int]], most: int, period: int
) -> None:
    counter, exact = RecentCounter(period, most), ExactRecent(period, most)
    for i, times in runs:
        for _ in range(times):
            assert counter.add(name(i)) == exact.add(name(i))


@given(st.lists(st.integers(0, 60), max_size=300), st.integers(1, 3), st.integers(0, 20))
def test_the_recent_counter_never_counts_too_few(numbers: list[int], most: int, period: int) -> None:
    """However crowded its filters are. 200 other names first, so that they are."""
    counter, exact = RecentCounter(period, most), ExactRecent(max(1, period), most)
    for i in itertools.chain(range(100, 300), numbers):
        assert exact.add(name(i)) <= counter.add(name(i)) <= most


def test_an_add_is_remembered_for_one_period_and_forgotten_after_two() -> None:
    """Whenever in a generation it comes."""
    period = 64
    for at in range(period):
        for between, known in ((period - 1, True), (2 * period, False)):
            counter = RecentCounter(period)
            numbers = itertools.count()
            for _ in range(at):
                counter.add(name("before", next(numbers)))
            assert counter.add(name("it")) == 0
            for _ in range(between):
                counter.add(name("between", next(numbers)))
            assert (counter.add(name("it")) == 1) is known, (at, between)


@given(st.lists(st.integers(0, 200), max_size=30), st.integers(1, 300))
def test_many_keys_at_once_are_added_as_one_by_one(sizes: list[int], period: int) -> None:
    """Over the ends of generations, too."""
    many, each, numbers = RecentCounter(period), RecentCounter(period), itertools.count()
    for size in sizes:
        keys = [name(next(numbers)) for _ in range(size)]
        many.add_all(keys)
        for key in keys:
            each.add(key)
        assert many.dump() == each.dump()
        assert many.added == each.added


@pytest.mark.parametrize("most", [1, 4])
def test_the_recent_counter_has_the_memory_that_it_says(most: int) -> None:
    counter = RecentCounter(1000, most)
    size = counter.nbytes
    for i in range(5000):
        counter.add(name(i))
    assert 4 * most * 1000 <= counter.nbytes == size <= 8 * most * 1000


# -- frequency sketch ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_the_sketch_is_halved_when_an_exact_counter_is(seed: int) -> None:
    """20 names through many halvings, some used far more often than others."""
    draw = random.Random(seed)
    sketch, exact = FrequencySketch(20), ExactFrequency(200)
    for _ in range(2000):
        keys = [name(int(20 * draw.random() ** 3))]
        sketch.add(keys)
        exact.add(keys)
        assert [sketch.count(name(j)) for j in range(20)] == [exact.count(name(j)) for j in range(20)]
    assert exact.halvings >= 15


@pytest.mark.parametrize("seed", range(4))
def test_the_sketch_never_counts_too_few_and_seldom_too_many(seed: int) -> None:
    """300 slots, 20,000 names, some used far more often than others, through several halvings."""
    draw = random.Random(seed)
    sketch, exact = FrequencySketch(300), ExactFrequency(3000)
    names = [name(seed, i) for i in range(20_000)]
    for _ in range(120):
        keys = [names[int(len(names) * draw.random() ** 6)] for _ in range(100)]
        sketch.add(keys)
        exact.add(keys)
        assert all(sketch.count(key) >= exact.count(key) for key in keys)
    assert exact.halvings >= 4
    errors = [sketch.count(key) - exact.count(key) for key in names]
    assert min(errors) >= 0
    assert sum(error >= 2 for error in errors) <= 0.02 * len(names)
    assert sum(error >= 1 for error in errors) <= 0.12 * len(names)


def test_the_sketch_has_the_memory_that_it_says() -> None:
    for slots in (1024, 3000, 5000):
        sketch = FrequencySketch(slots)
        size = sketch.nbytes
        assert 18 * slots <= size <= 36 * slots
        sketch.add(name(i) for i in range(3 * slots))
        assert sketch.nbytes == size
    assert FrequencySketch(1).nbytes < 5 << 10


# -- endurance -------------------------------------------------------------------------------------------------------

_steps = st.lists(
    st.tuples(st.sampled_from([0, 0, 1, 60, 977, 3600, 40_000, DAY, 5 * DAY]), st.integers(0, 300), st.booleans()),
    max_size=40,
)


@given(st.integers(8, 2000), _steps)
def test_no_window_ever_has_more_than_the_budget_allows(daily: int, steps: list[tuple[int, int, bool]]) -> None:
    """Every window of the run, of a day or of any other length; what was given back does not count."""
    clock = Clock()
    budget, exact = EnduranceBudget(daily, clock), ExactBudget(daily, Fraction(10**9))
    taken: list[list[int]] = []  # when, how much
    for seconds, nbytes, given_back in steps:
        clock.now += seconds
        now = Fraction(int(clock.now))
        assert budget.left() == int(exact.at(now))
        took = budget.take(nbytes)
        assert took is exact.take(nbytes, now)
        if took and given_back:
            clock.now += 7
            budget.give_back(nbytes)
            exact.give_back(nbytes, now + 7)
        elif took:
            taken.append([int(clock.now), nbytes])
    for first in range(len(taken)):
        total = 0
        for last in range(first, len(taken)):
            total += taken[last][1]
            days = Fraction(taken[last][0] - taken[first][0], DAY)
            assert total <= Fraction(daily // 8) + (daily - daily // 8) * days
            if days <= 1:
                assert total <= daily


def test_a_clock_that_goes_back_gives_nothing() -> None:
    clock = Clock()
    budget = EnduranceBudget(800, clock)
    assert budget.take(100)
    clock.now -= 500
    assert budget.left() == 0
    clock.now += 500 + DAY // 700 + 1  # the time of one byte
    assert budget.left() == 1


# -- policies --------------------------------------------------------------------------------------------------------


def test_the_table_and_the_configuration_name_the_same_policies() -> None:
    assert set(ADMISSIONS) == set(get_args(StoreConfig.model_fields["admission"].annotation))
    assert all(cls(8, 2).name == key for key, cls in ADMISSIONS.items())


def test_all_lets_everything_in() -> None:
    admission = gate()
    assert not admission.policy.asks_victim
    assert not admission.refuses
    assert gate(endurance=8 * EXTENT).refuses
    assert gate(admission="tinylfu").refuses
    assert [admission.admit(page(i), name("victim")) for i in range(100)] == [""] * 100
    assert admission.describe() == {
        "policy": "all", "memory_bytes": 0, "admitted": 100, "refused": {}, "endurance": None,
    }  # fmt: skip


# -- prefix ----------------------------------------------------------------------------------------------------------


def test_refused_pages_are_remembered_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gdscache.policies.admission.REFUSED_KEPT", 3)
    admission = Admission("second_offer", 64, EXTENT)
    parents = [page(i) for i in range(5)]
    children = [page(("child", i), parent.key) for i, parent in enumerate(parents)]
    for child in children:
        admission.admit(child)
    admission.use([child.key for child in children])
    for parent in parents:
        admission.admit(parent)
    assert [admission.admit(child) for child in reversed(children)] == ["no_prefix", "no_prefix", "", "", ""]


# -- all of it against a model ---------------------------------------------------------------------------------------

_pages = st.integers(0, 11)  # of three prompts of four pages
_operations = st.lists(
    st.one_of(
        st.tuples(st.just("use"), st.lists(_pages, max_size=5, unique=True)),
        st.tuples(st.just("admit"), st.tuples(_pages, st.none() | _pages, st.booleans())),
        st.tuples(st.just("store"), st.tuples(st.integers(0, 2), st.none() | _pages)),
        st.tuples(st.just("sleep"), st.sampled_from([1, 3600, DAY // 7, 2 * DAY])),
        st.tuples(st.just("not_written"), st.integers(0, 2)),
    ),
    max_size=40,
)


@given(st.sampled_from(sorted(ADMISSIONS)), st.integers(2, 3), st.none() | st.integers(8, 60), _operations)
def test_the_gate_is_its_model(
    policy: str, offers: int, daily: int | None, operations: list[tuple[str, object]]
) -> None:
    slots, clock = 20, Clock()
    pages = [p for seed in range(3) for p in prefix(seed, 4)]
    endurance = None if daily is None else daily * 10
    admission = Admission(policy, slots, 10, endurance, offers=offers, clock=clock)
    model = ExactAdmission(
        policy, offers, ExactRecent(REMEMBERED * slots, offers - 1), ExactFrequency(10 * slots), 4096
    )
    if endurance is not None:
        model.budget = ExactBudget(endurance, Fraction(10**9))
    answers: list[str] = []

    def admit(i: int, victim: int | None, room: bool) -> None:
        gone = None if victim is None else pages[victim].key
        answers.append(admission.admit(pages[i], gone, room=room))
        assert answers[-1] == model.admit(pages[i], gone, room, 10, Fraction(int(clock.now)))

    for what, given_ in operations:
        match what, given_:
            case "use", list(numbers):
                keys = [pages[i].key for i in numbers]
                assert admission.use(keys) == model.use(keys)
            case "admit", (int(i), victim, bool(room)):
                admit(i, victim, room)
            case "store", (int(seed), victim):
                for i in range(4 * seed, 4 * seed + 4):
                    admit(i, victim, True)
            case "sleep", int(seconds):
                clock.now += seconds
            case "not_written", int(n):
                admission.not_written(n)
                if model.budget is not None:
                    model.budget.give_back(10 * n, Fraction(int(clock.now)))
    described = admission.describe()
    assert described["admitted"] == answers.count("")
    assert described["refused"] == {cause: answers.count(cause) for cause in set(answers) - {""}}
    assert (described["endurance"] is None) is (endurance is None)


# -- what is said ----------------------------------------------------------------------------------------------------


def test_each_cause_is_said_once_a_minute_with_figures_and_the_setting(caplog: pytest.LogCaptureFixture) -> None:
    log = LimitedLog()
    admission = gate(slots=100, admission="second_offer", offers=3, endurance=16 * EXTENT, log=log)
    pages = prefix(1, 5)
    with caplog.at_level(logging.WARNING):
        for _ in range(10):
            for p in pages:
                admission.admit(p)
    assert set(admission.refused) == {"second_offer", "endurance", "no_prefix"}
    assert all(n > 1 for n in admission.refused.values())
    log.flush()
    assert len(caplog.records) == 3
    assert {(r.name, r.levelno) for r in caplog.records} == {("gdscache.store", logging.WARNING)}
    said = {next(cause for cause in admission.refused if f"({cause})" in r.message): r.message for r in caplog.records}
    for cause, parts in {
        "second_offer": ("fewer than 3 times", "400 offers", "store.admission is second_offer", "set it to all"),
        "endurance": ("needs 1 MiB", "0 bytes left of 16 MiB a day", "597 KiB more each hour", "ssd.endurance"),
        "no_prefix": ("10 for second_offer", "1 for endurance", "store.admission", "ssd.endurance"),
    }.items():
        for part in parts:
            assert part in said[cause], said[cause]


def test_tinylfu_says_how_often_both_were_used(caplog: pytest.LogCaptureFixture) -> None:
    log = LimitedLog()
    admission = gate(admission="tinylfu", log=log)
    admission.use([name("there")] * 5 + [page(1).key])
    for _ in range(3):
        admission.admit(page(1), name("there"))
    log.flush()
    assert len(caplog.records) == 1
    for part in ("(tinylfu)", "used 1 times", "go 5 times", "store.admission", "ssd.capacity"):
        assert part in caplog.text


def test_a_lack_of_room_is_said_once_with_the_settings_and_costs_no_budget(caplog: pytest.LogCaptureFixture) -> None:
    log = LimitedLog()
    admission = gate(endurance=8 * EXTENT, log=log)
    assert [admission.admit(p, room=False) for p in prefix(1, 3)] == ["queue_full"] * 3
    log.flush()
    assert len(caplog.records) == 1
    for part in ("(queue_full)", "more slowly", "store.queue", "cpu.capacity", "store.admission"):
        assert part in caplog.text
    assert admission.describe()["endurance"]["left_bytes"] == EXTENT


# -- in an engine ----------------------------------------------------------------------------------------------------


def on_ssd(host: Host, tokens: list[int]) -> int:
    """The pages of a prompt that the SSD alone gives back, bytes compared."""
    quiet(host.engine)
    drop_from(host.engine, "cpu")
    report = host.load(tokens)
    assert set(report.bytes_by_tier) <= {"ssd"}
    quiet(host.engine)
    return report.tokens // 4


def test_an_engine_writes_a_page_at_its_second_offer(open_host: OpenHost) -> None:
    host = open_host(cpu=8, ssd=16, store={"admission": "second_offer"})
    tokens = prompt(1, 5)
    host.store(tokens)
    assert on_ssd(host, tokens) == 0
    assert host.engine.stats()["refused"] == {"second_offer": 5}
    host.store(tokens)
    assert on_ssd(host, tokens) == 5
    assert host.engine.stats()["refused"] == {"second_offer": 5}


def test_an_engine_writes_a_head_and_no_tail_when_its_budget_ends(open_host: OpenHost) -> None:
    extent = layout_of(MHA).extent_bytes
    host = open_host(cpu=8, ssd=16, ssd_options={"endurance": 3 * 8 * extent})
    tokens = prompt(1, 6)
    host.store(tokens)
    assert on_ssd(host, tokens) == 3
    assert host.engine.stats()["refused"] == {"endurance": 1, "no_prefix": 2}
    assert host.engine.stats()["tiers"]["ssd"]["pages"] == 3


def test_an_engine_keeps_what_is_used_often(open_host: OpenHost) -> None:
    """Six prompts that nobody asks for again pass by a full SSD whose pages are loaded all the time."""
    host = open_host(cpu=4, ssd=8, store={"admission": "tinylfu"})
    hot = [prompt(1, 4), prompt(2, 4)]
    for tokens in hot:
        host.keep(tokens)
    for _ in range(3):
        for tokens in hot:
            host.load(tokens)
    for seed in range(3, 9):
        host.keep(prompt(seed, 2))
    assert [on_ssd(host, tokens) for tokens in hot] == [4, 4]
    stats = host.engine.stats()
    assert stats["stored"]["ssd"] == 8
    assert sum(stats["refused"].values()) == 12
    assert stats["refused"]["tinylfu"] >= 6


# -- configuration ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("store.admission", "third_offer"), ("store.admission", None), ("ssd.endurance", "1T"), ("ssd.endurance", -1),
        ("ssd.endurance", True),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(tmp_path: Path, option: str, value: object) -> None:
    section, key = option.split(".")
    data = make_config(tmp_path)
    data[section][key] = value
    with pytest.raises(InvalidValueError, match=re.escape(option)):
        Config.from_dict(data)


def test_a_budget_that_no_page_fits_into_is_refused_with_the_figures(tmp_path: Path) -> None:
    data = make_config(tmp_path)
    extent = layout_of(data["model"]).extent_bytes
    with pytest.raises(CapacityError) as caught:
        Config.from_dict(make_config(tmp_path, ssd_options={"endurance": 8 * extent - 1}))
    for part in ("ssd.endurance", f"{8 * extent - 1:,}", "an eighth", "64KiB"):
        assert part in str(caught.value)
    config = Config.from_dict(make_config(tmp_path, ssd_options={"endurance": 8 * extent}))
    assert Admission("all", 12, extent, config.ssd.endurance, clock=Clock()).admit(page(1)) == ""


def test_the_settings_reach_the_policy() -> None:
    assert gate().describe()["policy"] == "all"
    offers = gate("second_offer", slots=10, offers=4).describe()
    assert (offers["offers"], offers["remembered_offers"]) == (4, 10 * REMEMBERED)
    assert gate(endurance=10**12).describe()["endurance"]["bytes_per_day"] == 10**12
    assert isinstance(ADMISSIONS["second_offer"](1, 2), SecondOffer)
    assert isinstance(ADMISSIONS["tinylfu"](1, 2), TinyLFU)


def test_every_tier_behind_the_cpu_tier_has_the_admission(open_host: OpenHost) -> None:
    tier = {"tier": "tests.support.dict_tier:DictTier", "capacity": 16 * layout_of(MHA).extent_bytes}
    host, _ = kept(open_host, 3, cpu=8, ssd=16, store={"admission": "second_offer"}, tiers=[tier])
    assert host.engine.stats()["refused"] == {"second_offer": 6}
    outlets = host.engine._parts.storer._planner.outlets
    assert [outlet.admission.describe()["policy"] for outlet in outlets] == ["second_offer"] * 2
