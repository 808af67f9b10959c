"""Changes of an inference engine's weights at run time that it does not report to its cache.

The methods that write weights are wrapped, from the first watch on and for the process's life, because a cache opened
later must know earlier changes. Pages after a change have a random salt (`fresh_salt`): pages of the old weights are
not found. A restart begins with the files' weights and does not find pages of the new ones.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from gdscache.errors import WeightUpdatesUnsupportedError

_RECORD = "_gdscache_calls"  # of a wrapped method
_lock = threading.Lock()


class CallWatch(Protocol):
    """A listener to calls of a method."""

    def tell(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, begun: bool) -> None:
        """A call begins, or has ended (then `begun` is set)."""


class _Calls:
    """The calls of one method, since it was wrapped."""

    def __init__(self, *, from_start: bool) -> None:
        self.from_start = from_start  # whether it was wrapped before its first call
        self.touched = 0  # when the last call began or ended, as of `time.monotonic_ns`; 0: never
        self.watches: list[CallWatch] = []

    def told(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, begun: bool) -> None:
        self.touched = time.monotonic_ns()
        for watch in list(self.watches):
            watch.tell(name, args, kwargs, begun=begun)


class WeightWatch:
    """Calls `changed(name)` before and after each call of a weight-writing method of the class `updater`, until
    `close`.

    `from_start`: none of the methods can have been called yet; a class's first watch decides it for later ones. Raises
    `WeightUpdatesUnsupportedError` if the class lacks a method: changes would be unknown.
    """

    def __init__(
        self,
        updater: type[Any],
        methods: Sequence[str],
        changed: Callable[[str], object],
        *,
        from_start: bool = True,
    ) -> None:
        self._changed = changed
        self._calls = _watched(updater, methods, self, from_start=from_start)

    @property
    def complete(self) -> bool:
        """Whether all calls in this process are known."""
        return all(calls.from_start for calls in self._calls.values())

    def last(self, *names: str) -> int:
        """The time of the last call of these methods (none named: of all), as of `time.monotonic_ns`. 0: never. Calls
        before this watch count, if the class was watched."""
        return max(calls.touched for name, calls in self._calls.items() if not names or name in names)

    def close(self) -> None:
        _unwatched(self._calls.values(), self)

    def tell(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, begun: bool) -> None:
        self._changed(name)


class MethodWatch:
    """Calls `ended(args, kwargs)` after each call of a method of a class, and `begins` before it; until `close`. Raises
    `WeightUpdatesUnsupportedError` if the class has no such method."""

    def __init__(
        self,
        owner: type[Any],
        method: str,
        ended: Callable[[tuple[Any, ...], Mapping[str, Any]], object],
        begins: Callable[[tuple[Any, ...], Mapping[str, Any]], object] = lambda args, kwargs: None,
    ) -> None:
        self._begins, self._ended = begins, ended
        self._calls = _watched(owner, (method,), self, from_start=True)

    def close(self) -> None:
        _unwatched(self._calls.values(), self)

    def tell(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, begun: bool) -> None:
        (self._ended if begun else self._begins)(args, kwargs)


class ExecutorWatch:
    """Watches named method calls of workers in other processes: a class with `collective_rpc`, whose first argument is
    the name, and `shutdown`.

    `changed(name)` is called before and after each call of one of `methods`, and `ending(executor)` before the workers
    end; until `close`. `mine(executor)`: whether an object of the class is the watched one. Raises
    `WeightUpdatesUnsupportedError` unless the class has both methods.
    """

    def __init__(
        self,
        executor: type[Any],
        methods: Sequence[str],
        mine: Callable[[Any], bool],
        changed: Callable[[str], object],
        ending: Callable[[Any], object],
    ) -> None:
        self._methods = frozenset(methods)
        self._mine = mine
        self._changed = changed
        self._ending = ending
        self._calls = _watched(executor, ("collective_rpc", "shutdown"), self, from_start=True)

    def close(self) -> None:
        _unwatched(self._calls.values(), self)

    def tell(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, begun: bool) -> None:
        if name == "shutdown":
            if not begun and self._mine(args[0]):
                self._ending(args[0])
            return
        method = kwargs["method"] if "method" in kwargs else args[1]
        if isinstance(method, str) and method in self._methods and self._mine(args[0]):
            self._changed(method)


def _watched(owner: type[Any], methods: Sequence[str], watch: CallWatch, *, from_start: bool) -> dict[str, _Calls]:
    """Have a watch told of the calls of these methods of a class. Raises `WeightUpdatesUnsupportedError`."""
    missing = [name for name in methods if not callable(getattr(owner, name, None))]
    if missing:
        raise WeightUpdatesUnsupportedError(
            f"{owner.__module__}.{owner.__name__} has no {', '.join(missing)}: a change of weights would go "
            "unnoticed, and pages of the old ones would be served",
            "use a version of the inference engine that was tried: docs/vllm.md, docs/sglang.md",
        )
    with _lock:
        found = {name: _calls_of(owner, name, from_start=from_start) for name in methods}
        for calls in found.values():
            calls.watches.append(watch)
    return found


def _unwatched(found: Iterable[_Calls], watch: CallWatch) -> None:
    with _lock:
        for calls in found:
            if watch in calls.watches:
                calls.watches.remove(watch)


def _calls_of(updater: type[Any], name: str, *, from_start: bool) -> _Calls:
    """The record of a method, which is wrapped the first time."""
    method = getattr(updater, name)
    found: _Calls | None = getattr(method, _RECORD, None)
    if found is not None:
        return found
    calls = _Calls(from_start=from_start)

    @functools.wraps(method)
    def told(*args: Any, **kwargs: Any) -> Any:
        calls.told(name, args, kwargs, begun=False)
        try:
            return method(*args, **kwargs)
        finally:
            calls.told(name, args, kwargs, begun=True)

    setattr(told, _RECORD, calls)
    setattr(updater, name, told)
    return calls
