"""Slab files: the extents of the SSD tier, preallocated, one after another. See docs/format.md.

Everything that knows how slots map to files is here. There is one file today; stripes over several paths change
`files` and `locate`, and nothing outside this module.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import shutil
import stat
from pathlib import Path

from gdscache.errors import (
    CapacityError,
    DirectoryNotWritableError,
    IOFailedError,
    NoSpaceError,
    NotARegularFileError,
    SlotRangeError,
)

SLAB_NAME = "slab-0.bin"
FILE_MODE = 0o600


@dataclasses.dataclass(frozen=True, slots=True)
class Slab:
    """`slots` extents of `extent_bytes` each. Use `Slab.open`.

    `valid_slots` leading slots existed with their bytes before this open: 0 for a new file, fewer than `slots` after
    the capacity grew or somebody truncated the file. What the catalogue says of later slots is void.
    """

    files: tuple[Path, ...]
    extent_bytes: int
    slots: int
    valid_slots: int

    @classmethod
    def open(cls, directory: Path, extent_bytes: int, slots: int) -> Slab:
        """Open the slab of `directory`, preallocated to exactly `slots * extent_bytes` bytes (mode 0600).

        Every block is allocated here, so that no later write can find the disk full. A larger file is cut; slots that
        existed keep their bytes. Raises `NoSpaceError` before anything is written where the file system has too little
        room, `CapacityError` for less than one slot, `NotARegularFileError`, `DirectoryNotWritableError`,
        `IOFailedError`. After an error the file is as it was before.
        """
        if slots < 1 or extent_bytes < 1:
            raise CapacityError(
                f"a slab of {slots} extents of {extent_bytes} bytes holds nothing",
                f"set ssd.capacity to at least {max(extent_bytes, 1)}",
            )
        path = directory / SLAB_NAME
        fd, created = _open_file(path)
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, fd)
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise _irregular(path)
            total, before = slots * extent_bytes, 0 if created else status.st_size
            undo.callback(_restore, path, fd, created, before)
            _check_space(path, total, status)
            _allocate(path, fd, total)
            undo.pop_all()
            os.close(fd)
            if created:
                _flush_directory(directory)
        return cls((path,), extent_bytes, slots, min(before // extent_bytes, slots))

    @property
    def path(self) -> Path:
        """The slab file, while there is one."""
        return self.files[0]

    @property
    def nbytes(self) -> int:
        """Bytes of all slab files together."""
        return self.slots * self.extent_bytes

    def locate(self, slot: int) -> tuple[int, int]:
        """`(index into files, byte offset)` of a slot's extent. Raises `SlotRangeError`."""
        if not 0 <= slot < self.slots:
            raise SlotRangeError(f"slot {slot} is outside a slab of {self.slots} slots", "a bug: please report it")
        return 0, slot * self.extent_bytes

    def offset(self, slot: int) -> int:
        """Byte offset of a slot's extent in its file. Raises `SlotRangeError`."""
        return self.locate(slot)[1]

    def flush(self) -> None:
        """Make the bytes written so far survive a loss of power (`durability: power`). Raises `IOFailedError`."""
        for path in self.files:
            try:
                fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
                try:
                    os.fdatasync(fd)
                finally:
                    os.close(fd)
            except OSError as error:
                raise IOFailedError(
                    f"{path} cannot be flushed: {error.strerror}", "see the kernel log for the device", error.errno
                ) from error


def _open_file(path: Path) -> tuple[int, bool]:
    """A descriptor, and whether this call made the file."""
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # non-blocking: a FIFO here must not hang us
    try:
        try:
            return os.open(path, flags), False
        except FileNotFoundError:
            return os.open(path, flags | os.O_CREAT | os.O_EXCL, FILE_MODE), True
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise _irregular(path) from error
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NoSpaceError(f"{path} cannot be made: {error.strerror}", "free space or inodes there") from error
        raise DirectoryNotWritableError(
            f"{path} cannot be opened: {error.strerror}", "set ssd.path to a directory that this user may write"
        ) from error


def _irregular(path: Path) -> NotARegularFileError:
    return NotARegularFileError(f"{path} is not a regular file", "remove it, or set another ssd.path")


def _check_space(path: Path, total: int, status: os.stat_result) -> None:
    occupied = min(status.st_blocks * 512, total)
    needed, free = total - occupied, shutil.disk_usage(path.parent).free
    if needed > free:
        raise NoSpaceError(
            f"{path} needs {needed:,} bytes more ({total:,} in all), and the file system has {free:,} free",
            f"set ssd.capacity to at most {occupied + free:,} bytes, or free space there",
        )


def _allocate(path: Path, fd: int, total: int) -> None:
    try:
        os.posix_fallocate(fd, 0, total)
        os.ftruncate(fd, total)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NoSpaceError(
                f"{path} cannot grow to {total:,} bytes: {error.strerror}; the file system reports "
                f"{shutil.disk_usage(path.parent).free:,} free",
                "lower ssd.capacity, or free space (or quota) there",
            ) from error
        raise IOFailedError(
            f"{path} cannot grow to {total:,} bytes: {error.strerror}",
            "lower ssd.capacity, or set ssd.path to another file system",
            error.errno,
        ) from error


def _flush_directory(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _restore(path: Path, fd: int, created: bool, before: int) -> None:
    if created:
        path.unlink(missing_ok=True)
    elif os.fstat(fd).st_size > before:
        os.ftruncate(fd, before)
