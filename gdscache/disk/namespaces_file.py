"""`namespaces.json`: the fields of a directory's namespaces, for people who inspect one in use.

The catalogue has the same, but is not read while an engine has it open. The file has no digests: they follow from the
fields.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gdscache.disk.kept_file import KeptFile, read_json
from gdscache.errors import StorageError
from gdscache.pages.keys import namespace_digest

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
        self._before = read(directory)
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


def read(directory: Path) -> dict[bytes, Fields]:
    """Digest → fields of each namespace; empty if the file is missing, or of another version."""
    try:
        found: Any = read_json(directory / NAMES_NAME)
        if found["version"] != _VERSION:
            return {}
        return {namespace_digest(fields): fields for fields in found["namespaces"] if isinstance(fields, dict)}
    except (OSError, ValueError, RecursionError, KeyError, TypeError, StorageError):
        return {}
