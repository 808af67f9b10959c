"""Rings of this process that fail, as where somebody closed their descriptors."""

from __future__ import annotations

import contextlib
import os


def break_rings() -> int:
    """This process's rings fail from now on; how many there are."""
    broken = 0
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            if os.readlink(f"/proc/self/fd/{name}") == "anon_inode:[io_uring]":
                os.dup2(nothing, int(name), inheritable=False)
                broken += 1
    os.close(nothing)
    return broken
