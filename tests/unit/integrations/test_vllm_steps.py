"""Random steps of vLLM's, with loads that are proven late or are bad: what is stored was computed from good pages."""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from gdscache import LoadReport, PageHashes, PageStatus
from gdscache.errors import VerifiedLoadError
from gdscache.integrations.vllm.requests import LoadOrder, StoreOrder
from gdscache.integrations.vllm.worker import Loads, Stores, begin_loads, end_step
from gdscache.store.handle import StoreHandle
from gdscache.tracing import OFF

CPU = torch.device("cpu")


@dataclasses.dataclass
class Step:
    """`load`: after so many steps its verdict is there, None for no load; `bad`: it is. `pages` become full. `written`:
    of which earlier step the first block is written to, in front of this one."""

    load: int | None
    bad: bool
    pages: int
    last: bool
    idle: bool
    written: int


steps = st.lists(
    st.builds(
        Step,
        load=st.none() | st.integers(0, 3),
        bad=st.sampled_from([False] * 5 + [True]),
        pages=st.integers(0, 3),
        last=st.booleans(),
        idle=st.sampled_from([False] * 4 + [True]),
        written=st.integers(-8, 12),
    ),
    max_size=12,
)


class HandsOver:
    """In place of the thread: at once, so that what has a verdict by then is known."""

    def submit(self, work: Callable[[], object]) -> None:
        work()

    def shutdown(self) -> None:
        pass


class World:
    """An engine whose loads end when the steps say so, and which remembers what it was given to store."""

    def __init__(self, given: list[Step], *, overlapping: bool) -> None:
        self.given = given
        self.now = 0
        self.judged: set[int] = set()  # steps whose load was looked at
        self.stored: list[bytes] = []
        self.early: list[bytes] = []  # of these, before the verdict on a load of that step, or of one before
        engine: Any = SimpleNamespace(
            timeline=OFF,
            groups=(),
            namespaces=lambda salt="": [bytes(32)],
            store_pages=self._store,
            epoch=lambda salt="": 0,
            mark=lambda: None,
            passed=lambda mark: None,
            load_many=lambda batch: self._load(self.now),
        )
        self.engine = engine
        self.loads = Loads(1, Counter(), overlapping=overlapping)
        self.stores = Stores([engine], Counter(), self.loads.prove)
        self.stores._thread.shutdown()
        self.stores._thread = HandsOver()  # type: ignore[assignment]

    def names(self, step: int) -> list[bytes]:
        return [page.key for page in self._hashes(step).pages(bytes(32))]

    def good(self, end: int) -> list[bytes]:
        """Pages of the steps before `end` whose own load was good."""
        return [
            name for n in range(end) if self.given[n].load is None or not self.given[n].bad for name in self.names(n)
        ]

    def run(self, number: int) -> None:
        """A step, as the connector has it. Raises `VerifiedLoadError`."""
        step, self.now = self.given[number], number
        if 0 <= step.written < number:
            self.stores.wait_until_read({8 * step.written})
        if step.load is not None:
            fetch: Any = SimpleNamespace(checked=lambda first, pages: SimpleNamespace(pages=[0]), release=lambda: None)
            self.loads.begin(begin_loads([self.engine], [LoadOrder("r", fetch, 0, (0,))], Counter()))
            self.loads.wait_all()
        blocks = tuple(8 * number + page for page in range(step.pages))
        orders = [StoreOrder("r", self._hashes(number), 0, blocks)] if blocks else []
        end_step(self.loads, self.stores, orders, idle=step.idle, last=step.last)

    def _hashes(self, step: int) -> PageHashes:
        names = [hashlib.sha256(bytes([step, page])).digest() for page in range(self.given[step].pages)]
        return PageHashes(names)

    def _load(self, step: int) -> Any:
        status = PageStatus.CANCELLED if self.given[step].bad else PageStatus.LOADED
        lasts = self.given[step].load or 0

        def results() -> list[LoadReport]:
            self.judged.add(step)
            return [LoadReport(4, (status,), {}, 0.0)]

        return SimpleNamespace(done=lambda: self.now >= step + lasts, wait=lambda layer: None, results=results)

    def _store(self, pages: list[Any], *_: Any, epoch: int) -> StoreHandle:
        names = [page.key for page in pages]
        self.stored += names
        for number, step in enumerate(self.given):
            if step.load is not None and number not in self.judged:
                later = {name for n in range(number, len(self.given)) for name in self.names(n)}
                self.early += [name for name in names if name in later]
        handle = StoreHandle(len(pages))
        handle.read(None)
        return handle


@given(steps)
def test_steps_one_at_a_time(given: list[Step]) -> None:
    """A step with a bad load is taken back; all others are stored."""
    world = World(given, overlapping=False)
    for number in range(len(given)):
        world.run(number)
    world.stores.close()
    assert Counter(world.stored) == Counter(world.good(len(given)))
    assert world.early == []


@given(steps)
def test_steps_that_overlap(given: list[Step]) -> None:
    """At a bad load everything ends, and nothing is stored of its step, or of one behind it."""
    world = World(given, overlapping=True)
    bad = next((n for n, step in enumerate(given) if step.load is not None and step.bad), len(given))
    ended = False
    for number in range(len(given)):
        try:
            world.run(number)
        except VerifiedLoadError:
            ended = True
            break
    world.stores.close()
    assert not ended or bad < len(given)
    assert world.early == []
    stored, before = Counter(world.stored), Counter(world.good(bad))
    if bad == len(given):
        assert stored == before
    else:
        assert stored <= before
