"""Devices, streams and fences: the CUDA facts that the rest of the engine needs, with their CPU counterparts."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar, Union

import torch

from gdscache import arguments
from gdscache.errors import DeadlineError, DeviceError, InvalidValueError
from gdscache.runtime.threads import Bell

if TYPE_CHECKING:
    from gdscache.kernels.cuda import StreamPoint
    from gdscache.ranks.address import StoreMark

_T = TypeVar("_T")
# None: on a CPU-only engine all queued work is already done
Event = Union[torch.cuda.Event, "StreamPoint", "StoreMark", None]


class Landed(NamedTuple):
    """Queued copies, done when `event` is (None: they are done, or never will be). `layers`: of a load, those copied
    together."""

    event: Event
    layers: range = range(0)


def resolve_device(name: str, setting: str = "gpu.device") -> torch.device:
    """The device of `auto`, `cpu`, `cuda` or `cuda:N` on this machine. Raises `DeviceError` if there is none."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    kind, colon, number = name.partition(":")
    if name != "cpu" and (kind != "cuda" or (colon and not number.isdecimal())):
        raise DeviceError(f"{setting} is {name!r}", f"set {setting} to auto, cpu, cuda or cuda:N")
    if kind == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise DeviceError(f"{setting} is {name!r} and torch sees no CUDA device", f"set {setting} to auto or cpu")
    index = int(number) if number else torch.cuda.current_device()
    if index >= torch.cuda.device_count():
        raise DeviceError(f"{setting} is {name!r}, there are {torch.cuda.device_count()} devices", "count from 0")
    return torch.device("cuda", index)


def record(device: torch.device) -> Event:
    """An event after the work so far on the caller's current stream."""
    if device.type == "cpu":
        return None
    return record_on(torch.cuda.current_stream(device))


def given(after: object, device: torch.device) -> Event:
    """The caller's event, or, for None, one after the work so far on the current stream.

    Raises `InvalidValueError` for anything else.
    """
    if after is None:
        return record(device)
    if not isinstance(after, torch.cuda.Event):
        raise InvalidValueError(
            f"after is {arguments.shown(after)}", "pass a torch.cuda.Event, or None: the current stream's work"
        )
    return after


def record_on(stream: torch.cuda.Stream, *, sleep: bool = False) -> torch.cuda.Event:
    """An event after the work so far on a stream. `sleep`: a thread that waits for it sleeps."""
    event: torch.cuda.Event = torch.cuda.Event(blocking=sleep)  # type: ignore[no-untyped-call]
    event.record(stream)
    return event


def on_stream_of_caller(device: torch.device, work: Callable[[], _T]) -> Callable[[], _T]:
    """`work` for another thread, run there with the caller's current stream as the current one."""
    if device.type == "cpu":
        return work
    stream = torch.cuda.current_stream(device)

    def elsewhere() -> _T:
        with torch.cuda.stream(stream):
            return work()

    return elsewhere


class LayerFences:
    """A fence for each layer of a load. One writer signals each once; any thread waits."""

    __slots__ = ("_bell", "_events", "_lands", "_queued")

    def __init__(self, layers: int) -> None:
        self._queued = bytearray(layers)  # 1: the copies were signalled, done or not
        self._events: list[Event] = [None] * layers
        self._lands: Callable[[int, float], Landed | None] | None = None
        self._bell = Bell()

    def __len__(self) -> int:
        return len(self._events)

    @property
    def watched(self) -> bool:
        """Whether waiting threads ask for the copies themselves."""
        return self._lands is not None

    def queued(self, layer: int) -> bool:
        return bool(self._queued[layer])

    def watch(self, lands: Callable[[int, float], Landed | None]) -> None:
        """From now on waiting threads call `lands(layer, seconds)`. It waits until a layer's copies are queued, and
        returns the layers copied with it; None if they are not queued in time."""
        self._lands = lands
        self._bell.ring()

    def signal(self, layers: range, event: Event) -> None:
        """The copies of these layers are queued, and done when `event` is (None: now). Later signals change nothing."""
        if 0 not in self._queued[layers.start : layers.stop]:
            return
        for layer in layers:
            if not self._queued[layer]:
                self._events[layer] = event
                self._queued[layer] = 1
        self._bell.ring()

    def done(self, layer: int) -> bool:
        """Whether a layer's copies are finished; never waits."""
        if not self._queued[layer] and self._lands is not None:
            self._ask(self._lands, layer, 0.0)
        event = self._events[layer]
        return bool(self._queued[layer]) and (event is None or bool(event.query()))

    def wait(self, layer: int, limit: float | None) -> None:
        """See `Fence.wait`. `limit`: a checked number of seconds, or None."""
        event = self.event(layer, limit)
        if event is not None:
            come_after(event)

    def event(self, layer: int, limit: float | None) -> Event:
        """Wait until a layer's copies are queued. They are done when the returned event is (None: now)."""
        if not self._queued[layer]:
            self._wait_queued(layer, limit)
        return self._events[layer]

    def _wait_queued(self, layer: int, limit: float | None) -> None:
        start = time.monotonic()
        until = math.inf if limit is None else start + limit
        while True:
            bell, lands = self._bell.next, self._lands
            if self._queued[layer]:
                return
            left = max(0.0, until - time.monotonic())
            rung = bell.wait(None if limit is None else left) if lands is None else self._ask(lands, layer, left)
            if not rung and not self._queued[layer]:
                raise _late(time.monotonic() - start)

    def _ask(self, lands: Callable[[int, float], Landed | None], layer: int, seconds: float) -> bool:
        """Whether a layer's copies are queued within `seconds`."""
        landed = lands(layer, seconds)
        if landed is not None:
            self.signal(landed.layers or range(layer, layer + 1), landed.event)
        return landed is not None


class Fence:
    """Work that another thread queues and a device does later. One writer signals it once; any thread waits."""

    __slots__ = ("_work",)

    def __init__(self) -> None:
        self._work = LayerFences(1)

    def watch(self, lands: Callable[[float], Landed | None]) -> None:
        """From now on waiting threads call `lands(seconds)`, which waits until the work is queued; None if it is
        not."""
        self._work.watch(lambda _, seconds: lands(seconds))

    def signal(self, event: Event = None) -> None:
        """The work is queued, and done when `event` is (None: now). Later signals change nothing."""
        self._work.signal(range(1), event)

    def done(self) -> bool:
        """Whether the work is finished; never waits."""
        return self._work.done(0)

    def wait(self, seconds: float | None = None) -> None:
        """Order the current stream after the work: the thread waits until it is queued, the stream until it is done.

        Raises `DeadlineError` if the work is not queued within `seconds`, `InvalidValueError` for an invalid number.
        """
        self._work.wait(0, arguments.seconds(seconds))

    def synchronize(self, seconds: float | None = None) -> None:
        """Wait in the calling thread until the work is done. Raises `DeadlineError` if it is not queued in time."""
        event = self._work.event(0, arguments.seconds(seconds))
        if event is not None:
            event.synchronize()


def come_after(event: Event) -> None:
    """Order later work of the current stream after an event."""
    if isinstance(event, torch.cuda.Event):
        torch.cuda.current_stream(event.device).wait_event(event)
    elif event is not None:
        event.wait()


def _late(waited: float) -> DeadlineError:
    return DeadlineError(f"not ready after {waited:.1f} s", "raise deadline, or see stats() for the hanging work")


def events_of(after: Sequence[Event]) -> list[int]:
    """The CUevents of some events. An event that was never recorded has none, and counts as happened."""
    found = []
    for event in after:
        if event is not None:
            assert isinstance(event, torch.cuda.Event), "copies follow events of torch's"
            found.append(int(event.cuda_event))
    return [event for event in found if event]
