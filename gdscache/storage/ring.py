"""io_uring by its system calls: a ring of reads and writes that the kernel's own threads do, without the interpreter.

Only what the transport `uring` needs. The layout is that of <linux/io_uring.h>. One thread owns a ring. On processors
that reorder what others see more freely than x86-64, Python could not read a ring safely, so it is refused there.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import platform

import numpy as np
import numpy.typing as npt

from gdscache.errors import IOFailedError, TransportUnavailableError

READV, WRITEV, READ, WRITE = 1, 2, 22, 23

_SETUP, _ENTER, _REGISTER = 425, 426, 427  # the same on every architecture
_OFF_SQES = 0x10000000
_GETEVENTS = 1
_EXT_ARG = 1 << 3
_HAS_EXT_ARG = 1 << 8  # a feature, since Linux 5.11
_SINGLE_MMAP = 1
_ASYNC = 1 << 4
_MAX_WORKERS = 19
_ENTRY = np.dtype(
    [
        ("opcode", "u1"),
        ("flags", "u1"),
        ("priority", "<u2"),
        ("fd", "<i4"),
        ("offset", "<u8"),
        ("address", "<u8"),
        ("length", "<u4"),
        ("rw_flags", "<u4"),
        ("user_data", "<u8"),
        ("others", "<u8", 3),
    ]
)
_DONE = np.dtype([("user_data", "<u8"), ("result", "<i4"), ("flags", "<u4")])
HINT = "set transport to posix, which uses threads"


class _Offsets(ctypes.Structure):
    _fields_ = (
        ("head", ctypes.c_uint32),
        ("tail", ctypes.c_uint32),
        ("mask", ctypes.c_uint32),
        ("entries", ctypes.c_uint32),
        ("words", ctypes.c_uint32 * 6),  # submission: flags, dropped, array; completion: overflow, cqes, flags
    )


class _Params(ctypes.Structure):
    _fields_ = (
        ("sq_entries", ctypes.c_uint32),
        ("cq_entries", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("sq_thread", ctypes.c_uint32 * 2),
        ("features", ctypes.c_uint32),
        ("wq_fd", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32 * 3),
        ("sq", _Offsets),
        ("cq", _Offsets),
    )


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_int64), ("nanoseconds", ctypes.c_int64))


class _Patience(ctypes.Structure):
    _fields_ = (
        ("mask", ctypes.c_uint64),
        ("mask_size", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
        ("timespec", ctypes.c_uint64),
    )


class Ring:
    """A ring for `entries` requests in flight, done by at most `workers` threads of the kernel.

    Raises `TransportUnavailableError` where the kernel (or a container's rules) has no io_uring, or an old one, and
    `IOFailedError` when the process may open no more files.
    """

    def __init__(self, entries: int, workers: int) -> None:
        if platform.machine() != "x86_64":
            raise TransportUnavailableError(f"io_uring is not used on {platform.machine()}", HINT)
        self._call = ctypes.CDLL(None, use_errno=True).syscall
        params = _Params()
        self._fd = self._checked("io_uring_setup", _SETUP, ctypes.c_uint(entries), ctypes.byref(params))
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, self._fd)
            if not params.features & _SINGLE_MMAP:
                raise TransportUnavailableError("this kernel's io_uring is from before Linux 5.4", HINT)
            # The limits: for files, and for what the kernel takes for none.
            limits = (ctypes.c_uint * 2)(workers, workers)
            self._checked("io_uring_register", _REGISTER, self._fd, _MAX_WORKERS, ctypes.byref(limits), 2)
            try:
                self._map(params)
            except OSError as error:
                raise _no_room("mmap", error.errno or 0) from error
            undo.pop_all()
        self._queued = 0
        self._has_patience = bool(params.features & _HAS_EXT_ARG)

    def _map(self, params: _Params) -> None:
        array, cqes = params.sq.words[2], params.cq.words[1]
        size = max(array + 4 * params.sq_entries, cqes + _DONE.itemsize * params.cq_entries)
        with contextlib.ExitStack() as undo:  # each map has a descriptor of its own
            self._rings = mmap.mmap(self._fd, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE)
            undo.callback(self._rings.close)
            self._entries = mmap.mmap(self._fd, 64 * params.sq_entries, offset=_OFF_SQES)
            undo.pop_all()
        words = memoryview(self._rings).cast("I")
        self._words = words
        self._requests = np.frombuffer(self._entries, _ENTRY, params.sq_entries)
        self._answers = np.frombuffer(self._rings, _DONE, params.cq_entries, cqes)
        self._sq_tail, self._cq_head, self._cq_tail = params.sq.tail // 4, params.cq.head // 4, params.cq.tail // 4
        self._sq_mask, self._cq_mask = words[params.sq.mask // 4], words[params.cq.mask // 4]
        for i in range(params.sq_entries):
            words[array // 4 + i] = i

    def put(
        self,
        opcodes: npt.ArrayLike,
        files: npt.ArrayLike,
        offsets: npt.ArrayLike,
        addresses: npt.ArrayLike,
        lengths: npt.ArrayLike,
        user_data: npt.NDArray[np.int64],
        *,
        worker: bool = True,
    ) -> None:
        """Queue a request for each of `user_data`; there must be room for them. `enter` hands them over.

        All else is an array like it, or one value for all. `lengths` are in bytes, or in iovecs. `worker`: a thread of
        the kernel does it from the start, so that `enter` never moves bytes itself.
        """
        tail, count = self._words[self._sq_tail], len(user_data)
        entries = np.zeros(count, dtype=_ENTRY)
        entries["opcode"], entries["fd"], entries["flags"] = opcodes, files, _ASYNC if worker else 0
        entries["offset"], entries["address"], entries["length"] = offsets, addresses, lengths
        entries["user_data"] = user_data
        self._requests[(tail + np.arange(count)) & self._sq_mask] = entries
        self._words[self._sq_tail] = (tail + count) & 0xFFFFFFFF
        self._queued += count

    def enter(self, wait: int, seconds: float | None = None) -> None:
        """Hand over what was queued, and wait until `wait` requests have ended, or at most about `seconds`, where the
        kernel can do that; an older one then waits for one request. Raises `OSError`."""
        flags, argument, size = _GETEVENTS, None, 0
        if seconds is not None:
            if self._has_patience:
                until = _Timespec(int(seconds), int(seconds % 1 * 1e9))
                patience = _Patience(timespec=ctypes.addressof(until))
                flags, argument, size = _GETEVENTS | _EXT_ARG, ctypes.byref(patience), ctypes.sizeof(patience)
            else:
                wait = min(wait, 1)
        while True:
            taken = self._call(_ENTER, self._fd, self._queued, wait, flags, argument, ctypes.c_size_t(size))
            if taken >= 0:
                self._queued -= taken
                if not self._queued:
                    return
                continue
            code = ctypes.get_errno()
            if code == errno.ETIME:
                return
            if code not in (errno.EINTR, errno.EAGAIN, errno.EBUSY):
                raise OSError(code, os.strerror(code))
            if code != errno.EINTR and self.has_ended:
                return  # the kernel wants completions to be taken first

    @property
    def has_ended(self) -> bool:
        """Whether there is something to `take`."""
        return bool(self._words[self._cq_head] != self._words[self._cq_tail])

    def take(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """(user data, results) of the requests that have ended; a negative result is an errno."""
        head, tail = self._words[self._cq_head], self._words[self._cq_tail]
        count = (tail - head) & 0xFFFFFFFF
        ended = self._answers[(head + np.arange(count)) & self._cq_mask]
        self._words[self._cq_head] = tail
        return ended["user_data"].astype(np.int64), ended["result"].astype(np.int64)

    def close(self) -> None:
        """Give it back; nothing may be in flight."""
        del self._requests, self._answers
        self._words.release()
        self._rings.close()
        self._entries.close()
        os.close(self._fd)

    def _checked(self, name: str, *arguments: object) -> int:
        answer = int(self._call(*arguments))
        if answer < 0:
            code = ctypes.get_errno()
            if code in (errno.EMFILE, errno.ENFILE):
                raise _no_room(name, code)
            raise TransportUnavailableError(f"{name} answers {os.strerror(code)}", HINT)
        return answer


def _no_room(name: str, code: int) -> IOFailedError:
    return IOFailedError(f"{name} for io_uring answers {os.strerror(code)}", "raise ulimit -n, or free memory", code)
