"""What a loss of power may leave of a directory, made from a tape.

What was written and flushed is there. What was written since the last flush is there, or not, or in part, sector by
sector and in any order. The catalogue is as its last durable commit left it, or later; of a commit under way there is
nothing, all, or any part that SQLite can have on the disk by then.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

from gdscache.disk.catalog_file import STRIPE_NAME
from gdscache.disk.slab import slab_name
from tests.support.power_recorder import (
    FILES,
    Claimed,
    CommitBegun,
    Committed,
    Event,
    FlushBegun,
    FlushEnded,
    Opened,
    Said,
    WriteBegun,
    WriteEnded,
)

DISK_SECTOR = 512
WAL_HEADER = 32
CATALOG, WAL = FILES


def stripe_of(directory: Path, number: int) -> Path:
    """Directory `number` of a slab whose first is `directory`."""
    return directory.with_name(f"{directory.name}-stripe-{number}") if number else directory


def restore(
    events: Sequence[Event], cut: int, directory: Path, rng: random.Random, stripes: int = 0
) -> frozenset[bytes]:
    """Make `directory`, and the further `stripes`, as a loss of power after the first `cut` events may leave them.

    Returns the keys that the catalogues have in every state that they may be in: what nobody may lose.
    """
    for number in range(1 + stripes):
        stripe_of(directory, number).mkdir(mode=0o700)
    catalogues = sorted({event.place for event in events[:cut] if isinstance(event, CommitBegun)})
    for place in filter(None, catalogues):
        (directory / place).mkdir(mode=0o700)
    places = {slab_name(number): stripe_of(directory, number) for number in range(1 + stripes)}
    for event in events[:cut]:
        if isinstance(event, Claimed):
            (stripe_of(directory, event.number) / STRIPE_NAME).write_bytes(event.content)
    for name, content in _slabs(events[:cut], rng).items():
        (places[Path(name).name] / name).write_bytes(content)
    keys = frozenset[bytes]()
    for place in catalogues:
        files, own = _catalogue(events, cut, rng, place)
        keys |= own
        for name, content in files.items():
            (directory / place / name).write_bytes(content)
    return keys


def log_of(events: Sequence[Event], path: Path) -> Path:
    """The workload's log up to here, for `Record.replay`."""
    path.write_bytes(b"".join(event.line for event in events if isinstance(event, Said)))
    return path


def moments(events: Sequence[Event]) -> tuple[Sequence[int], ...]:
    """Cuts anywhere; right after something happened to the disk; right after pages were acknowledged; after a clear."""
    said = {at: json.loads(event.line)[0] for at, event in enumerate(events, 1) if isinstance(event, Said)}
    disk = [at for at in range(1, len(events) + 1) if at not in said]
    kept, cleared = ([at for at, what in said.items() if what == wanted] for wanted in ("kept", "cleared"))
    return range(len(events) + 1), disk, kept, cleared


def _slabs(events: Sequence[Event], rng: random.Random) -> dict[str, bytes]:
    flushed: dict[str, bytearray] = {}
    sizes: dict[str, int] = {}
    since: dict[int, WriteBegun] = {}  # writes that no flush covers, by number, in their order
    ended: set[int] = set()
    flushes: dict[int, list[int]] = {}
    safe: set[str] = set()  # files of which a flush has ended: their size stays, too
    for event in events:
        match event:
            case Opened(file, nbytes):
                sizes[file] = nbytes
                image = flushed.setdefault(file, bytearray(nbytes))
                image.extend(bytes(max(nbytes - len(image), 0)))
            case WriteBegun(number):
                since[number] = event
            case WriteEnded(number):
                ended.add(number)
            case FlushBegun(number, file):
                flushes[number] = [n for n, write in since.items() if n in ended and write.file == file]
            case FlushEnded(number):
                for done in flushes.pop(number):
                    if done in since:
                        write = since.pop(done)
                        safe.add(write.file)
                        for offset, data in write.parts:
                            flushed[write.file][offset : offset + len(data)] = data
    parts = [(write.file, offset, data) for write in since.values() for offset, data in write.parts]
    rng.shuffle(parts)
    fate = rng.random()
    for file, offset, data in parts:
        if fate < 0.2:
            continue  # all of them are lost
        image = flushed[file]
        old = bytes(image[offset : offset + len(data)])
        image[offset : offset + len(data)] = data if fate < 0.4 else _mix(old, data, rng)
    for file, image in flushed.items():
        if file not in safe and fate > 0.9:
            del image[rng.randrange(sizes[file] + 1) :]
    return {file: bytes(image) for file, image in flushed.items()}


def _catalogue(
    events: Sequence[Event], cut: int, rng: random.Random, place: str
) -> tuple[dict[str, bytes], frozenset[bytes]]:
    states = [Committed(place, {}, frozenset(), True)]  # those that the disk may hold, the oldest first
    changing = False
    for event in events[:cut]:
        if isinstance(event, CommitBegun) and event.place == place:
            changing = True
        elif isinstance(event, Committed) and event.place == place:
            changing = False
            states = [event] if event.durable else [*states, event]
    latest = states[-1]  # of the commits that returned: what the engine counts on
    files = rng.choice(states).files
    if not changing:
        return files, latest.keys
    following = next((event for event in events[cut:] if isinstance(event, Committed) and event.place == place), latest)
    if len(states) == 1:
        files = _under_way(latest.files, following.files, rng)
    return files, latest.keys & following.keys


def _under_way(old: dict[str, bytes], new: dict[str, bytes], rng: random.Random) -> dict[str, bytes]:
    """SQLite writes its log, flushes it, then copies the log into the catalogue, flushes that, and begins a new log."""
    fate = rng.random()
    if fate < 0.25 or not new:
        return old
    if fate < 0.5 or CATALOG not in old:
        return new
    before, after = old.get(WAL, b""), new.get(WAL, b"")
    if fate < 0.75 and before and (not after or after[:WAL_HEADER] == before[:WAL_HEADER]):
        # The log is whole, and its copy into the catalogue under way.
        return {CATALOG: _mix(old[CATALOG], new[CATALOG], rng), WAL: after or before}
    if not after:
        return old
    mixed = _mix(before, after, rng)
    if after[:WAL_HEADER] != before[:WAL_HEADER]:  # a new log: its head is flushed before the rest is written
        mixed = after[:DISK_SECTOR] + mixed[DISK_SECTOR:]
    return {CATALOG: old[CATALOG], WAL: mixed}


def _mix(old: bytes, new: bytes, rng: random.Random) -> bytes:
    """Each sector from one or the other: none new, all, a first part, or any."""
    size = max(len(old), len(new))
    sectors = -(-size // DISK_SECTOR)
    share = rng.choice([0.0, 1.0, rng.random()])
    first = rng.randrange(sectors + 1) if sectors and rng.random() < 0.4 else None
    mixed = bytearray(old.ljust(size, b"\0"))
    for sector in range(sectors):
        if sector < first if first is not None else rng.random() < share:
            at = sector * DISK_SECTOR
            mixed[at : at + DISK_SECTOR] = new[at : at + DISK_SECTOR].ljust(min(DISK_SECTOR, size - at), b"\0")
    return bytes(mixed)
