"""A machine for tests of loads: real bytes, but every read and every copy happens when the test says so.

A copy takes the checksums of the bytes that it copies, as the kernels do; copies happen in the order in which they were
queued, as on a stream. Time stands still until it is up: then whatever has not ended is late.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from gdscache.errors import DeadlineError, IOFailedError, StorageError
from gdscache.moves.load import Machine
from gdscache.storage.base import Op
from gdscache.tiers.transfer import Moved, Mover, Slots

if TYPE_CHECKING:
    import torch

    from gdscache.checksum import Checksums
    from gdscache.streams import Event
    from gdscache.tiers.bounce import Bounce, Extents
    from gdscache.tiers.page_io import PageIO, Positions
    from gdscache.tiers.paths import Direction

LATE_S = 1000.0  # further than any deadline


class Choice:
    """Something that may happen next. `fault`: it is nothing that a machine in order does."""

    __slots__ = ("do", "fault", "name")

    def __init__(self, name: str, do: Callable[[], object], *, fault: bool = False) -> None:
        self.name = name
        self.do = do
        self.fault = fault

    def __repr__(self) -> str:
        return self.name


class When:
    """A wait that is over when a condition holds."""

    __slots__ = ("over",)

    def __init__(self, over: Callable[[], bool]) -> None:
        self.over = over


class SteppedMachine:
    """`content`: the bytes of the extents in each slot of the files, by space."""

    def __init__(
        self,
        mover: Mover,
        memories: Mapping[str, Extents],
        content: Mapping[str, Mapping[int, bytes]],
        bounce: Bounce | None,
        *,
        queues: bool = True,
    ) -> None:
        self.now = 0.0
        self.mover = SteppedMover(mover, queues=queues)
        self.files = {name: SteppedFiles(self, name, some) for name, some in content.items()}
        self.parts = Machine(self.mover, memories, self.files, bounce)

    def choices(self) -> list[Choice]:
        found = self.mover.choices()
        for files in self.files.values():
            found += files.choices()
        if any(files.flying for files in self.files.values()):
            found.append(Choice("time is up", self._pass, fault=True))
        return found

    def _pass(self) -> None:
        self.now += LATE_S
        for files in self.files.values():
            files.in_time = dict(files.landed)


class SteppedEvent:
    """Behind a copy."""

    def __init__(self) -> None:
        self.happened = False
        self.then: list[Callable[[], None]] = []

    def query(self) -> bool:
        return self.happened

    def synchronize(self) -> None:
        assert self.happened, "a step waited in the middle"

    def happen(self) -> None:
        self.happened = True
        for action in self.then:
            action()


class BrokenCopyError(Exception):
    """What a copy raises on order."""


class SteppedMover(Mover):
    """Queues copies of another mover, which copies at once. `queued`: what has not happened."""

    name = "stepped"

    def __init__(self, mover: Mover, *, queues: bool) -> None:
        self.planes = mover.planes
        self.layout = mover.layout
        self._mover = mover
        self._queues = queues
        self._queued: deque[tuple[SteppedEvent, Callable[[], None]]] = deque()
        self.sources: deque[tuple[Extents, list[int]]] = deque()  # of each queued copy
        self.breaks = 0  # the copy that cannot be queued, counted from 1
        self._asked = 0
        self._last: SteppedEvent | None = None

    def _move(
        self,
        direction: Direction,
        extents: Extents,
        slots: Slots,
        blocks: torch.Tensor,
        layers: range,
        after: Sequence[Event],
        *,
        sums: bool,
    ) -> Moved:
        self._asked += 1
        if self._asked == self.breaks:
            raise BrokenCopyError
        event, found = SteppedEvent(), list[Any]()

        def copy() -> None:
            moved = self._mover._move(direction, extents, slots, blocks, layers, after, sums=sums)
            found.append(moved.checksums() if sums else None)

        def digests() -> Checksums:
            event.synchronize()
            return cast("Checksums", found[0])

        self._queued.append((event, copy))
        self.sources.append((extents, list(map(int, slots))))
        self._last = event
        return Moved(cast("Event", event), None, digests)

    def choices(self) -> list[Choice]:
        return [Choice("a copy is done", self._copy)] if self._queued else []

    def _copy(self) -> None:
        event, copy = self._queued.popleft()
        copy()
        self.sources.popleft()
        event.happen()

    def queues(self, extents: Extents) -> bool:
        return self._queues

    def mark_loads(self) -> Event:
        return cast("Event", self._last)

    def mark_stores(self) -> Event:
        return cast("Event", self._last)

    def describe(self) -> dict[str, Any]:
        return {"name": self.name}

    def close(self) -> None:
        """There is nothing to give back."""


class SteppedFiles:
    """Files whose reads end when they are told to. `flying`: those that have not; `begun` counts them all.

    By slot: `landed` has the bytes of good reads, `in_time` those before time was up; `damaged` and `failed` are the
    slots of the others.
    """

    def __init__(self, machine: SteppedMachine, name: str, content: Mapping[int, bytes]) -> None:
        self.machine = machine
        self.flying: list[SteppedIO] = []
        self.begun = 0
        self.begins: Callable[[], None] = lambda: None  # called where a read does
        self.landed: dict[int, int] = {}
        self.in_time: dict[int, int] = {}
        self.damaged: set[int] = set()
        self.failed: set[int] = set()
        self._name = name
        self._content = content

    def describe(self) -> str:
        return self._name

    def transfer(
        self,
        op: Op,
        slots: Positions,
        ends: Sequence[tuple[Extents, Positions]],
        span: tuple[int, int] | None = None,
    ) -> PageIO:
        assert op is Op.READ, "only loads are stepped with bytes"
        assert span is not None, "a read of everything"
        ((extents, places),) = ends
        self.begun += 1
        self.begins()
        reads = [
            (int(slot), extents, int(place), self._content[int(slot)][span[0] : span[1]])
            for slot, place in zip(slots, places, strict=True)
        ]
        io = SteppedIO(self, f"read {self.begun} of {self._name}", reads, span[0])
        self.flying.append(io)
        return cast("PageIO", io)

    def choices(self) -> list[Choice]:
        return [choice for io in list(self.flying) for choice in io.choices()]


class SteppedIO:
    """Reads of pages, each into its place; see `PageIO`."""

    def __init__(
        self, files: SteppedFiles, name: str, reads: Sequence[tuple[int, Extents, int, bytes]], start: int
    ) -> None:
        self._files = files
        self._name = name
        self._reads = reads
        self._start = start
        self._left = list(range(len(reads)))
        self.ends: list[tuple[int, StorageError | None]] = []
        self._callbacks: list[Callable[[int], None]] = []

    @property
    def pages(self) -> int:
        return len(self._reads)

    @property
    def touching(self) -> list[tuple[int, Extents, int]]:
        """The slots that are read, and the places that are written."""
        return [self._reads[page][:3] for page in self._left]

    @property
    def now(self) -> float:
        return self._files.machine.now

    def choices(self) -> list[Choice]:
        page = self._left[0]
        found = [Choice(f"{self._name} lands", self._land_all)]
        if len(self._left) > 1:
            found.append(Choice(f"page {page} of {self._name} lands", lambda: self._land(page)))
        found.append(
            Choice(f"page {page} of {self._name} is damaged", lambda: self._land(page, damaged=True), fault=True)
        )
        found.append(Choice(f"page {page} of {self._name} fails", lambda: self._fail(page), fault=True))
        return found

    def _land_all(self) -> None:
        for page in list(self._left):
            self._land(page)

    def _land(self, page: int, *, damaged: bool = False) -> None:
        slot, extents, place, content = self._reads[page]
        landed = self._files.landed
        landed[slot] = landed.get(slot, 0) + len(content)
        if damaged:
            self._files.damaged.add(slot)
            content = bytes([content[0] ^ 1]) + content[1:]
        at = int(extents.where(np.array([place], dtype=np.int64), self._start)[0])
        memory = extents.flat
        assert isinstance(memory, memoryview), "reads into host memory"
        memory[at : at + len(content)] = content
        self._ended(page, None)

    def _fail(self, page: int) -> None:
        self._files.failed.add(self._reads[page][0])
        self._ended(page, IOFailedError("injected", ""))

    def _ended(self, page: int, error: StorageError | None) -> None:
        self._left.remove(page)
        self.ends.append((page, error))
        if not self._left:
            self._files.flying.remove(self)
        for callback in self._callbacks:
            callback(page)

    # -- what a move asks for --------------------------------------------------------------------------------------

    def ended(self, deadline: float, at_least: int = 1) -> SteppedEnds:
        return SteppedEnds(self, deadline, at_least)

    def on_end(self, callback: Callable[[int], None]) -> None:
        self._callbacks.append(callback)
        for page, _ in list(self.ends):
            callback(page)


class SteppedEnds(When, Iterator[tuple[Sequence[int], "StorageError | None"]]):
    """The pages of some I/O as they end, and the wait for the next of them."""

    __slots__ = ("_at_least", "_io", "_seen", "_until")

    def __init__(self, io: SteppedIO, until: float, at_least: int) -> None:
        super().__init__(self._ready)
        self._io = io
        self._until = until
        self._at_least = at_least
        self._seen = 0

    def _ready(self) -> bool:
        """Whether there is something to say."""
        io, fresh = self._io, len(self._io.ends) - self._seen
        return len(io.ends) == io.pages or fresh >= self._at_least or io.now >= self._until

    def __next__(self) -> tuple[Sequence[int], StorageError | None]:
        io, at = self._io, self._seen
        if at == io.pages:
            raise StopIteration
        if len(io.ends) < io.pages and len(io.ends) - at < self._at_least:
            raise DeadlineError("late", "")  # whatever fewer of them have ended
        error = io.ends[at][1]
        self._seen = at + 1
        while error is None and self._seen < len(io.ends) and io.ends[self._seen][1] is None:
            self._seen += 1
        return [page for page, _ in io.ends[at : self._seen]], error

    def ended(self) -> tuple[Sequence[int], StorageError | None] | None:
        return next(self, None)
