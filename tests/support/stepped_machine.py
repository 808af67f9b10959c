"""A machine for tests of loads: real bytes, but every read and every copy happens when the test says so.

The moves are the native library's, and it has neither disks nor a GPU: this machine takes its jobs, and says what came
of them. A copy takes the checksums of the bytes that it copies, as the kernels do; copies happen in the order in which
they were taken, as on a stream. Time stands still until it is up: then whatever has not ended is late.
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from gdscache.extents import Extents, HostExtents
from gdscache.moves.native import MoveLimits, NativeMoves, Space
from gdscache.pages.checksum import Checksums, layer_checksums
from gdscache.pages.planes import PagedPlanes
from gdscache.tiers.cpu import Bounce
from tests.support.hooks import Job, hooks
from tests.support.host_copies import HostCopies

LATE_S = 1000.0  # further than any deadline
NS = 1_000_000_000


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
    __slots__ = ("over",)

    def __init__(self, over: Callable[[], bool]) -> None:
        self.over = over


class SteppedEvent:
    """Behind so many copies."""

    def __init__(self, machine: SteppedMachine, behind: int) -> None:
        self._machine = machine
        self._behind = behind

    def query(self) -> bool:
        return self._machine.done >= self._behind

    def synchronize(self) -> None:
        assert self.query(), "a step waited in the middle"


class Window:
    """Neighbouring slots of a reserve, cut anew: each of its own slots holds a part of an extent and no more.

    `within`: the slots; `span`: `(start, stop)` of the part in bytes of an extent, multiples of `EXTENT_ALIGNMENT`. So
    the memory of one page holds a group of layers of several, side by side, and neighbours are copied at once.
    """

    def __init__(self, extents: HostExtents, within: range, span: tuple[int, int]) -> None:
        self._start, stop = span
        self._extents = extents
        self._part = stop - self._start
        extent = extents.layout.extent_bytes
        self._first = within.start * extent - self._start  # where the first slot's extent would begin
        assert self._first >= 0, "the reserve's first slots are those of stores"
        slots, offset = len(within) * extent // self._part, int(extents.rows.storage_offset()) + self._first
        self.rows = extents.rows.as_strided((slots, stop), (self._part, 1), offset)

    def where(self, slot: int) -> range:
        """The bytes of a slot's part in the reserve."""
        at = self._first + self._start + slot * self._part
        return range(at, at + self._part)

    def digest(self, slot: int, layers: range) -> Checksums:
        """The checksums of some layers of the slot's bytes, taken now."""
        bounds, part = self._extents.layout.layer_bounds[layers.start : layers.stop], self.where(slot)
        view = self._extents.flat[part.start : part.stop]
        return layer_checksums(view, [(first - self._start, end - self._start) for first, end in bounds])


class SteppedMachine:
    """`content`: the bytes of the extents in each slot of the files, by space. `breaks`: the copy that cannot be made,
    counted from 1."""

    def __init__(
        self,
        planes: PagedPlanes,
        memories: Mapping[str, HostExtents],
        content: Mapping[str, Mapping[int, bytes]],
        bounce: Bounce,
        *,
        breaks: int = 0,
        limits: MoveLimits | None = None,
    ) -> None:
        self.now = 0.0
        self.memories = memories
        self.files = {name: SteppedFiles(self, name, some) for name, some in content.items()}
        self.done = 0  # copies
        self.copies: deque[tuple[Job, Extents, list[int]]] = deque()  # that are under way
        self._layout = planes.layout
        self._copies = HostCopies(planes)
        self._bounce = bounce
        self._breaks = breaks
        self._asked = 0
        self._io: Job | None = None
        extents = {**memories, "bounce": bounce.extents}
        spaces = {"planes": Space("planes", planes.blocks)}
        spaces |= {name: Space("memory", some.slots, sums=some.checksums) for name, some in extents.items()}
        spaces |= {name: Space("files", 1 << 20) for name in content}  # of a disk that is ours
        self.moves = NativeMoves(
            planes.layout,
            spaces,
            planes.blocks_per_page,
            reserve=("bounce", bounce.loads.start, len(bounce.loads)),
            limits=limits or MoveLimits(),
            disks=(None,),
        )

    def choices(self) -> list[Choice]:
        """What the jobs that may begin are is found out here, and changes nothing for anybody."""
        while (job := hooks.take_io(self.moves, 0)) is not None:
            files = self.files[job.files]
            files.begin(job)
        found: list[Choice] = []
        if (copy := hooks.take_copy(self.moves)) is not None:
            self._take(copy)
            return self.choices()
        if self.copies:
            found.append(Choice("a copy is done", self._copy))
        for files in self.files.values():
            found += files.choices()
        if any(files.flying for files in self.files.values()):
            found.append(Choice("time is up", self._pass, fault=True))
        return found

    def memory(self, name: str) -> memoryview:
        extents = self._bounce.extents if name == "bounce" else self.memories[name]
        return extents.flat

    def _take(self, job: Job) -> None:
        self._asked += 1
        if self._asked == self._breaks:
            hooks.copy_ended(self.moves, job.number, None, broken="a copy that was to break")
            return
        extents: Extents = self._bounce.extents if job.memory == "bounce" else self.memories[job.memory]
        if job.window:
            extents = Window(self._bounce.extents, job.window, self._layout.read_span(job.layers, alone=True))
        self.copies.append((job, extents, job.slots.tolist()))
        hooks.copy_queued(self.moves, job.number, self.done + len(self.copies))

    def _copy(self) -> None:
        job, extents, places = self.copies.popleft()
        self.done += 1
        sums: Checksums
        if job.kind == 2:  # a check
            sums = np.stack([_digest(extents, place, job.layers) for place in places])
        else:
            sums = self._copies.copy(extents, places, job.blocks, job.layers, sums=True)
        hooks.copy_ended(self.moves, job.number, sums if job.sums else None)

    def _pass(self) -> None:
        for files in self.files.values() if not self.now else ():
            files.in_time = dict(files.landed)
        self.now += LATE_S
        hooks.expire(self.moves, int(self.now * NS))


class SteppedFiles:
    """Files whose reads end when they are told to. `flying`: those that have not; `begun` counts them all.

    By slot: `landed` has the bytes of good reads, `in_time` those before time was first up; `damaged` and `failed` are
    the slots of the others.
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
        self.name = name
        self.content = content

    def begin(self, job: Job) -> None:
        assert not job.kind, "only loads are stepped with bytes"
        self.begun += 1
        self.begins()
        self.flying.append(SteppedIO(self, f"read {self.begun} of {self.name}", job))

    def choices(self) -> list[Choice]:
        return [choice for io in list(self.flying) for choice in io.choices()]


class SteppedIO:
    """Reads of the pages of a job, each into its place."""

    def __init__(self, files: SteppedFiles, name: str, job: Job) -> None:
        self.job = job
        self._files = files
        self._name = name
        self._left = list(range(len(job.rows)))

    @property
    def touching(self) -> list[tuple[int, str, range]]:
        """The slots that are read, and the memory and its bytes that are written."""
        job = self.job
        size = job.stop - job.start
        return [
            (int(job.slots[page]), job.memory, range(int(job.at[page]), int(job.at[page]) + size))
            for page in self._left
        ]

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
        slot, at = int(self.job.slots[page]), int(self.job.at[page])
        content = self._files.content[slot][self.job.start : self.job.stop]
        landed = self._files.landed
        landed[slot] = landed.get(slot, 0) + len(content)
        if damaged:
            self._files.damaged.add(slot)
            content = bytes([content[0] ^ 1]) + content[1:]
        self._files.machine.memory(self.job.memory)[at : at + len(content)] = content
        self._ended(page, 0)

    def _fail(self, page: int) -> None:
        self._files.failed.add(int(self.job.slots[page]))
        self._ended(page, errno.EIO)

    def _ended(self, page: int, error: int) -> None:
        self._left.remove(page)
        if not self._left:
            self._files.flying.remove(self)
        hooks.io_ended(self._files.machine.moves, self.job.number, [page], error)


def _digest(extents: Any, slot: int, layers: range) -> Checksums:
    if isinstance(extents, Window):
        return extents.digest(slot, layers)
    return layer_checksums(extents.memory(slot), extents.layout.layer_bounds[layers.start : layers.stop])
