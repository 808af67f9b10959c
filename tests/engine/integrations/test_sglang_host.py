"""Pages between a host pool of SGLang's and the SSD, and between its device pools and the tiers, over real engines."""

from __future__ import annotations

import errno
import functools
import hashlib
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from gdscache import CacheEngine, PageStatus
from gdscache.config import Config
from gdscache.errors import GdsCacheError, IOFailedError
from gdscache.integrations.settings import Rows, planes_section
from gdscache.integrations.sglang.host import HostPages
from gdscache.integrations.sglang.loads import LoadTable, QueuedLoad
from gdscache.integrations.sglang.moves import LayerLoads, Offloads
from gdscache.integrations.sglang.pages import PageLinks
from gdscache.integrations.sglang.served import PoolLoads, SinglePool
from gdscache.storage.base import Op
from gdscache.store.handle import StoreHandle
from tests.support.faults import Fault
from tests.support.faulty import PLAN
from tests.support.helpers import WAIT, drop_from, until

PAGE, PAGES, WIDTH = 4, 24, 512
KEYS = [hashlib.sha256(bytes([number])).hexdigest() for number in range(12)]


def engine_over(path: Path, tensors: list[tuple[torch.Tensor, ...]], cpu: int | None, **more: Any) -> CacheEngine:
    layers = [{f"p{number}": Rows(WIDTH) for number in range(len(layer))} for layer in tensors]
    sections: dict[str, Any] = {
        "model": {"name": "tiny", **planes_section(layers, PAGE)},
        "ssd": {"path": str(path), "capacity": 64 * 4096 * 4, "transport": "posix", "gds": "off", "threads": 2},
        "host_buffer": 64 * 4096,
        "deadline": WAIT,
    }
    if cpu is not None:
        sections["cpu"] = {"capacity": cpu * 4096 * 4}
    for name, values in more.items():
        sections[name] = {**sections.get(name, {}), **values} if isinstance(values, dict) else values
    return CacheEngine(Config.from_dict(sections), tensors)


def pool() -> list[tuple[torch.Tensor, ...]]:
    return [
        (torch.zeros((PAGES, PAGE, WIDTH), dtype=torch.uint8), torch.zeros((PAGES, PAGE, WIDTH), dtype=torch.uint8))
    ]


def fill(tensors: list[tuple[torch.Tensor, ...]], page: int, mark: int) -> None:
    for layer in tensors:
        for number, plane in enumerate(layer):
            plane[page] = (mark + number) % 256


def mark_of(tensors: list[tuple[torch.Tensor, ...]], page: int) -> int:
    """What a page is filled with; a mixture is an error."""
    first = int(tensors[0][0][page, 0, 0])
    for layer in tensors:
        for number, plane in enumerate(layer):
            assert plane[page].unique().tolist() == [(first + number) % 256]
    return first


def slots(*pages: int) -> list[int]:
    return [page * PAGE for page in pages]


# -- the storage -----------------------------------------------------------------------------------------------------


class Storage(RuleBasedStateMachine):
    """Pages are set, asked for, brought and dropped, with restarts: the bytes are those that were set last."""

    path: Path
    runs = 0

    @initialize()
    def begin(self) -> None:
        type(self).runs += 1
        self.place = self.path / str(type(self).runs)
        self.tensors, self.model = pool(), dict[str, int]()
        self.pages = HostPages(engine_over(self.place, self.tensors, None))

    @rule(first=st.integers(0, 11), count=st.integers(1, 6), mark=st.integers(0, 250))
    def set(self, first: int, count: int, mark: int) -> None:
        keys = KEYS[first : first + count]
        for number in range(len(keys)):
            fill(self.tensors, number, mark + number)
        assert self.pages.set(keys, slots(*range(len(keys))), KEYS[:first]) == [True] * len(keys)
        for number, key in enumerate(keys):
            self.model.setdefault(key, (mark + number) % 256)  # a page that is there stays: it has the same bytes

    @rule(first=st.integers(0, 11), count=st.integers(1, 6))
    def exists(self, first: int, count: int) -> None:
        keys = KEYS[first : first + count]
        assert self.pages.exists(keys, KEYS[:first]) == self.prefix(keys)

    @rule(first=st.integers(0, 11), count=st.integers(1, 6))
    def get(self, first: int, count: int) -> None:
        keys = KEYS[first : first + count]
        for page in range(PAGES):
            fill(self.tensors, page, 255 - page)
        came = self.pages.get(keys, slots(*range(10, 10 + len(keys))))
        there = self.prefix(keys)
        assert came == [True] * there + [False] * (len(keys) - there)
        for page in range(PAGES):
            at = page - 10
            wanted = self.model[keys[at]] if 0 <= at < there else 255 - page
            assert mark_of(self.tensors, page) == wanted % 256

    @rule()
    def clear(self) -> None:
        self.pages.clear()
        self.model.clear()

    @rule()
    def restart(self) -> None:
        self.pages.close()
        self.tensors = pool()
        self.pages = HostPages(engine_over(self.place, self.tensors, None))

    def prefix(self, keys: list[str]) -> int:
        return next((i for i, key in enumerate(keys) if key not in self.model), len(keys))

    def teardown(self) -> None:
        if hasattr(self, "pages"):
            self.pages.close()


def test_the_storage_against_a_dictionary(tmp_path: Path) -> None:
    Storage.path = tmp_path
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        Storage, settings=settings(max_examples=15, stateful_step_count=15, deadline=None)
    )


@pytest.fixture
def faulty(tmp_path: Path) -> Iterator[HostPages]:
    ssd = {"transport": "tests.support.faulty:FaultyTransport"}
    engine = engine_over(tmp_path, pool(), None, ssd=ssd, deadline=0.4)
    found = HostPages(engine)
    yield found
    found.close()


def planes_of(found: HostPages) -> list[tuple[torch.Tensor, ...]]:
    return found.engine._parts.planes.tensors


def test_a_bad_page_ends_the_prefix(faulty: HostPages) -> None:
    for number in range(6):
        fill(planes_of(faulty), number, 10 + number)
    assert all(faulty.set(KEYS[:6], slots(*range(6))))
    with PLAN.rule(Op.READ, Fault.FLIP, rate=1.0, bit=7):
        assert faulty.get(KEYS[:6], slots(*range(10, 16))) == [False] * 6
    assert faulty.exists(KEYS[:6]) == 0, "they are dropped"


def test_a_read_that_hangs_leaves_the_pool_alone(faulty: HostPages) -> None:
    assert all(faulty.set(KEYS[:3], slots(0, 1, 2)))
    with PLAN.rule(Op.READ, Fault.HANG):
        assert faulty.get(KEYS[:3], slots(10, 11, 12)) == [False] * 3
        for page in (10, 11, 12):
            fill(planes_of(faulty), page, 200)
    assert [mark_of(planes_of(faulty), page) for page in (10, 11, 12)] == [200] * 3


@pytest.mark.parametrize("fault", [Fault.ENOSPC, Fault.HANG])
def test_a_disk_that_takes_nothing(faulty: HostPages, fault: Fault) -> None:
    with PLAN.rule(Op.WRITE, fault):
        assert faulty.set(KEYS[:3], slots(0, 1, 2)) == [False] * 3
        assert faulty.exists(KEYS[:3]) == 0


def test_more_than_the_queue_takes_at_once(tmp_path: Path) -> None:
    tensors = pool()
    found = HostPages(engine_over(tmp_path, tensors, None, store={"queue": 3 * 4096 * 4}))
    for number in range(12):
        fill(tensors, number, 10 + number)
    assert found.set(KEYS, slots(*range(12))) == [True] * 12
    assert found.exists(KEYS) == 12
    assert found.engine.pages(found._links.named(KEYS))[5].parent == found.engine.pages(found._links.named(KEYS))[4].key
    found.close()


def test_nothing_is_raised_into_hicaches_threads(tmp_path: Path) -> None:
    found = HostPages(engine_over(tmp_path, pool(), None))
    assert found.exists(["no key"]) == 0
    assert found.set([KEYS[0]], slots(PAGES + 5)) == [False]
    assert found.get([KEYS[0], KEYS[0]], slots(1, 2)) == [False, False]
    found.close()
    assert found.exists(KEYS) == 0
    assert found.get(KEYS[:1], slots(0)) == [False]
    assert found.set(KEYS[:1], slots(0)) == [False]


def test_new_weights_find_nothing_and_the_pool_is_flushed_first(tmp_path: Path) -> None:
    found = HostPages(engine_over(tmp_path, pool(), None))
    assert found.set(KEYS[:2], slots(0, 1)) == [True, True]
    found.weights_changed()
    assert found.exists(KEYS[:2]) == 0
    assert found.get(KEYS[:2], slots(2, 3)) == [False, False]
    assert found.set(KEYS[:2], slots(0, 1)) == [False, False], "the pool's pages are of the old weights"
    found.flushed()
    assert found.set(KEYS[:2], slots(0, 1)) == [True, True]
    assert found.exists(KEYS[:2]) == 2
    found.close()
    again = HostPages(engine_over(tmp_path, pool(), None))
    assert again.exists(KEYS[:2]) == 2, "those of the files' weights"
    again.close()


def test_an_error_of_a_clear_leaves_no_page_of_either_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = HostPages(engine_over(tmp_path, pool(), None))
    assert found.set(KEYS[:2], slots(0, 1)) == [True, True]
    found.weights_changed()
    found.flushed()
    assert found.set(KEYS[:2], slots(0, 1)) == [True, True]
    tier, deleted = found.engine.manager.tiers["ssd"], list[bytes | None]()

    def fails(namespace: bytes | None = None) -> None:
        deleted.append(namespace)
        raise IOFailedError("a write to the catalogue failed", "", errno.EIO)

    with monkeypatch.context() as disk:
        disk.setattr(tier, "commit_all_deletions", fails)
        with pytest.raises(IOFailedError):
            found.clear()
    wanted = {*found.engine.namespaces(), *found.engine.namespaces(found._salt)}
    assert found.exists(KEYS[:2]) == 0
    assert sorted(deleted, key=str) == sorted(wanted, key=str)
    found.close()


def test_an_update_that_ends_behind_the_flush_keeps_nobody_from_storing(tmp_path: Path) -> None:
    """SGLang flushes behind the parts of an update, and not behind its end."""
    found = HostPages(engine_over(tmp_path, pool(), None))
    for _ in range(2):
        found.weights_changed()  # begins; then a part of it
    found.flushed()
    for _ in range(2):
        found.weights_changed(ends=True)
    assert found.exists(KEYS[:2]) == 0
    assert found.set(KEYS[:2], slots(0, 1)) == [True, True]
    assert found.exists(KEYS[:2]) == 2
    for _ in range(2):
        found.weights_changed(ends=True)
    assert found.set(KEYS[:2], slots(0, 1)) == [False, False], "the pool was used behind the flush"
    found.flushed()
    found.weights_changed()
    found.weights_changed(ends=True)
    assert found.set(KEYS[:2], slots(0, 1)) == [False, False], "a part of it was not flushed behind"
    found.clear()
    assert sum(tier["pages"] for tier in found.engine.stats()["tiers"].values()) == 0, "none of any weights is left"
    found.close()


# -- the linker ------------------------------------------------------------------------------------------------------


class Linked:
    """An engine over device planes on the host, and the linker's parts."""

    def __init__(self, path: Path, **more: Any) -> None:
        self.tensors = [tuple(torch.zeros((PAGES, PAGE, WIDTH), dtype=torch.uint8) for _ in "kv") for _ in range(3)]
        self.engine = engine_over(path, self.tensors, 16, **more)
        self.counts: Counter[str] = Counter()
        self.cache, self.links = SinglePool(self.engine, 60.0), PageLinks()
        self.table = LoadTable(self.cache, self.links, wait=WAIT, alone=lambda: True)
        self.loads = LayerLoads(self.begin_loads, 3, self.counts)
        self.offloads = Offloads(self.cache, self.counts)

    def offload(self, keys: list[str], blocks: list[int], mark: int) -> None:
        for number, block in enumerate(blocks):
            fill(self.tensors, block, mark + number)
        self.offloads.start(self.links.named(keys), lambda: {"kv": blocks}, self.cache.salt, None)

    def begin_loads(self, number: int, queued: Sequence[QueuedLoad]) -> PoolLoads:
        return self.cache.load_many([(one.hit(), one.blocks()) for one in queued])

    def drain(self) -> None:
        """What was offloaded is stored."""
        self.offloads.wait()
        self.engine.drain(WAIT)

    def store(self, keys: list[str], blocks: list[int], mark: int) -> None:
        self.offload(keys, blocks, mark)
        self.drain()

    def begin(self, keys: list[str], blocks: list[int]) -> int:
        assert self.table.lookup("r", keys) == len(keys)
        assert self.table.load("r", keys, lambda: lambda: {"kv": blocks})
        return self.loads.queue(self.table.take())

    def forward(self, index: int) -> None:
        """A forward pass waits for the layers of its loads, which begin with it."""
        self.loads.set_consumer(index)
        for layer in range(3):
            self.loads.wait_until(layer)


@pytest.fixture
def linked(tmp_path: Path) -> Iterator[Linked]:
    found = Linked(tmp_path)
    with found.engine:
        yield found
        found.table.reset()
        found.loads.reset()
        found.offloads.close()
        until(lambda: found.engine.stats()["leases"] == [], "nothing is held")
        assert found.engine.check().ok


def test_pages_go_and_come_back(linked: Linked) -> None:
    linked.offload(KEYS[:5], [3, 1, 4, 15, 9], 10)
    until(lambda: linked.offloads.completed() == 1, "it is read")
    assert linked.offloads.pop() is True
    linked.drain()
    drop_from(linked.engine, "cpu")
    for page in range(PAGES):
        fill(linked.tensors, page, 200)
    index = linked.begin(KEYS[:5], [20, 21, 0, 2, 5])
    linked.loads.set_consumer(index)
    for layer in range(3):
        linked.loads.wait_until(layer)
        linked.loads.wait_until(layer)
    assert linked.loads.finish(index)
    assert [mark_of(linked.tensors, page) for page in (20, 21, 0, 2, 5)] == [10, 11, 12, 13, 14]
    assert [mark_of(linked.tensors, page) for page in (3, 1, 4, 15, 9)] == [200] * 5
    assert linked.loads.finish(index), "there is nothing to wait for"
    assert linked.loads.queue([]) == -1
    linked.loads.set_consumer(-1)
    linked.loads.wait_until(0)


def test_an_offload_is_over_when_its_pages_are_read(linked: Linked) -> None:
    linked.offload(KEYS[:4], [0, 1, 2, 3], 10)
    linked.offload(KEYS[:4], [0, 1, 2, 3], 10)  # SGLang offers what it has loaded again
    until(lambda: linked.offloads.completed() == 2, "they are read")
    for page in range(4):
        fill(linked.tensors, page, 99)
    assert linked.offloads.pop()
    assert linked.offloads.pop()
    assert linked.offloads.completed() == 0
    index = linked.begin(KEYS[:4], [10, 11, 12, 13])
    linked.forward(index)
    assert linked.loads.finish(index)
    assert [mark_of(linked.tensors, page) for page in (10, 11, 12, 13)] == [10, 11, 12, 13]


def test_loads_begin_with_their_forward_pass(linked: Linked) -> None:
    """What SGLang copies to the GPU before that, its inputs among it, does not wait behind them."""
    linked.store(KEYS[:2], [0, 1], 10)
    for page in (8, 9):
        fill(linked.tensors, page, 200)
    index = linked.begin(KEYS[:2], [8, 9])
    assert linked.counts["loads"] == 0
    assert [mark_of(linked.tensors, page) for page in (8, 9)] == [200, 200]
    linked.loads.set_consumer(index)
    assert linked.counts["loads"] == 1
    linked.forward(index)
    assert linked.counts["loads"] == 1
    assert linked.loads.finish(index)
    assert [mark_of(linked.tensors, page) for page in (8, 9)] == [10, 11]


def test_a_forward_pass_that_waits_for_the_last_layer_alone_waits_for_all(
    linked: Linked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang's runner does, in front of a pass that is one CUDA graph."""
    linked.store(KEYS[:2], [0, 1], 10)
    index = linked.begin(KEYS[:2], [8, 9])
    linked.loads.set_consumer(index)
    assert linked.loads.consumer_index == index
    waited: list[int] = []
    load = linked.loads._batches[index].load
    wait = load.wait

    def noted(layer: int) -> None:
        waited.append(layer)
        wait(layer)

    monkeypatch.setattr(load, "wait", noted)
    linked.loads.wait_until(2)
    linked.loads.wait_until(1)
    assert waited == [0, 1, 2]
    assert linked.loads.finish(index)
    assert [mark_of(linked.tensors, page) for page in (8, 9)] == [10, 11]


def test_a_forward_pass_that_waits_for_no_layer_had_no_pages(linked: Linked) -> None:
    linked.store(KEYS[:2], [0, 1], 10)
    index = linked.begin(KEYS[:2], [8, 9])
    linked.loads.set_consumer(index)
    assert not linked.loads.finish(index)
    assert linked.counts["failed_loads"] == 1
    until(lambda: linked.engine.stats()["leases"] == [], "its pins are let go of")


def test_pages_that_go_before_their_load_begins_are_told(linked: Linked) -> None:
    linked.store(KEYS[:4], [0, 1, 2, 3], 10)
    linked.table.lookup("r", KEYS[:4])
    assert linked.table.load("r", KEYS[:4], lambda: lambda: {"kv": [10, 11, 12, 13]})
    queued = linked.table.take()
    linked.engine.clear()
    index = linked.loads.queue(queued)
    assert index == 0
    linked.loads.set_consumer(index)
    linked.loads.wait_until(1)
    assert not linked.loads.finish(index)
    assert linked.counts["failed_loads"] == 1


@pytest.mark.parametrize("breaks", [False, True])
def test_a_load_that_breaks_off_or_lacks_a_page_is_told(
    linked: Linked, monkeypatch: pytest.MonkeyPatch, breaks: bool
) -> None:
    linked.store(KEYS[:2], [0, 1], 10)
    index = linked.begin(KEYS[:2], [10, 11])
    linked.forward(index)
    (load,) = linked.loads._batches[index].load.loads
    (report,) = load.results()
    bad = type(report)(report.tokens // 2, (PageStatus.LOADED, PageStatus.ABORTED), {}, 0.0)

    def results() -> Any:
        if breaks:
            raise GdsCacheError("CUDA says no")
        return [bad]

    monkeypatch.setattr(load, "results", results)
    assert not linked.loads.finish(index)


def test_another_salt_is_other_weights(linked: Linked) -> None:
    linked.store(KEYS[:2], [0, 1], 10)
    assert linked.table.lookup("a", KEYS[:2]) == 2
    linked.table.reset()
    linked.cache.salt = "weights:x"
    assert linked.table.lookup("a", KEYS[:2]) == 0
    linked.store(KEYS[:2], [4, 5], 77)
    linked.table.reset()
    index = linked.begin(KEYS[:2], [8, 9])
    linked.forward(index)
    assert linked.loads.finish(index)
    assert [mark_of(linked.tensors, page) for page in (8, 9)] == [77, 78]


def test_offloads_are_over_in_their_order() -> None:
    handles = [StoreHandle(1) for _ in range(3)]
    waiting = iter(handles)
    pool: Any = SimpleNamespace(store=lambda *args, **kwargs: [next(waiting)])
    offloads = Offloads(pool, Counter())
    for block in range(3):
        offloads.start(PageLinks().named(KEYS[:1]), functools.partial(list, [block]), "", None)
    assert offloads.completed() == 0
    handles[1].read(None)
    assert offloads.completed() == 0, "the oldest is still read"
    handles[0].read(None)
    until(lambda: offloads.completed() == 2, "they are read")
    assert offloads.pop()
    assert offloads.pop()
    assert offloads.completed() == 0
    reading = threading.Thread(target=offloads.wait)
    reading.start()
    reading.join(0.2)
    assert reading.is_alive(), "somebody may write to the page before it was read"
    handles[2].read(None)
    reading.join(WAIT)
    assert not reading.is_alive()
    offloads.close()


def test_an_offload_waits_for_its_blocks_in_its_thread(linked: Linked) -> None:
    """The GPU says late which blocks they are, behind a forward pass: SGLang's scheduler goes on."""
    told = threading.Event()

    def blocks() -> dict[str, list[int]]:
        assert told.wait(WAIT)
        return {"kv": [7, 8]}

    for number, block in enumerate((7, 8)):
        fill(linked.tensors, block, 40 + number)
    linked.offloads.start(linked.links.named(KEYS[:2]), blocks, linked.cache.salt, None)
    assert linked.offloads.completed() == 0
    told.set()
    until(lambda: linked.offloads.completed() == 1, "it is read")
    assert linked.offloads.pop() is True
    linked.drain()
    index = linked.begin(KEYS[:2], [1, 2])
    linked.forward(index)
    assert linked.loads.finish(index)
    assert [mark_of(linked.tensors, page) for page in (1, 2)] == [40, 41]


def test_an_engine_that_is_closed_takes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = Linked(tmp_path)
    found.engine.close()
    found.offloads.start(found.links.named(KEYS[:1]), lambda: {"kv": [0]}, "", None)
    until(lambda: found.offloads.completed() == 1, "it has an end")
    assert found.offloads.pop() is False
    found.offloads.close()  # the thread logs behind that end
    assert "EngineClosedError" in caplog.text
