"""Which slots a trial of the routes reads."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from gdscache.index.index import PageIndex
from gdscache.tiers import ssd_route
from tests.support.index_machine import chain, put


def test_free_slots_are_tried_where_there_are_enough_and_may_be_written() -> None:
    index = PageIndex(6)
    put(index, chain(1, 3))
    slots, free = ssd_route._slots(index, 2)
    assert (slots.tolist(), free) == ([3, 4], True)
    slots, free = ssd_route._slots(index, 4)
    assert (slots.tolist(), free) == ([0, 1, 2, 3], False)


@pytest.mark.parametrize(
    ("reading", "copying", "straight", "byte", "route"),
    [
        (2.0, 1.0, 1.5, 0, "direct"),
        (1.0, 2.0, 1.5, 0, "direct"),
        (1.0, 1.0, 1.5, 0, "via_cpu"),
        (2.0, 1.0, 1.5, 1, "via_cpu"),  # other bytes
    ],
)
def test_the_faster_route_is_taken_where_its_bytes_are_right(
    monkeypatch: pytest.MonkeyPatch, reading: float, copying: float, straight: float, byte: int, route: str
) -> None:
    times = iter((reading, copying, straight))
    monkeypatch.setattr(ssd_route, "_move", mock.Mock())
    monkeypatch.setattr(ssd_route, "_copy", torch.Tensor.copy_)
    monkeypatch.setattr(ssd_route, "_best", lambda action: (action(), next(times))[1])
    host: Any = SimpleNamespace(slots=2, rows=torch.zeros(2, 8), buffer=mock.Mock(), layout=mock.Mock(extent_bytes=8))
    there: Any = SimpleNamespace(rows=torch.full((2, 8), float(byte)))
    index = PageIndex(2)
    put(index, chain(1, 2))
    with contextlib.ExitStack() as undo:
        assert ssd_route._measured(mock.Mock(), index, host, there, undo).route == route
