"""Files beside the catalogue that an engine can do without: costs, the history, and the fields of its namespaces.

The catalogue has these fields, too, but is not read while an engine has it open: `namespaces.json` is for people who
inspect a directory in use. It has no digests, since they follow from the fields.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gdscache.disk.catalog_file import open_own
from gdscache.errors import StorageError
from gdscache.pages.keys import namespace_digest

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


NAMES_NAME = "namespaces.json"
_VERSION = 1
_KEPT = 32  # the last described namespaces
_log = logging.getLogger("gdscache.ssd")

Fields = Mapping[str, object]


class NamespacesFile:
    """The file of one engine. `own`: the fields of the engine's namespace without a request's salt."""

    def __init__(self, directory: Path, own: Fields) -> None:
        self._file = KeptFile(directory / NAMES_NAME, _log)
        self._own = own
        self._before = read_namespaces(directory)
        self._written = -1

    def save(self, described: dict[bytes, dict[str, object]]) -> None:
        """Write the engine's own namespace and those `described` so far, if any are new. Never raises an error of the
        disk."""
        if len(described) == self._written:
            return
        new: dict[bytes, Fields] = {namespace_digest(self._own): self._own, **described.copy()}
        found = [fields for digest, fields in self._before.items() if digest not in new]
        last = [*found, *new.values()][-_KEPT:]
        if self._file.write(lambda: json.dumps({"version": _VERSION, "namespaces": last}).encode()):
            self._written = len(described)


def read_namespaces(directory: Path) -> dict[bytes, Fields]:
    """Digest → fields of each namespace; empty if the file is missing, or of another version."""
    try:
        found: Any = read_json(directory / NAMES_NAME)
        some = [fields for fields in found["namespaces"] if isinstance(fields, dict)]
        return {namespace_digest(fields): fields for fields in some if found["version"] == _VERSION}
    except (OSError, ValueError, RecursionError, KeyError, TypeError, StorageError):
        return {}
