"""Pauses of the garbage collector."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Pause the collector for code that makes many lasting objects, or objects freed by their last reference. A
    collection would search all of them and free none. Reference cycles stay until a later collection."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
