"""Ctrl-C in the caller's thread: at every line of every public call, and by real signals at any moment.

After an interrupt and one further call nothing is leased or lost, `check` is clean, and nothing hangs.
"""

from __future__ import annotations

import contextlib
import gc
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import gdscache
from gdscache import CacheEngine, StoreHandle
from gdscache.errors import PoolFullError, SequenceStateError
from tests.support.helpers import WAIT, Host, fill, make_config, prompt, settle, until

PACKAGE = str(Path(gdscache.__file__).parent)
POINTS = 14  # lines of a call at which the short form interrupts it
Call = Callable[[], object]


@pytest.fixture(autouse=True)
def _few_objects() -> Iterator[None]:
    """What was there before is not looked at when garbage is collected, which is often here."""
    gc.freeze()
    yield
    gc.unfreeze()


class Lines:
    """Counts the lines of gdscache that this thread comes to, and interrupts it at line number `at`, by a signal."""

    def __init__(self, at: int | None = None) -> None:
        self.at = at
        self.seen = 0
        self.where = ""

    def __call__(self, frame: FrameType, event: str, argument: object) -> Any:
        return self._line if frame.f_code.co_filename.startswith(PACKAGE) else None

    def _line(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "line":
            self.seen += 1
            if self.seen == self.at:
                self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                signal.raise_signal(signal.SIGINT)
        return self._line

    def run(self, call: Call) -> None:
        before, handler = sys.gettrace(), signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.settrace(self)
        try:
            call()
            assert not self.where, f"an interrupt at {self.where} was lost"
        except KeyboardInterrupt:
            assert self.where, "interrupted by somebody else"
        finally:
            sys.settrace(before)
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, "signals are held for good"
            signal.signal(signal.SIGINT, handler)


class Rig:
    """An engine with a pool of its own, or one that is attached, and some pages in every tier."""

    def __init__(self, path: Path, *, attached: bool) -> None:
        config = make_config(path, gpu=24, cpu=12, ssd=40, deadline=5.0)
        self.host = Host(config) if attached else None
        self.engine = self.host.engine if self.host is not None else CacheEngine.from_config(config)
        self.tokens = prompt(1, 4, extra=1)
        self.seed = 100
        self.between_calls = False  # whether interrupts come there too: then a store that returned may have no handle
        self.restore()

    def restore(self) -> None:
        """Have the pages of `tokens` again, and two of them on the SSD alone."""
        if self.host is not None:
            self.host.store(self.tokens)
        else:
            with self.engine.sequence(self.tokens) as seq:
                seq.verify(WAIT)
                fill(self.engine, seq)
                seq.commit()
        settle(self.engine)
        with self.engine.manager.lock:
            for tier in ("gpu", "cpu"):
                if tier in self.engine.manager.tiers:
                    index = self.engine.manager.tiers[tier].index
                    index.evict(2)

    def fresh(self) -> list[int]:
        self.seed += 1
        return prompt(self.seed, 3, extra=1)

    def settle(self) -> None:
        gc.collect()  # what a traceback kept
        self.engine.lookup(self.tokens)
        settle(self.engine)


# What is interrupted: each makes a call, and what has to be done behind it.


def _sequence(rig: Rig) -> Iterator[Call]:
    yield lambda: rig.engine.sequence(rig.tokens).close()


def _sequence_lost(rig: Rig) -> Iterator[Call]:
    yield lambda: rig.engine.sequence(rig.tokens)


def _append(rig: Rig) -> Iterator[Call]:
    with rig.engine.sequence(rig.tokens) as seq:
        yield lambda: seq.append(prompt(9, 2))
        assert len(seq.slots) == rig.engine.layout.pages_for(len(seq)), "slots and tokens disagree"


def _commit(rig: Rig) -> Iterator[Call]:
    with rig.engine.sequence(rig.fresh()) as seq:
        fill(rig.engine, seq)
        yield seq.commit


def _verify(rig: Rig) -> Iterator[Call]:
    with rig.engine.sequence(rig.tokens) as seq:
        yield lambda: (seq.wait(0), seq.verify(WAIT))


def _leave(rig: Rig) -> Iterator[Call]:
    seq = rig.engine.sequence(rig.tokens)
    yield seq.close
    seq.close()


def _lookup(rig: Rig) -> Iterator[Call]:
    yield lambda: rig.engine.lookup(rig.tokens)


def _pin(rig: Rig) -> Iterator[Call]:
    pins: list[Any] = []
    yield lambda: pins.append(rig.engine.pin(rig.tokens, 1000.0))
    for pin in pins:
        pin.release()


def _release(rig: Rig) -> Iterator[Call]:
    pin = rig.engine.pin(rig.tokens, 1000.0)
    yield pin.release
    pin.release()


def _prefetch(rig: Rig) -> Iterator[Call]:
    yield lambda: rig.engine.prefetch(rig.tokens).result(WAIT)


def _prefetch_cancel(rig: Rig) -> Iterator[Call]:
    handle = rig.engine.prefetch(rig.tokens)
    yield lambda: (handle.wait(), handle.cancel())


def _clear(rig: Rig) -> Iterator[Call]:
    yield rig.engine.clear
    rig.engine.clear()
    rig.restore()


def _invalidate(rig: Rig) -> Iterator[Call]:
    yield lambda: rig.engine.invalidate(rig.engine.namespace())
    rig.restore()


def _drain(rig: Rig) -> Iterator[Call]:
    yield lambda: rig.engine.drain(WAIT)


def _flush(rig: Rig) -> Iterator[Call]:
    yield lambda: rig.engine.flush(WAIT)


def _figures(rig: Rig) -> Iterator[Call]:
    yield lambda: (rig.engine.stats(), rig.engine.check())


def _load(rig: Rig) -> Iterator[Call]:
    host = rig.host
    assert host is not None
    hit, blocks = host.engine.lookup(rig.tokens), host.take(4)
    yield lambda: host.engine.load(hit, blocks[: len(hit.pages)])
    rig.settle()
    host.give(blocks)


def _load_many(rig: Rig) -> Iterator[Call]:
    host = rig.host
    assert host is not None
    hit, blocks = host.engine.lookup(rig.tokens), host.take(8)
    n = len(hit.pages)
    yield lambda: host.engine.load_many([(hit, blocks[:n]), (hit, blocks[n : 2 * n])])
    rig.settle()
    host.give(blocks)


def _load_result(rig: Rig) -> Iterator[Call]:
    host = rig.host
    assert host is not None
    load, blocks, keys = host.begin(rig.tokens)
    yield lambda: (load.wait(0), load.result(), load.gaps(), load.cancel())
    host.finish(load, blocks, keys)


def _store(rig: Rig) -> Iterator[Call]:
    host = rig.host
    assert host is not None
    tokens = rig.fresh()
    blocks = host.compute(tokens)
    handles: list[StoreHandle] = []
    yield lambda: handles.append(host.engine.store(tokens, blocks))
    if rig.between_calls:
        host.engine.drain(WAIT)
    for handle in handles:  # of calls that were not interrupted
        handle.release_event.synchronize(WAIT)
    host.give(blocks)  # other bytes at once, as who is interrupted may do
    host.load(tokens)  # what there is of them has the right bytes


def _store_result(rig: Rig) -> Iterator[Call]:
    host = rig.host
    assert host is not None
    handle = host.store(rig.fresh())
    yield lambda: (handle.release_event.synchronize(WAIT), handle.result(WAIT))


BOTH = [_lookup, _pin, _release, _prefetch, _prefetch_cancel, _clear, _invalidate, _drain, _flush, _figures]
OWN = [_sequence, _sequence_lost, _append, _commit, _verify, _leave]
ATTACHED = [_load, _load_many, _load_result, _store, _store_result]
CASES = [(False, case) for case in [*OWN, *BOTH]] + [(True, case) for case in [*ATTACHED, _lookup, _clear]]
Case = Callable[[Rig], Iterator[Call]]


def _interrupt(rig: Rig, case: Case, at: int | None) -> Lines:
    lines = Lines(at)
    with contextlib.contextmanager(case)(rig) as call:
        lines.run(call)
        if lines.where:
            rig.engine.lookup(rig.tokens)
    try:
        rig.settle()
    except AssertionError as error:
        raise AssertionError(f"interrupted at {lines.where}, line {at} of the call: {error}") from error
    return lines


def _points(lines: int, most: int) -> list[int]:
    """Lines at which to interrupt: all, or so many that lie evenly."""
    return sorted({1 + i * lines // most for i in range(most)}) if lines > most else list(range(1, lines + 1))


def _everywhere(rig: Rig, case: Case, most: int) -> int:
    lines = _interrupt(rig, case, None).seen
    assert lines > 2, "the call does nothing of gdscache in this thread"
    return sum(bool(_interrupt(rig, case, at).where) for at in _points(lines, most))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("attached", [False, True])
def test_an_interrupt_at_some_lines_of_every_call_leaves_nothing_behind(slab: Path, attached: bool) -> None:
    rig = Rig(slab, attached=attached)
    with rig.engine:
        for own, case in CASES:
            if own == attached:
                assert _everywhere(rig, case, POINTS), case.__name__
    assert not _threads()


SHARES = [pytest.param(60, marks=pytest.mark.suite), pytest.param(10_000, marks=pytest.mark.soak)]  # lines of a call


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("most", SHARES)
@pytest.mark.parametrize(("attached", "case"), CASES, ids=lambda value: getattr(value, "__name__", str(value)))
def test_an_interrupt_at_any_line_of_any_call_leaves_nothing_behind(
    slab: Path, attached: bool, case: Case, most: int
) -> None:
    rig = Rig(slab, attached=attached)
    with rig.engine:
        _everywhere(rig, case, most)


def _threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("gdscache-")]


@pytest.mark.timeout(120)
def test_an_interrupted_close_goes_on_and_the_next_one_waits_for_its_end(slab: Path) -> None:
    def close(at: int | None) -> Lines:
        host = Host(make_config(slab))
        host.store(prompt(1, 3))
        lines = Lines(at)
        lines.run(host.engine.close)
        host.engine.close()
        until(lambda: not _threads(), "the threads end")
        return lines

    for at in _points(close(None).seen, POINTS):
        close(at)
    with Host(make_config(slab)).engine as engine:
        assert engine.lookup(prompt(1, 3)).tokens == 12
        settle(engine)


def _storm(rig: Rig, seed: int, interrupts: int) -> None:
    """Real signals at random moments, while calls follow each other."""
    rng, taken, cases = random.Random(seed), 0, [case for own, case in CASES if own == (rig.host is not None)]
    main, over = threading.main_thread().ident, threading.Event()
    assert main is not None
    armed = threading.Semaphore(0)
    rung = False
    rig.between_calls = True

    def ring(number: int, frame: FrameType | None) -> None:
        nonlocal rung
        rung = True
        raise KeyboardInterrupt

    def send() -> None:
        while not over.is_set():
            armed.acquire()
            threading.Event().wait(rng.random() * 0.002)
            if not over.is_set():
                signal.pthread_kill(main, signal.SIGINT)

    sender = threading.Thread(target=send, daemon=True)
    # A process that a shell has put into the background ignores SIGINT; a handler of the test's own does not.
    before = signal.signal(signal.SIGINT, ring)
    sender.start()
    try:
        while taken < interrupts:
            case, rung = rng.choice(cases), False
            with contextlib.contextmanager(case)(rig) as call:
                try:
                    armed.release()
                    while not rung:  # what a callback of the garbage collector raises is lost: another interrupt then
                        with contextlib.suppress(PoolFullError, SequenceStateError):
                            call()
                except KeyboardInterrupt:
                    taken += 1
            rig.settle()
    finally:
        over.set()
        armed.release()
        sender.join(WAIT)
        signal.signal(signal.SIGINT, before)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("attached", [False, True])
def test_signals_at_random_moments_leave_nothing_behind(slab: Path, attached: bool) -> None:
    rig = Rig(slab, attached=attached)
    with rig.engine:
        _storm(rig, 7, 25)


@pytest.mark.soak
@pytest.mark.parametrize("attached", [False, True])
def test_many_signals_at_random_moments(slab: Path, attached: bool) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print("seed", seed)
    rig = Rig(slab, attached=attached)
    with rig.engine:
        _storm(rig, seed, 3000)
