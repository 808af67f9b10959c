"""What the tests of cuFile's faults run in a child process, over stand-ins for its libraries."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import random
import re
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from gdscache import CacheEngine
from gdscache.errors import DeadlineError, IOFailedError, ShortIOError, StorageError, TransportUnavailableError
from gdscache.sizes import about
from gdscache.storage import DeviceMemory, Memory, Op, Transport
from gdscache.storage.base import address_of, memory_of
from gdscache.storage.calls import begin, carry
from gdscache.storage.cufile import CufileTransport
from gdscache.storage.kvikio import KvikioTransport
from gdscache.storage.nixl import NixlTransport
from gdscache.testing.transport_suite import FILE_BYTES, SECTOR, odd_extents, random_bytes
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

REQUESTS = 24
BAD = 7  # of the requests of a batch
PAGE = 4 * SECTOR
HANG_S = 0.5
ALWAYS = 1 << 20  # times
MADE: list[StandIns] = []  # the one of this process


def serve(pipe: Connection, libraries: Path, name: str, scenario: str, folder: Path) -> None:
    MADE.append(StandIns(libraries))
    there = os.devnull  # stands for /proc/modules, which cuFile itself is not here to miss
    with (
        mock.patch("gdscache.storage.calls.PROC_MODULES", there),
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


def move(transport: Transport, op: Op, file: int, gpu: GpuBytes) -> list[StorageError | None]:
    """Read or write pages at the same place of the file and the memory."""
    found: list[StorageError | None] = []
    for n in range(REQUESTS):
        try:
            moved = call(transport, op, file, n * PAGE, gpu[n * PAGE : (n + 1) * PAGE])
            found.append(None if moved == PAGE else ShortIOError(f"{moved} bytes at {n * PAGE}"))
        except StorageError as error:
            found.append(error)
    return found


def call(transport: Transport, op: Op, file: int, offset: int, gpu: Any) -> int:
    return (transport.read if op is Op.READ else transport.write)(file, offset, memory_of(gpu))


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
            assert all(call(transport, op, file, at, memory[at : at + n]) == n for at, n in extents)
            transport.deregister(memory)
        assert there.calls(Call.BUFFER) == 2
    assert there.moves() >= 2 * len(extents)
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
                there.fault(op is Op.WRITE, kind, value, BAD * PAGE)
                errors = move(transport, op, file, gpu)
                there.release()
                assert [n for n, error in enumerate(errors) if error] == [BAD], f"{what}: {errors}"
                if not isinstance(error := errors[BAD], ShortIOError):
                    assert str(BAD * PAGE) in str(error), what
                for n in set(range(REQUESTS)) - {BAD}:
                    part = slice(n * PAGE, (n + 1) * PAGE)
                    assert gpu.memory[part] == content[part], f"{what}: the fault spilled"
                assert not any(move(transport, op, file, gpu)), f"{what}: the transport does not recover"
                assert gpu.memory == content[: gpu.nbytes]
                assert path.read_bytes() == content


def counts_do_not_make_up_for_each_other(there: StandIns, name: str, folder: Path) -> None:
    """Too much of one call is not what is missing of another."""
    path, _ = slab(folder)
    gpu, half = there.gpu_memory(FILE_BYTES), FILE_BYTES // 2
    with opened(name, threads=2) as transport:
        file = transport.open(path)
        transport.register(gpu)
        for op in (Op.READ, Op.WRITE):
            there.fault(op is Op.WRITE, Fault.SHORT, half - SECTOR, 0)
            there.fault(op is Op.WRITE, Fault.MORE, SECTOR, half)
            for offset in (0, half):
                with contextlib.suppress(IOFailedError):
                    assert call(transport, op, file, offset, gpu[offset : offset + half]) != half
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
            with pytest.raises(TransportUnavailableError, match=re.escape(about(gpu.nbytes))) as caught:
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
                mock.patch("gdscache.storage.calls.CALL_S", HANG_S),
                pytest.raises(DeadlineError, match=str(path)) as caught,
            ):
                transport.open(path)
            assert "posix" in caught.value.hint
        assert time.monotonic() - begun < 10
        assert there.waiting() == 1


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
            pieces = [(file, 2 * n * PAGE, memory_of(gpu[n * PAGE : (n + 1) * PAGE])) for n in range(REQUESTS)]
            move_one = transport.read if op is Op.READ else transport.write
            stuck = begin("stuck", functools.partial(move_one, *pieces[BAD]))
            until(lambda: there.waiting() == 1, "a call hangs")
            carry(transport, op, pieces[:BAD] + pieces[BAD + 1 :], WAIT)
            assert not stuck.done()
            there.release()
            assert stuck.result(WAIT) == PAGE
        for n in range(REQUESTS):
            assert gpu.memory[n * PAGE : (n + 1) * PAGE] == path.read_bytes()[2 * n * PAGE :][:PAGE]


@mock.patch("gdscache.storage.nixl.HANG_S", HANG_S)
def close_beside_a_hang(there: StandIns, name: str, folder: Path) -> None:
    """What hangs keeps its memory and its file, and gives them back if it ever ends."""
    if name != "nixl":
        return
    path, content = slab(folder)
    gpu = there.gpu_memory(REQUESTS * PAGE)
    transport = opened(name)
    closing = threading.Thread(target=transport.close, daemon=True)
    with there.well_after():
        file = transport.open(path)
        transport.register(gpu)
        there.fault(False, Fault.WAIT, 0, 0)
        stuck = begin("stuck", lambda: call(transport, Op.READ, file, 0, gpu[:PAGE]))
        until(lambda: there.waiting() == 1, "a call hangs")
        closing.start()
        closing.join(HANG_S + 5)
        assert not closing.is_alive()
        assert not stuck.done()
        os.fstat(file)
    assert stuck.result(WAIT) == PAGE
    assert gpu.memory[:PAGE] == content[:PAGE]
    until(lambda: not Path(f"/proc/self/fd/{file}").exists(), "the file is closed")


class OnHostMemory(Transport):
    """Moves an engine's host memory as if it were a GPU's: by cuFile."""

    def register(self, memory: Any) -> None:
        super().register(MADE[0].announce(GpuBytes(memory.cast("B"))))  # type: ignore[arg-type]

    def read(self, file: int, offset: int, memory: Memory) -> int:
        return super().read(file, offset, _on_gpu(memory))  # type: ignore[safe-super]

    def write(self, file: int, offset: int, memory: Memory) -> int:
        return super().write(file, offset, _on_gpu(memory))  # type: ignore[safe-super]


def _on_gpu(memory: Memory) -> DeviceMemory:
    return DeviceMemory(address_of(memory), memory.nbytes, 0)


class HostKvikio(OnHostMemory, KvikioTransport):
    def __init__(self, threads: int, direct_io: Any) -> None:
        KvikioTransport.__init__(self, threads, direct_io, "off")


class HostNixl(OnHostMemory, NixlTransport):
    def __init__(self, threads: int, direct_io: Any) -> None:
        NixlTransport.__init__(self, threads, direct_io, True)


class HostCufile(OnHostMemory, CufileTransport):
    def __init__(self, threads: int, direct_io: Any) -> None:
        CufileTransport.__init__(self, threads, direct_io, gpu=OneGpu())


def an_engine_serves_nothing_wrong(there: StandIns, name: str, folder: Path) -> None:
    """Where cuFile fails, or says that it did what it did not, pages are misses, and are stored anew."""
    transport = f"tests.support.cufile_child:Host{name.title()}"
    pages, other, page_tokens = prompt(1, 5, extra=1), prompt(2, 6), 4
    faults = [(Fault.LIE, 0), (Fault.LIE, SECTOR), (Fault.SHORT, SECTOR), (Fault.ERROR, IO_FAILED)]
    counts = [(Fault.FEWER, 1)]
    if name != "nixl":  # the library goes on where a call came not far enough
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
        assert there.moves()
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
    slot = engine.manager.tiers["ssd"].index.slot(engine.pages(tokens)[0].key)
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
        assert there.waiting() == 1
        assert engine.stats()["misses"]["deadline"]
        there.release()
        drop_from(engine, "gpu", "cpu")
        until(lambda: run(engine, pages) == 5 * page_tokens, "all pages are served again")
