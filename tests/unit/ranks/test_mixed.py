"""Moves with packed and plain pages: if the packed pages cannot be moved, the plain pages' end counts all the same."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import numpy as np

from gdscache.errors import NativeCallError, ShortIOError
from gdscache.moves import PLANES, End, Move, Priority, Steps, Way
from gdscache.moves.native import drive
from gdscache.ranks.loads import MixedMoving, Verdicts, plain_rows
from tests.support.helpers import raising


class _Plain:
    """The move of the plain pages: the first one failed, and the second one is late."""

    def end(self) -> Steps[End]:
        yield from ()
        return End({0: ShortIOError("a read of ssd_plain was short", "")}, late=[1])

    def on_end(self, callback: Callable[[int], None]) -> None:
        for row in range(2):
            callback(row)


def test_late_plain_pages_are_told_of_if_the_packed_pages_cannot_be_moved() -> None:
    error = NativeCallError("the executor was stopped", "", errno.ECANCELED)

    def way(tier: str, pages: Sequence[int]) -> Way:
        return Way(tier, PLANES, np.asarray(pages), np.asarray(pages).reshape(-1, 1))

    move = Move(Priority.LOAD, (way("ssd", [0, 1]), way("ssd_plain", [2, 3])), 1.0)
    packed, plain = SimpleNamespace(begin=raising(error)), SimpleNamespace(begin=lambda *asked: _Plain())
    moving = MixedMoving(packed, plain, move, plain_rows(move), (), Verdicts(4))  # type: ignore[arg-type]
    end = drive(moving.end())
    assert end.error is error
    assert [*end.errors] == [2]
    assert end.late == [3]
    ended = list[int]()
    moving.on_end(ended.append)
    assert 3 in ended
