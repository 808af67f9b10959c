"""The native library by ctypes: found beside this file, loaded once, its functions declared in one table.

Why ctypes: a call with ten new arrays costs 6 us here and 1.3 us by nanobind, 1.6 us where addresses are kept, for a
move that takes milliseconds. In return one wheel an architecture serves every Python, and a build needs no headers.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gdscache.errors import NativeCallError, NativeMissingError, NativeVersionError

ABI = 10  # GDSCACHE_ABI of csrc/host/api.h
PATH = Path(__file__).with_name("libgdscache_host.so")
_HINT = "install the wheel of this machine's architecture, or run make (python tools/native_build.py) in the sources"

_void, _int, _long, _double = None, ctypes.c_int32, ctypes.c_int64, ctypes.c_double
_at, _text = ctypes.c_void_p, ctypes.c_char_p  # an address or null; a string

# Every function: its result and its arguments. See csrc/host/api.h.
_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "abi": (_int, ()),
    "best_arm": (_text, ()),
    "has_arm": (_int, (_text,)),
    "xxh3": (_int, (_text, _at, _long, _at)),
    "xxh3_chunks": (_int, (_text, _at, _at, _long, _at, _int, _at)),
    "layer_sums": (_int, (_at, _long, _at, _long, _at)),
    "pool_open": (_int, (_at, _long, _at, _long, _long, _long, _long, _at, _at, _long)),
    "pool_close": (_void, (_at,)),
    "gather": (_int, (_at, _at, _long, _long, _long, _at, _at, _int)),
    "scatter": (_int, (_at, _at, _long, _long, _long, _at, _at, _int)),
    "disk_open": (_int, (_text, _int, _int, _at, _at, _long)),
    "disk_close": (_void, (_at,)),
    "disk_name": (_text, (_at,)),
    "disk_pending": (_long, (_at,)),
    "disk_submit": (_int, (_at, _at, _long, _at, _long)),
    "disk_reap": (_long, (_at, _at, _long, _double)),
    "disk_wake": (_int, (_at,)),
    "disk_fail": (_int, (_at, _at, _long)),
    "disk_release": (_int, (_at,)),
    "cut_and_merge": (_int, (_at, _long, _long, _long, _at, _long, _at, _long, _at)),
    "bare": (_int, (_at, _at, _at, _long)),
    "executor_open": (
        _int,
        (_at, _at, _long, _int, _long, _long, _long, _at, _at, _at, _int, _int, _int, _at, _at, _long),
    ),
    "executor_close": (_void, (_at,)),
    "executor_stop": (_void, (_at,)),
    "executor_disk": (_text, (_at,)),
    "move_begin": (_int, (_at, _long, _int, _long, _at, _long, _at, _long, _at, _long, _int)),
    "move_extend": (_int, (_at, _long, _at, _long, _int)),
    "move_cancel": (_int, (_at, _long)),
    "move_wait": (_int, (_at, _long, _int, _long, _at)),
    "move_outcome": (_int, (_at, _long, _at, _long, _at, _at, _at, _at, _long, _at, _long)),
    "move_forget": (_int, (_at, _long)),
    "refuse": (_int, (_at, _int)),
    "take_io": (_int, (_at, _long, _at)),
    "take_copy": (_int, (_at, _long, _at)),
    "io_ended": (_int, (_at, _long, _at, _long)),
    "copy_queued": (_int, (_at, _long, _long)),
    "copy_ended": (_int, (_at, _long, _at, _text)),
    "expire": (_int, (_at, _long)),
    "take_late": (_int, (_at, _long, _at, _long)),
    "held_slots": (_long, (_at,)),
    "free_slots": (_long, (_at,)),
    "trace": (_int, (_at,)),
    "take_spans": (_long, (_at, _at, _long)),
    "gpu_why": (_text, ()),
    "gpu_open": (_int, (_text, _at, _at)),
    "gpu_close": (_void, (_at,)),
    "gpu_api": (_text, (_at,)),
    "gpu_queue": (_int, (_at, _at, _at, _at)),
    "gpu_finish": (_int, (_at, _long, _at)),
    "gpu_last": (_long, (_at, _int)),
    "gpu_reached": (_int, (_at, _long)),
    "gpu_await": (_int, (_at, _long, _long)),
    "gpu_follow": (_int, (_at, ctypes.c_uint64, _long)),
    "cufile_why": (_text, ()),
    "cufile_text": (_text, (_int,)),
    "cufile_open": (_int, (_text, ctypes.c_uint64, _text, _text, _long, _at)),
    "cufile_close": (_void, (_at,)),
    "cufile_add_file": (_int, (_at, _int)),
    "cufile_remove_file": (_int, (_at, _int)),
    "cufile_add_memory": (_int, (_at, ctypes.c_uint64, _long)),
    "cufile_remove_memory": (_int, (_at, ctypes.c_uint64)),
    "cufile_disk": (_int, (_at, _int, _at, _at, _long)),
    "cufile_bare": (_int, (_at, _int, _int, _long, _long, _int, ctypes.c_uint64, _at)),
    "blocks_fault": (_int, (_at, _long, _long)),
    "narrow_tokens": (_int, (_at, _long, _at)),
    "take_rows": (_int, (_at, _long, _long, _at, _long, _at)),
    "put_rows": (_int, (_at, _long, _long, _at, _long, _at)),
    "take_unbound": (_int, (_at, _long, _long, _at, _long, _at, _at)),
    "executor_faulty": (_void, (_int,)),
    "executor_fail": (_int, (_at, _at, _long)),
    "executor_release": (_int, (_at,)),
}
# Those that are over at once keep the interpreter's lock: whoever gives it up may wait 5 ms to have it again.
# `disk_submit` is over at once where threads copy what it hands over, as they do for all that Python submits.
_QUICK = frozenset({"abi", "best_arm", "has_arm", "pool_open", "pool_close", "disk_name", "disk_pending", "disk_wake"})
_QUICK |= {"disk_submit", "executor_stop", "executor_disk", "move_begin", "move_extend", "move_cancel", "move_outcome"}
_QUICK |= {
    "refuse",
    "move_forget",
    "io_ended",
    "copy_queued",
    "copy_ended",
    "held_slots",
    "free_slots",
    "trace",
    "take_spans",
}
_QUICK |= {"gpu_why", "gpu_api", "gpu_last", "gpu_reached", "gpu_follow"}
_QUICK |= {"cufile_why", "cufile_text"}
_QUICK |= {"blocks_fault", "narrow_tokens", "take_rows", "put_rows", "take_unbound"}
# The same that may wait, for waits that are so short that the lock is better kept.
_KEPT = {"move_wait": "move_wait_kept"}


class Library:
    """The functions of csrc/host/api.h, without their prefix: `library.gather(...)`.

    Those that answer an int answer as the C interface does; `checked` makes an error of a negative answer.
    """

    def __init__(self, path: Path) -> None:
        try:
            slow, quick = ctypes.CDLL(str(path)), ctypes.PyDLL(str(path))
        except OSError as error:
            raise NativeMissingError(f"the native library cannot be loaded: {error}", _HINT) from None
        self.path = path
        self._functions: dict[str, Callable[..., Any]] = {}
        self._declare(quick, "abi")
        found = self._functions["abi"]()
        if found != ABI:
            raise NativeVersionError(f"{path} has the interface {found}, and this gdscache needs {ABI}", _HINT)
        for name in _FUNCTIONS:
            self._declare(quick if name in _QUICK else slow, name)
        for name, kept in _KEPT.items():
            self._declare(quick, name, kept)

    def _declare(self, library: ctypes.CDLL, name: str, as_: str = "") -> None:
        try:
            function = library[f"gdscache_{name}"]
        except AttributeError:
            raise NativeVersionError(f"{self.path} has no function gdscache_{name}", _HINT) from None
        function.restype, function.argtypes = _FUNCTIONS[name]
        self._functions[as_ or name] = function

    def __getattr__(self, name: str) -> Callable[..., Any]:
        try:
            return self.__dict__["_functions"][name]  # type: ignore[no-any-return]
        except KeyError:
            raise AttributeError(f"the native library has no function {name!r}") from None


@functools.cache
def library() -> Library:
    """The library, loaded at the first call. Raises `NativeMissingError`, `NativeVersionError`."""
    return Library(PATH)


def checked(answer: int, what: str) -> int:
    """The answer of a call, where it is none of refusal. Raises `NativeCallError`, with `errno`."""
    if answer < 0:
        hint = "free memory" if -answer == errno.ENOMEM else "the arguments make no sense together"
        raise NativeCallError(f"{what}: {os.strerror(-answer)}", hint, -answer)
    return answer


def address(array: npt.NDArray[Any]) -> int:
    """Where a contiguous array's bytes begin; the caller keeps it alive. Five times as fast as numpy's own way where
    the array may be written to."""
    if array.flags.writeable and array.size:
        return ctypes.addressof(ctypes.c_char.from_buffer(array))  # type: ignore[arg-type]
    return int(array.ctypes.data)


def integers(values: Any) -> npt.NDArray[np.int64]:
    """Anything as a contiguous int64 array, copied only where it is not one."""
    return np.ascontiguousarray(values, np.int64)


def struct(name: str, fields: str) -> type[ctypes.Structure]:
    """A struct of the C interface. `fields`: a name and a type each: i, an int32; q, an int64; Q, a uint64."""
    types = {"i": ctypes.c_int32, "q": ctypes.c_int64, "Q": ctypes.c_uint64}
    named = [field.split(":") for field in fields.split()]
    return type(name, (ctypes.Structure,), {"_fields_": [(field, types[kind]) for field, kind in named]})
