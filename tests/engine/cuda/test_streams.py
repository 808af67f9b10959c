"""Fences: work that one thread queues, and any number of others wait for."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from gdscache.cuda.streams import Fence
from gdscache.errors import DeadlineError
from tests.support.helpers import WAIT

WAITERS = 8


def test_everybody_who_waits_goes_on_and_whoever_comes_later_does_not_wait() -> None:
    for round_ in range(50):
        fence, there = Fence(), threading.Barrier(WAITERS + 1)

        def wait(patience: float | None, fence: Fence = fence, there: threading.Barrier = there) -> bool:
            there.wait(WAIT)
            fence.wait(patience)
            return fence.done()

        with ThreadPoolExecutor(WAITERS) as pool:
            waits = [pool.submit(wait, None if number % 2 else WAIT) for number in range(WAITERS)]
            there.wait(WAIT)
            if round_ % 2:
                time.sleep(0.0005)  # nearly all of them wait by then; else they come with the signal
            fence.signal()
            assert [waiting.result(WAIT) for waiting in waits] == [True] * WAITERS
        fence.synchronize(0.0)


def test_what_is_not_queued_is_late() -> None:
    fence = Fence()
    assert not fence.done()
    for seconds in (0.0, 0.01, -1.0):
        with pytest.raises(DeadlineError, match="not ready after"):
            fence.wait(seconds)
    with pytest.raises(DeadlineError, match="not ready after"):
        fence.synchronize(0.01)
    fence.signal()
    fence.signal()  # changes nothing
    fence.wait(0.0)
    assert fence.done()
