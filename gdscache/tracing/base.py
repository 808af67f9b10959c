"""The contract of timelines, and the one that keeps nothing, which every engine has by default."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, Self

if TYPE_CHECKING:
    import torch


class PagesInFlight(Protocol):
    """I/O of pages that says when each has ended."""

    def on_end(self, callback: Callable[[int], None]) -> None: ...


class Span:
    """Something that takes time, from entering to leaving it. This one is nobody's."""

    __slots__ = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass


class Flight(Span):
    """Work that others do, begun within a `with` block: over when that raises, when `follow` hears so, or after it."""

    __slots__ = ()

    def follow(self, io: PagesInFlight, pages: int) -> None:
        """The work is over when these pages are, whoever may wait for them. At most once, within the block."""


_NOTHING = Flight()


class Timeline:
    """Told by the engine what begins and ends. Keeps nothing: a span costs less than 0.5 us.

    `kind` says what it is: step, layer, wait, lookup, plan, begin, load, read, scatter, check, gather, store, write,
    commit, prefetch, copies, kernel. `about` is plain data: `layer` (int) or `layers` (range), `pages`, `bytes`, and
    `load`, the load's number, which spans within spans inherit. Thread-safe.
    """

    __slots__ = ()

    def number(self) -> int:
        """A number for a load; 0 where nobody keeps it."""
        return 0

    def span(self, kind: str, /, **about: Any) -> Span:
        """Time of the calling thread."""
        return _NOTHING

    def compute(self, kind: str, device: torch.device | None, /, **about: Any) -> Span:
        """`span`, and the time of what is queued within it on the current stream of `device`, where that is CUDA's."""
        return _NOTHING

    def flight(self, kind: str, track: str, /, **about: Any) -> Flight:
        """Time of what is under way somewhere else; spans of a track may overlap."""
        return _NOTHING

    def instant(self, kind: str, /, **about: Any) -> None:
        """Something that took no time, in the calling thread."""

    def past(self, kind: str, track: str, begin: int, end: int | None, /, **about: Any) -> None:
        """What a thread that is not Python's has done: nanoseconds of CLOCK_MONOTONIC; no end: it took no time.

        Spans of a track may overlap.
        """


OFF = Timeline()


class Countdown:
    """Callback for the ends of so many pages, in any threads: calls `over` at the last of them."""

    __slots__ = ("_left", "_lock", "_over")

    def __init__(self, pages: int, over: Callable[[], None]) -> None:
        self._left = pages
        self._lock = threading.Lock()
        self._over = over

    def __call__(self, page: int) -> None:
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last:
            self._over()


def title(kind: str, about: Mapping[str, Any]) -> str:
    """What a span is called: its kind, and the layers that it is about (`read 4-7`, `layer 3`)."""
    if "layer" in about:
        return f"{kind} {about['layer']}"
    layers = about.get("layers")
    if not layers:
        return kind
    return f"{kind} {layers[0]}" if len(layers) == 1 else f"{kind} {layers[0]}-{layers[-1]}"
