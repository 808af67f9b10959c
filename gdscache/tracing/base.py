"""The contract of timelines, and the one that keeps nothing, which every engine has by default."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    import torch


class Span:
    """Something that takes time, from entering to leaving it. This one is nobody's."""

    __slots__ = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass


_NOTHING = Span()


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

    def instant(self, kind: str, /, **about: Any) -> None:
        """Something that took no time, in the calling thread."""

    def past(self, kind: str, track: str, begin: int, end: int | None, /, **about: Any) -> None:
        """What a thread that is not Python's has done: nanoseconds of CLOCK_MONOTONIC; no end: it took no time.

        Spans of a track may overlap.
        """


OFF = Timeline()


def title(kind: str, about: Mapping[str, Any]) -> str:
    """What a span is called: its kind, and the layers that it is about (`read 4-7`, `layer 3`)."""
    if "layer" in about:
        return f"{kind} {about['layer']}"
    layers = about.get("layers")
    if not layers:
        return kind
    return f"{kind} {layers[0]}" if len(layers) == 1 else f"{kind} {layers[0]}-{layers[-1]}"
