"""The check that no collective is entered by one rank alone finds what it is there for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.engines.collectives import compared

Call = tuple[str, str, list[int], str]
GOOD: list[Call] = [
    ("world", "all_reduce", [2], "begin"),
    ("world", "all_reduce", [2], "end"),
    ("1", "barrier", [], "begin"),
    ("1", "barrier", [], "end"),
]


def written(folder: Path, *ranks: list[Call]) -> Path:
    for rank, calls in enumerate(ranks):
        lines = [json.dumps(dict(zip(("group", "what", "shape", "at"), call, strict=True))) for call in calls]
        (folder / f"collectives-{rank}").write_text("\n".join(lines))
    return folder


def test_ranks_that_do_the_same(tmp_path: Path) -> None:
    assert compared(written(tmp_path, GOOD, GOOD, GOOD), 3) == 2
    turned = GOOD[2:] + GOOD[:2]
    assert compared(written(tmp_path, GOOD, turned), 2) == 2, "groups are apart: threads of their own"


@pytest.mark.parametrize(
    "other",
    [
        GOOD[:2],
        [*GOOD, ("world", "all_reduce", [2], "begin"), ("world", "all_reduce", [2], "end")],
        [("world", "all_reduce", [3], at) for at in ("begin", "end")] + GOOD[2:],
        [("world", "broadcast", [2], at) for at in ("begin", "end")] + GOOD[2:],
        GOOD[:3],
    ],
    ids=["a group missing", "one alone", "another shape", "another collective", "not left"],
)
def test_ranks_that_do_not(tmp_path: Path, other: list[Call]) -> None:
    for ranks in ((GOOD, other), (other, GOOD)):
        with pytest.raises(AssertionError):
            compared(written(tmp_path, *ranks), 2)


def test_all_that_wait_in_one(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="not left"):
        compared(written(tmp_path, GOOD[:3], GOOD[:3]), 2)


def test_a_dead_rank_has_done_the_first_of_it(tmp_path: Path) -> None:
    assert compared(written(tmp_path, GOOD, GOOD[:2]), 2, dead=(1,)) == 2
    with pytest.raises(AssertionError):
        compared(written(tmp_path, GOOD[:2], GOOD), 2, dead=(1,))
