"""What the children of test_processes.py run."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from gdscache import CacheEngine
from gdscache.errors import DirectoryInUseError
from tests.support.helpers import prompt, run

Config = dict[str, Any]


def try_open(pipe: Connection, config: Config) -> None:
    """Answer with the error that opening raises, which has to survive the way, or None."""
    try:
        CacheEngine.from_config(config).close()
    except DirectoryInUseError as error:
        pipe.send(error)
    else:
        pipe.send(None)


def _fork(child: Callable[[], None]) -> int:
    """Fork; the child runs `child` and ends as an interpreter does, except for the threads that it has not."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    with contextlib.ExitStack() as end:
        end.callback(lambda: os._exit(status))
        child()
        status = 0
    raise AssertionError("not reached")


def _go_on(pipe: Connection, engine: CacheEngine, first: list[int], second: list[int]) -> None:
    again = run(engine, first)
    pipe.send((again, run(engine, second)))
    assert engine.check().problems == ()
    pipe.recv()


def fork_that_closes(pipe: Connection, config: Config, first: list[int], second: list[int]) -> None:
    """A forked process closes what it has of the engine, as leaving a `with` block does; ours goes on.

    It was forked while deletions waited for their commit, and closes when their slots have new pages.
    """
    with CacheEngine.from_config(config) as engine:
        run(engine, prompt(9, 5))
        with engine.manager.lock:
            engine.manager.tiers["ssd"].index.evict(4)
        go, gone = os.pipe()

        def close() -> None:
            os.read(go, 1)
            engine.close()

        pid = _fork(close)
        run(engine, first)
        run(engine, prompt(8, 3))
        os.write(gone, b"1")
        _, status = os.waitpid(pid, 0)
        pipe.send(os.waitstatus_to_exitcode(status))
        pipe.recv()
        assert engine.check().problems == ()
        _go_on(pipe, engine, first, second)


def fork_that_exits(pipe: Connection, config: Config, first: list[int], second: list[int]) -> None:
    """A forked process ends by `sys.exit`, with an interpreter's whole end; ours goes on."""
    with CacheEngine.from_config(config) as engine:
        run(engine, first)
        pid = os.fork()
        if not pid:
            sys.exit(0)
        _, status = os.waitpid(pid, 0)
        pipe.send(os.waitstatus_to_exitcode(status))
        pipe.recv()
        _go_on(pipe, engine, first, second)
