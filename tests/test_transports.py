import ctypes
import errno
import gc
import importlib.util
import logging
import os
import random
import shutil
import subprocess
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import gdscache.storage.posix as posix_module
from gdscache.errors import (
    DeadlineError,
    EngineClosedError,
    GdsCacheError,
    InvalidValueError,
    IOFailedError,
    ShortIOError,
    TransportUnavailableError,
)
from gdscache.memory import HostBuffer
from gdscache.storage import IORequest, Op, Submission, Transport, open_transport, probe
from gdscache.storage.base import Span
from gdscache.storage.kvikio import KvikioTransport
from gdscache.storage.posix import PosixTransport, probe_direct_io
from gdscache.storage.workers import MAX_PIECES, MAX_RUN, READS_PER_WRITE, QueuedTransport, Result, Run

SECTOR = 4096
FILE_BYTES = 8 << 20
STAND_INS = Path(__file__).parent / "stand_ins"
UNDER_STAND_IN = "GDSCACHE_TEST_STAND_IN"


def soon() -> float:
    return time.monotonic() + 30


def has_libcuda() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


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


def odd_extents(rng: random.Random, total: int, largest: int) -> list[tuple[int, int]]:
    """The whole of `total` bytes as extents of odd multiples of a sector, shuffled."""
    extents, at = [], 0
    while at < total:
        size = min(rng.randrange(1, largest, 2) * SECTOR, total - at)
        extents.append((at, size))
        at += size
    rng.shuffle(extents)
    return extents


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


# What the shared queue promises, with a gate in place of a device.


class Gated(QueuedTransport):
    name = "gated"
    memory_kinds = frozenset({"host"})
    direct = False

    def __init__(self, threads: int) -> None:
        self.gate = threading.Event()
        self.order: list[Op] = []
        self.runs: list[Run] = []
        super().__init__(threads)
        self.add_file(1, Path("gated"))

    def move(self, run: Run) -> list[Result]:
        self.gate.wait()
        self.order.append(run.op)
        self.runs.append(run)
        return [(piece.index, piece.nbytes, None) for piece in run.pieces]

    def open(self, path: Path) -> int:
        return 1

    def register(self, memory: object) -> None: ...
    def deregister(self, memory: object) -> None: ...
    def flush(self, file: int) -> None: ...
    def release(self) -> None: ...
    def describe(self) -> dict[str, object]:
        return {}


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
    submission = Submission(Op.READ, [Span("f", 0, 10), Span("f", 10, 20)], [1, 2])
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


def test_a_run_that_fails_is_retried_request_by_request(
    slab: Path, buffer: HostBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad, calls = 7 * SECTOR, []
    preadv = os.preadv

    def faulty(file: int, views: list[memoryview], offset: int) -> int:
        calls.append(len(views))
        if offset <= bad < offset + sum(view.nbytes for view in views):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return preadv(file, views, offset)

    monkeypatch.setattr(posix_module.os, "preadv", faulty)
    with PosixTransport(2, "off") as transport:
        file = transport.open(slab)
        batch = [IORequest(file, n * SECTOR, buffer.view[n * SECTOR : (n + 1) * SECTOR]) for n in range(32)]
        errors = transport.submit(Op.READ, batch).wait(soon())
    assert [n for n, error in enumerate(errors) if error] == [7]
    assert isinstance(errors[7], IOFailedError)
    assert errors[7].errno == errno.EIO
    assert calls[0] == 32
    data = slab.read_bytes()
    assert all(
        buffer.view[n * SECTOR : (n + 1) * SECTOR] == data[n * SECTOR : (n + 1) * SECTOR] for n in range(32) if n != 7
    )


@pytest.mark.parametrize("step", [SECTOR, SECTOR + 1000, 3 * SECTOR])
def test_partial_reads_and_writes_are_continued(
    slab: Path, buffer: HostBuffer, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    preadv, pwritev = os.preadv, os.pwritev

    def part(views: list[memoryview]) -> list[memoryview]:
        room, parts = step, []
        for view in views:
            parts.append(view[: min(room, view.nbytes)])
            room -= parts[-1].nbytes
        return parts

    monkeypatch.setattr(posix_module.os, "preadv", lambda f, v, o: preadv(f, part(v), o))
    monkeypatch.setattr(posix_module.os, "pwritev", lambda f, v, o: pwritev(f, part(v), o))
    size = 5 * SECTOR
    with PosixTransport(2, "off") as transport:
        file = transport.open(slab)
        buffer.view[:] = random.Random(5).randbytes(FILE_BYTES)
        batch = [IORequest(file, at, buffer.view[at : at + size]) for at in range(0, 40 * size, size)]
        assert not any(transport.submit(Op.WRITE, batch).wait(soon()))
        want = bytes(buffer.view[: 40 * size])
        buffer.view[:] = bytes(FILE_BYTES)
        assert not any(transport.submit(Op.READ, batch).wait(soon()))
    assert buffer.view[: 40 * size] == want
    assert slab.read_bytes()[: 40 * size] == want


# O_DIRECT: auto, on, off.


def refuse_direct(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = os.open

    def refusing(path: object, flags: int, *args: int, **more: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return plain(path, flags, *args, **more)

    monkeypatch.setattr(posix_module.os, "open", refusing)


def test_no_o_direct(
    slab: Path, buffer: HostBuffer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    refuse_direct(monkeypatch)
    with caplog.at_level(logging.WARNING, "gdscache.storage"), PosixTransport(1, "auto") as transport:
        for _ in range(3):
            file = transport.open(slab)
        assert not transport.direct
        assert read(transport, file, buffer, 0, SECTOR) is None
        assert str(slab.parent) in str(transport.describe()["direct_refused"])
    assert len(caplog.records) == 1
    assert "Invalid argument" in caplog.text
    with (
        PosixTransport(1, "on") as transport,
        pytest.raises(TransportUnavailableError, match="Invalid argument"),
    ):
        transport.open(slab)
    assert sorted(path.name for path in slab.parent.iterdir()) == ["slab"]


def test_direct_io_that_lies_is_not_used(slab: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(posix_module.os, "preadv", lambda file, views, offset: views[0].nbytes)
    with PosixTransport(1, "on") as transport, pytest.raises(TransportUnavailableError, match="not what was written"):
        transport.open(slab)


@pytest.mark.parametrize("settings", [{"threads": 0}, {"threads": 1, "direct_io": "yes"}])
def test_settings_out_of_range_start_no_thread(settings: dict[str, object]) -> None:
    before = threading.active_count()
    with pytest.raises(InvalidValueError):
        PosixTransport(**settings)
    assert threading.active_count() == before


# The factory.


def opened(tmp_path: Path, transport: str = "auto", device: str = "cpu", gds: str = "auto") -> Transport:
    return open_transport(transport, directory=tmp_path, device=device, threads=1, direct_io="auto", gds=gds)


@pytest.mark.parametrize("transport", ["auto", "posix"])
@pytest.mark.parametrize("gds", ["auto", "off"])
def test_cpu_gets_posix_and_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, transport: str, gds: str
) -> None:
    with caplog.at_level(logging.INFO, "gdscache.storage"), opened(tmp_path, transport, gds=gds) as chosen:
        assert isinstance(chosen, PosixTransport)
    assert len(caplog.records) == 1
    assert "posix" in caplog.text


@pytest.mark.parametrize("transport", ["auto", "posix", "kvikio", "some.module:Class"])
def test_gds_on_without_gds_is_refused(tmp_path: Path, transport: str) -> None:
    with pytest.raises(TransportUnavailableError) as caught:
        opened(tmp_path, transport, gds="on")
    assert "gds" in caught.value.hint


@pytest.mark.parametrize(("mode", "ok"), [("compat", True), ("posix", False)])
def test_auto_takes_kvikio_for_proven_gds_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, ok: bool
) -> None:
    monkeypatch.setattr(probe, "probe_kvikio", lambda *_: probe.ProbeResult(ok, mode, "because"))
    with opened(tmp_path, device="cuda:0") as chosen:
        assert chosen.name == "posix"
    with pytest.raises(TransportUnavailableError, match="because"):
        opened(tmp_path, device="cuda:0", gds="on")
    if not ok:
        with pytest.raises(TransportUnavailableError, match="because"):
            opened(tmp_path, "kvikio", device="cuda:0")
    monkeypatch.setattr(probe, "probe_kvikio", lambda *_: pytest.fail("gds is off: nothing to probe"))
    with opened(tmp_path, device="cuda:0", gds="off") as chosen:
        assert chosen.name == "posix"


def test_auto_opens_kvikio_where_gds_is_proven(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, object]] = []

    class Recorded(Gated):
        name = "kvikio"

        def __init__(self, **settings: object) -> None:
            made.append(settings)
            super().__init__(1)

    seen: list[tuple[Path, int]] = []

    def proven(directory: Path, index: int) -> probe.ProbeResult:
        seen.append((directory, index))
        return probe.ProbeResult(True, "gds", "counted")

    monkeypatch.setattr(probe, "probe_kvikio", proven)
    monkeypatch.setattr("gdscache.storage.kvikio.KvikioTransport", Recorded)
    for gds in ("auto", "on"):
        with opened(tmp_path, device="cuda:3", gds=gds) as chosen:
            assert chosen.name == "kvikio"
    assert seen == [(tmp_path, 3)] * 2
    assert made == [{"threads": 1, "direct_io": "auto", "compat": "off"}] * 2


@pytest.mark.skipif(has_libcuda(), reason="needs a machine without a CUDA driver")
def test_kvikio_without_a_driver_is_a_clear_error(tmp_path: Path) -> None:
    before = threading.active_count()
    with pytest.raises(TransportUnavailableError, match="libcuda") as caught:
        opened(tmp_path, "kvikio")
    assert "posix" in caught.value.hint
    assert threading.active_count() == before


class Own(Gated):
    def __init__(self, *, threads: int, direct_io: str) -> None:
        self.settings = (threads, direct_io)
        super().__init__(threads)


class Narrow(Gated):
    def __init__(self, depth: int) -> None:
        super().__init__(depth)


class Unfinished(Transport):
    name = "unfinished"


def test_a_class_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("users_module")
    module.Own, module.Narrow, module.Unfinished, module.other = Own, Narrow, Unfinished, dict  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "users_module", module)
    with opened(tmp_path, "users_module:Own") as chosen:
        assert isinstance(chosen, Own)
        assert chosen.settings == (1, "auto")
    for target, cause in [
        ("users_module:Missing", "no subclass"),
        ("users_module:other", "no subclass"),
        ("users_module:Unfinished", "submit"),
        ("users_module:Narrow", "keywords"),
        ("no_such_module_at_all:Own", "cannot be imported"),
    ]:
        with pytest.raises(TransportUnavailableError, match=cause):
            opened(tmp_path, target)
    with pytest.raises(TransportUnavailableError, match="'nvme'"):
        opened(tmp_path, "nvme")


def test_imports_take_in_what_is_chosen_only() -> None:
    code = """if True:
        import sys, gdscache.storage
        chosen = {"kvikio", "gdscache.storage.kvikio", "gdscache.storage.posix", "gdscache.storage.probe"}
        assert not chosen & set(sys.modules)
        import gdscache.memory, torch
        assert not torch.cuda.is_initialized() and "kvikio" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# The probe.


def test_a_child_that_hangs_is_killed(tmp_path: Path) -> None:
    mark = tmp_path / "pid"
    code = "import os, sys, time\nopen(sys.argv[1], 'w').write(str(os.getpid()))\nwhile True: time.sleep(1)"
    begun = time.monotonic()
    cause = probe.run_child(code, [str(mark)], 1.0)
    assert "no answer within 1 s" in cause
    assert time.monotonic() - begun < 10
    with pytest.raises(ProcessLookupError):
        os.kill(int(mark.read_text()), 0)


def test_what_a_child_says() -> None:
    assert probe.run_child("print('fine')", [], 20) == ""
    assert probe.run_child("import sys; sys.exit('bytes differ')", [], 20) == "bytes differ (exit status 1)"
    assert "ZeroDivisionError" in probe.run_child("1/0", [], 20)
    assert "exit status -9" in probe.run_child("import os; os.kill(os.getpid(), 9)", [], 20)


NVFS = """GDS Version: 1.7.0.149
NVFS statistics(ver: 4.0)
IO stats: Enabled, peer IO stats: Enabled
Reads				: n={reads} ok={reads} err=0 readMiB=4 io_state_err=0
Reads				: Bandwidth(MiB/s)=0 Avg-Latency(usec)=0
Writes				: n={writes} ok={writes} err=0 writeMiB=4 io_state_err=0 pg-cache=0
"""


@pytest.mark.parametrize(
    ("refusals", "counted", "want"),
    [
        ({"OFF": ""}, (4, 4), "gds"),
        ({"OFF": ""}, (0, 0), "compat"),
        ({"OFF": ""}, (4, 0), "compat"),
        ({"OFF": "error 5027", "ON": ""}, (4, 4), "compat"),
        ({"OFF": "no answer", "ON": "no libcuda"}, (0, 0), "posix"),
    ],
)
def test_only_counted_io_proves_gds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusals: dict[str, str], counted: tuple[int, int], want: str
) -> None:
    stats = tmp_path / "stats"
    stats.write_text(NVFS.format(reads=10, writes=20))
    there = tmp_path / "modules"
    there.touch()
    folder = tmp_path / "cache"
    folder.mkdir()

    def child(code: str, arguments: list[str], deadline_s: float) -> str:
        assert Path(arguments[0]).parent == folder
        stats.write_text(NVFS.format(reads=10 + counted[0], writes=20 + counted[1]))
        return refusals[arguments[2]]

    monkeypatch.setattr(probe, "NVIDIA_FS_STATS", stats)
    monkeypatch.setattr(probe, "PROC_MODULES", there)
    monkeypatch.setattr(probe, "_missing", lambda: "")
    monkeypatch.setattr(probe, "run_child", child)
    result = probe.probe_kvikio(folder, 0)
    assert result.mode == want
    assert result.ok == (want != "posix")
    for refusal in refusals.values():
        assert refusal in result.reason
    assert not list(folder.iterdir())


def test_cufile_is_not_asked_without_proc_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(probe, "PROC_MODULES", tmp_path / "missing")
    monkeypatch.setattr(probe, "_missing", lambda: "")
    monkeypatch.setattr(probe, "run_child", lambda code, arguments, deadline_s: asked.append(arguments[2]) or "")
    assert probe.probe_kvikio(tmp_path, 0).mode == "compat"
    assert asked == ["ON"]


def test_probe_without_kvikio_or_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert probe.probe_kvikio(tmp_path, 0) == probe.ProbeResult(False, "posix", "kvikio is not installed")
    monkeypatch.setattr(probe, "_missing", lambda: "")
    with pytest.raises(IOFailedError) as caught:
        probe.probe_kvikio(tmp_path / "missing", 0)
    assert caught.value.errno == errno.ENOENT


# kvikio on a machine without a driver, and on a GPU.


@pytest.mark.skipif(UNDER_STAND_IN in os.environ, reason="this is the stand-in's own run")
def test_kvikio_host_path_with_a_stand_in_driver(tmp_path: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if importlib.util.find_spec("kvikio") is None:
        pytest.skip("kvikio is not installed")
    if has_libcuda():
        pytest.skip("a real libcuda.so.1 is here: the suite runs with that")
    if compiler is None:
        pytest.skip("no C compiler for the stand-in")
    library = tmp_path / "libcuda.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, STAND_INS / "libcuda.c"], check=True, timeout=60)
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path), UNDER_STAND_IN: "1"}
    arguments = ["-q", "-p", "no:cacheprovider", "-k", "[kvikio", f"--basetemp={tmp_path / 'inner'}", __file__]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments], env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout
    assert " passed" in done.stdout


@pytest.fixture
def cuda() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
def test_kvikio_into_cuda_memory(slab: Path) -> None:
    result = probe.probe_kvikio(slab.parent, 0, 60)
    if not result.ok:
        pytest.skip(f"kvikio does not work here: {result.reason}")
    compat = "off" if result.mode == "gds" else "on"
    with KvikioTransport(8, compat=compat) as transport:
        file = transport.open(slab)
        rng = random.Random(6)
        extents = odd_extents(rng, FILE_BYTES, 300)
        source = torch.randint(0, 256, (FILE_BYTES,), dtype=torch.uint8, device="cuda")
        target = torch.zeros_like(source)
        torch.cuda.synchronize()
        transport.register(target)
        for op, memory in ((Op.WRITE, source), (Op.READ, target)):
            batch = [IORequest(file, at, memory[at : at + n]) for at, n in extents]
            assert not any(transport.submit(op, batch).wait(soon()))
        assert torch.equal(source, target)
        assert slab.read_bytes() == source.cpu().numpy().tobytes()
        bad = [IORequest(file, FILE_BYTES, target[:SECTOR]), IORequest(file, 0, target[SECTOR : 2 * SECTOR])]
        errors = transport.submit(Op.READ, bad).wait(soon())
        assert [type(error) for error in errors] == [ShortIOError, type(None)]
        wrong = IORequest(file, 0, target[:SECTOR].view(torch.int8))
        assert isinstance(transport.submit(Op.READ, [wrong]).wait(soon())[0], IOFailedError)
        transport.deregister(target)


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
def test_posix_into_pinned_memory_and_on_to_the_gpu(slab: Path) -> None:
    with HostBuffer(FILE_BYTES, "on") as pinned, PosixTransport(4) as transport:
        file = transport.open(slab)
        batch = [
            IORequest(file, at, pinned.view[at : at + n]) for at, n in odd_extents(random.Random(7), FILE_BYTES, 300)
        ]
        assert not any(transport.submit(Op.READ, batch).wait(soon()))
        there = pinned.tensor.to("cuda", non_blocking=True)
        torch.cuda.synchronize()
        assert there.cpu().numpy().tobytes() == slab.read_bytes()
        refused = transport.submit(Op.READ, [IORequest(file, 0, there)]).wait(soon())[0]
        assert isinstance(refused, GdsCacheError)
        assert "cuda" in str(refused)
