"""Threads that do not start, at every start; and what ends a thread's work, at every function of every thread."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import pytest

import gdscache
from gdscache import CacheEngine
from gdscache.errors import DeadlineError, ThreadStartError
from tests.support.helpers import SMALL, WAIT, Host, fill, make_config, prompt, settle, until
from tests.support.native_parts import has_ring

PACKAGE = str(Path(gdscache.__file__).parent)


TRANSPORTS = ["posix", *(["uring"] if has_ring() else [])]


_OTHERS: set[threading.Thread] = set()  # that a test before this one has left: in calls that hang for good, say


@pytest.fixture(autouse=True)
def _only_ours() -> None:
    _OTHERS.clear()
    _OTHERS.update(threading.enumerate())


def _threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("gdscache-") and t not in _OTHERS]


class Starts:
    """Threads of Python, of which number `refused` (from 1 on) and those behind it do not start."""

    def __init__(self, refused: int) -> None:
        self.refused = refused
        self.asked = 0
        self._start: Callable[..., Any] = threading._start_new_thread  # type: ignore[attr-defined]

    def __call__(self, *arguments: Any) -> Any:
        self.asked += 1
        if self.asked >= self.refused:
            raise RuntimeError("can't start new thread")
        return self._start(*arguments)

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        with mock.patch.object(threading, "_start_new_thread", self):
            yield


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("attached", [False, True])
def test_without_one_of_its_threads_an_engine_does_not_open_and_leaves_nothing(
    slab: Path, attached: bool, transport: str
) -> None:
    config = make_config(slab, transport=transport)

    def opened() -> CacheEngine:
        return Host(config).engine if attached else CacheEngine.from_config(config)

    every = Starts(1000)
    with every.counting(), opened():
        pass
    assert every.asked > 4
    for file in slab.iterdir():
        file.unlink()
    before = _descriptors()
    for refused in range(1, every.asked + 1):
        with Starts(refused).counting(), pytest.raises(ThreadStartError, match="cannot be started") as refusal:
            opened()
        assert "limit of threads" in refusal.value.hint
        assert "gdscache-" in refusal.value.message
        until(lambda: not _threads(), f"threads that were started before number {refused} end")
        del refusal
        gc.collect(1)
        assert _descriptors() == before, f"descriptors are left when thread {refused} does not start"
    with opened() as engine:  # nobody has the lock
        settle(engine)


def test_a_directory_has_no_slab_when_the_calls_have_no_thread(slab: Path) -> None:
    config = make_config(slab)
    with Starts(1).counting(), pytest.raises(ThreadStartError):
        CacheEngine.from_config(config)
    assert {path.name for path in slab.iterdir()} <= {"lock"} if slab.exists() else True


@pytest.mark.parametrize("attached", [False, True])
def test_no_call_starts_a_thread(slab: Path, attached: bool) -> None:
    """So none fails for want of one, with half of its work done."""
    config = make_config(slab, cpu=4, store={"write_policy": "write_back"})
    host = Host(config) if attached else None
    engine = CacheEngine.from_config(config) if host is None else host.engine
    none, tokens = Starts(1), prompt(1, 3, extra=1)
    with none.counting():
        for seed in (1, 2, 3, 1):
            tokens = prompt(seed, 3, extra=1)
            if host is not None:
                host.store(tokens)
                host.load(tokens)
            else:
                with engine.sequence(tokens) as seq:
                    seq.verify(WAIT)
                    fill(engine, seq)
                    seq.commit()
            engine.prefetch(tokens).result(WAIT)
            engine.flush(WAIT)
        engine.pin(tokens, 10.0).release()
        settle(engine)
        engine.invalidate(engine.namespace())
        engine.clear()
        engine.close()
    assert not none.asked
    assert not _threads()


# -- what ends the work of a thread ------------------------------------------------------------------------------------


class Blow:
    """Raises once, at the `at`-th function of gdscache that the engine's threads come to while it is armed."""

    def __init__(self) -> None:
        self.at = 0
        self.seen = 0
        self.where = ""
        self.armed = False

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if not self.armed or not code.co_filename.startswith(PACKAGE):
            return
        if code.co_name in _NOT_HERE or code.co_qualname in _NOT_HERE:
            return
        if not threading.current_thread().name.startswith(_BACKGROUND):
            return
        self.seen += 1
        if self.seen == self.at:
            self.armed = False
            self.where = f"{threading.current_thread().name}: {code.co_filename}:{code.co_name}"
            raise ValueError("nobody foresaw this")


_BACKGROUND = ("gdscache-load", "gdscache-gather", "gdscache-write", "gdscache-prefetch")
# What passes an end on has nobody behind it that could do so in its place.
_NOT_HERE = {"failure_of", "log_failure", "set", "signal", "end", "finish", "_serve"}
_NOT_HERE |= {"<genexpr>", "round_pages"}  # may be closed where nobody can be told


def _work(host: Host, seed: int) -> None:
    """Every kind of work once, each to its end, whatever that is."""
    tokens = prompt(seed, 3, extra=1)
    blocks = host.compute(tokens)
    handle = host.engine.store(tokens, blocks)
    handle.result(WAIT)
    handle.release_event.synchronize(WAIT)
    host.give(blocks)
    with host.engine.manager.lock:
        if host.engine.manager.cpu is not None:
            host.engine.manager.cpu.index.evict(2)
    host.engine.prefetch(tokens[:8]).result(WAIT)
    hit, blocks = host.engine.lookup(tokens), host.take(3)
    load = host.engine.load(hit, blocks[: len(hit.pages)])
    with contextlib.suppress(ValueError):
        load.result(WAIT)
    load.release_event.synchronize(WAIT)
    host.give(blocks)


def _blown(path: Path, blow: Blow, at: int) -> int:
    """An engine of which one function raises: everything ends all the same. How many functions there were."""
    blow.at, blow.seen, blow.where, blow.armed = at, 0, "", False
    threading.settrace(blow)
    try:
        host = Host(make_config(path, cpu=4, ssd=64), limits=dataclasses.replace(SMALL, load_threads=1))
    finally:
        threading.settrace(None)  # type: ignore[arg-type]
    blow.armed = True
    try:
        _work(host, 1)
        blow.armed = False
        _work(host, 2)  # the threads are still there
        host.engine.drain(WAIT)
    except DeadlineError as error:
        raise AssertionError(f"somebody waits for ever: {blow.where or at}") from error
    finally:
        blow.armed = False
        closing = threading.Thread(target=host.engine.close, daemon=True)
        closing.start()
        closing.join(WAIT)
        assert not closing.is_alive(), f"close() hangs: {blow.where}"
    return blow.seen


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_whatever_ends_the_work_of_a_thread_ends_what_waits_for_it(tmp_path: Path) -> None:
    blow = Blow()
    functions = _blown(tmp_path / "none", blow, 0)
    assert functions > 100
    for at in range(1, functions + 1, functions // 24):
        _blown(tmp_path / str(at), blow, at)


@pytest.mark.soak
@pytest.mark.parametrize("share", range(15))
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_whatever_ends_the_work_at_any_function(tmp_path: Path, share: int) -> None:
    blow = Blow()
    for at in range(share, _blown(tmp_path / "none", blow, 0), 15):
        _blown(tmp_path / str(at), blow, at + 1)
