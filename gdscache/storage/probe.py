"""Probes of cuFile, kvikio and NIXL on this machine, in child processes, because cuFile can hang or crash its
process."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

from gdscache.runtime.files import text_of
from gdscache.storage.base import PROBE_PREFIX, failed
from gdscache.storage.calls import cufile_hangs
from gdscache.storage.trial import run_child

PROBE_BYTES = 4 << 20
NVIDIA_FS_STATS = Path("/proc/driver/nvidia-fs/stats")
_MOVES = {"cufile": "cuFile", "nixl": "GDS_MT of NIXL"}  # the bytes of these transports of ours

_KVIKIO_CHILD = """
import os, sys
import torch, kvikio, kvikio.defaults

path, device, mode, nbytes = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
torch.cuda.set_device(device)
kvikio.defaults.set({"compat_mode": getattr(kvikio.CompatMode, mode), "gds_threshold": 0})
source = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device="cuda")
target = torch.zeros_like(source)
torch.cuda.synchronize()
file = kvikio.CuFile(path, "r+")
written, read = file.pwrite(source).get(), file.pread(target).get()
if (written, read) != (nbytes, nbytes):
    sys.exit(f"wrote {written} and read {read} of {nbytes} bytes")
if not torch.equal(source, target):
    sys.exit("the bytes read into GPU memory are not those written")
with open(path, "rb") as plain:
    if plain.read() != source.cpu().numpy().tobytes():
        sys.exit("the file does not hold the bytes written")
file.close()
"""

_TRANSPORT_CHILD = """
import sys
from pathlib import Path
from gdscache.errors import StorageError
from gdscache.storage.trial import write_and_read

path, device, name, nbytes, seconds = Path(sys.argv[1]), f"cuda:{sys.argv[2]}", sys.argv[3], *map(float, sys.argv[4:])
try:
    if name == "nixl":
        from gdscache.storage.nixl import NixlTransport
        transport = NixlTransport(threads=2, gds=True)
    else:
        from gdscache.storage.cufile import open_cufile
        transport = open_cufile(2, "auto", device)
    with transport:
        write_and_read(transport, path, device, int(nbytes), seconds)
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
        place = [name, str(device_index)]
        if transport != "kvikio":
            what, arguments = _MOVES[transport], [*place, transport, str(PROBE_BYTES), str(deadline_s)]
            return _counted(what, lambda: run_child(_TRANSPORT_CHILD, arguments, deadline_s).cause)

        def refusal(mode: str) -> str:
            return run_child(_KVIKIO_CHILD, [*place, mode, str(PROBE_BYTES)], deadline_s).cause

        found = _counted("cuFile", lambda: refusal("OFF"))
        if found.ok:
            return found
        if cause := refusal("ON"):
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
        file, name = tempfile.mkstemp(prefix=PROBE_PREFIX, dir=directory)
    except OSError as error:
        raise failed("probe", str(directory), 0, error) from error
    try:
        os.posix_fallocate(file, 0, PROBE_BYTES)
        yield name
    except OSError as error:
        raise failed("probe", name, 0, error) from error
    finally:
        os.close(file)
        os.unlink(name)


def gds_operations() -> tuple[int, int]:
    """Reads and writes counted by the nvidia-fs driver since it was loaded; zeros without it."""
    text = text_of(NVIDIA_FS_STATS)
    reads, writes = (re.search(rf"^{kind}\s*:.*?\bn=(\d+)", text, re.MULTILINE) for kind in ("Reads", "Writes"))
    return int(reads[1]) if reads else 0, int(writes[1]) if writes else 0
