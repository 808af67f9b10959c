"""Trials of a transport: code in a child process with a deadline, and bytes that are written, read back and compared.

Libraries that move bytes past the CPU can hang or crash their process, so they are tried in a child.
"""

from __future__ import annotations

import itertools
import logging
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from gdscache.errors import StorageError
from gdscache.sizes import MIB
from gdscache.storage.base import Memory, Op, Transport, memory_of, part
from gdscache.storage.calls import carry

REQUEST_BYTES = MIB
_KILL_WAIT_S = 5.0
_log = logging.getLogger("gdscache.storage")


class Ended(NamedTuple):
    """The end of a child. `status`: its exit status, None if it was killed at its deadline. `output`: its standard
    output and error; after a kill the last line says so."""

    status: int | None
    output: str

    @property
    def lines(self) -> list[str]:
        return [line.strip() for line in self.output.splitlines() if line.strip()]

    @property
    def cause(self) -> str:
        """Why the child failed, in one line; empty if it did not."""
        last = (self.lines or ["no message"])[-1]
        return "" if self.status == 0 else last if self.status is None else f"{last} (exit status {self.status})"


def run_child(code: str, arguments: Sequence[str], deadline_s: float) -> Ended:
    """Run Python code in a child with this process's import path.

    The child leads a session of its own. At the end, or after `deadline_s` seconds, the rest of that session is killed.
    Never waits much longer, even for a child that the kernel does not let die.
    """
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")}
    environment["CUFILE_LOGFILE_PATH"] = os.devnull
    found = [*filter(None, [environment.get("PYTHONPATH")]), *(os.path.abspath(path) for path in sys.path)]
    environment["PYTHONPATH"] = os.pathsep.join(found)
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", code, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        status, killed = None, ""
        try:
            status = process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            killed = f"\nno answer within {deadline_s:g} s: killed"
        finally:
            _end(process)
        output.seek(0)
        return Ended(status, output.read().decode(errors="replace") + killed)


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    try:
        process.wait(_KILL_WAIT_S)
    except subprocess.TimeoutExpired:
        _log.warning("the child %d of a trial cannot be killed: it hangs in the kernel", process.pid)


def write_and_read(
    transport: Transport, path: Path, device: str, nbytes: int, deadline_s: float | None = None
) -> tuple[float, float]:
    """Fill a new file through a transport and read it back. Returns the seconds of the write with its flush, and of the
    read.

    `device`: of the memory, `cpu` or `cuda:N`. `nbytes`: a multiple of 1 MiB; requests are of 1 MiB. `deadline_s`: of
    each way. Raises the transport's errors, `StorageError` if bytes differ, and `OSError` if the file cannot be made.
    """
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, nbytes)
    content = os.urandom(nbytes)
    source, target = _memory(device, content), _memory(device, bytes(nbytes))
    handle = transport.open(path)
    for memory in (source, target):
        transport.register(memory)
    began = time.perf_counter()
    _carry(transport, Op.WRITE, handle, source, deadline_s)
    transport.flush(handle)
    write_s = time.perf_counter() - began
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    began = time.perf_counter()
    _carry(transport, Op.READ, handle, target, deadline_s)
    read_s = time.perf_counter() - began
    for memory in (source, target):
        transport.deregister(memory)
    read = target.tobytes() if isinstance(target, memoryview) else target.cpu().numpy().tobytes()
    _compare("read into memory", read, content)
    _compare("in the file", path.read_bytes(), content)
    return write_s, read_s


def _memory(device: str, content: bytes) -> memoryview | torch.Tensor:
    if device == "cpu":
        memory = memoryview(mmap.mmap(-1, len(content)))
        memory[:] = content
        return memory
    torch.cuda.set_device(device)
    tensor = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(device)
    torch.cuda.synchronize()
    return tensor


def _carry(
    transport: Transport, op: Op, handle: int, memory: memoryview | torch.Tensor, deadline_s: float | None
) -> None:
    whole: Memory = memory if isinstance(memory, memoryview) else memory_of(memory)
    ranges = ((at, min(at + REQUEST_BYTES, whole.nbytes)) for at in range(0, whole.nbytes, REQUEST_BYTES))
    carry(transport, op, ((handle, start, part(whole, start, stop)) for start, stop in ranges), deadline_s)


def _compare(where: str, found: bytes, wanted: bytes) -> None:
    if found != wanted:
        at = next(at for at, (one, other) in enumerate(itertools.zip_longest(found, wanted)) if one != other)
        raise StorageError(f"the bytes {where} are not those written, from {at} on", "set ssd.transport to posix")
