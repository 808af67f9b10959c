"""Files beside the catalogue that an engine can do without: costs and the history."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gdscache.disk.catalog_file import open_own

MOST_JSON = 1 << 20  # bytes


class KeptFile:
    """Such a file of one engine, rewritten whole, under another name first. `log` gets a line for the first failure."""

    def __init__(self, path: Path, log: logging.Logger) -> None:
        self.path = path
        self._log = log
        self._new = path.with_name(f"{path.name}.new")
        self._failed = False
        with contextlib.suppress(OSError):
            self._new.unlink()  # of a killed engine

    def write(self, content: Callable[[], bytes]) -> bool:
        """Write the file; False if the disk refuses. `content` may raise `OSError`, too."""
        try:
            data = content()
            self._new.unlink(missing_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            with os.fdopen(os.open(self._new, flags, 0o600), "wb") as file:
                file.write(data)
            self._new.replace(self.path)
        except OSError as error:
            if not self._failed:
                self._log.warning("%s cannot be written: %s", self.path, error.strerror)
            self._failed = True
            return False
        return True


def read(path: Path, most: int) -> bytes:
    """A file's bytes. Raises `OSError`, `ValueError` for more than `most`, and `NotARegularFileError` for a link or a
    file with further names."""
    with open(open_own(path, os.O_RDONLY), "rb") as file:
        if os.fstat(file.fileno()).st_size > most:
            raise ValueError(f"it has more than {most:,} bytes")
        return file.read()


def read_json(path: Path) -> Any:
    """A file's content. Raises as `read`, `ValueError` for no JSON, and `RecursionError`."""
    return json.loads(read(path, MOST_JSON))
