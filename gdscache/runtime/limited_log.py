"""Log lines of one engine, each cause at most once a minute: a failing or full disk floods no log."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable

PERIOD_S = 60.0  # between two lines of one cause


_Line = tuple[logging.Logger, int, str, tuple[object, ...]]  # with the arguments of `Logger.log`


@dataclasses.dataclass(slots=True)
class _Cause:
    """`line`: the first waiting line, with its time. `count`: the lines that it stands for. `due`: when it may be
    written."""

    due: float
    line: _Line | None = None
    since: float = 0.0
    count: int = 0


class LimitedLog:
    """Notes lines anywhere, also under a lock, and writes them in `flush`, which holds none. Thread-safe.

    Of the lines of one cause that come within `PERIOD_S` of a written one, the first is written at the end of
    that time, with the count of the others. Causes are names from the code, and of tiers, so they are few. `clock`: in
    seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._lock = threading.Lock()
        self._causes: dict[str, _Cause] = {}

    def say(
        self,
        log: logging.Logger,
        level: int,
        cause: str,
        text: str | Callable[[], str],
        *args: object,
        times: int = 1,
    ) -> None:
        """Note a line, which stands for `times` events of its cause. `text` and `args` are those of `Logger.log`; a
        function as `text` is called for the whole line if that will be written."""
        if not log.isEnabledFor(level):
            return
        now = self.clock()
        with self._lock:
            known = self._causes.get(cause)
            if known is None:
                known = self._causes[cause] = _Cause(now)
            if known.line is None:
                told = (text, args) if isinstance(text, str) else ("%s", (text(),))
                known.line, known.since = (log, level, *told), now
            known.count += times

    @property
    def waiting(self) -> bool:
        """Whether `flush` would write a line. Takes no lock."""
        now = self.clock()
        return any(known.line is not None and known.due <= now for known in [*self._causes.values()])

    def flush(self, *, last: bool = False) -> None:
        """Write the lines that are due, or with `last` all of them. The caller must hold no lock, since a log may be
        slow."""
        if not self._causes:
            return
        now, ready = self.clock(), []
        with self._lock:
            for known in self._causes.values():
                if known.line is not None and (last or known.due <= now):
                    ready.append((known.line, known.count - 1, now - known.since))
                    known.line, known.count, known.due = None, 0, now + PERIOD_S
        for (log, level, text, args), others, seconds in ready:
            if others:
                text, args = text + " (%d more of this cause within %.0f s)", (*args, others, max(seconds, 1.0))
            log.log(level, text, *args)
