"""When an inference engine's weights change while it runs, and it does not tell its cache.

The methods that write weights are wrapped, for as long as somebody listens. What is cached from then on has a salt that
is drawn at random (`fresh_salt`): pages of the old weights are not found, and those of the new weights are not found
after a restart, which begins with the weights of the files again.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

from gdscache.errors import WeightUpdatesUnsupportedError

_lock = threading.Lock()


class WeightWatch:
    """Calls `changed(name)` before and behind each method of `updater`, a class, that writes weights; until `close`.

    Raises `WeightUpdatesUnsupportedError` where the class has not all of them: then it cannot be known.
    """

    def __init__(self, updater: type[Any], methods: Sequence[str], changed: Callable[[str], object]) -> None:
        missing = [name for name in methods if not callable(getattr(updater, name, None))]
        if missing:
            raise WeightUpdatesUnsupportedError(
                f"{updater.__module__}.{updater.__name__} has no {', '.join(missing)}: a change of weights would go "
                "unnoticed, and pages of the old ones would be served",
                "use a version of the inference engine that was tried: docs/vllm.md, docs/sglang.md",
            )
        self._updater = updater
        self._changed = changed
        self._methods = tuple(methods)
        with _lock:
            for name in self._methods:
                _listeners(updater, name).append(self)

    def close(self) -> None:
        """Listen no more; the last who does gives the methods back. Twice is fine."""
        with _lock:
            for name in self._methods:
                method: Any = self._updater.__dict__.get(name)
                listening = getattr(method, "_gdscache_listeners", [])
                if self in listening:
                    listening.remove(self)
                    if not listening:
                        setattr(self._updater, name, method.__wrapped__)

    def tell(self, name: str) -> None:
        """The weights change, or have changed, by the method of that name."""
        self._changed(name)


def _listeners(updater: type[Any], name: str) -> list[WeightWatch]:
    """Who listens to a method, which is wrapped for the first of them."""
    method = getattr(updater, name)
    found: list[WeightWatch] | None = getattr(method, "_gdscache_listeners", None)
    if found is not None:
        return found
    listening: list[WeightWatch] = []

    @functools.wraps(method)
    def told(*args: Any, **kwargs: Any) -> Any:
        for watch in listening:
            watch.tell(name)
        try:
            return method(*args, **kwargs)
        finally:
            for watch in listening:
                watch.tell(name)

    told._gdscache_listeners = listening  # type: ignore[attr-defined]
    setattr(updater, name, told)
    return listening
