"""Python threads beside a measurement: an inference engine has such threads, and they take the interpreter's lock."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Literal, Self, TypeVar

Kind = Literal["drawn", "busy"]
_T = TypeVar("_T")
LABELS: dict[Kind, str] = {"drawn": "3 ms of Python in 8 to 18", "busy": "Python without pause"}
BESIDE_TARGETS: dict[Kind, float] = {"drawn": 0.96, "busy": 0.55}  # least share of the speed alone
_PYTHON_S = 0.003
_IDLE_S = (0.005, 0.015)
_STRIDE = 500  # additions between readings of the clock: some 20 us


class Neighbour:
    """Such a thread, for the duration of the `with` block. `drawn`: its idle times are random."""

    def __init__(self, kind: Kind) -> None:
        self._kind = kind
        self._over = False
        self._rounds = 0
        self._thread = threading.Thread(target=self._run, name="gdscache-bench-neighbour")

    def _run(self) -> None:
        draw = random.Random(1)
        while not self._over:
            until = time.perf_counter() + _PYTHON_S
            while time.perf_counter() < until:
                for _ in range(_STRIDE):
                    pass
                self._rounds += 1
            if self._kind == "drawn":
                time.sleep(draw.uniform(*_IDLE_S))

    @property
    def progress(self) -> float:
        """Rounds a second over the whole block."""
        return self._rounds / self._seconds

    def __enter__(self) -> Self:
        self._start = time.perf_counter()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over = True
        self._thread.join()
        self._seconds = time.perf_counter() - self._start


def beside(kind: Kind, action: Callable[[], _T]) -> Callable[[], _T]:
    """The action with such a thread beside it."""

    def run() -> _T:
        with Neighbour(kind):
            return action()

    return run
