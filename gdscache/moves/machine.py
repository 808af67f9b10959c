"""The memories, files and copies that an executor moves pages with."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from gdscache.moves.base import PageStatus
from gdscache.tracing import OFF, Timeline

if TYPE_CHECKING:
    from gdscache.extents.base import Extents
    from gdscache.kernels.copies import PageCopies
    from gdscache.native import CuFiles
    from gdscache.pages.checksum import Checksums
    from gdscache.storage.base import Transport


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Descriptors:
    """Files that the library reads and writes. Slots are striped over `files`, `stretch` slots at a time.

    `threads`: of the kernel with `uring`, else of the library. `cufile`: reads and writes go by cuFile, which reaches a
    GPU's memory. `transport`: reads and writes call this, with its handles for `files`. Both None: system calls, which
    reach only host memory. `sums`: uint64 (slots, layers), for files that come with their checksums: `read` compares
    each slot with them, and writes the checksums of the bytes read here before it returns.
    """

    files: Sequence[int]
    stretch: int
    threads: int
    uring: bool = False
    cufile: CuFiles | None = None
    transport: Transport | None = None
    sums: Checksums | None = None

    @property
    def means(self) -> tuple[object, object]:
        """Files with equal means share one disk of an executor."""
        return self.cufile, self.transport


class Files(Protocol):
    """The files of a tier."""

    def hand_over(self) -> Descriptors: ...


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Reserve:
    """The slots of the bounce reserve that loads pass through."""

    extents: Extents
    loads: range


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Machine:
    """An executor's copies of planes, and its memories and files by the names of their spaces.

    `slots`: the number of slots of each space of files. `refusal`: the reason why no further read may begin, or None;
    it may cost a system call.
    """

    copies: PageCopies
    memories: Mapping[str, Extents]
    files: Mapping[str, Files]
    slots: Mapping[str, int] = dataclasses.field(default_factory=dict)
    bounce: Reserve | None = None
    refusal: Callable[[], PageStatus | None] = lambda: None
    timeline: Timeline = OFF
