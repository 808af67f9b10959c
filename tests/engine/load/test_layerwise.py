"""Loads whose layers are ready one group after the other: early where they can be, right whatever fails or is late;
of pages that have a place in the CPU tier, and of those that pass through a bounce reserve of a few slots."""

from __future__ import annotations

import contextlib
import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gdscache import PageStatus
from gdscache.errors import DeadlineError, DeviceError
from gdscache.load import run as load_run
from gdscache.load.handle import Gap, LayerwiseLoad
from gdscache.moves import native
from gdscache.moves.native import MoveLimits
from gdscache.pages.layout import EXTENT_ALIGNMENT, FIRST_BYTES, GROUP_BYTES, GroupSizes, PageLayout, Plane, read_groups
from gdscache.storage.base import Op
from tests.support import fake_gpu
from tests.support.faults import ExtentPart, FaultRule
from tests.support.faulty import PLAN, Fault
from tests.support.helpers import (
    MHA,
    SENTINEL,
    WAIT,
    Bytes,
    Host,
    OpenEngine,
    OpenHost,
    drop_from,
    expected,
    kept_on_ssd,
    layout_of,
    prompt,
    read_page,
    run,
    settle,
    tokens_of,
    until,
)
from tests.support.layouts import layouts
from tests.support.pairs import pairs

FAULTY = "tests.support.faulty:FaultyTransport"
SOON = 0.5  # seconds of a deadline that is to pass
CANCELLED, DEADLINE, LOADED = PageStatus.CANCELLED, PageStatus.DEADLINE, PageStatus.LOADED
PAGES = 4

# Six layers of 4,608 bytes: in groups (0), (1, 2), (3, 4), (5), no border of which lies on a sector.
EVEN = MHA | {"layers": 6, "head_dim": 72}

UNEVEN = {  # layers of 3,312 and 7,712 bytes
    "name": "tiny",
    "layers": 10,
    "dtype": "bfloat16",
    "page_tokens": 4,
    "planes": [
        {"name": "k", "shape": [4, 72]},
        {"name": "v", "shape": [4, 30]},
        {"name": "scale", "shape": [3], "dtype": "float32"},
        {"name": "index", "shape": [1100], "dtype": "float8_e4m3fn", "layers": [0, 3]},
    ],
}
MODELS = {"even": EVEN, "uneven": UNEVEN}
SIZES = GroupSizes(least=4096, first=1)


def groups_of(host: Host) -> tuple[range, ...]:
    groups = read_groups(host.layout, PAGES, SIZES)
    assert len(groups) >= 4
    return groups


def lies(host: Host, tokens: Sequence[int], page: int) -> Callable[[int], bool]:
    """Whether a request is for this page, wherever in it."""
    slot = host.engine.manager.tiers["ssd"].index.slot(host.engine.pages(tokens)[page].key)
    return lambda offset: offset // host.layout.extent_bytes == slot


def right(host: Host, layer: int, key: bytes) -> Bytes:
    start, stop = host.layout.layer_bounds[layer]
    return expected(host.layout, key)[start:stop]


def seen(host: Host, load: LayerwiseLoad, blocks: list[int], layer: int) -> list[Bytes]:
    """What a forward would read of each page in this layer."""
    load.wait(layer)
    return [read_page([host.planes[layer]], host.layout, host.page(blocks, i)) for i in range(PAGES)]


def whole(host: Host, load: LayerwiseLoad, blocks: list[int], keys: list[bytes], layers: range | None = None) -> None:
    """Each layer of every page is right when its wait returns."""
    for layer in range(host.layout.n_layers) if layers is None else layers:
        for i, found in enumerate(seen(host, load, blocks, layer)):
            assert np.array_equal(found, right(host, layer, keys[i])), f"layer {layer} of page {i}"


def met(rule: FaultRule, times: int = 1) -> None:
    until(lambda: rule.met >= times, "the group is read")


def waits(load: LayerwiseLoad, layer: int) -> None:
    with pytest.raises(DeadlineError):
        load.wait(layer, 0.1)


BAD = {
    Fault.EIO: PageStatus.IO_ERROR,
    Fault.SHORT: PageStatus.SHORT_READ,
    Fault.FLIP: PageStatus.CHECKSUM,
    Fault.ZERO: PageStatus.CHECKSUM,
}


def quarantined(host: Host) -> dict[str, Any]:
    found: dict[str, Any] = host.engine.stats()["tiers"]["ssd"]["quarantine"]
    return found


@pytest.fixture(autouse=True)
def _small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_run, "GROUP_SIZES", SIZES)


# -- which groups -----------------------------------------------------------------------------------------------------


@given(layouts(), st.integers(1, 40), st.integers(1, 3 * 4096), st.integers(1, 1 << 18), st.integers(1, 9))
def test_groups_are_all_layers_once_in_order_and_none_is_small(
    layout: PageLayout, pages: int, least: int, first: int, parts: int
) -> None:
    groups = read_groups(layout, pages, GroupSizes(least, first, parts))
    assert [layer for group in groups for layer in group] == list(range(layout.n_layers))
    spans, at = [layout.read_span(group) for group in groups], 0
    for start, stop in spans:  # what is read: everything once, in whole sectors
        assert start == at
        at = stop
    assert at == layout.extent_bytes
    for group, (start, stop) in zip(groups, spans, strict=True):  # and with a group all of its layers are there
        assert layout.layer_bounds[group[-1]][1] <= stop
        assert start % EXTENT_ALIGNMENT == stop % EXTENT_ALIGNMENT == 0
    if len(groups) > 1:
        assert layout.extent_bytes >= 2 * least
        for group, (start, stop) in zip(groups, spans, strict=True):
            nbytes = layout.layer_bounds[group[-1]][1] - layout.layer_bounds[group[0]][0]
            assert nbytes >= max(least, 4096)
            assert pages * nbytes >= first
            assert start < stop


def uniform(layer_bytes: int, layers: int) -> PageLayout:
    return PageLayout.uniform([Plane("k", (layer_bytes // 16,), "int8")], layers, 16)


def test_groups_begin_small_grow_and_end_small() -> None:
    layout = uniform(256 << 10, 32)
    sizes = [len(group) for group in read_groups(layout, 100)]
    assert sizes == [1, 2, 4, 4, 4, 4, 4, 4, 3, 1, 1]
    assert [layout.read_span(group) for group in read_groups(layout, 100)][:2] == [
        (0, 256 << 10),
        (256 << 10, 768 << 10),
    ]
    assert [len(group) for group in read_groups(layout, 4)] == [4] * 8  # 4 MiB at least


@pytest.mark.parametrize("pages", [4, 16, 115, 506])
def test_a_model_as_fast_as_the_reads_waits_for_one_largest_group(pages: int) -> None:
    layout = uniform(256 << 10, 32)
    groups = read_groups(layout, pages)
    read = computed = 0
    for group in groups:
        read += len(group)
        computed = max(read, computed) + len(group)
    assert computed == 32 + max(map(len, groups)) <= 32 + 32 // 4


@pytest.mark.parametrize(("layer_bytes", "pages"), [(4096, 1000), (GROUP_BYTES // 32, 1000), (256 << 10, 0)])
def test_one_group_where_extents_or_loads_are_small(layer_bytes: int, pages: int) -> None:
    assert read_groups(uniform(layer_bytes, 32), pages) == (range(32),)
    assert len(read_groups(uniform(256 << 10, 32), 1000)) > 1


def test_the_first_group_follows_the_measured_speed() -> None:
    sizes = GroupSizes()
    assert sizes.paced(None) is sizes
    assert sizes.paced(2e9).first == 4_000_000
    assert sizes.paced(6e9).first == 12_000_000
    assert sizes.paced(1e6).first == FIRST_BYTES // 4
    assert sizes.paced(1e12).first == 8 * FIRST_BYTES
    assert (sizes.paced(6e9).least, sizes.paced(6e9).parts) == (sizes.least, sizes.parts)


# -- loads ------------------------------------------------------------------------------------------------------------

PASSING: dict[str, dict[str, Any]] = {  # pages without a place in the CPU tier
    "all pass, two at a time": {"cpu": None, "bounce": 8},
    "all pass, one at a time": {"cpu": None, "bounce": 4},
    "some pass": {"cpu": 2, "bounce": 8},
}
PLACES = {"kept": {"cpu": 8}, "kept, two are there": {"cpu": 8}, **PASSING}


def opened(open_host: OpenHost, monkeypatch: pytest.MonkeyPatch, place: str, **options: Any) -> tuple[Host, int]:
    """A host, and how many pages of a prompt are in its CPU tier before each load."""
    if place in PASSING:
        monkeypatch.setattr(native, "LIMITS", MoveLimits(io=4 * 4096))
    host = open_host(transport=FAULTY, **{"model": EVEN, **PLACES[place], **options})
    return host, 2 if place == "kept, two are there" else 0


def only(host: Host, group: range) -> ExtentPart:
    """Sectors that are read for one group and for no other, in whichever place."""
    layout = host.layout
    start, stop = layout.layer_bounds[group.start][0], layout.layer_bounds[group.stop - 1][1]
    first = -(-start // EXTENT_ALIGNMENT) * EXTENT_ALIGNMENT
    behind = stop if stop == layout.page_bytes else stop - stop % EXTENT_ALIGNMENT
    return ExtentPart(first, behind, layout.extent_bytes)


def stored(host: Host, resident: int = 0) -> list[int]:
    """Pages in the SSD tier, of which the first so many are in the CPU tier too."""
    tokens = prompt(1, PAGES)
    again(host, tokens, resident)
    return tokens


def again(host: Host, tokens: list[int], resident: int = 0) -> None:
    """As `stored`, of pages that may be there."""
    host.keep(tokens)
    if host.engine.manager.cpu is not None:
        drop_from(host.engine, "cpu")
    if resident:
        assert host.load(tokens[: 4 * resident]).tokens == 4 * resident
    assert host.engine.lookup(tokens).tiers == ("cpu",) * resident + ("ssd",) * (PAGES - resident)


@pytest.fixture
def slow_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Has engines copy as on a GPU, which waits before each thing that a stream does."""

    with contextlib.ExitStack() as undo:

        def use(route: Any) -> None:
            fake_gpu.use(monkeypatch, route)
            fake_gpu.driver().fake_delay(750)
            undo.callback(fake_gpu.driver().fake_delay, 0)

        yield use


@pytest.mark.parametrize(("model", "place"), pairs(MODELS, PLACES))
def test_layers_are_ready_while_those_behind_them_are_read(
    open_host: OpenHost, monkeypatch: pytest.MonkeyPatch, device: str, model: str, place: str
) -> None:
    host, resident = opened(open_host, monkeypatch, place, device=device, model=MODELS[model])
    tokens = stored(host, resident)
    groups = groups_of(host)
    for group in groups[1:]:
        with PLAN.rule(Op.READ, Fault.HANG, part=only(host, group)):
            load, blocks, keys = host.begin(tokens)
            whole(host, load, blocks, keys, range(group.start))
            waits(load, group.start)
            assert not load.done()
        whole(host, load, blocks, keys)
        assert host.finish(load, blocks, keys).pages == (LOADED,) * PAGES
        again(host, tokens, resident)


def test_layer_0_is_ready_while_the_last_layer_hangs_in_a_pool_of_the_engine(
    open_engine: OpenEngine, device: str
) -> None:
    engine = open_engine(device=device, model=EVEN, transport=FAULTY, cpu=8, gpu=8)
    tokens = prompt(1, PAGES, extra=1)
    assert run(engine, tokens) == 0
    drop_from(engine, "gpu", "cpu")
    last = engine.layout.n_layers - 1
    with PLAN.rule(Op.READ, Fault.HANG, part=ExtentPart.layer(engine.layout, last)), engine.sequence(tokens) as seq:
        for layer in range(3):
            seq.wait(layer)
            for i, page in enumerate(engine.pages(tokens)):
                found = read_page([engine.gpu.planes(layer)], engine.layout, [int(seq.slots[i])])
                start, stop = engine.layout.layer_bounds[layer]
                assert np.array_equal(found, expected(engine.layout, page.key)[start:stop])
        PLAN.reset()
        assert seq.verify(WAIT) == 4 * PAGES
    assert run(engine, tokens) == 4 * PAGES


@pytest.mark.parametrize(
    ("model", "place", "route"), pairs(MODELS, [*PLACES, "kept, a page a submit"], [None, "staged", "zero_copy"])
)
def test_a_page_may_fail_anywhere_and_no_layer_is_read_before_it_is_there(
    open_host: OpenHost, slow_gpu: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, device: str, model: str,
    place: str, route: str | None,
) -> None:  # fmt: skip
    """Every page x every group, with random delays of all reads, and as on a GPU of all that its streams do; planes are
    poisoned before each load."""
    if route is not None:
        slow_gpu(route)
    if place == "kept, a page a submit":  # or so, and few ahead
        extent, place = layout_of(MODELS[model]).extent_bytes, "kept"
        monkeypatch.setattr(native, "LIMITS", MoveLimits(flying=2 * extent, io=2 * extent // 3))
    host, resident = opened(open_host, monkeypatch, place, device=device, model=MODELS[model])
    rng = random.Random(f"{model} {place}")
    tokens = stored(host, resident)
    for position in range(resident, PAGES):
        for group in groups_of(host):
            fault = rng.choice(list(BAD))
            with PLAN.rule(Op.READ, fault, lies(host, tokens, position), part=only(host, group)) as rule:
                for late in groups_of(host):
                    part = only(host, late)
                    PLAN.add(FaultRule(Fault.DELAY, Op.READ, part=part, rate=0.5, seconds=rng.uniform(0.0005, 0.004)))
                load, blocks, keys = host.begin(tokens)
                found = [seen(host, load, blocks, layer) for layer in range(host.layout.n_layers)]
                report = load.result()
            assert rule.met == 1
            assert report.pages == tuple(BAD[fault] if i == position else LOADED for i in range(PAGES))
            assert report.tokens == 4 * position
            for layer, pages in enumerate(found):
                for i in set(range(PAGES)) - {position}:
                    assert np.array_equal(pages[i], right(host, layer, keys[i])), f"layer {layer} of page {i}"
            host.finish(load, blocks, keys)
            PLAN.reset()
            settle(host.engine)
            left = position if BAD[fault] is PageStatus.CHECKSUM else PAGES
            assert tokens_of(host.engine, tokens) == 4 * left
            again(host, tokens, resident)


def test_a_page_that_failed_is_not_read_further(open_host: OpenHost, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "LIMITS", MoveLimits(flying=1))  # each group when the one before has ended
    host = open_host(model=EVEN, transport=FAULTY, cpu=8)
    tokens = stored(host)
    bad, groups = lies(host, tokens, 1), groups_of(host)
    PLAN.reset()
    with PLAN.rule(Op.READ, Fault.EIO, bad, part=only(host, groups[1])):
        assert host.load(tokens).pages == (LOADED, PageStatus.IO_ERROR, LOADED, LOADED)
    assert sum(map(bad, PLAN.moved[Op.READ])) == 2
    assert len(PLAN.moved[Op.READ]) == 2 + 3 * len(groups)


@pytest.mark.parametrize(
    ("faults", "verdicts"),
    [
        ((Fault.EIO, Fault.HANG, Fault.HANG), {PageStatus.IO_ERROR}),
        ((Fault.HANG, Fault.SHORT, Fault.HANG), {PageStatus.SHORT_READ}),
        ((Fault.EIO, Fault.SHORT, Fault.HANG), {PageStatus.IO_ERROR, PageStatus.SHORT_READ}),  # read side by side
    ],
)
def test_a_page_that_fails_in_several_groups_has_the_first_verdict_and_one(
    open_host: OpenHost, faults: tuple[Fault, ...], verdicts: set[PageStatus]
) -> None:
    host = open_host(model=EVEN, transport=FAULTY, cpu=8, deadline=SOON)
    tokens = stored(host)
    bad, groups = lies(host, tokens, 1), groups_of(host)
    for group, fault in zip(groups[1:], faults, strict=True):
        PLAN.add(FaultRule(fault, Op.READ, lambda path, offset: bad(offset), only(host, group)))
    first, bad_page, *others = host.load(tokens).pages
    assert (first, *others) == (LOADED,) * 3
    assert bad_page in verdicts
    misses = host.engine.stats()["misses"]
    assert {cause: n for cause, n in misses.items() if n and cause in ("io_error", "deadline", "short_read")} == {
        bad_page.value: 1
    }
    PLAN.reset()
    until(lambda: host.engine.stats()["tiers"]["ssd"]["quarantine"]["late_reads"] == 0, "late reads end")
    settle(host.engine)
    assert tokens_of(host.engine, tokens) == 4 * PAGES


# -- late reads -------------------------------------------------------------------------------------------------------


def left(host: Host, late: int) -> None:
    """So many reads are in quarantine, now or soon."""
    assert quarantined(host)["late_reads"] >= late
    until(lambda: quarantined(host)["late_reads"] == late, "late reads end")


def rested(host: Host) -> None:
    left(host, 0)
    assert not any(quarantined(host)["held_slots"].values())
    settle(host.engine)


@pytest.mark.parametrize("number", [0, 3])
def test_one_hung_read_of_a_group_costs_its_page_and_keeps_its_slot(open_host: OpenHost, number: int) -> None:
    host = open_host(model=EVEN, transport=FAULTY, cpu=16, ssd=40, deadline=SOON)
    tokens = stored(host)
    group = groups_of(host)[number]
    with PLAN.rule(Op.READ, Fault.HANG, lies(host, tokens, 1), part=only(host, group)):
        load, blocks, keys = host.begin(tokens)
        assert load.result(WAIT).pages == (LOADED, DEADLINE, LOADED, LOADED)
        assert quarantined(host)["late_reads"] == quarantined(host)["held_slots"]["cpu"] == 1
        host.finish(load, blocks, keys)  # every layer is ready, the verdict tells
        assert tokens_of(host.engine, tokens) == 4
        with host.engine.manager.lock:
            held = set(host.engine.manager.landing.index._leaving)
        assert len(held) == 1
        for seed in range(10, 18):  # more than the CPU tier holds
            host.keep(prompt(seed, 3))
            assert host.load(prompt(seed, 3)).tokens == 12
            with host.engine.manager.lock:
                assert not held & {entry.slot for entry in host.engine.manager.landing.index}, (
                    "a late read's slot is used"
                )
    rested(host)
    assert host.load(tokens).tokens == 4 * PAGES, "late is not bad"


def test_every_group_hangs(open_host: OpenHost) -> None:
    host = open_host(model=EVEN, transport=FAULTY, cpu=16, ssd=40, deadline=SOON)
    tokens = stored(host)
    hung = [PLAN.add(FaultRule(Fault.HANG, Op.READ, part=only(host, group))) for group in groups_of(host)]
    try:
        load, blocks, keys = host.begin(tokens)
        assert load.result(WAIT).pages == (DEADLINE,) * PAGES
        host.finish(load, blocks, keys)
        assert quarantined(host)["late_reads"] == quarantined(host)["held_slots"]["cpu"] == PAGES
        assert tokens_of(host.engine, tokens) == 0
        assert host.engine.check().problems == ()
        for rule, late in zip(hung, (PAGES, PAGES, PAGES, 0), strict=True):  # a slot is free when its last read ended
            assert quarantined(host)["late_reads"] == PAGES
            PLAN.remove(rule)
            time.sleep(0.05)
            left(host, late)
    finally:
        PLAN.reset()
    rested(host)
    assert host.load(tokens).tokens == 4 * PAGES


def test_two_groups_of_a_page_are_late_in_slots_of_their_own(
    open_host: OpenHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next group is read while the one before hangs: each holds the slot that its read may still write to."""
    host, _ = opened(open_host, monkeypatch, "all pass, two at a time", deadline=SOON)
    tokens = prompt(1, 1)
    host.keep(tokens)
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
        until(lambda late=late: quarantined(host)["late_reads"] == late, "one page")
        time.sleep(0.02)
        assert quarantined(host)["late_reads"] == late
    settle(host.engine)
    assert host.load(tokens).tokens == 4


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


def test_groups_that_were_not_begun_when_the_tier_was_switched_off_are_not_read(
    open_host: OpenHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "LIMITS", MoveLimits(flying=1))
    host = open_host(model=EVEN, transport=FAULTY, cpu=8)
    tokens = stored(host)
    groups = groups_of(host)
    with PLAN.rule(Op.READ, Fault.HANG, part=only(host, groups[1])) as rule:
        load, blocks, keys = host.begin(tokens)
        whole(host, load, blocks, keys, groups[0])
        met(rule, PAGES)
        host.engine.manager.quarantine.stop("gone")
    assert host.finish(load, blocks, keys).pages == (PageStatus.LOCK_LOST,) * PAGES
    host.engine.manager.quarantine._off.clear()
    assert len(PLAN.moved[Op.READ]) == 2 * PAGES
    assert host.load(tokens).tokens == 4 * PAGES


# -- cancelled, shared, broken off ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "verify"), [*((place, "once") for place in PLACES), ("kept", "always"), ("kept, two are there", "always")]
)
def test_a_load_is_cancelled_between_any_two_groups(
    open_host: OpenHost, monkeypatch: pytest.MonkeyPatch, device: str, place: str, verify: str
) -> None:
    """By its caller, or as a leader ends the moves of ranks that are late or left alone: its move, and no more."""
    host, resident = opened(open_host, monkeypatch, place, device=device, load={"verify": verify})
    tokens = stored(host, resident)
    for group, by_caller in itertools.product(groups_of(host), (True, False)):
        with PLAN.rule(Op.READ, Fault.HANG, part=only(host, group)) as rule:
            load, blocks, keys = host.begin(tokens)
            whole(host, load, blocks, keys, range(group.start))
            met(rule)
            moving = load._moving
            assert moving is not None
            load.cancel() if by_caller else moving.cancel()
            assert not load.release_event.done()
        report = load.result(WAIT)
        load.release_event.synchronize(WAIT)
        assert set(report.pages[resident:]) == {CANCELLED}
        if place not in PASSING:  # where another group may come before the one that hangs
            last = torch.cat([t.view(torch.uint8)[blocks[resident:]].flatten() for t in host.planes[-1]])
            assert bool((last == SENTINEL).all()), "layers were copied after the load was cancelled"
        host.give(blocks)
        settle(host.engine)
        if place not in PASSING:
            assert host.engine.lookup(tokens).tiers == ("cpu",) * PAGES, "what was read stays"
        assert host.load(tokens).pages == (LOADED,) * PAGES
        again(host, tokens, resident)


def test_pages_of_a_cancelled_load_are_checked_in_every_group(open_host: OpenHost) -> None:
    host = open_host(model=EVEN, transport=FAULTY, cpu=8)
    tokens = stored(host)
    groups = groups_of(host)
    for damaged in groups:
        with (
            PLAN.rule(Op.READ, Fault.FLIP, lies(host, tokens, 2), part=only(host, damaged)) as flip,
            PLAN.rule(Op.READ, Fault.HANG, lies(host, tokens, 0), part=only(host, groups[1])) as rule,
        ):
            load, blocks, _ = host.begin(tokens)
            met(rule)
            met(flip)
            load.wait(0)
            load.cancel()
        assert load.result(WAIT).pages == (CANCELLED, CANCELLED, PageStatus.CHECKSUM, CANCELLED)
        host.give(blocks)
        settle(host.engine)
        assert tokens_of(host.engine, tokens) == 8
        again(host, tokens, 0)


@pytest.mark.parametrize("fault", [None, Fault.EIO, Fault.FLIP])
def test_who_waits_for_another_loads_page_waits_for_all_of_its_groups(
    open_host: OpenHost, device: str, fault: Fault | None
) -> None:
    host = open_host(device=device, model=EVEN, transport=FAULTY, cpu=8)
    tokens = stored(host)
    last = only(host, groups_of(host)[-1])
    if fault is not None:
        bad = lies(host, tokens, 1)
        PLAN.add(FaultRule(fault, Op.READ, lambda path, offset: bad(offset), last))
    with PLAN.rule(Op.READ, Fault.HANG, lies(host, tokens, 0), part=last):
        with PLAN.rule(Op.READ, Fault.HANG, lies(host, tokens, 2), part=only(host, groups_of(host)[0])):
            first, second = host.begin(tokens), host.begin(tokens)  # before there is a verdict on any page
        first[0].wait(0)
        waits(second[0], 0)
        assert not second[0].done()
    status = LOADED if fault is None else BAD[fault]
    for load in (first, second):
        assert host.finish(*load).pages == (LOADED, status, LOADED, LOADED)


@pytest.mark.parametrize("call", range(5))
def test_a_copy_that_raises_in_any_group_leaves_nothing_behind(
    open_host: OpenHost, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    fake_gpu.use(monkeypatch)
    host = open_host(model=EVEN, transport=FAULTY, cpu=8)
    tokens, gaps = stored(host, 1), list[Gap]()
    with fake_gpu.failing("cuLaunchKernel", call):
        load, blocks, _ = host.begin(tokens)
        with pytest.raises(DeviceError, match="FAKE_ERROR"):
            load.settle(gaps.append, WAIT)
    assert gaps == [], "there is no verdict"
    for layer in range(host.layout.n_layers):
        load.wait(layer, WAIT)
    load.release_event.synchronize(WAIT)
    host.give(blocks)
    settle(host.engine)
    assert host.load(tokens).tokens > 0
    settle(host.engine)


# -- what stays whole -------------------------------------------------------------------------------------------------


def test_prefetches_are_read_whole(open_host: OpenHost) -> None:
    host, tokens = kept_on_ssd(open_host, PAGES, model=EVEN, transport=FAULTY, cpu=8, bounce=8)
    PLAN.reset()
    host.engine.prefetch(tokens).result(WAIT)
    assert len(PLAN.moved[Op.READ]) == PAGES
    assert all(offset % host.layout.extent_bytes == 0 for offset in PLAN.moved[Op.READ])


def test_neighbours_of_a_single_group_are_one_request(open_host: OpenHost, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_run, "GROUP_SIZES", GroupSizes())
    host = open_host(model=EVEN, transport="tests.support.faulty:FaultyMerging", cpu=8)
    tokens = stored(host)
    PLAN.reset()
    assert host.load(tokens).tokens == 4 * PAGES
    assert len(PLAN.moved[Op.READ]) == 1
    drop_from(host.engine, "cpu")
    PLAN.reset()
    monkeypatch.setattr(load_run, "GROUP_SIZES", SIZES)
    assert host.load(tokens).tokens == 4 * PAGES
    assert len(PLAN.moved[Op.READ]) == PAGES * len(groups_of(host))
