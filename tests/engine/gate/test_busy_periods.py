"""What a tier moves while it is busy: each period is reported once, whatever loads it has in common."""

from __future__ import annotations

import threading
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor

from gdscache.gate.busy_periods import AT_MOST, BusyPeriods
from tests.support.helpers import WAIT


def test_loads_beside_each_other_are_one_period() -> None:
    """Two loads of 4 bytes that share a tier of 2 bytes a second take 4 seconds each, and it is as fast as ever."""
    seen: list[tuple[str, int, float]] = []
    busy = BusyPeriods(lambda *period: seen.append(period))
    busy.begin("ssd", 10.0)
    busy.begin("ssd", 10.0)
    busy.begin("cpu", 11.0)
    busy.end("cpu", 3, 12.5)
    busy.end("ssd", 4, 14.0)
    assert (busy.untold, seen) == (True, [])
    busy.tell()
    assert (busy.untold, seen) == (False, [("cpu", 3, 1.5)])
    busy.end("ssd", 4, 14.0)
    busy.begin("ssd", 20.0)  # the pause does not count
    busy.end("ssd", 6, 23.0)
    busy.tell()
    assert seen[1:] == [("ssd", 8, 4.0), ("ssd", 6, 3.0)]


def test_a_tier_that_is_never_idle_is_reported_all_the_same() -> None:
    seen: list[tuple[str, int, float]] = []
    busy = BusyPeriods(lambda *period: seen.append(period))
    busy.begin("ssd", 0.0)
    for i in range(1, 2 * AT_MOST + 1):  # one load a second, the next begun before
        busy.begin("ssd", float(i))
        busy.end("ssd", 5, float(i))
    busy.tell()
    assert seen == [("ssd", 5 * AT_MOST, float(AT_MOST))] * 2


def test_a_load_that_is_told_late_begins_its_period() -> None:
    """As those of ranks are: else its bytes count, and its time does not."""
    seen: list[tuple[str, int, float]] = []
    busy = BusyPeriods(lambda *period: seen.append(period))
    busy.begin("ssd", 9.0)
    busy.begin("ssd", 1.0)
    busy.end("ssd", 8, 10.0)
    busy.end("ssd", 1, 10.0)
    busy.tell()
    assert seen == [("ssd", 9, 9.0)]


def test_a_load_that_failed_spoils_its_period_and_no_other() -> None:
    seen: list[tuple[str, int, float]] = []
    busy = BusyPeriods(lambda *period: seen.append(period))
    busy.begin("ssd", 0.0)
    busy.begin("ssd", 0.0)
    busy.end("ssd", None, 30.0)
    busy.end("ssd", 5, 31.0)
    busy.begin("ssd", 40.0)
    busy.end("ssd", 5, 41.0)
    busy.tell()
    assert seen == [("ssd", 5, 1.0)]


def test_periods_that_nobody_asks_for_are_reported_in_time() -> None:
    seen: list[tuple[str, int, float]] = []
    busy = BusyPeriods(lambda *period: seen.append(period))
    for n in range(1000):
        busy.begin("ssd", 2.0 * n)
        busy.end("ssd", n + 1, 2.0 * n + 1)
    assert 800 < len(seen) < 1000
    busy.tell()
    assert seen == [("ssd", n + 1, 1.0) for n in range(1000)]


def test_what_another_thread_reports_is_reported_when_tell_returns() -> None:
    begun, let = threading.Event(), threading.Event()
    seen: list[str] = []

    def report(tier: str, nbytes: int, seconds: float) -> None:
        begun.set()
        assert let.wait(WAIT)
        seen.append(tier)

    busy = BusyPeriods(report)
    busy.begin("ssd", 0.0)
    busy.end("ssd", 5, 1.0)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(busy.tell)
        assert begun.wait(WAIT)
        second = threads.submit(busy.tell)
        early = futures.wait([second], 0.05).done
        let.set()
        first.result(WAIT)
        second.result(WAIT)
    assert (early, seen) == (set(), ["ssd"])
