"""Pages that are given up for failed reads, and tiers that are switched off for them, by a clock of the test's."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest

from gdscache.tiers import quarantine
from gdscache.tiers.quarantine import AGAIN_S, OFF_PAGES, OFF_S, TRY_S, FailedReads


@dataclasses.dataclass(frozen=True)
class Page:
    key: bytes


class Index:
    def __init__(self) -> None:
        self.dropped: list[Page] = []
        self.gone: set[bytes] = set()

    def __contains__(self, key: bytes) -> bool:
        return key not in self.gone

    def drop(self, page: Page) -> None:
        self.dropped.append(page)


class Tier:
    served = True

    def __init__(self, name: str = "ssd") -> None:
        self.name = name
        self.index = Index()


class World:
    """A tier whose reads the test lets fail and succeed."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.switches = 0
        self.reads = FailedReads(lambda: self.now, self.switched)
        self.tier: Any = Tier()

    def switched(self) -> None:
        self.switches += 1

    def fail(self, *pages: int) -> None:
        self.reads.failed(self.tier, [Page(bytes([n])) for n in pages])  # type: ignore[arg-type]

    def read(self, *pages: int) -> None:
        self.reads.read(self.tier, [bytes([n]) for n in pages])

    @property
    def dropped(self) -> list[int]:
        return [page.key[0] for page in self.tier.index.dropped]

    @property
    def off(self) -> bool:
        return self.reads.off("ssd")


Step = Callable[[World], object]


@pytest.fixture
def world() -> World:
    return World()


def fail(*pages: int) -> Step:
    return lambda world: world.fail(*pages)


def read(*pages: int) -> Step:
    return lambda world: world.read(*pages)


def later(seconds: float) -> Step:
    return lambda world: setattr(world, "now", world.now + seconds)


SOON = [fail(1), read(2), later(AGAIN_S - 0.1), fail(1)]
ALONE = [read(2), fail(1), later(AGAIN_S / 4), fail(1), later(1)] * 3
OUTAGE = [read(9), fail(*range(5)), later(TRY_S), fail(5), read(9)]
GIVEN_UP: dict[str, tuple[list[Step], list[int]]] = {
    "again, and soon": (SOON, []),
    "again, while others are read": ([*SOON, read(2), later(0.2), fail(1)], [1]),
    "alone": (ALONE, []),
    "alone, and for long": ([*ALONE, later(AGAIN_S), read(2), fail(1)], [1]),
    "read meanwhile": ([fail(1), read(1), later(2 * AGAIN_S), fail(1)], []),
    "nothing else is read": ([fail(1), later(2 * AGAIN_S), fail(1, 2, 3)], []),
    "in two outages": ([*OUTAGE, later(2 * AGAIN_S), fail(*range(6))], []),
    "before an outage": ([fail(1), read(9), later(AGAIN_S), fail(2), later(TRY_S), read(9), fail(1, 2)], [1]),
}


@pytest.mark.parametrize(("steps", "given_up"), GIVEN_UP.values(), ids=GIVEN_UP)
def test_pages_are_given_up_that_fail_for_long_while_others_are_read(
    world: World, steps: list[Step], given_up: list[int]
) -> None:
    for step in steps:
        step(world)
    assert (world.dropped, world.reads.describe()["given_up"]) == (given_up, len(given_up))


def test_behind_an_outage_no_page_is_failing(world: World) -> None:
    for step in OUTAGE:
        step(world)
    assert world.reads.describe()["failing_pages"] == 0


def test_pages_that_have_gone_are_not_failing(world: World) -> None:
    world.fail(1, 2)
    world.tier.index.gone.add(bytes([1]))
    assert world.reads.describe()["failing_pages"] == 1


def test_a_page_that_is_new_again_begins_anew(world: World) -> None:
    world.fail(1)
    world.reads.forget("ssd", [bytes([1])])
    world.read(2)
    world.now += AGAIN_S
    world.fail(1)
    assert world.dropped == []
    world.read(2)
    world.now += AGAIN_S
    world.read(2)
    world.fail(1)
    assert world.dropped == [1]


def test_a_tier_that_only_fails_is_switched_off_and_tried_each_second(world: World) -> None:
    world.fail(*range(OFF_PAGES))
    world.now += OFF_S - 0.1
    world.fail(1)
    assert not world.off
    world.now += 0.2
    world.fail(1)
    assert (world.off, world.switches) == (True, 1)
    world.now += TRY_S
    assert not world.off, "the next load tries"
    world.fail(1)
    assert (world.off, world.switches) == (True, 1)
    assert world.reads.describe()["switched_off_by_errors"] == ["ssd"]
    world.now += TRY_S
    world.read(1)
    assert (world.off, world.switches, world.reads.any_off) == (False, 2, False)
    assert world.reads.describe() == {
        "failing_pages": 0, "switched_off_by_errors": [], "error_switch_offs": 1, "given_up": 0,
    }  # fmt: skip
    assert not world.reads.watching


def test_a_time_in_which_nobody_reads_is_no_time_of_errors(world: World) -> None:
    world.fail(*range(OFF_PAGES))
    world.now += 3600
    world.fail(1)
    assert not world.off


def test_a_few_pages_switch_nothing_off(world: World) -> None:
    for _ in range(100):
        world.fail(*range(OFF_PAGES - 1))
        world.now += 1
    assert world.switches == 0
    assert world.reads.describe()["switched_off_by_errors"] == []


def test_a_tier_that_lookups_do_not_see_is_left_to_its_own_breaker(world: World) -> None:
    world.tier.served = False
    world.fail(*range(OFF_PAGES))
    world.now += 2 * OFF_S
    world.fail(1)
    assert not world.off


def test_one_tier_says_nothing_of_another(world: World) -> None:
    other: Any = Tier("other")
    world.fail(*range(OFF_PAGES))
    world.now += OFF_S
    world.reads.read(other, [b"x"])
    world.fail(1)
    assert world.off
    assert not world.reads.off("other")


def test_what_is_remembered_is_bounded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quarantine, "_MOST_PAGES", 10)
    world.fail(*range(100))
    assert world.reads.describe()["failing_pages"] == 10


@pytest.mark.parametrize("seed", range(20))
def test_only_pages_that_always_fail_are_given_up(world: World, seed: int) -> None:
    """Two pages are bad. Others fail in outages, of any length and number, and at no other time."""
    rng = random.Random(seed)
    bad, outage = {0, 1}, 0.0
    for _ in range(3000):
        world.now += rng.choice([0.01, 0.1, 0.5, 5.0])
        if rng.random() < 0.01:
            outage = world.now + rng.choice([0.1, 3.0, 40.0, 200.0])
        pages = {rng.randrange(12) for _ in range(4)} - set(world.dropped)
        failing = pages if world.now < outage else pages & bad
        if world.off:
            continue
        if failing:
            world.fail(*failing)
        if pages - failing:
            world.read(*pages - failing)
    assert set(world.dropped) <= bad, "a page is given up for what was not its fault"
    assert set(world.dropped) == bad, "a bad page stays for ever"
