"""What a target of fuzzing is, what holds of each, and readers with faults, which a fuzzer that works finds."""

from __future__ import annotations

import contextlib
import resource
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

MEMORY = 300 << 20  # bytes that a target may take beyond what the process had
Seeds = list[bytes]


class BreachError(AssertionError):
    """A reader did what none may: more memory than it should, a wrong byte, a value that cannot be."""


class Target(NamedTuple):
    """`run(data, folder)` in an empty folder. `seeds(folder)`: from the engine's own writers."""

    run: Callable[[bytes, Path], None]
    seeds: Callable[[Path], Seeds]
    longest: int = 4096
    timeout: int = 5  # seconds, after which it hangs
    words: tuple[bytes, ...] = ()  # of what the input is made


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Of every target: it takes little memory."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    if grown > MEMORY:
        raise BreachError(f"{grown:,} bytes of memory more than before")


def require(true: object, what: str) -> None:
    if not true:
        raise BreachError(what)


def _planted(data: bytes, folder: Path) -> None:
    """Three bytes, one after the other: chance takes millions of tries, what is guided by coverage some thousands."""
    if len(data) < 3 or data[0] != 0x67:
        return
    if data[1] != 0x07:
        return
    if data[2] == 0xFE:
        raise struct.error("planted")


def _none(folder: Path) -> Seeds:
    return [b"seed"]


PLANTED = {
    "planted": Target(_planted, _none, 64),
}
