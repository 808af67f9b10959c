"""`gdscache inspect`: the contents of a cache directory, in use or not."""

from __future__ import annotations

import dataclasses
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from gdscache.commands.inspect.owner import LOG_NAME, find_owner
from gdscache.commands.inspect.reading import Contents, existing, os_errors, read
from gdscache.commands.inspect.tables import made_of
from gdscache.disk.catalog import Recovered
from gdscache.disk.catalog_file import CATALOG_NAME, SIDECARS, Progress, kept_aside

SCHEMA = "gdscache.inspect/6"
_NEVER = -(1 << 63)  # below any use


def inspect(directory: Path, progress: Progress = lambda done, total, text: None) -> dict[str, Any]:
    """The contents of `directory`'s catalogue and slab, as plain data; sizes in bytes. `made_of` has a line for each
    fact of a namespace.

    Takes no lock and writes nothing. Of a directory in use these are the contents as of the last commits.
    `progress(done, total, text)` counts the catalogue's bytes. Raises `NotADirectoryPathError`, `NotARegularFileError`,
    `CatalogVersionError`, `IOFailedError` (missing, unreadable, corrupt or steadily changing files).
    """
    directory = existing(directory)
    owner = find_owner(directory)
    contents = read(directory, progress)
    slab, pages, sizes = contents.slab, contents.pages, contents.slab_bytes
    present = [name for name in (CATALOG_NAME, LOG_NAME) if (directory / name).exists()]
    files = [(slab.files[0].name, sizes[0]), *((name, _size(directory / name)) for name in present)]
    return {
        "schema": SCHEMA,
        "path": str(directory),
        "owner": dataclasses.asdict(owner),
        "format_version": contents.version,
        "created": contents.created,
        "suspect": contents.suspect,
        "extent_bytes": slab.extent_bytes,
        "shards": slab.shards,
        "slots": slab.slots,
        "capacity_bytes": slab.nbytes,
        "pages": len(pages),
        "bytes": int(pages.lengths.sum()),
        "free_slots": slab.slots - len(pages),
        "unusable_rows": dict(pages.dropped),
        "retention": _retention(pages),
        "namespaces": _namespaces(contents),
        "files": [{"name": name, "bytes": size} for name, size in files],
        "stripes": [
            {"path": str(file.parent), "name": file.name, "bytes": size}
            for file, size in zip(slab.files, sizes, strict=True)
        ],
        "set_aside": _set_aside(directory),
    }


def _set_aside(directory: Path) -> list[dict[str, Any]]:
    """The corrupt catalogues that were set aside, the oldest first, with their logs' bytes."""
    with os_errors(directory):
        return [
            {"name": path.name, "bytes": sum(_size(Path(f"{path}{suffix}")) for suffix in ("", *SIDECARS))}
            for path in kept_aside(directory)
        ]


def _size(path: Path) -> int:
    try:
        return os.lstat(path).st_size
    except OSError:
        return 0


def _retention(pages: Recovered) -> dict[str, Any]:
    """Pages by priority, the pages with an expiry, and the expired ones, which the next engine drops."""
    priorities = Counter(pages.priorities.tolist())
    priorities[0] += len(pages) - len(pages.retained)
    return {
        "priorities": {str(priority): n for priority, n in sorted(priorities.items()) if n},
        "expiring_pages": int(np.isfinite(pages.expires).sum()),
        "expired_pages": int((pages.expires <= time.time()).sum()),
    }


def _namespaces(contents: Contents) -> list[dict[str, Any]]:
    """Each namespace, the most recently used first; those without pages last."""
    pages = contents.pages
    found: list[tuple[int, dict[str, Any]]] = []
    for digest, namespace in contents.names.items():
        number = pages.digests.index(digest) if digest in pages.digests else -1
        mine = pages.namespaces == number
        used = int(pages.recency[mine].max()) if mine.any() else _NEVER
        fields = namespace.fields
        told = {
            "digest": digest.hex(),
            "fields": fields,
            "made_of": None if fields is None else made_of(fields),
            "pages": int(mine.sum()),
            "bytes": int(pages.lengths[mine].sum()),
        }
        found.append((used, told))
    return [told for _, told in sorted(found, key=lambda one: -one[0])]
