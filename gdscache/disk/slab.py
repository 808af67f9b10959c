"""Slab files: the extents of the SSD tier, preallocated, one after another (docs/format.md); a transport opens them.

Only this module maps slots to files. Over several directories, stretches of neighbouring slots (`stretch_slots`) are in
one after the other in turn: neighbours are read together, and a batch keeps all devices busy. A slab has a *shard* for
each GPU that holds a part of each page: files of their own, with the same slots in them.

A slab over one directory has no identity. Over several, each directory has a file (`stripe.json`) that names the set
and the directory's number in it, so that a missing, swapped or foreign directory is refused by name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from gdscache.arrays import Int64Array
from gdscache.disk.catalog_file import CATALOG_NAME, FILE_MODE, LOG_SUFFIX, STRIPE_NAME, open_own, system_errors
from gdscache.disk.kept import read_json
from gdscache.errors import (
    CapacityError,
    DirectoryNotWritableError,
    InvalidValueError,
    IOFailedError,
    NoSpaceError,
    SlotRangeError,
    StorageError,
    StripeError,
)
from gdscache.runtime.files import flush_directory, free_space, start_empty
from gdscache.sizes import MIB, about
from gdscache.storage.base import Descriptors, Files, Transport
from gdscache.storage.files import NativeTransport

if TYPE_CHECKING:
    import torch


STRETCH_BYTES = 4 << 20  # least bytes of neighbouring extents on one device: the most of one read
SLAB_SLOTS = 1 << 40  # slots of one slab: a place is slab x SLAB_SLOTS + slot
_WRITABLE = "make it writable for this user, or set another ssd.path"


@dataclasses.dataclass(frozen=True, slots=True)
class Slab:
    """`slots` extents of `extent_bytes` in each of `shards`. `files` come one shard after the other, each in the order
    of the directories. Use `Slab.open`.

    `valid_slots` leading slots had their bytes before this open: 0 for a new file, fewer than `slots` after the
    capacity grew or a file was truncated. The catalogue's rows of later slots are void.
    """

    files: tuple[Path, ...]
    extent_bytes: int
    slots: int
    valid_slots: int
    stretch: int  # neighbouring slots in one file before the next file has its turn
    inodes: tuple[int, ...] = ()  # of the opened files; () if not needed
    shards: int = 1

    @classmethod
    def open(
        cls,
        directory: Path,
        extent_bytes: int,
        slots: int,
        stripes: Sequence[Path] = (),
        *,
        shards: int = 1,
        shard: int | None = None,
    ) -> Slab:
        """Open slab 0 of `directory` and the further `stripes`: its shard number `shard` of `shards`, or all of them
        (None), each preallocated to `slots * extent_bytes` bytes.

        Every block is allocated here (mode 0600), so that no later write can find the disk full. A larger file stays as
        it is until `cut`; slots that existed keep their bytes. Files to which no stretch of a small slab falls are
        empty. Raises `NoSpaceError` before writing if a file system has too little room, `CapacityError` for less than
        one slot or more than a place can name, `InvalidValueError`, `NotARegularFileError`,
        `DirectoryNotWritableError`, `IOFailedError`. After an error the files are as before.
        """
        if shards < 1 or (shard is not None and not 0 <= shard < shards):
            message = f"shard {shard} of {shards}: there is none"
            raise InvalidValueError(message, "a bug: please report it, with this message")
        opened = range(shards) if shard is None else (shard,)
        directories = (directory, *stripes)
        stretch = stretch_slots(extent_bytes)
        if extent_bytes < 1 or slots < 1:
            raise CapacityError(
                f"a slab of {slots} extents of {extent_bytes} bytes holds nothing",
                f"set ssd.capacity to at least {max(extent_bytes, 1)}",
            )
        if slots > SLAB_SLOTS:
            most = SLAB_SLOTS * extent_bytes * shards
            raise CapacityError(f"a slab has at most {SLAB_SLOTS:,} slots", f"set ssd.capacity to at most {most}")
        files = slab_files(directories, opened)
        valid, count = slots, len(directories)
        with contextlib.ExitStack() as descriptors, contextlib.ExitStack() as undo:
            made = []
            for at, path in enumerate(files):
                number = at % count
                total = extent_bytes * _share(number, count, stretch, slots)
                created, before = _prepare(path, total, descriptors, undo)
                valid = min(valid, first_missing(number, count, extent_bytes, before // extent_bytes))
                if created:
                    made.append(path.parent)
            undo.pop_all()
            for where in made:
                with _refusals(where, "flushed", "see the system log for the device"):
                    flush_directory(where)
            inodes = tuple(path.stat().st_ino for path in files)
        return cls(files, extent_bytes, slots, valid, stretch, inodes, len(opened))

    def of(self, index: int) -> Slab:
        if not 0 <= index < self.shards:
            raise IndexError(f"shard {index} of {self.shards}")
        count = self.directories
        mine = slice(index * count, (index + 1) * count)
        return dataclasses.replace(self, files=self.files[mine], inodes=self.inodes[mine], shards=1)

    @property
    def directories(self) -> int:
        return len(self.files) // self.shards

    @property
    def path(self) -> Path:
        return self.files[0]

    @property
    def nbytes(self) -> int:
        return self.slots * self.extent_bytes * self.shards

    def locate(self, slot: int) -> tuple[int, int]:
        """`(index into files, byte offset)` of a slot's extent in the first shard; each further shard has it at the
        same offset, `directories` files further on. Raises `SlotRangeError`."""
        if not 0 <= slot < self.slots:
            raise SlotRangeError(f"slot {slot} is outside a slab of {self.slots} slots", "a bug: please report it")
        return self._place(slot)

    def locate_all(self, slots: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        for slot in (slots.min(), slots.max()) if len(slots) else ():
            self.locate(int(slot))
        return self._place(slots)

    def _place(self, slots: Any) -> tuple[Any, Any]:
        number, within = divmod(slots, self.stretch)
        count = self.directories
        return number % count, (number // count * self.stretch + within) * self.extent_bytes

    def cut(self) -> None:
        """Shorten the files to `slots`. Raises `IOFailedError`."""
        for path, nbytes in zip(self.files, self._sizes(), strict=True):
            with _refusals(path, "cut", "see the system log for the device"), contextlib.ExitStack() as opened:
                fd = open_own(path, os.O_RDWR)
                opened.callback(os.close, fd)
                if os.fstat(fd).st_size > nbytes:
                    os.ftruncate(fd, nbytes)

    def _sizes(self) -> list[int]:
        count = self.directories
        return [self.extent_bytes * _share(n % count, count, self.stretch, self.slots) for n in range(len(self.files))]

    def check(self) -> list[str]:
        """Problems of the files since they were opened."""
        problems = []
        for number, (path, nbytes) in enumerate(zip(self.files, self._sizes(), strict=True)):
            try:
                status = path.lstat()
            except OSError as error:
                problems.append(f"{path} is gone: {error.strerror}; close and open the engine")
                continue
            if status.st_ino != self.inodes[number]:
                problems.append(f"{path} was replaced by another file; close and open the engine")
            elif status.st_size < nbytes:
                problems.append(f"{path} has {status.st_size:,} bytes of {nbytes:,}")
        return problems


def slab_name(number: int, shard: int = 0) -> str:
    return f"slab-{number}.0.{shard}.bin" if shard else f"slab-{number}.bin"


def slab_files(directories: Sequence[Path], shards: Iterable[int] = (0,)) -> tuple[Path, ...]:
    return tuple(where / slab_name(number, part) for part in shards for number, where in enumerate(directories))


def missing_files(directories: Sequence[Path], shards: int) -> list[Path]:
    """The files of a cache that owned directories lack, in the order in which `remove_files` removes them: after a kill
    between two of them, the next open finds no cache, or a set of directories that it goes on to make."""
    catalog = [directories[0] / name for name in (CATALOG_NAME, CATALOG_NAME + LOG_SUFFIX)]
    stripes = [where / STRIPE_NAME for where in reversed(directories)]
    return [file for file in (*catalog, *stripes, *slab_files(directories, range(shards))) if not os.path.lexists(file)]


def remove_files(files: Iterable[Path]) -> None:
    with contextlib.suppress(OSError):  # a file that stays can be opened as it is
        for file in files:
            file.unlink(missing_ok=True)


def stretch_slots(extent_bytes: int) -> int:
    """Neighbouring slots in one file before the next file has its turn."""
    return -(-STRETCH_BYTES // max(extent_bytes, 1))


def _share(number: int, count: int, stretch: int, slots: int) -> int:
    rounds, rest = divmod(slots, stretch * count)
    return rounds * stretch + min(max(rest - number * stretch, 0), stretch)


def first_missing(number: int, count: int, extent_bytes: int, held: int) -> int:
    """The first slot that file `number` of `count` lacks, if it has `held` extents."""
    stretch = stretch_slots(extent_bytes)
    rounds, rest = divmod(held, stretch)
    return (rounds * count + number) * stretch + rest


def _prepare(path: Path, total: int, descriptors: contextlib.ExitStack, undo: contextlib.ExitStack) -> tuple[bool, int]:
    """Give a slab file at least `total` bytes. Returns whether it is new, and its former bytes. `undo` restores it."""
    with _refusals(path, "opened", _WRITABLE, DirectoryNotWritableError):
        created = not os.path.lexists(path)
        fd = open_own(path, os.O_RDWR | (os.O_CREAT | os.O_EXCL if created else 0))
    descriptors.callback(os.close, fd)
    status = os.fstat(fd)
    before = 0 if created else status.st_size
    undo.callback(_restore, path, fd, created, before)
    needed, free = total - min(status.st_blocks * 512, total), free_space(path.parent)
    if free is not None and needed > free:
        short = -(-(needed - free) // MIB) * MIB
        raise NoSpaceError(
            f"{path} needs {about(needed)} more ({about(total)} in all), and the file system has {about(free)} free",
            f"lower ssd.capacity, or free {about(short)} there",
        )
    with _refusals(path, f"given {about(total)}", "lower ssd.capacity, or set ssd.path to another file system"):
        if total:  # else EINVAL
            os.posix_fallocate(fd, 0, total)
    return created, before


@contextlib.contextmanager
def _refusals(path: Path, what: str, hint: str, cause: type[StorageError] = IOFailedError) -> Iterator[None]:
    """`system_errors`, with causes of their own for a full disk, and too many open files."""
    with system_errors(path, what, hint, cause):
        try:
            yield
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                free = about(shutil.disk_usage(path.parent).free)
                raise NoSpaceError(
                    f"{path} cannot be {what}: {error.strerror}; the file system reports {free} free",
                    "lower ssd.capacity, or free space, inodes or quota there",
                ) from error
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise IOFailedError(
                    f"{path} cannot be {what}: {error.strerror}", "raise ulimit -n", error.errno
                ) from error
            raise


def _restore(path: Path, fd: int, created: bool, before: int) -> None:
    if created:
        path.unlink(missing_ok=True)
    elif os.fstat(fd).st_size > before:
        os.ftruncate(fd, before)


class SlabFiles(Files, Protocol):
    """The open files of a slab: of this process (`SlabIO`), or of ranks (`RemoteSlab`)."""

    slab: Slab  # with ranks, the first shard's

    def register(self, memory: memoryview | torch.Tensor) -> None:
        """Announce a buffer that will be used until `close`."""

    def cut(self) -> None:
        """See `Slab.cut`."""

    def check(self) -> list[str]: ...

    def flush(self) -> None: ...

    def describe(self) -> dict[str, object]: ...

    def close(self) -> None:
        """Close the files, after all I/O on them; may be called twice."""


class SlabIO:
    """The files of one shard of a slab, opened by a transport, which is closed with them. `shard`: its number among the
    opened ones."""

    def __init__(self, slab: Slab, transport: Transport, shard: int = 0) -> None:
        self.transport = transport
        self.slab = slab = slab.of(shard)
        with contextlib.ExitStack() as undo:
            undo.callback(transport.close)
            self._files = [transport.open(file) for file in slab.files]
            undo.pop_all()
        self._period = slab.stretch if len(self._files) > 1 else slab.slots

    def register(self, memory: memoryview | torch.Tensor) -> None:
        self.transport.register(memory)

    def stretches(self, slots: Int64Array, nbytes: int) -> Iterator[tuple[int, int, int, int]]:
        """(file, offset in it, first, count) of runs of `slots`, int64 (slots,), that lie side by side, each of up to
        `nbytes` or one slot."""
        files, offsets = self.slab.locate_all(slots)
        most = max(1, nbytes // self.slab.extent_bytes)
        breaks = np.flatnonzero((np.diff(slots) != 1) | (slots[1:] % self._period == 0)) + 1
        for run in np.split(np.arange(len(slots)), breaks):
            for first in range(run[0], run[-1] + 1, most):
                yield self._files[files[first]], int(offsets[first]), first, min(most, int(run[-1]) + 1 - first)

    def hand_over(self) -> Descriptors:
        """The files for an executor. Registering, flushing and closing stay here."""
        transport = self.transport
        own = transport if isinstance(transport, NativeTransport) and transport.is_own else None
        return Descriptors(
            tuple(self._files),
            self._period,
            transport.threads,
            uring=own is not None and own.uring,
            cufile=None if own is None else own.cufile,
            transport=None if own is not None else transport,
        )

    def describe(self) -> dict[str, object]:
        return self.transport.describe()

    def cut(self) -> None:
        self.slab.cut()

    def check(self) -> list[str]:
        return self.slab.check()

    def flush(self) -> None:
        for file in self._files:
            self.transport.flush(file)

    def close(self) -> None:
        self.transport.close()


STRIPE_FORMAT = 1


@dataclasses.dataclass(frozen=True, slots=True)
class Stripe:
    """The identity of a directory. `directories`: those of the set when last opened."""

    set: str
    number: int
    directories: tuple[str, ...]


def claim_stripes(directories: Sequence[Path]) -> None:
    """Check that `directories` are one set in this order, or make them one if nothing was stored yet.

    They must be owned. Raises `StripeError`, `NotARegularFileError`, `DirectoryNotWritableError`; then nothing changed.
    """
    names = tuple(os.path.abspath(directory) for directory in directories)
    found = [read_stripe(directory) for directory in directories]
    first = found[0]
    used = os.path.lexists(directories[0] / CATALOG_NAME)
    reset = f"or {start_empty(*names)}"
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
        if stripe is None and number and os.path.lexists(f"{path}/{CATALOG_NAME}"):
            raise StripeError(
                f"{path} holds a cache on this directory alone, which could not be opened any more",
                f"take it out of ssd.stripes, or {start_empty(path)}",
            )
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
            write_stripe(directory, mine)


def read_stripe(directory: Path) -> Stripe | None:
    path = directory / STRIPE_NAME
    if not os.path.lexists(path):
        return None
    try:
        with system_errors(path, "read", "read it as its owner", DirectoryNotWritableError):
            data = read_json(path)
        if data["format"] != STRIPE_FORMAT:
            raise ValueError(f"format {data['format']!r}, not {STRIPE_FORMAT}")
        stripe = Stripe(str(data["set"]), int(data["number"]), tuple(map(str, data["directories"])))
        if not 0 <= stripe.number < len(stripe.directories):
            raise ValueError(stripe.number)
        if any(b"\0" in os.fsencode(name) for name in stripe.directories):
            raise ValueError("a directory has a name that there cannot be")
        return stripe
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise StripeError(
            f"{path} is damaged: {error}", f"{start_empty(directory)} and the other directories of ssd.stripes"
        ) from error


def write_stripe(directory: Path, stripe: Stripe) -> None:
    """Write the identity of a directory, whole or not at all. Raises `DirectoryNotWritableError`."""
    data, path = {"format": STRIPE_FORMAT, **dataclasses.asdict(stripe)}, directory / STRIPE_NAME
    with system_errors(path, "written", "free space there, or write as its owner", DirectoryNotWritableError):
        new = directory / f"{STRIPE_NAME}.new"
        new.unlink(missing_ok=True)
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
        with open(fd, "w", encoding="ascii") as file:
            json.dump(data, file)
            file.flush()
            os.fsync(fd)
        new.replace(path)
        flush_directory(directory)
