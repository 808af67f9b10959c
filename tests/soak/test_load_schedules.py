"""Cancelled, closed and interrupted in the middle: whatever a load is doing, nothing is left behind and what is served
is right.

A failure says how to play its schedule again; load_schedules.py says what one is.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.helpers import SEED
from tests.support.load_schedules import Player, groups, play
from tests.support.places import scratch

RANDOM = 75
SHORT, CHUNK = 30, 45  # of them, in `make test`, and in a test of the suites
SOAK = 4_000


@pytest.fixture(autouse=True)
def _no_faults_left() -> Iterator[None]:
    logging.disable(logging.ERROR)  # what is injected is logged, thousands of times
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture
def directory() -> Iterator[Path]:
    yield (path := scratch())
    shutil.rmtree(path)


def random_schedules(seeds: range, directory: Path, device: str = "cpu") -> int:
    """Play so many; how many of them met their action."""
    return sum(play(seed, directory, device).acted for seed in seeds)


@pytest.mark.parametrize(
    ("first", "number"),
    [(0, SHORT), *(pytest.param(first, CHUNK, marks=pytest.mark.suite) for first in range(SHORT, RANDOM, CHUNK))],
)
def test_random_schedules(directory: Path, first: int, number: int) -> None:
    met = random_schedules(range(first, first + number), directory)
    assert met > number // 10, "schedules do not meet their points any more"


@pytest.mark.soak
def test_many_random_schedules(directory: Path) -> None:
    assert random_schedules(range(SEED + RANDOM, SEED + RANDOM + SOAK), directory) > SOAK // 5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_random_schedules_on_a_gpu(directory: Path) -> None:
    with groups():
        Player(0, directory, "cuda").play()  # CUDA opens descriptors of its own once
    assert random_schedules(range(100), directory, "cuda") > 20


def test_a_schedule_is_the_same_again(directory: Path) -> None:
    """What the caller does follows from the seed, so that a failure can be looked at."""
    for seed in range(3):
        first, second = (play(seed, directory) for _ in range(2))
        assert (first.action, first.at, first.steps) == (second.action, second.at, second.steps)
