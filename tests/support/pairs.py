"""Fewer of the tests that several lists of values give, in `make test`."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest


def pairs(*lists: Iterable[Any]) -> list[Any]:
    """Every combination of values, for `parametrize`. Those in which each value has one of its turns are in `make
    test`: as many as the longest list has. The others are in the suite."""
    values = [[*one] for one in lists]
    few = {tuple(n % len(one) for one in values) for n in range(max(map(len, values)))}
    return [
        pytest.param(*(one[n] for one, n in zip(values, at, strict=True)), marks=() if at in few else pytest.mark.suite)
        for at in itertools.product(*(range(len(one)) for one in values))
    ]


def one_in(number: int, values: Iterable[tuple[Any, ...]]) -> list[Any]:
    """One value in so many is in `make test`, the others are in the suite."""
    return [pytest.param(*one, marks=pytest.mark.suite if n % number else ()) for n, one in enumerate(values)]
