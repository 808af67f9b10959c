"""`gdscache inspect`: the contents of a cache directory, in use or not."""

from __future__ import annotations

import dataclasses
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gdscache.commands.inspect.names import made_of
from gdscache.commands.inspect.owner import Owner, find_owner
from gdscache.commands.inspect.reading import (
    Contents,
    at_rest,
    existing,
    has_log,
    os_errors,
    read,
    slab_directories,
)
from gdscache.config.pools import PLAIN_DIRECTORY
from gdscache.disk import kept_file, status_page
from gdscache.disk.catalog_file import CATALOG_NAME, SIDECARS, SUSPECT_NAME, kept_aside
from gdscache.disk.catalog_image import Progress
from gdscache.disk.recovery import Recovered
from gdscache.disk.slab import slab_files
from gdscache.disk.status_page import OtherFormat, Status
from gdscache.pages.layout import PLAIN

SCHEMA = "gdscache.inspect/5"
_SAID = (
    *("live", "status_format", "format_version", "created", "extent_bytes", "shards", "slots", "pages", "bytes"),
    *("free_slots", "unusable_rows", "retention", "namespaces"),
)
_NEVER = -(1 << 63)  # below any use
LOG_NAME = f"{CATALOG_NAME}-wal"  # an engine's commits since its last checkpoint


def inspect(directory: Path, progress: Progress = lambda done, total, text: None) -> dict[str, Any]:
    """The contents of `directory`'s catalogue and slab, as plain data; sizes in bytes.

    Takes no lock and writes nothing. A directory in use is described by its owner's status page (`live`; for a page of
    another format only `status_format`) and by the last namespace descriptions. Then these are None: `bytes`,
    `unusable_rows`, `retention`, `created`, and a namespace's `pages` and `bytes`. `made_of` has a line for each fact.

    `progress(done, total, text)` counts the catalogue's bytes. Raises `NotADirectoryPathError`, `NotARegularFileError`,
    `CatalogVersionError`, `IOFailedError` (missing, unreadable, corrupt or steadily changing files).
    """
    directory = existing(directory)

    def look(last: bool) -> dict[str, Any] | None:
        owner, status = find_owner(directory, catalog_open=has_log(directory)), _read_status(directory)
        fresh = isinstance(status, Status) and status.age < status_page.FRESH_S
        if owner.state == "in use" or (owner.state == "unknown" and fresh):
            return _live(directory, owner, status)
        contents = read(directory, progress, last=last)
        return None if contents is None else _still(directory, owner, contents)

    return at_rest(directory, look)


def _read_status(directory: Path) -> Status | OtherFormat | None:
    """The status page of a directory. One of pages that do not fit into packed extents has none of its own: that of the
    directory above says its sizes, too."""
    status = status_page.read(directory)
    if status is not None or directory.name != PLAIN_DIRECTORY:
        return status
    above = status_page.read(directory.parent)
    if not isinstance(above, Status):
        return above
    for tier in above.figures.tiers:
        if tier.name == f"ssd{PLAIN}":
            sizes: dict[str, Any] = tier._asdict() | {"extent_bytes": above.figures.plain_extent_bytes}
            sizes["free_slots"] = sizes["slots"] - sizes["pages"]
            del sizes["name"]
            return dataclasses.replace(above, figures=dataclasses.replace(above.figures, **sizes))
    return None


def _common(directory: Path, owner: Owner, slab_files: Sequence[tuple[Path, int]]) -> dict[str, Any]:
    """The facts of any directory. Facts only of a directory in use, or only of one without an owner, are None."""
    files = [(file.name, size) for file, size in slab_files[:1]]
    files += [(name, _size(directory / name)) for name in (CATALOG_NAME, LOG_NAME) if (directory / name).exists()]
    return {
        "schema": SCHEMA,
        "path": str(directory),
        "owner": dataclasses.asdict(owner),
        **dict.fromkeys(_SAID),
        "suspect": os.path.lexists(directory / SUSPECT_NAME),
        "capacity_bytes": sum(size for _, size in slab_files),
        "files": [{"name": name, "bytes": size} for name, size in files],
        "stripes": [{"path": str(file.parent), "name": file.name, "bytes": size} for file, size in slab_files],
        "set_aside": _set_aside(directory),
    }


def _live(directory: Path, owner: Owner, status: Status | OtherFormat | None) -> dict[str, Any]:
    """The status page's content, and the sizes of files, which need no owner."""
    shards = status.figures.shards if isinstance(status, Status) else 1
    files = slab_files(slab_directories(directory), range(shards))
    common = _common(directory, owner, [(file, _size(file)) for file in files])
    last = reversed(kept_file.read_namespaces(directory).items())
    common["namespaces"] = [_namespace(digest, fields, None, None) for digest, fields in last]
    if status is None:
        return common
    if isinstance(status, OtherFormat):
        return common | {"status_format": status.format}
    page = status.figures
    names = ("format_version", "extent_bytes", "shards", "slots", "pages", "free_slots")
    figures = {name: getattr(page, name) for name in names}
    return common | {"live": describe_status(status), "status_format": status.format, **figures}


def describe_status(status: Status) -> dict[str, Any]:
    """A status page as plain data. Counts are totals since the engine was opened."""
    figures = status.figures
    counts: dict[str, Any] = {}
    for (group, name), n in figures.counts.items():
        if name:
            counts.setdefault(group, {})[name] = n
        else:
            counts[group] = n
    return {
        "pid": status.pid,
        "host": status.host,
        "command": status.command,
        "opened": status.opened,
        "written": status.written,
        "age_seconds": status.age,
        "number": status.number,
        "state": figures.state,
        "stopped": figures.stopped or None,
        "evictions": figures.evictions,
        "late_requests": figures.late_requests,
        "counts": counts,
        "causes": _by_group(status),
        "latencies": {
            what: {"samples": found.samples, "median_seconds": found.median, "p99_seconds": found.slow}
            for what, found in figures.latencies.items()
        },
        "groups": figures.groups or None,
        "queues": figures.queues._asdict(),
        "tiers": [tier._asdict() | {"extent_bytes": figures.extent_of(tier.name)} for tier in figures.tiers],
        "slowest_loads": [load._asdict() for load in figures.slowest],
        "ranks": [{"rank": number, "pid": rank.pid, "state": rank.state} for number, rank in enumerate(figures.ranks)],
    }


def _by_group(status: Status) -> dict[str, dict[str, int]]:
    groups: dict[str, dict[str, int]] = {group: {} for group in status_page.CAUSED}
    for (group, cause), count in status.causes.items():
        groups.setdefault(group, {})[cause] = count
    return groups


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


def _still(directory: Path, owner: Owner, contents: Contents) -> dict[str, Any]:
    """The catalogue's content, for a directory without an owner."""
    slab, pages = contents.slab, contents.pages
    return _common(directory, owner, list(zip(slab.files, contents.slab_bytes, strict=True))) | {
        "format_version": contents.version,
        "created": contents.created,
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
    }


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
        sizes = int(mine.sum()), int(pages.lengths[mine].sum())
        found.append((used, _namespace(digest, namespace.fields, *sizes)))
    return [told for _, told in sorted(found, key=lambda one: -one[0])]


def _namespace(
    digest: bytes, fields: Mapping[str, Any] | None, pages: int | None, nbytes: int | None
) -> dict[str, Any]:
    lines = None if fields is None else made_of(fields)
    return {"digest": digest.hex(), "fields": fields, "made_of": lines, "pages": pages, "bytes": nbytes}
