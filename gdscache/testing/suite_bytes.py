"""The right bytes at the right place, and errors where they belong: for every kind of memory."""

from __future__ import annotations

import errno
import os
import random
import threading
from pathlib import Path

import pytest

from gdscache.errors import IOFailedError, ShortIOError, StorageError
from gdscache.storage.base import IORequest, Op
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
    odd_extents,
    random_bytes,
    soon,
    transfer,
)


class BytesCases(SuiteBase):
    @pytest.mark.parametrize("largest", [2, 16, 700, 2100])
    def test_shuffled_extents_come_back_equal(
        self, make: Make, memory: Remember, data_file: Path, kind: str, largest: int
    ) -> None:
        transport, rng = make(), random.Random(largest)
        file = transport.open(data_file)
        extents = odd_extents(rng, FILE_BYTES, largest)
        places = _odd_places(rng, extents)
        source, target = memory(transport, FILE_BYTES, kind), memory(transport, FILE_BYTES, kind)
        data = rng.randbytes(FILE_BYTES)
        source.fill(data)
        check_done(transfer(transport, Op.WRITE, file, source, extents, places), len(extents))
        transport.flush(file)
        there = data_file.read_bytes()
        assert len(there) == FILE_BYTES
        for (at, n), place in zip(extents, places, strict=True):
            check_equal(there[at : at + n], data[place : place + n])
        batch = [IORequest(file, at, target.part(p, n)) for (at, n), p in zip(extents, places, strict=True)]
        submission = transport.submit(Op.READ, batch)
        ended = dict(submission.completions(soon()))
        check_done([ended[n] for n in sorted(ended)], len(extents))
        assert submission.pending == 0
        check_equal(target.bytes(), data)

    def test_many_threads_submit_at_once(self, make: Make, memory: Remember, data_file: Path, kind: str) -> None:
        transport = make()
        file = transport.open(data_file)
        threads, share = 8, FILE_BYTES // 8
        mine = [memory(transport, share, kind) for _ in range(threads)]
        failures: list[object] = []

        def work(me: int) -> None:
            rng, base = random.Random(me), me * share
            for _ in range(3):
                data = rng.randbytes(share)
                mine[me].fill(data)
                extents = odd_extents(rng, share, 64)
                places = [at for at, _ in extents]
                extents = [(base + at, n) for at, n in extents]
                failures.extend(filter(None, transfer(transport, Op.WRITE, file, mine[me], extents, places)))
                mine[me].fill(bytes(share))
                failures.extend(filter(None, transfer(transport, Op.READ, file, mine[me], extents, places)))
                if mine[me].bytes() != data:
                    failures.append(me)
            done.append(me)

        done: list[int] = []
        workers = [threading.Thread(target=work, args=(n,), daemon=True) for n in range(threads)]
        for worker in workers:
            worker.start()
        join(workers, "a thread that submits")
        assert not failures
        assert sorted(done) == list(range(threads))

    def test_batches_overlap_in_time_and_in_the_file(
        self, make: Make, memory: Remember, data_file: Path, kind: str
    ) -> None:
        transport, rng, data = make(3), random.Random(2), data_file.read_bytes()
        file = transport.open(data_file)
        targets = [memory(transport, FILE_BYTES // 2, kind) for _ in range(8)]
        batches = []
        for number, target in enumerate(targets):
            base = number * FILE_BYTES // 16  # each half a file long: most bytes are wanted by many batches
            extents = odd_extents(rng, FILE_BYTES // 2, (4, 40, 400)[number % 3])
            requests = [IORequest(file, base + at, target.part(at, n)) for at, n in extents]
            batches.append((base, target, transport.submit(Op.READ, requests)))
        rng.shuffle(batches)
        for base, target, submission in batches:
            assert not any(submission.wait(soon()))
            check_equal(target.bytes(), data[base : base + FILE_BYTES // 2])

    def test_two_files_and_two_transports(self, make: Make, memory: Remember, data_file: Path) -> None:
        other, data = data_file.with_name("other"), random_bytes(3)
        other.write_bytes(data)
        first, second = make(2), make(1)
        batches = []
        for transport in (first, second):
            files = [transport.open(path) for path in (data_file, other)]
            assert files[0] != files[1]
            target = memory(transport, 2 * FILE_BYTES)
            extents = odd_extents(random.Random(4), FILE_BYTES, 99)
            requests = [
                IORequest(f, at, target.part(i * FILE_BYTES + at, n)) for at, n in extents for i, f in enumerate(files)
            ]
            batches.append((target, transport.submit(Op.READ, requests)))
        for target, submission in batches:
            assert not any(submission.wait(soon()))
            check_equal(target.bytes(), data_file.read_bytes() + data)
        close(first)
        assert not any(transfer(second, Op.READ, files[1], batches[1][0], [(0, SECTOR)], [0]))
        check_equal(batches[1][0].bytes(0, SECTOR), data[:SECTOR])

    def test_past_the_end_fails_alone_and_later_reads_work(
        self, make: Make, memory: Remember, data_file: Path, kind: str
    ) -> None:
        transport, data = make(), data_file.read_bytes()
        file, target = transport.open(data_file), memory(transport, FILE_BYTES, kind)
        extents = [
            (FILE_BYTES + SECTOR, SECTOR),
            (FILE_BYTES - 2 * SECTOR, SECTOR),
            (0, 3 * SECTOR),
            (FILE_BYTES - SECTOR, 3 * SECTOR),
            (FILE_BYTES - 4 * SECTOR, 2 * SECTOR),
        ]
        places = [sum(n for _, n in extents[:i]) for i in range(len(extents))]
        errors = transfer(transport, Op.READ, file, target, extents, places)
        assert [type(error) for error in errors] == [ShortIOError, type(None), type(None), ShortIOError, type(None)]
        assert f"0 of {SECTOR}" in str(errors[0])
        assert f"{SECTOR} of {3 * SECTOR}" in str(errors[3])
        for (at, n), place, error in zip(extents, places, errors, strict=True):
            if error is None:
                check_equal(target.bytes(place, n), data[at : at + n])
        assert transfer(transport, Op.READ, file, target, [(0, FILE_BYTES)], [0]) == [None]
        check_equal(target.bytes(), data)

    @pytest.mark.parametrize("kept", [5 * SECTOR, 5 * SECTOR + 1234, (5 << 20) + 77])
    def test_a_file_truncated_in_mid_use(
        self, make: Make, memory: Remember, data_file: Path, kind: str, kept: int
    ) -> None:
        transport, data, size = make(), data_file.read_bytes(), 3 * SECTOR
        file, target = transport.open(data_file), memory(transport, FILE_BYTES, kind)
        assert transfer(transport, Op.READ, file, target, [(0, FILE_BYTES)], [0]) == [None]
        os.truncate(data_file, kept)
        target.fill(bytes(FILE_BYTES))
        places = list(range(0, FILE_BYTES - size, size))
        errors = transfer(transport, Op.READ, file, target, [(at, size) for at in places], places)
        for at, error in zip(places, errors, strict=True):
            if at + size <= kept:
                assert error is None
                check_equal(target.bytes(at, size), data[at : at + size])
            else:
                assert isinstance(error, ShortIOError)
                assert f"{max(kept - at, 0)} of {size} bytes" in str(error)
        [whole] = transfer(transport, Op.READ, file, target, [(0, FILE_BYTES)], [0])
        assert isinstance(whole, ShortIOError)

    def test_bad_requests_harm_no_other(self, make: Make, memory: Remember, data_file: Path) -> None:
        transport, data = make(), data_file.read_bytes()
        file, target = transport.open(data_file), memory(transport)
        view = target.host.view
        batch = [
            IORequest(file, 0, view[:SECTOR]),
            IORequest(file, 512, view[SECTOR : 2 * SECTOR]),
            IORequest(file, SECTOR, view[SECTOR : SECTOR + 1000]),
            IORequest(file, SECTOR, view[SECTOR + 512 : 2 * SECTOR + 512]),
            IORequest(file, -SECTOR, view[SECTOR : 2 * SECTOR]),
            IORequest(file, 0, view[:0]),
            IORequest(file + 1000, 0, view[SECTOR : 2 * SECTOR]),
            IORequest(file, 0, view[SECTOR : 2 * SECTOR].toreadonly()),
            IORequest(file, 0, view[: 2 * SECTOR : 2]),
            IORequest(file, 0, target.host.tensor[:SECTOR]),
            IORequest(file, SECTOR, view[2 * SECTOR : 3 * SECTOR]),
        ]
        errors = transport.submit(Op.READ, batch).wait(soon())
        assert errors[0] is errors[-1] is None
        for index, error in enumerate(errors[1:-1], 1):
            assert isinstance(error, IOFailedError), index
            assert error.errno == (errno.EBADF if index == 6 else errno.EINVAL)
            assert error.hint
        check_equal(view[:SECTOR], data[:SECTOR])
        check_equal(view[2 * SECTOR : 3 * SECTOR], data[SECTOR : 2 * SECTOR])
        assert not any(view[SECTOR : 2 * SECTOR])

    def test_read_only_memory_may_be_written_from(self, make: Make, memory: Remember, data_file: Path) -> None:
        transport = make()
        file, source = transport.open(data_file), memory(transport)
        source.fill(random_bytes(5))
        request = IORequest(file, 0, source.host.view.toreadonly())
        assert transport.submit(Op.WRITE, [request]).wait(soon()) == [None]
        check_equal(data_file.read_bytes(), source.bytes())

    def test_open_and_flush_of_what_is_not_there(self, make: Make, tmp_path: Path) -> None:
        transport, directory = make(), tmp_path / "directory"
        directory.mkdir()
        with pytest.raises(IOFailedError) as missing:
            transport.open(directory / "missing")
        assert missing.value.errno == errno.ENOENT
        with pytest.raises(IOFailedError) as folder:
            transport.open(directory)
        assert folder.value.errno == errno.EISDIR
        with pytest.raises(IOFailedError) as unknown:
            transport.flush(12345)
        assert unknown.value.errno == errno.EBADF
        assert not list(directory.iterdir())

    def test_an_error_names_its_file_and_offset(self, make: Make, memory: Remember, data_file: Path, kind: str) -> None:
        transport = make()
        file, target = transport.open(data_file), memory(transport, SECTOR, kind)
        [error] = transfer(transport, Op.READ, file, target, [(FILE_BYTES, SECTOR)], [0])
        assert isinstance(error, StorageError)
        assert str(data_file) in error.message
        assert str(FILE_BYTES) in error.message


def _odd_places(rng: random.Random, extents: list[tuple[int, int]]) -> list[int]:
    """Where each extent lies in memory: back to back, in an order of its own."""
    order = list(range(len(extents)))
    rng.shuffle(order)
    places, at = [0] * len(extents), 0
    for index in order:
        places[index] = at
        at += extents[index][1]
    return places
