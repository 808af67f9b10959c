"""What refuses a setup of vLLM before weights are loaded.

vLLM makes its connectors when the workers have their weights, in processes whose errors it reports by lines of its own.
Before it starts them it asks `Executor.get_class(config)`, in the process that an operator sees. No connector is asked
by then, but this one has been imported. So that method is wrapped. Nothing of vLLM is imported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def refuse_at_start(executor: type[Any], refuse: Callable[[Any], object]) -> None:
    """Have `refuse(config)`, which may raise, called before each `executor.get_class(config)`. Again is fine."""
    method = executor.get_class
    if getattr(method, "_gdscache_refuses", False):
        return

    @functools.wraps(method)
    def asked(config: Any) -> Any:
        refuse(config)
        return method(config)

    asked._gdscache_refuses = True  # type: ignore[attr-defined]
    executor.get_class = staticmethod(asked)
