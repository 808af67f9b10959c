"""Requests as arrays: the same as a list of requests, to every transport; and how they are cut into runs."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gdscache.cuda.host_memory import HostBuffer
from gdscache.errors import IOFailedError
from gdscache.native import cut_and_merge
from gdscache.storage import IORequest, Op
from gdscache.storage.base import FileRange
from gdscache.storage.batch import IOBatch, Spans
from tests.support.transport_parts import opened, soon

SECTOR = 4096
SECTORS = 600


def batch_of(file: int, places: list[tuple[int, int, int]], memory: memoryview) -> IOBatch:
    """Of (sector of the file, sector of the memory, sectors)."""
    offsets, starts, sizes = SECTOR * np.array(places, dtype=np.int64).reshape(-1, 3).T
    return IOBatch(np.full(len(places), file), offsets, starts, sizes, memory)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", ["uring", "posix"])
def test_a_batch_moves_what_its_requests_would(name: str, seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    content = draw.randbytes(SECTORS * SECTOR)
    path = tmp_path / "slab"
    path.write_bytes(content)
    sizes = [draw.choice((1, 1, 2, 40, 200)) for _ in range(draw.choice((1, 3, 60)))]
    places, at = [], 0
    for size in sizes:
        if at + size <= SECTORS:
            places.append((at, size))
            at += size + draw.choice((0, 0, 3))
    starts = [sum(size for _, size in places[:n]) for n in range(len(places))]
    requests = [(offset, start, size) for (offset, size), start in zip(places, starts, strict=True)]
    draw.shuffle(requests)
    with opened(name, 3) as transport, HostBuffer(SECTORS * SECTOR, "off") as memory:
        file = transport.open(path)
        batch = batch_of(file, requests, memory.view)
        assert transport.submit(Op.READ, batch).wait(soon()) == [None] * len(requests)
        for offset, start, size in requests:
            there = memory.view[start * SECTOR : (start + size) * SECTOR]
            assert there == content[offset * SECTOR : (offset + size) * SECTOR]
        memory.view[: len(content)] = other = draw.randbytes(len(content))
        assert transport.submit(Op.WRITE, batch).wait(soon()) == [None] * len(requests)
        written = path.read_bytes()
        for offset, start, size in requests:
            there = written[offset * SECTOR : (offset + size) * SECTOR]
            assert there == other[start * SECTOR : (start + size) * SECTOR]


@pytest.mark.parametrize("name", ["uring", "posix"])
def test_a_bad_request_of_a_batch_harms_no_other(name: str, tmp_path: Path) -> None:
    path = tmp_path / "slab"
    path.write_bytes(bytes(range(256)) * (SECTOR // 16))
    with opened(name, 3) as transport, HostBuffer(8 * SECTOR, "off") as memory:
        file = transport.open(path)
        for wrong in ("files", "offsets", "starts", "sizes"):
            batch = batch_of(file, [(0, 0, 1), (1, 1, 1), (2, 2, 1)], memory.view)
            assert batch.is_sound(Op.READ)
            getattr(batch, wrong)[1] += 1000
            errors = transport.submit(Op.READ, batch).wait(soon())
            assert [error is None for error in errors] == [True, False, True], wrong
            assert isinstance(errors[1], IOFailedError)
        assert not batch_of(file, [(0, 8, 1)], memory.view).is_sound(Op.READ)
        assert not batch_of(file, [(0, 0, 1)], memory.view.toreadonly()).is_sound(Op.READ)
        assert batch_of(file, [(0, 0, 1)], memory.view.toreadonly()).is_sound(Op.WRITE)
        assert transport.submit(Op.READ, batch_of(file, [], memory.view)).wait(soon()) == []


def test_a_batch_is_a_sequence_of_requests() -> None:
    memory = memoryview(bytearray(random.Random(1).randbytes(4 * SECTOR)))
    batch = batch_of(7, [(5, 0, 1), (9, 2, 2)], memory)
    expected = [IORequest(7, 5 * SECTOR, memory[:SECTOR]), IORequest(7, 9 * SECTOR, memory[2 * SECTOR :])]
    assert list(batch) == expected == batch[:]
    assert batch[-1] == expected[-1]
    with pytest.raises(IndexError):
        batch[2]
    spans = Spans(batch, {7: "slab", 8: "other"})
    assert list(spans) == [FileRange("slab", 5 * SECTOR, SECTOR), FileRange("slab", 9 * SECTOR, 2 * SECTOR)] == spans[:]


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 40), st.integers(1, 12)), min_size=1, max_size=30),
    st.integers(1, 14),
    st.integers(1, 5),
)
def test_pieces_are_cut_and_joined_as_said(places: list[tuple[int, int, int]], limit: int, most: int) -> None:
    files, offsets, sizes = np.array(places, dtype=np.int64).T * [[1], [SECTOR], [SECTOR]]
    addresses = (np.arange(len(places)) + 1) << 30
    parts, runs = cut_and_merge(np.stack([files, offsets, addresses, sizes], axis=1), limit * SECTOR, most)
    starts = parts[:, 0] - addresses[parts[:, 2]]  # in their requests
    rows = [
        (index, int(files[index]), int(offsets[index]) + start, address, size)
        for (address, size, index), start in zip(parts.tolist(), starts.tolist(), strict=True)
    ]
    order = sorted(range(len(places)), key=lambda number: (files[number], offsets[number], number))
    assert list(dict.fromkeys(row[0] for row in rows)) == order
    for number, (file, offset, nbytes) in enumerate(zip(files, offsets, sizes, strict=True)):
        mine = [row for row in rows if row[0] == number]
        at = offset
        for _, of, there, address, size in mine:
            assert (of, there, address) == (file, at, ((number + 1) << 30) + at - offset)
            assert 0 < size <= limit * SECTOR
            assert size % SECTOR == 0
            at += size
        assert at == offset + nbytes
        if len(mine) > 1:
            assert max(row[4] for row in mine) - min(row[4] for row in mine[:-1]) == 0
    assert [first for _, _, first, _, _ in runs.tolist()] == np.cumsum([0, *runs[:-1, 3]]).tolist()
    assert runs[:, 3].sum() == len(rows)
    for file, offset, first, count, nbytes in runs.tolist():
        run = rows[first : first + count]
        assert (file, offset, nbytes) == (run[0][1], run[0][2], sum(row[4] for row in run))
        assert len(run) <= most
        assert len(run) == 1 or sum(row[4] for row in run) <= limit * SECTOR
        for before, row in itertools.pairwise(run):
            assert (row[1], row[2]) == (before[1], before[2] + before[4])
