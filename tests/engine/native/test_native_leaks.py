"""Executors that come and go leave nothing behind, and one that is closed in the middle of its work leaves it alone."""

from __future__ import annotations

import ctypes
import dataclasses
import errno
import gc
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest

from gdscache import CacheEngine, PageStatus
from gdscache.arrays import integers
from gdscache.errors import DirectoryInUseError, NativeCallError
from gdscache.moves import PLANES, Move, Moving, Priority, Way
from tests.support.executor_machine import Heard
from tests.support.helpers import WAIT, Host, drop_from, make_config, prompt, settle, until
from tests.support.hooks import hooks
from tests.support.native_parts import HANG, has_ring, open_files
from tests.support.pairs import pairs
from tests.support.processes import Child
from tests.support.small_executor import EXTENT, PAGES, Small, a_load

WARM = 20  # executors, after which the memory of the process has its size
GROWTH_KIB = 8 << 10  # tables of the interpreter double once in some thousands of executors
HEAP_KIB = 1 << 10  # some 100 bytes of each of the 10,000 would be more
RING = pytest.mark.skipif(not has_ring(), reason="io_uring is not allowed here")
DISKS = [pytest.param(False, id="threads"), pytest.param(True, id="uring", marks=RING)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "slab").write_bytes(np.random.default_rng(1).bytes(PAGES * EXTENT))
    return tmp_path / "slab"


class _Heap(ctypes.Structure):
    """What mallinfo2 answers, in bytes."""

    _fields_ = (("_", ctypes.c_size_t * 7), ("used", ctypes.c_size_t), ("rest", ctypes.c_size_t * 2))


_LIBC = ctypes.CDLL(None)
if hasattr(_LIBC, "mallinfo2"):
    _LIBC.mallinfo2.restype = _Heap


def used() -> dict[str, int]:
    """Of this process: descriptors, threads, and KiB that are locked, pinned, resident, or given out by malloc."""
    gc.collect()
    _LIBC.malloc_trim(0)  # of the arenas, which grow with the threads that happen to meet
    with open("/proc/self/status") as status:
        fields = dict(line.split(":", 1) for line in status)
    sizes = {name: int(fields[name].split()[0]) for name in ("VmLck", "VmPin", "VmRSS")}
    heap = _LIBC.mallinfo2().used >> 10 if hasattr(_LIBC, "mallinfo2") else 0  # glibc 2.33
    return {"files": open_files(), "threads": len(os.listdir("/proc/self/task")), "heap": heap, **sizes}


def come_and_go(pipe: Connection, path: Path, times: int) -> None:
    """One disk after the other, in a process of its own: what other tests have left does not count."""
    load, keep = a_load(path), np.arange(2, dtype=np.int64)
    store = Move(Priority.STORE, (Way(PLANES, "cpu", keep.reshape(-1, 1), keep),), WAIT)
    write = Move(Priority.DEMOTION, (Way("cpu", "ssd", keep, keep),), WAIT)
    before = used()
    for number in range(WARM + times):
        small, heard = Small(path, uring=number % 2 > 0 and has_ring()), Heard()
        try:
            for move, listener in ((load, heard), (store, None), (write, None)):
                end = small.executor.finish(small.executor.begin(move, (), listener).end())
                assert (end.errors, end.late) == ({}, [])
            assert set(heard.verdicts.values()) == {PageStatus.LOADED}
            assert len(heard.verdicts) == PAGES
        finally:
            small.close()
        if number == WARM:
            before |= {name: used()[name] for name in ("VmRSS", "heap")}
    names = ("files", "threads", "VmLck", "VmPin")  # the kernel ends its threads when it gets to it
    until(lambda: all(used()[name] <= before[name] for name in names), f"{used()} is no more than {before}")
    after = used()
    assert after["VmRSS"] - before["VmRSS"] < GROWTH_KIB
    assert after["heap"] - before["heap"] < HEAP_KIB
    pipe.send("nothing is left")


@pytest.mark.parametrize("times", [24, pytest.param(20_000, marks=pytest.mark.soak)])
def test_executors_that_come_and_go_leave_nothing(path: Path, times: int) -> None:
    with Child(come_and_go, path, times) as child:
        assert child.receive(3600) == "nothing is left"
        child.end()


def test_an_engine_that_is_closed_has_given_its_memory_back(open_host: Callable[..., Host], slab: Path) -> None:
    """At once, while somebody still has the engine: the next one may need that memory."""
    host = open_host(cpu=16, bounce=16, ssd=24)
    cpu, bounce = host.engine.manager.cpu, host.engine._parts.bounces[0]
    assert cpu is not None
    assert bounce is not None
    host.store(prompt(1, 3))
    maps = [extents.buffer._map for extents in (cpu.extents, bounce.extents)]
    host.engine.close()
    assert [one.closed for one in maps if one is not None] == [True, True], "something keeps a view of it"


@pytest.mark.parametrize("uring", DISKS)
def test_who_waits_for_a_move_is_told_of_the_stop(path: Path, uring: bool) -> None:
    small = Small(path, uring=uring, faulty=True)
    small.fail((-1, 0, 1 << 40, HANG, 0))
    moving = small.executor.begin(a_load(path), (), Heard())
    raised: list[BaseException] = []

    def wait() -> None:
        try:
            small.executor.finish(moving.end())
        except NativeCallError as error:
            raised.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    time.sleep(0.05)
    assert waiter.is_alive()
    small.executor.stop()
    waiter.join(WAIT)
    assert [getattr(error, "errno", 0) for error in raised] == [errno.ECANCELED]
    closer = threading.Thread(target=small.close)
    closer.start()
    closer.join(0.2)
    assert closer.is_alive(), "memory would be given back under a read that hangs"
    hooks.release(small.executor.moves)
    closer.join(WAIT)
    assert not closer.is_alive()


def late_load(small: Small, path: Path, listener: Heard) -> Moving:
    """A load whose reads hang beyond its deadline."""
    small.fail((-1, 0, 1 << 40, HANG, 0))
    return small.executor.begin(dataclasses.replace(a_load(path), seconds=0.05), (), listener)


@pytest.mark.parametrize("held", [True, False])
def test_late_pages_stay_known_where_a_listener_raises(path: Path, held: bool) -> None:
    """Their reads still write: a caller that believed them over would give their slots to others."""

    class Breaks(Heard):
        def judged(self, rows: object, status: PageStatus) -> None:
            raise MemoryError

    small, ended = Small(path, uring=False, faulty=True), list[int]()
    moving = late_load(small, path, Breaks())
    with pytest.raises(MemoryError):
        small.executor.finish(moving.end())
    if held:
        assert sorted(small.executor.finish(moving.end()).late) == [*range(PAGES)]
    else:
        [(lost, rows)] = small.executor.end_lost()
        assert (lost, sorted(rows)) == (moving, [*range(PAGES)])
    moving.on_end(ended.append)
    assert not ended, "a page has ended whose read hangs"
    hooks.release(small.executor.moves)
    until(lambda: sorted(ended) == [*range(PAGES)], "every page has ended")
    assert not any(rows for _, rows in small.executor.end_lost())
    small.close()


def test_who_raises_at_a_late_page_s_end_keeps_no_other_from_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small, ended = Small(path, uring=False, faulty=True), list[int]()
    moving = late_load(small, path, Heard())
    assert len(small.executor.finish(moving.end()).late) == PAGES

    def breaks(row: int = -1) -> None:
        ended.extend([row] * (row >= 0))
        raise MemoryError

    monkeypatch.setattr(small.executor, "tell_spans", breaks)
    moving.on_end(breaks)
    hooks.release(small.executor.moves)
    until(lambda: sorted(ended) == [*range(PAGES)], "every page has ended")
    small.close()


@pytest.fixture
def _faulty_disks() -> Iterator[None]:
    hooks.set_faulty_disks(True)
    yield
    hooks.set_faulty_disks(False)


def our_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("gdscache")]


@pytest.mark.usefixtures("_faulty_disks")
@pytest.mark.parametrize(("cpu", "op", "transport"), pairs([None, 16], ["read", "write"], ["posix", "uring"]))
def test_an_engine_whose_own_disk_hangs_closes_in_time_and_keeps_what_is_touched(
    open_host: Callable[..., Host],
    slab: Path,
    caplog: pytest.LogCaptureFixture,
    op: str,
    transport: str,
    cpu: int | None,
) -> None:
    if transport == "uring" and not has_ring():
        pytest.skip("io_uring is not allowed here")
    host = open_host(cpu=cpu, bounce=16, ssd=24, transport=transport, deadline=0.4)
    host.engine.manager.close_s = 0.3
    kept, tokens = prompt(1, 3), prompt(2, 2)
    for some in (kept, tokens)[: 2 if op == "read" else 1]:
        host.keep(some)
    drop_from(host.engine, *(["cpu"] if cpu else []))
    moves = host.engine._parts.executor.moves
    hooks.fail(moves, integers([(-1, 0, 1 << 40, HANG, 0)]))
    if op == "read":
        load, blocks, keys = host.begin(tokens)
        assert set(load.result(WAIT).pages) == {PageStatus.DEADLINE}
        host.finish(load, blocks, keys)
    else:
        assert set(host.store(tokens).result(WAIT).dropped.values()) == {"deadline"}
    manager, bounce = host.engine.manager, host.engine._parts.bounces[0]
    assert bounce is not None
    buffer = (manager.cpu.extents if manager.cpu is not None else bounce.extents).buffer  # type: ignore[attr-defined]
    begun = time.monotonic()
    with caplog.at_level(logging.ERROR):
        host.engine.close()
    assert time.monotonic() - begun < WAIT / 4
    assert f"closed with {2 if op == 'read' else 0} reads and {0 if op == 'read' else 2} writes" in caplog.text
    assert buffer._map is not None, "memory was given back under I/O that hangs"
    assert not moves.closed, "so was the executor"
    if op == "write":
        with pytest.raises(DirectoryInUseError):  # a late write must not hit the slots of another owner
            CacheEngine.from_config(make_config(slab, cpu=cpu, ssd=24))
    hooks.release(moves)
    until(lambda: moves.closed and buffer._map is None, "all of it goes back when the I/O has ended")
    until(lambda: not our_threads(), f"threads end: {our_threads()}")
    hooks.set_faulty_disks(False)
    again = open_host(cpu=cpu, bounce=16, ssd=24)
    assert again.load(kept).tokens == 12
    assert again.load(tokens).tokens == (8 if op == "read" else 0)
    settle(again.engine)
