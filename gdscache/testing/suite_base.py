"""Shared by the cases of the transport suite: the hook, a file, memory of each kind."""

from __future__ import annotations

import functools
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from gdscache.cuda.host_memory import HostBuffer
from gdscache.pages.layout import EXTENT_ALIGNMENT
from gdscache.storage.base import Memory as Piece
from gdscache.storage.base import Op, Transport, memory_of, part

SECTOR = EXTENT_ALIGNMENT
FILE_BYTES = 8 << 20
CUDA_BYTES = 32 << 20
PATIENCE = 30.0  # seconds: only a hang takes longer

Make = Callable[..., Transport]
"""`make(threads=4)`: the transport under test, closed at the end."""


def soon() -> float:
    """A deadline that only a hang reaches."""
    return time.monotonic() + PATIENCE


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


class SuiteBase:
    """The hook, and the fixtures of the cases."""

    memory_kinds: ClassVar[tuple[str, ...]] = ("host",)

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


def close(transport: Transport) -> None:
    """Close it; fails if that does not return. Raises the transport's error."""
    raised: list[BaseException] = []

    def closes() -> None:
        try:
            transport.close()
        except BaseException as error:  # noqa: BLE001 - raised again below, in the test's thread
            raised.append(error)

    closing = threading.Thread(target=closes, daemon=True)
    closing.start()
    join([closing], f"close() of {transport.name}")
    if raised:
        raise raised[0]


def join(threads: Iterable[threading.Thread], what: str) -> None:
    """Wait for daemon threads; fails if one does not end."""
    deadline = soon()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            pytest.fail(f"{what} has not returned after {PATIENCE:g} s")


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
