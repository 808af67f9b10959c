"""What Python may hand to the library: each value that makes no sense is refused by its cause, and changes nothing."""

from __future__ import annotations

import dataclasses
import errno
import math
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import xxhash

from gdscache.arrays import integers
from gdscache.errors import DeviceError, InvalidValueError, NativeCallError
from gdscache.moves import Way
from gdscache.moves.native import MoveLimits, Space
from gdscache.native import (
    NEVER,
    SHORT,
    CuFiles,
    Executor,
    Gpu,
    HostPlanes,
    LifetimeOrder,
    LruShadow,
    ReuseSample,
    put_rows,
    take_rows,
    take_unbound,
)
from gdscache.storage.base import Descriptors
from tests.support.helpers import WAIT
from tests.support.hooks import hooks

HUGE = [(1 << 63) - 1, -(1 << 63), 1 << 62, 1 << 48, 1 << 32, 1 << 31, -1, -(1 << 31)]
LAYERS, PAGE_BLOCKS, TOKENS, ROW, SLOTS, EXTENT = 2, 2, 4, 512, 16, 8192
LAYER = ROW * TOKENS * PAGE_BLOCKS
BOUNDS = integers([0, LAYER, 2 * LAYER])
GROUPS = integers([[0, 1, 0, LAYER, 0, LAYER, 0, LAYER], [1, 2, LAYER, 2 * LAYER, LAYER, 2 * LAYER, LAYER, 2 * LAYER]])


class Opening:
    """An executor over planes, memory and a file, and over the same that tests move. Fields may be spoiled before."""

    def __init__(self) -> None:
        self.file = os.memfd_create("gdscache-test")
        self.memory, self.sums = np.zeros(SLOTS * EXTENT, np.uint8), np.zeros((SLOTS, LAYERS), np.uint64)
        self.tokens = np.zeros((LAYERS, SLOTS, TOKENS * ROW), np.uint8)
        rows = [(layer.ctypes.data, TOKENS * ROW, ROW, ROW) for layer in self.tokens]
        self.pool = HostPlanes(integers(rows), np.arange(LAYERS + 1, dtype=np.int32), SLOTS, TOKENS, PAGE_BLOCKS)
        self.spaces = {
            "planes": Space("planes", SLOTS, False),
            "cpu": Space("memory", SLOTS, False, self.memory, self.sums),
            "ssd": Space("files", SLOTS, files=(self.file,)),
            "far cpu": Space("memory", SLOTS, sums=self.sums),
            "far ssd": Space("files", SLOTS, disk=1),
            "far planes": Space("planes", SLOTS),
        }
        self.given: dict[str, Any] = {
            "bounds": BOUNDS,
            "extent_bytes": EXTENT,
            "page_blocks": PAGE_BLOCKS,
            "spaces": self.spaces,
            "limits": MoveLimits(),
            "reserve": ("cpu", 2, 4),
            "pool": self.pool,
            "disks": (Descriptors((), 1, 2), None),
            "threads": 1,
        }

    def open(self) -> Executor:
        return Executor(**self.given)

    def spoil(self, space: str, **values: Any) -> None:
        self.spaces[space] = dataclasses.replace(self.spaces[space], **values)

    def close(self) -> None:
        self.pool.close()
        os.close(self.file)


@pytest.fixture
def opening() -> Iterator[Opening]:
    found = Opening()
    yield found
    found.close()


@pytest.fixture
def executor(opening: Opening) -> Iterator[Executor]:
    found = opening.open()
    yield found
    found.close()


def spoilings() -> Iterator[tuple[str, Callable[[Opening], None]]]:
    for value in HUGE:
        for space in ("planes", "cpu", "ssd", "far cpu", "far ssd", "far planes"):
            yield f"slots {value} of {space}", lambda o, s=space, v=value: o.spoil(s, slots=v)
        for name in ("flying", "io", "copy", "foreign_copy"):
            if value < 0 or value > 1 << 60:
                limits = dataclasses.replace(MoveLimits(), **{name: value})
                yield f"{name} {value}", lambda o, v=limits: o.given.update(limits=v)
        for n in range(3):
            changed = integers([*BOUNDS[:n], value, *BOUNDS[n + 1 :]])
            yield f"bound {n} {value}", lambda o, v=changed: o.given.update(bounds=v)
        yield f"reserve at {value}", lambda o, v=value: o.given.update(reserve=("cpu", v, 4))
        yield f"reserve of {value}", lambda o, v=value: o.given.update(reserve=("cpu", 2, v))
        if value < 0:
            yield f"fence {value}", lambda o, v=value: o.given.update(fence=v)
            yield f"stretch {value}", lambda o, v=value: o.spoil("ssd", stretch=v)
        if value != 1 and abs(value) < 1 << 31:
            yield f"disk {value}", lambda o, v=value: o.spoil("ssd", disk=v)
    for number in (0, -1, 3, 1):
        yield f"{number} blocks a page", lambda o, v=number: o.given.update(page_blocks=v)
    for number in (0, EXTENT - 1, 100, -1, 1 << 48):
        yield f"{number} bytes an extent", lambda o, v=number: o.given.update(extent_bytes=v)
    yield "no space", lambda o: o.given.update(spaces={})
    yield "a kind that is none", lambda o: o.spoil("cpu", kind="tape")
    yield "other layers", lambda o: o.given.update(bounds=integers([0, LAYER - 1, 2 * LAYER]))
    yield "a reserve of files", lambda o: o.given.update(reserve=("ssd", 0, 1))
    yield "a reserve of nobody's", lambda o: o.given.update(reserve=("tape", 0, 1))
    yield "no pool", lambda o: o.given.update(pool=None)
    yield "no workers", lambda o: o.given.update(disks=(Descriptors((), 1, 0), None))
    yield "no disks", lambda o: o.given.update(disks=())
    yield "too many disks", lambda o: o.given.update(disks=(None,) * 65)
    yield "checksums of other slots of files", lambda o: o.spoil("far ssd", sums=o.sums[:-1])
    yield "no threads", lambda o: o.given.update(threads=0)
    yield "too many threads", lambda o: o.given.update(threads=1 << 20)
    yield "memory without an address", lambda o: o.spoil("cpu", memory=None)
    yield "memory that is too short", lambda o: o.spoil("cpu", memory=o.memory[:-1])
    yield "checksums of other slots", lambda o: o.spoil("cpu", sums=o.sums[:-1])
    yield "no files", lambda o: o.spoil("ssd", files=())


SPOILINGS = dict(spoilings())


@pytest.mark.parametrize("what", SPOILINGS)
def test_an_executor_of_what_makes_no_sense_is_refused(opening: Opening, what: str) -> None:
    SPOILINGS[what](opening)
    with pytest.raises(NativeCallError) as caught:
        opening.open()
    assert caught.value.errno == errno.EINVAL


def ways(**changes: Any) -> tuple[Way, Way]:
    slots, blocks = np.arange(4, dtype=np.int64), np.arange(8, dtype=np.int64).reshape(4, 2)
    read = Way("ssd", "planes", slots, blocks, "cpu", slots.copy(), np.zeros((4, LAYERS), np.uint64))
    return dataclasses.replace(read, **changes), Way("cpu", "planes", slots, blocks)


def with_one(array: Any, value: int) -> Any:
    changed = np.array(array, np.int64)
    changed.flat[-1] = value
    return changed


def test_moves_that_make_no_sense_are_refused(executor: Executor) -> None:
    slots, blocks = np.arange(4, dtype=np.int64), np.arange(8, dtype=np.int64).reshape(4, 2)

    def refused(some: Any, groups: Any = GROUPS, priority: int = 0, more: bool = False, after: Any = None) -> None:
        with pytest.raises(NativeCallError) as caught:
            executor.begin(1, priority, 0, some, groups, None, after, more)
        assert caught.value.errno == errno.EINVAL
        assert executor.wait(1, 0) == 0, "nobody knows it"

    for value in [*(v for v in HUGE if v not in (1 << 32, 1 << 48)), SLOTS]:
        for name, of in (("sources", slots), ("targets", blocks), ("places", slots)):
            refused(ways(**{name: with_one(of, value)}))
        if value == SLOTS:
            continue
        refused(ways(), priority=int(np.clip(value, -(1 << 31), (1 << 31) - 1)))
        for row, column in ((r, c) for r in range(2) for c in range(8)):
            if GROUPS[row, column] != value:
                changed = GROUPS.copy()
                changed[row, column] = value
                refused(ways(), changed)
    refused(ways(sources=slots[:3]))
    refused(ways(targets=blocks[:3]))
    refused(ways(targets=blocks.reshape(-1)[:7]))
    refused(ways(places=slots[:3]))
    refused(ways(sums=np.zeros((3, LAYERS), np.uint64)))
    refused(ways(sums=np.zeros((0, LAYERS), np.uint64)))  # None alone says that the bytes are right,
    refused(ways(places=slots[:0]))  # or that pages pass through
    for name in ("source", "target", "through"):
        refused(ways(**{name: "tape"}))
    refused(ways(through="ssd"))
    refused(ways(through="far cpu"))  # where our disk reaches nothing
    refused(ways(target="far cpu", places=None, targets=slots))
    refused(ways(source="planes", sources=blocks))
    refused([Way("planes", "cpu", blocks, slots), Way("cpu", "ssd", slots, slots)])  # a store as a whole
    refused([Way("far cpu", "ssd", slots, slots)])
    refused([Way("far cpu", "far ssd", slots, slots)], more=True)  # a store is not open
    refused(ways(), GROUPS[::-1].copy())
    refused(ways(), GROUPS[:, :7].copy())
    refused(ways(), GROUPS[:1])
    refused(ways(), after=np.zeros((1 << 20) + 1, np.uint64))
    with pytest.raises(TypeError):
        executor.begin(1, 0, 0, ways(), GROUPS.astype(np.float64), None, None, False)
    for bad in (np.zeros(4), ["a"], None):
        with pytest.raises((NativeCallError, ValueError, TypeError)):
            executor.begin(1, 0, 0, ways(targets=bad), GROUPS, None, None, False)


def test_checksums_that_come_with_the_bytes_need_a_table(opening: Opening) -> None:
    """Reads that pass through the reserve need none: these pages stay nowhere."""
    slots, blocks = np.arange(4, dtype=np.int64), np.arange(8, dtype=np.int64).reshape(4, 2)
    os.ftruncate(opening.file, SLOTS * EXTENT)
    opening.spoil("ssd", sums=opening.sums)
    opening.spoil("cpu", sums=None)
    executor = opening.open()
    for way in (Way("ssd", "cpu", slots, slots), Way("ssd", "planes", slots, blocks, "cpu", slots)):
        with pytest.raises(NativeCallError) as caught:
            executor.begin(1, 0, NEVER, [way], GROUPS)
        assert caught.value.errno == errno.EINVAL
    known = np.full((4, LAYERS), xxhash.xxh3_64_intdigest(bytes(LAYER)), np.uint64)
    for number, way in enumerate((Way("ssd", "planes", slots, blocks), Way("ssd", "cpu", slots, slots, sums=known))):
        executor.begin(number, 0, NEVER, [way], GROUPS)
        assert executor.wait(number, WAIT) == 0
        assert executor.outcome(number)[0].tolist() == [1] * 4
    executor.close()


def test_calls_about_what_nobody_knows(executor: Executor) -> None:
    for value in HUGE:
        executor.cancel(value)
        assert executor.wait(value, 0) == 0
        for call in (
            lambda v=value: executor.outcome(v),
            lambda v=value: executor.extend(v, (), last=True),
            lambda v=value: hooks.io_ended(executor, v, [0]),
            lambda v=value: hooks.copy_queued(executor, v, 1),
            lambda v=value: hooks.copy_ended(executor, v, None, "why"),
        ):
            with pytest.raises(NativeCallError):
                call()
        if value != 1 << 31:
            with pytest.raises((NativeCallError, TypeError)):
                executor.refuse(value)
    with pytest.raises(NativeCallError):
        executor.refuse(1)  # nobody has read them
    with pytest.raises(NativeCallError):
        executor.take_late(0, 0)
    with pytest.raises(NativeCallError, match="without faults"):
        hooks.release(executor)
    assert hooks.take_io(executor, 1) is None
    for value in (-1, 64):
        with pytest.raises(NativeCallError):
            hooks.take_io(executor, value)
    executor.close()
    executor.close()
    assert executor.held_slots() == 0
    with pytest.raises(NativeCallError, match="was closed"):
        executor.wait(1, 0)


def test_what_is_refused_leaves_a_foreign_job_as_it_was(executor: Executor) -> None:
    slots, blocks = np.arange(4, dtype=np.int64), np.arange(8, dtype=np.int64).reshape(4, 2)
    read = Way("far ssd", "far planes", slots, blocks, "far cpu", slots, np.zeros((4, LAYERS), np.uint64))
    executor.begin(5, 0, 1 << 62, [read], GROUPS, lambda layers: (0, 0), np.array([8, 16], np.uint64), True)
    with pytest.raises(NativeCallError) as taken:
        executor.begin(5, 0, 1 << 62, [read], GROUPS)
    assert taken.value.errno == errno.EEXIST
    executor.extend(5, [dataclasses.replace(read, sums=None)], last=True)
    with pytest.raises(NativeCallError):
        executor.extend(5, (), last=True)
    assert executor.wait(5, 0, 1) is None
    for _ in range(4):
        job = hooks.take_io(executor, 1)
        assert job is not None
        assert (job.move, job.kind, job.files, job.memory, len(job.rows)) == (5, 0, "far ssd", "far cpu", 4)
        for page in (-1, 4, 1 << 40):
            with pytest.raises(NativeCallError):
                hooks.io_ended(executor, job.number, [0, page], errno.EIO)
        hooks.io_ended(executor, job.number, range(4))
        with pytest.raises(NativeCallError):
            hooks.io_ended(executor, job.number, range(4))
    copies = 0
    while (copy := hooks.take_copy(executor)) is not None:
        copies += 1
        with pytest.raises(NativeCallError):
            hooks.copy_queued(executor, copy.number, -1)
        hooks.copy_queued(executor, copy.number, 7)
        if copy.sums:
            with pytest.raises(NativeCallError):
                hooks.copy_ended(executor, copy.number, None)
        hooks.copy_ended(executor, copy.number, np.zeros((len(copy.rows), len(copy.layers)), np.uint64))
        with pytest.raises(NativeCallError):
            hooks.copy_ended(executor, copy.number, None)
    assert copies >= 2
    assert executor.wait(5, math.inf) == 0
    statuses, errors, late, why = executor.outcome(5)
    assert (len(statuses), errors, late, why) == (8, [], [], "")
    executor.begin(6, 0, 1 << 62, [Way("far cpu", "far planes", slots, blocks)], GROUPS)
    broken = hooks.take_copy(executor)
    assert broken is not None
    hooks.copy_ended(executor, broken.number, None, "the cable is out")
    assert executor.wait(6, math.inf) == 0
    assert executor.outcome(6)[3] == "the cable is out"
    executor.begin(7, 2, 1 << 62, [Way("far cpu", "far ssd", slots, slots)], GROUPS)
    job = hooks.take_io(executor, 1)
    assert job is not None
    hooks.io_ended(executor, job.number, [0, 2, 3], 0)
    hooks.io_ended(executor, job.number, [1], SHORT)
    assert executor.outcome(7)[1] == [(1, SHORT)]


def test_tables_refuse_rows_that_they_have_not() -> None:
    table = np.arange(12, dtype=np.uint64).reshape(4, 3)
    for row in (-1, 4, 1 << 62):
        with pytest.raises(NativeCallError):
            take_rows(table, [0, row])
        with pytest.raises(NativeCallError):
            put_rows(table, [0, row], np.zeros((2, 3), np.uint64))
    with pytest.raises(NativeCallError):
        put_rows(table, [0, 1], np.zeros((1, 3), np.uint64))
    with pytest.raises(InvalidValueError):
        take_unbound(table, [0], bytes(31))
    for other in (table[:, ::2], "words", None):
        with pytest.raises((NativeCallError, TypeError)):
            take_rows(other, [0])
    with pytest.raises((NativeCallError, TypeError)):
        put_rows(np.frombuffer(bytes(96), np.uint64).reshape(4, 3), [0], np.zeros((1, 3), np.uint64))
    assert np.array_equal(table, np.arange(12, dtype=np.uint64).reshape(4, 3))


def test_an_array_of_another_type_is_converted_and_let_go() -> None:
    table, rows = np.arange(12, dtype=np.uint64).reshape(4, 3), bytearray(np.array([2, 0], np.int32).tobytes())
    assert take_rows(table, np.frombuffer(rows, np.int32)).tolist() == [[6, 7, 8], [0, 1, 2]]
    rows.append(0)  # which Python refuses while somebody has a view of it


def test_drivers_that_are_not_there_are_said() -> None:
    with pytest.raises(DeviceError, match="nowhere"):
        CuFiles("/nowhere/libcuda.so", 1, "/nowhere/libcufile.so")
    with pytest.raises(NativeCallError, match="context"):
        CuFiles("/nowhere/libcuda.so", 0, "/nowhere/libcufile.so")
    with pytest.raises(AttributeError):
        Gpu("/nowhere/libcuda.so", object())


def test_faults_are_for_disks_that_were_opened_with_them(opening: Opening) -> None:
    hooks.set_faulty_disks(True)
    try:
        executor = opening.open()
    finally:
        hooks.set_faulty_disks(False)
    for bad in ([[0, 0, 1, 9, 0]], [[0, 0, 1, 1, -1]], [[0, 0, 1, 1]]):
        with pytest.raises(NativeCallError):
            hooks.fail(executor, integers(bad))
    hooks.fail(executor, integers([[-1, 0, 1, 1, errno.EIO]]))
    hooks.release(executor)
    executor.close()


KEYS = [bytes([n + 1]) * 32 for n in range(4)]
CLASSES = 44  # of the order by lifetimes


def lifetime_order(
    learn: Callable[[int, int], Any] = lambda pages, stored: None, round: int = 1 << 40
) -> LifetimeOrder:
    order = LifetimeOrder()
    order.begin(KEYS[:3], np.arange(3), ReuseSample(CLASSES, 10, round), learn)
    return order


BAD_CALLS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    name: (make, call, look)
    for make, look, calls in (
        (
            lifetime_order,
            lambda order: order.walk()(),
            {
                "begin": lambda o: o.begin([KEYS[3]] * 2, np.arange(2), ReuseSample(CLASSES, 10, 10), print),
                "touch_all": lambda o: o.touch_all([KEYS[0], KEYS[3]]),
                "evict_all": lambda o: o.evict_all([(KEYS[0], None), (KEYS[3], None)]),
                "evict_all twice": lambda o: o.evict_all([(KEYS[0], None), (KEYS[0], None)]),
            },
        ),
        (
            lambda: LruShadow(KEYS[:3]),
            lambda shadow: (shadow.recency(), shadow.seen, shadow.used, shadow.owed, shadow.room),
            {
                "touch": lambda s: s.touch([KEYS[0], KEYS[3]]),
                "evict": lambda s: s.evict([KEYS[0], KEYS[3]]),
                "evict twice": lambda s: s.evict([KEYS[0], KEYS[0]]),
                "insert": lambda s: s.insert([(KEYS[3], None), (KEYS[0], None)]),
            },
        ),
        (
            lambda: ReuseSample(CLASSES, 10, 10),
            lambda sample: (len(sample), [part.tolist() for part in sample.take()]),
            {
                "see another class": lambda s: s.see([(1, 0, 5), (2, CLASSES, 6)], True),
                "see an earlier use": lambda s: s.see([(1, 0, 5), (1, 0, 4)], True),
            },
        ),
    )
    for name, call in calls.items()
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_a_refused_call_of_an_order_changes_nothing(name: str) -> None:
    make, call, look = BAD_CALLS[name]
    changed = make()
    with pytest.raises(NativeCallError):
        call(changed)
    assert look(changed) == look(make())


def test_an_order_that_was_not_begun_takes_no_pages() -> None:
    order = LifetimeOrder()
    with pytest.raises(NativeCallError, match="not begun"):
        order.insert_all([(KEYS[0], b"")])
    assert order.walk()() == []


@pytest.mark.parametrize("answer", [(1, [1] * CLASSES, "x"), 5, (1, [1], [1])])
def test_an_answer_that_is_none_is_told(answer: Any) -> None:
    order = lifetime_order(lambda pages, stored: answer, 1)
    order.insert_all([(KEYS[3], b"")])
    with pytest.raises(NativeCallError, match="lifetimes"):
        order.walk()
