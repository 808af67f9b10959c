"""What is served from a directory that a kill or a loss of power left: each page by its name, each byte compared."""

from __future__ import annotations

import contextlib
import dataclasses
import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gdscache import CacheEngine, PageStatus
from gdscache.config.pools import PLAIN_DIRECTORY
from gdscache.disk.catalog_file import STRIPE_NAME
from gdscache.disk.slab import slab_name
from tests.support.helpers import MHA, SMALL, WAIT, layout_of, new_planes, read_page
from tests.support.kill_record import DOCUMENTS, PAGE_TOKENS, Name, all_pages, content, name

LAYOUT = layout_of(MHA)
ROOMY, TIGHT = 160, 40  # slots: for all pages that there are, and for a part of them
USUAL: dict[str, dict[str, Any]] = {
    "three tiers, room for all": {"gpu": 16, "cpu": 10, "ssd": ROOMY},
    "three tiers, evicting": {"gpu": 16, "cpu": 10, "ssd": TIGHT},
    "ssd only, room for all": {"cpu": None, "ssd": ROOMY},
    "ssd only, evicting": {"cpu": None, "ssd": TIGHT},
}
FILES = {"catalog.sqlite", "catalog.sqlite-wal", "status", "costs.json", "history"}
_PLANES = new_planes(LAYOUT, 8, PAGE_TOKENS)


@dataclasses.dataclass(slots=True)
class Found:
    """Pages that the catalogue has after recovery, those that were served with their bytes, and those that failed."""

    names: dict[bytes, Name]
    catalogue: set[Name] = dataclasses.field(default_factory=set)
    served: set[Name] = dataclasses.field(default_factory=set)
    refused: dict[Name, PageStatus] = dataclasses.field(default_factory=dict)
    problems: list[str] = dataclasses.field(default_factory=list)
    ssds: list[dict[str, Any]] = dataclasses.field(default_factory=list)  # what their tiers count behind the opening

    def losses(self, allowed: set[Name], required: set[Name]) -> list[str]:
        """What a loss of power must not do. Empty when all is well."""
        found = list(self.problems)
        for pages, what in (
            (required - self.served, "were acknowledged and are lost"),
            (self.served - allowed, "were cleared, or never stored, and are served"),
            (self.catalogue - allowed, "were cleared, or never stored, and are in the catalogue"),
            (set(self.refused), "have rows, but other bytes"),
            (self.catalogue - self.served - set(self.refused), "have rows, but are not found"),
        ):
            if pages:
                found.append(f"{len(pages)} pages {what}")
        return found


def look(config: dict[str, Any]) -> Found:
    """Open the directory and ask for every page that there ever was. Fails where a page is served with other bytes."""
    with CacheEngine.from_config(config, _PLANES, limits=SMALL) as engine:
        found = Found(_names(engine.pages))
        found.catalogue = {found.names[key] for first, *_ in _directories(config) for key in _keys(first)}
        found.problems += engine.check().problems
        found.ssds = [tier for tier in engine.stats()["tiers"].values() if tier["kind"] == "files"]
        for ssd in found.ssds:
            if ssd["catalogue_set_aside"] is not None:
                found.problems.append("the catalogue was set aside")
            if ssd["pages"] + ssd["free_slots"] != ssd["slots"]:
                found.problems.append("slots leaked")
        asked: set[Name] = set()
        for salt, document, first in all_pages():
            if name(salt, document, first) not in asked:
                asked |= _load(engine, salt, document, first, found)
        found.problems += engine.check().problems
    return found


def verify(config: dict[str, Any], allowed: set[Name], required: set[Name]) -> int:
    """Behind a kill: the pages in `required` are there, none but those in `allowed`, all with their bytes, and nothing
    else. How many there are."""
    found = look(config)
    assert found.losses(allowed, required) == []
    assert found.served == found.catalogue, "a page is served that the catalogue does not have"
    assert sum(ssd["pages"] for ssd in found.ssds) == len(found.served), "the index and the catalogue differ"
    whole, capacity = sum(ssd["capacity_bytes"] for ssd in found.ssds), config["ssd"]["capacity"]
    assert whole == capacity if len(found.ssds) == 1 else whole <= capacity  # two tiers have whole slots each
    for ssd, directories in zip(found.ssds, _directories(config), strict=True):
        assert ssd["lost_at_recovery"] == {}
        _bounded(directories, ssd["capacity_bytes"])
        _is_whole(directories[0])  # which leaves files of SQLite's behind
    return len(found.served)


def _directories(config: dict[str, Any]) -> list[list[Path]]:
    first = [Path(config["ssd"]["path"]), *map(Path, config["ssd"].get("stripes", ()))]
    return [first, [path / PLAIN_DIRECTORY for path in first]] if config["model"].get("pack") == "on" else [first]


def _names(pages: Callable[..., Any]) -> dict[bytes, Name]:
    """Key → name of every page; `pages` is `CacheEngine.pages`."""
    keys: dict[tuple[str, int], list[bytes]] = {}
    for salt, document, _ in all_pages():
        if (salt, document) not in keys:
            keys[salt, document] = [page.key for page in pages(DOCUMENTS[document], salt)]
    return {keys[salt, document][page]: name(salt, document, page) for salt, document, page in all_pages()}


def _load(engine: CacheEngine, salt: str, document: int, first: int, found: Found) -> set[Name]:
    """Load what is there from this page on; the pages that an answer was had for."""
    hit = engine.lookup(DOCUMENTS[document], start=first * PAGE_TOKENS, salt=salt)
    names = [name(salt, document, first + i) for i in range(len(hit.pages))]
    load = engine.load(hit, range(len(names)))
    report = load.result(WAIT)
    load.release_event.synchronize(WAIT)
    for slot, (page, status) in enumerate(zip(names, report.pages, strict=True)):
        if status is PageStatus.LOADED:
            got = read_page(_PLANES, LAYOUT, [slot])
            assert np.array_equal(got, content(page, LAYOUT.plane_bytes)), f"a page is served with other bytes: {page}"
            found.served.add(page)
        else:
            found.refused[page] = status
    return set(names) or {name(salt, document, first)}


def _keys(directory: Path) -> set[bytes]:
    """The keys of all rows, read without the engine's code."""
    with contextlib.closing(sqlite3.connect(f"file:{directory / 'catalog.sqlite'}?mode=ro", uri=True)) as catalogue:
        return {bytes(key) for (key,) in catalogue.execute("SELECT key FROM pages")}


def _is_whole(directory: Path) -> None:
    """Each row is whole and in a slot of its own; looked up without the engine's code."""
    with contextlib.closing(sqlite3.connect(f"file:{directory / 'catalog.sqlite'}?mode=ro", uri=True)) as catalogue:
        rows = catalogue.execute("SELECT place, key, length FROM pages").fetchall()
        sums = {slot for (slot,) in catalogue.execute("SELECT place FROM checksums")}
        assert catalogue.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
    assert len({bytes(key) for _, key, _ in rows}) == len(rows), "a page has two rows"
    assert sums == {slot for slot, _, _ in rows}, "checksums without a page, or a page without"
    assert {length for _, _, length in rows} <= {LAYOUT.page_bytes, LAYOUT.packed_as(packed=True).page_bytes}


def _bounded(directories: Sequence[Path], capacity: int) -> None:
    slabs, others = [], 0
    for number, directory in enumerate(directories):
        files = {path.name: path.stat() for path in directory.iterdir()}
        mine = {"lock", PLAIN_DIRECTORY, slab_name(number)} | (FILES if not number else set())
        assert files.keys() <= mine | ({STRIPE_NAME} if len(directories) > 1 else set()), "kills leave files behind"
        slabs.append(files.pop(slab_name(number)))
        others += sum(status.st_size for status in files.values())
    assert sum(slab.st_size for slab in slabs) == capacity
    assert sum(slab.st_blocks for slab in slabs) * 512 <= capacity + len(slabs) * (64 << 10)
    assert min(slab.st_size for slab in slabs) > 0
    assert others < 1 << 20
