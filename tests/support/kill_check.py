"""What must hold in a directory whose owner was killed, at whatever moment."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gdscache import CacheEngine
from gdscache.disk.catalog_file import STRIPE_NAME
from gdscache.disk.slab import slab_name
from tests.support.helpers import MHA, SMALL, WAIT, layout_of, new_planes, read_page
from tests.support.kill_record import DOCUMENTS, PAGE_TOKENS, Name, all_pages, content, name

LAYOUT = layout_of(MHA)
FILES = {"catalog.sqlite", "catalog.sqlite-wal", "status", "costs.json", "namespaces.json"}


def verify(config: dict[str, Any], allowed: set[Name], required: set[Name]) -> int:
    """Open the directory: the pages in `required` are there, none but those in `allowed`, all with their bytes.

    Returns how many pages were compared.
    """
    planes = new_planes(LAYOUT, 8, PAGE_TOKENS)
    with CacheEngine.from_config(config, planes, limits=SMALL) as engine:
        pages = {engine.pages(DOCUMENTS[d], salt)[page].key: name(salt, d, page) for salt, d, page in all_pages()}
        catalogue = _catalogue(Path(config["ssd"]["path"]))
        assert catalogue <= pages.keys(), "the catalogue has a page that nobody stored"
        present = {pages[key] for key in catalogue}
        assert present <= allowed, f"{len(present - allowed)} pages were cleared or never stored"
        assert required <= present, f"{len(required - present)} committed pages are lost"
        _is_whole(engine, len(present))
        assert _read_all(engine, planes, present) == present, "a page is not served"
        _is_whole(engine, len(present))
        assert set(engine.stats().get("misses", {})) <= {"absent"}, "a page failed its verdict, and nothing damaged it"
    ssd = config["ssd"]
    _bounded([Path(ssd["path"]), *map(Path, ssd.get("stripes", ()))], ssd["capacity"])
    return len(present)


def _catalogue(directory: Path) -> set[bytes]:
    """The keys of all rows, read without the engine's code; each row is whole and in a slot of its own."""
    with contextlib.closing(sqlite3.connect(f"file:{directory / 'catalog.sqlite'}?mode=ro", uri=True)) as catalogue:
        rows = catalogue.execute("SELECT place, key, length FROM pages").fetchall()
        sums = {slot for (slot,) in catalogue.execute("SELECT place FROM checksums")}
        assert catalogue.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
    keys = {bytes(key) for _, key, _ in rows}
    assert len(keys) == len(rows), "a page has two rows"
    assert sums == {slot for slot, _, _ in rows}, "checksums without a page, or a page without"
    assert {length for _, _, length in rows} <= {LAYOUT.page_bytes}
    return keys


def _is_whole(engine: CacheEngine, pages: int) -> None:
    assert engine.check().problems == ()
    ssd = engine.stats()["tiers"]["ssd"]
    assert ssd["pages"] == pages, "the index and the catalogue differ"
    assert ssd["pages"] + ssd["free_slots"] == ssd["slots"], "slots leaked"
    assert ssd["lost_at_recovery"] == {}
    assert ssd["catalogue_set_aside"] is None


def _read_all(engine: CacheEngine, planes: Any, present: set[Name]) -> set[Name]:
    """Load every page through the engine and compare its bytes; what it serves is what is present, and all of it."""
    read: set[Name] = set()
    for salt, document, page in all_pages():
        if name(salt, document, page) in read:
            continue
        hit = engine.lookup(DOCUMENTS[document], start=page * PAGE_TOKENS, salt=salt)
        names = [name(salt, document, page + i) for i in range(len(hit.pages))]
        absent = page + len(names)
        assert set(names) <= present, "a page is served that the catalogue does not have"
        assert absent * PAGE_TOKENS == len(DOCUMENTS[document]) or name(salt, document, absent) not in present
        load = engine.load(hit, range(len(names)))
        report = load.result(WAIT)
        assert report.first_bad is None, report
        for slot, served in enumerate(names):
            assert np.array_equal(read_page(planes, LAYOUT, [slot]), content(served, LAYOUT.page_bytes)), "other bytes"
        load.release_event.synchronize(WAIT)
        read |= set(names)
    return read


def _bounded(directories: Sequence[Path], capacity: int) -> None:
    slabs, others = [], 0
    for number, directory in enumerate(directories):
        files = {path.name: path.stat() for path in directory.iterdir()}
        mine = {"lock", slab_name(number)} | (FILES if not number else set())
        assert files.keys() <= mine | ({STRIPE_NAME} if len(directories) > 1 else set()), "kills leave files behind"
        slabs.append(files.pop(slab_name(number)))
        others += sum(status.st_size for status in files.values())
    assert sum(slab.st_size for slab in slabs) == capacity
    assert sum(slab.st_blocks for slab in slabs) * 512 <= capacity + len(slabs) * (64 << 10)
    assert min(slab.st_size for slab in slabs) > 0
    assert others < 1 << 20
