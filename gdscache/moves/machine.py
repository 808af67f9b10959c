"""What a machine has to move pages with: memories, files, the mover of its planes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from gdscache.arrays import Int64Array
from gdscache.moves.base import PageStatus
from gdscache.tracing import OFF, Timeline

if TYPE_CHECKING:
    import torch

    from gdscache.errors import StorageError
    from gdscache.extents.base import Extents
    from gdscache.movers.base import Mover
    from gdscache.native import CuFiles
    from gdscache.pages.checksum import Checksums
    from gdscache.storage.base import Op, Transport


class PagesIO(Protocol):
    """I/O of pages under way."""

    def follow(self, told: Callable[[], None]) -> None:
        """Call `told()` whenever there may be something to `take`, in any thread, perhaps now."""
        ...

    def take(self) -> Iterable[tuple[Sequence[int], StorageError | None]]:
        """Pages that have ended since it was last asked for, with their error; never waits. One thread asks."""
        ...

    def on_end(self, callback: Callable[[int], None]) -> None:
        """Call `callback(page)` once for each page, when nothing touches its memory any more; perhaps now."""
        ...


@runtime_checkable
class CheckedIO(PagesIO, Protocol):
    """Such I/O that compares what it reads with checksums that come with the bytes, before it says that pages ended."""

    def sums_of(self, pages: Sequence[int]) -> Checksums:
        """Those of pages that were read and are good: uint64 (pages, layers)."""
        ...


class Places(Protocol):
    """Memory that pages lie in."""

    @property
    def flat(self) -> memoryview | torch.Tensor:
        """All of it, as bytes."""
        ...

    def where(self, slots: Int64Array, byte: int) -> Int64Array:
        """The places in `flat` of a byte of the extents in some slots."""
        ...


class Files(Protocol):
    """Where a tier has its bytes that the library does not reach: it moves them itself."""

    def transfer(
        self,
        op: Op,
        slots: Int64Array,
        ends: Sequence[tuple[Places, Int64Array]],
        span: tuple[int, int] | None = None,
    ) -> PagesIO:
        """Start I/O between `slots` and places in memory, which `ends` have for so many pages each.

        `span`: `(start, stop)` of each extent, multiples of `EXTENT_ALIGNMENT`; all of it by default.
        """
        ...

    def describe(self) -> str:
        """What moves these bytes, in a word."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Descriptors:
    """Files that the library reads and writes itself. Slots go over `files` in stretches of `stretch` of them.

    `threads`: of the kernel with `uring`, else of the library. `cufile`: what they reach a GPU's memory by, and by what
    they read and write then. `transport`: what they call, with its handles for `files`. None: the system, and memory of
    the host alone.
    """

    files: Sequence[int]
    stretch: int
    threads: int
    uring: bool
    cufile: CuFiles | None = None
    transport: Transport | None = None

    @property
    def means(self) -> tuple[object, object]:
        """What all files of an executor have in common."""
        return self.cufile, self.transport


@runtime_checkable
class NativeFiles(Protocol):
    """Files that are the library's own to read and write."""

    def hand_over(self) -> Descriptors:
        """What it needs for that."""
        ...


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Reserve:
    """The slots of the bounce reserve that loads pass through."""

    extents: Extents
    loads: range


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Machine:
    """What moves bytes: the planes' mover, memories and files by the names of their spaces, the bounce reserve.

    `slots`: of each of the files. `refusal`: why no further read may begin, or None. It may cost a system call.
    """

    mover: Mover
    memories: Mapping[str, Extents]
    files: Mapping[str, Files | NativeFiles]
    slots: Mapping[str, int] = dataclasses.field(default_factory=dict)
    bounce: Reserve | None = None
    refusal: Callable[[], PageStatus | None] = lambda: None
    timeline: Timeline = OFF
