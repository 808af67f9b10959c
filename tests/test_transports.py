import errno
import gc
import importlib.util
import os
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from transport_parts import FILE_BYTES, SECTOR, has_libcuda, odd_extents, soon

from gdscache.errors import (
    EngineClosedError,
    IOFailedError,
    ShortIOError,
)
from gdscache.memory import HostBuffer
from gdscache.storage import IORequest, Op, Transport
from gdscache.storage.kvikio import KvikioTransport
from gdscache.storage.posix import PosixTransport, probe_direct_io


@pytest.fixture(params=["posix-direct", "posix-buffered", "kvikio"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[int], Transport]]:
    made: list[Transport] = []
    if request.param == "posix-direct" and (cause := probe_direct_io(tmp_path)):
        pytest.skip(f"no O_DIRECT here: {cause}")
    if request.param == "kvikio":
        if importlib.util.find_spec("kvikio") is None:
            pytest.skip("kvikio is not installed")
        if not has_libcuda():
            pytest.skip("no libcuda.so.1 (the stand-in test runs this suite with one)")

    def build(threads: int = 4) -> Transport:
        transport: Transport
        if request.param == "kvikio":
            transport = KvikioTransport(threads=threads, compat="on")
        else:
            transport = PosixTransport(threads=threads, direct_io="on" if request.param == "posix-direct" else "off")
        made.append(transport)
        return transport

    yield build
    for transport in made:
        transport.close()


@pytest.fixture
def slab(tmp_path: Path) -> Path:
    path = tmp_path / "slab"
    path.write_bytes(random.Random(1).randbytes(FILE_BYTES))
    return path


@pytest.fixture
def buffer() -> Iterator[HostBuffer]:
    with HostBuffer(FILE_BYTES, "off") as made:
        yield made


def read(transport: Transport, file: int, buffer: HostBuffer, offset: int, nbytes: int, at: int = 0) -> object:
    [error] = transport.submit(Op.READ, [IORequest(file, offset, buffer.view[at : at + nbytes])]).wait(soon())
    return error


@pytest.mark.parametrize("largest", [2, 16, 700, 2100])
def test_shuffled_extents_come_back_equal(make, slab: Path, buffer: HostBuffer, largest: int) -> None:
    transport, rng = make(), random.Random(largest)
    file = transport.open(slab)
    extents = odd_extents(rng, FILE_BYTES, largest)
    places = odd_places(rng, extents)
    source = HostBuffer(FILE_BYTES, "off")
    source.view[:] = rng.randbytes(FILE_BYTES)
    writes = [IORequest(file, at, source.view[p : p + n]) for (at, n), p in zip(extents, places, strict=True)]
    assert transport.submit(Op.WRITE, writes).wait(soon()) == [None] * len(extents)
    transport.flush(file)
    data = slab.read_bytes()
    for (at, n), p in zip(extents, places, strict=True):
        assert data[at : at + n] == source.view[p : p + n]
    reads = [
        IORequest(file, r.offset, buffer.view[p : p + n]) for r, (_, n), p in zip(writes, extents, places, strict=True)
    ]
    submission = transport.submit(Op.READ, reads)
    ended = dict(submission.completions(soon()))
    assert ended == dict.fromkeys(range(len(extents)))
    assert submission.pending == 0
    assert buffer.view == source.view
    assert slab.stat().st_size == FILE_BYTES


def odd_places(rng: random.Random, extents: list[tuple[int, int]]) -> list[int]:
    """Where each extent lies in memory: back to back, in an order of its own."""
    order = list(range(len(extents)))
    rng.shuffle(order)
    places, at = [0] * len(extents), 0
    for index in order:
        places[index] = at
        at += extents[index][1]
    return places


def test_many_threads_submit_at_once(make, slab: Path, buffer: HostBuffer) -> None:
    transport = make()
    file = transport.open(slab)
    threads, share = 8, FILE_BYTES // 8
    failures: list[object] = []

    def work(me: int) -> None:
        rng, base = random.Random(me), me * share
        memory = HostBuffer(share, "off")
        for _ in range(3):
            data = rng.randbytes(share)
            memory.view[:] = data
            extents = odd_extents(rng, share, 64)
            for op in (Op.WRITE, Op.READ):
                batch = [IORequest(file, base + at, memory.view[at : at + n]) for at, n in extents]
                failures.extend(error for error in transport.submit(op, batch).wait(soon()) if error)
                if op is Op.WRITE:
                    memory.view[:] = bytes(share)
            if memory.view != data:
                failures.append(me)

    workers = [threading.Thread(target=work, args=(n,)) for n in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures


def test_past_the_end_fails_alone_and_later_reads_work(make, slab: Path, buffer: HostBuffer) -> None:
    transport = make()
    file, data = transport.open(slab), slab.read_bytes()
    offsets = [FILE_BYTES + SECTOR, FILE_BYTES - 2 * SECTOR, 0, FILE_BYTES - SECTOR, FILE_BYTES - 4 * SECTOR]
    sizes = [SECTOR, SECTOR, 3 * SECTOR, 3 * SECTOR, 2 * SECTOR]
    batch, at = [], 0
    for offset, n in zip(offsets, sizes, strict=True):
        batch.append(IORequest(file, offset, buffer.view[at : at + n]))
        at += n
    errors = transport.submit(Op.READ, batch).wait(soon())
    assert [type(error) for error in errors] == [ShortIOError, type(None), type(None), ShortIOError, type(None)]
    assert f"0 of {SECTOR}" in str(errors[0])
    assert f"{SECTOR} of {3 * SECTOR}" in str(errors[3])
    at = 0
    for offset, n, error in zip(offsets, sizes, errors, strict=True):
        if error is None:
            assert buffer.view[at : at + n] == data[offset : offset + n]
        at += n
    assert read(transport, file, buffer, 0, FILE_BYTES) is None
    assert buffer.view == data


@pytest.mark.parametrize("kept", [5 * SECTOR, 5 * SECTOR + 1234, (5 << 20) + 77])
def test_a_file_truncated_in_mid_use(make, slab: Path, buffer: HostBuffer, kept: int) -> None:
    transport = make()
    file, data = transport.open(slab), slab.read_bytes()
    assert read(transport, file, buffer, 0, FILE_BYTES) is None
    os.truncate(slab, kept)
    size = 3 * SECTOR
    batch = [IORequest(file, at, buffer.view[at : at + size]) for at in range(0, FILE_BYTES - size, size)]
    buffer.view[:] = bytes(FILE_BYTES)
    errors = transport.submit(Op.READ, batch).wait(soon())
    for request, error in zip(batch, errors, strict=True):
        if request.offset + size <= kept:
            assert error is None
            assert request.memory == data[request.offset : request.offset + size]
        else:
            assert isinstance(error, ShortIOError)
            assert f"{max(kept - request.offset, 0)} of {size} bytes" in str(error)
    whole = read(transport, file, buffer, 0, FILE_BYTES)
    assert isinstance(whole, ShortIOError)


def test_bad_requests_harm_no_other(make, slab: Path, buffer: HostBuffer) -> None:
    transport = make()
    file, data = transport.open(slab), slab.read_bytes()
    view = buffer.view
    batch = [
        IORequest(file, 0, view[:SECTOR]),
        IORequest(file, 512, view[SECTOR : 2 * SECTOR]),
        IORequest(file, SECTOR, view[SECTOR : SECTOR + 1000]),
        IORequest(file, SECTOR, view[SECTOR + 512 : 2 * SECTOR + 512]),
        IORequest(file, -SECTOR, view[SECTOR : 2 * SECTOR]),
        IORequest(file, 0, view[:0]),
        IORequest(file + 1000, 0, view[SECTOR : 2 * SECTOR]),
        IORequest(file, 0, memoryview(bytes(SECTOR))),
        IORequest(file, 0, view[: 2 * SECTOR : 2]),
        IORequest(file, 0, buffer.tensor[:SECTOR]),
        IORequest(file, SECTOR, view[2 * SECTOR : 3 * SECTOR]),
    ]
    errors = transport.submit(Op.READ, batch).wait(soon())
    assert errors[0] is errors[-1] is None
    for index, error in enumerate(errors[1:-1], 1):
        assert isinstance(error, IOFailedError), index
        assert error.errno == (errno.EBADF if index == 6 else errno.EINVAL)
        assert error.hint
    assert view[:SECTOR] == data[:SECTOR]
    assert view[2 * SECTOR : 3 * SECTOR] == data[SECTOR : 2 * SECTOR]
    assert not any(view[SECTOR : 2 * SECTOR])


def test_open_and_flush_of_what_is_not_there(make, tmp_path: Path) -> None:
    transport = make()
    with pytest.raises(IOFailedError) as missing:
        transport.open(tmp_path / "missing")
    assert missing.value.errno == errno.ENOENT
    with pytest.raises(IOFailedError) as folder:
        transport.open(tmp_path)
    assert folder.value.errno == errno.EISDIR
    with pytest.raises(IOFailedError) as unknown:
        transport.flush(12345)
    assert unknown.value.errno == errno.EBADF
    assert not list(tmp_path.iterdir())


def test_an_empty_batch_ends_at_once(make) -> None:
    submission = make().submit(Op.READ, [])
    assert submission.wait(time.monotonic()) == []
    assert list(submission.completions(time.monotonic())) == []


def test_close_ends_what_was_submitted(make, slab: Path, buffer: HostBuffer) -> None:
    transport = make(2)
    file = transport.open(slab)
    buffer.view[:] = random.Random(3).randbytes(FILE_BYTES)
    n = 16 * SECTOR
    batch = [IORequest(file, at, buffer.view[at : at + n]) for at in range(0, FILE_BYTES, n)]
    submission = transport.submit(Op.WRITE, batch)
    transport.close()
    assert submission.pending == 0
    assert submission.wait(time.monotonic()) == [None] * len(batch)
    assert slab.read_bytes() == buffer.view
    transport.close()
    for use in (lambda: transport.submit(Op.READ, batch), lambda: transport.open(slab), lambda: transport.flush(file)):
        with pytest.raises(EngineClosedError):
            use()


def test_the_transport_keeps_memory_that_the_caller_dropped(make, slab: Path) -> None:
    transport = make(1)
    file = transport.open(slab)
    data = random.Random(4).randbytes(FILE_BYTES)
    memory = HostBuffer(FILE_BYTES, "off")
    gone = weakref.ref(memory)
    memory.view[:] = data
    n = SECTOR
    submission = transport.submit(
        Op.WRITE, [IORequest(file, at, memory.view[at : at + n]) for at in range(0, FILE_BYTES, n)]
    )
    memory.close()
    del memory
    gc.collect()
    assert gone() is None
    assert not any(submission.wait(soon()))
    assert slab.read_bytes() == data


def mappings_of(address: int) -> int:
    with open("/proc/self/maps") as maps:
        ranges = (line.split()[0].split("-") for line in maps)
        return sum(int(low, 16) <= address < int(high, 16) for low, high in ranges)


def test_memory_is_free_when_its_requests_have_ended(make, slab: Path) -> None:
    transport = make(2)
    file = transport.open(slab)
    memory = HostBuffer(4 << 20, "off")
    address = memory.address
    submission = transport.submit(Op.READ, [IORequest(file, 0, memory.view)])
    assert submission.wait(soon()) == [None]
    memory.close()
    deadline = soon()
    while mappings_of(address) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not mappings_of(address)
    assert submission.wait(soon()) == [None]


def test_no_descriptor_and_no_thread_is_left(make, slab: Path, buffer: HostBuffer) -> None:
    def once() -> None:
        transport = make(3)
        file = transport.open(slab)
        assert read(transport, file, buffer, 0, SECTOR) is None
        transport.close()

    once()
    files, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(5):
        once()
    assert len(os.listdir("/proc/self/fd")) == files
    assert threading.active_count() == threads
    assert sorted(path.name for path in slab.parent.iterdir()) == ["slab"]


def test_describe_is_plain_data(make, slab: Path) -> None:
    transport = make(3)
    assert not transport.direct
    transport.open(slab)
    shown = transport.describe()
    assert shown["name"] == transport.name
    assert shown["threads"] == 3
    assert shown["direct"] == transport.direct
