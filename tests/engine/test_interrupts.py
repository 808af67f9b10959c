"""Ctrl-C: inside a call that changes an engine it ends the engine, cleanly; inside a wait it ends the wait.

A call is interrupted wherever Python hears a signal in it. Either it had its whole effect and the engine is whole, or
the engine has ended: later calls say so, `close` ends, and a new engine has everything that was committed.
"""

from __future__ import annotations

import contextlib
import gc
import linecache
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import pytest

import gdscache
from gdscache import CacheEngine, StoreHandle, errors
from gdscache.storage.base import Op
from tests.support.faulty import PLAN, Fault
from tests.support.helpers import (
    WAIT,
    Host,
    OpenEngine,
    OpenHost,
    fill,
    make_config,
    our_threads,
    prompt,
    quiet,
    ran,
    run,
    settle,
    until,
)

PACKAGE = str(Path(gdscache.__file__).parent)
POINTS = 3  # of a call at which the short form interrupts it
SOON = WAIT / 4  # seconds: 0.1, and what a busy machine takes. Waits for I/O that hangs last four times as long
Call = Callable[[], object]
Handler = Callable[[int, FrameType | None], Any]
Case = Callable[["Rig"], Iterator[Call]]

_RIGS: list[Rig] = []


class OwnError(Exception):
    """What a handler of a caller's own raises."""


def _raising(error: type[BaseException]) -> Handler:
    def handler(number: int, frame: FrameType | None) -> None:
        raise error(f"signal {number}")

    return handler


@contextlib.contextmanager
def _handler(handler: Handler, number: int = signal.SIGINT) -> Iterator[None]:
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


@pytest.fixture(autouse=True)
def _few_objects() -> Iterator[None]:
    """What was there before is not looked at when garbage is collected, which is often here; engines are closed."""
    gc.freeze()
    told, gc.callbacks[:] = gc.callbacks[:], []  # of the tests' tools: what a signal raises in one of them is nobody's
    yield
    gc.callbacks[:] = told
    gc.unfreeze()
    while _RIGS:
        _RIGS.pop().engine.close()


class Points:
    """Counts where Python may hear a signal in gdscache in this thread, when a function begins and when one of C has
    returned, and sends one at number `at`; behind it a second one, at the line of number `then`. Not where a `with`
    block ends: Python hears none between that and the end of what the block holds."""

    def __init__(self, at: int | None = None, then: int = 0) -> None:
        self.at = at
        self.then = then
        self.seen = 0
        self.where = ""

    def _point(self, frame: FrameType, event: str, argument: object) -> None:
        if event in ("call", "c_return") and frame.f_code.co_filename.startswith(PACKAGE):
            self.seen += 1
            if self.seen == self.at:
                self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                signal.raise_signal(signal.SIGINT)

    def _line(self, frame: FrameType, event: str, argument: object) -> Any:
        if self.where and event == "line" and frame.f_code.co_filename.startswith(PACKAGE):
            self.then -= not linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip().startswith("with ")
            if self.then == 0:
                self.then = -1
                self.where += f" and {frame.f_code.co_filename}:{frame.f_lineno}"
                signal.raise_signal(signal.SIGINT)
        return self._line

    def run(self, call: Call, error: type[BaseException] = KeyboardInterrupt) -> None:
        def unraisable(found: Any) -> None:  # in the end of a generator that nobody has any more: Python drops it
            assert isinstance(found.exc_value, error), found
            self.where = ""

        with _handler(_raising(error)), mock.patch.object(sys, "unraisablehook", unraisable):
            if self.then:
                sys.settrace(self._line)
            sys.setprofile(self._point)
            try:
                call()
                assert not self.where, f"an interrupt at {self.where} was lost"
            except BaseException as found:
                behind = isinstance(found.__context__, error)  # what the way out raises
                if not (isinstance(found, error) or behind):
                    raise
                assert self.where, "interrupted by somebody else"
            finally:
                sys.setprofile(None)
                sys.settrace(None)


class Rig:
    """An engine with a pool of its own, or one that is attached, and some pages in every tier. Opened anew where one
    has ended."""

    def __init__(self, path: Path, *, attached: bool) -> None:
        self.config = make_config(path, gpu=24, cpu=12, ssd=200)
        self.attached = attached
        self.tokens = prompt(1, 4, extra=1)
        self.seed = 100
        self.ended = 0
        self.open()
        _RIGS.append(self)
        self.restore()

    def open(self) -> None:
        self.host = Host(self.config) if self.attached else None
        self.engine = self.host.engine if self.host is not None else CacheEngine.from_config(self.config)

    def restore(self) -> None:
        """Have the pages of `tokens` again, and two of them on the SSD alone."""
        if self.host is not None:
            self.host.store(self.tokens)
        else:
            run(self.engine, self.tokens)
        settle(self.engine)
        with self.engine.manager.lock:
            for tier in ("gpu", "cpu"):
                if tier in self.engine.manager.tiers:
                    self.engine.manager.tiers[tier].index.evict(2)

    def fresh(self) -> list[int]:
        self.seed += 1
        return prompt(self.seed, 3, extra=1)

    def after(self, where: str, *, kept: bool) -> None:
        """Behind an interrupt: the engine is whole, or has ended and lost nothing that was committed (`kept`)."""
        gc.collect()  # what a traceback kept
        try:
            with contextlib.suppress(errors.EngineClosedError):  # where it ends, or finds that it has
                self.engine.lookup(self.tokens)
                settle(self.engine)
            if self.engine.calls.broken_by:
                self._has_ended(kept=kept)
        except Exception as error:
            raise AssertionError(f"interrupted at {where}: {error!r}") from error

    def _has_ended(self, *, kept: bool) -> None:
        self.ended += 1
        engine = self.engine
        for call in (lambda: engine.lookup(self.tokens), engine.stats, engine.drain, engine.clear):
            with pytest.raises(errors.EngineClosedError, match="interrupted by"):
                call()
        engine.close()
        engine.close()
        assert not our_threads()
        self.open()
        assert self.engine.lookup(self.tokens).tokens == 16 or not kept, "what was committed is gone"
        if self.host is not None:
            self.host.load(self.tokens)
        else:
            run(self.engine, self.tokens)
        self.restore()


# What is interrupted: each makes a call, and what has to be done behind it where the engine is whole.


def _plain(use: Callable[[CacheEngine, list[int]], object]) -> Case:
    """A call that leaves nothing behind."""

    def case(rig: Rig) -> Iterator[Call]:
        yield lambda: use(rig.engine, rig.tokens)

    return case


def _append(rig: Rig) -> Iterator[Call]:
    with rig.engine.sequence(rig.tokens) as seq:
        yield lambda: seq.append(prompt(9, 2))


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


def _pin(rig: Rig) -> Iterator[Call]:
    pins: list[Any] = []
    yield lambda: pins.append(rig.engine.pin(rig.tokens, 0.3))  # its handle may be lost
    for pin in pins:
        pin.release()


def _release(rig: Rig) -> Iterator[Call]:
    pin = rig.engine.pin(rig.tokens, 1000.0)
    yield pin.release
    pin.release()


def _prefetch_cancel(rig: Rig) -> Iterator[Call]:
    handle = rig.engine.prefetch(rig.tokens)
    yield lambda: (handle.wait(), handle.cancel())


def _load(rig: Rig) -> Iterator[Call]:
    host = rig.host
    hit, blocks = host.engine.lookup(rig.tokens), host.take(4)
    yield lambda: host.engine.load(hit, blocks[: len(hit.pages)])
    settle(host.engine)
    host.give(blocks)


def _load_many(rig: Rig) -> Iterator[Call]:
    host = rig.host
    hit, blocks = host.engine.lookup(rig.tokens), host.take(8)
    n = len(hit.pages)
    yield lambda: host.engine.load_many([(hit, blocks[:n]), (hit, blocks[n : 2 * n])])
    settle(host.engine)
    host.give(blocks)


def _load_result(rig: Rig) -> Iterator[Call]:
    host = rig.host
    load, blocks, keys = host.begin(rig.tokens)
    yield lambda: (load.wait(0), load.result(), load.gaps(), load.cancel())
    host.finish(load, blocks, keys)


def _store(rig: Rig) -> Iterator[Call]:
    host = rig.host
    tokens = rig.fresh()
    blocks = host.compute(tokens)
    handles: list[StoreHandle] = []
    yield lambda: handles.append(host.engine.store(tokens, blocks))
    host.engine.drain(WAIT)  # its handle may be lost
    host.give(blocks)  # other bytes at once, as who is interrupted may do
    host.load(tokens)  # what there is of them has the right bytes


def _store_result(rig: Rig) -> Iterator[Call]:
    host = rig.host
    handle = host.store(rig.fresh())
    yield lambda: (handle.release_event.synchronize(WAIT), handle.result(WAIT))


_sequence = _plain(lambda engine, tokens: engine.sequence(tokens).close())
_sequence_lost = _plain(lambda engine, tokens: engine.sequence(tokens))
_lookup = _plain(lambda engine, tokens: engine.lookup(tokens))
_prefetch = _plain(lambda engine, tokens: engine.prefetch(tokens).result(WAIT))
_clear = _plain(lambda engine, _: engine.clear())
_invalidate = _plain(lambda engine, _: engine.invalidate(engine.namespace()))
_drain = _plain(lambda engine, _: engine.drain(WAIT))
_flush = _plain(lambda engine, _: engine.flush(WAIT))
_figures = _plain(lambda engine, _: (engine.stats(), engine.check()))
WAITS = [_verify, _drain, _load_result, _store_result]
BOTH = [_lookup, _pin, _release, _prefetch, _prefetch_cancel, _clear, _invalidate, _drain, _flush, _figures]
OWN = [_sequence, _sequence_lost, _append, _commit, _verify, _leave]
ATTACHED = [_load, _load_many, _load_result, _store, _store_result]
CASES = [(False, case) for case in [*OWN, *BOTH]] + [(True, case) for case in [*ATTACHED, _lookup, _clear]]
NAMES = {case: name for name, case in [*globals().items()] if case in [*OWN, *BOTH, *ATTACHED]}


def _interrupt(rig: Rig, case: Case, points: Points, error: type[BaseException] = KeyboardInterrupt) -> None:
    try:
        with contextlib.suppress(errors.EngineClosedError), contextlib.contextmanager(case)(rig) as call:
            points.run(call, error)
            if points.where:
                rig.engine.lookup(rig.tokens)
    except Exception as found:
        raise AssertionError(f"interrupted at {points.where}: {found!r}") from found
    rig.after(points.where, kept=case not in (_clear, _invalidate))
    if case in (_clear, _invalidate):
        rig.restore()


def _points(points: int, most: int) -> list[int]:
    """Points at which to interrupt: all, or so many that lie evenly."""
    return sorted({1 + i * points // most for i in range(most)}) if points > most else list(range(1, points + 1))


def _everywhere(rig: Rig, case: Case, most: int) -> None:
    count = Points()
    _interrupt(rig, case, count)
    assert count.seen > 2, "the call does nothing of gdscache in this thread"
    before, interrupted = rig.ended, 0
    for at in _points(count.seen, most):
        points = Points(at)
        _interrupt(rig, case, points)
        interrupted += bool(points.where)
    assert interrupted
    if case in WAITS:
        assert rig.ended == before, "a call that waits has ended the engine"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("attached", [False, True])
def test_an_interrupt_at_some_points_of_every_call_leaves_an_engine_whole_or_ends_it(
    slab: Path, attached: bool
) -> None:
    rig = Rig(slab, attached=attached)
    for own, case in CASES:
        if own == attached:
            _everywhere(rig, case, POINTS)
    assert rig.ended


SHARES = [pytest.param(20, marks=pytest.mark.suite), pytest.param(10_000, marks=pytest.mark.soak)]  # points of a call


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("most", SHARES)
@pytest.mark.parametrize(("attached", "case"), CASES, ids=lambda value: NAMES.get(value, str(value)))
def test_an_interrupt_at_any_point_of_any_call(slab: Path, attached: bool, case: Case, most: int) -> None:
    rig = Rig(slab, attached=attached)
    _everywhere(rig, case, most)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("error", [OwnError, TimeoutError, errors.DeadlineError, SystemExit])
def test_whatever_a_handler_raises_ends_the_engine(slab: Path, error: type[BaseException]) -> None:
    rig = Rig(slab, attached=True)
    for case in (_lookup, _load, _store):
        count = Points()
        _interrupt(rig, case, count)
        for at in _points(count.seen, 4)[1:]:
            before = rig.ended
            _interrupt(rig, case, Points(at), error)
            assert rig.ended == before + 1, NAMES[case]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("most", [4, pytest.param(40, marks=pytest.mark.soak)])
@pytest.mark.parametrize("case", [_load, _store, _pin])
def test_a_second_interrupt_while_the_first_one_unwinds(slab: Path, case: Case, most: int) -> None:
    """Wherever that is, in the block that ends the engine too: then the next call finds it."""
    rig = Rig(slab, attached=True)
    count = Points()
    _interrupt(rig, case, count)
    for at in _points(count.seen, most):
        for then in (1, 2, 3, 4, 6, 9):
            _interrupt(rig, case, Points(at, then))


def test_an_error_that_is_no_handlers_leaves_the_engine_whole(slab: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the library's own, or of what it calls: a call that raises has no effect."""
    rig = Rig(slab, attached=True)
    host = rig.host
    hit = host.engine.lookup(rig.tokens)
    for error in (MemoryError, OSError, ValueError, errors.SequenceStateError):
        with monkeypatch.context() as patch:
            patch.setattr(host.engine.loader.planner, "plan", _fails(error))
            with pytest.raises(error):
                host.engine.load(hit, [0, 1, 2, 3])
        rig.after("nowhere", kept=True)
    for error in (KeyboardInterrupt, OwnError):  # that the caller is about to handle
        with _handler(_raising(error)):
            try:
                signal.raise_signal(signal.SIGINT)
            except error:
                for tokens, start in ((rig.tokens, 3), ([-1], 0)):
                    with pytest.raises(errors.TokensError):
                        rig.engine.lookup(tokens, start)
        rig.after("nowhere", kept=True)
    assert not rig.ended


def _fails(error: type[Exception]) -> Callable[..., object]:
    def fail(*arguments: object, **options: object) -> None:
        raise error("no plan")

    return fail


# -- waits -------------------------------------------------------------------------------------------------------------


def _send(seconds: float = 0.2) -> list[float]:
    """Have this process sent SIGINT in a moment; when that was, once it was."""
    sent: list[float] = []

    def send() -> None:
        time.sleep(seconds)
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=send).start()
    return sent


@contextlib.contextmanager
def _ends_soon() -> Iterator[None]:
    with _handler(signal.default_int_handler):
        sent = _send()
        with pytest.raises(KeyboardInterrupt):
            yield
        assert time.monotonic() - sent[0] < SOON, "the interrupt was heard late"


@pytest.mark.parametrize("wait", ["result", "layer", "release", "drain", "flush", "store", "prefetch", "close"])
def test_ctrl_c_ends_a_wait_at_once_and_the_engine_is_whole(open_host: OpenHost, wait: str) -> None:
    loads = wait in ("result", "layer", "release")
    host = open_host(transport="tests.support.faulty:FaultyTransport", cpu=6 if wait == "prefetch" else None)
    engine, tokens, other = host.engine, prompt(1, 4), prompt(2, 4)
    host.keep(tokens)
    if wait == "prefetch":
        with engine.manager.lock:
            engine.manager.landing.index.evict(6)
    with PLAN.rule(Op.READ if loads or wait == "prefetch" else Op.WRITE, Fault.HANG):
        if loads:
            load, blocks, keys = host.begin(tokens)
            waits = {"result": load.result, "layer": lambda: load.wait(0), "release": load.release_event.synchronize}
        else:
            handle = engine.prefetch(tokens) if wait == "prefetch" else engine.store(other, host.compute(other))
            waits = {"drain": engine.drain, "flush": engine.flush, "close": engine.close}
        with _ends_soon():
            waits.get(wait, handle.result if not loads else load.result)()
    if wait == "close":
        engine.close()
        assert not our_threads()
        return
    assert not engine.calls.broken_by
    if loads:
        assert load.result(WAIT).tokens == 16
        host.finish(load, blocks, keys)
    else:
        handle.result(WAIT)
    quiet(engine)
    assert engine.check().ok
    assert host.load(tokens).tokens == 16


def test_a_sequence_whose_close_was_interrupted_may_be_closed_again(open_engine: OpenEngine) -> None:
    engine, tokens = ran(open_engine, 4, transport="tests.support.faulty:FaultyTransport", cpu=None)
    with engine.manager.lock:
        engine.manager.tiers["gpu"].index.evict(8)
    with PLAN.rule(Op.READ, Fault.HANG):
        sequence = engine.sequence(tokens)
        until(lambda: PLAN.held > 0, "a thread begins to read")
        with _ends_soon():
            sequence.close()
    sequence.close()
    settle(engine)


# -- handlers, other threads, the ends of an engine --------------------------------------------------------------------


def _interrupted_in_load(host: Host, handler: Handler) -> None:
    """A load of two pages in whose middle a signal's handler runs."""
    blocks = host.take(2)
    hit, plan = host.engine.lookup(prompt(1, 2)), host.engine.loader.planner.plan

    def planned(*arguments: Any, **options: Any) -> Any:
        found = plan(*arguments, **options)
        signal.raise_signal(signal.SIGINT)
        return found

    host.engine.loader.planner.plan = planned  # type: ignore[method-assign]
    with _handler(handler):
        host.engine.load(hit, blocks)


def test_a_handler_that_calls_in_the_middle_of_a_call_is_refused(open_host: OpenHost) -> None:
    host = open_host()
    host.store(prompt(1, 2)).result(WAIT)
    refused: list[Exception] = []

    def handler(number: int, frame: FrameType | None) -> None:
        with pytest.raises(errors.CallInCallError) as found:
            host.engine.stats()
        refused.append(found.value)

    _interrupted_in_load(host, handler)  # which goes on
    assert refused
    del host.engine.loader.planner.plan
    settle(host.engine)


@pytest.mark.parametrize("raises", [False, True])
def test_a_handler_that_closes_the_engine_in_the_middle_of_a_call_does_not_wait(slab: Path, raises: bool) -> None:
    host = Host(make_config(slab))
    host.store(prompt(1, 2)).result(WAIT)

    def handler(number: int, frame: FrameType | None) -> None:
        host.engine.close()
        if raises:
            raise SystemExit

    with contextlib.suppress(SystemExit, errors.EngineClosedError):
        _interrupted_in_load(host, handler)
    host.engine.close()
    assert not our_threads()
    with Host(make_config(slab)).engine as engine:
        assert engine.lookup(prompt(1, 2)).tokens == 8


def test_a_call_of_another_thread_is_not_interrupted(open_host: OpenHost) -> None:
    host = open_host(cpu=12, ssd=40)
    over, failed = threading.Event(), []

    def work() -> None:
        try:
            for seed in range(1000):
                host.store(prompt(seed % 5, 3))
                host.load(prompt(seed % 5, 3))
                if over.is_set():
                    return
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    with _handler(signal.default_int_handler):
        for _ in range(5):
            _send(0.05)
            with pytest.raises(KeyboardInterrupt):
                time.sleep(WAIT)
    over.set()
    thread.join()
    assert not failed
    settle(host.engine)


def test_a_with_block_ends_well(slab: Path) -> None:
    host = Host(make_config(slab))
    host.store(prompt(1, 2)).result(WAIT)
    with pytest.raises(KeyboardInterrupt), host.engine, host.engine.pin(prompt(1, 2), 100.0):
        _interrupted_in_load(host, signal.default_int_handler)
    assert not our_threads()
    host.engine.close()
    with Host(make_config(slab)).engine as engine:
        assert engine.lookup(prompt(1, 2)).tokens == 8


@pytest.mark.timeout(120)
def test_an_interrupted_close_goes_on_and_the_next_one_waits_for_its_end(slab: Path) -> None:
    def close(at: int | None) -> Points:
        host = Host(make_config(slab))
        host.store(prompt(1, 3))
        points = Points(at)
        points.run(host.engine.close)
        host.engine.close()
        until(lambda: not our_threads(), "the threads end")
        return points

    for at in _points(close(None).seen, 14):
        close(at)
    with Host(make_config(slab)).engine as engine:
        assert engine.lookup(prompt(1, 3)).tokens == 12
        settle(engine)


@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore:an engine was dropped:ResourceWarning")  # just behind the call
@pytest.mark.parametrize("most", [14, pytest.param(400, marks=pytest.mark.soak)])
def test_an_interrupted_open_leaves_nothing_open(slab: Path, most: int) -> None:
    with Host(make_config(slab)).engine as engine:
        assert engine.lookup(prompt(1, 3)).tokens == 0
    count = Points()
    engines: list[CacheEngine] = []
    count.run(lambda: engines.append(CacheEngine.from_config(make_config(slab))))
    engines.pop().close()
    for at in _points(count.seen, most):
        points = Points(at)
        points.run(lambda: engines.append(CacheEngine.from_config(make_config(slab))))
        if not points.where:  # Python dropped the interrupt
            engines.pop().close()
        assert not engines, points.where
        gc.collect()
        until(lambda: not our_threads(), f"the threads end, {points.where}")
    rng = random.Random(5)
    with _handler(signal.default_int_handler):  # and at any moment of the thread that opens it
        for _ in range(most):
            try:
                _send(rng.random() * 0.05)
                engines.append(CacheEngine.from_config(make_config(slab)))
                time.sleep(WAIT)
            except KeyboardInterrupt:
                for engine in engines:
                    engine.close()
                engines.clear()
            gc.collect()
            until(lambda: not our_threads(), "the threads end")
    with Host(make_config(slab)).engine as engine:
        settle(engine)


# -- at any moment -----------------------------------------------------------------------------------------------------


def _storm(rig: Rig, seed: int, interrupts: int) -> None:
    """Real signals at random moments, while calls follow each other."""
    rng, taken, cases = random.Random(seed), 0, [case for own, case in CASES if own == rig.attached]
    main, over = threading.main_thread().ident, threading.Event()
    assert main is not None
    armed = threading.Semaphore(0)
    rung = False

    def ring(number: int, frame: FrameType | None) -> None:
        nonlocal rung
        rung = True
        raise KeyboardInterrupt

    def send() -> None:
        while not over.is_set():
            armed.acquire()
            time.sleep(rng.random() * 0.002)
            if not over.is_set():
                signal.pthread_kill(main, signal.SIGINT)

    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    try:
        with _handler(ring):
            while taken < interrupts:
                case, rung = rng.choice(cases), False
                with contextlib.suppress(errors.EngineClosedError), contextlib.contextmanager(case)(rig) as call:
                    try:
                        armed.release()
                        while not rung:  # what a callback of the garbage collector raises is lost: another one then
                            with contextlib.suppress(errors.PoolFullError, errors.SequenceStateError):
                                call()
                    except KeyboardInterrupt:
                        taken += 1
                rig.after(f"a moment of {NAMES[case]}", kept=False)
                rig.restore()
    finally:
        over.set()
        armed.release()
        sender.join(WAIT)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("rounds", [10, pytest.param(2000, marks=pytest.mark.soak)])
@pytest.mark.parametrize("attached", [False, True])
def test_signals_at_random_moments(slab: Path, attached: bool, rounds: int) -> None:
    seed = 7 if rounds == 10 else random.SystemRandom().randrange(1 << 32)
    print("seed", seed)
    rig = Rig(slab, attached=attached)
    _storm(rig, seed, rounds)
