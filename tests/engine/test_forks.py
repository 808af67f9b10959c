"""Forks of a process that has an engine: the child is told whose it is, at once, and changes nothing there."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from gdscache import CacheEngine
from gdscache.errors import ForkedProcessError
from tests.support.helpers import WAIT, Host, fill, make_config, prompt, run, settle
from tests.support.hybrid import MODELS, PROMPT, HybridHost, hybrid_config
from tests.support.processes import Child
from tests.support.prometheus import free_port

PAGES = 4
Config = dict[str, Any]


def _refused(calls: dict[str, Callable[[], object]], owner: int) -> list[str]:
    """What is wrong with the calls of a forked child: none may do anything but name the owner, at once."""
    wrong = []
    for name, call in calls.items():
        begun = time.monotonic()
        try:
            call()
        except ForkedProcessError as error:
            if error.owner != owner or str(owner) not in error.message or not error.hint:
                wrong.append(f"{name}: {error}")
        except Exception as error:  # noqa: BLE001 - it is told
            wrong.append(f"{name}: {error!r}")
        else:
            wrong.append(f"{name} was carried out")
        if time.monotonic() - begun > 2:
            wrong.append(f"{name} took {time.monotonic() - begun:.1f} s")
    return wrong


def _in_fork(calls: dict[str, Callable[[], object]], then: Callable[[], object]) -> str:
    """Run calls, and `then`, in a forked child; what was wrong there."""
    reading, writing = os.pipe()
    owner, child = os.getpid(), os.fork()
    if not child:
        signal.alarm(10)  # one that hangs is killed
        wrong = _refused(calls, owner)
        try:
            then()
        except BaseException as error:  # noqa: BLE001 - it is told
            wrong.append(f"the end: {error!r}")
        os.write(writing, "\n".join(wrong).encode()[:4000])
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        said = answer.read()
    status = os.waitpid(child, 0)[1]
    return said if status == 0 else f"{said}; the child ended with {status}"


def _calls(engine: CacheEngine, tokens: list[int]) -> dict[str, Callable[[], object]]:
    return {
        "lookup": lambda: engine.lookup(tokens),
        "clear": engine.clear,
        "invalidate": lambda: engine.invalidate(bytes(32)),
        "namespace": engine.namespace,
        "pages": lambda: engine.pages(tokens),
        "prefetch": lambda: engine.prefetch(tokens),
        "pin": lambda: engine.pin(tokens, 10.0),
        "drain": lambda: engine.drain(5.0),
        "flush": lambda: engine.flush(5.0),
        "stats": engine.stats,
        "check": engine.check,
        "observe_prefill": lambda: engine.observe_prefill(10, 0, 0.1),
        "observe_load": lambda: engine.observe_load("cpu", 10, 0.1),
        "manager": lambda: engine.manager,
        "loader": lambda: engine.loader,
    }


def own_pool(pipe: Connection, config: Config, tokens: list[int]) -> None:
    with CacheEngine.from_config(config) as engine:
        run(engine, prompt(9, PAGES))
        run(engine, tokens)
        with engine.manager.lock:
            engine.manager.tiers["ssd"].index.evict(PAGES)  # deletions that wait for their commit
        seq, shut = engine.sequence(tokens), contextlib.ExitStack()
        pin, prefetch = engine.pin(tokens, 100.0), engine.prefetch(tokens)
        calls = _calls(engine, tokens) | {
            "sequence": lambda: engine.sequence(tokens),
            "gpu": lambda: engine.gpu,
            "append": lambda: seq.append([1, 2, 3]),
            "commit": seq.commit,
            "tokens of a pin": lambda: pin.tokens,
            "release": pin.release,
            "cancel": prefetch.cancel,
            "wait for a prefetch": prefetch.wait,
            "result of a prefetch": prefetch.result,
        }
        for handle in (engine, seq, pin, prefetch):
            shut.push(handle)
        said = _in_fork(calls, shut.close)
        if not (child := os.fork()):
            signal.alarm(10)
            sys.exit(0)  # with an interpreter's whole end
        pipe.send(said or os.waitpid(child, 0)[1] or "")
        seq.close()
        pin.release()
        pipe.send((run(engine, tokens), engine.check().problems))
        settle(engine)


def attached(pipe: Connection, config: Config, tokens: list[int]) -> None:
    host = Host(config)
    with host.engine as engine:
        handle = host.store(tokens)
        engine.drain(WAIT)
        load, blocks, keys = host.begin(tokens)
        hit = engine.lookup(tokens)
        calls = _calls(engine, tokens) | {
            "load": lambda: engine.load(hit, blocks),
            "load_many": lambda: engine.load_many([(hit, blocks)]),
            "store": lambda: engine.store(tokens, blocks),
            "result of a load": load.result,
            "wait": lambda: load.wait(0),
            "cancel a load": load.cancel,
            "result of a store": handle.result,
        }
        pipe.send(_in_fork(calls, engine.close))
        report = host.finish(load, blocks, keys)
        pipe.send((report.tokens, engine.check().problems))
        settle(engine)


def under_load(pipe: Connection, config: Config, tokens: list[int]) -> None:
    """Fork while other threads are in the middle of anything."""
    host = Host(config, blocks=512)
    with host.engine as engine:
        host.store(tokens)
        engine.drain(WAIT)
        over, broken = threading.Event(), []

        def work(number: int) -> None:
            mine = host.take(PAGES) if number else []
            seed = 100 * number
            try:
                while not over.is_set():
                    seed += 1
                    engine.store(prompt(seed % 5 + 100 * number, PAGES), mine).result(WAIT)
                    hit = engine.lookup(prompt(seed % 5 + 100 * number, PAGES))
                    engine.load(hit, mine[: len(hit.pages)]).result(WAIT)
            except Exception as error:  # noqa: BLE001 - it is told
                broken.append(repr(error))

        threads = [threading.Thread(target=work, args=(n,)) for n in (1, 2)]
        for thread in threads:
            thread.start()
        said = [_in_fork(_calls(engine, tokens), engine.close) for _ in range(12)]
        over.set()
        for thread in threads:
            thread.join(WAIT)
        pipe.send("".join(said) + "".join(broken))
        engine.drain(WAIT)
        pipe.send((engine.lookup(tokens).tokens, engine.check().problems))
        settle(engine)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("target", [own_pool, attached, under_load])
def test_a_forked_child_is_told_whose_engine_it_is_and_changes_nothing(slab: Path, target: Any) -> None:
    config = make_config(slab, gpu=16, cpu=32, ssd=64)
    tokens = prompt(1, PAGES, extra=1)
    with Child(target, config, tokens) as owner:
        assert owner.receive(60) == ""
        assert owner.receive(60) == (4 * PAGES, ())
        owner.end()
    with CacheEngine.from_config(config) as engine:
        assert engine.lookup(tokens).tokens == 4 * PAGES, "pages are gone after a restart"
        settle(engine)


def pools(pipe: Connection, config: Config) -> None:
    host = HybridHost(config)
    host.store(PROMPT)
    with host.engine as engine:
        pin, prefetch = engine.pin(PROMPT, 100.0), engine.prefetch(PROMPT, pin=100.0)
        calls: dict[str, Callable[[], object]] = {
            "lookup": lambda: engine.lookup(PROMPT),
            "clear": engine.clear,
            "release": pin.release,
            "cancel": prefetch.cancel,
        }
        for handle in (engine, pin, prefetch):
            pipe.send(_in_fork(calls, functools.partial(handle.__exit__, None, None, None)))
        prefetch.result(WAIT)
        pipe.send((pin.tokens, prefetch.verified, engine.check().problems))


def test_a_forked_child_leaves_the_pools_of_groups_and_their_metrics_alone() -> None:
    config = hybrid_config(None, MODELS["apart"], metrics={"port": free_port()})
    with Child(pools, config) as owner:
        assert [owner.receive(60) for _ in range(3)] == ["", "", ""]
        assert owner.receive(60) == (48, 48, ())
        owner.end()


def opens_its_own(pipe: Connection, config: Config, theirs: Config, tokens: list[int]) -> None:
    with CacheEngine.from_config(config) as engine:
        run(engine, tokens)

        def another() -> None:
            with CacheEngine.from_config(theirs) as mine, mine.sequence(tokens) as seq:
                fill(mine, seq)
                seq.commit()

        pipe.send(_in_fork({}, another))
        settle(engine)


def test_a_forked_child_may_open_an_engine_of_its_own(slab: Path, tmp_path: Path) -> None:
    theirs = make_config(tmp_path / "theirs")
    with Child(opens_its_own, make_config(slab), theirs, prompt(1, PAGES)) as owner:
        assert owner.receive(60) == ""
        owner.end()
    with CacheEngine.from_config(theirs) as engine:
        assert engine.lookup(prompt(1, PAGES)).tokens == 4 * PAGES
