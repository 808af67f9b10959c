"""Tracks of a timeline: their readable names, their order, and lanes for spans that overlap."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

_THREADS = {  # our threads by their names
    "MainThread": "model thread",
    "gdscache-calls": "calls",
    "gdscache-load": "load thread",
    "gdscache-prefetch": "prefetch thread",
    "gdscache-gather": "storer",
    "gdscache-write": "writer",
}
# Of tracks, from top to bottom.
_ORDER = (
    "model",
    "calls",
    "thread",
    "loads",
    "load",
    "SSD reads",
    "copies",
    "prefetch",
    "storer",
    "stores",
    "writer",
    "SSD",
)

Track = tuple[str, int]  # a name, and the thread's identifier if it is a thread's

Events = Iterable[tuple[str, Track, int, int | None, dict[str, Any]]]
Placed = list[tuple[str, int, int, int | None, dict[str, Any]]]


def lanes(events: Events) -> tuple[Placed, dict[str, int]]:
    """Events with the numbers of their tracks, and the tracks' names, in order from top to bottom.

    A track's spans may not overlap, but I/O in flight does: such a track gets the lanes it needs.
    """
    named: dict[tuple[Track, int], list[tuple[str, int, int | None, dict[str, Any]]]] = {}
    ends: dict[Track, list[int]] = {}
    for kind, track, start, end, about in sorted(events, key=lambda event: event[2]):
        lane = 0
        if not track[1] and end is not None:
            free = ends.setdefault(track, [])
            lane = next((i for i, over in enumerate(free) if over <= start), len(free))
            free[lane : lane + 1] = [end]
        named.setdefault((track, lane), []).append((kind, start, end, about))
    names: dict[str, list[tuple[str, int, int | None, dict[str, Any]]]] = {}
    for (track, lane), rows in sorted(named.items(), key=lambda item: (_place(_name(item[0][0])), item[0])):
        name, number = _name(track) + (f" ({lane + 1})" if lane else ""), 2
        while name in names:  # threads of two engines
            name, number = f"{_name(track)} #{number}", number + 1
        names[name] = rows
    placed = [(kind, tid, start, end, about)
              for tid, rows in enumerate(names.values(), 1) for kind, start, end, about in rows]  # fmt: skip
    return placed, {name: tid for tid, name in enumerate(names, 1)}


def _name(track: Track) -> str:
    name, thread = track
    if not thread:
        return name
    own, _, number = name.rpartition("_")
    if own in ("gdscache-gather", "gdscache-write"):
        return _THREADS[own]
    if own in _THREADS and number.isdigit():
        return f"{_THREADS[own]} {number}"
    return _THREADS.get(name, f"thread {name}")


def _place(name: str) -> int:
    return next((i for i, word in enumerate(_ORDER) if name.startswith(word)), len(_ORDER))
