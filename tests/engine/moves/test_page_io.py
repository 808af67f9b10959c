"""Pages as requests: how neighbours are joined, and that each page still has its own answer."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gdscache.errors import DeadlineError, IOFailedError, NativeCallError, ShortIOError
from gdscache.moves.page_io import PageIO, stretches
from gdscache.storage.base import FileRange, IORequest, Op, Submission


@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=40),
    st.lists(st.tuples(st.integers(0, 300), st.integers(0, 300), st.integers(1, 30)), max_size=6),
    st.integers(1, 9),
    st.integers(1, 12),
)
def test_stretches_are_all_pages_in_order_and_follow_on_at_both_ends(
    singles: list[tuple[int, int]], runs: list[tuple[int, int, int]], most: int, period: int
) -> None:
    pages = singles + [(a + i, b + i) for a, b, n in runs for i in range(n)]
    here, there = (np.array([page[end] for page in pages], dtype=np.int64) for end in (0, 1))
    found = list(zip(*(ends.tolist() for ends in stretches(here, there, most, period)), strict=True))
    assert [page for first, count in found for page in range(first, first + count)] == list(range(len(pages)))
    for first, count in found:
        assert 1 <= count <= most
        for end in (here, there):
            assert end[first : first + count].tolist() == list(range(end[first], end[first] + count))
        assert here[first] // period == here[first + count - 1] // period
    for first, count in found[:-1]:
        border = first + count
        joined = here[border] == here[border - 1] + 1 and there[border] == there[border - 1] + 1
        assert not joined or count == most or here[border] % period == 0


class Device:
    """Answers when it is told to: `runs` are requests of the first submission, in pages."""

    def __init__(self, runs: Sequence[tuple[int, int]]) -> None:
        self.submissions: list[tuple[list[int], Submission]] = []
        requests = [IORequest(0, first, memoryview(bytes(count))) for first, count in runs]
        firsts, counts = np.array(runs, dtype=np.int64).reshape(-1, 2).T
        self.io = PageIO(self._submit, requests, firsts, counts, lambda page: IORequest(0, page, memoryview(b"1")))

    def _submit(self, requests: Sequence[IORequest]) -> Submission:
        spans = [FileRange("slab", r.offset, len(r.memory)) for r in requests]  # type: ignore[arg-type]
        submission = Submission(Op.READ, spans, [1] * len(spans))
        self.submissions.append(([r.offset for r in requests], submission))
        return submission


ERROR = IOFailedError("injected", "none", 5)


def test_a_request_that_fails_is_tried_again_page_by_page() -> None:
    device = Device([(0, 3), (3, 2), (5, 1)])
    [(_, first)] = device.submissions
    first.finish([(1, 2, None), (0, 0, ERROR), (2, 0, ERROR)])
    told: list[str] = []
    device.io.follow(lambda: told.append("told"))
    assert told
    assert list(device.io.take()) == [([3, 4], None), (range(5, 6), ERROR)]
    assert list(device.io.take()) == []
    [_, (pages, second)] = device.submissions
    assert pages == [0, 1, 2]
    told.clear()
    second.finish([(2, 1, None), (1, 0, ERROR), (0, 0, None)])
    assert told
    rest = {page: error for pages, error in device.io.take() for page in pages}
    assert rest[1] is ERROR
    assert rest[2] is None
    assert isinstance(rest[0], ShortIOError)
    assert list(device.io.take()) == []
    assert len(device.submissions) == 2


def test_whoever_waits_has_an_answer_for_each_page() -> None:
    device = Device([(0, 3), (3, 2), (5, 1)])
    [(_, first)] = device.submissions
    first.finish([(1, 2, None), (0, 0, ERROR), (2, 0, ERROR)])
    with pytest.raises(DeadlineError, match="3 of 6 pages"):
        device.io.wait(time.monotonic())
    device = Device([(0, 3), (3, 2), (5, 1)])
    [(_, first)] = device.submissions
    first.finish([(1, 2, None), (0, 0, ERROR), (2, 0, ERROR)])

    def answer() -> None:
        while len(device.submissions) < 2:
            time.sleep(0.001)
        device.submissions[1][1].finish([(2, 1, None), (1, 0, ERROR), (0, 0, None)])

    thread = threading.Thread(target=answer)
    thread.start()
    everything = device.io.wait(time.monotonic() + 30)
    thread.join()
    assert [type(e) for e in everything] == [ShortIOError, IOFailedError, *[type(None)] * 3, IOFailedError]


def test_the_end_of_each_page_is_told_once_and_not_before_its_memory_is_free() -> None:
    device = Device([(0, 2), (2, 2), (4, 2)])
    [(_, first)] = device.submissions
    first.finish([(0, 0, ERROR), (1, 2, None)])
    assert len(list(device.io.take())) == 1
    told: list[int] = []
    device.io.on_end(told.append)
    assert sorted(told) == [0, 1, 2, 3]  # nobody tries 0 and 1 again
    first.finish([(2, 0, ERROR)])
    assert sorted(told) == list(range(6))


def test_pages_that_are_tried_again_end_with_their_second_request() -> None:
    device = Device([(0, 2), (2, 1)])
    [(_, first)] = device.submissions
    first.finish([(0, 0, ERROR), (1, 1, None)])
    assert len(list(device.io.take())) == 1
    told: list[int] = []
    device.io.on_end(told.append)
    assert told == [2]
    [_, (_, second)] = device.submissions
    second.finish([(1, 1, None)])
    assert told == [2, 1]
    second.finish([(0, 1, None)])
    assert told == [2, 1, 0]


def test_no_pages_end_at_once() -> None:
    device = Device([])
    assert device.io.wait(time.monotonic()) == []
    none = np.empty(0, dtype=np.int64)
    assert [len(ends) for ends in stretches(none, none, 4, 4)] == [0, 0]


def test_pages_that_are_not_taken_again_end_with_that_error() -> None:
    """Whatever the transport raises: nobody waits for pages that nothing will ever answer for."""
    device = Device([(0, 3), (3, 2)])
    [(_, first)] = device.submissions

    def refuse(requests: Sequence[IORequest]) -> Submission:
        raise NativeCallError("no room for requests", "free memory", errno.ENOMEM)

    device.io._submit = refuse
    first.finish([(0, 0, ERROR), (1, 2, None)])
    ended = {page: error for pages, error in device.io.take() for page in pages}
    assert [type(ended[page]) for page in range(5)] == [IOFailedError] * 3 + [type(None)] * 2
    assert ended[0] is not None
    assert ended[0].errno == errno.ENOMEM
    assert list(device.io.take()) == []
    free: list[int] = []
    device.io.on_end(free.append)
    assert sorted(free) == list(range(5))
