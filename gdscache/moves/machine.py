"""What a machine has to move pages with: memories, files, what copies pages of its planes."""

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
    """Files that the library reads and writes. Slots go over `files` in stretches of `stretch` of them.

    `threads`: of the kernel with `uring`, else of the library. `cufile`: what they reach a GPU's memory by, and by what
    they read and write then. `transport`: what they call, with its handles for `files`. None: the system, and memory of
    the host alone. `sums`: where the checksums come with the bytes, uint64 (slots, layers): `read` compares both, and
    puts down here what the bytes of each slot give, before it returns.
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
        """Files that have these in common are one disk of an executor."""
        return self.cufile, self.transport


class Files(Protocol):
    """Where a tier has its bytes."""

    def hand_over(self) -> Descriptors:
        """What the library needs to read and write them."""
        ...


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Reserve:
    """The slots of the bounce reserve that loads pass through."""

    extents: Extents
    loads: range


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Machine:
    """What moves bytes: copies of the planes' pages, memories and files by the names of their spaces, the reserve.

    `slots`: of each of the files. `refusal`: why no further read may begin, or None. It may cost a system call.
    """

    copies: PageCopies
    memories: Mapping[str, Extents]
    files: Mapping[str, Files]
    slots: Mapping[str, int] = dataclasses.field(default_factory=dict)
    bounce: Reserve | None = None
    refusal: Callable[[], PageStatus | None] = lambda: None
    timeline: Timeline = OFF
