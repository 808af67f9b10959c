"""Where a load begins: its first copies and reads are under way without a thread of the loads'."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from gdscache import PageStatus
from gdscache.load import loader
from gdscache.load import run as load_run
from gdscache.load.plan import LoadPlan
from gdscache.moves import native
from gdscache.moves.native import MoveLimits
from gdscache.pages.layout import GroupSizes, read_groups
from gdscache.storage.base import Op
from tests.support import fake_gpu
from tests.support.faulty import PLAN, Fault
from tests.support.helpers import MHA, SMALL, WAIT, Host, OpenHost, drop_from, prompt, raising, settle, until
from tests.support.pages import lose

EVEN = MHA | {"layers": 6, "head_dim": 72}
FAULTY = "tests.support.faulty:FaultyTransport"
PAGES = 4
ONE_LOAD = dataclasses.replace(SMALL, load_threads=1)  # at a time


class InjectedError(Exception):
    """What a load raises on order."""


@pytest.fixture(autouse=True)
def _small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = GroupSizes(least=4096, first=1)
    monkeypatch.setattr(load_run, "copy_groups", lambda layout, pages: read_groups(layout, pages, sizes))


def stored(host: Host, seed: int) -> list[int]:
    tokens = prompt(seed, PAGES)
    host.keep(tokens)
    return tokens


def begins(host: Host, monkeypatch: pytest.MonkeyPatch, before: Callable[[], None]) -> None:
    """Call `before()` where a load hands its move over."""
    moves = host.engine._parts.executor.moves
    begin = moves.begin

    def call(*args: Any, **options: Any) -> Any:
        before()
        return begin(*args, **options)

    monkeypatch.setattr(moves, "begin", call)


@pytest.mark.parametrize("verify", ["once", "always"])
@pytest.mark.parametrize("gpu", [False, True], ids=["host", "GPU"])
def test_the_layers_of_a_hit_need_no_thread_of_the_loads(
    open_host: OpenHost, monkeypatch: pytest.MonkeyPatch, gpu: bool, verify: str
) -> None:
    """Whatever these are busy with: here the only one waits for a read."""
    if gpu:
        fake_gpu.use(monkeypatch)
    host = open_host(model=EVEN, transport=FAULTY, cpu=16, load={"verify": verify}, limits=ONE_LOAD)
    away = stored(host, 1)
    drop_from(host.engine, "cpu")
    here = stored(host, 2)
    with PLAN.rule(Op.READ, Fault.HANG) as rule:
        slow = host.begin(away)
        until(lambda: rule.met > 0, "a read begins")
        load, blocks, keys = host.begin(here)
        for layer in range(host.layout.n_layers):
            load.wait(layer, WAIT)
        assert not load.done()
    assert host.finish(load, blocks, keys).pages == (PageStatus.LOADED,) * PAGES
    assert host.finish(*slow).pages == (PageStatus.LOADED,) * PAGES
    settle(host.engine)


def test_the_first_reads_are_under_way_when_load_returns(open_host: OpenHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """They do not wait for a thread of the pool, which is busy here."""
    monkeypatch.setattr(native, "LIMITS", MoveLimits(flying=1, io=1))
    host = open_host(model=EVEN, transport=FAULTY, cpu=16, limits=ONE_LOAD)
    tokens = stored(host, 1)
    drop_from(host.engine, "cpu")
    gate = threading.Event()
    host.engine.loader._lane._threads.submit(lambda: gate.wait(WAIT))
    PLAN.reset()
    load, blocks, keys = host.begin(tokens)
    until(lambda: len(PLAN.moved[Op.READ]) >= 1, "a read begins")
    assert not load.done()
    gate.set()
    assert host.finish(load, blocks, keys).pages == (PageStatus.LOADED,) * PAGES
    settle(host.engine)


def test_reads_that_were_begun_when_the_call_breaks_off_have_ended(
    open_host: OpenHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = open_host(model=EVEN, transport=FAULTY, cpu=16)
    tokens = stored(host, 1)
    drop_from(host.engine, "cpu")

    def fail(*_: Any) -> None:
        patched.undo()
        raise InjectedError

    hit, blocks = host.engine.lookup(tokens), host.take(PAGES)
    with monkeypatch.context() as patched:
        patched.setattr(host.engine.loader._lane, "start", fail)
        with PLAN.rule(Op.READ, Fault.DELAY, seconds=0.02), pytest.raises(InjectedError):
            host.engine.load(hit, blocks)
        assert host.engine.stats()["leases"] == []
    host.give(blocks)
    assert host.load(tokens).tokens == 4 * PAGES
    settle(host.engine)


def test_close_waits_for_a_load_that_begins(open_host: OpenHost, monkeypatch: pytest.MonkeyPatch) -> None:
    host = open_host(model=EVEN, cpu=16)
    tokens = stored(host, 1)
    begun, gate, found = threading.Event(), threading.Event(), []

    def hold() -> None:
        begun.set()
        assert gate.wait(WAIT)

    begins(host, monkeypatch, hold)
    caller = threading.Thread(target=lambda: found.append(host.begin(tokens)))
    caller.start()
    assert begun.wait(WAIT)
    closer = threading.Thread(target=host.engine.close)
    closer.start()
    closer.join(0.05)
    assert closer.is_alive(), "the tiers were closed under a load"
    gate.set()
    caller.join(WAIT)
    closer.join(WAIT)
    assert not closer.is_alive()
    ((load, _, _),) = found
    assert load.result(WAIT).pages == (PageStatus.LOADED,) * PAGES


# -- in parts ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def _parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large loads have three pages and more: one of them, and then the others."""
    monkeypatch.setattr(loader, "FIRST_PAGES", 1)
    monkeypatch.setattr(loader, "FIRST_BYTES", 0)


def between(host: Host, monkeypatch: pytest.MonkeyPatch, do: Callable[[LoadPlan], object]) -> list[int]:
    """Call `do(plan)` before each part but the first; the pages that were planned before each."""
    planner, found = host.engine.loader.planner, list[int]()
    go_on = planner.go_on

    def call(plan: LoadPlan, most: int | None = None) -> None:
        found.append(len(plan))
        if len(plan):
            do(plan)
        go_on(plan, most)

    monkeypatch.setattr(planner, "go_on", call)
    return found


@pytest.mark.parametrize(
    ("page_bytes", "largest", "part", "following"),
    [(8 << 20, 32, 16, 128), (4 << 20, 32, 16, 64), (1 << 20, 128, 64, 128), (1 << 18, 512, 256, 512)],
)
def test_loads_are_planned_in_parts_from_two_first_parts_on(
    page_bytes: int, largest: int, part: int, following: int
) -> None:
    """Parts of large pages grow faster."""
    loads: Any = SimpleNamespace(layout=SimpleNamespace(page_bytes=page_bytes))
    assert loader.Loader._first_part(loads, largest) is None
    assert loader.Loader._first_part(loads, largest + 1) == part
    assert loader.Loader._next_part(loads, part) == following


@pytest.mark.usefixtures("_parts")
@pytest.mark.parametrize("cpu", [16, None])
def test_reads_begin_before_the_plan_is_whole(
    open_host: OpenHost, monkeypatch: pytest.MonkeyPatch, cpu: int | None
) -> None:
    """And others have the manager's lock between."""
    host = open_host(model=EVEN, transport=FAULTY, cpu=cpu)
    tokens = stored(host, 1)
    drop_from(host.engine, *(["cpu"] if cpu else []))
    PLAN.reset()
    looked: list[int] = []
    begin = load_run.LoadRun.begin

    def look(run: load_run.LoadRun) -> None:
        begin(run)
        if run.plan.whole:
            return
        until(lambda: len(PLAN.moved[Op.READ]) > 0, "a read begins")
        other = threading.Thread(target=lambda: looked.append(host.engine.lookup(tokens).tokens))
        other.start()
        other.join(WAIT)

    monkeypatch.setattr(load_run.LoadRun, "begin", look)
    assert host.load(tokens).pages == (PageStatus.LOADED,) * PAGES
    assert looked == [4 * PAGES]
    settle(host.engine)


@pytest.mark.usefixtures("_parts")
@pytest.mark.parametrize("read", [False, True], ids=["copied", "read"])
def test_parts_have_the_groups_of_the_whole(open_host: OpenHost, monkeypatch: pytest.MonkeyPatch, read: bool) -> None:
    host = open_host(model=EVEN, transport=FAULTY, cpu=16)
    tokens, asked = stored(host, 1), list[int]()
    if read:
        drop_from(host.engine, "cpu")
    name = "read_groups" if read else "copy_groups"
    groups = getattr(load_run, name)

    def count(layout: object, pages: int, *sizes: object) -> object:
        asked.append(pages)
        return groups(layout, pages, *sizes)

    monkeypatch.setattr(load_run, name, count)
    assert host.load(tokens).pages == (PageStatus.LOADED,) * PAGES
    assert asked == [PAGES]


@pytest.mark.usefixtures("_parts")
def test_a_tail_that_is_read_has_the_groups_of_reads(open_host: OpenHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first part lies in memory."""
    host = open_host(model=EVEN, transport=FAULTY, cpu=16)
    tokens, asked = stored(host, 1), list[int]()
    drop_from(host.engine, "cpu")
    host.load(tokens[:8])
    groups = load_run.read_groups
    monkeypatch.setattr(load_run, "read_groups", lambda _, n, sizes: (asked.append(n), groups(_, n, sizes))[1])
    assert host.load(tokens).bytes_by_tier == dict.fromkeys(("cpu", "ssd"), 2 * host.layout.page_bytes)
    assert asked == [PAGES - 1]


@pytest.mark.usefixtures("_parts")
def test_a_page_that_goes_between_parts_ends_the_load(open_host: OpenHost, monkeypatch: pytest.MonkeyPatch) -> None:
    host = open_host(model=EVEN, cpu=16)
    tokens = stored(host, 1)
    between(host, monkeypatch, lambda _: lose(host.engine, tokens, [2]))
    load, blocks, _ = host.begin(tokens)
    assert load.tokens == 2 * 4
    assert load.result(WAIT).pages == (PageStatus.LOADED,) * 2
    host.give(blocks)
    settle(host.engine)


@pytest.mark.usefixtures("_parts")
@pytest.mark.parametrize("read", [False, True], ids=["copied", "read"])
@pytest.mark.parametrize("where", ["the begin", "the plan", "the move"])
def test_a_part_that_breaks_off_leaves_nothing(
    open_host: OpenHost, monkeypatch: pytest.MonkeyPatch, read: bool, where: str
) -> None:
    host = open_host(model=EVEN, transport=FAULTY, cpu=16)
    tokens = stored(host, 1)
    if read:
        drop_from(host.engine, "cpu")
    extend = host.engine._parts.executor.moves.extend
    fail = raising(InjectedError)

    def fail_once(move: int, ways: Any, *, last: bool) -> None:
        monkeypatch.setattr(host.engine._parts.executor.moves, "extend", extend)
        raise InjectedError

    hit, blocks = host.engine.lookup(tokens), host.take(PAGES)
    with monkeypatch.context() as patch:
        if where == "the begin":
            begins(host, patch, fail)
        elif where == "the plan":
            between(host, patch, fail)
        else:
            patch.setattr(host.engine._parts.executor.moves, "extend", fail_once)
        with pytest.raises(InjectedError):
            host.engine.load(hit, blocks)
    assert host.engine.stats()["leases"] == []
    assert not host.engine.loader.planner._filling
    host.give(blocks)
    assert host.load(tokens).pages == (PageStatus.LOADED,) * PAGES
    settle(host.engine)


@pytest.mark.usefixtures("_parts")
def test_a_part_whose_checksums_are_to_be_read_is_left_to_a_thread(
    open_host: OpenHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = open_host(model=EVEN, transport=FAULTY, cpu=16)
    tokens = stored(host, 1)
    drop_from(host.engine, "cpu")
    ssd, threads = host.engine.manager.ssd, list[str]()
    checksums = ssd.checksums

    def note(entries: Any) -> Any:
        threads.append(threading.current_thread().name)
        return checksums(entries)

    monkeypatch.setattr(ssd, "checksums", note)
    caller = threading.current_thread()

    def by_a_thread(entries: Any) -> bool:
        return threading.current_thread() is not caller

    between(host, monkeypatch, lambda _: monkeypatch.setattr(ssd, "at_hand", by_a_thread))
    assert host.load(tokens).pages == (PageStatus.LOADED,) * PAGES
    assert threads[0] == threading.current_thread().name
    assert [name.startswith("gdscache-load") for name in threads] == [False, True]
    settle(host.engine)
