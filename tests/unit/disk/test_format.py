"""docs/format.md, byte for byte. The literals here were computed with hashlib, struct and xxhash alone."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import sqlite3
import stat
import struct
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import xxhash

from gdscache import Config
from gdscache.commands.inspect.reading import inspect
from gdscache.commands.inspect.tables import inspect_tables
from gdscache.commands.inspect.verification import verify
from gdscache.config.pools import pool_parts
from gdscache.disk import catalog_file, slab
from gdscache.disk.catalog import Catalog, PageRecord
from gdscache.disk.directory import CacheDirectory
from gdscache.disk.slab import Slab
from gdscache.errors import CatalogVersionError, ExtentSizeError, ShardsError
from gdscache.pages.checksum import bound, first_bad_layer, layer_checksums, unbound
from gdscache.pages.keys import as_tokens, namespace_digest, page_keys
from gdscache.pages.layout import PageLayout, Plane
from tests.support.disk_parts import sums_of
from tests.support.hybrid import MODELS
from tests.support.places import ROOT

DOCUMENT = ROOT / "docs" / "format.md"

LAYOUT = PageLayout.uniform([Plane("k", (1, 8), "float16"), Plane("v", (1, 4), "float16")], n_layers=2, page_tokens=4)
FIELDS = {
    "name": "tiny-llama ü", "weights": "v1", "planes": LAYOUT.describe(), "page_tokens": 4, "first_layer": 4,
    "layers": 2, "head_group": 1, "head_groups": 2, "salt": "s", "request_salt": "tenant-7",
}  # fmt: skip
CANONICAL = (
    '{"first_layer":4,"format":1,"head_group":1,"head_groups":2,"layers":2,"name":"tiny-llama \\u00fc","page_tokens":4,'
    '"planes":[[["k",[1,8],"float16"],["v",[1,4],"float16"]],[["k",[1,8],"float16"],["v",[1,4],"float16"]]],'
    '"request_salt":"tenant-7","salt":"s","weights":"v1"}'
)
NAMESPACE = "5387d9e0c3c6cb7d5d1b785c55c2c4573859d3d1ca737a9d9458cf6591f38b74"
TOKENS = [0, 1, 2, 4294967295, 5, 6, 7, 8, 9]
KEYS = [
    "b2c096fe6a04e842190709014c4a173e28e2d29ba3ad71a95c03389b7a96b8ea",
    "2c6087bebdda68c2df6d635ca40d9a087b91bdd8c8ff62a5d2dd9729e8f31523",
]
PAGE = bytes((i * 7 + 3) % 256 for i in range(192))
CHECKSUMS = [0xF084E7CFBC624743, 0x3F62AFEAD502DF13]
FACTORS = [0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63]
STEP = 0x9E3779B97F4A7C15
BOUND_BYTES = [  # of the same bytes under each of KEYS
    "5432da441c081f373946c5dcf0493424",
    "217b592e554c688c068f44c6298e7d79",
]
OTHER = bytes((i * 5 + 1) % 256 for i in range(192))  # what a second shard has of the same page
SHARD_BYTES = BOUND_BYTES[0] + "b0083c5f288a9a62759cc68ae445d378"  # of the first key: PAGE and OTHER

SCHEMA = """\
CREATE TABLE meta(name TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE slabs(id INTEGER PRIMARY KEY, extent_bytes INTEGER, shards INTEGER);
CREATE TABLE namespaces(id INTEGER PRIMARY KEY, digest BLOB UNIQUE, description TEXT);
CREATE TABLE pages(place INTEGER PRIMARY KEY, key BLOB, parent BLOB, namespace INTEGER, length INTEGER, \
recency INTEGER, packed INTEGER DEFAULT 0);
CREATE TABLE checksums(place INTEGER PRIMARY KEY, sums BLOB);
CREATE TABLE retention(place INTEGER PRIMARY KEY, priority INTEGER, lifetime INTEGER, written INTEGER DEFAULT 0);
"""
META = {"format_version": 6, "striped": 0}  # besides `created`
OLD_SCHEMA = """\
CREATE TABLE meta(name TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE namespaces(id INTEGER PRIMARY KEY, digest BLOB UNIQUE, description TEXT);
CREATE TABLE pages(slot INTEGER PRIMARY KEY, key BLOB, parent BLOB, namespace INTEGER, length INTEGER, recency INTEGER);
CREATE TABLE checksums(slot INTEGER PRIMARY KEY, sums BLOB);
CREATE TABLE retention(slot INTEGER PRIMARY KEY, priority INTEGER, expires INTEGER);
"""
OLD_META = {"format_version": 5, "extent_bytes": 4096, "head_groups": 1, "striped": 0}


def test_namespace_digest() -> None:
    assert namespace_digest(FIELDS).hex() == NAMESPACE
    assert hashlib.blake2b(CANONICAL.encode("ascii"), digest_size=32, person=b"gdscache-ns").hexdigest() == NAMESPACE
    assert namespace_digest(dict(reversed(FIELDS.items()))).hex() == NAMESPACE


def test_namespaces_of_groups_with_directories_of_their_own() -> None:
    parts = pool_parts(Config.from_dict({"model": MODELS["apart"] | {"salt": "ü"}, "cpu": {}}))
    rest = '"keeps": "all", "span": 0, "page_tokens": 4}', '"keeps": "window", "span": 10, "page_tokens": 4}'
    whole = f'{{"name": "full", "layers": [1], {rest[0]}, {{"name": "window", "layers": [0, 2], {rest[1]}'
    salt = f'{{"salt": "\\u00fc", "model_layers": 3, "model_groups": [{whole}]}}'
    own = f'{{"name": "full", "layers": [0], {rest[0]}', f'{{"name": "window", "layers": [0, 1], {rest[1]}'
    for part, text in zip(parts, own, strict=True):
        group = json.loads(text)
        planes = [[[name, [4, 32], "bfloat16"] for name in "kv"] for _ in group["layers"]]
        fields = {"name": "tiny", "weights": "", "planes": planes, "page_tokens": 4, "first_layer": 0}
        fields |= {"layers": len(planes), "head_group": 0, "head_groups": 1, "salt": salt, "request_salt": "tenant"}
        (described,) = part.config.model.layer_groups()
        found = part.config.model.namespace_fields("tenant", group=described)
        assert namespace_digest(found) == namespace_digest(fields | {"groups": [group], "group": group})


@pytest.mark.parametrize("field", FIELDS)
def test_each_field_of_a_namespace_counts(field: str) -> None:
    other = {"planes": LAYOUT.describe()[:1]}.get(field, 77 if isinstance(FIELDS[field], int) else "other")
    assert namespace_digest({**FIELDS, field: other}).hex() != NAMESPACE
    assert f"`{field}`" in DOCUMENT.read_text()


def test_page_keys() -> None:
    namespace = bytes.fromhex(NAMESPACE)
    assert [key.hex() for key in page_keys(namespace, as_tokens(TOKENS), 4)] == KEYS  # no key for the ninth token
    first = hashlib.blake2b(namespace + struct.pack("<4I", *TOKENS[:4]), digest_size=32, key=namespace)
    second = hashlib.blake2b(first.digest() + struct.pack("<4I", *TOKENS[4:8]), digest_size=32, key=namespace)
    assert [first.hexdigest(), second.hexdigest()] == KEYS


def test_extent_layout() -> None:
    """Layer, plane, token; nothing between, padding to 4,096 at the end."""
    at = 0
    for layer in range(2):
        for plane, row_bytes in enumerate((16, 8)):
            piece = LAYOUT.pieces[layer][plane]
            assert (piece.offset, piece.nbytes) == (at, 4 * row_bytes)
            at += 4 * row_bytes
    assert (LAYOUT.page_bytes, LAYOUT.extent_bytes, LAYOUT.layer_bounds) == (192, 4096, ((0, 96), (96, 192)))


def test_checksums_cover_each_layer_and_no_padding() -> None:
    for padding in (b"\x00", b"\xff"):
        extent = memoryview(PAGE + padding * (4096 - 192))
        assert [int(value) for value in layer_checksums(extent, LAYOUT.layer_bounds)] == CHECKSUMS
    assert [xxhash.xxh3_64_intdigest(PAGE[:96]), xxhash.xxh3_64_intdigest(PAGE[96:])] == CHECKSUMS


def test_the_long_form_of_the_checksum() -> None:
    """Above 240 bytes XXH3 is another algorithm; a GPU kernel will have to give this value."""
    data = bytes((i * i + i // 7) % 251 for i in range(5000))
    assert layer_checksums(memoryview(data), [(0, 5000)])[0] == 0x3EA98D7541D98461
    assert layer_checksums(memoryview(data), [(0, 0)])[0] == 0x2D06800538D394C2


@pytest.mark.parametrize(("key", "stored"), list(zip(KEYS, BOUND_BYTES, strict=True)))
def test_checksums_are_bound_to_the_key(key: str, stored: str) -> None:
    words = struct.unpack("<4Q", bytes.fromhex(key))
    seed = sum(word * factor for word, factor in zip(words, FACTORS, strict=True))
    by_hand = [(value + seed + position * STEP) % 2**64 for position, value in enumerate(CHECKSUMS)]
    assert struct.pack("<2Q", *by_hand).hex() == stored
    sums = np.array([CHECKSUMS], np.uint64)
    assert bound(sums, [bytes.fromhex(key)]).astype("<u8").tobytes().hex() == stored
    assert np.array_equal(unbound(bound(sums, [bytes.fromhex(key)]), [bytes.fromhex(key)]), sums)
    for number in [*FACTORS, STEP]:
        assert f"0x{number:016X}" in DOCUMENT.read_text()


def test_what_is_bound_to_one_key_matches_nothing_under_another() -> None:
    """Keys that differ in any one bit, and each other layer of the page."""
    key = bytes.fromhex(KEYS[0])
    sums = np.array([CHECKSUMS], np.uint64)
    others = [(int.from_bytes(key, "little") ^ 1 << bit).to_bytes(32, "little") for bit in range(256)]
    found = unbound(np.repeat(bound(sums, [key]), 256, axis=0), others)
    assert not (found == sums).any()
    assert not (unbound(bound(sums, [key])[:, ::-1], [key]) == sums[:, ::-1]).any()
    assert not (bound(sums, [key]) == sums).any()


def test_shards_of_a_page_have_checksums_one_after_the_other() -> None:
    """Number i = shard x layers + layer."""
    words = struct.unpack("<4Q", bytes.fromhex(KEYS[0]))
    seed = sum(word * factor for word, factor in zip(words, FACTORS, strict=True))
    sums = [xxhash.xxh3_64_intdigest(part[at : at + 96]) for part in (PAGE, OTHER) for at in (0, 96)]
    by_hand = [(value + seed + position * STEP) % 2**64 for position, value in enumerate(sums)]
    assert struct.pack("<4Q", *by_hand).hex() == SHARD_BYTES
    made = np.concatenate([layer_checksums(memoryview(part), LAYOUT.layer_bounds) for part in (PAGE, OTHER)])
    assert bound(made[None], [bytes.fromhex(KEYS[0])]).astype("<u8").tobytes().hex() == SHARD_BYTES


def build(path: Path) -> None:
    """A directory with one page in slot 2."""
    namespace = bytes.fromhex(NAMESPACE)
    first, second = map(bytes.fromhex, KEYS)
    sums = bound(np.array([CHECKSUMS, CHECKSUMS], np.uint64), [first, second])
    with (
        CacheDirectory.open(path),
        Catalog(
            path, extent_bytes=LAYOUT.extent_bytes, durability="process", wall_clock=lambda: 1764000000.5678
        ) as catalog,
    ):
        slab = Slab.open(path, LAYOUT.extent_bytes, 4)
        with open(slab.path, "r+b") as file:
            file.seek(slab.locate(2)[1])
            file.write(PAGE)
        described = {namespace: FIELDS}
        catalog.commit([PageRecord(2, first, namespace, namespace, 192, 41, sums[0])], [], {}, described=described)
        catalog.commit([PageRecord(0, second, first, namespace, 192, 42, sums[1], -1, 1800000000.1239)], [], {2: 43})


def test_the_files_and_their_modes(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        build(tmp_path / "cache")
        path = tmp_path / "cache"
        with Catalog(path, extent_bytes=4096, durability="process") as catalog:
            catalog.commit([], [0], {})  # makes the log
            found = {entry.name: stat.S_IMODE(entry.stat().st_mode) for entry in path.iterdir()}
    finally:
        os.umask(old)
    names = ["lock", "slab-0.bin", "catalog.sqlite", "catalog.sqlite-wal"]
    assert found == dict.fromkeys(names, 0o600)
    assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_a_set_aside_catalogue_is_private_too(tmp_path: Path) -> None:
    build(tmp_path)
    os.truncate(tmp_path / "catalog.sqlite", 5000)
    Catalog(tmp_path, extent_bytes=4096, durability="process").close()
    aside = next(tmp_path.glob("catalog.corrupt-*"))
    assert re.fullmatch(r"catalog\.corrupt-\d{8}T\d{6}\.\d{6}Z", aside.name)
    assert stat.S_IMODE(aside.stat().st_mode) == 0o600


def test_the_slab(tmp_path: Path) -> None:
    build(tmp_path)
    assert (tmp_path / "slab-0.bin").read_bytes() == bytes(8192) + PAGE + bytes(4096 - 192 + 4096)


def test_the_catalogue(tmp_path: Path) -> None:
    build(tmp_path)
    with contextlib.closing(sqlite3.connect(tmp_path / "catalog.sqlite")) as connection:
        sql = [text for (text,) in connection.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL")]
        meta = dict(connection.execute("SELECT name, value FROM meta"))
        namespaces = connection.execute("SELECT * FROM namespaces").fetchall()
        slabs = connection.execute("SELECT * FROM slabs").fetchall()
        pages = connection.execute("SELECT * FROM pages ORDER BY place").fetchall()
        sums = connection.execute("SELECT place, hex(sums) FROM checksums ORDER BY place").fetchall()
        retention = connection.execute("SELECT * FROM retention").fetchall()
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert connection.execute("PRAGMA encoding").fetchone() == ("UTF-8",)
    assert "".join(f"{text};\n" for text in sql) == SCHEMA
    created = meta.pop("created")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", created)
    assert meta == META
    namespace, first, second = bytes.fromhex(NAMESPACE), *map(bytes.fromhex, KEYS)
    assert [(digest, json.loads(text)) for _, digest, text in namespaces] == [(namespace, FIELDS)]
    assert slabs == [(0, 4096, 1)]
    assert pages == [(0, second, first, 1, 192, 42, 0), (2, first, namespace, 1, 192, 43, 0)]
    assert sums == [(0, BOUND_BYTES[1].upper()), (2, BOUND_BYTES[0].upper())]
    assert retention == [(0, -1, 1800000000123 - 1764000000567, 1764000000567)]


def write_by_hand(tmp_path: Path, shards: int = 1) -> None:
    """A directory with one page in slot 1."""
    with contextlib.closing(sqlite3.connect(tmp_path / "catalog.sqlite")) as connection, connection:
        connection.executescript(SCHEMA)
        connection.executemany("INSERT INTO meta VALUES (?, ?)", META.items())
        connection.execute("INSERT INTO slabs VALUES (0, 4096, ?)", (shards,))
        connection.execute("INSERT INTO namespaces VALUES (9, ?, ?)", (bytes.fromhex(NAMESPACE), CANONICAL))
        connection.execute(
            "INSERT INTO pages VALUES (1, ?, ?, 9, 192, 5, 0)", (bytes.fromhex(KEYS[0]), bytes.fromhex(NAMESPACE))
        )
        sums = bytes.fromhex(SHARD_BYTES[: 32 * shards])
        connection.execute("INSERT INTO checksums VALUES (1, ?)", (sums,))
        connection.execute("INSERT INTO retention VALUES (1, 2, 36000000500, 1764000000000)")
    for name, part in list(zip(("slab-0.bin", "slab-0.0.1.bin"), (PAGE, OTHER), strict=True))[:shards]:
        (tmp_path / name).write_bytes(bytes(4096) + part + bytes(4096 - 192))


def write_old_by_hand(tmp_path: Path) -> None:
    """The same in version 5."""
    with contextlib.closing(sqlite3.connect(tmp_path / "catalog.sqlite")) as connection, connection:
        connection.executescript(OLD_SCHEMA)
        connection.executemany("INSERT INTO meta VALUES (?, ?)", OLD_META.items())
        connection.execute("INSERT INTO namespaces VALUES (9, ?, ?)", (bytes.fromhex(NAMESPACE), CANONICAL))
        connection.execute(
            "INSERT INTO pages VALUES (1, ?, ?, 9, 192, 5)", (bytes.fromhex(KEYS[0]), bytes.fromhex(NAMESPACE))
        )
        connection.execute("INSERT INTO checksums VALUES (1, ?)", (bytes.fromhex(BOUND_BYTES[0]),))
        connection.execute("INSERT INTO retention VALUES (1, 2, 1800000000500)")
    (tmp_path / "slab-0.bin").write_bytes(bytes(4096) + PAGE + bytes(4096 - 192))


WRITERS = {"6": write_by_hand, "5": write_old_by_hand}


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_a_directory_written_by_hand_from_the_document_is_read(tmp_path: Path, write: Callable[[Path], None]) -> None:
    write(tmp_path)
    slab = Slab.open(tmp_path, 4096, 2)
    with Catalog(tmp_path, extent_bytes=4096, durability="power") as catalog:
        found = catalog.recover(slab.valid_slots)
        assert [c.tolist() for c in (found.slots, found.lengths, found.recency)] == [[1], [192], [5]]
        assert not found.dropped
        assert (found.keys[0].tobytes().hex(), found.digests[0].hex()) == (KEYS[0], NAMESPACE)
        assert [found.retained.tolist(), found.priorities.tolist(), found.expires.tolist()] == [
            [0],
            [2],
            [1800000000.5],
        ]
        (stored,) = sums_of(catalog, [1], 2)
    assert stored.astype("<u8").tobytes().hex() == BOUND_BYTES[0]
    (sums,) = unbound(stored[None], [bytes.fromhex(KEYS[0])])
    with open(slab.path, "rb") as file:
        file.seek(slab.locate(1)[1])
        assert first_bad_layer(memoryview(file.read(4096)), LAYOUT.layer_bounds, sums) is None


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_a_converted_directory_has_the_tables_of_a_new_one(tmp_path: Path, write: Callable[[Path], None]) -> None:
    """Text for text, and the rows as docs/format.md says."""
    write(tmp_path)
    with Catalog(tmp_path, extent_bytes=4096, durability="process") as catalog:
        catalog.recover(2)
    with contextlib.closing(sqlite3.connect(tmp_path / "catalog.sqlite")) as connection:
        found = {text for (text,) in connection.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL")}
        assert found == set(SCHEMA[:-2].split(";\n"))
        assert dict(connection.execute("SELECT * FROM meta")) == META
        assert connection.execute("SELECT * FROM slabs").fetchall() == [(0, 4096, 1)]
        key, namespace = bytes.fromhex(KEYS[0]), bytes.fromhex(NAMESPACE)
        assert connection.execute("SELECT * FROM pages").fetchall() == [(1, key, namespace, 9, 192, 5, 0)]
        assert connection.execute("SELECT * FROM checksums").fetchall() == [(1, bytes.fromhex(BOUND_BYTES[0]))]
        lifetime, written = {write_by_hand: (36000000500, 1764000000000)}.get(write, (1800000000500, 0))
        assert connection.execute("SELECT * FROM retention").fetchall() == [(1, 2, lifetime, written)]


def test_a_directory_of_two_shards_is_read(tmp_path: Path) -> None:
    write_by_hand(tmp_path, shards=2)
    slab = Slab.open(tmp_path, 4096, 2, shards=2)
    assert [file.name for file in slab.files] == ["slab-0.bin", "slab-0.0.1.bin"]
    with Catalog(tmp_path, extent_bytes=4096, durability="process", shards=2) as catalog:
        found = catalog.recover(slab.valid_slots)
        slots, sums = catalog.checksum_rows([0, 1], 2)
    assert (len(found), slots.tolist(), sums.shape) == (1, [1], (1, 4))
    for shard, wanted in enumerate(unbound(sums, [bytes.fromhex(KEYS[0])]).reshape(2, 2)):
        data = slab.of(shard).path.read_bytes()[4096:]
        assert first_bad_layer(memoryview(data), LAYOUT.layer_bounds, wanted) is None
    report, said = inspect(tmp_path), verify(tmp_path)
    assert (report["shards"], report["slots"], report["pages"], report["capacity_bytes"]) == (2, 2, 1, 16384)
    assert (said["shards"], said["good_pages"], said["bytes"]) == (2, 1, 8192)
    with open(slab.of(1).path, "r+b") as file:
        file.seek(4096 + 100)
        file.write(b"x")
    assert [(f["cause"], f["shard"], f["layer"]) for f in verify(tmp_path)["bad"]] == [("checksum", 1, 1)]
    os.truncate(slab.of(1).path, 4096)
    assert (inspect(tmp_path)["pages"], inspect(tmp_path)["unusable_rows"]) == (0, {"slot": 1})


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_another_number_of_shards_is_refused(tmp_path: Path, write: Callable[[Path], None]) -> None:
    write(tmp_path)
    before = (tmp_path / "catalog.sqlite").read_bytes()
    with pytest.raises(ShardsError, match="in 1 shards, and this engine has 2"):
        Catalog(tmp_path, extent_bytes=4096, durability="process", shards=2)
    with pytest.raises(ExtentSizeError, match=r"of 4,096 bytes.*8,192"):
        Catalog(tmp_path, extent_bytes=8192, durability="process")
    assert (tmp_path / "catalog.sqlite").read_bytes() == before


def test_a_packed_page_is_refused_and_its_directory_is_not(tmp_path: Path) -> None:
    build(tmp_path)
    with contextlib.closing(sqlite3.connect(tmp_path / "catalog.sqlite")) as connection, connection:
        connection.execute("UPDATE pages SET packed = 3 WHERE place = 2")
    assert inspect(tmp_path)["unusable_rows"] == {"packed": 1}
    assert (2, "packed") in [(f["slot"], f["cause"]) for f in verify(tmp_path)["bad"]]
    with Catalog(tmp_path, extent_bytes=4096, durability="process") as catalog:
        found = catalog.recover(4)
        assert (found.slots.tolist(), found.dropped) == ([0], {"packed": 1})
        assert len(catalog.rows()) == 1


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_people_look_into_it_and_change_nothing(tmp_path: Path, write: Callable[[Path], None]) -> None:
    write(tmp_path)
    before = (tmp_path / "catalog.sqlite").read_bytes()
    report, found = inspect(tmp_path), verify(tmp_path)
    version = 6 if write is write_by_hand else 5
    assert (report["format_version"], report["pages"], found["good_pages"]) == (version, 1, 1)
    assert ("the next engine makes it 6" in str(inspect_tables(report)[0].lines())) == (version == 5)
    expired = int(time.time() > 1800000000.5)
    assert report["retention"] == {"priorities": {"2": 1}, "expiring_pages": 1, "expired_pages": expired}
    assert (tmp_path / "catalog.sqlite").read_bytes() == before


def test_a_mix_up_is_found(tmp_path: Path) -> None:
    """The row of one page names another: its bytes are whole, and belong to nobody who asks."""
    write_by_hand(tmp_path)
    with contextlib.closing(sqlite3.connect(tmp_path / "catalog.sqlite")) as connection, connection:
        connection.execute("UPDATE pages SET key = ?", (bytes.fromhex(KEYS[1]),))
    assert verify(tmp_path)["bad_pages"] == 1


def test_a_damaged_retention_is_reported(tmp_path: Path) -> None:
    write_by_hand(tmp_path)
    with contextlib.closing(sqlite3.connect(tmp_path / "catalog.sqlite")) as connection, connection:
        connection.execute("UPDATE retention SET lifetime = 'soon'")
    report, found = inspect(tmp_path), verify(tmp_path)
    assert (report["pages"], report["unusable_rows"]) == (0, {"row": 1})
    assert (found["pages"], found["good_pages"], [f["cause"] for f in found["bad"]]) == (1, 0, ["row"])


FOREIGN: dict[str, tuple[Callable[[Path], None], tuple[str, ...], str]] = {
    "further slabs": (
        write_by_hand,
        (
            "INSERT INTO slabs VALUES (1, 8192, 2)",
            "INSERT INTO pages SELECT (1 << 40) + 7, key, parent, namespace, length, 1, 0 FROM pages",
        ),
        r"2 slabs \(of 4,096, 8,192 bytes",
    ),
    **{
        f"version {version}": (
            write_by_hand,  # other versions have other tables
            (f"UPDATE meta SET value = {version} WHERE name = 'format_version'", "DROP TABLE retention"),
            f"format version {version}; this gdscache reads versions 5 and 6",
        )
        for version in (0, 1, 4, 7, -5)
    },
    **{
        f"{groups} head groups": (
            write_old_by_hand,
            (f"UPDATE meta SET value = {groups} WHERE name = 'head_groups'",),
            f"{groups} head groups a layer.*reads 1",
        )
        for groups in (0, 2, 8)
    },
}


@pytest.mark.parametrize(("write", "changes", "words"), FOREIGN.values(), ids=FOREIGN)
def test_what_it_does_not_read_is_refused_and_left_alone(
    tmp_path: Path, write: Callable[[Path], None], changes: tuple[str, ...], words: str
) -> None:
    write(tmp_path)
    with contextlib.closing(sqlite3.connect(tmp_path / "catalog.sqlite")) as connection, connection:
        for change in changes:
            connection.execute(change)
    before = (tmp_path / "catalog.sqlite").read_bytes()
    for look in (lambda: Catalog(tmp_path, extent_bytes=4096, durability="process"), lambda: inspect(tmp_path)):
        with pytest.raises(CatalogVersionError, match=words):
            look()
    assert (tmp_path / "catalog.sqlite").read_bytes() == before


@pytest.mark.parametrize(
    ("write", "without"), [*((write_by_hand, name) for name in META), *((write_old_by_hand, name) for name in OLD_META)]
)
def test_a_catalogue_without_a_row_of_meta_is_set_aside(
    tmp_path: Path, write: Callable[[Path], None], without: str
) -> None:
    write(tmp_path)
    with contextlib.closing(sqlite3.connect(tmp_path / "catalog.sqlite")) as connection, connection:
        connection.execute("DELETE FROM meta WHERE name = ?", (without,))
    Catalog(tmp_path, extent_bytes=4096, durability="process").close()
    assert len(list(tmp_path.glob("catalog.corrupt-*"))) == 1


def test_the_document_says_what_the_code_does() -> None:
    text = DOCUMENT.read_text()
    for statements in (SCHEMA, OLD_SCHEMA):
        assert statements in text
    for statement in catalog_file.CONVERT:
        assert f"{statement};\n" in text
    assert f"slab x 2^{slab.SLAB_SLOTS.bit_length() - 1} + slot" in text
    assert f"1 to {catalog_file.MOST_SHARDS}" in text
    assert f"version {catalog_file.FORMAT_VERSION}\n" in text.splitlines(keepends=True)[0]
    assert f"checkpointed every {catalog_file.WAL_PAGES * 4096 >> 20} MiB" in text
    assert f"cut to {catalog_file.WAL_BYTES >> 20} MiB" in text
    assert f"catalogue of up to {catalog_file.QUICK_CHECK_BYTES >> 20} MiB" in text
    names = [catalog_file.CATALOG_NAME, catalog_file.NEW_NAME, catalog_file.SUSPECT_NAME, catalog_file.CORRUPT_PREFIX]
    for name in [*names, "slab-0.bin", "lock"]:
        assert f"`{name}" in text
