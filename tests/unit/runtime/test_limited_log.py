"""Lines of a log: each cause once a minute, with the count of those that were not written, by a clock of the test's."""

from __future__ import annotations

import itertools
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gdscache.runtime.limited_log import LimitedLog

log = logging.getLogger("gdscache.test")


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_storm_gives_one_line_a_minute_with_a_count(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    limited = LimitedLog(clock)
    for second in range(150):
        clock.now = 100.0 + second
        for number in range(10):
            limited.say(log, logging.WARNING, "bad", "page %d is bad", 10 * second + number)
            limited.flush()
    assert caplog.messages == [
        "page 0 is bad",
        "page 1 is bad (599 more of this cause within 60 s)",
        "page 601 is bad (599 more of this cause within 60 s)",
    ]
    limited.flush(last=True)
    assert caplog.messages[3] == "page 1201 is bad (298 more of this cause within 29 s)"
    limited.flush(last=True)
    assert len(caplog.messages) == 4


def test_causes_do_not_hide_each_other_and_events_count(caplog: pytest.LogCaptureFixture) -> None:
    limited = LimitedLog(Clock())
    limited.say(log, logging.WARNING, "a", "a %s", "1", times=7)
    limited.say(log, logging.ERROR, "b", lambda: "b 100 %")
    limited.say(log, logging.WARNING, "b", "not the first of its cause")
    assert caplog.messages == [], "nothing is written before the flush: who says it may hold a lock"
    assert limited.waiting
    limited.flush()
    assert caplog.messages == ["a 1 (6 more of this cause within 1 s)", "b 100 % (1 more of this cause within 1 s)"]
    assert not limited.waiting


def test_what_no_handler_wants_is_not_made(caplog: pytest.LogCaptureFixture) -> None:
    limited = LimitedLog(Clock())
    with caplog.at_level(logging.WARNING, "gdscache.test"):
        limited.say(log, logging.INFO, "a", lambda: pytest.fail("asked for in vain"))
        limited.flush()
    assert caplog.messages == []


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 5), st.floats(0, 50), st.booleans()), max_size=60),
)
def test_every_event_is_written_or_counted_and_no_cause_twice_a_minute(
    events: list[tuple[str, int, float, bool]],
) -> None:
    clock, lines = Clock(), list[tuple[float, str, int]]()

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            args = record.args
            assert isinstance(args, tuple)
            lines.append((clock.now, str(args[0]), 1 + (int(str(args[1])) if len(args) > 1 else 0)))

    own = logging.Logger("own")
    own.addHandler(Handler())
    limited = LimitedLog(clock)
    said = dict.fromkeys("abc", 0)
    for cause, times, pause, flush in events:
        clock.now += pause
        limited.say(own, logging.WARNING, cause, "%s", cause, times=times)
        said[cause] += times
        if flush:
            limited.flush()
    early = len(lines)
    limited.flush(last=True)
    for cause in "abc":
        written = [(at, count) for at, name, count in lines if name == cause]
        assert sum(count for _, count in written) == said[cause]
        times_ = [at for at, name, _ in lines[:early] if name == cause]
        assert all(b - a >= 60 for a, b in itertools.pairwise(times_))
