"""The production executor does what the reference does: the same moves, the same faults, the same verdicts and bytes.

What is drawn, and what goes wrong: executor_cases.py. How bytes move: by the library's own disk, threads or io_uring,
by a transport of Python, and with planes of a GPU.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from gdscache.moves import PLANES, Move, Priority, Way
from gdscache.pages.layout import PageLayout, Plane
from tests.support.executor_cases import LONG_S, Case, Planned, cases, simple
from tests.support.executor_comparison import check
from tests.support.executor_machine import Mode, Real
from tests.support.helpers import MHA, layout_of
from tests.support.native_parts import has_ring
from tests.support.reference_executor import Fault, digest

RING = pytest.mark.skipif(not has_ring(), reason="io_uring is not allowed here")
MODES = ["threads", pytest.param("uring", marks=RING), "GPU", "direct"]
FOREIGN: list[Mode] = ["python", "GPU and python"]
# Cases of a mode in `make suites`; `make soak` has those of its profile, as `make test` has everywhere.
LONG_FORM = settings(max_examples=max(36, settings.default.max_examples))


@pytest.mark.parametrize("mode", MODES)
@given(case=cases())
def test_by_its_own_disk(mode: Mode, case: Case) -> None:
    check(case, mode)


@pytest.mark.parametrize("mode", FOREIGN)
@given(case=cases(python=True))
def test_by_a_transport_of_python(mode: Mode, case: Case) -> None:
    check(case, mode)


@pytest.mark.suite
@pytest.mark.parametrize("mode", MODES)
@given(case=cases())
@LONG_FORM
def test_many_by_its_own_disk(mode: Mode, case: Case) -> None:
    check(case, mode)


@pytest.mark.suite
@pytest.mark.parametrize("mode", FOREIGN)
@given(case=cases(python=True))
@LONG_FORM
def test_many_by_a_transport_of_python(mode: Mode, case: Case) -> None:
    check(case, mode)


@pytest.mark.parametrize("mode", MODES + FOREIGN)
@pytest.mark.parametrize("begin", ["", "cancel"])
def test_nobody_sums_what_is_known_to_be_right(mode: Mode, begin: str) -> None:
    """Pages that only have to be read, and whose bytes nobody doubts, are looked at by no copy."""
    pages = np.arange(3, dtype=np.int64)
    fetch = Way("ssd", "cpu", pages, pages)
    load = Way("far", PLANES, pages, pages.reshape(-1, 1), "cpu", pages + 3)
    moves = [Move(Priority.PREFETCH, (fetch,), LONG_S), Move(Priority.LOAD, (load,), LONG_S)]
    check(simple(layout_of(MHA), 6, *(Planned(move, begin) for move in moves)), mode)


@pytest.mark.parametrize("mode", MODES + FOREIGN)
@pytest.mark.parametrize("groups", [(), (range(1), range(1, 2), range(2, 3))])
def test_a_file_that_ends_early_costs_the_pages_behind_its_end(mode: Mode, groups: tuple[range, ...]) -> None:
    layout, pages, cut = layout_of(MHA), np.arange(6, dtype=np.int64), 3 * 8192 + 4096
    assert layout.extent_bytes == 8192
    stays = Way("far", PLANES, pages[:6:2], pages[:6:2].reshape(-1, 1), "cpu", pages[:6:2])
    passes = Way("far", PLANES, pages[1::2], pages[1::2].reshape(-1, 1))
    case = simple(layout, 6, *(Planned(Move(Priority.LOAD, (way,), LONG_S, groups), "") for way in (stays, passes)))
    case.faults += [Fault("short", "far", slot, 4096 if slot == 3 else 0, 8192) for slot in range(3, 6)]

    @contextlib.contextmanager
    def cut_off(real: Real) -> Iterator[None]:
        path = real.slabs["far"].files[0]
        content = path.read_bytes()
        os.truncate(path, cut)
        yield
        assert path.stat().st_size == cut
        path.write_bytes(content)

    check(case, mode, cut_off)


@pytest.mark.parametrize("what", ["error", "short", "torn", "flip"])
@pytest.mark.parametrize("mode", ["threads", pytest.param("uring", marks=[RING, pytest.mark.suite])])
def test_pages_of_several_pieces(mode: Mode, what: Any) -> None:
    """Extents of more than a run's most bytes are cut; copies of more than 8 MiB go past the processor's caches."""
    layout = PageLayout.uniform([Plane("k", (1 << 18,), "uint8"), Plane("v", (1 << 18,), "uint8")], 5, 4)
    pages = np.arange(2, dtype=np.int64)
    case = simple(layout, 2)
    known = [[digest(e[a:b]) for a, b in layout.layer_bounds] for e in case.spaces.files["ssd"]]
    load = Way("ssd", PLANES, pages, pages.reshape(-1, 1), sums=np.array(known, np.uint64))
    write = Way("cpu", "far", pages, pages)
    case.moves += [
        Planned(Move(Priority.LOAD, (load,), LONG_S), ""),
        Planned(Move(Priority.DEMOTION, (write,), LONG_S), ""),
    ]
    middle = layout.extent_bytes // 2
    start = middle // 4096 * 4096 if what == "torn" else middle + 77
    stop = layout.extent_bytes if what == "torn" else start + 1
    for files in ("ssd", "far"):
        if what != "flip" or files == "ssd":
            case.faults.append(Fault(what, files, 1, start, stop, errno.EIO if what == "error" else 0))
    check(case, mode)
