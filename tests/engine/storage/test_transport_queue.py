import threading
import time
from collections.abc import Iterator

import pytest

from gdscache.cuda.host_memory import HostBuffer
from gdscache.errors import (
    DeadlineError,
)
from gdscache.storage import IORequest, Op, Submission
from gdscache.storage.base import FileRange
from gdscache.storage.workers import MAX_PIECES, MAX_RUN, READS_PER_WRITE
from tests.support.transport_parts import FILE_BYTES, SECTOR, Gated, soon


@pytest.fixture
def buffer() -> Iterator[HostBuffer]:
    with HostBuffer(FILE_BYTES, "off") as made:
        yield made


def test_reads_overtake_writes_and_writes_go_on(buffer: HostBuffer) -> None:
    transport = Gated(1)
    try:
        page = buffer.view[:SECTOR]
        apart = 2 * SECTOR
        writes = transport.submit(Op.WRITE, [IORequest(1, n * apart, page) for n in range(40)])
        time.sleep(0.05)  # the one thread now holds the first write
        reads = transport.submit(Op.READ, [IORequest(1, n * apart, page) for n in range(80)])
        transport.gate.set()
        assert not any(reads.wait(soon()))
        assert not any(writes.wait(soon()))
        order = transport.order[1:]
        last_read = max(n for n, op in enumerate(order) if op is Op.READ)
        before = order[:last_read]
        assert before.count(Op.WRITE) == 80 // READS_PER_WRITE - 1 or before.count(Op.WRITE) == 80 // READS_PER_WRITE
        assert Op.WRITE not in order[:READS_PER_WRITE]
    finally:
        transport.gate.set()
        transport.close()


def test_submit_does_not_wait_and_depth_is_bounded(buffer: HostBuffer) -> None:
    transport = Gated(3)
    try:
        begun = time.monotonic()
        submission = transport.submit(Op.READ, [IORequest(1, 2 * n * SECTOR, buffer.view[:SECTOR]) for n in range(100)])
        assert time.monotonic() - begun < 5
        with pytest.raises(DeadlineError, match="100 of 100"):
            submission.wait(time.monotonic() + 0.05)
        with pytest.raises(DeadlineError):
            next(submission.completions(time.monotonic() + 0.05))
        assert submission.pending == 100
        assert len(transport._reads) == 97
    finally:
        transport.gate.set()
        transport.close()
    assert submission.pending == 0


@pytest.mark.parametrize(
    ("threads", "sizes"),
    [(1, [1] * 2048), (4, [1] * 2048), (8, [2048]), (2, [2047, 1, 1025]), (16, [3, 513, 1, 255, 1023, 1])],
)
def test_runs_are_bounded_and_cover_each_byte_once(buffer: HostBuffer, threads: int, sizes: list[int]) -> None:
    transport = Gated(threads)
    transport.gate.set()
    extents, at = [], 0
    for size in sizes:
        extents.append((at, size * SECTOR))
        at += size * SECTOR
    submission = transport.submit(Op.READ, [IORequest(1, o, buffer.view[:n]) for o, n in extents])
    assert not any(submission.wait(soon()))
    transport.close()
    at = 0
    for run in sorted(transport.runs, key=lambda run: run.offset):
        assert run.nbytes <= MAX_RUN
        assert len(run.pieces) <= MAX_PIECES
        for piece in run.pieces:
            assert piece.offset == at
            at += piece.nbytes
    assert at == sum(sizes) * SECTOR
    # Neighbours share calls; what is large is shared by threads.
    assert len(transport.runs) <= max(at // (1 << 20) * 2, 2)
    assert len(transport.runs) >= min(threads, at >> 20)


def test_completions_come_before_the_batch_has_ended() -> None:
    submission = Submission(Op.READ, [FileRange("f", 0, 10), FileRange("f", 10, 20)], [1, 2])
    submission.finish([(1, 10, None)])
    assert submission.pending == 2
    submission.finish([(0, 10, None)])
    arrived = submission.completions(time.monotonic() + 0.05)
    assert next(arrived) == (0, None)
    with pytest.raises(DeadlineError):
        next(arrived)
    submission.finish([(1, 9, None)])
    [(index, error)] = [entry for entry in submission.completions(soon()) if entry[1]]
    assert index == 1
    assert "19 of 20" in str(error)


def test_a_watcher_wakes_with_each_end_while_another_waits_for_all() -> None:
    submission = Submission(Op.READ, [FileRange("f", 0, 1), FileRange("f", 1, 1)], [1, 1])
    all_ended: list[object] = []
    waiter = threading.Thread(target=lambda: all_ended.append(submission.wait(soon())))
    waiter.start()
    first = threading.Timer(0.1, submission.finish, [[(1, 1, None)]])
    first.start()
    arrived = submission.completions(time.monotonic() + 5)
    begun = time.monotonic()
    assert next(arrived) == (1, None)
    assert time.monotonic() - begun < 4
    assert not all_ended
    submission.finish([(0, 1, None)])
    assert next(arrived) == (0, None)
    waiter.join()
    first.join()
    assert all_ended == [[None, None]]
