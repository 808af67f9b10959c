"""Small JSON files beside the catalogue, which an engine can do without.

Each is rewritten whole, under another name first.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from gdscache.disk.catalog_file import own_file

MOST_BYTES = 1 << 20


def new_name(path: Path) -> Path:
    return path.with_name(f"{path.name}.new")


def forget_torn(path: Path) -> None:
    with contextlib.suppress(OSError):
        new_name(path).unlink()


def read(path: Path) -> Any:
    """The file's content. Raises `OSError`, `ValueError` (no JSON, or more than `MOST_BYTES`), `RecursionError`, and
    `NotARegularFileError` for a link or a file with further names."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)) as file:
        own_file(path, os.fstat(file.fileno()))
        text = file.read(MOST_BYTES + 1)
    if len(text) > MOST_BYTES:
        raise ValueError(f"it has more than {MOST_BYTES:,} bytes")
    return json.loads(text)


def write(path: Path, content: object) -> None:
    new = new_name(path)
    new.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(new, flags, 0o600), "w") as file:
        json.dump(content, file)
    new.replace(path)
