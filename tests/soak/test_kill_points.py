"""Kill -9 at every point of the order that makes a kill harmless; what is left is known exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.disk_parts import PACK
from tests.support.helpers import PACKED, make_config
from tests.support.kill_check import LAYOUT, verify
from tests.support.kill_points import FIRST, ONLY_NEW, OPENING, SECOND, STORED, run, run_opening
from tests.support.kill_record import Name, content, name
from tests.support.processes import Child

HEAD = {name("", FIRST, page) for page in range(2)}  # what is left when the second document takes the room
ALL = {name("", FIRST, page) for page in range(6)}
NEXT = {name("", SECOND, page) for page in range(6)}
LEFT: dict[str, set[Name]] = {
    "half_written": HEAD, "written": HEAD, "rows_in_transaction": HEAD, "committed": HEAD | NEXT,
    "deletions_in_transaction": ALL, "deleted": HEAD, "clear_in_transaction": ALL, "cleared": set(),
    "cleared_during_a_load": set(), "cleared_during_a_write": set(), "cleared_during_a_commit": set(), "closing": ALL,
    "closed_catalogue": ALL,
}  # fmt: skip


FITS = {page for page in ALL if content(page, LAYOUT.plane_bytes)[0] & 1}
# Packed, with room for both documents. The kill is of the tier of packed pages; the other one is before or behind it.
PACKED_LEFT: dict[str, tuple[set[Name], set[Name]]] = dict.fromkeys(list(LEFT)[:4], (ALL, NEXT)) | {
    "clear_in_transaction": (FITS, ALL)
}
TRANSPORT = "tests.support.kill_points:DyingTransport"


def _config(tmp_path: Path, *, pack: bool = False) -> dict[str, Any]:
    """Eight pages on the SSD: the first document of six, and two of the second. With `pack`, room for all."""
    if pack:
        return make_config(tmp_path / "cache", model=PACKED, cpu=None, ssd=256, bounce=256, transport=TRANSPORT)
    return make_config(tmp_path / "cache", cpu=None, ssd=8, bounce=16, transport=TRANSPORT)


@pytest.mark.parametrize(
    "point", [point if i % 2 == 0 else pytest.param(point, marks=pytest.mark.suite) for i, point in enumerate(STORED)]
)
def test_a_kill_while_storing_and_clearing(tmp_path: Path, point: str) -> None:
    left = LEFT[point]
    assert _kill(_config(tmp_path), point, left, left) == len(left)


@pytest.mark.suite
@pytest.mark.parametrize("point", [point for point in STORED if "delet" not in point])
def test_a_kill_where_pages_are_packed(tmp_path: Path, point: str) -> None:
    left = LEFT[point]
    required, more = PACKED_LEFT.get(point, (left, left))
    assert _kill(_config(tmp_path, pack=True), point, required | more, required) >= len(required)


def _kill(config: dict[str, Any], point: str, allowed: set[Name], required: set[Name]) -> int:
    with Child(run, config, point) as child:
        assert child.receive() == "stored"
        child.killed()
    return verify(config, allowed, required)


@pytest.mark.parametrize("pack", PACK)
@pytest.mark.parametrize(
    ("point", "stored"), [(p, stored) for p in OPENING for stored in (False, True) if not (stored and p in ONLY_NEW)]
)
def test_a_kill_while_opening(tmp_path: Path, point: str, stored: bool, pack: bool) -> None:
    config, left = _config(tmp_path, pack=pack), ALL if stored else set()
    if stored:
        with Child(run, config, "closed_catalogue") as child:
            child.receive()
            child.killed()
    with Child(run_opening, config, point) as child:
        child.receive()
        child.killed()
    assert verify(config, left, left) == len(left)
