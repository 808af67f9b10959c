"""Pages without a place in the CPU tier go by layers too, through a bounce reserve of a few slots."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from gdscache.load import run as load_run
from gdscache.moves import native
from gdscache.moves.library import MoveLimits
from gdscache.pages.layout import EXTENT_ALIGNMENT, FIRST_BYTES, GroupSizes
from gdscache.storage.base import Op
from gdscache.testing.faults import ExtentPart, FaultRule
from tests.support.faulty import PLAN, Fault
from tests.support.helpers import WAIT, Host, drop_from, prompt, quiet, settle, until
from tests.support.layerwise_parts import (
    BAD,
    CANCELLED,
    DEADLINE,
    EVEN,
    FAULTY,
    LOADED,
    MODELS,
    PAGES,
    SIZES,
    SOON,
    groups_of,
    lies,
    met,
    quarantined,
    right,
    seen,
    waits,
    whole,
)

OpenHost = Callable[..., Host]
PLACES: dict[str, dict[str, Any]] = {
    "all pass, two at a time": {"cpu": None, "bounce": 8},
    "all pass, one at a time": {"cpu": None, "bounce": 4},
    "some pass": {"cpu": 2, "bounce": 8},
}


@pytest.fixture(autouse=True)
def _small_groups(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(load_run, "GROUP_SIZES", SIZES)
    monkeypatch.setattr(native, "LIMITS", MoveLimits(io=4 * 4096))
    PLAN.reset()
    yield
    PLAN.reset()


def only(host: Host, group: range) -> ExtentPart:
    """Sectors that are read for one group and for no other, when each begins with the sector of its first byte."""
    layout = host.layout
    start, stop = layout.layer_bounds[group.start][0], layout.layer_bounds[group.stop - 1][1]
    first = -(-start // EXTENT_ALIGNMENT) * EXTENT_ALIGNMENT
    behind = stop if stop == layout.page_bytes else stop - stop % EXTENT_ALIGNMENT
    return ExtentPart(first, behind, layout.extent_bytes)


def stored(host: Host) -> list[int]:
    tokens = prompt(1, PAGES)
    host.store(tokens)
    quiet(host.engine)
    again(host, tokens)
    return tokens


def again(host: Host, tokens: list[int]) -> None:
    """All pages in the SSD tier, and there only."""
    if host.engine.manager.cpu is not None:
        drop_from(host.engine, "cpu")
    assert host.engine.lookup(tokens).tiers == ("ssd",) * PAGES


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("model", MODELS)
def test_layers_are_ready_while_those_behind_them_are_read(
    open_host: OpenHost, device: str, model: str, place: str
) -> None:
    host = open_host(device=device, model=MODELS[model], transport=FAULTY, **PLACES[place])
    tokens = stored(host)
    for group in groups_of(host)[1:]:
        with PLAN.rule(Op.READ, Fault.HANG, part=only(host, group)):
            load, blocks, keys = host.begin(tokens)
            whole(host, load, blocks, keys, range(group.start))
            waits(load, group.start)
            assert not load.done()
        whole(host, load, blocks, keys)
        assert host.finish(load, blocks, keys).pages == (LOADED,) * PAGES
        again(host, tokens)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("model", MODELS)
def test_a_page_may_fail_anywhere(open_host: OpenHost, device: str, model: str, place: str) -> None:
    """Every page x every group, with random delays of all reads."""
    host = open_host(device=device, model=MODELS[model], transport=FAULTY, **PLACES[place])
    rng = random.Random(f"{model} {place}")
    tokens = stored(host)
    for position in range(PAGES):
        for group in groups_of(host):
            fault = rng.choice(list(BAD))
            with PLAN.rule(Op.READ, fault, lies(host, tokens, position), part=only(host, group)) as rule:
                PLAN.add(FaultRule(Fault.DELAY, Op.READ, rate=0.5, seconds=rng.uniform(0.0005, 0.004)))
                load, blocks, keys = host.begin(tokens)
                found = [seen(host, load, blocks, layer) for layer in range(host.layout.n_layers)]
                report = load.result(WAIT)
            assert rule.met == 1
            assert report.pages == tuple(BAD[fault] if i == position else LOADED for i in range(PAGES))
            for layer, pages in enumerate(found):
                for i in set(range(PAGES)) - {position}:
                    assert np.array_equal(pages[i], right(host, layer, keys[i])), f"layer {layer} of page {i}"
            host.finish(load, blocks, keys)
            PLAN.reset()
            settle(host.engine)
            host.store(tokens)
            quiet(host.engine)
            again(host, tokens)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("number", range(4))
def test_a_hung_read_costs_its_page_and_keeps_its_slot(open_host: OpenHost, place: str, number: int) -> None:
    host = open_host(model=EVEN, transport=FAULTY, deadline=SOON, **PLACES[place])
    tokens = stored(host)
    with PLAN.rule(Op.READ, Fault.HANG, lies(host, tokens, PAGES - 1), part=only(host, groups_of(host)[number])):
        load, blocks, keys = host.begin(tokens)
        report = load.result(WAIT)
        assert report.pages[-1] is DEADLINE
        assert set(report.pages) <= {LOADED, DEADLINE}
        held = quarantined(host)["held_slots"]
        # On a busy machine other pages are late, too.
        assert quarantined(host)["late_reads"] == held["bounce_loads"] + held.get("cpu", 0) >= 1
        host.finish(load, blocks, keys)
    until(lambda: quarantined(host)["late_reads"] == 0, "late reads end")
    settle(host.engine)
    assert host.load(tokens).tokens == 4 * PAGES, "late is not bad"


def test_two_groups_of_a_page_are_late_in_slots_of_their_own(
    open_host: OpenHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next group is read while the one before hangs: each holds the slot that its read may still write to."""
    host = open_host(model=EVEN, transport=FAULTY, cpu=None, bounce=8, deadline=SOON)
    tokens = prompt(1, 1)
    host.store(tokens)
    quiet(host.engine)
    groups = groups_of(host)
    monkeypatch.setattr(load_run, "read_groups", lambda *args: groups)
    rules = [PLAN.add(FaultRule(Fault.HANG, Op.READ, part=only(host, group))) for group in groups[:2]]
    load, blocks, keys = host.begin(tokens)
    assert load.result(WAIT).pages == (DEADLINE,)
    assert (quarantined(host)["late_reads"], quarantined(host)["held_slots"]["bounce_loads"]) == (1, 2)
    host.finish(load, blocks, keys)
    for rule, late in zip(rules, (1, 0), strict=True):
        PLAN.remove(rule)
        until(lambda late=late: quarantined(host)["held_slots"]["bounce_loads"] == late, "a slot comes back")
        time.sleep(0.02)
        assert quarantined(host)["late_reads"] == late  # one page
    settle(host.engine)
    assert host.load(tokens).tokens == 4


@pytest.mark.parametrize("place", PLACES)
def test_a_load_is_cancelled_between_any_two_groups(open_host: OpenHost, device: str, place: str) -> None:
    host = open_host(device=device, model=EVEN, transport=FAULTY, **PLACES[place])
    tokens = stored(host)
    for group in groups_of(host):
        with PLAN.rule(Op.READ, Fault.HANG, part=only(host, group)) as rule:
            load, blocks, keys = host.begin(tokens)
            whole(host, load, blocks, keys, range(group.start))
            met(rule)
            load.cancel()
        assert set(load.result(WAIT).pages) == {CANCELLED}
        load.release_event.synchronize(WAIT)
        host.give(blocks)
        settle(host.engine)
        assert host.load(tokens).pages == (LOADED,) * PAGES
        again(host, tokens)


def test_what_is_not_begun_by_the_deadline_is_not_read(open_host: OpenHost) -> None:
    host = open_host(model=EVEN, transport=FAULTY, cpu=None, bounce=2, deadline=SOON)
    tokens = stored(host)
    PLAN.reset()
    with PLAN.rule(Op.READ, Fault.HANG, lies(host, tokens, 0), part=only(host, groups_of(host)[1])):
        load, blocks, keys = host.begin(tokens)
        assert load.result(WAIT).pages == (DEADLINE,) * PAGES
        host.finish(load, blocks, keys)
    until(lambda: quarantined(host)["late_reads"] == 0, "late reads end")
    assert len(PLAN.moved[Op.READ]) < 3 * PAGES
    settle(host.engine)


@pytest.mark.parametrize("seed", range(6))
def test_random_loads_share_the_reserve(open_host: OpenHost, device: str, seed: int) -> None:
    """Loads beside each other, in turn for the same few slots: good pages are right, all end, nothing is held."""
    rng = random.Random(seed)
    place = rng.choice(list(PLACES))
    host = open_host(device=device, model=rng.choice(list(MODELS.values())), transport=FAULTY, **PLACES[place])
    head = prompt(seed, 2)
    prompts = [head + prompt(100 * seed + i, 3) for i in range(3)]
    for _ in range(5):
        for tokens in prompts:
            host.store(tokens)
            quiet(host.engine)
        for _ in range(rng.randrange(4)):
            fault = rng.choice([Fault.DELAY, Fault.DELAY, *BAD])
            seconds = rng.uniform(0.001, 0.02) if fault is Fault.DELAY else 0.0
            part = ExtentPart.layer(host.layout, rng.randrange(host.layout.n_layers))
            PLAN.add(FaultRule(fault, Op.READ, part=part, rate=rng.choice([0.2, 1.0]), seconds=seconds))
        loads = [host.begin(rng.choice(prompts)) for _ in range(rng.randint(1, 3))]
        for load, _, _ in loads:
            if rng.random() < 0.3:
                load.cancel()
        for load, blocks, keys in loads:
            layers = range(host.layout.n_layers)
            found = [seen(host, load, blocks, layer)[: len(keys)] if len(keys) >= PAGES else [] for layer in layers]
            pages = load.result(WAIT).pages
            load.release_event.synchronize(WAIT)
            for layer, planes in enumerate(found):
                for i, (status, there) in enumerate(zip(pages, planes, strict=False)):
                    if status is LOADED:
                        assert np.array_equal(there, right(host, layer, keys[i])), f"layer {layer} of page {i}"
            host.give(blocks)
        PLAN.reset()
        settle(host.engine)


# -- sizes ------------------------------------------------------------------------------------------------------------


def test_the_first_group_follows_the_measured_speed() -> None:
    sizes = GroupSizes()
    assert sizes.paced(None) is sizes
    assert sizes.paced(2e9).first == 4_000_000
    assert sizes.paced(6e9).first == 12_000_000
    assert sizes.paced(1e6).first == FIRST_BYTES // 4
    assert sizes.paced(1e12).first == 8 * FIRST_BYTES
    assert (sizes.paced(6e9).least, sizes.paced(6e9).parts) == (sizes.least, sizes.parts)
