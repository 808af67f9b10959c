"""`history`: the pages that a directory's engines have probably evicted, or found bad; for `gdscache explain`.

Engines keep it across restarts, and do without it if it is lost. docs/format.md has it byte by byte.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from gdscache.disk import kept_file
from gdscache.errors import StorageError
from gdscache.limits import KEY_BYTES
from gdscache.policies.sketch import RecentCounter

HISTORY_NAME = "history"
MAGIC = b"gdschist"
FORMAT = 1
BAD_KEPT = 1024  # the last pages that were found bad
MOST_BYTES = 1 << 32
_HEAD = struct.Struct("<8sQII")
_HEAD_BYTES = 1 << 20  # most bytes of the JSON after it
_LEAST_S = 60.0  # seconds between two writes,
_PACE = 100e3  # and most bytes a second
_log = logging.getLogger("gdscache.ssd")


@dataclasses.dataclass(frozen=True, slots=True)
class BadPage:
    """A page whose bytes were bad. `at`: seconds since 1970-01-01 UTC."""

    tier: str
    cause: str
    slot: int
    place: str
    at: float


@dataclasses.dataclass(frozen=True, slots=True)
class History:
    """`evicted`: keys of the pages evicted last, and some others; `bad`: by key. `written`: seconds since 1970-01-01
    UTC."""

    evicted: RecentCounter
    bad: Mapping[bytes, BadPage]
    written: float


class HistoryFile:
    """The file of one engine. `evicted` and `bad` are the engine's, and grow; no lock of the engine is taken here."""

    def __init__(self, directory: Path, evicted: RecentCounter, bad: dict[bytes, BadPage]) -> None:
        self._file = kept_file.KeptFile(directory / HISTORY_NAME, _log)
        self._evicted, self._bad = evicted, bad
        self._saved = time.monotonic()
        self._written = evicted.added, len(bad)
        self._hurry = False

    def restore(self) -> None:
        """Go on from an earlier engine's file, if its filter has the same size."""
        found = read(self._file.path.parent)
        if found is None:
            return
        self._bad.update(found.bad)
        self._evicted.take_over(found.evicted)
        self._written = self._evicted.added, len(self._bad)

    def hurry(self) -> None:
        self._hurry = True

    def save(self) -> None:
        """Write the file if it has news, and not too often. Never raises an error of the disk."""
        now, new = time.monotonic(), (self._evicted.added, len(self._bad))
        if new == self._written or not (
            self._hurry or now - self._saved >= max(_LEAST_S, self._evicted.nbytes / _PACE)
        ):
            return
        if self._file.write(lambda: pack(History(self._evicted, dict(self._bad), time.time()))):
            self._saved, self._written = now, new


def pack(history: History) -> bytes:
    period, added, filters = history.evicted.dump()
    bad = [[key.hex(), *dataclasses.astuple(page)] for key, page in list(history.bad.items())[-BAD_KEPT:]]
    head = {"period": period, "added": added, "written": history.written, "bad": bad}
    text = json.dumps(head).encode()
    rest = struct.pack("<II", FORMAT, len(text)) + text + b"".join(filters)
    return MAGIC + struct.pack("<Q", xxhash.xxh3_64_intdigest(rest)) + rest


def unpack(data: bytes) -> History:
    """The history in the bytes. Raises `ValueError`, `KeyError`, `TypeError` or `RecursionError` for other bytes."""
    if len(data) < _HEAD.size:
        raise ValueError("too short")
    magic, digest, format_, length = _HEAD.unpack_from(data)
    if magic != MAGIC or format_ != FORMAT or length > _HEAD_BYTES:
        raise ValueError("not of this format")
    if xxhash.xxh3_64_intdigest(memoryview(data)[16:]) != digest:
        raise ValueError("its checksum is wrong")
    at = _HEAD.size + length
    head: dict[str, Any] = json.loads(data[_HEAD.size : at])
    rest = data[at:]
    half = len(rest) // 2
    evicted = RecentCounter.load(int(head["period"]), int(head["added"]), [rest[:half], rest[half:]])
    bad = {}
    for key, tier, cause, slot, place, when in head["bad"][-BAD_KEPT:]:
        if len(digits := bytes.fromhex(key)) != KEY_BYTES:
            raise ValueError("a key of another size")
        bad[digits] = BadPage(str(tier), str(cause), int(slot), str(place), float(when))
    return History(evicted, bad, float(head["written"]))


def read(directory: Path) -> History | None:
    try:
        return unpack(kept_file.read(directory / HISTORY_NAME, MOST_BYTES))
    except (OSError, ValueError, RecursionError, KeyError, TypeError, OverflowError, StorageError):
        return None
