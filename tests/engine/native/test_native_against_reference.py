"""The production executor does what the reference does: the same moves, the same faults, the same verdicts and bytes.

What is drawn, and what goes wrong: executor_cases.py. How bytes move: by the library's own disk, threads or io_uring,
by a transport of Python, and with planes of a GPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given

from gdscache.errors import ShortIOError, StorageError
from gdscache.moves import PLANES, End, Move, Moving, PageStatus, Priority, Way
from gdscache.native import SHORT
from gdscache.pages.layout import PageLayout, Plane
from tests.support.executor_cases import LONG_S, Case, Planned, Spaces, cases, simple
from tests.support.executor_machine import Heard, Mode, Real, opened
from tests.support.helpers import MHA, WAIT, layout_of, until
from tests.support.native_parts import has_ring
from tests.support.reference_executor import Answer, Fault, ReferenceExecutor, digest

RING = pytest.mark.skipif(not has_ring(), reason="io_uring is not allowed here")
MODES = ["threads", pytest.param("uring", marks=RING), "GPU", "direct"]
FOREIGN: list[Mode] = ["python", "GPU and python"]


class Expected:
    """What the reference says of a case. `spaces`: what it leaves when nothing is cancelled, and no deadline passes."""

    def __init__(self, case: Case) -> None:
        self.spaces = case.spaces.copy()
        self.in_time = [self._ask(case, self.spaces, planned, cancelled=False, expired=False) for planned in case.moves]
        self.early = [
            [
                self._ask(case, case.spaces.copy(), planned, cancelled=cancelled, expired=expired)
                for cancelled in {False, planned.begin == "cancel"}
                for expired in {False, planned.may_expire}
            ]
            for planned in case.moves
        ]

    def _ask(self, case: Case, spaces: Spaces, planned: Planned, *, cancelled: bool, expired: bool) -> Answer:
        reference = ReferenceExecutor(
            case.layout, spaces.planes, spaces.memories, spaces.files, spaces.sums, case.faults, case.refusal
        )
        return reference.carry_out(planned.move, cancelled=cancelled, expired=expired)


def outcome(answer: Answer, row: int) -> Any:
    """What became of a page: a verdict, or of a write an error, `late`, or nothing."""
    if row in answer.verdicts:
        return answer.verdicts[row]
    return "late" if row in answer.late else answer.errors.get(row)


def code(error: StorageError) -> int:
    return SHORT if isinstance(error, ShortIOError) else int(cast(Any, error).errno)


def check(case: Case, mode: Mode, damage: Callable[[Real], AbstractContextManager[None]] | None = None) -> None:
    """Have both carry out a case. `damage`: what its faults come from, in place of their injection."""
    expected = Expected(case)
    injected = dataclasses.replace(case, faults=[]) if damage is not None else case
    with tempfile.TemporaryDirectory() as directory, opened(injected, mode, Path(directory)) as real:
        with damage(real) if damage is not None else contextlib.nullcontext():
            heard = [Heard() for _ in case.moves]
            begun: list[Moving] = []
            for planned, listener in zip(case.moves, heard, strict=True):
                loads = planned.move.priority in (Priority.LOAD, Priority.PREFETCH)
                begun.append(real.executor.begin(planned.move, (), listener if loads else None))
                if planned.begin == "cancel":
                    begun[-1].cancel()
            for number, moving in enumerate(begun):
                check_layers(case, real, expected, number, moving)
            ends = [real.executor.finish(moving.end()) for moving in begun]
            answers = [answer_of(end, listener) for end, listener in zip(ends, heard, strict=True)]
            for number, answer in enumerate(answers):
                check_answer(case.moves[number], answer, expected.in_time[number], expected.early[number])
                check_listener(case, number, heard[number])
            check_late(real, case.moves, begun, answers, expected.in_time)
        moves = real.executor.moves
        until(lambda: (moves.free_slots(), moves.held_slots()) == (case.reserve, 0), "the reserve has its slots again")
        real.read_back()
        check_bytes(case, real, expected, answers)


def answer_of(end: End, heard: Heard) -> Answer:
    assert end.error is None
    assert len(set(end.late)) == len(end.late)
    return Answer(heard.verdicts, {row: code(error) for row, error in end.errors.items()}, set(end.late))


def check_answer(planned: Planned, answer: Answer, in_time: Answer, early: list[Answer]) -> None:
    """The same of every page. A cancel and a deadline race with the work, and with each other: a page is as if either
    came before its I/O began, or not at all; those that wait for a page that hangs miss its deadline, too."""
    row = 0
    for way in planned.move.ways:
        for _ in range(len(way)):
            allowed = [outcome(in_time, row), *(outcome(one, row) for one in early)]
            assert outcome(answer, row) in allowed, f"row {row}, from {way.source} to {way.target}"
            passes = way.target == PLANES and way.places is None
            if row in in_time.late and not planned.begin and not passes:
                assert row in answer.late, "what hangs is late, where nothing could keep it from being begun"
            if row in answer.late and row in answer.verdicts:
                gone = answer.verdicts[row] in (PageStatus.DEADLINE, PageStatus.CANCELLED)
                bad = bool(planned.move.groups) and answer.verdicts[row] is not PageStatus.LOADED
                assert gone or bad, "only a page of several groups may have a verdict before its last read ends"
                assert planned.may_expire
            row += 1
    assert set(answer.errors) | answer.late <= set(range(row))
    assert not set(answer.errors) & answer.late


def check_layers(case: Case, real: Real, expected: Expected, number: int, moving: Moving) -> None:
    """A layer that is said to be there has its bytes."""
    planned = case.moves[number]
    if moving.lands is None or planned.may_expire or planned.begin or planned.move.ways[0].source == PLANES:
        return
    answer, row = expected.in_time[number], 0
    for layer in range(case.layout.n_layers):
        landed = moving.lands(layer, WAIT)
        assert landed is not None, "a layer is never there"
        if landed.event is not None:
            landed.event.synchronize()
        row = 0
        for way in planned.move.ways:
            for page in range(len(way)):
                if way.target == PLANES and answer.verdicts[row] is PageStatus.LOADED:
                    pairs = zip(real.spaces.planes[layer], expected.spaces.planes[layer], strict=True)
                    assert all(np.array_equal(a[way.targets[page]], b[way.targets[page]]) for a, b in pairs), layer
                row += 1


def check_listener(case: Case, number: int, heard: Heard) -> None:
    """Whoever waits for the layers of a load is told of them, by the end at the latest."""
    move = case.moves[number].move
    if any(way.target == PLANES for way in move.ways):
        assert heard.layers == set(range(case.layout.n_layers))


def check_late(
    real: Real, moves: list[Planned], begun: list[Moving], answers: list[Answer], in_time: list[Answer]
) -> None:
    """Nothing touches the places of a page any more, but of one that is late; of one that hangs, until it lets go."""
    told: list[list[int]] = [[] for _ in begun]
    for moving, rows, answer, other, planned in zip(begun, told, answers, in_time, moves, strict=True):
        moving.on_end(rows.append)
        if planned.begin != "over":  # or nothing of it may have begun
            assert not set(rows) & answer.late & other.late, "the places of a page that hangs are free"
    real.release()
    for rows, planned in zip(told, moves, strict=True):
        pages = set(range(len(planned.move)))
        until(lambda rows=rows, pages=pages: set(rows) == pages, "each page ends")  # type: ignore[misc]
        assert len(rows) == len(pages), "a page ended twice"


def check_bytes(case: Case, real: Real, expected: Expected, answers: list[Answer]) -> None:
    """Pages that are good have their bytes, everywhere; what no move names has the bytes that it had."""
    free = Free(case.spaces)
    for planned, answer, in_time in zip(case.moves, answers, expected.in_time, strict=True):
        row = 0
        for way in planned.move.ways:
            for page in range(len(way)):
                free.take(way, page)
                known = outcome(answer, row) == outcome(in_time, row)
                if known and outcome(answer, row) in (PageStatus.LOADED, None):
                    check_page(case, real.spaces, expected.spaces, way, page, copied=planned.begin != "cancel")
                row += 1
    free.check(real.spaces)
    for name, sums in expected.spaces.sums.items():
        assert np.array_equal(real.spaces.sums[name], sums), f"checksums of {name}"


def check_page(case: Case, real: Spaces, expected: Spaces, way: Way, page: int, *, copied: bool) -> None:
    """`copied`: nobody cancelled the copies into the planes."""
    if way.source == PLANES:
        a, b = (some.memories[way.target][way.targets[page]] for some in (real, expected))
        assert np.array_equal(a[: case.layout.page_bytes], b[: case.layout.page_bytes])
    elif way.target != PLANES:
        a, b = ((some.memories | some.files)[way.target][way.targets[page]] for some in (real, expected))
        assert np.array_equal(a, b)
    if way.places is not None:
        a, b = (some.memories[way.through][way.places[page]] for some in (real, expected))
        assert np.array_equal(a, b)
    if way.target == PLANES and copied:
        for ours, theirs in zip(real.planes, expected.planes, strict=True):
            for x, y in zip(ours, theirs, strict=True):
                assert np.array_equal(x[way.targets[page]], y[way.targets[page]])


class Free:
    """What no move may write."""

    def __init__(self, spaces: Spaces) -> None:
        self._spaces = spaces
        sizes = {name: len(some) for name, some in (spaces.memories | spaces.files).items()}
        self._slots = {name: np.ones(size, bool) for name, size in sizes.items()}
        self._slots[PLANES] = np.ones(len(spaces.planes[0][0]), bool)
        self._slots["bounce"][len(spaces.memories["bounce"]) // 2 :] = False  # the reserve of loads

    def take(self, way: Way, page: int) -> None:
        self._slots[way.target][way.targets[page]] = False
        if way.places is not None:
            self._slots[way.through][way.places[page]] = False

    def check(self, real: Spaces) -> None:
        ours = {**real.memories, **real.files}
        for name, some in (self._spaces.memories | self._spaces.files).items():
            free = self._slots[name]
            assert np.array_equal(ours[name][free], some[free]), f"somebody wrote to {name}"
        free = self._slots[PLANES]
        for planes, others in zip(real.planes, self._spaces.planes, strict=True):
            for a, b in zip(planes, others, strict=True):
                assert np.array_equal(a[free], b[free]), "somebody wrote to the planes"


# -- cases -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@given(case=cases())
def test_by_its_own_disk(mode: Mode, case: Case) -> None:
    check(case, mode)


@pytest.mark.parametrize("mode", FOREIGN)
@given(case=cases(python=True))
def test_by_a_transport_of_python(mode: Mode, case: Case) -> None:
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
