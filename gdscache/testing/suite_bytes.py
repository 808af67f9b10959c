"""The right bytes at the right place, the right errors, and no kept memory: for every kind of memory."""

from __future__ import annotations

import errno
import json
import mmap
import os
import random
import resource
import threading
from pathlib import Path
from typing import ClassVar

import pytest

from gdscache.errors import IOFailedError
from gdscache.storage.base import Op
from gdscache.testing.suite_base import (
    FILE_BYTES,
    SECTOR,
    Make,
    Remember,
    SuiteBase,
    check_equal,
    close,
    join,
    move,
    move_all,
    odd_extents,
    random_bytes,
)


class BytesCases(SuiteBase):
    sectors: ClassVar[int] = 512  # size of single requests

    @pytest.mark.parametrize("largest", [2, 16, 700, 2100])
    def test_shuffled_extents_come_back_equal(
        self, make: Make, memory: Remember, data_file: Path, kind: str, largest: int
    ) -> None:
        transport, rng = make(), random.Random(largest)
        file = transport.open(data_file)
        extents, place, total = [], 0, min(FILE_BYTES, self.sectors * largest // 2 * SECTOR)
        for at, n in odd_extents(rng, total, largest):  # their order in memory differs from that in the file
            extents.append((at, n, place))
            place += n
        rng.shuffle(extents)
        source, target = memory(transport, total, kind), memory(transport, total, kind)
        data = rng.randbytes(total)
        source.fill(data)
        move_all(transport, Op.WRITE, file, source, extents, threads=4)
        transport.flush(file)
        there = data_file.read_bytes()
        assert len(there) == FILE_BYTES
        for at, n, place in extents:
            check_equal(there[at : at + n], data[place : place + n])
        move_all(transport, Op.READ, file, target, extents, threads=4)
        check_equal(target.bytes(), data)

    def test_many_threads_call_at_once(self, make: Make, memory: Remember, data_file: Path, kind: str) -> None:
        transport = make()
        file = transport.open(data_file)
        threads, share = 8, FILE_BYTES // 8
        mine = [memory(transport, share, kind) for _ in range(threads)]
        done: list[int] = []

        def work(me: int) -> None:
            rng, base = random.Random(me), me * share
            for _ in range(3):
                data = rng.randbytes(share)
                extents = [(base + at, n, at) for at, n in odd_extents(rng, share, 64)]
                mine[me].fill(data)
                move_all(transport, Op.WRITE, file, mine[me], extents)
                mine[me].fill(bytes(share))
                move_all(transport, Op.READ, file, mine[me], extents)
                check_equal(mine[me].bytes(), data)
            done.append(me)

        workers = [threading.Thread(target=work, args=(n,), daemon=True) for n in range(threads)]
        for worker in workers:
            worker.start()
        join(workers, "a thread that reads and writes")
        assert sorted(done) == list(range(threads))

    def test_two_files_and_two_transports(self, make: Make, memory: Remember, data_file: Path, kind: str) -> None:
        other, data = data_file.with_name("other"), random_bytes(3)
        other.write_bytes(data)
        first, second = make(2), make(1)
        for transport in (first, second):
            files = [transport.open(path) for path in (data_file, other)]
            assert files[0] != files[1]
            target = memory(transport, 2 * SECTOR, kind)
            for n, file in enumerate(files):
                assert move(transport, Op.READ, file, SECTOR, target.part(n * SECTOR, SECTOR)) == SECTOR
            check_equal(target.bytes(), data_file.read_bytes()[SECTOR : 2 * SECTOR] + data[SECTOR : 2 * SECTOR])
            target.close()
        close(first)
        target = memory(second, SECTOR, kind)
        assert move(second, Op.READ, files[1], 0, target.part(0, SECTOR)) == SECTOR
        check_equal(target.bytes(), data[:SECTOR])

    @pytest.mark.parametrize("kept", [5 * SECTOR, 5 * SECTOR + 1234, (5 << 20) + 77])
    def test_where_the_file_ends_a_read_is_short(
        self, make: Make, memory: Remember, data_file: Path, kind: str, kept: int
    ) -> None:
        """A read beyond the end is no error: the answer is the number of bytes there. Other reads go on."""
        transport, data, size = make(), data_file.read_bytes(), 3 * SECTOR
        file, target = transport.open(data_file), memory(transport, FILE_BYTES, kind)
        assert move(transport, Op.READ, file, FILE_BYTES + SECTOR, target.part(0, SECTOR)) == 0
        assert move(transport, Op.READ, file, FILE_BYTES - SECTOR, target.part(0, size)) == SECTOR
        assert move(transport, Op.READ, file, 0, target.part(0, FILE_BYTES)) == FILE_BYTES
        check_equal(target.bytes(), data)
        os.truncate(data_file, kept)
        target.fill(bytes(FILE_BYTES))
        for at in range(0, FILE_BYTES - size, size):
            if at % (16 * size) and abs(at - kept) > 4 * size:
                continue  # a sample, and all near the end
            there = min(max(kept - at, 0), size)
            assert move(transport, Op.READ, file, at, target.part(at, size)) == there
            check_equal(target.bytes(at, there), data[at : at + there])
        assert move(transport, Op.READ, file, 0, target.part(0, FILE_BYTES)) == kept

    @pytest.mark.parametrize("op", list(Op))
    def test_memory_is_not_kept(self, make: Make, data_file: Path, op: Op) -> None:
        transport = make()
        file = transport.open(data_file)
        with mmap.mmap(-1, SECTOR) as memory:  # raises at its end if a reference is left
            assert move(transport, op, file, 0, memoryview(memory)) == SECTOR

    @pytest.mark.parametrize("op", list(Op))
    def test_a_file_that_is_not_open_is_an_error(self, make: Make, memory: Remember, data_file: Path, op: Op) -> None:
        transport = make()
        file, target = transport.open(data_file), memory(transport, SECTOR)
        with pytest.raises((OSError, IOFailedError)) as caught:
            move(transport, op, file + 1000, 0, target.part(0, SECTOR))
        assert getattr(caught.value, "errno", None) == errno.EBADF
        assert move(transport, op, file, 0, target.part(0, SECTOR)) == SECTOR

    def test_a_write_without_room_is_not_called_done(self, make: Make, memory: Remember, data_file: Path) -> None:
        """As on a full disk: the process may make no file longer."""
        transport = make()
        file, source = transport.open(data_file), memory(transport, 2 * SECTOR)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, limits[1]))
        try:
            for offset in (FILE_BYTES, FILE_BYTES - SECTOR):
                try:
                    moved = move(transport, Op.WRITE, file, offset, source.part(0, 2 * SECTOR))
                except (OSError, IOFailedError):
                    continue
                assert moved == FILE_BYTES - offset
            assert move(transport, Op.WRITE, file, FILE_BYTES - SECTOR, source.part(0, SECTOR)) == SECTOR
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

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

    def test_no_descriptor_and_no_thread_is_left(self, make: Make, memory: Remember, data_file: Path) -> None:
        def once() -> None:
            transport = make(3)
            file, target = transport.open(data_file), memory(transport, SECTOR)
            assert move(transport, Op.READ, file, 0, target.part(0, SECTOR)) == SECTOR
            target.close()
            close(transport)
            close(transport)

        once()
        files, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
        for _ in range(5):
            once()
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
