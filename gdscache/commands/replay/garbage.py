"""When the garbage collector does not run."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """For what makes many objects that stay, or go with their last reference: a collection would look at all of them,
    again and again, and find nothing. What refers to itself stays, until somebody collects it."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
