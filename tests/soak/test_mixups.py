"""No mix-up of slot, row, owner or age is ever served: what the disk holds is made to disagree with itself.

Every page that a load calls good is compared with the bytes that belong to its key (`Host.finish`).
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from gdscache.commands.inspect.verification import verify
from gdscache.errors import GdsCacheError
from tests.support.disk_parts import PACK, SALTS, SLOTS, document, opened, raw, served, store
from tests.support.helpers import SEED

BLOCK = 4096
DOCUMENTS = range(30)
LONG, ROOM = 9, 135  # pages of a document, and slots: for 15 documents
SINGLE = range(100, 124)  # documents of one page each


@pytest.fixture(scope="module", params=PACK)
def life(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[bytes]]:
    """A directory after a life of stores, evictions, an invalidation and a clear; and its catalogue as it was at each
    moment."""
    path = tmp_path_factory.mktemp("life") / "cache"
    moments = []
    for turn in range(6):
        with opened(path, ROOM, pack=request.param) as host:
            if turn == 2:
                host.engine.invalidate(host.engine.namespace("tenant"))
            if turn == 3:
                host.engine.clear()
            store(host, DOCUMENTS[4 * turn : 4 * turn + 10], LONG)
            served(host, DOCUMENTS[4 * turn : 4 * turn + 3], LONG)
        moments.append((path / "catalog.sqlite").read_bytes())
    return path, moments


def stale(moments: Sequence[bytes]) -> Iterator[tuple[int, int, int]]:
    """(older moment, later moment, block) of all blocks that differ, the last moment first."""
    for later in reversed(range(1, len(moments))):
        for older in range(later):
            for block in range(len(moments[later]) // BLOCK):
                at = slice(block * BLOCK, (block + 1) * BLOCK)
                if moments[older][at] != moments[later][at] and len(moments[older]) >= at.stop:
                    yield older, later, block


def look(path: Path, catalogue: bytes) -> None:
    """Open a directory with this catalogue, ask for all, go on storing, and ask again. Bad pages behind one whose row
    is lost are found when that page has come back, so what is stored is stored twice."""
    (path / "catalog.sqlite").write_bytes(catalogue)
    try:
        good = verify(path)["good_pages"]
    except GdsCacheError:
        good = ROOM
    with opened(path, ROOM) as host:
        found = served(host, DOCUMENTS, LONG)
        assert sum(found.values()) <= good, "a page is served that verify finds bad"
        for _ in range(2):
            store(host, DOCUMENTS[-2:], LONG)
            served(host, DOCUMENTS, LONG)
        assert not host.engine.stats()["leases"]
    with opened(path, ROOM) as host:
        assert served(host, DOCUMENTS[-2:], LONG) == dict.fromkeys(DOCUMENTS[-2:], LONG)


def block_of(catalogue: bytes, older: bytes, block: int) -> bytes:
    """A catalogue with a block of an older one."""
    at, stop = block * BLOCK, (block + 1) * BLOCK
    return catalogue[:at] + older[at:stop] + catalogue[stop:]


def replay(life: tuple[Path, list[bytes]], scratch: Path, cases: Sequence[tuple[int, int, int]]) -> None:
    path, moments = life
    for number, (older, later, block) in enumerate(cases):
        copy = scratch / str(number)
        print(f"block {block} of moment {later} as it was at {older}")
        shutil.copytree(path, copy)
        look(copy, block_of(moments[later], moments[older], block))
        shutil.rmtree(copy)


def test_a_block_of_the_catalogue_that_is_older_than_the_rest(life: tuple[Path, list[bytes]], tmp_path: Path) -> None:
    """Six blocks, each as it was at some moment."""
    last = len(life[1]) - 1
    cases = [case for case in stale(life[1]) if case[1] == last]
    some = [random.Random(0).choice(list(group)) for _, group in itertools.groupby(sorted(cases, key=_block), _block)]
    assert len(some) > 4
    replay(life, tmp_path, random.Random(1).sample(some, min(6, len(some))))


@pytest.mark.soak
def test_every_older_block_of_every_catalogue(life: tuple[Path, list[bytes]], tmp_path: Path) -> None:
    replay(life, tmp_path, list(stale(life[1])))


@pytest.mark.soak
def test_older_blocks_together(life: tuple[Path, list[bytes]], tmp_path: Path) -> None:
    chance = random.Random(SEED)
    path, moments = life
    for number in range(300):
        catalogue = moments[-1]
        for older, later, block in chance.sample(list(stale(moments)), chance.randint(2, 5)):
            catalogue = block_of(catalogue, moments[older], block) if later == len(moments) - 1 else catalogue
        copy = tmp_path / str(number)
        shutil.copytree(path, copy)
        look(copy, catalogue)
        shutil.rmtree(copy)


def _block(case: tuple[int, int, int]) -> int:
    return case[2]


# Rows and extents in each other's places.


@pytest.fixture(scope="module", params=PACK)
def singles(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with pages that follow none, one a document."""
    path = tmp_path_factory.mktemp("singles") / "cache"
    with opened(path, pack=request.param) as host:
        store(host, SINGLE, 1)
        assert served(host, SINGLE, 1) == dict.fromkeys(SINGLE, 1)
    return path


@pytest.fixture
def path(singles: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(singles, tmp_path / "cache"))


def swap(table: str, *columns: str) -> Callable[[Path, int, int], None]:
    def change(path: Path, one: int, other: int) -> None:
        names = ", ".join(columns)
        with raw(path) as catalogue:
            rows = [
                catalogue.execute(f"SELECT {names} FROM {table} WHERE place = ?", (s,)).fetchone() for s in (one, other)
            ]
            for slot, row in zip((other, one), rows, strict=True):
                sets = ", ".join(f"{column} = ?" for column in columns)
                catalogue.execute(f"UPDATE {table} SET {sets} WHERE place = ?", (*row, slot))

    return change


def swap_extents(path: Path, one: int, other: int) -> None:
    data = bytearray((path / "slab-0.bin").read_bytes())
    size = len(data) // SLOTS
    first, second = (slice(slot * size, (slot + 1) * size) for slot in (one, other))
    data[first], data[second] = data[second], data[first]
    (path / "slab-0.bin").write_bytes(data)


def copy_sums(path: Path, one: int, other: int) -> None:
    with raw(path) as catalogue:
        catalogue.execute(
            "UPDATE checksums SET sums = (SELECT sums FROM checksums WHERE place = ?) WHERE place = ?", (one, other)
        )


# What is changed, and how many of the two pages it costs. Whole rows that change places come without their bytes.
SWAPS: dict[str, tuple[Callable[[Path, int, int], None], int]] = {
    "keys": (swap("pages", "key"), 2),
    "keys and all that names them": (swap("pages", "key", "parent", "namespace"), 2),
    "checksums": (swap("checksums", "sums"), 2),
    "one's checksums twice": (copy_sums, 1),
    "extents": (swap_extents, 2),
    "namespaces": (swap("pages", "namespace"), 2),
    "recency": (swap("pages", "recency"), 0),
    "parents": (swap("pages", "parent"), 0),
}


@pytest.mark.parametrize("what", SWAPS)
def test_pages_that_changed_places_are_misses_and_nothing_else_is(path: Path, what: str) -> None:
    """Pages 2i and 2i + 1 of two namespaces, in all slots: those that are touched are misses, once, by cause."""
    change, cost = SWAPS[what]
    with raw(path) as catalogue:
        slots = [slot for (slot,) in catalogue.execute("SELECT place FROM pages ORDER BY recency")]
    pairs = [(slots[i], slots[i + 1]) for i in range(0, 12, 2)]
    for pair in pairs:
        change(path, *pair)
    if what != "namespaces":  # the bytes are those of the key: another name of their owner is no matter of `verify`
        assert verify(path)["bad_pages"] == cost * len(pairs)
    with opened(path) as host:
        found = served(host, SINGLE, 1)
        lost = [number for number, pages in found.items() if not pages]
        assert len(lost) == cost * len(pairs)
        assert set(lost) <= set(SINGLE[:12])
        stats = host.engine.stats()
        assert stats["misses"].get("checksum", 0) == len(lost), stats["misses"]
        assert served(host, lost, 1) == dict.fromkeys(lost, 0)
        assert host.engine.stats()["misses"]["absent"] == len(lost), "they are dropped at their first use"
        store(host, lost, 1)
        assert served(host, SINGLE, 1) == dict.fromkeys(SINGLE, 1)
        assert not host.engine.check().problems


# Another owner.


def test_files_of_another_owner_in_place_of_ours(tmp_path: Path) -> None:
    """The same, below every lock: slab and catalogue are written over with those of a copy that lived on."""
    path, copy = tmp_path / "cache", tmp_path / "copy"
    first, second = range(12), range(12, 24)
    with opened(path) as host:
        store(host, first)
    shutil.copytree(path, copy)
    with opened(copy) as other:
        store(other, second)
        assert sum(served(other, second).values()) == SLOTS
    with opened(path) as host:  # its index is read, its checksums are not
        for name in ("slab-0.bin", "catalog.sqlite"):
            fd = os.open(path / name, os.O_WRONLY)
            os.pwrite(fd, (copy / name).read_bytes(), 0)
            os.close(fd)
        assert set(served(host, first).values()) == {0}
        served(host, second)


def test_a_namespace_that_is_invalidated_leaves_nothing_behind(path: Path) -> None:
    """Rows of one namespace say that they are of the other: to invalidate their own does not find them."""
    with opened(path) as host:
        plain, tenant = (host.engine.namespace(salt) for salt in SALTS)
    with raw(path) as catalogue:
        catalogue.execute(
            "UPDATE pages SET namespace = (SELECT id FROM namespaces WHERE digest = ?) "
            "WHERE namespace = (SELECT id FROM namespaces WHERE digest = ?)",
            (tenant, plain),
        )
    with opened(path) as host:
        host.engine.invalidate(plain)
        found = served(host, SINGLE, 1)
        assert found == {number: int(document(number)[1] == "tenant") for number in SINGLE}
        assert not host.engine.check().problems
