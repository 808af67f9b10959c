"""The memories, files and copies that an executor moves pages with."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from gdscache.moves.base import PageStatus
from gdscache.tracing import OFF, Timeline

if TYPE_CHECKING:
    from gdscache.extents.base import Extents
    from gdscache.kernels.copies import PageCopies
    from gdscache.storage.base import Files


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Reserve:
    """The slots of the bounce reserve that loads pass through. `name`: of their space."""

    extents: Extents
    loads: range
    name: str = "bounce"


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
