"""Pieces of files that the library's disks move for Python, and the bare loop. Disks: csrc/host/tests/test_disk.cc."""

from __future__ import annotations

import errno
import mmap
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pytest

from gdscache.arrays import integers
from gdscache.errors import DeviceError, NativeCallError, RefusedDiskError
from gdscache.native import bare_loop, move_pieces
from tests.support import fake_gpu
from tests.support.native_parts import address, has_ring

DATA = random.Random(5).randbytes(300_001)
SECTOR = 4096
Kind = Literal["ring", "threads"]
Piece = tuple[int, int, int, int]  # a file, an offset in it, an address, bytes


@pytest.fixture(params=["ring", "threads"])
def kind(request: pytest.FixtureRequest) -> Kind:
    if request.param == "ring" and not has_ring():
        pytest.skip("io_uring is not allowed here")
    found: Kind = request.param
    return found


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    (tmp_path / "file").write_bytes(DATA)
    descriptor = os.open(tmp_path / "file", os.O_RDWR)
    yield descriptor
    os.close(descriptor)


def moved(kind: Kind | None, *pieces: Piece, write: bool = False, copied: bool = True) -> list[list[int]]:
    """The error of each piece, and its bytes."""
    found: list[list[int]] = move_pieces(kind, 4, integers(pieces).reshape(-1, 4), write=write, copied=copied).tolist()
    return found


def sectors(file: int, memory: npt.NDArray[np.uint8], places: list[int]) -> list[Piece]:
    """The sectors of a file from its begin on, at these places in memory."""
    return [(file, n * SECTOR, address(memory) + place * SECTOR, SECTOR) for n, place in enumerate(places)]


def test_an_error_costs_no_neighbour(kind: Kind, file: int, tmp_path: Path) -> None:
    memory = np.zeros(5 * SECTOR, np.uint8)
    only_reads, directory = os.open(tmp_path / "file", os.O_RDONLY), os.open(tmp_path, os.O_RDONLY)
    with mmap.mmap(-1, SECTOR, prot=0) as nowhere:
        view = np.frombuffer(nowhere, np.uint8)
        pieces = sectors(file, memory, [0, 1, 2, 3, 4])
        pieces[2] = (file, 2 * SECTOR, int(view.ctypes.data), SECTOR)
        answers = moved(kind, *pieces, (directory, 0, address(memory), 1), (1_000_000, 0, address(memory), 1))
        del view
    good = [0, SECTOR]
    assert answers == [good, good, [errno.EFAULT, 0], good, good, [errno.EISDIR, 0], [errno.EBADF, 0]]
    assert bytes(memory) == DATA[: 2 * SECTOR] + bytes(SECTOR) + DATA[3 * SECTOR : 5 * SECTOR]
    assert moved(kind, (only_reads, 0, address(memory), SECTOR), write=True) == [[errno.EBADF, 0]]
    assert moved(kind, (file, len(DATA) - 9, address(memory), SECTOR)) == [[0, 9]]
    for one in (only_reads, directory):
        os.close(one)


def test_calls_that_make_no_sense_are_refused(kind: Kind, file: int) -> None:
    at = address(np.zeros(64, np.uint8))
    for number in (-5, 1 << 40):
        with pytest.raises(NativeCallError, match="no sense"):
            moved(kind, (number, 0, at, 64))
    spans = [(-1, at, 64), (-(1 << 63), at, 64), ((1 << 63) - 1, at, 64), (0, 0, 64), (0, at, 0), (0, at, -64)]
    for offset, where, nbytes in [*spans, (0, at, 1 << 62)]:
        with pytest.raises(NativeCallError, match="no sense"):
            moved(kind, (file, 0, at, 64), (file, offset, where, nbytes))
    for rows in (integers([[file, 0, at]]), integers([file, 0, at, 64])):
        with pytest.raises(NativeCallError, match="4 numbers"):
            move_pieces(kind, 4, rows, write=False)
    for workers in (0, -1, 1 << 20):
        with pytest.raises(RefusedDiskError, match="sound number"):
            move_pieces(kind, workers, np.empty((0, 4), np.int64), write=False)
    with pytest.raises(NativeCallError, match="no such disk"):
        move_pieces("tape", 4, np.empty((0, 4), np.int64), write=False)  # type: ignore[arg-type]


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
