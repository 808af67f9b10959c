"""Small files: the kernel's facts below `/proc` and `/sys`, and a user's kept files, such as calibrations and compiled
kernels."""

from __future__ import annotations

import os
import shlex
import shutil
import tempfile
from pathlib import Path


def text_of(path: Path) -> str:
    """A small file's content, stripped; empty if it is missing, or not readable for this user."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def located(path: Path) -> Path:
    """The absolute path; `..` leads where the system says, also behind a link. Raises `OSError`."""
    path = path.absolute()
    return Path(os.path.realpath(path)) if ".." in path.parts else path


def free_space(path: Path) -> int | None:
    """Free bytes for this user on a path's file system; None if that reports no size, as ramfs. Raises `OSError`."""
    usage = shutil.disk_usage(path)
    return usage.free if usage.total else None


def flush_directory(directory: Path) -> None:
    """Make the names in a directory survive a loss of power. Raises `OSError`."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def start_empty(*directories: str | Path) -> str:
    """Words of a hint, with a command that a shell takes for these directories and no others."""
    return f"start empty: rm -r {shlex.join(map(str, directories))}"


def user_cache() -> Path:
    """$GDSCACHE_CACHE_DIR, or `gdscache` below $XDG_CACHE_HOME or ~/.cache. Raises `FileNotFoundError` for a user
    without a home."""
    given, base = os.environ.get("GDSCACHE_CACHE_DIR"), os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    found = os.path.expanduser(given or f"{base}/gdscache")
    if found.startswith("~"):
        raise FileNotFoundError("no place for caches: this user has no home")
    return Path(found)


def write_whole(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Write a file in one step: a reader finds the old file or the new one, after a crash too. Raises `OSError`."""
    descriptor, name = tempfile.mkstemp(dir=path.absolute().parent, prefix=f".{path.name}-")
    beside = Path(name)
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
        beside.chmod(mode)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)  # after success it is gone already
