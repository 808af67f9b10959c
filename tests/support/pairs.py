"""Fewer of the tests that several lists of values give, in `make test` and in the suites."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest


def pairs(*lists: Iterable[Any]) -> list[Any]:
    """Every combination of values, for `parametrize`. Those in which each value has one of its turns are in `make
    test`: as many as the longest list has. Those that bring two values together for the first time are in the suite:
    of two lists, all others. The rest is in the soak."""
    values = [[*one] for one in lists]
    few = [tuple(n % len(one) for one in values) for n in range(max(map(len, values)))]
    met = {two for at in few for two in itertools.combinations(enumerate(at), 2)}
    found = []
    for at in itertools.product(*(range(len(one)) for one in values)):
        new = {*itertools.combinations(enumerate(at), 2)} - met
        met |= new
        marks = () if at in few else pytest.mark.suite if new else pytest.mark.soak
        found.append(pytest.param(*(one[n] for one, n in zip(values, at, strict=True)), marks=marks))
    return found


def one_in(number: int, values: Iterable[tuple[Any, ...]]) -> list[Any]:
    """One value in so many is in `make test`, the others are in the suite."""
    return [pytest.param(*one, marks=pytest.mark.suite if n % number else ()) for n, one in enumerate(values)]
