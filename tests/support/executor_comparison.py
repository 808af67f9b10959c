"""Has the production executor and the reference carry out the same case, and compares what they say and leave."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, cast

import numpy as np

from gdscache.errors import ShortIOError, StorageError
from gdscache.moves import PLANES, PageStatus, Priority, Way
from gdscache.moves.base import End, Moving
from gdscache.native import SHORT
from tests.support.executor_cases import Case, Planned, Spaces
from tests.support.executor_machine import Heard, Mode, Real, opened
from tests.support.helpers import WAIT, until
from tests.support.reference_executor import Answer, ReferenceExecutor


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
