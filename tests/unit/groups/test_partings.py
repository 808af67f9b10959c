"""Windows are kept densely while requests part often, and for some time afterwards."""

from __future__ import annotations

import pytest

from gdscache.groups.base import Group
from gdscache.groups.pools import Partings

FULL, WINDOW = Group("full", (0,), 16), Group("window", (1,), 16, "window", 1024)
SHORT, LONGER = Group("short", (1,), 16, "window", 128), Group("longer", (1,), 16, "window", 2048)
STATE = Group("state", (2,), 16, "state")


def spacing(partings: Partings, requests: int, every: int, lost: int = 2048) -> list[int]:
    """Of requests of which one in `every` parts."""
    return [partings.every(lost if number % every == 0 else 0) for number in range(requests)]


def test_traffic_that_parts_often_keeps_more_windows_and_other_traffic_does_not() -> None:
    partings = Partings([FULL, WINDOW], 8192, adapts=True)
    assert set(spacing(partings, 4000, 10)) == {8192}
    often = spacing(partings, 200, 3)
    assert often == sorted(often, reverse=True)  # from one request on
    assert {*often} == {8192, 2048}
    assert {*often[100:]} == {2048}
    rarely = spacing(partings, 1200, 1200)
    assert rarely.count(2048) >= 1024
    assert rarely[-1] == 8192


@pytest.mark.parametrize(
    ("groups", "lost", "dense"),
    [
        ((FULL, WINDOW, LONGER), 4096, 4096),
        ((FULL, WINDOW, SHORT), 2048, 2048),
        ((FULL, SHORT), 1024, 1024),
        ((FULL, WINDOW), 2047, 8192),
        ((FULL, WINDOW, STATE), 8192, 8192),
        ((FULL, STATE), 8192, 8192),
        ((WINDOW,), 8192, 8192),
    ],
)
def test_at_most_half_of_a_window_is_kept_and_only_where_that_can_help(
    groups: tuple[Group, ...], lost: int, dense: int
) -> None:
    assert spacing(Partings(groups, 8192, adapts=True), 100, 1, lost)[-1] == dense


@pytest.mark.parametrize("every", [0, 512, 8192])
def test_what_a_user_says_stays(every: int) -> None:
    assert {*spacing(Partings([FULL, WINDOW], every, adapts=False), 100, 1, 9000)} == {every}


def test_never_less_dense_than_usual() -> None:
    assert {*spacing(Partings([FULL, WINDOW], 512, adapts=True), 100, 1)} == {512}
