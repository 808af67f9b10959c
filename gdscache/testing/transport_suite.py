"""The tests that every transport passes: the right bytes at the right place, the right errors, and no kept memory.

In a file of tests, which pytest then collects as usual:

    class TestMine(TransportSuite):
        def make_transport(self, threads):
            return MyTransport(threads=threads, direct_io="auto")

With `memory_kinds = ("host", "cuda")` in the class, moves are tested with GPU memory too, in tests with the marker
`gpu`.
"""

from __future__ import annotations

import errno
import functools
import json
import mmap
import os
import random
import resource
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from gdscache.cuda.host_memory import HostBuffer
from gdscache.errors import IOFailedError
from gdscache.pages.layout import EXTENT_ALIGNMENT
from gdscache.storage.base import Memory as Piece
from gdscache.storage.base import Op, Transport, memory_of, part
from gdscache.storage.calls import within

SECTOR = EXTENT_ALIGNMENT
FILE_BYTES = 8 << 20
CUDA_BYTES = 32 << 20
PATIENCE = 30.0  # seconds: only a hang takes longer

Make = Callable[..., Transport]
"""`make(threads=4)`: the transport under test, closed at the end."""


def odd_extents(rng: random.Random, total: int, largest: int) -> list[tuple[int, int]]:
    """`(offset, bytes)`: the whole of `total` bytes in odd numbers of sectors below `largest`, shuffled."""
    extents, at = [], 0
    while at < total:
        size = min(rng.randrange(1, largest, 2) * SECTOR, total - at)
        extents.append((at, size))
        at += size
    rng.shuffle(extents)
    return extents


@functools.cache
def random_bytes(seed: int) -> bytes:
    """`FILE_BYTES` random bytes, cached: drawing them takes longer than most tests."""
    return random.Random(seed).randbytes(FILE_BYTES)


class Memory:
    """`nbytes` zeros of one kind (`host` or `cuda`) on a page, registered with the transport."""

    def __init__(self, kind: str, transport: Transport, nbytes: int) -> None:
        self.kind, self.nbytes, self._transport = kind, nbytes, transport
        if kind == "host":
            self.host = HostBuffer(nbytes, "off")
            self._whole: memoryview | torch.Tensor = self.host.view
        else:
            # All of one large size: torch gives each a CUDA allocation of its own, which cuFile registers.
            room = torch.zeros(max(nbytes + SECTOR, CUDA_BYTES), dtype=torch.uint8, device="cuda")
            start = -room.data_ptr() % SECTOR
            self._whole = room[start : start + nbytes]
            torch.cuda.synchronize()
        transport.register(self._whole)

    def part(self, at: int, nbytes: int) -> Piece:
        """The bytes from `at`, as an argument of a call."""
        whole = self._whole if isinstance(self._whole, memoryview) else memory_of(self._whole)
        return part(whole, at, at + nbytes)

    def fill(self, data: bytes) -> None:
        if isinstance(self._whole, memoryview):
            self._whole[:] = data
        else:
            self._whole.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
            torch.cuda.synchronize()

    def bytes(self, at: int = 0, nbytes: int | None = None) -> bytes:
        some = self._whole[at : at + (self.nbytes if nbytes is None else nbytes)]
        return bytes(some) if isinstance(some, memoryview) else some.cpu().numpy().tobytes()

    def close(self) -> None:
        if not self._whole.nbytes:
            return
        self._transport.deregister(self._whole)
        if isinstance(self._whole, memoryview):
            self.host.close()
        self._whole = memoryview(b"")


Remember = Callable[..., Memory]
"""`memory(transport, nbytes=FILE_BYTES, kind="host")`: registered memory, released at the end."""


def close(transport: Transport) -> None:
    """Close it; fails if that does not return. Raises the transport's error."""
    within("gdscache-test-close", transport.close, f"close() of {transport.name} has not returned", "", PATIENCE)


def check_equal(there: bytes | memoryview, expected: bytes | memoryview) -> None:
    """Fails and names the first byte that differs.

    Not by `assert a == b`: in CI and with -v pytest compares differing values line by line, which does not end for
    megabytes.
    """
    if there == expected:
        return
    if len(there) != len(expected):
        pytest.fail(f"{len(there)} bytes instead of {len(expected)}")
    differ = [at for at, (a, b) in enumerate(zip(there, expected, strict=True)) if a != b]
    at = differ[0]
    pytest.fail(f"{len(differ)} of {len(there)} bytes differ, first byte {at}: {there[at]} instead of {expected[at]}")


def move(transport: Transport, op: Op, file: int, offset: int, memory: Piece) -> int:
    """One call, made like the library's: written memory is read-only, and a view is released after the call."""
    view = memory.toreadonly() if isinstance(memory, memoryview) and op is Op.WRITE else memory
    moved = (transport.read if op is Op.READ else transport.write)(file, offset, view)
    if isinstance(view, memoryview):
        view.release()
    return moved


def move_all(
    transport: Transport, op: Op, file: int, memory: Memory, extents: Iterable[tuple[int, int, int]], threads: int = 1
) -> None:
    """Move `(offset, bytes, place in memory)`, several at a time. Fails if one moves less."""

    def one(extent: tuple[int, int, int]) -> str:
        offset, nbytes, place = extent
        moved = move(transport, op, file, offset, memory.part(place, nbytes))
        return "" if moved == nbytes else f"{op.value} of {nbytes} bytes at {offset} moved {moved}"

    with ThreadPoolExecutor(threads) as pool:
        if wrong := [answer for answer in pool.map(one, extents) if answer]:
            pytest.fail(f"{len(wrong)} calls moved too little, the first: {wrong[0]}")


class TransportSuite:
    """Subclass it, and give `make_transport`. `memory_kinds`: the kinds of memory to test, of those the transport can
    move."""

    memory_kinds: ClassVar[tuple[str, ...]] = ("host",)
    sectors: ClassVar[int] = 512  # size of single requests

    def make_transport(self, threads: int) -> Transport:
        """A new transport with `threads` threads; the suite closes it."""
        raise NotImplementedError(f"{type(self).__name__}.make_transport(threads) returns the transport to test")

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Tests that take `kind` run once for each of `memory_kinds`."""
        if "kind" in metafunc.fixturenames:
            marked = [pytest.param(kind, marks=[] if kind == "host" else pytest.mark.gpu) for kind in self.memory_kinds]
            metafunc.parametrize("kind", marked)

    @pytest.fixture
    def make(self) -> Iterator[Make]:
        made: list[Transport] = []

        def build(threads: int = 4) -> Transport:
            made.append(self.make_transport(threads))
            return made[-1]

        yield build
        for transport in made:
            close(transport)

    @pytest.fixture
    def memory(self, make: Make) -> Iterator[Remember]:
        """Takes `make`, so that memory is deregistered before its transport is closed."""
        made: list[Memory] = []

        def build(transport: Transport, nbytes: int = FILE_BYTES, kind: str = "host") -> Memory:
            if kind == "cuda" and not torch.cuda.is_available():
                pytest.skip("no CUDA device")
            made.append(Memory(kind, transport, nbytes))
            return made[-1]

        yield build
        for one in made:
            one.close()

    @pytest.fixture
    def data_file(self, tmp_path: Path) -> Path:
        """A file of `FILE_BYTES` random bytes, alone in its directory."""
        directory = tmp_path / "files"
        directory.mkdir()
        path = directory / "data"
        path.write_bytes(random_bytes(1))
        return path

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
        there = data_file.read_bytes()  # before a flush: pages are committed without one
        assert len(there) == FILE_BYTES
        for at, n, place in extents:
            check_equal(there[at : at + n], data[place : place + n])
        transport.flush(file)
        move_all(transport, Op.READ, file, target, extents, threads=4)
        check_equal(target.bytes(), data)

    def test_an_offset_of_more_than_32_bits(self, make: Make, memory: Remember, data_file: Path, kind: str) -> None:
        transport, far = make(), (1 << 32) + SECTOR
        os.truncate(data_file, far + SECTOR)
        file, there = transport.open(data_file), memory(transport, 2 * SECTOR, kind)
        there.fill(random_bytes(3)[: 2 * SECTOR])
        assert move(transport, Op.WRITE, file, far, there.part(0, SECTOR)) == SECTOR
        assert move(transport, Op.READ, file, far, there.part(SECTOR, SECTOR)) == SECTOR
        check_equal(there.bytes(), random_bytes(3)[:SECTOR] * 2)
        with data_file.open("rb") as whole:
            check_equal(whole.read(FILE_BYTES), random_bytes(1))

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
        until = time.monotonic() + PATIENCE
        for worker in workers:
            worker.join(max(0.0, until - time.monotonic()))
        assert not any(worker.is_alive() for worker in workers), f"a thread reads or writes for {PATIENCE:g} s"
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
        with mmap.mmap(-1, SECTOR) as memory, memoryview(memory) as whole:  # raises at its end if a reference is left
            transport.register(whole)
            assert move(transport, op, file, 0, whole[:]) == SECTOR
            transport.deregister(whole)

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
