"""A timeline that is kept in memory and written as trace-event JSON, which https://ui.perfetto.dev opens."""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from gdscache import arguments
from gdscache.errors import InvalidValueError
from gdscache.limits import MAX_COUNT
from gdscache.runtime.files import write_whole
from gdscache.tracing.base import Span, Timeline, title

LIMIT = 200_000  # events, some 300 bytes each
FORMAT = 1
_PID = 1
# The beginnings of tracks' names, from top to bottom.
_ORDER = ("model", "calls", "load", "SSD reads", "copies", "prefetch", "gather", "stores", "write", "SSD")

Track = tuple[str, int]  # a name, and the thread's identifier if it is a thread's

Events = Iterable[tuple[str, Track, int, int | None, dict[str, Any]]]
Placed = list[tuple[str, int, int, int | None, dict[str, Any]]]


class _Recorded(Span):
    __slots__ = ("_timeline", "about", "kind", "start", "track")
    start: int

    def __init__(self, timeline: TraceTimeline, kind: str, track: Track, about: dict[str, Any]) -> None:
        self._timeline = timeline
        self.kind = kind
        self.track = track
        self.about = about

    def add(self, /, **about: Any) -> None:
        self.about.update(about)

    def __enter__(self) -> _Recorded:
        self._timeline.stack.append(self.about)
        self._timeline.begin(self)
        return self

    def __exit__(self, *error: object) -> None:
        self._timeline.stack.pop()
        if isinstance(error[0], type):
            self.about["error"] = error[0].__name__
        self._timeline.end(self)


class TraceTimeline(Timeline):
    """Keeps up to `limit` events, and the number of further ones. `write` may be called at any time."""

    __slots__ = ("_begun", "_clock", "_events", "_left_out", "_limit", "_local", "_lock", "_next", "_open", "_zero")

    def __init__(self, *, limit: int = LIMIT, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        """`clock`: nanoseconds; of CLOCK_MONOTONIC, so that spans of native threads fit."""
        self._limit = arguments.whole(limit, "limit", 1, MAX_COUNT)
        self._clock = clock
        self._zero = clock()
        self._next = itertools.count(1)
        self._lock = threading.Lock()
        self._local = threading.local()
        self._begun = 0  # events that are kept or will be
        self._left_out = 0
        self._open: set[_Recorded] = set()
        self._events: list[tuple[str, Track, int, int | None, dict[str, Any]]] = []

    def number(self) -> int:
        return next(self._next)

    def span(self, kind: str, /, **about: Any) -> Span:
        return _Recorded(self, kind, self._here(), self._inherit(about))

    def instant(self, kind: str, /, **about: Any) -> None:
        about = self._inherit(about)
        with self._lock:
            if self._take():
                self._events.append((kind, self._here(), self._clock(), None, about))

    def past(self, kind: str, track: str, begin: int, end: int | None, /, **about: Any) -> None:
        with self._lock:
            if self._take():
                self._events.append((kind, (track, 0), begin, end, about))

    @property
    def stack(self) -> list[dict[str, Any]]:
        """The `about` of the calling thread's spans, the innermost last."""
        try:
            stack: list[dict[str, Any]] = self._local.stack
        except AttributeError:
            stack = self._local.stack = []
        return stack

    def begin(self, span: _Recorded) -> None:
        """Keep the span if there is room."""
        with self._lock:
            span.start = self._clock()
            if self._take():
                self._open.add(span)

    def end(self, span: _Recorded) -> None:
        now = self._clock()
        with self._lock:
            if span in self._open:
                self._open.remove(span)
                self._events.append((span.kind, span.track, span.start, now, span.about))

    def _take(self) -> bool:
        if self._begun >= self._limit:
            self._left_out += 1
            return False
        self._begun += 1
        return True

    def _inherit(self, about: dict[str, Any]) -> dict[str, Any]:
        stack = self.stack
        if stack and "load" not in about and "load" in stack[-1]:
            about["load"] = stack[-1]["load"]
        return about

    def _here(self) -> Track:
        thread = threading.current_thread()
        return thread.name, thread.ident or 0

    def describe(self) -> dict[str, Any]:
        """The trace so far, as the JSON object to write."""
        with self._lock:
            now = self._clock()
            events = list(self._events)
            events += [(s.kind, s.track, s.start, now, {**s.about, "unfinished": True}) for s in self._open]
            left_out = self._left_out
        placed, tracks = lanes(events)
        process = {"name": f"gdscache {os.getpid()}"}
        rows: list[dict[str, Any]] = [{"ph": "M", "pid": _PID, "tid": 0, "name": "process_name", "args": process}]
        for name, tid in tracks.items():
            rows.append({"ph": "M", "pid": _PID, "tid": tid, "name": "thread_name", "args": {"name": name}})
            rows.append({"ph": "M", "pid": _PID, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}})
        placed.sort(key=lambda event: (event[2], -(event[3] or event[2])))
        rows += [self._row(*event) for event in placed]
        about = {"format": FORMAT, "events_left_out": left_out}
        return {"traceEvents": rows, "displayTimeUnit": "ms", "otherData": about}

    def _row(self, kind: str, tid: int, start: int, end: int | None, about: dict[str, Any]) -> dict[str, Any]:
        arguments = {key: value for key, value in about.items() if key != "layers"}
        if about.get("layers"):
            arguments |= {"first_layer": about["layers"][0], "last_layer": about["layers"][-1]}
        row = {"name": title(kind, about), "cat": kind, "pid": _PID, "tid": tid, "ts": (start - self._zero) / 1000}
        if end is None:
            return row | {"ph": "i", "s": "t", "args": arguments}
        return row | {"ph": "X", "dur": (end - start) / 1000, "args": arguments}

    def write(self, path: str | os.PathLike[str]) -> Path:
        """Write the trace so far to `path`; replaces an existing file. Spans that have not ended reach until now.

        Raises `InvalidValueError`; the trace is kept.
        """
        file, text = Path(path), json.dumps(self.describe(), default=str, separators=(",", ":"))
        try:
            write_whole(file, text.encode(), 0o644)
        except OSError as error:
            message = f"the timeline cannot be written to {file}: {error.strerror}"
            raise InvalidValueError(message, "name a file in a directory that exists and that you may write") from None
        return file


def lanes(events: Events) -> tuple[Placed, dict[str, int]]:
    """Events with the numbers of their tracks, and the tracks' names, in order from top to bottom.

    A track's spans may not overlap, but I/O in flight does: such a track gets the lanes it needs.
    """
    rows: list[tuple[tuple[Track, int], tuple[str, Track, int, int | None, dict[str, Any]]]] = []
    ends: dict[Track, list[int]] = {}
    for event in sorted(events, key=lambda event: event[2]):
        _, track, start, end, _ = event
        lane = 0
        if not track[1] and end is not None:
            free = ends.setdefault(track, [])
            lane = next((i for i, over in enumerate(free) if over <= start), len(free))
            free[lane : lane + 1] = [end]
        rows.append(((track, lane), event))
    names, tids = dict[str, int](), dict[tuple[Track, int], int]()
    for track, lane in sorted({at for at, _ in rows}, key=lambda at: (_place(_name(at[0])), at)):
        name, number = _name(track) + (f" ({lane + 1})" if lane else ""), 2
        while name in names:  # threads of two engines
            name, number = f"{_name(track)} #{number}", number + 1
        names[name] = tids[track, lane] = len(names) + 1
    return [(kind, tids[at], start, end, about) for at, (kind, _, start, end, about) in rows], names


def _name(track: Track) -> str:
    name, _ = track
    return "model thread" if name == "MainThread" else name.removeprefix("gdscache-").replace("_", " ")


def _place(name: str) -> int:
    return next((i for i, word in enumerate(_ORDER) if name.startswith(word)), len(_ORDER))
