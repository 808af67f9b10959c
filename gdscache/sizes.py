"""Sizes in bytes as people write them: `64GiB`, `512MiB`, `1.5GiB`, `10GB` (decimal), or plain bytes."""

from __future__ import annotations

import math
import re
from fractions import Fraction
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, WithJsonSchema

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
MAX_SIZE = (1 << 63) - 1  # the largest file offset

UNITS = {
    "": 1,
    "B": 1,
    **{f"{letter}iB": 1 << 10 * power for power, letter in enumerate("KMGTP", start=1)},
    **{f"{letter}B": 1000**power for power, letter in enumerate("KMGTP", start=1)},
    "kB": 1000,
}

# Bounded runs of digits: exact arithmetic on a number of any length would let a file use any amount of memory.
SIZE_PATTERN = r"^[0-9]{1,19}(\.[0-9]{1,19})? ?(B|[KMGTP]iB|[KMGTP]B|kB)?$"
_SIZE = re.compile(r"([0-9]{1,19}(?:\.[0-9]{1,19})?) ?([A-Za-z]*)")
_ALLOWED = "must be bytes as a whole number, or a number and a unit: 4KiB, 512MiB, 1.5GiB (binary), 10GB (decimal)"


def parse_size(value: object) -> int:
    """Bytes of an integer or a text; a fraction of a byte is cut off. Raises `ValueError` for anything else."""
    if isinstance(value, int) and not isinstance(value, bool):
        size = value
    elif isinstance(value, str) and (match := _SIZE.fullmatch(value)) and match[2] in UNITS:
        size = int(Fraction(match[1]) * UNITS[match[2]])
    else:
        raise ValueError(_ALLOWED)
    if not 0 <= size <= MAX_SIZE:
        raise ValueError(f"must be 0 ... {MAX_SIZE} bytes")
    return size


def format_size(size: int) -> str:
    """The shortest text that `parse_size` reads back as exactly `size`, in binary units."""
    for letter in "PTGMK":
        unit = UNITS[f"{letter}iB"]
        if size and size % unit == 0:
            return f"{size // unit}{letter}iB"
    return str(size)


def significant(value: float, digits: int = 3) -> str:
    """A number for people, rounded to `digits` significant digits: `12,300`, `31.4`, `0.0120`."""
    if not value or not math.isfinite(value):
        return f"{value:g}"
    rounded = float(f"{value:.{digits - 1}e}")
    return f"{rounded:,.{max(0, digits - 1 - math.floor(math.log10(abs(rounded))))}f}"


def about(size: int) -> str:
    """A size for people, with three significant digits: `1.50 GiB`; exact below 10 KiB."""
    for letter in "PTGMK":
        unit = UNITS[f"{letter}iB"]
        if size >= 10 * unit or (letter != "K" and size >= unit):
            return f"{size // unit if size % unit == 0 else significant(size / unit)} {letter}iB"
    return f"{size} bytes"


SIZE_SCHEMA: dict[str, Any] = {
    "anyOf": [{"type": "integer", "minimum": 0, "maximum": MAX_SIZE}, {"type": "string", "pattern": SIZE_PATTERN}]
}

Size = Annotated[int, BeforeValidator(parse_size), WithJsonSchema(SIZE_SCHEMA)]
Count = Annotated[int, Field(ge=0, le=MAX_SIZE)]
"""A number of pages, bytes or samples that is read from outside."""
