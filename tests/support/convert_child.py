"""Opens copies of a catalogue, each in a fork of its own that kills itself at one statement of SQLite's. No torch."""

from __future__ import annotations

import importlib.util
import os
import signal
import sqlite3
import sys
import types
from pathlib import Path
from typing import Any

PACKAGE = "gdscache"


def without_torch() -> None:
    """The package without its `__init__`: what keeps the catalogue needs no torch."""
    spec = importlib.util.find_spec(PACKAGE)
    assert spec is not None
    module = types.ModuleType(PACKAGE)
    module.__path__ = list(spec.submodule_search_locations or ())
    sys.modules[PACKAGE] = module


def open_until(path: Path, extent_bytes: int, last: int) -> None:
    """Open a catalogue; die before statement `last` of it, or right away when there are fewer."""
    from gdscache.disk import catalog_file
    from gdscache.disk import conversion as catalog_conversion
    from gdscache.disk.catalog import Catalog

    count = 0

    def trace(_: str) -> None:
        nonlocal count
        count += 1
        if count > last:
            os.kill(os.getpid(), signal.SIGKILL)

    connect = catalog_file._connect

    def traced(*args: Any) -> sqlite3.Connection:
        connection = connect(*args)
        connection.set_trace_callback(trace)
        return connection

    catalog_file._connect = traced
    catalog_file.WAL_PAGES = 4  # checkpoints often: a kill must find some
    catalog_conversion.STEP_ROWS = 5
    Catalog.open(path, extent_bytes=extent_bytes, durability="process").close()


def main() -> None:
    """`extent_bytes`, then pairs of a directory and the statement to die at. Prints the signal or status of each."""
    without_torch()
    extent_bytes, *pairs = sys.argv[1:]
    for path, last in zip(pairs[::2], pairs[1::2], strict=True):
        child = os.fork()
        if not child:
            open_until(Path(path), int(extent_bytes), int(last))
            os._exit(0)
        print(os.waitpid(child, 0)[1], flush=True)


if __name__ == "__main__":
    main()
