"""The names of the native library, `gdscache._native`, whose stub documents them."""

import errno

from gdscache.errors import NativeMissingError

try:
    from gdscache._native import *  # noqa: F403
    from gdscache._native import CUFILE_ERRORS, error_text
except ImportError as error:
    raise NativeMissingError(
        f"the native library cannot be loaded: {error}",
        "install the wheel of this machine and Python, or run make (python tools/native_build.py) in the sources",
    ) from None


def error_of(code: int) -> OSError:
    """The error of a failed read or write: `code` is an errno, or one of cuFile's own, which are above
    `CUFILE_ERRORS`."""
    return OSError(code if code < CUFILE_ERRORS else errno.EIO, error_text(code))
