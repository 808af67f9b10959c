"""`settle`: the verdict, and what is missing computed again, whatever becomes of a load."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from gdscache import PageStatus
from gdscache.errors import DeadlineError
from gdscache.load.handle import Gap
from gdscache.storage.base import Op
from tests.support import fake_gpu
from tests.support.faults import FaultRule
from tests.support.faulty import PLAN, Fault
from tests.support.helpers import (
    WAIT,
    Host,
    OpenEngine,
    OpenHost,
    drop_from,
    prompt,
    ran,
    read_page,
    settle,
    tokens_of,
    until,
    write_page,
)
from tests.support.pages import lose, offset_of

FAULTY = "tests.support.faulty:FaultyTransport"


@pytest.fixture(autouse=True, params=["host", "GPU"])
def _no_faults_left(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """And the planes are the host's, or as on a GPU."""
    if request.param == "GPU":
        fake_gpu.use(monkeypatch)
    PLAN.reset()
    yield
    PLAN.reset()


def bad(host: Host, tokens: list[int], page: int) -> None:
    slot = host.engine.manager.tiers["ssd"].index.slot(host.engine.pages(tokens)[page].key)
    offset = slot * host.layout.extent_bytes
    PLAN.add(FaultRule(Fault.FLIP, Op.READ, lambda path, at: at == offset, bit=77))


def stored(host: Host, *prompts: list[int]) -> None:
    for tokens in prompts:
        host.keep(tokens)  # else the SSD may refuse the next, whose pages fill half of a small CPU tier
    drop_from(host.engine, "cpu")


@pytest.mark.parametrize("start", [0, 8])
@pytest.mark.parametrize("page", [2, 3, 4])
def test_what_is_missing_goes_from_the_first_bad_page_to_the_end_of_the_load(
    open_host: OpenHost, device: str, page: int, start: int
) -> None:
    host = open_host(device=device, transport=FAULTY)
    tokens = prompt(1, 5, extra=3)
    stored(host, tokens)
    bad(host, tokens, page)
    if page == 2:
        bad(host, tokens, 4)  # one gap for both
    load, blocks, keys = host.begin(tokens, start)
    first = start // 4

    def recompute(gap: Gap) -> None:
        assert load.done(), "before the verdict"
        assert load.release_event.done(), "the slots may be written to"
        assert gap == Gap(0, 4 * page, 20)
        for i in range(page, 5):
            write_page(host.planes, host.layout, host.page(blocks, i - first), host.data(keys[i - first]))

    report = load.settle(recompute)
    assert report.tokens == 4 * (page - first)
    assert report.pages[page - first] is PageStatus.CHECKSUM
    for i, key in enumerate(keys):
        found = read_page(host.planes, host.layout, host.page(blocks, i))
        assert np.array_equal(found, host.data(key)), f"page {i}"
    host.engine.store(tokens, blocks, start).result(WAIT)
    assert tokens_of(host.engine, tokens) == 20, "what was computed again is stored again"
    host.give(blocks)


def test_each_request_of_a_batch_has_its_own(open_host: OpenHost, device: str) -> None:
    host = open_host(device=device, transport=FAULTY, cpu=16, ssd=16)
    prompts = [prompt(n, 3) for n in range(4)]
    stored(host, *prompts)
    bad(host, prompts[1], 2)
    bad(host, prompts[3], 1)
    hits = [host.engine.lookup(tokens, 4 if n == 3 else 0) for n, tokens in enumerate(prompts)]
    load = host.engine.load_many([(hit, host.take(len(hit.pages))) for hit in hits])
    gaps: list[Gap] = []
    report = load.settle(gaps.append)
    assert gaps == load.gaps() == [Gap(1, 8, 12), Gap(3, 4, 12)]
    assert report.tokens == 12 + 8 + 12 + 0
    assert [r.tokens for r in load.results()] == [12, 8, 12, 0]


def test_fewer_pages_than_the_hit_had_are_no_gap(open_host: OpenHost) -> None:
    """`load.tokens` was what the forward went by; the rest it has computed anyway."""
    host = open_host()
    tokens = prompt(1, 4)
    stored(host, tokens)
    hit = host.engine.lookup(tokens)
    lose(host.engine, tokens, [2], "ssd")
    load = host.engine.load(hit, host.take(4))
    assert load.tokens == 8
    assert load.gaps() == []


def test_a_cancelled_load_is_missing_as_a_whole(open_host: OpenHost) -> None:
    host = open_host(transport=FAULTY)
    tokens = prompt(1, 3)
    stored(host, tokens)
    with PLAN.rule(Op.READ, Fault.HANG):
        load, _, _ = host.begin(tokens)
        load.cancel()
    gaps: list[Gap] = []
    load.settle(gaps.append)
    assert gaps == [Gap(0, 0, 12)]


def test_nothing_is_computed_into_slots_that_are_still_written(open_host: OpenHost) -> None:
    host = open_host(transport=FAULTY)
    tokens = prompt(1, 3)
    stored(host, tokens)
    gaps: list[Gap] = []
    with PLAN.rule(Op.READ, Fault.HANG) as rule:
        load, blocks, keys = host.begin(tokens)
        until(lambda: rule.met > 0, "reads hang")
        with pytest.raises(DeadlineError, match="no verdict"):
            load.settle(gaps.append, 0.05)
        with pytest.raises(DeadlineError, match="no verdict"):
            load.gaps(0.05)
        assert gaps == []
    assert load.settle(gaps.append).tokens == 12  # later, all is well
    host.finish(load, blocks, keys)
    assert gaps == []


def test_what_recompute_raises_comes_through(open_host: OpenHost) -> None:
    host = open_host(transport=FAULTY, cpu=16)
    prompts = [prompt(n, 2) for n in range(2)]
    stored(host, *prompts)
    for tokens in prompts:
        bad(host, tokens, 0)
    hits = [host.engine.lookup(tokens) for tokens in prompts]
    load = host.engine.load_many([(hit, host.take(2)) for hit in hits])
    gaps: list[Gap] = []

    def recompute(gap: Gap) -> None:
        gaps.append(gap)
        raise ArithmeticError("injected")

    with pytest.raises(ArithmeticError, match="injected"):
        load.settle(recompute)
    assert gaps == [Gap(0, 0, 8)]
    settle(host.engine)


def test_the_load_of_a_sequence_counts_from_its_first_token(open_engine: OpenEngine) -> None:
    engine, tokens = ran(open_engine, 4, transport=FAULTY, gpu=16)
    lose(engine, tokens, range(1, 4), "gpu")  # page 0 stays
    lose(engine, tokens, range(4), "cpu")
    offset = offset_of(engine, tokens, 2)
    with PLAN.rule(Op.READ, Fault.EIO, lambda at: at == offset), engine.sequence(tokens) as seq:
        assert seq.load.gaps() == [Gap(0, 8, 16)]


@pytest.mark.parametrize("batch", [0, 1, 3])
def test_an_empty_load_is_settled_at_once(open_host: OpenHost, batch: int) -> None:
    host = open_host()
    hit = host.engine.lookup(prompt(1, 2))
    load = host.engine.load_many([(hit, [])] * batch)
    load.wait(2)
    gaps: list[Gap] = []
    assert (load.tokens, load.settle(gaps.append).tokens, len(load.results(WAIT))) == (0, 0, batch)
    assert gaps == []


def test_a_cancelled_load_has_its_slots_until_the_copy_under_way_is_over(
    open_host: OpenHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_gpu.use(monkeypatch)
    host = open_host()
    tokens = prompt(1, 3)
    stored(host, tokens)
    before = fake_gpu.calls("cuLaunchKernel")
    with fake_gpu.held():
        load, blocks, _ = host.begin(tokens)
        until(lambda: fake_gpu.calls("cuLaunchKernel") > before, "a copy begins")
        load.cancel()
        with pytest.raises(DeadlineError):
            load.release_event.synchronize(0.05)
    load.release_event.synchronize(WAIT)
    host.give(blocks)
    assert load.result(WAIT).first_bad == 0
    settle(host.engine)
