"""The worker's side of the vLLM connector over a real engine: bytes reach their blocks, and stores their pages."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gdscache import CacheEngine, LoadReport, PageHashes, PageStatus
from gdscache.config import Config
from gdscache.errors import (
    EngineClosedError,
    InterfaceUnsupportedError,
    LayerHooksError,
    SlotRangeError,
    StorageError,
    VerifiedLoadError,
)
from gdscache.gate.fit import ENOUGH
from gdscache.integrations.fetching import PinningCache
from gdscache.integrations.vllm.planes import planes_of
from gdscache.integrations.vllm.requests import LoadOrder, RequestTable, StoreOrder
from gdscache.integrations.vllm.session import SESSIONS, VllmSession, joined
from gdscache.integrations.vllm.worker import Loads, Stores, begin_loads, end_step
from gdscache.limits import EngineLimits
from gdscache.storage.base import Op
from gdscache.store.handle import StoreHandle
from gdscache.tracing import OFF
from tests.support.faults import Fault
from tests.support.faulty import PLAN
from tests.support.helpers import WAIT, drop_from, raising, until

CPU = torch.device("cpu")
LAYERS, BLOCKS, TOKENS = 3, 16, 4
PAGES = 5


def hashes(seed: int, pages: int = PAGES) -> PageHashes:
    return PageHashes([hashlib.sha256(bytes([seed, page])).digest() for page in range(pages)])


@dataclasses.dataclass
class Worker:
    """An engine over vLLM's tensors, and the two parts."""

    caches: dict[str, torch.Tensor]
    session: VllmSession
    stores: Stores
    loads: Loads
    counts: Counter[str]

    def begin(self, orders: list[LoadOrder]) -> None:
        self.loads.begin(begin_loads([self.session.engine], orders, self.counts))

    def fill(self, blocks: list[int], mark: int) -> None:
        for cache in self.caches.values():
            for place, block in enumerate(blocks):
                cache[block] = mark + place

    def marks(self, blocks: list[int]) -> list[list[float]]:
        """What each block is filled with, in each layer; a mixture is an error."""
        found = []
        for cache in self.caches.values():
            assert all(bool((cache[block] == cache[block].view(-1)[0]).all()) for block in blocks)
            found.append([float(cache[block].view(-1)[0]) for block in blocks])
        return found

    def order(self, seed: int, blocks: list[int], first: int = 0, *, between: bool = False) -> LoadOrder:
        fetch = self.session.fetch(hashes(seed), PAGES)
        until(fetch.done, "the fetch ends")
        if not between:
            assert fetch.verified() >= first + len(blocks)
        return LoadOrder("r", fetch, first, tuple(blocks), between)

    def store(self, seed: int, blocks: list[int], mark: int) -> None:
        self.fill(blocks, mark)
        self.stores.begin([StoreOrder("r", hashes(seed), 0, tuple(blocks))])
        self.stores.wait_until_read(set(blocks))
        self.session.engine.drain(30)


def over_tensors(
    path: Path, cpu: int = 24, transport: str = "posix", gate: str = "advisory", pack: str = "off"
) -> tuple[dict[str, torch.Tensor], CacheEngine]:
    """vLLM's tensors, and an engine over them, whose prefetches move a page at a time, two at once."""
    shape = (LAYERS, BLOCKS, 2, TOKENS, 64)
    memory = torch.zeros(shape, dtype=torch.bfloat16)
    caches = {f"layer.{i}": memory[i] for i in range(LAYERS)}
    planes = planes_of(caches, BLOCKS, TOKENS, "LBHNC")
    config = Config.from_dict(
        {
            "model": {"name": "tiny", "pack": pack, **planes.model()},
            "cpu": {"capacity": cpu * 4096},
            "ssd": {"path": str(path), "capacity": 64 * 4096, "transport": transport, "gds": "off", "threads": 2},
            "host_buffer": 16 * 4096,
            "load": {"gate": gate},
            "deadline": 20,
        }
    )
    limits = EngineLimits(prefetch_bytes=4096, prefetch_chunks=2)
    return caches, CacheEngine(config, [(tensor,) for tensor in planes.tensors], limits=limits)


@contextlib.contextmanager
def opened(path: Path, cpu: int = 24, transport: str = "posix", gate: str = "advisory") -> Iterator[Worker]:
    caches, engine = over_tensors(path, cpu, transport, gate)
    counts: Counter[str] = Counter()
    with engine, contextlib.closing(Stores([engine], counts)) as stores:
        loads = Loads(LAYERS, counts, overlapping=False)
        yield Worker(caches, VllmSession(engine, 60), stores, loads, counts)


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    with opened(tmp_path, transport="tests.support.faulty:FaultyTransport") as found:
        engine = found.session.engine
        yield found
        until(lambda: engine.stats()["leases"] == [], "leases end")
        assert engine.check().ok


def stub_load(*statuses: PageStatus, done: Callable[[], bool] = lambda: True) -> Any:
    """A load with such a report."""
    report = LoadReport(TOKENS, statuses, {}, 0.0)
    return SimpleNamespace(done=done, wait=lambda layer: None, results=lambda: [report])


def stub_fetch() -> Any:
    def take(first: int, pages: int) -> Any:
        return SimpleNamespace(pages=[0] * pages)

    return SimpleNamespace(checked=take, unchecked=take, release=lambda: None)


def test_pages_go_and_come_back(worker: Worker) -> None:
    worker.store(1, [3, 1, 4, 15, 9], 10)
    worker.store(2, [2, 6, 5, 8, 7], 20)
    worker.fill(list(range(BLOCKS)), 100)
    worker.begin([worker.order(1, [0, 2]), worker.order(2, [8, 9, 10], 1)])
    for layer in range(LAYERS):
        worker.loads.wait(layer)
        worker.loads.wait(layer)
    worker.loads.end_step()
    assert worker.loads.take_bad() == set()
    assert worker.marks([0, 2, 8, 9, 10]) == [[10, 11, 21, 22, 23]] * LAYERS
    assert worker.marks([1, 3, 7, 11]) == [[101, 103, 107, 111]] * LAYERS
    assert worker.counts["begun_pages"] == 5


def test_a_forward_that_does_not_wait_is_found_out(worker: Worker) -> None:
    worker.store(1, [0, 1, 2, 3, 4], 10)
    worker.begin([worker.order(1, [5, 6])])
    worker.loads.wait(0)
    with pytest.raises(LayerHooksError, match="layer 1 first") as raised:
        worker.loads.end_step()
    assert "layerwise" in raised.value.hint


def test_a_load_between_steps_names_its_bad_blocks(worker: Worker) -> None:
    worker.store(1, [0, 1, 2, 3, 4], 10)
    order = worker.order(1, [5, 6, 7, 8, 9], between=True)
    worker.session.engine.clear()
    worker.begin([order])
    worker.loads.end_step()
    until(lambda: worker.loads.end_step() and not worker.loads.under_way, "the load ends")
    assert worker.loads.take_arrived() == {"r"}
    assert worker.loads.take_bad() == {5, 6, 7, 8, 9}
    assert worker.loads.take_arrived() == set()


def stub_engine() -> tuple[Any, list[StoreHandle]]:
    """An engine whose stores read nothing until the test says so, and their handles."""
    handles: list[StoreHandle] = []

    def store(pages: list[Any], blocks: torch.Tensor, salt: str, after: object, *, epoch: int) -> StoreHandle:
        assert len(pages) == len(blocks)
        handles.append(StoreHandle(len(pages)))
        return handles[-1]

    engine: Any = SimpleNamespace(
        timeline=OFF,
        groups=(),
        namespaces=lambda salt="": [b"namespace"],
        store_pages=store,
        epoch=lambda salt="": 0,
        mark=lambda: None,
        passed=lambda mark: None,
    )
    return engine, handles


def test_pages_of_changed_weights_are_not_those_of_the_files(tmp_path: Path) -> None:
    """The old ones are gone; the new ones are found, but not by an engine that begins with the files' weights again."""
    before, after = hashes(1), hashes(2)
    with opened(tmp_path) as worker:
        worker.session.stores = worker.stores
        worker.store(1, [0, 1, 2, 3, 4], 10)
        worker.stores.begin([StoreOrder("r", hashes(3), 0, (5,))])  # which waits for others
        assert worker.session.cached(before) == PAGES
        worker.session.weights_changed()
        worker.stores.flush()
        assert worker.session.cached(before) == worker.session.cached(hashes(3)) == 0
        worker.store(2, [0, 1, 2, 3, 4], 50)
        assert worker.session.cached(after) == PAGES
        worker.begin([worker.order(2, [8, 9, 10, 11, 12])])
        worker.loads.wait_all()
        worker.loads.end_step()
        assert worker.marks([8, 9, 10, 11, 12]) == [[50.0, 51.0, 52.0, 53.0, 54.0]] * LAYERS
        worker.session.weights_changed()
        assert worker.session.cached(after) == 0
        worker.store(2, [0, 1, 2, 3, 4], 90)
    with opened(tmp_path) as worker:
        assert [worker.session.cached(some) for some in (before, after, hashes(3))] == [0, 0, 0]


def left(handles: list[StoreHandle]) -> list[int]:
    """Pages of each that have no end yet."""
    return [handle._left for handle in handles]


def test_a_tier_that_cannot_be_cleared_has_no_page_of_the_old_weights_to_find(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.fill([0, 1, 2, 3, 4], 1)
    worker.stores.begin([StoreOrder("r", hashes(1), 0, (0, 1, 2, 3, 4))])
    worker.stores.flush()
    until(lambda: worker.session.cached(hashes(1)) == PAGES, "the pages are stored")
    worker.session.stores = worker.stores
    broken = raising(StorageError("the catalogue cannot be written", "see the device"))
    monkeypatch.setattr(worker.session.engine, "invalidate", broken)
    with pytest.raises(StorageError):
        worker.session.weights_changed()
    assert worker.session.cached(hashes(1)) == 0


def test_blocks_that_a_store_reads_are_waited_for() -> None:
    engine, handles = stub_engine()
    counts: Counter[str] = Counter()
    stores = Stores([engine], counts)
    stores.begin([])
    assert not handles
    stores.begin([StoreOrder("a", hashes(1), 0, (0, 1, 2)), StoreOrder("b", hashes(2), 3, (5, 6))])
    stores.begin([StoreOrder("a", hashes(1), 3, (3, 4))])
    until(lambda: left(handles) == [5, 2], "they are handed over")
    stores.wait_until_read({7, 8})  # nobody reads these
    written = threading.Event()

    def write() -> None:
        stores.wait_until_read({2, 9})
        written.set()

    thread = threading.Thread(target=write)
    thread.start()
    assert not written.wait(0.2)
    handles[0].read(None)
    assert written.wait(WAIT)
    thread.join()
    assert counts["blocks_awaited"] == 1
    stores.wait_until_read({0, 1, 2, 5, 6})  # have been read
    handles[1].read(None)
    stores.wait_until_read(set(range(BLOCKS)))
    stores.close()


def test_requests_of_a_step_that_share_blocks(worker: Worker) -> None:
    """vLLM lets a request begin with the blocks that another one fills in the same step: both name their pages."""
    worker.fill([3, 4, 5, 6, 7, 8], 30)
    digests = [hashlib.sha256(bytes([page])).digest() for page in range(6)]
    shared, other = PageHashes(digests[:4]), PageHashes([*digests[:3], *digests[4:]])
    worker.stores.begin(
        [StoreOrder("a", shared, 0, (3, 4, 5, 6)), StoreOrder("b", other, 0, (3, 4, 5, 7, 8))], last=True
    )
    worker.stores.wait_until_read({3, 4, 5, 6, 7, 8})
    worker.session.engine.drain(30)
    assert (worker.session.cached(shared), worker.session.cached(other)) == (4, 5)
    assert worker.counts["offered_pages"] == 6
    worker.stores.begin([StoreOrder("c", hashes(3), 0, (9,)), StoreOrder("d", hashes(4), 0, (9,))], last=True)
    until(lambda: not worker.stores.reads(), "two pages of one block are refused")
    assert (worker.session.cached(hashes(3)), worker.session.cached(hashes(4))) == (0, 0)


def test_requests_of_a_hybrid_model_share_blocks_behind_unequal_pages(worker: Worker) -> None:
    """A page follows the one that its request stored before it, and another request may have stored none there."""
    worker.fill([3, 4], 30)
    first, page = worker.session.engine.pages(hashes(5, 2))
    worker.stores.begin(
        [StoreOrder("a", (first, page), 0, (3, 4)), StoreOrder("b", (page._replace(parent=bytes(32)),), 0, (4,))],
        last=True,
    )
    worker.stores.wait_until_read({3, 4})
    worker.session.engine.drain(30)
    assert worker.session.cached(hashes(5, 2)) == 2
    assert (worker.counts["offered_pages"], worker.counts["unstored_pages"]) == (2, 0)


def test_pages_of_a_store_that_is_refused_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    engine, _ = stub_engine()
    engine.store_pages = raising(SlotRangeError("no such block", ""))
    counts: Counter[str] = Counter()
    stores = Stores([engine], counts)
    stores.begin([StoreOrder("a", hashes(1), 0, (0, 1, 2))], last=True)
    until(lambda: not stores.reads(), "the store is refused")
    stores.close()
    assert counts == {"offered_pages": 3, "unstored_pages": 3}
    assert "SlotRangeError" in caplog.text


def test_single_pages_are_handed_over_together() -> None:
    engine, handles = stub_engine()
    stores = Stores([engine], Counter())
    numbers = itertools.count(20)

    def single() -> StoreOrder:
        return StoreOrder("a", hashes(1), 0, (next(numbers),))

    for _ in range(7):
        stores.begin([single()])
    assert handles == []
    stores.begin([])  # the eighth step
    until(lambda: left(handles) == [7], "they are handed over")
    stores.begin([single() for _ in range(15)])
    stores.begin([single()])
    until(lambda: left(handles) == [7, 16], "they are handed over")
    stores.begin([single()])
    stores.begin([StoreOrder("b", hashes(2), 0, (1, 2))])  # of a prefill
    until(lambda: left(handles) == [7, 16, 3], "they are handed over")
    stores.begin([single()], last=True)
    stores.begin([StoreOrder("a", hashes(1), 0, (7,))])
    stores.wait_until_read({8})
    until(lambda: left(handles) == [7, 16, 3, 1], "they are handed over")
    for handle in handles:
        handle.read(None)
    waited = threading.Thread(target=stores.wait_until_read, args=({7, 8},))
    waited.start()  # somebody is to write to it: it is handed over, and waited for
    until(lambda: len(handles) == 5, "the page is handed over")
    handles[4].read(None)
    waited.join(WAIT)
    assert not waited.is_alive()
    stores.close()
    assert len(handles) == 5


def begun(engine: Any, *, overlapping: bool) -> tuple[Loads, Stores]:
    loads = Loads(LAYERS, Counter(), overlapping=overlapping)
    return loads, Stores([engine], Counter(), loads.prove)


def test_what_a_step_computes_is_stored_when_its_load_is_proven() -> None:
    """Where steps overlap the verdict comes later, and the next step has begun on what was computed."""
    engine, handles = stub_engine()
    over: list[bool] = []
    engine.load_many = lambda batch: stub_load(PageStatus.LOADED, done=lambda: bool(over))
    loads, stores = begun(engine, overlapping=True)
    end_step(loads, stores, [StoreOrder("a", hashes(1), 0, (0, 1))])  # before the load
    until(lambda: left(handles) == [2], "it is handed over")
    loads.begin(begin_loads([engine], [LoadOrder("r", stub_fetch(), 0, (8,))], Counter()))
    loads.wait_all()
    orders = [StoreOrder("r", hashes(2), 1, (9, 10)), StoreOrder("b", hashes(3), 0, (5,))]
    end_step(loads, stores, orders, last=True)
    assert loads.unproven == 1
    end_step(loads, stores, [StoreOrder("r", hashes(2), 3, (11, 12))])
    assert loads.unproven == 2
    stores.wait_until_read({6, 7})  # nobody waits with these
    stores.flush()
    assert len(handles) == 1
    end_step(loads, stores, [], idle=True)  # nothing is computed: the verdict is waited for
    assert loads.unproven == 0
    until(lambda: left(handles) == [2, 5], "both steps are handed over")
    over.clear()
    loads.begin(begin_loads([engine], [LoadOrder("r", stub_fetch(), 0, (8,))], Counter()))
    loads.wait_all()
    end_step(loads, stores, [StoreOrder("r", hashes(4), 0, (3,))], last=True)  # a single page, of one that ends
    over.append(True)
    end_step(loads, stores, [])
    until(lambda: left(handles) == [2, 5, 1], "it waits for no other page")
    for handle in handles:
        handle.read(None)
    stores.close()


def test_steps_go_on_while_each_has_a_load() -> None:
    engine, handles = stub_engine()
    under_way: list[list[bool]] = []

    def load_many(batch: Any) -> Any:
        mine: list[bool] = []
        under_way.append(mine)
        return stub_load(PageStatus.LOADED, done=lambda: bool(mine))

    engine.load_many = load_many
    loads, stores = begun(engine, overlapping=True)
    for step in range(4):
        loads.begin(begin_loads([engine], [LoadOrder("r", stub_fetch(), 0, (8,))], Counter()))
        loads.wait_all()
        if step:
            under_way[step - 1].append(True)
        end_step(loads, stores, [StoreOrder("r", hashes(step), 0, (step, 9))])
        assert loads.unproven == 1
    until(lambda: left(handles) == [2, 2, 2], "all but the last step's are handed over")
    for handle in handles:
        handle.read(None)
    stores.close()  # which waits for the verdict
    assert len(handles) == 4


def test_a_block_of_a_step_that_is_not_proven_is_written_to() -> None:
    """Its request has gone, and another one has its block: the verdict is waited for, and then the store."""
    engine, handles = stub_engine()
    for status in (PageStatus.LOADED, PageStatus.CANCELLED):
        engine.load_many = lambda batch, status=status: stub_load(status, done=lambda: False)
        loads, stores = begun(engine, overlapping=True)
        loads.begin(begin_loads([engine], [LoadOrder("r", stub_fetch(), 0, (8,))], Counter()))
        loads.wait_all()
        end_step(loads, stores, [StoreOrder("r", hashes(1), 1, (9, 10))])
        if status is PageStatus.LOADED:
            writes = threading.Thread(target=stores.wait_until_read, args=({10},))
            writes.start()
            until(lambda: left(handles) == [2], "it is handed over")
            handles[0].read(None)
            writes.join(WAIT)
        else:
            with pytest.raises(VerifiedLoadError, match="1 blocks of 1 requests"):
                stores.wait_until_read({10})
        stores.close()
    assert len(handles) == 1


def test_a_load_of_which_less_was_begun_than_was_promised() -> None:
    load = stub_load(PageStatus.LOADED)
    engine: Any = SimpleNamespace(load_many=lambda batch: load, timeline=OFF)
    fetch: Any = stub_fetch()
    loads = Loads(LAYERS, Counter(), overlapping=True)
    loads.begin(begin_loads([engine], [LoadOrder("r", fetch, 0, (8, 9, 10), between=True)], Counter()))
    loads.end_step()
    assert (loads.take_arrived(), loads.take_bad()) == ({"r"}, {9, 10})


def test_pages_of_an_ended_request_wait_for_the_proof_of_the_steps_so_far(worker: Worker) -> None:
    worker.fill([1, 2], 5)
    worker.stores.begin([], unproven=1)
    worker.stores.end([StoreOrder("r", hashes(1), 0, (1,))])
    assert worker.stores.reads() == {1}
    assert worker.counts["offered_pages"] == 0
    worker.stores.begin([])
    worker.stores.end([StoreOrder("r", hashes(2), 0, (2,))])
    assert worker.counts["offered_pages"] == 2
    worker.stores.wait_until_read({1, 2})
    worker.session.engine.drain(30)
    worker.begin([worker.order(1, [8]), worker.order(2, [9])])
    worker.loads.wait_all()
    assert worker.marks([8, 9])[0] == [5, 6]
    end_step(worker.loads, worker.stores, [])


def test_the_thread_of_stores_ends_also_where_the_last_pages_are_refused(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = raising(EngineClosedError("the engine was closed meanwhile", "open a new one"))
    monkeypatch.setattr(worker.session.engine, "epoch", refused)
    worker.stores.begin([StoreOrder("r", hashes(1), 0, (1,))])
    with pytest.raises(EngineClosedError):
        worker.stores.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("gdscache-stores")]


def test_roles_share_an_engine_which_the_worker_closes(tmp_path: Path) -> None:
    """It ends before the scheduler, whose waiting requests then let their pages go."""
    with pytest.raises(InterfaceUnsupportedError, match="engine a"):
        joined("a")
    with opened(tmp_path) as worker:
        SESSIONS["a"] = worker.session
        worker.store(1, [1, 2], mark=1)
        table = RequestTable(joined("a"), TOKENS, wait=WAIT)
        names = [hashlib.sha256(bytes([1, page])).digest() for page in range(2)]
        table.add(SimpleNamespace(request_id="r", num_tokens=3 * TOKENS, block_hashes=names))
        fetch = table._known["r"].fetch
        assert fetch is not None
        until(lambda: fetch.verified() == 2, "its pages are pinned")
    table.clear()
    assert len(table) == 0
    del SESSIONS["a"]


def test_both_cpu_tiers_of_packed_pages_are_in_memory(tmp_path: Path) -> None:
    """vLLM counts the tokens of a hit by where they were: a page that does not fit packed lies in a tier of its own."""
    caches, engine = over_tensors(tmp_path, cpu=1024, pack="on")
    for cache in caches.values():
        cache[1].view(torch.int16).random_(-(1 << 15), 1 << 15)
    with engine:
        session = VllmSession(engine, 60)
        assert not engine.store(hashes(1), list(range(PAGES))).result(WAIT).dropped
        fetch = session.fetch(hashes(1), PAGES)
        sources = fetch.sources(0, PAGES)
        assert (sources, all(map(session.on_host, sources))) == ({"cpu": PAGES - 1, "cpu_plain": 1}, True)
        fetch.release()
        engine.drain(WAIT)
        for tier in sources:
            drop_from(engine, tier)
        fetch = session.fetch(hashes(1), PAGES)
        sources = fetch.sources(0, PAGES)
        assert (sources, any(map(session.on_host, sources))) == ({"ssd": PAGES - 1, "ssd_plain": 1}, False)
        fetch.release()


@pytest.mark.parametrize("room", [24, 2])
def test_pages_that_pay_only_behind_local_ones_are_brought_without_these(tmp_path: Path, room: int) -> None:
    """With little room they go between steps."""
    with opened(tmp_path, room, gate="enforcing") as worker:
        session, engine = worker.session, worker.session.engine
        worker.store(1, [0, 1, 2, 3, 4], 10)
        drop_from(engine, "cpu")
        for _ in range(ENOUGH):
            engine.observe_load("ssd", engine.layout.bytes_in("ssd"), 1.0)
            for tokens, cached in ((4, 0), (8, 0), (4, 12), (8, 12)):  # attention is nearly all of it
                engine.observe_prefill(tokens, cached, 1e-3 * tokens + 0.02 * tokens * (cached + tokens / 2))
        declined = session.fetch(hashes(1), PAGES)
        assert (declined.wanted, declined.cached) == (0, PAGES)
        fetch = session.fetch(hashes(1), PAGES, 3)
        until(fetch.done, "the fetch ends")
        assert (fetch.wanted, fetch.cached, fetch.sources(3, 2)) == (PAGES, PAGES, {"ssd": 2})
        between = fetch.crowded()
        assert (between, fetch.verified(), engine.stats()["prefetch"]["pinned_pages"]) == (
            (True, 4, 1) if room == 2 else (False, PAGES, 2)
        )
        worker.begin([LoadOrder("r", fetch, 3, (8, 9), between)])
        for layer in range(LAYERS):
            worker.loads.wait(layer)
        until(lambda: worker.loads.end_step() and not worker.loads.under_way, "the load ends")
        assert (worker.loads.take_bad(), worker.marks([8, 9])) == (set(), [[13, 14]] * LAYERS)


def test_behind_a_full_queue_of_prefetches_pages_go_between_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As without room in the CPU tier: else cached pages are computed."""
    _, engine = over_tensors(tmp_path)
    with engine:
        engine.store(hashes(1), list(range(PAGES))).result(WAIT)
        drop_from(engine, "cpu")
        monkeypatch.setattr(engine._parts.prefetcher._queue, "_most", 0)
        fetch = PinningCache(engine, 60.0).fetch(hashes(1), PAGES)
        assert (fetch.done(), fetch.wanted, fetch.verified(), fetch.crowded()) == (True, PAGES, 0, True)
        fetch.release()


@pytest.mark.parametrize(("token", "stops"), [(1e-3, True), (1e3, False)])
def test_a_slow_disk_is_waited_for_only_where_computing_is_slower(tmp_path: Path, token: float, stops: bool) -> None:
    """Two of five pages are under way, and nothing comes; to compute takes `token` seconds each."""
    _, engine = over_tensors(tmp_path, transport="tests.support.faulty:FaultyTransport", gate="enforcing")
    with engine:
        engine.store(hashes(1), list(range(PAGES))).result(WAIT)
        drop_from(engine, "cpu")
        for _ in range(ENOUGH):
            engine.observe_prefill(TOKENS, 0, TOKENS * token)
        with PLAN.rule(Op.READ, Fault.HANG):
            fetch = PinningCache(engine, 60.0).fetch(hashes(1), PAGES)
            until(lambda: PLAN.held == 2, "two pages are read")
            if stops:
                until(fetch.outpaced, "it is outpaced")
            else:
                time.sleep(0.1)
                assert not fetch.outpaced()
            assert (fetch.verified(), fetch.wanted, fetch.done()) == (0, PAGES, False)
            fetch.release()
        until(fetch.done, "the fetch ends")
