"""What a child was about to do and had done when it was killed: a log that survives it, and what follows from it.

Every line is one `write` to a file in append mode, so the order of lines is the order of events, over threads too.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from tests.support.helpers import Bytes, narrowed

PAGE_TOKENS = 4
SALTS = ("", "tenant")


def _documents() -> list[list[int]]:
    """Token sequences of 3 to 6 pages; three share their first two pages."""
    rng = random.Random(20)

    def some(pages: int) -> list[int]:
        return [rng.randrange(1 << 32) for _ in range(pages * PAGE_TOKENS)]

    return [stem + some(pages) for stem in [some(2) for _ in range(6)] for pages in (1, 2, 4)]


DOCUMENTS = _documents()
PAGES = [len(document) // PAGE_TOKENS for document in DOCUMENTS]

Name = tuple[str, tuple[int, ...]]
"""A page without the help of the engine: the salt, and all tokens up to the page's end."""


def name(salt: str, document: int, page: int) -> Name:
    return salt, tuple(DOCUMENTS[document][: (page + 1) * PAGE_TOKENS])


def all_pages() -> Iterator[tuple[str, int, int]]:
    """(salt, document, page) of every page, heads before tails."""
    for salt, document in itertools.product(SALTS, range(len(DOCUMENTS))):
        for page in range(PAGES[document]):
            yield salt, document, page


def content(page: Name, nbytes: int) -> Bytes:
    """The bytes that belong to a page. Half of the pages fit if they are to be packed."""
    drawn = np.frombuffer(hashlib.shake_128(repr(page).encode()).digest(nbytes), np.uint8)
    return narrowed(drawn) if drawn[0] & 1 else drawn


class Log:
    """The writing side, in the child. Numbers name what was begun, within one session."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC)
        self._numbers = itertools.count()

    def session(self) -> None:
        """A process begins; everything that an earlier one had begun is over."""
        self._write("session")

    def store(self, salt: str, document: int, pages: Iterable[int]) -> int:
        """Before anything is done to store these pages."""
        return self._begin("store", [salt, document, list(pages)])

    def submitted(self, number: int) -> None:
        self._write("submitted", number)

    def kept(self, number: int, pages: Sequence[int]) -> None:
        """The engine has said that the SSD holds these pages."""
        self._write("kept", number, list(pages))

    def clear(self, salt: str | None) -> int:
        """Before everything (None), or what has this salt, is cleared."""
        return self._begin("clear", salt)

    def cleared(self, number: int) -> None:
        self._write("cleared", number)

    def close(self) -> None:
        os.close(self._fd)

    def _begin(self, what: str, *values: object) -> int:
        number = next(self._numbers)
        self._write(what, number, *values)
        return number

    def _write(self, *values: object) -> None:
        line = json.dumps(values).encode() + b"\n"
        assert os.write(self._fd, line) == len(line)


class Record:
    """The reading side: after `replay`, `required` must be on the SSD, and nothing outside `allowed` may be.

    A store that is still being submitted when a clear begins, or begins before the clear returns, may come after it:
    its pages stay allowed. Only a store that began after every clear had returned makes its pages required.
    """

    def __init__(self) -> None:
        self.allowed: set[Name] = set()
        self.required: set[Name] = set()
        self.cleared = 0
        self.kept = 0
        self._stores: dict[int, set[Name]] = {}
        self._submitting: dict[int, set[Name]] = {}
        self._overtaken: dict[int, list[str | None]] = {}  # store: the clears since it began
        self._clears: dict[int, tuple[str | None, set[Name]]] = {}  # clear under way: the pages that may come after it

    @classmethod
    def replay(cls, path: Path) -> Record:
        record = cls()
        for line in path.read_bytes().splitlines(keepends=True):
            if line.endswith(b"\n"):
                what, *values = json.loads(line)
                getattr(record, f"_on_{what}")(*values)
        return record

    def _on_session(self) -> None:
        for running in (self._stores, self._submitting, self._overtaken, self._clears):
            running.clear()

    def _on_store(self, number: int, what: tuple[str, int, list[int]]) -> None:
        salt, document, pages = what
        names = {name(salt, document, page) for page in pages}
        self._stores[number] = self._submitting[number] = names
        self._overtaken[number] = [salt for salt, _ in self._clears.values()]
        self.allowed |= names
        for _, later in self._clears.values():
            later |= names

    def _on_submitted(self, number: int) -> None:
        del self._submitting[number]

    def _on_kept(self, number: int, pages: list[int]) -> None:
        self.kept += len(pages)
        ends = {(page + 1) * PAGE_TOKENS for page in pages}
        self.required |= {
            page
            for page in self._stores[number]
            if len(page[1]) in ends and not any(_concerns(salt, page) for salt in self._overtaken[number])
        }

    def _on_clear(self, number: int, salt: str | None) -> None:
        self._clears[number] = salt, set().union(*self._submitting.values())
        self.required = {page for page in self.required if not _concerns(salt, page)}
        for clears in self._overtaken.values():
            clears.append(salt)

    def _on_cleared(self, number: int) -> None:
        self.cleared += 1
        salt, later = self._clears.pop(number)
        self.allowed = {page for page in self.allowed if not _concerns(salt, page) or page in later}


def _concerns(salt: str | None, page: Name) -> bool:
    return salt is None or salt == page[0]
