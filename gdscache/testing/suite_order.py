"""What comes before what, how long a transport waits, and what it keeps: seen from outside, with no gate in it."""

from __future__ import annotations

import gc
import json
import os
import random
import threading
import time
import weakref
from collections import deque
from pathlib import Path

import pytest

from gdscache.cuda.host_memory import HostBuffer
from gdscache.errors import DeadlineError, EngineClosedError, StorageError
from gdscache.storage.base import IORequest, Op, Submission
from gdscache.testing.suite_base import (
    FILE_BYTES,
    SECTOR,
    Make,
    Remember,
    SuiteBase,
    check_done,
    check_equal,
    close,
    join,
    random_bytes,
    soon,
)

LARGER = (8, 32, 128)  # times the file: batches so large that what should not wait for them would be seen to wait


class OrderCases(SuiteBase):
    def test_an_empty_batch_ends_at_once(self, make: Make) -> None:
        submission = make().submit(Op.READ, [])
        assert submission.wait(time.monotonic()) == []
        assert list(submission.completions(time.monotonic())) == []
        assert submission.pending == 0

    def test_submit_does_not_wait_and_a_deadline_leaves_the_rest_going(
        self, make: Make, memory: Remember, data_file: Path
    ) -> None:
        transport = make(2)
        file, target = transport.open(data_file), memory(transport)
        for times in LARGER:
            submission = transport.submit(Op.READ, [IORequest(file, 0, target.part(0, FILE_BYTES))] * times)
            left = _left_at_once(submission)
            if left:
                break
        else:
            pytest.fail(f"{times} reads of {FILE_BYTES} bytes had ended when submit returned")
        check_done(submission.wait(soon()), times)
        assert submission.pending == 0
        assert sorted(submission.completions(time.monotonic())) == [(n, None) for n in range(times)]
        check_equal(target.bytes(), data_file.read_bytes())

    def test_reads_go_before_queued_writes(self, make: Make, memory: Remember, data_file: Path) -> None:
        transport = make(1)
        file, source, target = transport.open(data_file), memory(transport), memory(transport, SECTOR)
        source.fill(data_file.read_bytes())
        for times in LARGER:
            writes = transport.submit(Op.WRITE, [IORequest(file, 0, source.part(0, FILE_BYTES))] * times)
            read = transport.submit(Op.READ, [IORequest(file, SECTOR, target.part(0, SECTOR))])
            assert read.wait(soon()) == [None]
            overtaken = writes.pending
            assert not any(writes.wait(soon()))
            if overtaken:
                break
        else:
            pytest.fail(f"a read waited for {times} writes of {FILE_BYTES} bytes that were queued before it")
        check_equal(target.bytes(), source.bytes(SECTOR, SECTOR))

    def test_writes_go_on_while_reads_keep_coming(self, make: Make, memory: Remember, data_file: Path) -> None:
        transport = make(1)
        file, target, source = transport.open(data_file), memory(transport), memory(transport, 4 * SECTOR)
        source.fill(random.Random(6).randbytes(4 * SECTOR))

        def read() -> Submission:
            return transport.submit(Op.READ, [IORequest(file, 0, target.part(0, FILE_BYTES))] * 8)

        reads = deque([read(), read()])
        pieces = [IORequest(file, 2 * n * SECTOR, source.part(n * SECTOR, SECTOR)) for n in range(4)]
        writes, deadline = transport.submit(Op.WRITE, pieces), soon()
        while writes.pending and time.monotonic() < deadline:
            reads.append(read())  # so that two batches wait at any time
            reads.popleft().wait(soon())
        pending = writes.pending
        for submission in reads:
            assert not any(submission.wait(soon()))
        assert pending == 0, f"{pending} of 4 writes starved under reads"
        there = data_file.read_bytes()
        for n in range(4):
            check_equal(there[2 * n * SECTOR :][:SECTOR], source.bytes(n * SECTOR, SECTOR))

    def test_several_threads_wait_for_one_batch(self, make: Make, memory: Remember, data_file: Path) -> None:
        transport = make()
        file, target = transport.open(data_file), memory(transport)
        n = 8 * SECTOR
        batch = [IORequest(file, at, target.part(at, n)) for at in range(0, FILE_BYTES, n)]
        seen: list[int] = []

        def follow() -> None:
            seen.append(sum(error is None for _, error in submission.completions(soon())))

        submission = transport.submit(Op.READ, batch)
        waiters = [threading.Thread(target=follow, daemon=True) for _ in range(4)]
        for waiter in waiters:
            waiter.start()
        check_done(submission.wait(soon()), len(batch))
        join(waiters, "a thread that waits for a batch")
        assert seen == [len(batch)] * 4

    def test_a_long_queue_takes_no_more_threads_or_files(self, make: Make, memory: Remember, data_file: Path) -> None:
        transport = make(2)
        file, target = transport.open(data_file), memory(transport)
        batch = [IORequest(file, at, target.part(at, SECTOR)) for at in range(0, FILE_BYTES, 2 * SECTOR)]
        assert not any(transport.submit(Op.READ, batch[:8]).wait(soon()))
        before = [len(os.listdir(f"/proc/self/{what}")) for what in ("task", "fd")]
        submission = transport.submit(Op.READ, batch * 4)
        most, deadline = before, soon()
        while submission.pending and time.monotonic() < deadline:
            most = [max(m, len(os.listdir(f"/proc/self/{what}"))) for m, what in zip(most, ("task", "fd"), strict=True)]
        assert not any(submission.wait(soon()))
        assert most[0] <= before[0] + 8
        assert most[1] <= before[1] + 8
        in_flight = transport.describe().get("in_flight")
        assert in_flight is None or (isinstance(in_flight, int) and in_flight > 0)

    def test_close_ends_what_was_submitted(self, make: Make, memory: Remember, data_file: Path, kind: str) -> None:
        transport = make(2)
        file, source = transport.open(data_file), memory(transport, FILE_BYTES, kind)
        source.fill(random_bytes(7))
        n = 16 * SECTOR
        batch = [IORequest(file, at, source.part(at, n)) for at in range(0, FILE_BYTES, n)]
        submissions = [transport.submit(Op.WRITE, batch) for _ in range(4)]  # more than two threads move at once
        close(transport)
        for submission in submissions:
            assert submission.pending == 0
            check_done(submission.wait(time.monotonic()), len(batch))
        check_equal(data_file.read_bytes(), source.bytes())
        close(transport)
        for use in (
            lambda: transport.submit(Op.READ, batch),
            lambda: transport.open(data_file),
            lambda: transport.flush(file),
        ):
            with pytest.raises(EngineClosedError):
                use()

    def test_memory_that_the_caller_dropped_is_kept(self, make: Make, data_file: Path) -> None:
        transport = make(1)
        file, data = transport.open(data_file), random_bytes(8)
        memory = HostBuffer(FILE_BYTES, "off")
        gone = weakref.ref(memory)
        memory.view[:] = data
        batch = [IORequest(file, at, memory.view[at : at + SECTOR]) for at in range(0, FILE_BYTES, SECTOR)]
        submission = transport.submit(Op.WRITE, batch)
        memory.close()
        del memory, batch
        gc.collect()
        assert gone() is None
        assert not any(submission.wait(soon()))
        check_equal(data_file.read_bytes(), data)

    @pytest.mark.parametrize("op", list(Op))
    def test_memory_is_free_when_its_requests_have_ended(self, make: Make, data_file: Path, op: Op) -> None:
        transport = make(2)
        file, memory = transport.open(data_file), HostBuffer(4 << 20, "off")
        address = memory.address
        submission = transport.submit(op, [IORequest(file, 0, memory.view)])
        assert submission.wait(soon()) == [None]
        memory.close()
        deadline = soon()
        while mappings_of(address) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not mappings_of(address)
        assert submission.wait(soon()) == [None]

    def test_no_descriptor_and_no_thread_is_left(self, make: Make, memory: Remember, data_file: Path) -> None:
        def once() -> list[StorageError | None]:
            transport = make(3)
            file, target = transport.open(data_file), memory(transport, SECTOR)
            submission = transport.submit(Op.READ, [IORequest(file, 0, target.part(0, SECTOR))])
            close(transport)
            return submission.wait(time.monotonic())

        assert once() == [None]
        files, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
        for _ in range(5):
            assert once() == [None]
        assert len(os.listdir("/proc/self/fd")) <= files  # fewer: something of an earlier test has ended
        assert threading.active_count() <= threads
        assert [path.name for path in data_file.parent.iterdir()] == [data_file.name]

    def test_describe_is_plain_data(self, make: Make, data_file: Path) -> None:
        transport = make(3)
        assert transport.name
        assert set(self.memory_kinds) <= transport.memory_kinds <= {"host", "cuda"}
        assert not transport.direct, "no file is open"
        transport.open(data_file)
        shown = transport.describe()
        assert json.loads(json.dumps(shown)) == shown
        assert shown["name"] == transport.name
        assert shown.get("direct", transport.direct) == transport.direct
        assert shown.get("threads", 3) == 3


def _left_at_once(submission: Submission) -> int:
    """How many requests a deadline that is over leaves: by the error's own count, and in truth no more."""
    try:
        submission.wait(time.monotonic())
    except DeadlineError as error:
        left = int(error.message.split()[0])
        return left if left >= submission.pending else 0
    return 0


def mappings_of(address: int) -> int:
    """How many mappings of this process hold the address: none when the memory was given back."""
    with open("/proc/self/maps") as maps:
        ranges = (line.split()[0].split("-") for line in maps)
        return sum(int(low, 16) <= address < int(high, 16) for low, high in ranges)
