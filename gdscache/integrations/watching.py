"""Calls of an inference engine's methods that it does not report to its cache, above all those that write its weights.

A watched method is wrapped, from the first watch on and for the process's life, because a cache opened later must know
earlier changes. Pages after a change have a random salt (`fresh_salt`): pages of the old weights are not found. A
restart begins with the files' weights and does not find pages of the new ones.
"""

from __future__ import annotations

import functools
import inspect
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from gdscache.errors import WeightUpdatesUnsupportedError
from gdscache.runtime.threads import in_turn

Listener = Callable[[str, tuple[Any, ...], Mapping[str, Any]], object]  # of a method's name and its call's arguments
_RECORD = "_gdscache_calls"  # of a wrapped method
_lock = threading.Lock()


class _Calls:
    """The calls of one method, since it was wrapped."""

    def __init__(self, *, from_start: bool) -> None:
        self.from_start = from_start  # whether it was wrapped before its first call
        self.touched = 0  # when the last call began or ended, as of `time.monotonic_ns`; 0: never
        self.watches: list[CallWatch] = []


class CallWatch:
    """Calls `before` and `after` around each call of these methods of a class, until `close`. An error of `before`
    keeps the call from being made; the other watches are told all the same. `also`: methods of other classes, whose
    names are others.

    `from_start`: none of the methods can have been called yet; a class's first watch decides it for later ones. Raises
    `WeightUpdatesUnsupportedError` if the class lacks a method: changes would be unknown.
    """

    def __init__(
        self,
        owner: type[Any],
        methods: Sequence[str],
        before: Listener | None = None,
        after: Listener | None = None,
        *,
        also: Mapping[type[Any], Sequence[str]] = MappingProxyType({}),
        from_start: bool = True,
    ) -> None:
        watched = [(owner, methods), *also.items()]
        for kind, names in watched:
            missing = [name for name in names if not callable(getattr(kind, name, None))]
            if missing:
                raise WeightUpdatesUnsupportedError(
                    f"{kind.__module__}.{kind.__name__} has no {', '.join(missing)}: a change of weights would go "
                    "unnoticed, and pages of the old ones would be served",
                    "use a version of the inference engine that was tried: docs/vllm.md, docs/sglang.md",
                )
        self.before, self.after = before, after
        with _lock:
            self._calls = {
                name: _calls_of(kind, name, from_start=from_start) for kind, names in watched for name in names
            }
            for calls in self._calls.values():
                calls.watches.append(self)

    @property
    def complete(self) -> bool:
        """Whether all calls in this process are known."""
        return all(calls.from_start for calls in self._calls.values())

    def last(self, *names: str) -> int:
        """The time of the last call of these methods (none named: of all), as of `time.monotonic_ns`. 0: never. Calls
        before this watch count, if the class was watched."""
        return max(calls.touched for name, calls in self._calls.items() if not names or name in names)

    def close(self) -> None:
        with _lock:
            for calls in self._calls.values():
                if self in calls.watches:
                    calls.watches.remove(self)


class ExecutorWatch(CallWatch):
    """Watches named method calls of workers in other processes: a class with `collective_rpc`, whose first argument is
    the name, and `shutdown`.

    `changed(name)` is called before and after each call of one of `methods`, and `ending(executor)` before the workers
    end. `mine(executor)`: whether an object of the class is the watched one.
    """

    def __init__(
        self,
        executor: type[Any],
        methods: Sequence[str],
        mine: Callable[[Any], bool],
        changed: Callable[[str], object],
        ending: Callable[[Any], object],
    ) -> None:
        def called(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            if name == "collective_rpc":
                method = kwargs["method"] if "method" in kwargs else args[1]
                if isinstance(method, str) and method in methods and mine(args[0]):
                    changed(method)

        def begins(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            called(name, args, kwargs)
            if name == "shutdown" and mine(args[0]):
                ending(args[0])

        super().__init__(executor, ("collective_rpc", "shutdown"), begins, called)


def _calls_of(owner: type[Any], name: str, *, from_start: bool) -> _Calls:
    """The record of a method, which is wrapped the first time."""
    method = getattr(owner, name)
    found: _Calls | None = getattr(method, _RECORD, None)
    if found is not None:
        return found
    calls = _Calls(from_start=from_start)

    def tell(listeners: list[Listener | None], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        calls.touched = time.monotonic_ns()
        in_turn(*(functools.partial(listener, name, args, kwargs) for listener in listeners if listener is not None))

    @functools.wraps(method)
    def told(*args: Any, **kwargs: Any) -> Any:
        tell([watch.before for watch in [*calls.watches]], args, kwargs)
        try:
            return method(*args, **kwargs)
        finally:
            tell([watch.after for watch in [*calls.watches]], args, kwargs)

    setattr(told, _RECORD, calls)
    static = isinstance(inspect.getattr_static(owner, name), staticmethod)
    setattr(owner, name, staticmethod(told) if static else told)
    return calls
