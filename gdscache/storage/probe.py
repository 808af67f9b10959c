"""Trials of a transport: code in a child process with a deadline, and bytes that are written, read back and compared.

Libraries that move bytes past the CPU can hang or crash their process, so cuFile, kvikio and NIXL are tried in a child.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import itertools
import logging
import mmap
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from gdscache.errors import StorageError
from gdscache.runtime.files import text_of
from gdscache.sizes import MIB
from gdscache.storage.base import PROBE_PREFIX, Memory, Op, Transport, failed, memory_of, part
from gdscache.storage.calls import carry, cufile_hangs

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
    memory = _memory(device, content)
    whole: Memory = memory if isinstance(memory, memoryview) else memory_of(memory)
    handle = transport.open(path)
    transport.register(memory)
    began = time.perf_counter()
    _carry(transport, Op.WRITE, handle, part(whole, 0, nbytes), deadline_s)
    transport.flush(handle)
    write_s = time.perf_counter() - began
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    began = time.perf_counter()
    _carry(transport, Op.READ, handle, part(whole, nbytes, 2 * nbytes), deadline_s)
    read_s = time.perf_counter() - began
    transport.deregister(memory)
    both = memory if isinstance(memory, memoryview) else memory.cpu().numpy()
    read = both[nbytes:].tobytes()
    _compare("read into memory", read, content)
    _compare("in the file", path.read_bytes(), content)
    return write_s, read_s


def _memory(device: str, content: bytes) -> memoryview | torch.Tensor:
    """The content, and as many zeros behind it. One memory for both ways: kvikio registers the whole allocation of a
    tensor, in which torch puts other tensors too, and cuFile refuses to register one twice."""
    if device == "cpu":
        memory = memoryview(mmap.mmap(-1, 2 * len(content)))
        memory[: len(content)] = content
        return memory
    torch.cuda.set_device(device)
    tensor = torch.frombuffer(bytearray(content) + bytes(len(content)), dtype=torch.uint8).to(device)
    torch.cuda.synchronize()
    return tensor


def _carry(transport: Transport, op: Op, handle: int, memory: Memory, deadline_s: float | None) -> None:
    ranges = ((at, min(at + REQUEST_BYTES, memory.nbytes)) for at in range(0, memory.nbytes, REQUEST_BYTES))
    carry(transport, op, ((handle, start, part(memory, start, stop)) for start, stop in ranges), deadline_s)


def _compare(where: str, found: bytes, wanted: bytes) -> None:
    if found != wanted:
        at = next(at for at, (one, other) in enumerate(itertools.zip_longest(found, wanted)) if one != other)
        raise StorageError(f"the bytes {where} are not those written, from {at} on", "set ssd.transport to posix")


PROBE_BYTES = 4 << 20
NVIDIA_FS_STATS = Path("/proc/driver/nvidia-fs/stats")
_MOVES = {"cufile": "cuFile", "kvikio": "cuFile", "nixl": "GDS_MT of NIXL"}  # the movers of these transports' bytes

_CHILD = """
import sys
from pathlib import Path
from gdscache.errors import StorageError
from gdscache.storage.probe import write_and_read

path, device, name, compat, nbytes, seconds = sys.argv[1], f"cuda:{sys.argv[2]}", *sys.argv[3:]
try:
    if name == "nixl":
        from gdscache.storage.nixl import NixlTransport
        transport = NixlTransport(threads=2, gds=True)
    elif name == "kvikio":
        from gdscache.storage.kvikio import KvikioTransport
        transport = KvikioTransport(threads=2, compat=compat)
    else:
        from gdscache.storage.cufile import open_cufile
        transport = open_cufile(2, "auto", device)
    with transport:
        write_and_read(transport, Path(path), device, int(nbytes), float(seconds))
except StorageError as error:
    sys.exit(error.message)
"""


@dataclasses.dataclass(frozen=True, slots=True)
class ProbeResult:
    """`mode` is the best proven path: `gds`, `compat` (it works, through host memory) or `posix` (it does not work)."""

    ok: bool
    mode: Literal["gds", "compat", "posix"]
    reason: str


def no_gds_driver() -> str:
    """Why GPUDirect Storage cannot be proven here by any probe; an empty string if it may be."""
    return "" if NVIDIA_FS_STATS.exists() else f"no nvidia-fs driver counts I/O ({NVIDIA_FS_STATS} is missing)"


def probe(transport: str, directory: Path, device_index: int, deadline_s: float = 20.0) -> ProbeResult:
    """Write and read a few MiB between GPU memory and a temporary file in `directory`, and compare the bytes.

    `transport`: `cufile`, `kvikio` or `nixl`. One child, for kvikio a second one without cuFile, each killed after
    `deadline_s` seconds. The answer is `gds` only if the nvidia-fs driver counted the I/O, else `compat` (the bytes are
    right) or `posix`; the driver counts for the whole machine, and only while its statistics are on. Raises
    `IOFailedError` if the directory takes no file.
    """
    if transport == "kvikio" and importlib.util.find_spec("kvikio") is None:
        return ProbeResult(False, "posix", "kvikio is not installed")
    with _file(directory) as name:

        def refusal(compat: str) -> str:
            arguments = [name, str(device_index), transport, compat, str(PROBE_BYTES), str(deadline_s)]
            return run_child(_CHILD, arguments, deadline_s).cause

        found = _counted(_MOVES[transport], lambda: refusal("off"))
        if found.ok or transport != "kvikio":
            return found
        if cause := refusal("on"):
            return ProbeResult(False, "posix", f"{found.reason}; kvikio without cuFile: {cause}")
        return ProbeResult(True, "compat", found.reason)


def _counted(what: str, refused: Callable[[], str]) -> ProbeResult:
    """`refused()` moves bytes by `what`, and returns why it failed, or ""."""
    if cause := cufile_hangs():
        return ProbeResult(False, "posix", cause)
    before, refusal, after = gds_operations(), refused(), gds_operations()
    if refusal:
        return ProbeResult(False, "posix", f"{what}: {refusal}")
    if min(new - old for old, new in zip(before, after, strict=True)) > 0:
        return ProbeResult(True, "gds", f"nvidia-fs counted {after[0] - before[0]} reads of the probe")
    return ProbeResult(True, "compat", f"{what} works, but nvidia-fs counted no I/O of the probe")


@contextlib.contextmanager
def _file(directory: Path) -> Iterator[str]:
    """The path of an allocated temporary file there. Raises `IOFailedError`."""
    try:
        with tempfile.NamedTemporaryFile(prefix=PROBE_PREFIX, dir=directory) as file:
            os.posix_fallocate(file.fileno(), 0, PROBE_BYTES)
            yield file.name
    except OSError as error:
        raise failed("probe", str(directory), 0, error) from error


def gds_operations() -> tuple[int, int]:
    """Reads and writes counted by the nvidia-fs driver since it was loaded; zeros without it."""
    text = text_of(NVIDIA_FS_STATS)
    reads, writes = (re.search(rf"^{kind}\s*:.*?\bn=(\d+)", text, re.MULTILINE) for kind in ("Reads", "Writes"))
    return int(reads[1]) if reads else 0, int(writes[1]) if writes else 0
