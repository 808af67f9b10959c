"""The directories that a slab is striped over, and their identity files. See docs/format.md.

A slab over one directory has no identity. Over several, each directory has a file that names the set and the
directory's number in it, so that a missing, swapped or foreign directory is refused by name.
"""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

from gdscache.disk.catalog_file import CATALOG_NAME, FILE_MODE, STRIPE_NAME
from gdscache.disk.kept import read_json
from gdscache.errors import DirectoryNotWritableError, StripeError
from gdscache.runtime.files import flush_directory

STRIPE_FORMAT = 1


@dataclasses.dataclass(frozen=True, slots=True)
class Stripe:
    """The identity of a directory. `directories`: those of the set when last opened."""

    set: str
    number: int
    directories: tuple[str, ...]


def claim(directories: Sequence[Path]) -> None:
    """Check that `directories` are one set in this order, or make them one if nothing was stored yet.

    They must be owned. Raises `StripeError`, `NotARegularFileError`, `DirectoryNotWritableError`; then nothing changed.
    """
    names = tuple(os.path.abspath(directory) for directory in directories)
    found = [read(directory) for directory in directories]
    first = found[0]
    used = os.path.lexists(directories[0] / CATALOG_NAME)
    reset = f"or start empty: rm -r {' '.join(names)}"
    if first is None and len(directories) == 1:
        return
    if first is None and used:
        raise StripeError(
            f"{names[0]} holds a cache on this directory alone, and ssd.stripes names {len(names) - 1} more",
            f"take ssd.stripes out, {reset}",
        )
    if first is not None and first.number != 0:
        raise StripeError(
            f"{names[0]} is directory {first.number} of a striped cache, not its first, {first.directories[0]}",
            f"set ssd.path to {first.directories[0]}, {reset}",
        )
    if first is not None and len(first.directories) != len(names):
        raise StripeError(
            f"{names[0]} holds a cache over {len(first.directories)} directories ({', '.join(first.directories)}), and "
            f"the config names {len(names)}",
            f"set ssd.path and ssd.stripes to these, {reset}",
        )
    name = secrets.token_hex(16) if first is None else first.set
    for number, (stripe, path) in enumerate(zip(found, names, strict=True)):
        if stripe is None and used:
            raise StripeError(
                f"{path} is not directory {number} of the cache in {names[0]}: it has no {STRIPE_NAME}",
                f"mount the device that was there, {reset}",
            )
        if stripe is not None and (stripe.set, stripe.number) != (name, number):
            whose = "this cache" if stripe.set == name else f"another cache, that of {stripe.directories[0]}"
            raise StripeError(
                f"{path} is directory {stripe.number} of {whose}, not directory {number} of the one in {names[0]}",
                f"list the directories as they were ({', '.join((first or stripe).directories)}), {reset}",
            )
    for number, directory in enumerate(directories):  # the first one first: after a kill the next call can go on
        if found[number] != (mine := Stripe(name, number, names)):
            write(directory, mine)


def read(directory: Path) -> Stripe | None:
    path = directory / STRIPE_NAME
    try:
        data = read_json(path)
        if data["format"] != STRIPE_FORMAT:
            raise ValueError(f"format {data['format']!r}, not {STRIPE_FORMAT}")
        stripe = Stripe(str(data["set"]), int(data["number"]), tuple(map(str, data["directories"])))
        if not 0 <= stripe.number < len(stripe.directories):
            raise ValueError(stripe.number)
        if any(b"\0" in os.fsencode(name) for name in stripe.directories):
            raise ValueError("a directory has a name that there cannot be")
        return stripe
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DirectoryNotWritableError(f"{path} cannot be read: {error.strerror}", "read it as its owner") from error
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise StripeError(
            f"{path} is damaged: {error}", f"start empty: rm -r {directory} and the other directories of ssd.stripes"
        ) from error


def write(directory: Path, stripe: Stripe) -> None:
    """Write the identity of a directory, whole or not at all. Raises `DirectoryNotWritableError`."""
    data = {"format": STRIPE_FORMAT, **dataclasses.asdict(stripe)}
    new = directory / f"{STRIPE_NAME}.new"
    try:
        new.unlink(missing_ok=True)
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
        with open(fd, "w", encoding="ascii") as file:
            json.dump(data, file)
            file.flush()
            os.fsync(fd)
        new.replace(directory / STRIPE_NAME)
        flush_directory(directory)
    except OSError as error:
        raise DirectoryNotWritableError(
            f"{directory / STRIPE_NAME} cannot be written: {error.strerror}", "free space there, or write as its owner"
        ) from error
