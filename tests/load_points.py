"""Numbered points in the work of an engine: where it may be late, where it fails, where something is done to it.

A point is (name, number): the `number`-th time that the place `name` was reached. The names are those of `install`.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from gdscache import CacheEngine
from gdscache.errors import IOFailedError
from gdscache.loading import LayerwiseLoad

Point = tuple[str, int]


class InjectedError(RuntimeError):
    """What a part of the engine raises on order."""


# Where an error may come from outside: a copy, a read, a checksum, the catalogue, memory when a load is planned.
FAILING: dict[str, Callable[[], Exception]] = {
    **dict.fromkeys(
        ("plan", "read", "scatter", "verdict", "mark", "gather", "gathered"), lambda: InjectedError("injected")
    ),
    "catalogue": lambda: IOFailedError("injected", "no hint"),
}


class Points:
    """Counts the points that are reached while it is on.

    At each the thread is late, with probability `rate` and by `seconds` at most, drawn from `seed` and the point. At
    `at`, `act` is called, in the thread that is there; `error` makes the point raise what its place can raise.
    `reached` says whether `at` was.
    """

    def __init__(
        self,
        seed: int,
        rate: float = 0.0,
        seconds: float = 0.0,
        at: Point | None = None,
        act: Callable[[], None] | None = None,
        *,
        error: bool = False,
    ) -> None:
        self.seed, self.rate, self.seconds = seed, rate, seconds
        self.at, self.act, self.error = at, act, error
        self.on = False
        self.reached = False
        self.counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def reach(self, name: str) -> None:
        if not self.on:
            return
        with self._lock:
            point = name, self.counts[name]
            self.counts[name] += 1
        draw = random.Random(f"{self.seed}/{name}/{point[1]}")
        if draw.random() < self.rate:
            time.sleep(draw.uniform(0.0, self.seconds))
        if point == self.at:
            self.reached = True
            if self.act is not None:
                self.act()
            if self.error:
                raise FAILING[name]()

    def all(self) -> list[Point]:
        """Every point that was reached."""
        return [(name, number) for name, n in sorted(self.counts.items()) for number in range(n)]

    # -- where they are ----------------------------------------------------------------------------------------------

    def before(self, owner: Any, method: str, name: str) -> None:
        """`name` is reached whenever `owner.method` is called."""
        inner = getattr(owner, method)

        def call(*args: Any, **options: Any) -> Any:
            self.reach(name)
            return inner(*args, **options)

        setattr(owner, method, call)

    def after(self, owner: Any, method: str, name: str) -> None:
        """`name` is reached whenever `owner.method` has returned."""
        inner = getattr(owner, method)

        def call(*args: Any, **options: Any) -> Any:
            result = inner(*args, **options)
            self.reach(name)
            return result

        setattr(owner, method, call)

    def install(self, engine: CacheEngine) -> None:
        """Put points into the parts of an engine, and of the loads that begin from now on."""
        parts = engine._parts
        manager, mover = parts.manager, parts.mover
        self.before(manager, "plan_load", "plan")
        self.after(manager, "plan_load", "planned")
        self.before(manager, "plan_prefetch", "prefetch")
        self.before(manager, "await_filling", "await")
        self.before(manager, "finish_pages", "publish")
        self.after(manager, "finish_pages", "published")
        self.before(manager, "end", "end")
        self._sums(mover, "scatter", "verdict")
        self._sums(mover, "gather", "gathered")
        self.before(mover, "scatter", "scatter")
        self.after(mover, "scatter", "scattered")
        self.before(mover, "mark_loads", "mark")
        self.before(mover, "gather", "gather")
        if parts.bounce is not None:
            self.before(parts.bounce.loads, "take", "bounce")
            self.before(parts.bounce.loads, "try_take", "bounce")
        if manager.ssd is not None:
            self.before(manager.ssd, "read", "read")
            self.after(manager.ssd, "read", "reading")
            self.before(parts.executor, "_write", "write")
            self.before(manager.ssd._catalog, "commit", "catalogue")
            self.before(manager.ssd, "commit_deletions", "deletions")
            self.after(manager.ssd, "commit", "committed")
        self.after(parts.loader, "_submit", "submitted")
        make = parts.loader._run

        def made(load: LayerwiseLoad, *args: Any, **options: Any) -> Any:
            self.before(load, "signal", "signal")
            return make(load, *args, **options)

        parts.loader._run = made  # type: ignore[method-assign]

    def _sums(self, mover: Any, method: str, name: str) -> None:
        """`name` is reached when the checksums of a copy are asked for."""
        inner = getattr(mover, method)

        def call(*args: Any, **options: Any) -> Any:
            moved = inner(*args, **options)
            digests = moved._digests

            def asked() -> Any:
                self.reach(name)
                return digests()

            moved._digests = asked
            return moved

        setattr(mover, method, call)
