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
import struct
from collections.abc import Iterator

from gdscache.errors import IOFailedError, TransportUnavailableError

READV, WRITEV, READ, WRITE = 1, 2, 22, 23

_SETUP, _ENTER, _REGISTER = 425, 426, 427  # the same on every architecture
_OFF_SQES = 0x10000000
_GETEVENTS = 1
_SINGLE_MMAP = 1
_ASYNC = 1 << 4
_MAX_WORKERS = 19
_ENTRY = struct.Struct(
    "<BBHiQQIIQQQQ"
)  # opcode, flags, priority, fd, offset, address, length, rw flags, user data, 0...
_DONE = struct.Struct("<QiI")  # user data, result, flags
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

    def _map(self, params: _Params) -> None:
        array, cqes = params.sq.words[2], params.cq.words[1]
        size = max(array + 4 * params.sq_entries, cqes + _DONE.size * params.cq_entries)
        with contextlib.ExitStack() as undo:  # each map has a descriptor of its own
            self._rings = mmap.mmap(self._fd, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE)
            undo.callback(self._rings.close)
            self._entries = mmap.mmap(self._fd, 64 * params.sq_entries, offset=_OFF_SQES)
            undo.pop_all()
        words = memoryview(self._rings).cast("I")
        self._words, self._cqes = words, cqes
        self._sq_tail, self._cq_head, self._cq_tail = params.sq.tail // 4, params.cq.head // 4, params.cq.tail // 4
        self._sq_mask, self._cq_mask = words[params.sq.mask // 4], words[params.cq.mask // 4]
        for i in range(params.sq_entries):
            words[array // 4 + i] = i

    def put(
        self, opcode: int, fd: int, offset: int, address: int, length: int, user_data: int, *, worker: bool = True
    ) -> None:
        """Queue one request; `length` is in bytes, or in iovecs. There must be room for it. `enter` hands it over.

        `worker`: a thread of the kernel does it from the start, so that `enter` never moves bytes itself.
        """
        tail = self._words[self._sq_tail]
        at = 64 * (tail & self._sq_mask)
        _ENTRY.pack_into(
            self._entries, at, opcode, _ASYNC if worker else 0, 0, fd, offset, address, length, 0, user_data, 0, 0, 0
        )
        self._words[self._sq_tail] = (tail + 1) & 0xFFFFFFFF
        self._queued += 1

    def enter(self, wait: int) -> None:
        """Hand over what was queued, and wait until `wait` requests have ended. Raises `OSError`."""
        while True:
            taken = self._call(_ENTER, self._fd, self._queued, wait, _GETEVENTS, None, ctypes.c_size_t(0))
            if taken >= 0:
                self._queued -= taken
                if not self._queued:
                    return
                continue
            code = ctypes.get_errno()
            if code not in (errno.EINTR, errno.EAGAIN, errno.EBUSY):
                raise OSError(code, os.strerror(code))
            if code != errno.EINTR and self.has_ended:
                return  # the kernel wants completions to be taken first

    @property
    def has_ended(self) -> bool:
        """Whether there is something to `take`."""
        return bool(self._words[self._cq_head] != self._words[self._cq_tail])

    def take(self) -> Iterator[tuple[int, int]]:
        """(user data, result) of every request that has ended; a negative result is an errno."""
        head, tail = self._words[self._cq_head], self._words[self._cq_tail]
        while head != tail:
            user_data, result, _ = _DONE.unpack_from(self._rings, self._cqes + _DONE.size * (head & self._cq_mask))
            head = (head + 1) & 0xFFFFFFFF
            self._words[self._cq_head] = head
            yield user_data, result

    def close(self) -> None:
        """Give it back; nothing may be in flight."""
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
