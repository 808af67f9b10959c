"""Everything that reaches the SSD's directory, on a tape: what was written, when it was flushed, what was committed.

`transport: power_recorder:RecordingTransport` in a configuration records the slab, `recording()` the catalogue.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from gdscache.config.pools import PLAIN_DIRECTORY
from gdscache.disk import catalog_file, slab
from gdscache.disk.catalog import Catalog
from gdscache.storage.base import Memory
from tests.support.kill_record import Log
from tests.support.posix_transport import PosixTransport

FULL = 2  # PRAGMA synchronous: a commit that returned is on the disk
SMALL_WAL = 24  # pages of log after which SQLite copies it into the catalogue: that happens within a tape, too
FILES = (catalog_file.CATALOG_NAME, catalog_file.CATALOG_NAME + "-wal")  # -shm is made anew at every open


class Opened(NamedTuple):
    """A slab file of that size, preallocated."""

    file: str
    nbytes: int


class Claimed(NamedTuple):
    """Directory `number` of a striped slab says what it is. The file was flushed."""

    number: int
    content: bytes


class WriteBegun(NamedTuple):
    number: int
    file: str
    parts: tuple[tuple[int, bytes], ...]  # offset, bytes


class WriteEnded(NamedTuple):
    number: int


class FlushBegun(NamedTuple):
    number: int
    file: str


class FlushEnded(NamedTuple):
    number: int


class CommitBegun(NamedTuple):
    """A catalogue is written to from here to the next `Committed`; two of these never overlap."""

    place: str  # the catalogue's directory below the first one; "" for that one


class Committed(NamedTuple):
    """The catalogue's files, its keys, and whether SQLite had flushed all that before it returned."""

    place: str
    files: dict[str, bytes]
    keys: frozenset[bytes]
    durable: bool


class Said(NamedTuple):
    """A line of the workload's log: what it was about to do, had done, or was told by the engine."""

    line: bytes


Event = Opened | Claimed | WriteBegun | WriteEnded | FlushBegun | FlushEnded | CommitBegun | Committed | Said


class Tape:
    """Events in the order in which they happened. Thread-safe."""

    def __init__(self) -> None:
        self.catalogue = threading.RLock()  # held while the catalogue changes
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        self.events: list[Event] = []
        self.changing = False
        self._numbers = itertools.count()

    def add(self, event: Event) -> None:
        with self._lock:
            self.events.append(event)

    def number(self) -> int:
        return next(self._numbers)


TAPE = Tape()


class TapeLog(Log):
    def __init__(self) -> None:
        self._numbers = itertools.count()

    def close(self) -> None: ...

    def _write(self, *values: object) -> None:
        TAPE.add(Said(json.dumps(values).encode() + b"\n"))


def place_of(directory: Path) -> str:
    """The directory of plain pages, below that of packed ones; "" for any other."""
    return PLAIN_DIRECTORY if directory.name == PLAIN_DIRECTORY else ""


def name_of(path: Path) -> str:
    """The name of a slab's file below its directory of packed pages."""
    return str(Path(place_of(path.parent), path.name))


class RecordingTransport(PosixTransport):
    name = "recording"

    def open(self, path: Path) -> int:
        file = super().open(path)
        TAPE.add(Opened(name_of(path), path.stat().st_size))
        return file

    def write(self, file: int, offset: int, memory: Memory) -> int:
        number = TAPE.number()
        TAPE.add(WriteBegun(number, name_of(Path(self.path(file))), ((offset, bytes(memory)),)))
        moved = super().write(file, offset, memory)
        TAPE.add(WriteEnded(number))
        return moved

    def flush(self, file: int) -> None:
        number = TAPE.number()
        TAPE.add(FlushBegun(number, name_of(Path(self.path(file)))))
        super().flush(file)
        TAPE.add(FlushEnded(number))


class ForgetfulTransport(RecordingTransport):
    """A transport that never flushes, and says that it did."""

    def flush(self, file: int) -> None: ...


@contextlib.contextmanager
def recording() -> Iterator[Tape]:
    """Record the catalogue, too, on an empty tape."""
    TAPE.reset()
    with contextlib.ExitStack() as patches:
        for name in ("_connect", "recover", "clean", "commit", "close"):
            patches.enter_context(mock.patch.object(Catalog, name, _recorded(name, getattr(Catalog, name))))
        patches.enter_context(mock.patch.object(catalog_file, "WAL_PAGES", SMALL_WAL))
        patches.enter_context(mock.patch.object(slab, "write_stripe", _claimed(slab.write_stripe)))
        yield TAPE


def _claimed(original: Callable[[Path, slab.Stripe], None]) -> Callable[[Path, slab.Stripe], None]:
    def write(directory: Path, stripe: slab.Stripe) -> None:
        original(directory, stripe)
        TAPE.add(Claimed(stripe.number, (directory / catalog_file.STRIPE_NAME).read_bytes()))

    return write


def _recorded(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def method(catalog: Catalog, *arguments: Any, **options: Any) -> Any:
        with TAPE.catalogue:
            if TAPE.changing:  # called by one of the others
                return original(catalog, *arguments, **options)
            TAPE.changing = True
            try:
                TAPE.add(CommitBegun(place_of(catalog.path.parent)))
                keys = frozenset(catalog.rows().values()) if name == "close" and catalog._reader else frozenset()
                answer = original(catalog, *arguments, **options)
                TAPE.add(_committed(catalog, name, keys))
            finally:
                TAPE.changing = False
            return answer

    return method


def _committed(catalog: Catalog, name: str, keys: frozenset[bytes]) -> Committed:
    paths = [catalog.path.with_name(file) for file in FILES]
    place = place_of(catalog.path.parent)
    files = {path.name: path.read_bytes() for path in paths if path.exists()}
    if name == "close":  # SQLite has copied its log into the catalogue, and flushes both for that
        return Committed(place, files, keys, True)
    synchronous = catalog._writer.execute("PRAGMA synchronous").fetchone()[0]
    return Committed(place, files, frozenset(catalog.rows().values()), name == "_connect" or synchronous >= FULL)
