"""Refuse an unsupported setup of vLLM before it loads weights.

vLLM makes its connectors after the workers have their weights, in processes whose errors it reports in its own lines.
Before, it calls `Executor.get_class(config)` in the operator's process. No connector exists then, but its module has
been imported: so that method is wrapped.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def refuse_at_start(executor: type[Any], refuse: Callable[[Any], object]) -> None:
    """Call `refuse(config)`, which may raise, before each `executor.get_class(config)`. Repeated calls are fine."""
    method = executor.get_class
    if getattr(method, "_gdscache_refuses", False):
        return

    @functools.wraps(method)
    def asked(config: Any) -> Any:
        refuse(config)
        return method(config)

    asked._gdscache_refuses = True  # type: ignore[attr-defined]
    executor.get_class = staticmethod(asked)
