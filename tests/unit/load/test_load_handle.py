"""The caller's handle of a load, with a move that says itself what has landed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gdscache.cuda.streams import Landed
from gdscache.errors import DeadlineError
from gdscache.load.handle import LayerwiseLoad
from gdscache.load.plan import LoadPart
from tests.support.helpers import MHA, layout_of

GROUPS = (range(1), range(1, 3), range(3, 6))


class Moving:
    """A move of which the groups in `landed` have landed; `asked`: the layers that somebody waited for."""

    def __init__(self, landed: set[int]) -> None:
        self.landed = landed
        self.asked: list[int] = []
        self.lands: Callable[[int, float], Landed | None] | None = self._lands

    def _lands(self, layer: int, seconds: float) -> Landed | None:
        self.asked.append(layer)
        number, layers = next((n, some) for n, some in enumerate(GROUPS) if layer in some)
        return Landed(None, layers) if number in self.landed else None

    def cancel(self) -> None: ...


def load_of(moving: Any) -> LayerwiseLoad:
    load = LayerwiseLoad([LoadPart(1, 0)], layout_of(MHA | {"layers": 6}), 0.0)
    load.carried_by(moving, last=True)
    return load


def test_layers_that_are_copied_together_are_asked_for_once() -> None:
    moving = Moving({0, 1, 2})
    load = load_of(moving)
    for layer in (*range(6), 2, 0):
        load.wait(layer)
    assert moving.asked == [0, 1, 3]


def test_a_layer_of_another_group_is_asked_for_itself() -> None:
    moving = Moving({0, 2})
    load = load_of(moving)
    load.wait(4)
    with pytest.raises(DeadlineError):
        load.wait(1)
    load.wait(5)
    moving.landed.add(1)
    load.wait(2)
    load.wait(1)
    assert moving.asked == [4, 1, 2]
