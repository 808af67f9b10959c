"""Signals that are held while the main thread carries out a short call: none is lost, none is heard within it."""

from __future__ import annotations

import _thread
import asyncio
import contextlib
import ctypes
import functools
import operator
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from gdscache.native.signals import Signals, signals
from gdscache.runtime.calls import Calls
from gdscache.storage.base import Op
from tests.support.faulty import PLAN, Fault
from tests.support.helpers import WAIT, Host, make_config, prompt, quiet, settle

INT, TERM, USR1 = signal.SIGINT, signal.SIGTERM, signal.SIGUSR1
Handler = Callable[[int, FrameType | None], Any]


class TermError(Exception):
    """What a handler of ours raises."""


def raise_term(number: int, frame: FrameType | None) -> None:
    raise TermError(number)


@contextlib.contextmanager
def handlers(**by_name: Handler) -> Iterator[None]:
    """Handlers of signals, by their names."""
    before = {name: signal.signal(signal.Signals[name], handler) for name, handler in by_name.items()}
    try:
        yield
        for name, handler in by_name.items():
            assert signal.getsignal(signal.Signals[name]) is handler, f"{name} has another handler now"
    finally:
        for name, found in before.items():
            signal.signal(signal.Signals[name], found)


@contextlib.contextmanager
def held() -> Iterator[Signals]:
    here = signals()
    here.hold()
    try:
        yield here
    finally:
        here.release()


@pytest.fixture
def calls() -> Iterator[Calls]:
    made = Calls()
    yield made
    made.end()
    assert made.join(WAIT)


def test_what_comes_meanwhile_is_heard_behind() -> None:
    done = []

    def act() -> None:
        with held():
            signal.raise_signal(INT)
            done.append(1)

    with handlers(SIGINT=signal.default_int_handler), pytest.raises(KeyboardInterrupt):
        act()
    assert done


def test_what_came_before_is_heard_first_and_nothing_begins(calls: Calls) -> None:
    """It is known to Python, and not heard yet."""
    done = []

    def work() -> None:
        done.append(1)

    tell = getattr(ctypes.PyDLL(None), "raise")

    def interrupted(act: Callable[[], object]) -> None:
        list(map(operator.call, [functools.partial(tell, int(TERM)), act]))

    with handlers(SIGTERM=raise_term):
        with pytest.raises(TermError):
            interrupted(functools.partial(calls.brief, work))
        here = signals()
        with pytest.raises(TermError):
            interrupted(here.hold)
    assert not done
    assert not here.held


def test_a_handler_that_raises_ends_the_call_and_what_it_took_is_given_back(calls: Calls) -> None:
    taken = []

    def work() -> str:
        signal.raise_signal(TERM)
        taken.append("it")
        return "it"

    with handlers(SIGTERM=raise_term), pytest.raises(TermError):
        calls.brief(work, taken.remove)
    assert taken == []
    assert not signals().held


def test_a_handler_that_returns_lets_the_call_be(calls: Calls) -> None:
    heard: list[int] = []

    def work() -> str:
        signal.raise_signal(USR1)
        assert not heard, "heard within the call"
        return "it"

    with handlers(SIGUSR1=lambda number, frame: heard.append(number)):
        assert calls.brief(work) == "it"
    assert heard == [USR1]


def test_what_the_work_raises_comes_through(calls: Calls) -> None:
    def work() -> None:
        raise LookupError

    with handlers(SIGINT=signal.default_int_handler), pytest.raises(LookupError):
        calls.brief(work)


def test_an_interrupt_of_another_thread_is_held_too(calls: Calls) -> None:
    """`_thread.interrupt_main` sends no signal: Python alone knows of it."""
    done = []

    def work() -> None:
        thread = threading.Thread(target=_thread.interrupt_main)
        thread.start()
        thread.join()
        done.append(1)

    with handlers(SIGINT=signal.default_int_handler), pytest.raises(KeyboardInterrupt):
        calls.brief(work)
    assert done


def test_of_two_that_raise_the_second_is_heard_behind_the_first(calls: Calls) -> None:
    def work() -> None:
        signal.raise_signal(INT)
        signal.raise_signal(TERM)

    seen: list[str] = []
    with handlers(SIGINT=signal.default_int_handler, SIGTERM=raise_term):
        for _ in range(2):
            try:
                calls.brief(work if not seen else lambda: None)
                time.sleep(0)
            except KeyboardInterrupt:
                seen.append("INT")
            except TermError as error:
                seen.append("TERM")
                seen += ["INT"] if isinstance(error.__context__, KeyboardInterrupt) else []
    assert sorted(seen) == ["INT", "TERM"]


def test_calls_within_calls_are_held_once(calls: Calls) -> None:
    def work() -> str:
        signal.raise_signal(INT)
        return calls.brief(lambda: calls.run(lambda: "it"))

    with handlers(SIGINT=signal.default_int_handler), pytest.raises(KeyboardInterrupt):
        calls.brief(work)
    assert not signals().held


def test_a_handler_that_is_set_within_stays() -> None:
    before = signal.signal(USR1, raise_term)
    try:
        with held():
            signal.signal(USR1, signal.SIG_IGN)
        assert signal.getsignal(USR1) is signal.SIG_IGN
    finally:
        signal.signal(USR1, before)


def test_the_systems_handlers_and_their_flags_stay_as_they_are() -> None:
    restart, size = 0x10000000, 152  # SA_RESTART, and a struct sigaction of glibc on 64 bits

    def action() -> bytes:
        found = ctypes.create_string_buffer(size)
        assert ctypes.CDLL(None).sigaction(int(USR1), None, found) == 0
        return found.raw[:16] + found.raw[136:140]  # the handler, the signals that are blocked meanwhile, the flags

    with handlers(SIGUSR1=raise_term):
        signal.siginterrupt(USR1, False)
        before = action()
        assert int.from_bytes(before[16:], "little") & restart
        with held():
            assert action() == before
        assert action() == before


def test_signals_that_have_no_handler_of_pythons_are_left_alone() -> None:
    with handlers(SIGTERM=raise_term, SIGHUP=signal.SIG_DFL):  # nohup has it ignored
        with held():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
            assert signal.getsignal(TERM) is not raise_term
        assert signal.getsignal(TERM) is raise_term


def test_an_event_loop_is_told_once(calls: Calls) -> None:
    told: list[int] = []

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(USR1, told.append, 1)
        calls.brief(lambda: signal.raise_signal(USR1))
        for _ in range(5):
            await asyncio.sleep(0.01)
        loop.remove_signal_handler(USR1)

    asyncio.run(serve())
    assert told == [1]


def test_a_child_that_another_thread_forks_meanwhile_hears_its_signals(calls: Calls) -> None:
    found = []

    def fork() -> None:
        child = os.fork()
        if not child:
            status = 1
            try:
                signal.raise_signal(TERM)
            except TermError:
                status = 7
            finally:
                os._exit(status)
        found.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    def work() -> None:
        thread = threading.Thread(target=fork)
        thread.start()
        thread.join()

    with handlers(SIGTERM=raise_term):
        calls.brief(work)
    assert found == [7]


def test_in_other_threads_nothing_is_held(calls: Calls) -> None:
    seen = []
    thread = threading.Thread(target=lambda: calls.brief(lambda: seen.append(signals().held)))
    thread.start()
    thread.join()
    assert seen == [False]


# -- an engine ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wait", ["result", "layer", "drain"])
def test_ctrl_c_ends_a_call_that_waits_at_once(open_host: Callable[..., Host], wait: str) -> None:
    PLAN.reset()
    host = open_host(transport="tests.support.faulty:FaultyTransport", cpu=None)
    tokens = prompt(1, 4)
    host.store(tokens)
    quiet(host.engine)
    sent: list[float] = []

    def send() -> None:
        time.sleep(0.2)
        sent.append(time.monotonic())
        os.kill(os.getpid(), INT)

    with PLAN.rule(Op.WRITE if wait == "drain" else Op.READ, Fault.DELAY, seconds=1.0):
        thread = threading.Thread(target=send)
        with handlers(SIGINT=signal.default_int_handler):
            if wait == "drain":
                other = prompt(2, 4)
                host.engine.store(other, host.compute(other))
                act: Callable[[], object] = host.engine.drain
            else:
                load, blocks, keys = host.begin(tokens)
                act = load.result if wait == "result" else lambda: load.wait(0)
            thread.start()
            with pytest.raises(KeyboardInterrupt):
                act()
            took = time.monotonic() - sent[0]
        thread.join()
    assert took < 0.3, "the interrupt was heard late"  # 100 ms, and what a busy machine takes
    if wait != "drain":
        load.result(WAIT)
        host.finish(load, blocks, keys)
    quiet(host.engine)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("rounds", [20, pytest.param(3000, marks=pytest.mark.soak)])
def test_a_timer_that_interrupts_short_calls_loses_nothing(slab: Path, rounds: int) -> None:
    """Interrupts by a timer of the system at random moments of lookups, loads, stores and prefetches."""
    host = Host(make_config(slab, cpu=12, ssd=40, deadline=5.0))
    rng, interrupts, seed = random.Random(5), 0, 100
    tokens = prompt(1, 4, extra=1)
    host.store(tokens)
    quiet(host.engine)
    armed = False

    def ring(number: int, frame: FrameType | None) -> None:
        if armed:
            raise TermError

    with handlers(SIGVTALRM=ring), host.engine as engine:
        while interrupts < rounds:
            seed += 1
            blocks, fresh = host.take(4), prompt(seed, 4)
            pages = host.compute(fresh)
            taken: list[Any] = []
            signal.setitimer(signal.ITIMER_VIRTUAL, rng.random() * 0.003 + 1e-6)
            armed = True
            try:
                while True:
                    hit = engine.lookup(tokens)
                    taken.append(engine.store(fresh, pages))
                    taken.append(engine.load(hit, blocks[: len(hit.pages)]))
                    taken.append(engine.prefetch(tokens))
                    taken[-1].result(WAIT)
                    taken[-2].result(WAIT)
            except TermError:
                interrupts += 1
            finally:
                armed = False
                signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            taken.clear()
            engine.drain(WAIT)
            settle(engine)
            host.give(blocks)
            host.give(pages)
            assert engine.check().ok
        assert engine.stats()["leases"] == []
