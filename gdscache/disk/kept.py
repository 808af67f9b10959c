"""Files beside the catalogue that an engine can do without.

`costs.json` has the measured costs, so that the gate decides after a restart as before; figures that cannot be read, or
are of another model, device or disk, are left out. `history` has the pages that a directory's engines have probably
evicted, or found bad, for `gdscache explain`; docs/format.md has it byte by byte.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import struct
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import xxhash

from gdscache.disk.catalog_file import open_own
from gdscache.errors import StorageError
from gdscache.gate.costs import Costs, Observations
from gdscache.limits import KEY_BYTES, MAX_SECONDS
from gdscache.policies.admission import RecentCounter

MOST_JSON = 1 << 20  # bytes
_log = logging.getLogger("gdscache.disk.kept")


class KeptFile:
    """Such a file of one engine, rewritten whole, under another name first. The first failure is logged. `owned`:
    whether the directory is the engine's; else nothing in it is touched."""

    def __init__(self, path: Path, owned: Callable[[], bool]) -> None:
        self.path = path
        self._owned = owned
        self._new = path.with_name(f"{path.name}.new")
        self._failed = False
        with contextlib.suppress(OSError):
            self._new.unlink()  # of a killed engine

    def write(self, content: Callable[[], bytes]) -> bool:
        """Write the file; False if the disk refuses, or the directory is not owned any more. `content` may raise
        `OSError`, too."""
        try:
            data = content()
            if not self._owned():
                return False
            self._new.unlink(missing_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            with os.fdopen(os.open(self._new, flags, 0o600), "wb") as file:
                file.write(data)
            if not self._owned():  # a write may take long, and this name is the next owner's by now
                return False
            self._new.replace(self.path)
        except OSError as error:
            if not self._failed:
                _log.warning("%s cannot be written: %s", self.path, error.strerror)
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


_SEAL = struct.Struct("<8sQII")  # magic, XXH3-64 of all behind it, format, bytes of the JSON that follows
_SEALED = 16  # bytes before the sealed ones
HEAD_BYTES = _SEAL.size


def sealed(magic: bytes, format: int, text: bytes, rest: bytes = b"") -> bytes:
    """A head, JSON, and what follows it, under a checksum: the form of `history` and of the status page."""
    whole = struct.pack("<II", format, len(text)) + text + rest
    return magic + struct.pack("<Q", xxhash.xxh3_64_intdigest(whole)) + whole


def unsealed(magic: bytes, data: bytes, most: int) -> tuple[int, bytes, bytes]:
    """The format, the JSON, of `most` bytes at most, and what follows it. Raises `ValueError` for other bytes."""
    if len(data) < HEAD_BYTES:
        raise ValueError("too short")
    found, digest, format, length = _SEAL.unpack_from(data)
    if found != magic or length > most:
        raise ValueError("not of this form")
    if xxhash.xxh3_64_intdigest(memoryview(data)[_SEALED:]) != digest:
        raise ValueError("its checksum is wrong")
    return format, data[HEAD_BYTES : HEAD_BYTES + length], data[HEAD_BYTES + length :]


COSTS_NAME = "costs.json"
_VERSION = 1
_MOST, _SHORTEST_S = 1 << 50, 1e-9  # most bytes or tokens, and fewest seconds, of an observation


class CostsFile:
    """The file of one engine. `about`: model and device, which prefills depend on."""

    def __init__(
        self, directory: Path, costs: Costs, about: Mapping[str, str], owned: Callable[[], bool] = lambda: True
    ) -> None:
        self._file = KeptFile(directory / COSTS_NAME, owned)
        self._costs = costs
        self._about = dict(about)
        self._written: Any = None

    def restore(self) -> None:
        """Take the figures of an earlier engine, as far as they hold for this one."""
        if not (found := self._read()):
            return
        if found.get("about") == self._about:
            self._costs.restore_prefills(_observations(found.get("prefills"), 3))
        tiers = found.get("tiers")
        if found.get("disk") == self._disk() and isinstance(tiers, dict):
            for name, rows in list(tiers.items())[:16]:
                self._costs.restore_loads(name, _observations(rows, 2))
        self._written = self._costs.observations()

    def save(self) -> None:
        """Write the figures, if they are new. Never raises an error of the disk."""
        prefills, tiers = now = self._costs.observations()
        if now == self._written or not (prefills or tiers):
            return
        content = {"version": _VERSION, "about": self._about, "prefills": prefills, "tiers": tiers}
        if self._file.write(lambda: json.dumps({**content, "disk": self._disk()}).encode()):
            self._written = now

    def _read(self) -> dict[str, Any]:
        path = self._file.path
        try:
            found = read_json(path)
            if isinstance(found, dict) and found.get("version") == _VERSION:
                return found
            _log.warning("%s is left out: it is of another version", path)
        except FileNotFoundError:
            pass
        except (OSError, ValueError, RecursionError, StorageError) as error:
            _log.warning("%s is left out: %s", path, error)
        return {}

    def _disk(self) -> int:
        return self._file.path.parent.stat().st_dev


def _observations(found: object, columns: int) -> Observations:
    """The plausible rows: features as `Costs` makes them (tokens or bytes first, 1 last), and seconds."""
    rows: Observations = []
    for row in found[-64:] if isinstance(found, list) else ():
        if not (isinstance(row, list) and len(row) == 2 and isinstance(row[0], list) and len(row[0]) == columns):
            continue
        numbers = [*row[0], row[1]]
        if not all(type(x) in (int, float) and 0 <= x < 1e30 for x in numbers):
            continue
        if not (1 <= numbers[0] <= _MOST and min(row[0]) >= 0.5 and row[0][-1] == 1):  # half a pair of tokens
            continue
        if _SHORTEST_S <= row[1] <= MAX_SECONDS:
            rows.append((tuple(map(float, row[0])), float(row[1])))
    return rows


HISTORY_NAME = "history"
MAGIC = b"gdschist"
FORMAT = 1
BAD_KEPT = 1024  # the last pages that were found bad
MOST_BYTES = 1 << 32
_MOST_HEAD = 1 << 20  # bytes of its JSON
_LEAST_S = 60.0  # seconds between two writes,
_PACE = 100e3  # and most bytes a second


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

    def __init__(
        self,
        directory: Path,
        evicted: RecentCounter,
        bad: dict[bytes, BadPage],
        owned: Callable[[], bool] = lambda: True,
    ) -> None:
        self._file = KeptFile(directory / HISTORY_NAME, owned)
        self._evicted, self._bad = evicted, bad
        self._saved = time.monotonic()
        self._written = self._news()
        self._hurry = False

    def restore(self) -> None:
        """Go on from an earlier engine's file, if its filter has the same size."""
        found = read_history(self._file.path.parent)
        if found is None:
            return
        self._bad.update(found.bad)
        self._evicted.take_over(found.evicted)
        self._written = self._news()

    def _news(self) -> tuple[int, list[tuple[bytes, BadPage]]]:
        return self._evicted.added, list(dict(self._bad).items())

    def hurry(self) -> None:
        self._hurry = True

    def save(self) -> None:
        """Write the file if it has news, and not too often. Never raises an error of the disk."""
        now, new = time.monotonic(), self._news()
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
    return sealed(MAGIC, FORMAT, json.dumps(head).encode(), b"".join(filters))


def unpack(data: bytes) -> History:
    """The history in the bytes. Raises `ValueError`, `KeyError`, `TypeError` or `RecursionError` for other bytes."""
    format_, text, rest = unsealed(MAGIC, data, _MOST_HEAD)
    if format_ != FORMAT:
        raise ValueError("not of this format")
    head: dict[str, Any] = json.loads(text)
    half = len(rest) // 2
    evicted = RecentCounter.load(int(head["period"]), int(head["added"]), [rest[:half], rest[half:]])
    bad = {}
    for key, tier, cause, slot, place, when in head["bad"][-BAD_KEPT:]:
        if len(digits := bytes.fromhex(key)) != KEY_BYTES:
            raise ValueError("a key of another size")
        bad[digits] = BadPage(str(tier), str(cause), int(slot), str(place), float(when))
    return History(evicted, bad, float(head["written"]))


def read_history(directory: Path) -> History | None:
    try:
        return unpack(read(directory / HISTORY_NAME, MOST_BYTES))
    except (OSError, ValueError, RecursionError, KeyError, TypeError, OverflowError, StorageError):
        return None
