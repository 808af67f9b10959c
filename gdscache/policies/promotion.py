"""Promotion: which pages that a load reads from the SSD get a place in the CPU tier. Decisions only.

The others pass through the bounce reserve. A prefetch puts its pages into the CPU tier whatever the policy is, and asks
none: that is what it is for.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Protocol

from gdscache.policies.sketch import RecentCounter

REMEMBERED = 4  # `second_hit`: a read is remembered during so many reads a slot of the CPU tier, up to twice as many


class Promotion(Protocol):
    """Asked once for all pages of a load that come from the SSD. The manager's lock guards it.

    `selective`: False where every page stays.
    """

    selective: bool

    def wanted(self, keys: Sequence[bytes]) -> Iterable[bool]:
        """For each page that is read from the SSD now, whether it is to stay in the CPU tier. Counts a read of each."""
        ...


class Always:
    """Every page."""

    selective = False

    def __init__(self, slots: int = 0) -> None:
        pass

    def wanted(self, keys: Sequence[bytes]) -> Iterable[bool]:
        return itertools.repeat(True, len(keys))


class Never:
    """No page."""

    selective = True

    def __init__(self, slots: int = 0) -> None:
        pass

    def wanted(self, keys: Sequence[bytes]) -> Iterable[bool]:
        return itertools.repeat(False, len(keys))


class SecondHit:
    """A page that was read from the SSD before, lately.

    Reads are remembered during four to eight reads for each of the CPU tier's `slots`, in 16 to 32 bytes a slot. About
    one page in a hundred is let in at its first read.
    """

    selective = True

    def __init__(self, slots: int) -> None:
        self._counter = RecentCounter(REMEMBERED * slots)

    def wanted(self, keys: Sequence[bytes]) -> list[bool]:
        read_before = self._counter.add
        return [read_before(key) > 0 for key in keys]


PROMOTIONS: dict[str, type[Always] | type[Never] | type[SecondHit]] = {
    "always": Always,
    "second_hit": SecondHit,
    "never": Never,
}


def new_promotion(name: str, slots: int) -> Promotion:
    """A policy of a row of `PROMOTIONS`, for a CPU tier of `slots` pages. Raises KeyError for an unknown name."""
    return PROMOTIONS[name](slots)
