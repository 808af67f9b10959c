"""What the transport tests share: sizes, extents, and a machine without io_uring."""

import ctypes
import errno
import os
from typing import Any, Literal

import pytest

from gdscache.errors import RefusedDiskError, TransportUnavailableError
from gdscache.native import move_pieces
from gdscache.storage import native
from gdscache.storage.base import Switch
from gdscache.storage.native import NativeTransport
from gdscache.testing.transport_suite import FILE_BYTES, SECTOR, odd_extents, random_bytes

__all__ = ["FILE_BYTES", "SECTOR", "has_libcuda", "odd_extents", "opened", "random_bytes", "refuse_ring"]


def has_libcuda() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def refuse_ring(patch: pytest.MonkeyPatch) -> None:
    """The system says to io_uring what a container's rules say."""

    def refusing(kind: Literal["ring", "threads"], *rest: Any, **how: Any) -> Any:
        if kind == "ring":
            raise RefusedDiskError(f"io_uring_setup answers {os.strerror(errno.EPERM)}", "", errno.EPERM)
        return move_pieces(kind, *rest, **how)

    patch.setattr(native, "move_pieces", refusing)


def opened(name: str, threads: int, direct_io: Switch = "off") -> NativeTransport:
    """`uring`, or a skip where there is none; or `posix`."""
    try:
        return NativeTransport(threads, direct_io, uring=name == "uring")
    except TransportUnavailableError as error:
        pytest.skip(error.message)
