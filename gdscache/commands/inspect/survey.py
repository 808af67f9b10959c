"""`gdscache inspect`: what lies in a cache directory, whether somebody uses it or not."""

from __future__ import annotations

import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from gdscache.commands.inspect.owner import Owner, find_owner
from gdscache.commands.inspect.reading import (
    ATTEMPTS,
    PAUSE,
    Contents,
    existing,
    has_log,
    os_errors,
    read_once,
    slab_directories,
)
from gdscache.disk import status_page
from gdscache.disk.catalog_file import CATALOG_NAME, SIDECARS, SUSPECT_NAME, kept_aside
from gdscache.disk.slab import slab_name
from gdscache.disk.status_page import Status
from gdscache.errors import IOFailedError

SCHEMA = "gdscache.inspect/2"
LOG_NAME = f"{CATALOG_NAME}-wal"  # what a running or killed engine committed and has not folded in


def inspect(directory: Path) -> dict[str, Any]:
    """What the catalogue and the slab of `directory` say, as plain data; sizes in bytes.

    Takes no lock of the directory and writes nothing. Of a directory in use it says what the owner's status page says
    (`live`); what that does not have is None then: `bytes`, `unusable_rows`, `recency`, `retention`, `namespaces`,
    `fragmentation`, `created`. Raises `NotADirectoryPathError`, `NotARegularFileError`, `CatalogVersionError`,
    `IOFailedError` (missing, unreadable or corrupt files, or files that change all the time).
    """
    directory = existing(directory)
    for attempt in range(ATTEMPTS):
        owner, status = find_owner(directory, catalog_open=has_log(directory)), status_page.read(directory)
        fresh = status is not None and status.age < status_page.FRESH_S
        if owner.state == "in use" or (owner.state == "unknown" and fresh):
            return _live(directory, owner, status)
        contents = read_once(directory, last=attempt == ATTEMPTS - 1)
        if contents is not None:
            return _still(directory, owner, contents)
        time.sleep(PAUSE)
    raise IOFailedError(f"{directory} changes all the time", "look again when fewer engines open and close it")


def _common(directory: Path, owner: Owner) -> dict[str, Any]:
    return {"schema": SCHEMA, "path": str(directory), "owner": owner.describe(), "set_aside": _set_aside(directory)}


def _live(directory: Path, owner: Owner, status: Status | None) -> dict[str, Any]:
    """What the status page says; the sizes of files, which need no owner."""
    figures = None if status is None else status.figures
    log = _log_bytes(directory)
    places = [(where, slab_name(number)) for number, where in enumerate(slab_directories(directory))]
    files = [(where / name, _size(where / name)) for where, name in places]
    return _common(directory, owner) | {
        "live": None if status is None else _told(status),
        "format_version": None if figures is None else figures.format_version,
        "created": None,
        "suspect": os.path.lexists(directory / SUSPECT_NAME),
        "extent_bytes": None if figures is None else figures.extent_bytes,
        "slots": None if figures is None else figures.slots,
        "capacity_bytes": sum(size for _, size in files),
        "pages": None if figures is None else figures.pages,
        "bytes": None,
        "free_slots": None if figures is None else figures.free_slots,
        "unusable_rows": None,
        "recency": None,
        "retention": None,
        "files": [
            {"name": files[0][0].name, "bytes": files[0][1]},
            {"name": CATALOG_NAME, "bytes": _size(directory / CATALOG_NAME)},
            *([] if log is None else [{"name": LOG_NAME, "bytes": log}]),
        ],
        "stripes": [{"path": str(file.parent), "name": file.name, "bytes": size} for file, size in files],
        "namespaces": None,
        "fragmentation": None,
    }


def _told(status: Status) -> dict[str, Any]:
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
    }


def _set_aside(directory: Path) -> list[dict[str, Any]]:
    """The catalogues that were set aside as corrupt, the oldest first, with their logs' bytes."""
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
    """What the catalogue says of a directory that nobody uses."""
    slab, log = contents.slab, _log_bytes(directory)
    sound = contents.sound
    recency = contents.recency[sound]
    return _common(directory, owner) | {
        "live": None,
        "format_version": contents.version,
        "unbound_from_slot": contents.bound_slots,
        "created": contents.created,
        "suspect": contents.suspect,
        "extent_bytes": slab.extent_bytes,
        "slots": slab.slots,
        "capacity_bytes": slab.nbytes,
        "pages": len(sound),
        "bytes": int(contents.lengths[sound].sum()),
        "free_slots": slab.slots - len(sound),
        "unusable_rows": dict(Counter(contents.faults.values())),
        "recency": _span(recency),
        "retention": _retention(contents),
        "files": [
            {"name": slab.path.name, "bytes": contents.slab_bytes[0]},
            {"name": CATALOG_NAME, "bytes": contents.catalog_bytes},
            *([] if log is None else [{"name": LOG_NAME, "bytes": log}]),
        ],
        "stripes": [
            {"path": str(file.parent), "name": file.name, "bytes": size}
            for file, size in zip(slab.files, contents.slab_bytes, strict=True)
        ],
        "namespaces": _namespaces(contents),
        "fragmentation": _fragmentation(contents),
    }


def _log_bytes(directory: Path) -> int | None:
    try:
        return os.lstat(directory / LOG_NAME).st_size
    except OSError:
        return None


def _retention(contents: Contents) -> dict[str, Any]:
    """Sound pages by priority, how many of them expire, and how many have: the next engine drops those."""
    known = [contents.retentions.get(slot, (0, None)) for slot in contents.slots[contents.sound].tolist()]
    ends = [expires for _, expires in known if expires is not None]
    now = time.time()
    return {
        "priorities": {str(priority): n for priority, n in sorted(Counter(p for p, _ in known).items())},
        "expiring_pages": len(ends),
        "expired_pages": sum(end <= now for end in ends),
    }


def _namespaces(contents: Contents) -> list[dict[str, Any]]:
    """Each namespace, the most recently used first; those without pages last."""
    sound = contents.sound
    order = sound[np.argsort(contents.namespaces[sound], kind="stable")]
    ids, starts = np.unique(contents.namespaces[order], return_index=True)
    rows = dict(zip(ids.tolist(), np.split(order, starts[1:]), strict=True)) if len(order) else {}
    empty = sound[:0]
    found = []
    for name, namespace in contents.names.items():
        mine = rows.get(name, empty)
        found.append(
            {
                "digest": namespace.digest.hex(),
                "fields": namespace.fields,
                "pages": len(mine),
                "bytes": int(contents.lengths[mine].sum()),
                "recency": _span(contents.recency[mine]),
            }
        )
    return sorted(found, key=lambda n: (n["recency"] is None, -n["recency"]["last"] if n["recency"] else 0))


def _span(recency: Any) -> dict[str, int] | None:
    return {"first": int(recency.min()), "last": int(recency.max())} if len(recency) else None


def _fragmentation(contents: Contents) -> dict[str, Any]:
    """Runs of free slots; how many pages whose parent is in the slab lie right behind or before it; and stretches: of
    pages that follow each other in their chain and in the slab, which one read takes."""
    sound, total = contents.sound, contents.slab.slots
    slots = contents.slots[sound]
    gaps = np.diff(np.concatenate(([-1], slots, [total]))) - 1
    runs = gaps[gaps > 0]
    at = {contents.keys[row]: int(contents.slots[row]) for row in sound.tolist()}
    parents = [(int(contents.slots[row]), at.get(contents.parents[row])) for row in sound.tolist()]
    followed = [(slot, parent) for slot, parent in parents if parent is not None]
    beside = sum(abs(slot - parent) == 1 for slot, parent in followed)
    behind = sum(slot - parent == 1 for slot, parent in followed)
    return {
        "free_runs": len(runs),
        "longest_free_run": int(runs.max()) if len(runs) else 0,
        "median_free_run": float(np.median(runs)) if len(runs) else 0.0,
        "pages_with_parent": len(followed),
        "beside_parent": beside,
        "beside_parent_share": beside / len(followed) if followed else None,
        "chain_stretches": len(sound) - behind,
        "pages_per_stretch": len(sound) / (len(sound) - behind) if len(sound) else None,
    }
