"""What the hostile tests of a cache directory share: small caches on an SSD alone, and what is served from them."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from gdscache.config.pools import PLAIN_DIRECTORY
from gdscache.disk.catalog import Catalog
from tests.support.helpers import MHA, PACKED, WAIT, Host, expected, make_config, narrowed, prompt

SLOTS = 48
LAYERS = 3
SALTS = ("", "tenant")
PAGES = 4  # of a document
COLUMNS = [
    *(("pages", column) for column in ("place", "key", "parent", "namespace", "length", "recency", "packed")),
    *(("checksums", column) for column in ("place", "sums")),
    *(("retention", column) for column in ("place", "priority", "lifetime", "written")),
    *(("namespaces", column) for column in ("id", "digest", "description")),
]


PACK = [False, pytest.param(True, marks=pytest.mark.suite)]  # whether pages are packed, all of which then fit


def ssd_config(path: Path, slots: int = SLOTS, *, pack: bool = False) -> dict[str, Any]:
    """`slots` of the tier `ssd`; with `pack`, a sixteenth is for pages that do not fit."""
    return make_config(
        path, model=PACKED if pack else MHA, cpu=None, ssd=-(-slots * 16 // 15) if pack else slots, bounce=8
    )


def sums_of(catalog: Catalog, slots: Sequence[int], layers: int = LAYERS) -> list[Any]:
    """The checksums of each slot in a catalogue, None where it has none of so many layers."""
    found, sums = catalog.checksum_rows(slots, layers)
    known = dict(zip(found.tolist(), sums, strict=True))
    return [known.get(int(slot)) for slot in slots]


@contextlib.contextmanager
def opened(path: Path, slots: int = SLOTS, *, pack: bool = False) -> Iterator[Host]:
    """A host whose pages lie on the SSD alone. A directory of packed pages is opened as one."""
    pack = pack or (path / PLAIN_DIRECTORY).exists()
    host = Host(ssd_config(path, slots, pack=pack), blocks=16)
    if pack:
        host.data = lambda key: narrowed(expected(host.layout, key))  # type: ignore[method-assign]
    try:
        yield host
    finally:
        host.engine.close()


@contextlib.contextmanager
def raw(path: Path) -> Iterator[sqlite3.Connection]:
    """The catalogue of a directory that nobody has open; what is written is folded in."""
    with contextlib.closing(sqlite3.connect(path / "catalog.sqlite", isolation_level=None)) as connection:
        yield connection


def document(number: int, pages: int = PAGES) -> tuple[list[int], str]:
    """Tokens and salt."""
    return prompt(number, pages), SALTS[number % len(SALTS)]


def store(host: Host, numbers: Iterable[int], pages: int = PAGES) -> None:
    for number in numbers:
        tokens, salt = document(number, pages)
        host.store(tokens, salt=salt).result(WAIT)


def served(host: Host, numbers: Iterable[int], pages: int = PAGES) -> dict[int, int]:
    """Document → pages of it that a load calls good. Fails where one of them has other bytes."""
    found = {}
    for number in numbers:
        tokens, salt = document(number, pages)
        found[number] = host.load(tokens, salt=salt).tokens // host.layout.page_tokens
    return found
