"""The contract of timelines, and the default one, which keeps nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Self


class Span:
    """A duration, from entering to leaving it. This one is not kept."""

    __slots__ = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def add(self, /, **about: Any) -> None:
        """More facts of the span: of a load, its `bytes`, those by `tiers`, and `bad_pages`."""


_NOTHING = Span()


class Timeline:
    """Gets the engine's spans and instants. Keeps nothing: a span costs less than 0.5 us.

    `kind` is one of: step, layer, wait, lookup, plan, begin, load, read, scatter, check, gather, store, write, commit,
    prefetch, copies, kernel. `about` is plain data: `layer` (int) or `layers` (range), `pages`, `bytes`, and `load`,
    the load's number, which inner spans inherit. Thread-safe.
    """

    __slots__ = ()

    def number(self) -> int:
        """A number for a load; 0 if it is not kept."""
        return 0

    def requests(self, headers: Iterable[Mapping[str, str] | None], /) -> AbstractContextManager[object]:
        """Loads that this thread calls within are of requests with these headers of W3C Trace Context (`traceparent`,
        `tracestate`), None for a request without."""
        return _NOTHING

    def span(self, kind: str, /, **about: Any) -> Span:
        """A duration of the calling thread."""
        return _NOTHING

    def instant(self, kind: str, /, **about: Any) -> None:
        """A moment in the calling thread."""

    def past(self, kind: str, track: str, begin: int, end: int | None, /, **about: Any) -> None:
        """Work of a native thread, in nanoseconds of CLOCK_MONOTONIC; without an end it is a moment.

        Spans of a track may overlap.
        """


OFF = Timeline()


def title(kind: str, about: Mapping[str, Any]) -> str:
    """The name of a span: its kind, and its layers (`read 4-7`, `layer 3`)."""
    if "layer" in about:
        return f"{kind} {about['layer']}"
    layers = about.get("layers")
    if not layers:
        return kind
    return f"{kind} {layers[0]}" if len(layers) == 1 else f"{kind} {layers[0]}-{layers[-1]}"
