"""What the hostile tests of a cache directory share: small caches on an SSD alone, and what is served from them."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tests.support.helpers import WAIT, Host, make_config, prompt

SLOTS = 48
LAYERS = 3
SALTS = ("", "tenant")
PAGES = 4  # of a document


def ssd_config(path: Path, slots: int = SLOTS) -> dict[str, Any]:
    return make_config(path, cpu=None, ssd=slots, bounce=8)


@contextlib.contextmanager
def opened(path: Path, slots: int = SLOTS) -> Iterator[Host]:
    """A host whose pages lie on the SSD alone."""
    host = Host(ssd_config(path, slots), blocks=16)
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
