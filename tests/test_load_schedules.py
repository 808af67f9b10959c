"""Cancelled, closed, interrupted and broken at every point: whatever a load is doing, nothing is left behind and what
is served is right.

A failure says how to play its schedule again; load_schedules.py says what one is.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from faulty import PLAN
from helpers import SEED
from load_points import FAILING, Point, Points
from load_schedules import ACTIONS, Player, Schedule, groups, play

RANDOM = 200  # and some 100 that try every point of one of them
CHUNK = 50
SWEPT = 2  # the seed of a schedule whose points are all tried
SOAK = 4_000
# Where an engine of any configuration comes by, whatever is asked of it.
ALWAYS = {"caller", "plan", "planned", "submitted", "read", "reading", "scatter", "scattered", "verdict", "publish"}
ALWAYS |= {"published", "signal", "end"}


@pytest.fixture(autouse=True)
def _no_faults_left() -> Iterator[None]:
    logging.disable(logging.ERROR)  # what is injected is logged, thousands of times
    PLAN.reset()
    yield
    PLAN.reset()
    logging.disable(logging.NOTSET)


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """In memory where that can be had: a thousand engines are opened."""
    memory = Path("/dev/shm")
    if not (memory.is_dir() and os.access(memory, os.W_OK)):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory, prefix="gdscache-test-") as name:
        yield Path(name)


def seen(directory: Path) -> list[Point]:
    """Points to choose from: those that a few schedules reach when nothing happens."""
    found: dict[Point, None] = {}
    for seed in range(4):
        found.update(dict.fromkeys(play(Schedule(seed), directory).all()))
    return list(found)


def random_schedules(seeds: range, directory: Path, device: str = "cpu") -> int:
    """Play so many; how many of them met their point."""
    points = seen(directory)
    schedules = [Schedule.random(seed, points) for seed in seeds]
    return sum(play(schedule, directory, device).reached for schedule in schedules)


@pytest.mark.parametrize(
    "first", [0, *(pytest.param(first, marks=pytest.mark.suite) for first in range(CHUNK, RANDOM, CHUNK))]
)
def test_random_schedules(directory: Path, first: int) -> None:
    met = random_schedules(range(first, first + CHUNK), directory)
    assert met > CHUNK // 10, "schedules do not meet their points any more"


@pytest.mark.soak
def test_many_random_schedules(directory: Path) -> None:
    assert random_schedules(range(SEED + RANDOM, SEED + RANDOM + SOAK), directory) > SOAK // 5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_random_schedules_on_a_gpu(directory: Path) -> None:
    with groups():
        Player(Schedule(0), directory, "cuda").play()  # CUDA opens descriptors of its own once
    assert random_schedules(range(100), directory, "cuda") > 20


def every_point(seed: int, action: str, directory: Path) -> None:
    """Each point that the schedule reaches when nothing happens, one after the other."""
    points = play(Schedule(seed), directory).all()
    if action == "error":
        points = [point for point in points if point[0] in FAILING]
    met = {point[0] for point in points if play(Schedule(seed, action, point), directory).reached}
    assert met >= {name for name in ALWAYS if action != "error" or name in FAILING}


@pytest.mark.soak
@pytest.mark.parametrize("action", ACTIONS[1:])
def test_every_point(directory: Path, action: str) -> None:
    every_point(SWEPT, action, directory)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(40))
def test_every_point_of_other_schedules(directory: Path, seed: int) -> None:
    for action in ACTIONS[1:]:
        every_point(SEED + seed, action, directory)


def test_a_schedule_is_the_same_again(directory: Path) -> None:
    """What the caller does follows from the seed, so that a failure can be looked at."""
    for seed in range(3):
        runs = [play(Schedule(seed), directory) for _ in range(2)]
        for name in ("caller", "plan"):
            assert runs[0].counts[name] == runs[1].counts[name]


def test_points_act_once_and_where_they_are_told() -> None:
    done: list[str] = []
    points = Points(0, at=("scatter", 1), act=lambda: done.append("acted"), error=True)
    for name in ("scatter", "read"):
        points.reach(name)  # off
    points.on = True
    points.reach("scatter")
    points.reach("read")
    assert not points.reached
    with pytest.raises(RuntimeError, match="injected"):
        points.reach("scatter")
    points.reach("scatter")
    assert (done, points.reached) == (["acted"], True)
    assert points.all() == [("read", 0), ("scatter", 0), ("scatter", 1), ("scatter", 2)]
