"""What the tests of cuFile's faults run in a child process, over stand-ins for its libraries."""

from __future__ import annotations

import dataclasses
import errno
import os
import random
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from gdscache import CacheEngine
from gdscache.errors import DeadlineError, IOFailedError, ShortIOError, StorageError, TransportUnavailableError
from gdscache.storage import IORequest, Op, Submission, Transport
from gdscache.storage.cufile import CufileTransport
from gdscache.storage.kvikio import KvikioTransport
from gdscache.storage.nixl import NixlTransport
from tests.support.cufile_parts import (
    HANG,
    IO_FAILED,
    NO_DRIVER,
    NOT_ON_THIS_FILE,
    TOO_MUCH_MEMORY,
    Call,
    Fault,
    GpuBytes,
    StandIns,
)
from tests.support.helpers import WAIT, drop_from, make_config, prompt, run, running, until
from tests.support.transport_parts import FILE_BYTES, SECTOR, odd_extents, random_bytes

REQUESTS = 24
BAD = 7  # of the requests of a batch
PAGE = 4 * SECTOR
HANG_S = 0.5
ALWAYS = 1 << 20  # times
MADE: list[StandIns] = []  # the one of this process


def serve(pipe: Connection, libraries: Path, name: str, scenario: str, folder: Path) -> None:
    """Run one scenario with one transport."""
    MADE.append(StandIns(libraries))
    there = os.devnull  # stands for /proc/modules, which cuFile itself is not here to miss
    with (
        mock.patch("gdscache.storage.kvikio.PROC_MODULES", there),
        mock.patch("gdscache.storage.nixl.PROC_MODULES", there),
        mock.patch("gdscache.storage.cufile.PROC_MODULES", there),
        mock.patch("gdscache.storage.cufile.find_cufile", return_value=str(libraries / "libcufile.so.0")),
    ):
        globals()[scenario](MADE[0], name, folder)
    pipe.send("done")


class OneGpu:
    """The stand-in's, as `CufileTransport` asks for it."""

    library, context = "libcuda.so.1", 1


def opened(name: str, threads: int = 4) -> Transport:
    if name == "cufile":
        return CufileTransport(threads, gpu=OneGpu())
    return KvikioTransport(threads, compat="off") if name == "kvikio" else NixlTransport(threads, gds=True)


def slab(folder: Path) -> tuple[Path, bytes]:
    content = random_bytes(1)
    path = folder / "slab"
    path.write_bytes(content)
    return path, content


def soon() -> float:
    return time.monotonic() + WAIT


def move(transport: Transport, op: Op, file: int, gpu: GpuBytes) -> list[StorageError | None]:
    """Read or write pages at the same place of the file and the memory."""
    batch = [IORequest(file, n * PAGE, gpu[n * PAGE : (n + 1) * PAGE]) for n in range(REQUESTS)]
    return transport.submit(op, batch).wait(soon())


# -- scenarios -------------------------------------------------------------------------------------------------------


def bytes_arrive(there: StandIns, name: str, folder: Path) -> None:
    """Without faults all is well, and it was cuFile that did it."""
    path, _ = slab(folder)
    source, target = there.gpu_memory(FILE_BYTES), there.gpu_memory(FILE_BYTES)
    source.memory[:] = random_bytes(2)
    extents = odd_extents(random.Random(3), FILE_BYTES, 300)
    with opened(name) as transport:
        file = transport.open(path)
        for op, memory in ((Op.WRITE, source), (Op.READ, target)):
            transport.register(memory)
            batch = [IORequest(file, at, memory[at : at + n]) for at, n in extents]
            assert not any(transport.submit(op, batch).wait(soon()))
            transport.deregister(memory)
        assert there.calls(Call.BUFFER) == 2
    assert there.moves >= (2 if name == "cufile" else 2 * len(extents))  # which joins neighbours
    assert target.memory == source.memory
    assert path.read_bytes() == source.memory


def a_fault_is_its_own_request_s(there: StandIns, name: str, folder: Path) -> None:
    """Every fault that cuFile tells of is the error of that request, and of no other."""
    path, content = slab(folder)
    faults = [(Fault.ERROR, IO_FAILED), (Fault.ERROR, NO_DRIVER), (Fault.ERRNO, errno.EIO), (Fault.ERRNO, errno.ENOSPC)]
    counts = [(Fault.SHORT, 0), (Fault.SHORT, PAGE // 2), (Fault.SHORT, 100), (Fault.FEWER, 1), (Fault.FEWER, PAGE)]
    wrong = [(Fault.MORE, SECTOR), (Fault.MORE, 1)]
    gpu = there.gpu_memory(REQUESTS * PAGE)
    with opened(name) as transport:
        file = transport.open(path)
        transport.register(gpu)
        for kind, value in faults + counts + wrong:
            for op in (Op.READ, Op.WRITE):
                what = f"{op.value}, {kind.name} {value}"
                gpu.memory[:] = bytes(gpu.nbytes) if op is Op.READ else content[: gpu.nbytes]
                there.fault(op is Op.WRITE, kind, value, BAD * PAGE, ALWAYS if name == "cufile" else 1)
                errors = move(transport, op, file, gpu)
                there.release()
                goes_on = kind is Fault.FEWER or (kind, value) == (Fault.SHORT, PAGE // 2)
                bad = [] if name == "cufile" and goes_on else [BAD]
                assert [n for n, error in enumerate(errors) if error] == bad, f"{what}: {errors}"
                for error in filter(None, errors):
                    wanted = IOFailedError if (kind, value) in faults else (IOFailedError, ShortIOError)
                    assert isinstance(error, wanted)
                    assert str(path) in str(error), what
                    assert str(BAD * PAGE) in str(error), what
                for n in set(range(REQUESTS)) - {BAD}:
                    part = slice(n * PAGE, (n + 1) * PAGE)
                    assert gpu.memory[part] == content[part], f"{what}: the fault spilled"
                assert not any(move(transport, op, file, gpu)), f"{what}: the transport does not recover"
                assert gpu.memory == content[: gpu.nbytes]
                assert path.read_bytes() == content


def counts_do_not_make_up_for_each_other(there: StandIns, name: str, folder: Path) -> None:
    """A request moved in pieces: too much of one is not what is missing of another."""
    path, _ = slab(folder)
    gpu = there.gpu_memory(FILE_BYTES)
    with opened(name, threads=2) as transport:
        file = transport.open(path)
        transport.register(gpu)
        for op in (Op.READ, Op.WRITE):
            there.fault(op is Op.WRITE, Fault.SHORT, FILE_BYTES // 2 - SECTOR, 0)
            there.fault(op is Op.WRITE, Fault.MORE, SECTOR, FILE_BYTES // 2)
            [error] = transport.submit(op, [IORequest(file, 0, gpu)]).wait(soon())
            assert error is not None
            there.release()


def a_refusal_has_its_cause(there: StandIns, name: str, folder: Path) -> None:
    """What cannot be opened or registered raises, with the cause and what to change."""
    path, content = slab(folder)
    there.refuse(Call.DRIVER, NO_DRIVER)
    with pytest.raises(StorageError, match=r"(?i)driver|GDS_MT") as caught, opened(name) as transport:
        transport.open(path)
    assert caught.value.hint
    there.release()
    there.refuse(Call.HANDLE, NOT_ON_THIS_FILE)
    with opened(name) as transport:
        with pytest.raises(IOFailedError, match=str(path)) as caught:
            transport.open(path)
        assert caught.value.hint
        there.release()
        file = transport.open(path)
        gpu = there.gpu_memory(REQUESTS * PAGE)
        there.refuse(Call.BUFFER, TOO_MUCH_MEMORY)
        if name != "nixl":  # which takes no notice: cuFile then copies through buffers of its own
            with pytest.raises(TransportUnavailableError, match=str(gpu.nbytes)) as caught:
                transport.register(gpu)
            assert "BAR1" in caught.value.hint
            there.release()
        transport.register(gpu)
        assert not any(move(transport, Op.READ, file, gpu))
        assert gpu.memory == content[: gpu.nbytes]


@mock.patch("gdscache.storage.nixl.HANG_S", HANG_S)
def an_open_that_hangs_is_an_error(there: StandIns, name: str, folder: Path) -> None:
    """cuFile does not answer when a file is opened: that is said, and the transport closes."""
    path, _ = slab(folder)
    with there.well_after():
        with opened(name) as transport:
            there.refuse(Call.HANDLE, HANG)
            begun = time.monotonic()
            with (
                mock.patch(f"gdscache.storage.{name}.CALL_S", HANG_S),
                pytest.raises(DeadlineError, match=str(path)) as caught,
            ):
                transport.open(path)
            assert "posix" in caught.value.hint
        assert time.monotonic() - begun < 10
        assert there.waiting == 1


def a_hang_is_its_own_request_s(there: StandIns, name: str, folder: Path) -> None:
    """A request that hangs is pending, what has no part in it goes on, and what comes late is a read like any other."""
    path, content = slab(folder)
    gpu = there.gpu_memory(REQUESTS * PAGE)
    with opened(name) as transport, there.well_after():
        file = transport.open(path)
        transport.register(gpu)
        for op in (Op.READ, Op.WRITE):
            gpu.memory[:] = content[: gpu.nbytes]
            there.fault(op is Op.WRITE, Fault.WAIT, 0, 2 * BAD * PAGE)
            batch = [IORequest(file, 2 * n * PAGE, gpu[n * PAGE : (n + 1) * PAGE]) for n in range(REQUESTS)]
            stuck = transport.submit(op, batch)
            until(lambda: there.waiting == 1, "a call hangs")
            until(lambda: stuck.pending == 1, "the others end")  # noqa: B023
            begun = time.monotonic()
            with pytest.raises(DeadlineError):
                stuck.wait(begun + 0.2)
            assert time.monotonic() - begun < 5
            others = transport.submit(Op.READ, batch[:BAD] + batch[BAD + 1 :])
            assert not any(others.wait(soon()))
            assert stuck.pending == 1
            there.release()
            assert not any(stuck.wait(soon()))
        for n in range(REQUESTS):
            assert gpu.memory[n * PAGE : (n + 1) * PAGE] == path.read_bytes()[2 * n * PAGE :][:PAGE]


@mock.patch("gdscache.storage.nixl.HANG_S", HANG_S)
def close_beside_a_hang(there: StandIns, name: str, folder: Path) -> None:
    """What hangs keeps its memory and its file, and ends if it ever can. NIXL's close returns, the others' waits."""
    path, content = slab(folder)
    gpu = there.gpu_memory(REQUESTS * PAGE)
    transport = opened(name)
    closing = threading.Thread(target=transport.close, daemon=True)
    with there.well_after():
        file = transport.open(path)
        transport.register(gpu)
        there.fault(False, Fault.WAIT, 0, 0)
        stuck = transport.submit(Op.READ, [IORequest(file, 0, gpu[:PAGE])])
        until(lambda: there.waiting == 1, "a call hangs")
        closing.start()
        closing.join(HANG_S + 5 if name == "nixl" else 0.3)
        assert closing.is_alive() == (name != "nixl")
        assert stuck.pending == 1
        os.fstat(file)
    assert stuck.wait(soon()) == [None]
    assert gpu.memory[:PAGE] == content[:PAGE]
    closing.join(WAIT)
    assert not closing.is_alive()
    until(lambda: not Path(f"/proc/self/fd/{file}").exists(), "the file is closed")


# -- an engine -------------------------------------------------------------------------------------------------------


class OnHostMemory(Transport):
    """Moves an engine's host memory as if it were a GPU's: by cuFile."""

    def submit(self, op: Op, requests: Sequence[IORequest]) -> Submission:
        return super().submit(op, [dataclasses.replace(r, memory=self._as_gpu(r.memory)) for r in requests])

    def _as_gpu(self, memory: Any) -> GpuBytes:
        whole = GpuBytes(memoryview(memory.obj).cast("B"))
        with LOCK:
            if whole.data_ptr() not in KNOWN:
                KNOWN.add(MADE[0].announce(whole).data_ptr())
                self.register(whole)
        return GpuBytes(memory.cast("B"))


class HostKvikio(OnHostMemory, KvikioTransport):
    def __init__(self, threads: int, direct_io: Any) -> None:
        KvikioTransport.__init__(self, threads, direct_io, "off")


class HostNixl(OnHostMemory, NixlTransport):
    def __init__(self, threads: int, direct_io: Any) -> None:
        NixlTransport.__init__(self, threads, direct_io, True)


class HostCufile(OnHostMemory, CufileTransport):
    def __init__(self, threads: int, direct_io: Any) -> None:
        CufileTransport.__init__(self, threads, direct_io, gpu=OneGpu())


LOCK, KNOWN = threading.Lock(), set[int]()


def an_engine_serves_nothing_wrong(there: StandIns, name: str, folder: Path) -> None:
    """Where cuFile fails, or says that it did what it did not, pages are misses, and are stored anew."""
    transport = f"tests.support.cufile_child:Host{name.title()}"
    pages, other, page_tokens = prompt(1, 5, extra=1), prompt(2, 6), 4
    faults = [(Fault.LIE, 0), (Fault.LIE, SECTOR), (Fault.SHORT, SECTOR), (Fault.ERROR, IO_FAILED)]
    counts = [(Fault.FEWER, 1)]
    if name == "cufile":  # which goes on where a call came not far enough
        faults, counts = [fault for fault in faults if fault[0] is not Fault.SHORT], []
    config = make_config(folder / "cache", gpu=8, cpu=6, ssd=24, transport=transport)
    with running(CacheEngine.from_config(config)) as engine:

        def cold() -> None:
            """Nothing of `pages` is left in memory, not even as bytes of a free slot."""
            run(engine, other)
            drop_from(engine, "gpu", "cpu")

        assert run(engine, pages) == 0
        for kind, value in [*faults, (Fault.ERRNO, errno.EIO), (Fault.MORE, SECTOR), *counts]:
            cold()
            there.fault(False, kind, value, place(engine, pages), ALWAYS)
            assert run(engine, pages) < 5 * page_tokens, f"{kind.name} {value}: nothing was found out"
            there.release()
            cold()
            assert run(engine, pages) == 5 * page_tokens, f"{kind.name} {value}: the page was not stored anew"
        assert there.moves
        for seed, (kind, value) in enumerate(faults, 3):
            engine.clear()
            pages = prompt(seed, 5, extra=1)  # not what its slots had before
            there.fault(True, kind, value, times=ALWAYS)
            assert run(engine, pages) == 0
            there.release()
            cold()
            assert run(engine, pages) < 5 * page_tokens, f"{kind.name} {value} of a write: nothing was found out"
        misses = engine.stats()["misses"]
        assert misses["checksum"] >= 4, misses
        assert misses.get("io_error", 0) + misses.get("short_read", 0) >= 3, misses


def place(engine: CacheEngine, tokens: list[int]) -> int:
    """Where in the slab the first page lies."""
    slot = engine.manager.tiers["ssd"].index.slot(engine.pages(tokens)[0].key)
    assert slot is not None
    return slot * engine.layout.extent_bytes


def an_engine_outlives_a_hang(there: StandIns, name: str, folder: Path) -> None:
    """A read that does not end is a miss at the deadline; when it has ended, the page is served again."""
    transport = f"tests.support.cufile_child:Host{name.title()}"
    pages, page_tokens = prompt(1, 5, extra=1), 4
    config = make_config(folder / "cache", gpu=8, cpu=24, ssd=24, transport=transport, deadline=0.5)
    with running(CacheEngine.from_config(config)) as engine, there.well_after():
        run(engine, pages)
        drop_from(engine, "gpu", "cpu")
        there.fault(False, Fault.WAIT, 0, place(engine, pages))
        begun = time.monotonic()
        assert run(engine, pages) < 5 * page_tokens
        assert time.monotonic() - begun < 10
        assert there.waiting == 1
        assert engine.stats()["misses"]["deadline"]
        there.release()
        drop_from(engine, "gpu", "cpu")
        until(lambda: run(engine, pages) == 5 * page_tokens, "all pages are served again")
