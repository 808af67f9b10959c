"""The names of the native library, `gdscache._native`, whose stub documents them."""

import errno

from gdscache.errors import NativeMissingError

try:
    from gdscache._native import (
        CUFILE_ERRORS,
        GONE,
        NEVER,
        SHORT,
        WRONG,
        CuFiles,
        Disk,
        Executor,
        Gpu,
        HostPlanes,
        LifetimeOrder,
        LruShadow,
        ReuseSample,
        Victims,
        bare_loop,
        best_arm,
        blocks_fault,
        chained_keys,
        error_text,
        keys_of,
        layer_sums,
        narrow_tokens,
        put_rows,
        take_out,
        take_rows,
        take_unbound,
        trim_heap,
    )
except ImportError as error:
    raise NativeMissingError(
        f"the native library cannot be loaded: {error}",
        "install the wheel of this machine and Python, or run make (python tools/native_build.py) in the sources",
    ) from None

__all__ = [
    "CUFILE_ERRORS",
    "GONE",
    "NEVER",
    "SHORT",
    "WRONG",
    "CuFiles",
    "Disk",
    "Executor",
    "Gpu",
    "HostPlanes",
    "LifetimeOrder",
    "LruShadow",
    "ReuseSample",
    "Victims",
    "bare_loop",
    "best_arm",
    "blocks_fault",
    "chained_keys",
    "error_of",
    "error_text",
    "keys_of",
    "layer_sums",
    "narrow_tokens",
    "put_rows",
    "take_out",
    "take_rows",
    "take_unbound",
    "trim_heap",
]


def error_of(code: int) -> OSError:
    """The error of a failed read or write: `code` is an errno, or one of cuFile's own, which are above
    `CUFILE_ERRORS`."""
    return OSError(code if code < CUFILE_ERRORS else errno.EIO, error_text(code))
