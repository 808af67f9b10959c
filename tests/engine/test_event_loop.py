"""An engine in an event loop: one descriptor says that handles have ended, and is given back with the engine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import select
from collections.abc import Callable
from typing import Any

import pytest

from gdscache.errors import EngineClosedError
from gdscache.storage.base import Op
from tests.support.faulty import PLAN, Fault
from tests.support.helpers import WAIT, OpenHost, drop_from, prompt, quiet
from tests.support.places import ROOT


def over() -> Callable[..., Any]:
    """The function of docs/embedding.md."""
    [code] = re.findall(
        r"```python\n(import asyncio\n.*?)\n\n\nwith CacheEngine", (ROOT / "docs/embedding.md").read_text(), re.DOTALL
    )
    names: dict[str, Any] = {}
    exec(code, names)
    return names["over"]


def readable(file: int, seconds: float) -> bool:
    return bool(select.select([file], [], [], seconds)[0])


def test_a_loop_goes_on_while_pages_are_stored_and_loaded(open_host: OpenHost) -> None:
    host, wait = open_host(transport="tests.support.faulty:FaultyTransport"), over()
    tokens, turns = prompt(1, 4), 0

    async def clock() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0.001)

    async def serve() -> None:
        ticking = asyncio.ensure_future(clock())
        stored = host.store(tokens)
        assert (await wait(host.engine, stored)).dropped == {}
        quiet(host.engine)
        drop_from(host.engine, "cpu")
        with PLAN.rule(Op.READ, Fault.DELAY, seconds=0.05):
            load, blocks, keys = host.begin(tokens)
            report = await wait(host.engine, load)
        assert report.tokens == 16
        host.finish(load, blocks, keys)
        ticking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await ticking

    asyncio.run(serve())
    assert turns > 2


def test_the_descriptor_rings_for_each_kind_of_handle_and_goes_with_the_engine(open_host: OpenHost) -> None:
    host = open_host()
    tokens = prompt(2, 3)
    file = host.engine.fileno()
    assert host.engine.fileno() == file
    assert not readable(file, 0)
    host.store(tokens)
    assert readable(file, WAIT)
    quiet(host.engine)
    os.eventfd_read(file)
    host.load(tokens)
    assert readable(file, WAIT)
    os.eventfd_read(file)
    with host.engine.prefetch(tokens) as prefetch:
        prefetch.result(WAIT)
    assert readable(file, WAIT)
    os.eventfd_read(file)
    assert not readable(file, 0)
    host.engine.close()
    with pytest.raises(EngineClosedError):
        host.engine.fileno()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file)
