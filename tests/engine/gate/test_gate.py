"""Load or recompute: figures are learned whatever the noise, no other cut is better, and a gate never gets stuck."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gdscache import CacheEngine, Config, PageHashes
from gdscache.errors import InvalidValueError
from gdscache.gate.busy_periods import BusyPeriods
from gdscache.gate.costs import Costs, Prices
from gdscache.gate.fit import CHANGE, ENOUGH, Fit
from gdscache.gate.gate import EXPLORE_EVERY, Gate, GateMode
from gdscache.moves import native
from gdscache.storage.base import Op
from tests.support.faulty import PLAN, Fault
from tests.support.helpers import WAIT, drop_from, fill, kept, prompt, quiet, together, until
from tests.support.pages import FAULTY

PAGE_TOKENS, PAGE_BYTES = 64, 1 << 20
Opens = Callable[..., Any]


class Machine:
    """What loads and prefills truly take."""

    def __init__(
        self, tiers: dict[str, tuple[float, float]], prefill: tuple[float, float, float], overlap: float = 0.0
    ) -> None:
        """`tiers`: seconds a byte, and to begin; `prefill`: seconds a token, a pair of tokens, a step."""
        self.tiers, self.prefill, self.overlap = {"gpu": (0.0, 0.0), **tiers}, prefill, overlap

    @classmethod
    def drawn(cls, rng: random.Random) -> Machine:
        tiers = {name: (10 ** rng.uniform(-10.5, -8.5), 10 ** rng.uniform(-4, -2)) for name in ("cpu", "ssd")}
        return cls(tiers, (10 ** rng.uniform(-5, -4), 10 ** rng.uniform(-10, -9), rng.choice((0.0, 0.004))))

    def load(self, tier: str, nbytes: int) -> float:
        per_byte, begin = self.tiers[tier]
        return begin + nbytes * per_byte

    def compute(self, tokens: int, cached: int) -> float:
        token, pair, step = self.prefill
        return step + tokens * token + tokens * (cached + tokens / 2) * pair if tokens else 0.0

    def total(self, tiers: Sequence[str], pages: int, start: int, tokens: int, ahead: dict[str, int]) -> float:
        """Seconds for a request of which the first `pages` pages behind `start` are loaded."""
        load = sum(
            self.load(tier, (n + ahead.get(tier, 0)) * PAGE_BYTES) if tier != "gpu" else 0.0
            for tier, n in Counter(tiers[:pages]).items()
        )
        cached = start + pages * PAGE_TOKENS
        rest = self.compute(tokens - cached, cached)
        return load + rest - self.overlap * min(load, rest)

    def known(self) -> Costs:
        """Costs that have nothing to learn."""
        costs = Costs()
        for name in self.tiers.keys() - {"gpu"}:
            costs.observe_load(name, 1, 1.0)
            costs.tiers[name].coefficients, costs.tiers[name].observations = self.tiers[name], ENOUGH
        costs.prefill.coefficients, costs.prefill.observations = self.prefill, ENOUGH
        costs.overlap = self.overlap
        return costs

    def report(self, costs: Costs, rng: random.Random, n: int, noise: float = 0.0, strays: float = 0.0) -> None:
        """`n` loads from each tier and `n` prefills; of each the time is noisy, or a stray."""

        def took(seconds: float) -> float:
            if rng.random() < strays:
                return seconds * rng.choice((0.05, 4.0, 20.0))
            return seconds * rng.lognormvariate(0.0, noise)

        for _ in range(n):
            for tier in self.tiers.keys() - {"gpu"}:
                nbytes = int(2 ** rng.uniform(0, 9)) * PAGE_BYTES
                costs.observe_load(tier, nbytes, took(self.load(tier, nbytes)))
            tokens, cached = int(2 ** rng.uniform(5, 13)), rng.choice((0, 0, 4096, rng.randrange(60000)))
            costs.observe_prefill(tokens, cached, took(self.compute(tokens, cached)))


def bytes_in(tier: str) -> int:
    return PAGE_BYTES


def prices_of(costs: Costs, tiers: Sequence[str], start: int, tokens: int, ahead: dict[str, int]) -> Prices:
    return Prices(costs, tiers, bytes_in, ahead, start, tokens, PAGE_TOKENS)


# -- the cut -----------------------------------------------------------------------------------------------------------

prices = st.one_of(st.just(0.0), st.floats(1e-12, 1e-6))
entries = st.one_of(st.just(0.0), st.floats(1e-6, 1.0))
machines = st.builds(
    Machine,
    st.fixed_dictionaries({name: st.tuples(prices, entries) for name in ("cpu", "ssd")}),
    st.tuples(st.floats(0, 1e-3), st.floats(0, 1e-7), st.floats(0, 0.1)),
    st.one_of(st.just(0.0), st.just(1.0), st.floats(0, 1)),
)
hits = st.one_of(
    st.lists(st.sampled_from(("gpu", "cpu", "ssd")), max_size=40),
    st.tuples(st.integers(0, 9), st.integers(0, 30), st.integers(0, 30)).map(
        lambda n: ["gpu"] * n[0] + ["cpu"] * n[1] + ["ssd"] * n[2]
    ),
)


@given(
    machines,
    hits,
    st.integers(0, 50),
    st.integers(0, 5000),
    st.dictionaries(st.sampled_from(("cpu", "ssd")), st.integers(0, 99)),
)
def test_no_other_cut_is_better(
    machine: Machine, tiers: list[str], before: int, more: int, ahead: dict[str, int]
) -> None:
    start = before * PAGE_TOKENS
    tokens = start + len(tiers) * PAGE_TOKENS + more
    found = prices_of(machine.known(), tiers, start, tokens, ahead)
    totals = [machine.total(tiers, k, start, tokens, ahead) for k in range(len(tiers) + 1)]
    for k, total in enumerate(totals):
        assert found.total(k) == pytest.approx(total, rel=1e-9, abs=1e-12)
    best = found.best()
    assert totals[best] == pytest.approx(min(totals), rel=1e-9, abs=1e-12)
    on_gpu = next((i for i, tier in enumerate(tiers) if tier != "gpu"), len(tiers))
    assert best >= on_gpu  # what costs nothing is kept


@given(hits, st.integers(0, 5000), st.floats(0, 1))
def test_a_free_load_is_never_cut(tiers: list[str], more: int, overlap: float) -> None:
    costs = Machine({"cpu": (0.0, 0.0), "ssd": (0.0, 0.0)}, (1e-5, 1e-9, 0.0), overlap).known()
    tokens = len(tiers) * PAGE_TOKENS + more
    assert prices_of(costs, tiers, 0, tokens, {"ssd": 1000}).best() == len(tiers)


def a_cut(machine: Machine, costs: Costs, rng: random.Random) -> tuple[int, list[float]]:
    """The best cut of a hit by the learned costs, and what each cut truly takes."""
    tiers = ["cpu"] * rng.randrange(60) + ["ssd"] * rng.randrange(120)
    tokens = len(tiers) * PAGE_TOKENS + rng.randrange(1, 4000)
    best = prices_of(costs, tiers, 0, tokens, {}).best()
    return best, [machine.total(tiers, k, 0, tokens, {}) for k in range(len(tiers) + 1)]


# -- learning ----------------------------------------------------------------------------------------------------------


@given(st.integers(0, 10**9))
def test_after_some_observations_the_cut_is_within_a_page_of_the_best(seed: int) -> None:
    rng = random.Random(seed)
    machine, costs = Machine.drawn(rng), Costs()
    machine.report(costs, rng, 24)
    for _ in range(5):
        best, totals = a_cut(machine, costs, rng)
        truly = min(range(len(totals)), key=totals.__getitem__)
        assert abs(best - truly) <= 1 or totals[best] <= 1.001 * totals[truly]  # else the two are as good


@pytest.mark.parametrize("seed", range(12))
def test_noise_and_strays_cost_little(seed: int) -> None:
    rng = random.Random(seed)
    machine, costs = Machine.drawn(rng), Costs()
    machine.report(costs, rng, 60, noise=0.15, strays=0.1)
    for tier, fit in costs.tiers.items():
        for pages in (4, 64, 512):
            assert fit.seconds((pages * PAGE_BYTES, 1.0)) == pytest.approx(
                machine.load(tier, pages * PAGE_BYTES), rel=0.3
            )
        counts = fit.errors.describe()["counts"]  # up to 0.01, 0.03, 0.1, 0.3, ...
        assert 2 * sum(counts[:1]) < sum(counts) < 2 * sum(counts[:4])
    for _ in range(20):
        best, totals = a_cut(machine, costs, rng)
        assert totals[best] <= 1.25 * min(totals)


def loads(latency: float, per_byte: float, n: int, fit: Fit) -> None:
    for i in range(n):
        nbytes = (1 + 7 * i % 11) * 1e6
        fit.observe((nbytes, 1.0), latency + nbytes * per_byte)


def new_fit() -> Fit:
    costs = Costs()
    costs.observe_load("ssd", 1000000, 1.0)
    fit = costs.tiers["ssd"]
    return Fit(2, fit._usable)


def test_one_stray_moves_nothing_and_a_change_is_followed() -> None:
    fit = new_fit()
    loads(0.01, 1e-8, 30, fit)
    assert fit.coefficients == pytest.approx((1e-8, 0.01), rel=0.01)
    fit.observe((5e6, 1.0), 100.0)
    assert fit.coefficients == pytest.approx((1e-8, 0.01), rel=0.02)
    fit.observe((5e6, 1.0), 1e-6)
    assert fit.coefficients == pytest.approx((1e-8, 0.01), rel=0.03)
    assert fit.off == -1
    loads(0.001, 1e-9, ENOUGH - 1, fit)
    assert fit.off == 0  # it has forgotten
    assert fit.seconds((5e6, 1.0)) == pytest.approx(0.006, rel=0.5)
    loads(0.001, 1e-9, 20, fit)
    assert fit.coefficients == pytest.approx((1e-9, 0.001), rel=0.02)


def test_a_slow_drift_is_followed_too() -> None:
    fit, factor = new_fit(), 1.0
    for _ in range(200):
        loads(0.01 * factor, 1e-8 * factor, 1, fit)
        factor *= 1.005
        assert abs(fit.off) < ENOUGH
    expected = fit.seconds((1e6, 1.0))
    assert 0.02 * factor / CHANGE < expected <= 0.02 * factor


def test_loads_of_one_size_say_nothing_of_what_a_load_costs_to_begin() -> None:
    fit = new_fit()
    for _ in range(20):
        fit.observe((1e6, 1.0), 0.5)
    assert fit.coefficients == pytest.approx((5e-7, 0.0))


def test_what_is_dear_to_begin_does_not_make_bytes_free() -> None:
    fit = new_fit()
    for i in range(1, 30):
        fit.observe((i * 1e6, 1.0), 0.5)
    assert fit.coefficients[0] > 0
    assert fit.seconds((29e6, 1.0)) == pytest.approx(0.5, rel=0.1)


def test_what_says_nothing_is_not_learned() -> None:
    costs = Costs()
    for nbytes, seconds in ((0, 1.0), (-1, 1.0), (10, 0.0), (10, -1.0), (10, math.inf), (10, math.nan)):
        costs.observe_load("ssd", nbytes, seconds)
    assert costs.tiers == {}


def test_overlap_is_learned_from_prefills_beside_a_load() -> None:
    costs = Machine({"ssd": (1e-9, 0.0)}, (1e-3, 0.0, 0.0)).known()
    for _ in range(ENOUGH - 1):
        costs.observe_prefill(100, 0, 0.12, load_seconds=0.08)  # 0.1 by itself
    costs.observe_prefill(100, 0, 5.0, load_seconds=0.001)  # a load that is too short to tell
    assert costs.overlap == 0.0
    costs.observe_prefill(100, 0, 0.12, load_seconds=0.08)
    assert costs.overlap == pytest.approx(0.75)
    assert costs.prefill.coefficients == (1e-3, 0.0, 0.0)  # it learned nothing of prefills


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((0, 0, 1.0), "tokens"), ((1.5, 0, 1.0), "tokens"), ((8, -1, 1.0), "cached_tokens"), ((8, 0, 0.0), "seconds"),
        ((8, 0, math.nan), "seconds"), ((8, 0, 1.0, 0.0), "load_seconds"), ((8, 0, 1.0, math.nan), "load_seconds"),
    ],
)  # fmt: skip
def test_prefills_that_cannot_be(arguments: Any, named: str) -> None:
    costs = Costs()
    with pytest.raises(InvalidValueError, match=f"^{named} is "):
        costs.observe_prefill(*arguments)
    assert costs.prefill.observations == 0


# -- the gate ----------------------------------------------------------------------------------------------------------

SLOW = Machine(
    {"cpu": (1e-11, 0.0), "ssd": (1e-6, 0.0)}, (1e-5, 0.0, 0.0)
)  # a page: 1 s from the SSD, 0.64 ms computed


def gate_of(mode: GateMode, costs: Costs) -> Gate:
    return Gate(mode, costs, PAGE_TOKENS, bytes_in)


@pytest.mark.parametrize("mode", ["advisory", "enforcing"])
def test_it_only_advises_until_both_sides_are_measured(mode: GateMode) -> None:
    costs = Costs()
    gate, tiers = gate_of(mode, costs), ["cpu"] * 3 + ["ssd"] * 5
    assert gate.decide(tiers, 0, 600, {}) == (8, 8, None, None)
    for _ in range(ENOUGH - 1):
        SLOW.report(costs, random.Random(1), 1)
        decision = gate.decide(tiers, 0, 600, {})
        assert decision[:2] == (8, 8)
        assert decision.seconds is not None
        assert decision.recompute_seconds is not None
    SLOW.report(costs, random.Random(1), 1)
    decision = gate.decide(tiers, 0, 600, {})
    assert decision[:2] == ((3 if mode == "enforcing" else 8), 3)
    assert gate.stats()["hits"] == {"loaded": 0, "cut": 1, "declined": 0, "explored": 0, "unmeasured": ENOUGH}
    assert gate.stats()["tokens"] == {
        "loaded": 3 * PAGE_TOKENS, "declined": 5 * PAGE_TOKENS, "explored": 0, "unmeasured": ENOUGH * 8 * PAGE_TOKENS,
    }  # fmt: skip


def test_seconds_are_those_of_what_is_left() -> None:
    gate = gate_of("enforcing", SLOW.known())
    decision = gate.decide(["cpu"] * 3 + ["ssd"] * 5, 0, 640, {"cpu": 2})
    assert decision.seconds == pytest.approx(5 * PAGE_BYTES * 1e-11)
    assert decision.recompute_seconds == pytest.approx(3 * PAGE_TOKENS * 1e-5)


def test_every_64th_hit_that_is_declined_is_tried() -> None:
    gate = gate_of("enforcing", SLOW.known())
    pages = [gate.decide(["ssd"] * 5, 0, 600, {}).pages for _ in range(3 * EXPLORE_EVERY)]
    assert [i + 1 for i, n in enumerate(pages) if n] == [EXPLORE_EVERY * k for k in (1, 2, 3)]
    assert set(pages) == {0, 1}  # as little as there is: a page takes far longer than computing all
    assert gate.stats()["hits"] == {
        "loaded": 0, "cut": 0, "declined": 3 * EXPLORE_EVERY - 3, "explored": 3, "unmeasured": 0
    }  # fmt: skip
    assert gate.stats()["pages"]["explored"] == 3
    loaded = gate_of("enforcing", SLOW.known())
    for _ in range(3 * EXPLORE_EVERY):
        assert loaded.decide(["cpu"] * 5, 0, 600, {}).pages == 5
    assert loaded.stats()["hits"]["explored"] == 0


def test_a_trial_takes_no_more_than_half_of_computing_the_hit() -> None:
    machine = Machine({"ssd": (1e-9, 0.1)}, (1e-5, 0.0, 0.0))
    gate = gate_of("enforcing", machine.known())
    [trial] = [d for _ in range(EXPLORE_EVERY) if (d := gate.decide(["ssd"] * 140, 0, 9000, {})).pages]
    assert trial.pages == 1  # 0.1 s to begin, 90 ms to compute all: one page is more than that ...
    machine = Machine({"ssd": (1e-9, 0.02)}, (1.2e-5, 0.0, 0.0))
    gate = gate_of("enforcing", machine.known())
    [trial] = [d for _ in range(EXPLORE_EVERY) if (d := gate.decide(["ssd"] * 100, 0, 6400, {})).pages]
    assert 1 < trial.pages < 100
    assert trial.seconds <= 0.5 * 6400 * 1.2e-5 < trial.seconds + PAGE_BYTES * 1e-9


def test_a_disk_that_got_fast_is_used_soon() -> None:
    rng, costs = random.Random(3), Costs()
    SLOW.report(costs, rng, 30)
    gate, asked, tiers = gate_of("enforcing", costs), 0, ["ssd"] * 50
    while (pages := gate.decide(tiers, 0, 3201, {}).pages) < 50:
        asked += 1
        assert asked < EXPLORE_EVERY + 20
        if pages:
            costs.observe_load("ssd", pages * PAGE_BYTES, 1e-4 + pages * PAGE_BYTES * 1e-10)
    assert gate.stats()["hits"]["explored"] >= ENOUGH


def test_a_disk_that_got_slow_is_dropped_at_once() -> None:
    rng, costs = random.Random(3), Costs()
    Machine({"ssd": (1e-10, 1e-4)}, SLOW.prefill).report(costs, rng, 60)
    gate = gate_of("enforcing", costs)
    loaded = 0
    while pages := gate.decide(["ssd"] * 50, 0, 3201, {}).pages:
        costs.observe_load("ssd", pages * PAGE_BYTES, pages * PAGE_BYTES * 1e-6)
        loaded += 1
    assert loaded <= ENOUGH


@given(st.lists(hits, max_size=30), st.sampled_from(("advisory", "enforcing")), machines)
def test_counts_add_up(many: list[list[str]], mode: GateMode, machine: Machine) -> None:
    gate, below, kept = gate_of(mode, machine.known()), 0, 0
    for tiers in many * 5:
        decision = gate.decide(tiers, 0, len(tiers) * PAGE_TOKENS + 1, {})
        below += len(tiers) - tiers.count("gpu")
        kept += decision.pages - tiers[: decision.pages].count("gpu")
        assert decision.worth <= len(tiers)
        assert decision.pages == len(tiers) or mode == "enforcing"
    stats = gate.stats()
    assert sum(stats["hits"].values()) == sum(set(tiers) > {"gpu"} or bool(set(tiers) - {"gpu"}) for tiers in many * 5)
    assert sum(stats["pages"].values()) == below
    assert stats["tokens"] == {kind: n * PAGE_TOKENS for kind, n in stats["pages"].items()}
    if mode == "enforcing":
        assert stats["pages"]["loaded"] + stats["pages"]["explored"] == kept
    else:
        assert stats["hits"]["explored"] == 0
        assert kept == below


def test_many_threads_report_and_decide() -> None:
    costs = Costs()
    gate = gate_of("enforcing", costs)

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(60):
            SLOW.report(costs, rng, 1)
            assert gate.decide(["ssd"] * 4, 0, 300, {}).pages in (0, 1, 4)
            gate.stats()

    together(work, 4)
    assert costs.prefill.observations == costs.tiers["ssd"].observations == 240
    assert sum(gate.stats()["hits"].values()) == 240


# -- in an engine ------------------------------------------------------------------------------------------------------


def test_what_is_under_way_is_counted_exactly(open_host: Opens) -> None:
    host = open_host(transport=FAULTY, cpu=8, ssd=16)
    host.store(prompt(1, 4))
    host.keep(prompt(2, 3))
    planner = host.engine.loader.planner
    assert not any(planner.under_way.values())
    drop_from(host.engine, "cpu")
    with PLAN.rule(Op.READ, Fault.HANG) as rule:
        first = host.begin(prompt(1, 4))
        assert planner.under_way["ssd"] == 4
        second = host.begin(prompt(1, 4))  # waits for the first one's pages, in the CPU tier
        assert (planner.under_way["cpu"], planner.under_way["ssd"]) == (4, 4)
        third = host.begin(prompt(2, 3))
        assert planner.under_way["ssd"] == 7
        plan = planner.plan([host.engine.pages(prompt(2, 3))], "test")
        assert planner.under_way["cpu"] == 7
        for _ in range(2):  # the second changes nothing
            planner.end(plan)
            assert planner.under_way["cpu"] == 4
        third[0].cancel()
        rule.release()
    for begun in (first, second, third):
        host.finish(*begun)
    assert not any(planner.under_way.values())
    drop_from(host.engine, "cpu")
    with PLAN.rule(Op.READ, Fault.HANG) as rule:
        prefetch = host.engine.prefetch(prompt(1, 4))
        until(lambda: planner.under_way["ssd"] > 0, "the prefetch reads")
        rule.release()
        prefetch.result(WAIT)
    until(lambda: not any(planner.under_way.values()), "nothing is under way")
    drop_from(host.engine, "cpu")
    with PLAN.rule(Op.READ, Fault.EIO):
        assert host.load(prompt(1, 4)).tokens == 0
    assert not any(planner.under_way.values())


def test_an_engine_learns_behind_its_loads(open_host: Opens) -> None:
    """Without being asked, and not before their verdict."""
    host, tokens = kept(open_host, 4, cpu=8, ssd=16)
    costs, ended = host.engine.manager.costs, list[bool]()
    observe = costs.observe_load

    def learn(tier: str, nbytes: int, seconds: float) -> None:
        ended.append(load.done())
        observe(tier, nbytes, seconds)

    host.engine.manager.busy = BusyPeriods(learn)
    load, blocks, keys = host.begin(tokens)
    host.finish(load, blocks, keys)
    until(lambda: costs.bandwidths().get("cpu", 0) > 0, "the load is learned from")
    assert ended == [True]


def test_loads_of_an_engine_beside_each_other_do_not_look_slow(open_host: Opens) -> None:
    host = open_host(transport=FAULTY, cpu=16, ssd=16)
    prompts = [prompt(seed, 2) for seed in range(4)]
    for tokens in prompts:
        host.store(tokens)
    quiet(host.engine)
    drop_from(host.engine, "cpu")
    seen: list[tuple[str, int, float]] = []
    busy = BusyPeriods(lambda *period: seen.append(period))
    with mock.patch.object(host.engine.manager, "busy", busy):
        with PLAN.rule(Op.READ, Fault.HANG) as rule:
            begun = [host.begin(tokens) for tokens in prompts]
            until(lambda: rule.met >= 4 and busy._under_way["ssd"] == 4, "all of them read")
            rule.release()
        for load in begun:
            host.finish(*load)
        busy.tell()
    assert [(tier, nbytes) for tier, nbytes, _ in seen] == [("ssd", 8 * host.layout.page_bytes)]


@pytest.mark.parametrize(
    ("here", "before", "learned"), [(0, 0.0, 1), (2, 0.0, 1), (3, 0.0, 0), (3, 1e-9, ENOUGH), (3, WAIT, ENOUGH + 1)]
)
def test_a_tier_with_little_of_a_load_is_not_told_the_others_time(
    open_host: Opens, here: int, before: float, learned: int
) -> None:
    """Of four pages `here` are in the CPU tier. But if even that time is shorter than expected, the SSD got faster."""
    host = open_host(cpu=8, ssd=16)
    host.keep_on_ssd(prompt(1, 4))
    host.engine.prefetch(prompt(1, 4)[: 4 * here]).result(WAIT)
    quiet(host.engine)
    costs = host.engine.manager.costs = Costs()
    for _ in range(ENOUGH if before else 0):
        costs.observe_load("ssd", host.layout.page_bytes, before)
    assert host.load(prompt(1, 4)).tokens == 16
    quiet(host.engine)
    host.engine.manager.busy.tell()
    assert (costs.tiers["ssd"].observations if "ssd" in costs.tiers else 0) == learned


def test_a_disk_that_gets_slower_is_noticed_by_loads_with_little_of_it(open_host: Opens) -> None:
    """Where the CPU tier's time is known, and is less than half of the load's."""
    host = open_host(cpu=8, ssd=16, transport=FAULTY)
    host.keep_on_ssd(prompt(1, 4))
    host.engine.prefetch(prompt(1, 4)[:12]).result(WAIT)
    quiet(host.engine)
    costs = host.engine.manager.costs = Costs()
    for tier in ("cpu", "ssd"):
        for _ in range(ENOUGH):
            costs.observe_load(tier, host.layout.page_bytes, 1e-6)
    with PLAN.rule(Op.READ, Fault.DELAY, seconds=0.05):
        assert host.load(prompt(1, 4)).tokens == 16
    quiet(host.engine)
    host.engine.manager.busy.tell()
    assert costs.tiers["ssd"].observations == ENOUGH + 1


def test_memory_that_nobody_could_measure_keeps_no_gate_from_deciding(open_host: Opens) -> None:
    """In a busy engine no load from memory is measured. A disk slower than computing is declined all the same."""
    host = open_host(cpu=8, ssd=16, load={"gate": "enforcing"})
    host.keep_on_ssd(prompt(1, 4))
    host.engine.prefetch(prompt(1, 4)[:8]).result(WAIT)  # two pages
    costs = host.engine.manager.costs
    until(lambda: "ssd" in costs.tiers, "the prefetch is learned from")  # else its speed is learned after what follows
    for _ in range(ENOUGH):
        costs.observe_load("ssd", host.layout.page_bytes, 1.0)
        host.engine.observe_prefill(4, 0, 0.1)
    assert not costs.knows("cpu")
    hit = host.engine.lookup(prompt(1, 4))
    assert (hit.tiers, hit.declined, hit.seconds) == (("cpu", "cpu"), 8, None)


def test_a_plain_tier_that_nobody_measured_is_as_fast_as_the_packed_one() -> None:
    """Pages that do not fit packed are few: most loads, and all chunks of prefetches, measure the packed tier alone."""
    costs = Costs()
    gate = gate_of("enforcing", costs)
    for _ in range(ENOUGH):
        assert gate.decide(["ssd", "ssd_plain"], 0, 2 * PAGE_TOKENS, {}).pages == 2, "nothing is known yet"
        costs.observe_load("ssd", PAGE_BYTES, 1.0)
        costs.observe_prefill(PAGE_TOKENS, 0, 0.1)
    assert gate.decide(["ssd", "ssd_plain"], 0, 2 * PAGE_TOKENS, {}).pages == 0
    for n in range(ENOUGH):
        assert costs.load_price("ssd_plain") == costs.load_price("ssd"), f"{n} loads say too little"
        costs.observe_load("ssd_plain", PAGE_BYTES, 1e-3)
    assert gate.decide(["ssd_plain"] * 2, 0, 2 * PAGE_TOKENS, {}).pages == 2


class Used:
    """The event after which a load's blocks are free; until then a forward pass uses them."""

    def __init__(self, free: bool) -> None:
        self.free = free

    def query(self) -> bool:
        return self.free


@pytest.mark.parametrize(
    ("cpu", "free", "learned"), [(8, True, {"cpu"}), (8, False, set()), (None, True, {"ssd"}), (None, False, {"ssd"})]
)
def test_what_the_gpu_is_busy_with_is_not_what_memory_takes(
    open_host: Opens, monkeypatch: pytest.MonkeyPatch, cpu: int | None, free: bool, learned: set[str]
) -> None:
    """Else every hit behind a long forward pass makes the CPU tier look slower, until the gate declines them all."""
    monkeypatch.setattr(native, "given", lambda after, device: Used(free))
    host = open_host(cpu=cpu, ssd=16)
    host.keep(prompt(1, 4))
    assert host.load(prompt(1, 4)).tokens == 16
    quiet(host.engine)
    tiers = host.engine.stats()["gate"]["tiers"]
    assert {name for name, found in tiers.items() if found["observations"]} == learned


@pytest.mark.parametrize("free", [True, False])
def test_pages_that_wait_for_their_blocks_are_ahead_of_nobody(
    open_host: Opens, monkeypatch: pytest.MonkeyPatch, free: bool
) -> None:
    monkeypatch.setattr(native, "given", lambda after, device: Used(free))
    host = open_host(transport=FAULTY, cpu=8, ssd=16)
    host.keep_on_ssd(prompt(1, 4))
    host.load(prompt(1, 4)[:8])  # two pages are in the CPU tier again
    planner = host.engine.loader.planner
    with PLAN.rule(Op.READ, Fault.HANG) as rule:
        begun = host.begin(prompt(1, 4))
        until(lambda: rule.met > 0, "it reads")
        assert (planner.under_way["cpu"], planner.under_way["ssd"]) == (2 if free else 0, 2)
        rule.release()
    host.finish(*begun)
    until(lambda: not any(planner.under_way.values()), "nothing is under way")


def test_a_queue_is_part_of_a_hit_s_seconds(open_host: Opens) -> None:
    host = open_host(transport=FAULTY, cpu=8, ssd=16)
    host.store(prompt(1, 4))
    host.keep_on_ssd(prompt(2, 2))
    host.engine.manager.costs.observe_load("ssd", 2 * host.layout.page_bytes, 2.0)
    assert host.engine.lookup(prompt(2, 2)).seconds == pytest.approx(2.0)
    with PLAN.rule(Op.READ, Fault.HANG) as rule:
        begun = host.begin(prompt(1, 4))
        assert host.engine.lookup(prompt(2, 2)).seconds == pytest.approx(6.0)
        rule.release()
    host.finish(*begun)


def test_a_hit_that_is_slower_than_computing_is_not_loaded_until_the_disk_gets_fast(open_host: Opens) -> None:
    host, tokens = kept(open_host, 3, transport=FAULTY, cpu=None, load={"gate": "enforcing"})
    with PLAN.rule(Op.READ, Fault.DELAY, seconds=0.16):
        for _ in range(ENOUGH):
            assert host.load(tokens).tokens == 12  # nothing is known yet
        for _ in range(ENOUGH):
            host.engine.observe_prefill(12, 0, 0.08)
        host.engine.stats()  # by now all loads are learned from
        hit = host.engine.lookup(tokens)
        assert (hit.tokens, hit.tiers, hit.pages, hit.pays, hit.declined) == (0, (), (), 0, 12)
        assert (hit.seconds, hit.recompute_seconds) == (0.0, 0.0)
        assert host.load(tokens).tokens == 0
    for _ in range(10 * EXPLORE_EVERY):
        good = host.load(tokens).tokens
        host.engine.stats()
        if good == 12:
            break
    hit = host.engine.lookup(tokens)
    assert (hit.tokens, hit.tiers, hit.pays, hit.declined) == (12, ("ssd",) * 3, 12, 0)
    assert hit.recompute_seconds == pytest.approx(0.08)
    stats = host.engine.stats()["gate"]
    assert stats["mode"] == "enforcing"
    assert stats["hits"]["explored"] >= ENOUGH
    assert stats["hits"]["unmeasured"] == ENOUGH
    assert stats["tiers"]["ssd"]["observations"] >= 2 * ENOUGH


@pytest.mark.parametrize("mode", ["off", "advisory"])
def test_what_is_not_enforced_is_loaded(open_host: Opens, mode: str) -> None:
    host = open_host(load={"gate": mode}, ssd=None)
    host.keep(prompt(1, 3))
    for _ in range(ENOUGH):
        host.engine.manager.costs.observe_load("cpu", host.layout.page_bytes, 1.0)
        host.engine.observe_prefill(4, 0, 0.5)
    hit = host.engine.lookup(prompt(1, 3))
    assert (hit.tokens, hit.declined, hit.seconds) == (12, 0, pytest.approx(3.0))
    assert hit.pays == (0 if mode == "advisory" else 12)
    assert hit.recompute_seconds == (pytest.approx(1.5) if mode == "advisory" else None)
    assert host.load(prompt(1, 3)).tokens == 12
    counted = host.engine.stats()["gate"]["hits"]
    assert (counted["declined"], sum(counted.values())) == ((2, 2) if mode == "advisory" else (0, 0))


def test_a_lookup_behind_a_prefix_is_cut_by_tier(open_host: Opens) -> None:
    host = open_host(load={"gate": "enforcing"}, cpu=8, ssd=16)
    tokens = prompt(1, 6, extra=3)
    host.keep_on_ssd(tokens)
    host.load(tokens[:16])  # four pages are in the CPU tier again
    manager = host.engine.manager
    manager.busy.tell()  # else another thread says only later how fast that was
    for _ in range(70):  # the loads above are strays then
        manager.costs.observe_load("cpu", host.layout.page_bytes, 0.01)
        manager.costs.observe_load("ssd", host.layout.page_bytes, 1.0)
        host.engine.observe_prefill(4, 0, 0.1)
    hit = host.engine.lookup(tokens, start=8)
    assert (hit.start, hit.tokens, hit.tiers, hit.pays, hit.declined) == (8, 8, ("cpu", "cpu"), 8, 8)
    assert hit.seconds == pytest.approx(0.02, rel=0.1)
    assert host.load(tokens, start=8).tokens == 8


def test_pages_from_the_middle_of_a_request_are_judged_behind_those_before_them(open_host: Opens) -> None:
    host = open_host(load={"gate": "enforcing"}, cpu=8, ssd=16)
    digests = [bytes([n]) * 32 for n in range(6)]
    names, blocks = PageHashes(digests), host.take(6)
    host.engine.store(names, blocks).release_event.synchronize(WAIT)
    quiet(host.engine)
    drop_from(host.engine, "cpu")
    for _ in range(ENOUGH):
        host.engine.observe_load("ssd", host.layout.bytes_in("ssd"), 1.0)
        for tokens, cached in ((4, 0), (8, 0), (4, 16), (8, 16)):
            host.engine.observe_prefill(tokens, cached, 1e-3 * tokens + 0.015 * tokens * (cached + tokens / 2))
    whole = host.engine.lookup(names, start=16)
    found = [host.engine.lookup(PageHashes(digests[4:], parent=digests[3], before=before)) for before in (4, 0)]
    assert [hit.tokens for hit in (whole, *found)] == [8, 8, 0]
    assert found[0].recompute_seconds == whole.recompute_seconds


def test_a_sequence_is_cut_too(open_engine: Opens) -> None:
    engine = open_engine(load={"gate": "enforcing"}, gpu=16, cpu=8, ssd=16)
    tokens = prompt(1, 4, extra=1)
    with engine.sequence(tokens) as seq:
        fill(engine, seq)
        seq.commit()
    quiet(engine)
    for _ in range(ENOUGH):
        engine.manager.costs.observe_load("cpu", engine.layout.page_bytes, 1.0)
        engine.observe_prefill(4, 0, 0.1)
    with engine.sequence(tokens) as seq:
        assert (seq.cached_tokens, seq.load) == (16, None)  # on the GPU: free
    drop_from(engine, "gpu")
    with engine.sequence(tokens) as seq:
        assert (seq.cached_tokens, seq.load) == (0, None)
        fill(engine, seq)
        seq.commit()
    quiet(engine)
    drop_from(engine, "gpu")
    for _ in range(ENOUGH):  # a faster one
        engine.manager.costs.observe_load("cpu", engine.layout.page_bytes, 0.001)
    with engine.sequence(tokens) as seq:
        assert seq.cached_tokens == 16
        assert seq.verify(WAIT) == 16
    assert engine.stats()["gate"]["hits"] == {"loaded": 1, "cut": 0, "declined": 1, "explored": 0, "unmeasured": 0}


@given(
    st.floats(1e-4, 10),
    st.floats(1e-4, 30),
    st.integers(1, 400),
    st.integers(1, 40),
    st.integers(0, 8),
    st.floats(1e-6, 1e-3),
)
def test_nobody_stops_waiting_for_what_comes_sooner(
    speed: float, seconds: float, pages: int, flying: int, there: int, token: float
) -> None:
    """Pages come one after the other at a steady speed, `flying` of them under way at a time."""
    machine = Machine({}, (token, 0.0, 0.0))
    gate = gate_of("enforcing", machine.known())
    come = min(pages, int(seconds / speed))
    begun = min(pages, come + flying)
    missing = (pages - come) * PAGE_TOKENS
    if gate.outpaced(seconds, begun, pages - begun, missing, there * PAGE_TOKENS):
        assert machine.compute(missing, there * PAGE_TOKENS) <= (pages - come) * speed * (1 + 1e-9)


def test_a_slow_tier_is_not_waited_for_before_it_is_measured() -> None:
    costs = Machine({}, (1e-4, 0.0, 0.0)).known()  # 6.4 ms a page
    gate = gate_of("enforcing", costs)
    assert not gate.outpaced(0.02, 8, 92, 100 * PAGE_TOKENS, 0)  # 92 pages in 0.23 s at best, or computed in 0.64 s
    assert gate.outpaced(0.06, 8, 92, 100 * PAGE_TOKENS, 0)
    assert not gate.outpaced(9.0, 8, 0, 8 * PAGE_TOKENS, 0)  # all are under way
    assert not gate.outpaced(9.0, 0, 100, 100 * PAGE_TOKENS, 0)  # its turn has not come
    for mode in ("off", "advisory"):
        assert not gate_of(mode, costs).outpaced(9.0, 8, 92, 100 * PAGE_TOKENS, 0)
    assert not gate_of("enforcing", Costs()).outpaced(9.0, 8, 92, 100 * PAGE_TOKENS, 0)


def test_the_gate_s_key(open_engine: Opens) -> None:
    model = {"name": "m", "layers": 1, "kv_heads": 1, "head_dim": 8}
    assert Config.from_dict({"model": model}).load.gate == "advisory"
    assert Config.from_dict({"model": model, "load": {"gate": False}}).load.gate == "off"  # YAML 1.1 reads `off` so
    for bad in ("on", True, "enforce", None):
        with pytest.raises(InvalidValueError, match=r"load\.gate"):
            Config.from_dict({"model": model, "load": {"gate": bad}})
    engine: CacheEngine = open_engine(load={"gate": "enforcing"})
    assert engine.gate.mode == engine.stats()["gate"]["mode"] == "enforcing"
    with pytest.raises(InvalidValueError, match="tokens is 0"):
        engine.observe_prefill(0, 0, 1.0)
