"""The disks of the native library, io_uring's and the one of threads, as Python drives them: the same tests for both.

Pieces of all kinds, wakes and faults: csrc/host/tests/test_disk.cc. Disks that come and go: test_native_leaks.py.
"""

from __future__ import annotations

import errno
import os
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gdscache.arrays import address, integers
from gdscache.errors import DeviceError, NativeCallError
from gdscache.native import bare_loop
from tests.support import fake_gpu
from tests.support.hooks import hooks
from tests.support.native_parts import (
    HANG,
    READ,
    WRITE,
    Answer,
    NativeDisk,
    Piece,
    aligned,
    fragment,
    has_ring,
)

KINDS = ("ring", "threads")
DATA = random.Random(5).randbytes(300_001)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    if request.param == "ring" and not has_ring():
        pytest.skip("io_uring is not allowed here")
    return str(request.param)


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    (tmp_path / "file").write_bytes(DATA)
    descriptor = os.open(tmp_path / "file", os.O_RDWR)
    yield descriptor
    os.close(descriptor)


def test_one_piece_of_many_fragments(kind: str, file: int) -> None:
    memory = np.zeros(20_000, np.uint8)
    parts = [fragment(memory, 12_000, 8_000), fragment(memory, 0, 5), fragment(memory, 5, 4_000)]
    with NativeDisk(kind) as disk:
        disk.submit(Piece(9, READ, file, 7, parts))
        assert disk.reap_all() == [Answer(9, 0, 3, 0, 12_005)]
        assert bytes(memory[12_000:]) + bytes(memory[:4_005]) == DATA[7:12_012]
        disk.submit(Piece(10, WRITE, file, 100, list(reversed(parts))))
        assert disk.reap_all() == [Answer(10, 0, 3, 0, 12_005)]
    assert os.pread(file, 12_005, 100) == bytes(memory[5:4_005]) + bytes(memory[:5]) + bytes(memory[12_000:])


def test_direct_io(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "direct"
    path.write_bytes(bytes(64 << 12))
    try:
        file = os.open(path, os.O_RDWR | os.O_DIRECT)
    except OSError as error:
        pytest.skip(f"no O_DIRECT here: {error}")
    source, target = aligned(64 << 12), aligned(64 << 12)
    source[:] = np.frombuffer(random.Random(2).randbytes(len(source)), np.uint8)
    with NativeDisk(kind, 2, 8) as disk:
        for op, memory in ((WRITE, source), (READ, target)):
            disk.submit(
                *(
                    Piece(n, op, file, n << 14, [fragment(memory, (n << 14) + (k << 12), 4096) for k in range(4)], 0)
                    for n in range(16)
                )
            )
            assert disk.reap_all() == [Answer(n, 0, 4, 0, 4 << 12) for n in range(16)]
        assert np.array_equal(source, target)
        disk.submit(Piece(1, READ, file, 1, [fragment(target, 0, 4096)], 0))  # not aligned: it is the caller's affair
        (answer,) = disk.reap_all()
        assert answer.error in (errno.EINVAL, 0)
    os.close(file)


def test_what_the_system_refuses_is_said(kind: str, file: int, tmp_path: Path) -> None:
    memory = np.zeros(4096, np.uint8)
    only_reads = os.open(tmp_path / "file", os.O_RDONLY)
    directory = os.open(tmp_path, os.O_RDONLY)
    with NativeDisk(kind) as disk:
        disk.submit(
            Piece(1, WRITE, only_reads, 0, [fragment(memory)]),
            Piece(2, READ, 1_000_000, 0, [fragment(memory)]),
            Piece(3, READ, directory, 0, [fragment(memory)]),
            Piece(4, READ, file, len(DATA), [fragment(memory)]),
            Piece(5, READ, file, 0, [fragment(memory)]),
        )
        answers = disk.reap_all()
    expected = [(1, errno.EBADF, 0), (2, errno.EBADF, 0), (3, errno.EISDIR, 0), (4, 0, 0), (5, 0, 4096)]
    assert [(a.tag, a.error, a.moved) for a in answers] == expected
    os.close(only_reads)
    os.close(directory)


def test_calls_that_make_no_sense_are_refused(kind: str, file: int) -> None:
    memory = np.zeros(64, np.uint8)
    part = fragment(memory)
    with NativeDisk(kind) as disk:
        for piece in (
            Piece(1, 2, file, 0, [part]),
            Piece(1, -1, file, 0, [part]),
            Piece(1, READ, -5, 0, [part]),
            Piece(1, READ, 1 << 40, 0, [part]),
            Piece(1, READ, file, 0, []),
            Piece(1, READ, file, 0, [part] * 1025),
        ):
            with pytest.raises(NativeCallError):
                disk.submit(piece)
        table, fragments = integers([[1, READ, file, 0, 5, 1, 0]]), np.zeros((2, 2), np.uint64)
        for pieces, parts in ((table, fragments), (table[:, :6].copy(), fragments), (table, fragments.reshape(-1))):
            with pytest.raises(NativeCallError):
                disk.disk.submit(pieces, parts)
        with pytest.raises(NativeCallError):
            disk.disk.reap(float("nan"))
        assert disk.pending == 0
    for workers, depth in ((0, 4), (-1, 4), (1 << 20, 1 << 20)):
        with pytest.raises(OSError, match="sound number"):
            NativeDisk(kind, workers, depth)


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(OSError, match="no such disk"):
        NativeDisk("tape")


def test_a_wait_ends_in_time_and_by_a_wake(kind: str) -> None:
    with NativeDisk(kind) as disk:
        began = time.monotonic()
        assert disk.reap(0) == disk.reap(0.05) == []
        assert 0.04 < time.monotonic() - began < 5
        disk.wake()  # before the wait
        assert disk.reap(20) == []
        timer = threading.Timer(0.05, disk.wake)
        timer.start()
        assert disk.reap(20) == []
        assert time.monotonic() - began < 10
        timer.join()


def test_a_hanging_read_hides_no_other(kind: str, file: int) -> None:
    memory = np.zeros((3, 64), np.uint8)
    pieces = [Piece(n, READ, file, 0, [fragment(memory[n])]) for n in range(3)]
    with NativeDisk(kind, faults=[(1, HANG, 0)]) as disk:
        disk.submit(*pieces)
        seen = []
        while len(seen) < 2:
            seen += disk.reap()
        assert sorted(a.tag for a in seen) == [0, 2]
        assert disk.reap(0.02) == []
        assert disk.pending == 1
        disk.release()
        assert disk.reap_all() == [Answer(1, 0, 1, 0, 64)]


def test_a_forked_child_changes_nothing(kind: str, file: int) -> None:
    memory = np.zeros(4096, np.uint8)
    with NativeDisk(kind) as disk:
        disk.submit(Piece(1, READ, file, 0, [fragment(memory)]))
        disk.reap_all()
        child = os.fork()
        if child == 0:
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        disk.submit(Piece(2, READ, file, 4096, [fragment(memory)]))
        assert disk.reap_all() == [Answer(2, 0, 1, 0, 4096)]
    assert bytes(memory) == DATA[4096:8192]


# --- cutting and merging, against plain Python


def plainly_cut(
    requests: list[tuple[int, int, int, int]], limit: int, most: int
) -> tuple[list[list[int]], list[list[int]]]:
    parts: list[list[int]] = []
    runs: list[list[int]] = []
    for row in sorted(range(len(requests)), key=lambda n: (*requests[n][:2], n)):
        fd, offset, place, nbytes = requests[row]
        equal = -(-nbytes // -(-nbytes // limit))
        step = nbytes if nbytes <= limit else -(-equal // 4096) * 4096
        for at in range(0, nbytes, step):
            size = min(step, nbytes - at)
            last = runs[-1] if runs else [-1] * 5
            follows = last[0] == fd and last[1] + last[4] == offset + at
            if follows and last[4] + size <= limit and last[3] < most:
                last[3], last[4] = last[3] + 1, last[4] + size
            else:
                runs.append([fd, offset + at, len(parts), 1, size])
            parts.append([place + at, size, row])
    return parts, runs


@settings(max_examples=150)
@given(
    st.lists(st.tuples(st.integers(0, 1), st.integers(0, 30), st.integers(1, 7), st.booleans()), max_size=40),
    st.sampled_from([1, 2, 3, 5, 64]),
    st.sampled_from([1, 2, 1024]),
)
def test_requests_are_cut_and_merged(given_: list[tuple[int, int, int, bool]], limit: int, most: int) -> None:
    sector, requests, ends = 4096, [], [0, 0]
    for number, (fd, gap, size, follows) in enumerate(given_):
        at = ends[fd] if follows else ends[fd] + gap
        requests.append((fd, at * sector, (1 + number) << 32, size * sector))
        ends[fd] = at + size
    random.Random(len(given_)).shuffle(requests)
    fragments, runs = hooks.cut_and_merge(integers(requests).reshape(-1, 4), limit * sector, most)
    assert (fragments.tolist(), runs.tolist()) == plainly_cut(requests, limit * sector, most)


def test_requests_that_make_no_sense_are_refused() -> None:
    good = (3, 0, 4096, 4096)
    for bad in ((-1, 0, 4096, 1), (3, -1, 4096, 1), (3, 0, 4096, 0), (3, 0, 4096, -4096), (3, 1 << 62, 0, 1 << 62)):
        if bad == (3, 1 << 62, 0, 1 << 62):
            bad = (3, (1 << 63) - 1, 0, 1)
        with pytest.raises(NativeCallError):
            hooks.cut_and_merge(integers([good, bad]), 4096, 8)
    for limit, most in ((0, 8), (-1, 8), (4096, 0), (4096, 1025)):
        with pytest.raises(NativeCallError):
            hooks.cut_and_merge(integers([good]), limit, most)
    with pytest.raises(NativeCallError):
        hooks.cut_and_merge(integers([(3, 0, 4096, 1 << 62)]), 4096, 8)  # as many parts as no memory has


def refused(**fields: Any) -> int | None:
    """The errno of a pass of the bare loop that is refused."""
    with pytest.raises(NativeCallError) as caught:
        bare_loop(**fields)
    return caught.value.errno


def test_the_bare_loop_moves_all_and_says_how_fast(tmp_path: Path) -> None:
    nbytes = (1 << 20) - 100
    memory, source = np.zeros(nbytes, np.uint8), np.random.default_rng(1).integers(0, 255, nbytes, np.uint8)
    target = np.zeros(nbytes, np.uint8)
    path = tmp_path / "bare"
    path.write_bytes(bytes(1 << 20))
    file = os.open(path, os.O_RDWR)
    loop: dict[str, Any] = {"file": file, "nbytes": nbytes, "piece_bytes": 65536, "threads": 3, "write": False}
    loop |= {"memory": address(memory)}
    assert bare_loop(**loop | {"write": True, "memory": address(source)}) > 0
    assert path.read_bytes() == source.tobytes() + bytes(100)
    assert bare_loop(**loop, target=address(target)) > 0
    assert np.array_equal(memory, source)
    assert np.array_equal(target, source)
    more = np.zeros(nbytes + 200, np.uint8)
    assert refused(**loop | {"nbytes": nbytes + 200, "memory": address(more)}) == errno.ENODATA
    bad = [("file", -1), ("nbytes", 0), ("nbytes", 1 << 62), ("piece_bytes", 0), ("threads", 0), ("threads", 2000)]
    for name, value in [*bad, ("memory", 0)]:
        assert refused(**loop | {name: value}) == errno.EINVAL, name
    assert refused(**loop | {"file": 1_000_000}) == errno.EBADF
    os.close(file)


def test_the_bare_loop_copies_on_to_a_gpu(tmp_path: Path) -> None:
    nbytes = (1 << 20) - 4096
    source = np.random.default_rng(2).integers(0, 255, nbytes, np.uint8)
    path = tmp_path / "bare"
    path.write_bytes(source.tobytes())
    file = os.open(path, os.O_RDONLY)
    gpu = fake_gpu.driver()
    memory, target = np.zeros(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    loop: dict[str, Any] = {"file": file, "nbytes": nbytes, "piece_bytes": 65536, "threads": 3, "write": False}
    loop |= {"memory": address(memory), "driver": str(gpu._name), "context": gpu.fake_context()}
    loop |= {"target": gpu.fake_device(target.ctypes.data, nbytes)}
    gpu.fake_pin(memory.ctypes.data, len(memory))
    try:
        for _ in range(5):
            target[:] = 0
            assert bare_loop(**loop) > 0
            assert np.array_equal(target, source)
        for bad in ({"target": 0}, {"write": True}):
            assert refused(**loop | bad) == errno.EINVAL
        for function, nth in (("cuStreamCreateWithPriority", 1), ("cuMemcpyBatchAsync", 3), ("cuStreamSynchronize", 0)):
            with fake_gpu.failing(function, nth), pytest.raises(DeviceError, match=r"cu\w+ answered 719"):
                bare_loop(**loop)
        with pytest.raises(DeviceError, match="no CUDA driver"):
            bare_loop(**loop | {"driver": "libnone.so"})
    finally:
        gpu.fake_forget(target.ctypes.data)
        gpu.fake_forget(memory.ctypes.data)
        os.close(file)
