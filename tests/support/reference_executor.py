"""What every executor has to do with a move, said as plainly as possible: one page, one group of layers after another.

Spaces are arrays. Nothing runs beside anything else, and nothing passes through a reserve that somebody else waits for.
Where the contract leaves the order to the executor, `carry_out` is asked for each extreme, and the caller allows both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt
import xxhash

from gdscache.moves import PLANES, Move, PageStatus, Way
from gdscache.native import SHORT
from gdscache.pages.checksum import Checksums
from gdscache.pages.layout import PageLayout

Bytes = npt.NDArray[np.uint8]
What = Literal["error", "short", "torn", "flip", "late", "hang"]


@dataclasses.dataclass(frozen=True, slots=True)
class Fault:
    """What becomes of I/O that touches the bytes `start` to `stop` of a slot's extent.

    `error` fails with the errno `value`. `short` moves too few bytes, and says so. `torn` moves nothing from `start`
    on, and says nothing. `flip` reads the first bit of `start` wrong. `late` is slow. `hang` outlasts every deadline.
    """

    what: What
    files: str
    slot: int
    start: int
    stop: int
    value: int = 0


@dataclasses.dataclass(eq=False)
class Answer:
    """What a move says at its end, by row: verdicts of a load, errnos or `SHORT` of a write, and what is late."""

    verdicts: dict[int, PageStatus] = dataclasses.field(default_factory=dict)
    errors: dict[int, int] = dataclasses.field(default_factory=dict)
    late: set[int] = dataclasses.field(default_factory=set)


class ReferenceExecutor:
    """`planes[layer][plane]`: uint8 (blocks, bytes of a block). `memories` and `files`: uint8 (slots, extent bytes) by
    the names of their spaces. `sums`: uint64 (slots, layers) of each memory. All of them are changed in place.

    `refusal`: the verdict on whatever would have to be read.
    """

    def __init__(
        self,
        layout: PageLayout,
        planes: Sequence[Sequence[Bytes]],
        memories: dict[str, Bytes],
        files: dict[str, Bytes],
        sums: dict[str, Checksums],
        faults: Sequence[Fault] = (),
        refusal: PageStatus | None = None,
    ) -> None:
        self.layout, self.planes, self.memories, self.files, self.sums = layout, planes, memories, files, sums
        self.faults = faults
        self.refusal = refusal

    def carry_out(self, move: Move, *, cancelled: bool = False, expired: bool = False) -> Answer:
        """`cancelled`, `expired`: by a caller, or by its deadline, before anything of it was begun."""
        answer, row = Answer(), 0
        for way in move.ways:
            for page in range(len(way)):
                if way.source == PLANES:
                    self._gather(way, page)
                elif way.target in self.files:
                    self._write(way, page, row, answer, expired=expired)
                elif way.source in self.files:
                    answer.verdicts[row] = self._read(move, way, page, row, answer, cancelled, expired)
                else:
                    extent = self.memories[way.source][way.sources[page]]
                    answer.verdicts[row] = self._look(move, way, page, extent, cancelled=cancelled)
                row += 1
        return answer

    def _gather(self, way: Way, page: int) -> None:
        slot = way.targets[page]
        for layer, (start, stop) in enumerate(self.layout.layer_bounds):
            parts = [plane[block] for plane in self.planes[layer] for block in way.sources[page]]
            found = self.memories[way.target][slot, start:stop] = np.concatenate(parts)
            self.sums[way.target][slot, layer] = digest(found)

    def _write(self, way: Way, page: int, row: int, answer: Answer, *, expired: bool) -> None:
        source, slot = self.memories[way.source][way.sources[page]], way.targets[page]
        fault = self._fault(way.target, slot, 0, self.layout.extent_bytes)
        if expired or fault.what == "hang":
            answer.late.add(row)
        elif fault.what in ("error", "short"):
            answer.errors[row] = fault.value if fault.what == "error" else SHORT
        else:
            moved = fault.start if fault.what == "torn" else None
            self.files[way.target][slot, :moved] = source[:moved]

    def _read(
        self, move: Move, way: Way, page: int, row: int, answer: Answer, cancelled: bool, expired: bool
    ) -> PageStatus:
        """A page of files: into the memory where it stays, or one that is forgotten, and from there into the planes."""
        passes = way.target == PLANES and way.places is None
        if passes:
            memory = np.zeros(self.layout.extent_bytes, np.uint8)
        else:
            space, places = (way.target, way.targets) if way.places is None else (way.through, way.places)
            memory = self.memories[space][places[page]]
            if way.sums is not None:
                self.sums[space][places[page]] = way.sums[page]
        if cancelled and passes:
            return PageStatus.CANCELLED
        if expired or self.refusal is not None:
            return PageStatus.DEADLINE if expired else self.refusal or PageStatus.PENDING
        slot = way.sources[page]
        for layers in self._groups(move):
            start, stop = self.layout.read_span(layers, alone=passes)
            if start == stop:
                continue  # these layers came with the group before
            fault = self._fault(way.source, slot, start, stop)
            if fault.what == "hang":
                answer.late.add(row)
            if (verdict := _ENDS.get(fault.what)) is not None:
                return verdict
            end = max(start, fault.start) if fault.what == "torn" else stop
            memory[start:end] = self.files[way.source][slot, start:end]
            if fault.what == "flip" and fault.start >= start:
                memory[fault.start] ^= 1
        return self._look(move, way, page, memory, cancelled=cancelled)

    def _look(self, move: Move, way: Way, page: int, extent: Bytes, *, cancelled: bool) -> PageStatus:
        """A page that is in memory: compare its checksums, and copy it into the planes where it goes there."""
        for layers in self._groups(move):
            for layer in layers:
                start, stop = self.layout.layer_bounds[layer]
                if way.target == PLANES and not cancelled:
                    self._scatter(layer, way.targets[page], extent[start:stop])
                if way.sums is not None and digest(extent[start:stop]) != way.sums[page, layer]:
                    return PageStatus.CHECKSUM
        into_planes = any(way.target == PLANES for way in move.ways)
        return PageStatus.CANCELLED if cancelled and into_planes else PageStatus.LOADED

    def _scatter(self, layer: int, blocks: npt.NDArray[np.int64], found: Bytes) -> None:
        at = 0
        for plane in self.planes[layer]:
            for block in blocks:
                plane[block] = found[at : at + plane.shape[1]]
                at += plane.shape[1]

    def _groups(self, move: Move) -> Sequence[range]:
        return move.groups or (range(self.layout.n_layers),)

    def _fault(self, files: str, slot: int, start: int, stop: int) -> Fault:
        """The first fault that I/O of these bytes meets; one that does nothing where there is none."""
        met = (f for f in self.faults if (f.files, f.slot) == (files, slot) and f.start < stop and start < f.stop)
        return next(met, Fault("late", files, slot, start, stop))


_ENDS = {"error": PageStatus.IO_ERROR, "short": PageStatus.SHORT_READ, "hang": PageStatus.DEADLINE}


def digest(found: Bytes) -> np.uint64:
    return np.uint64(xxhash.xxh3_64_intdigest(found.tobytes()))
