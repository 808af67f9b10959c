"""What is fuzzed: every format that an engine reads from its directory, and a page of a shared pool with its trailer.

A target is given bytes, makes what a reader would find out of them, and lets the reader of the engine have it. Anything
may come of that but what `BreachError` names, or an exception that is none of the engine's own.

Bytes that are most often refused by a checksum or by SQLite before they reach the reader are given as edits of a whole
file (`Source.edits`), and some of them with checksums that are right again.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import shutil
import sqlite3
import struct
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import get_args
from unittest import mock

import numpy as np
import xxhash

from gdscache.disk import catalog_file, directory, kept, slab, status_page
from gdscache.disk.catalog import Catalog, PageRecord, Recovered
from gdscache.disk.kept import COSTS_NAME
from gdscache.disk.status_page import SlowLoad, Summary
from gdscache.errors import GdsCacheError
from gdscache.index.index import PageIndex
from gdscache.mooncake.tier import TRAILER_BYTES, is_stored, trailer
from gdscache.pages.checksum import bound, layer_checksums
from gdscache.pages.keys import Page
from gdscache.policies import POLICIES
from gdscache.policies.admission import RecentCounter
from gdscache.tiers.fates import LEAST, PageFates
from gdscache.tiers.ssd import _retentions
from tests.support.disk_parts import COLUMNS, opened, served, store, sums_of
from tests.support.fuzz_base import Seeds, Target, require
from tests.support.helpers import MHA, layout_of
from tests.support.places import ROOT

NOW = 1_800_000_000.0
SLOTS, EXTENT, LAYERS = 24, 8192, 3
FIELDS: dict[str, object] = {"model": "tiny", "salt": '{"adapter": "a"}', "planes": [{"name": "k", "shape": [4, 32]}]}
LARGE = 17 << 20  # more than SQLite may read


class Source:
    """Bytes from the front of an input; zeros behind its end."""

    def __init__(self, data: bytes) -> None:
        self.rest = data

    def take(self, count: int) -> bytes:
        taken, self.rest = self.rest[:count], self.rest[count:]
        return taken.ljust(count, b"\0")

    def number(self, size: int = 1) -> int:
        return int.from_bytes(self.take(size), "little")

    def some(self) -> bytes:
        """So many bytes as the next one says, or those there are."""
        count = self.number()
        taken, self.rest = self.rest[:count], self.rest[count:]
        return taken

    def edits(self, whole: bytes, places: Sequence[int]) -> bytes:
        """A file with some of its bytes overwritten, from one of `places` on each, and perhaps cut or lengthened."""
        image = bytearray(whole)
        cut = self.number()
        while self.rest:
            at = int(places[self.number(2) % len(places)])
            new = self.take(1 + self.number() % 8)
            image[at : at + len(new)] = new
        if cut < 64:
            del image[len(image) * (64 - cut) // 64 if cut else len(image) :]
        elif cut > 250:
            image += bytes(255 - cut) * 512
        return bytes(image)


class _Strict(logging.Handler):
    """What is logged can be written down."""

    def emit(self, record: logging.LogRecord) -> None:
        record.getMessage().encode()


def strict_logs() -> None:
    """Log nowhere, but make the text of every message."""
    logger = logging.getLogger("gdscache")
    logger.propagate = False
    logger.handlers = [_Strict()]


# JSON


def _history(data: bytes, folder: Path) -> None:
    path = folder / kept.HISTORY_NAME
    path.write_bytes(data)
    found = kept.read_history(folder)
    if found is not None:
        require(kept.unpack(kept.pack(found)).bad == found.bad, "what was read is not what is written")
        require(found.evicted.nbytes <= len(data), "a filter larger than its file")
    fates = PageFates(LEAST)
    mine = kept.HistoryFile(folder, fates.evicted, fates.bad)
    mine.restore()
    fates.evict([bytes(32)])
    fates.bring_in()
    require(fates.told(bytes(32)).cause in ("evicted", "bad"), "an evicted page is forgotten")
    mine.hurry()
    mine.save()
    require(kept.read_history(folder) is not None, "it is not written anew")


def _history_seeds(folder: Path) -> Seeds:
    evicted, bad = RecentCounter(64), {bytes(32): kept.BadPage("ssd", "checksum", 3, "/dir", 1.0)}
    for n in range(9):
        evicted.add(bytes([n]) * 32)
    whole = kept.pack(kept.History(evicted, bad, 2.0))
    return [
        whole,
        whole[:40],
        *(_signed(whole[16:].replace(a, b, 1)) for a, b in ((b'"bad"', b'"bax"'), (b"1.0", b"1e9"))),
    ]


def _signed(rest: bytes) -> bytes:
    return kept.MAGIC + struct.pack("<Q", xxhash.xxh3_64_intdigest(rest)) + rest


def _stripe(data: bytes, folder: Path) -> None:
    (folder / catalog_file.STRIPE_NAME).write_bytes(data)
    with contextlib.suppress(GdsCacheError):
        found = slab.read_stripe(folder)
        require(found is not None and found.directories, "an identity is there")
        for name in found.directories if found else ():
            with contextlib.suppress(OSError):
                os.stat(name)
    others = [folder, folder / "b"]
    others[1].mkdir()
    for directories in (others[:1], others):
        with contextlib.suppress(GdsCacheError):
            slab.claim_stripes(directories)
            names = tuple(map(str, directories))
            told = [slab.read_stripe(where) for where in directories]
            require(all(one is None or one.directories == names for one in told), "claimed under other names")


def _stripe_seeds(folder: Path) -> Seeds:
    found = []
    for number, names in ((0, (str(folder), str(folder / "b"))), (1, ("/a", "/b"))):
        slab.write_stripe(folder, slab.Stripe("ab" * 16, number, names))
        found.append((folder / catalog_file.STRIPE_NAME).read_bytes())
    return found + _hostile(found[0], b'"number": 0', b'"number": ')


JSON = (
    b"Infinity", b"-Infinity", b"NaN", b"null", b"true", b"1e400", b"1e-400", b"[[", b"{}", b'""', b"\\ud800", b"-0",
    b"[],",
)  # fmt: skip


def _hostile(whole: bytes, what: bytes, before: bytes = b"") -> Seeds:
    """What JSON allows and few expect, alone and in place of a value."""
    values = (b"Infinity", b"NaN", b"-1", b"1e400", b"[]", b"{}", b"null", b'"\\u0000\\ud800"', b"[" * 4000, b"9" * 400)
    return [*values, *(whole.replace(what, before + value, 1) for value in values)]


# The status page


def _status(data: bytes, folder: Path) -> None:
    source = Source(data)
    sealed, whole = source.number() & 1, _status_page()
    page = source.edits(whole, range(1024))
    if sealed and len(page) > 16:
        page = page[:8] + struct.pack("<Q", xxhash.xxh3_64_intdigest(page[16:])) + page[16:]
    (folder / status_page.STATUS_NAME).write_bytes(page)
    with mock.patch.object(status_page, "_PAUSE", 0.0):
        found = status_page.read(folder)
    if found is None:
        return
    require(len(page) >= status_page.PAGE_BYTES, "a page that is cut")
    require(sealed or page[: status_page.PAGE_BYTES] == whole, "a page with another checksum")
    if isinstance(found, status_page.OtherFormat):
        require(found.format != status_page.PAGE_FORMAT, "a page of this format that is not read")
        return
    told = found.figures
    states = {told.state, *(rank.state for rank in told.ranks)}
    require(states <= set(get_args(status_page.State)), "a state that there is not")
    require(1 <= len(told.ranks) + 1 <= status_page.RANKS + 1, "more ranks than there can be")
    json.dumps([found.pid, found.host, found.command, found.opened, found.written, found.age, told.stopped])
    json.dumps([told.ranks, told.latencies, list(found.causes.items())], allow_nan=False)
    json.dumps([told.tiers, told.slowest, told.groups], allow_nan=False)


@functools.cache
def _status_page() -> bytes:
    counts = {name: n for n, name in enumerate(status_page.COUNTS)}
    counts |= {("misses", "absent"): 40, ("dropped", "queue_full"): 3}
    ranks = tuple(status_page.RankState(123 + n, get_args(status_page.State)[n % 3]) for n in range(status_page.RANKS))
    times = {what: Summary(9, 1e-3, 2e-2) for what in status_page.LATENCIES}
    sizes = EXTENT, 7, 0
    tiers = tuple(status_page.TierState(name, 9, 8, 7) for name in ("gpu", "cpu", "ssd", "fourth", "fifth"))
    slow = (SlowLoad("ssd", NOW, 1.5, 1 << 30),) * status_page.SLOWEST
    told = "switched_off", "the disk failed", counts, 16, ranks, times, tiers, slow, "full: all tokens"
    figures = status_page.Figures(*sizes, *told)
    return status_page.pack(status_page.Status(123, "host", "python serve.py", NOW, NOW + 60, 60, figures))


def _status_seeds(folder: Path) -> Seeds:
    edit = struct.pack("<H", 20) + b"\x07" + b"\xff" * 8
    return [b"\0\x80", b"\1\x80", b"\1\x80" + edit, b"\0\x80" + edit, b"\1\x20"]


# A page of a shared pool


@functools.cache
def _object() -> tuple[Page, bytes, bytes, np.ndarray]:
    """Page, extent, trailer, and what its bytes give."""
    layout = layout_of(MHA)
    page = Page(b"k" * 32, b"p" * 32, b"n" * 32)
    extent = np.random.default_rng(1).bytes(layout.page_bytes).ljust(layout.extent_bytes, b"\0")
    sums = layer_checksums(memoryview(extent), layout.layer_bounds)
    return page, extent, trailer(page, layout.page_bytes, bound(sums[None], [page.key])[0]), sums


def _trailer(data: bytes, folder: Path) -> None:
    """A page is good only where it is what was put, whoever wrote a checksum over the trailer."""
    source, layout = Source(data), layout_of(MHA)
    page, extent, tail, _ = _object()
    sealed = source.number() & 1
    places = [*range(len(extent), len(extent) + 256), *range(0, len(extent), 64)]
    found = source.edits(extent + tail, places).ljust(len(extent) + TRAILER_BYTES, b"\0")
    body, raw = bytearray(found[: len(extent)]), found[len(extent) :][:TRAILER_BYTES]
    if sealed:  # own hash: behind magic, two numbers, key and namespace
        head = raw[:80] + bytes(8) + raw[88 : 88 + 8 * LAYERS]
        raw = raw[:80] + struct.pack("<Q", xxhash.xxh3_64_intdigest(head)) + raw[88:]
    found_sums = layer_checksums(memoryview(body), layout.layer_bounds)
    if is_stored(bytes(raw), page, layout, found_sums):
        require(body[: layout.page_bytes] == extent[: layout.page_bytes], "other bytes are called good")
        require(raw == tail, "a trailer that does not match is called good")


def _trailer_seeds(folder: Path) -> Seeds:
    heads = [struct.pack("<H", at) + b"\x07" + bytes(8) for at in (0, 8, 12, 16, 48, 80, 88, 300)]
    return [b"\0\x80", b"\1\x80", *(bytes([sealed, 0x80]) + head for head in heads for sealed in (0, 1)), b"\1\x20"]


# The catalogue


@functools.cache
def _bases(root: Path) -> tuple[tuple[bytes, bytes], ...]:
    """Catalogues and their logs, closed, killed with a log, of one row, and of the format before."""
    found = []
    for name, pages in (("closed", 20), ("killed", 20), ("single", 1)):
        where = root / name
        where.mkdir(parents=True)
        with Catalog(where, extent_bytes=EXTENT, durability="process") as catalog:
            records, kept = [_record(slot) for slot in range(pages)], {1: (2, NOW + 60), 2: (-1, NOW - 60)}
            catalog.commit(records, [], {0: 99}, kept, {b"n" * 32: FIELDS})
            image, log = (where / catalog_file.CATALOG_NAME), (where / f"{catalog_file.CATALOG_NAME}-wal")
            if name == "killed":
                found.append((image.read_bytes(), _sealed(log.read_bytes(), b"saltsalt")))
        if name != "killed":
            found.append((image.read_bytes(), b""))
    with tarfile.open(ROOT / "tests" / "formats" / "5" / "closed.tar.xz") as kept:
        image = kept.extractfile(f"a/{catalog_file.CATALOG_NAME}")
        found.append((image.read(), b""))
    return tuple(found)


def _record(slot: int, key: bytes = b"") -> PageRecord:
    sums = np.arange(LAYERS, dtype=np.uint64) + np.uint64(slot)
    parent = _key(slot - 1) if slot % 4 else b"n" * 32
    return PageRecord(slot, key or _key(slot), parent, b"n" * 32, EXTENT - slot % 2, slot, sums)


def _key(slot: int) -> bytes:
    return bytes([slot % 256]) * 32


def _sealed(log: bytes, salts: bytes = b"") -> bytes:
    """A log whose salts and checksums are right again, as https://www.sqlite.org/fileformat2.html has them."""
    if len(log) < 32:
        return log
    salts = salts or log[16:24]
    size = int.from_bytes(log[8:12], "big")
    order = ">" if log[3] & 1 else "<"
    a = b = 0

    def summed(data: bytes) -> bytes:
        nonlocal a, b
        words = struct.unpack(f"{order}{len(data) // 4}I", data)
        for x, y in zip(words[::2], words[1::2], strict=True):
            a = (a + x + b) & 0xFFFFFFFF
            b = (b + y + a) & 0xFFFFFFFF
        return struct.pack(">II", a, b)

    head = log[:16] + salts
    out = [head, summed(head)]
    if size in [1 << n for n in range(9, 17)]:
        for at in range(32, len(log) - 24 - size + 1, 24 + size):
            page = log[at + 24 : at + 24 + size]
            out += [log[at : at + 8], salts, summed(log[at : at + 8] + page), page]
    return b"".join(out)


def _full(image: bytes) -> Sequence[int]:
    """Where a file has anything, and a little behind: most of a page of SQLite is empty."""
    there = np.flatnonzero(np.frombuffer(image, np.uint8))
    heads = np.arange(0, len(image), 4096)[:, None] + np.arange(16)
    places = np.unique(np.concatenate((there, there + 1, np.arange(min(100, len(image))), *heads)))
    return [place for place in places.tolist() if place < len(image)]


@functools.cache
def _places(root: Path) -> list[tuple[Sequence[int], Sequence[int]]]:
    return [(_full(image), _full(log) if log else [0]) for image, log in _bases(root)]


def _image(data: bytes, folder: Path) -> None:
    source, root = Source(data), folder.parent / "bases"
    which = source.number() % len(_bases(root))
    (image, log), (places, _) = _bases(root)[which], _places(root)[which]
    used(folder, source.edits(image, places), log)


def _log(data: bytes, folder: Path) -> None:
    source, root = Source(data), folder.parent / "bases"
    sealed, (image, log), (_, places) = source.number() & 1, _bases(root)[1], _places(root)[1]
    edited = source.edits(log, places)
    used(folder, image, _sealed(edited) if sealed else edited)


def _edit_seeds(folder: Path) -> Seeds:
    edits = [struct.pack("<H", at) + b"\x03" + new for at in (16, 40, 60, 700) for new in (b"\0\0\0\1", b"\xff" * 4)]
    starts = [bytes([which, cut]) for which in (0, 1, 2, 3) for cut in (0x80, 0x20)]
    no_text = bytes.fromhex("020080ffffffffffffff80100003ffffffffff")  # in SQLite's own message
    return [*starts, no_text, *(start + edit for start in (starts[0], starts[2]) for edit in edits)]


EVERY = [*COLUMNS, *(("slabs", name) for name in ("id", "extent_bytes", "shards")), ("meta", "value")]
OLD_COLUMNS = [
    *(("pages", name) for name in ("slot", "key", "parent", "namespace", "length", "recency")),
    *(("checksums", name) for name in ("slot", "sums")),
    *(("retention", name) for name in ("slot", "priority", "expires")),
    *(("namespaces", name) for name in ("id", "digest", "description")),
    ("meta", "value"),
]
VALUES = ("NULL", "byte", "int", "real", "text", "blob", "key", "zeros", "large", "deep")
LAST = b"\xff" * 7 + b"\x7f"  # the largest integer, and no number


def _rows(data: bytes, folder: Path) -> None:
    """A catalogue that SQLite finds nothing wrong with, whose rows say anything."""
    _spoiled(data, folder, 0, EVERY, ("format_version", "striped", "created"))


def _old_rows(data: bytes, folder: Path) -> None:
    """The same of the format before, which is converted."""
    _spoiled(data, folder, 3, OLD_COLUMNS, ("format_version", "extent_bytes", "head_groups", "striped", "created"))


def _spoiled(data: bytes, folder: Path, base: int, columns: list[tuple[str, str]], names: tuple[str, ...]) -> None:
    source, root = Source(data), folder.parent / "bases"
    path = folder / catalog_file.CATALOG_NAME
    path.write_bytes(_bases(root)[base][0])
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as rows:
        rows.execute("PRAGMA synchronous = OFF")
        rows.execute("BEGIN")
        for _ in range(40):
            if not source.rest:
                break
            what = source.number()
            table, column = columns[what % len(columns)]
            row, (expression, value) = source.number(), _value(source)
            where = {"meta": "name"}.get(table, "rowid")
            which: object = names[row % len(names)] if table == "meta" else row % (SLOTS + 1)
            with contextlib.suppress(sqlite3.IntegrityError, sqlite3.DataError, sqlite3.OperationalError):
                if what & 0x80:
                    rows.execute(f"INSERT OR IGNORE INTO {table}({column}) VALUES ({expression})", value)
                else:
                    rows.execute(
                        f"UPDATE OR IGNORE {table} SET {column} = {expression} WHERE {where} = ?", (*value, which)
                    )
        rows.execute("COMMIT")
    used(folder, None, b"")


def _value(source: Source) -> tuple[str, tuple[object, ...]]:
    kind = VALUES[source.number() % len(VALUES)]
    match kind:
        case "NULL":
            return "NULL", ()
        case "byte":
            return "?", (source.number() - 2,)
        case "int":
            return "?", (int.from_bytes(source.take(8), "little", signed=True),)
        case "real":
            return "?", (struct.unpack("<d", source.take(8))[0],)
        case "text":
            return "CAST(? AS TEXT)", (source.some(),)
        case "blob":
            return "?", (source.some(),)
        case "key":
            return "?", (_key(source.number()),)
        case "zeros":
            return "zeroblob(?)", (source.number(2),)
        case "deep":
            return "CAST(replace(hex(zeroblob(2000)), '0', '[') AS TEXT)", ()
    return "zeroblob(?)", (LARGE if source.number() == 255 else 1 << 16,)


def _row_seeds(folder: Path) -> Seeds:
    return _column_seeds(EVERY)


def _old_row_seeds(folder: Path) -> Seeds:
    return _column_seeds(OLD_COLUMNS)


def _column_seeds(columns: list[tuple[str, str]]) -> Seeds:
    """Of each column, a value of each kind, each in a row of its own."""
    ends = {"NULL": b"", "byte": b"\0", "text": b"\x04[[\\u", "blob": b"\x04\0\xff\0\xff", "key": b"\3", "deep": b""}
    kinds = [kind for kind in VALUES if kind != "large"]
    seeds = [b""]
    for number in range(len(columns)):
        values = [bytes([number, at, VALUES.index(kind)]) + ends.get(kind, LAST) for at, kind in enumerate(kinds)]
        seeds.append(b"".join(values))
    return seeds


def used(folder: Path, image: bytes | None, log: bytes) -> None:
    """What an open does with a catalogue, and an engine after it; and all of that once more."""
    if image is not None:
        (folder / catalog_file.CATALOG_NAME).write_bytes(image)
    if log:
        (folder / f"{catalog_file.CATALOG_NAME}-wal").write_bytes(log)
    kept: set[bytes] = set()
    for again in (False, True):
        try:
            catalog = Catalog(folder, extent_bytes=EXTENT, durability="process")
        except GdsCacheError:
            require(not again, "what was opened and closed does not open again")
            return
        with catalog:
            try:
                found = catalog.recover(SLOTS, NOW)
            except GdsCacheError:
                require(not again, "what was recovered is not recovered again")
                return
            able(found)
            if again:
                require(kept <= {key.tobytes() for key in found.keys}, "pages are lost at a second open")
                require(not found.dropped, f"rows are dropped at a second open: {dict(found.dropped)}")
            new = next((slot for slot in range(SLOTS) if slot not in found.slots), None)
            try:
                for sums in sums_of(catalog, range(SLOTS)):
                    require(sums is None or sums.dtype == np.uint64, "no checksums")
                catalog.checksum_rows(range(0, SLOTS, 2), LAYERS)
                catalog.retentions()
                with contextlib.suppress(GdsCacheError):
                    catalog.namespaces()
                if new is not None:
                    catalog.commit([_record(new, b"%032d" % new)], [], {0: 7}, {new: (1, NOW + 99)})
                kept = set(catalog.rows().values())
            except GdsCacheError:
                return
            require(len(kept) == len(found) + (new is not None), "rows that are no pages stay")


def able(found: Recovered) -> None:
    count = len(found)
    columns = (found.keys, found.parents, found.namespaces, found.lengths, found.recency, found.above, found.order)
    require({len(column) for column in columns} <= {count}, "columns of several lengths")
    require(len(np.unique(found.slots)) == count, "a slot twice")
    require(not count or (found.slots.min() >= 0 and found.slots.max() < SLOTS), "a slot outside the slab")
    require(not count or (found.lengths.min() >= 1 and found.lengths.max() <= EXTENT), "a length of no page")
    require(len(set(found.keys.tolist())) == count, "a key twice")
    require(sorted(found.order.tolist()) == list(range(count)), "an order of other rows")
    require(not count or found.namespaces.max() < len(found.digests), "a namespace without a digest")
    require(all(len(digest) == 32 for digest in found.digests), "a digest of another size")
    index = PageIndex(SLOTS, POLICIES["lifetime"](1), forget=lambda *_: None, recycle=lambda *_: None)
    names = (found.keys, found.parents, found.digests, found.namespaces, found.slots, found.order)
    index.restore(*names, _retentions(found), found.above)
    require(index.free_slots == SLOTS - count, "slots that are neither free nor taken")


# A whole directory


@functools.cache
def _filled(root: Path) -> tuple[Path, bytes, Sequence[int]]:
    path = root / "cache"
    with opened(path, SLOTS) as host:
        store(host, range(5))
    image = (path / catalog_file.CATALOG_NAME).read_bytes()
    return path, image, _full(image)


def _engine(data: bytes, folder: Path) -> None:
    """Whatever the files say, an engine serves the bytes that were stored, or none, and stores new ones."""
    source = Source(data)
    path, image, places = _filled(folder.parent / "filled")
    shutil.copytree(path, folder, dirs_exist_ok=True)
    slab = bytearray((folder / "slab-0.bin").read_bytes())
    for _ in range(source.number() % 8):
        at = source.number(3) % len(slab)
        slab[at : at + 4] = source.take(4)
    (folder / "slab-0.bin").write_bytes(slab)
    (folder / catalog_file.CATALOG_NAME).write_bytes(source.edits(image, places))
    for name in (
        COSTS_NAME,
        kept.HISTORY_NAME,
        status_page.STATUS_NAME,
        directory.LOCK_NAME,
    ):
        if source.number() & 1:
            (folder / name).write_bytes(source.some())
    with contextlib.suppress(GdsCacheError), opened(folder, SLOTS) as host:
        served(host, range(5))  # fails where other bytes are called good
        store(host, [9])
        served(host, [9])


def _engine_seeds(folder: Path) -> Seeds:
    return [
        b"\0\x80",
        *(b"\2" + struct.pack("<I", at)[:3] + b"\xff" * 4 + bytes(7) + b"\x80" for at in (0, 9000, 40000)),
    ]


TARGETS = {
    "history": Target(_history, _history_seeds, words=JSON),
    "stripe": Target(_stripe, _stripe_seeds, words=JSON),
    "status": Target(_status, _status_seeds, 512),
    "trailer": Target(_trailer, _trailer_seeds, 512),
    "catalogue": Target(_image, _edit_seeds, 256, 10),
    "catalogue_log": Target(_log, _edit_seeds, 256, 10),
    "catalogue_rows": Target(_rows, _row_seeds, 512, 10),
    "catalogue_old": Target(_old_rows, _old_row_seeds, 512, 10),
    "directory": Target(_engine, _engine_seeds, 256, 30),
}
