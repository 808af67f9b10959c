"""Signals of Python that are kept from being heard while its main thread carries out a short call. See signals.h."""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
import signal
from collections.abc import Callable
from typing import Any

from gdscache.native.library import checked, library

_PYTHON = (  # `Python` of csrc/host/signals.h
    *("PyObject_CallFunctionObjArgs", "PyCallable_Check", "Py_IncRef", "Py_DecRef"),
    *("PyErr_Fetch", "PyErr_Restore", "PyErr_SetInterruptEx", "PyEval_GetFrame"),
)
_NEVER_HEARD = (signal.SIGKILL, signal.SIGSTOP)


class Signals:
    """The signals of this process that Python may have handlers for. Use `signals()`, in the main thread."""

    def __init__(self) -> None:
        self.held = False
        self._library = library()
        of_c = importlib.import_module("_signal")  # which `signal` wraps in lines of Python
        self._heard = _heard_here(of_c)
        numbers = sorted(int(number) for number in signal.valid_signals() if number not in _NEVER_HEARD)
        functions = (ctypes.c_uint64 * len(_PYTHON))()
        for n, name in enumerate(_PYTHON):
            functions[n] = ctypes.cast(ctypes.pythonapi[name], ctypes.c_void_p).value or 0
        plain, names = (ctypes.c_int32 * len(numbers))(*numbers), (ctypes.py_object * len(numbers))()
        for n, number in enumerate(numbers):
            names[n] = number  # type: ignore[assignment]
        handle = ctypes.c_void_p()
        answer = self._library.signals_open(
            *(ctypes.addressof(functions), of_c.getsignal, of_c.signal),
            *(ctypes.addressof(plain), ctypes.addressof(names), len(numbers), ctypes.addressof(handle)),
        )
        checked(answer, "signals_open")
        self._handle = handle.value
        self._note: Callable[[int, object], int] = functools.partial(self._library.signals_note, self._handle)

    def hold(self) -> None:
        """From now on no handler of Python runs in this thread. Raises what one does for a signal that came before;
        then nothing is held."""
        if self._heard:
            self._library.signals_hold(self._handle, self._note)
        self.held = True

    def release(self) -> None:
        """Handlers run again, and first those of what came meanwhile. Raises what they do."""
        self.held = False
        if self._heard:
            self._library.signals_release(self._handle)


def _heard_here(of_c: Any) -> bool:
    """Whether Python runs handlers in this thread. A program that embeds Python may have begun in another one than that
    which `threading` takes for the main thread."""
    try:
        of_c.signal(signal.SIGINT, None)  # refused for the thread before it is for its handler
    except ValueError:
        return False
    except TypeError:
        return True
    raise AssertionError("None is no handler")


def signals() -> Signals:
    """The signals of this process."""
    return _signals(os.getpid())


@functools.cache
def _signals(process: int) -> Signals:
    return Signals()  # a fork has its own
