"""What NIXL can do with GPU memory on this machine, found out in a child process, as for kvikio."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from gdscache.directory import PROBE_PREFIX
from gdscache.storage.base import failed
from gdscache.storage.probe import PROBE_BYTES, PROC_MODULES, ProbeResult, gds_operations, run_child

_CHILD = """
import sys, time
from pathlib import Path
import torch
from gdscache.storage import IORequest, Op
from gdscache.storage.nixl import NixlTransport

path, device, nbytes, seconds = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
torch.cuda.set_device(device)
memory = torch.randint(0, 256, (2 * nbytes,), dtype=torch.uint8, device="cuda")
source, target = memory[:nbytes], memory[nbytes:]
torch.cuda.synchronize()
with NixlTransport(threads=2, gds=True) as transport:
    file = transport.open(path)
    transport.register(memory)
    for op, part in ((Op.WRITE, source), (Op.READ, target)):
        [error] = transport.submit(op, [IORequest(file, 0, part)]).wait(time.monotonic() + seconds)
        if error:
            sys.exit(str(error))
if not torch.equal(source, target):
    sys.exit("the bytes read into GPU memory are not those written")
if path.read_bytes() != source.cpu().numpy().tobytes():
    sys.exit("the file does not hold the bytes written")
"""


def probe_nixl(directory: Path, device_index: int, deadline_s: float = 20.0) -> ProbeResult:
    """Write and read a few MiB between GPU memory and a temporary file in `directory` with GDS_MT, and compare.

    One child, killed after `deadline_s` seconds. `gds` is answered only if the nvidia-fs driver counted the I/O, else
    `compat` (bytes move, through host memory) or `posix`. Raises `IOFailedError` when the directory takes no file.
    """
    if not PROC_MODULES.exists():
        return ProbeResult(False, "posix", f"the kernel has no {PROC_MODULES}, without which cuFile never answers")
    try:
        file, name = tempfile.mkstemp(prefix=PROBE_PREFIX, dir=directory)
    except OSError as error:
        raise failed("probe", str(directory), 0, error) from error
    try:
        os.posix_fallocate(file, 0, PROBE_BYTES)
        before = gds_operations()
        refusal = run_child(_CHILD, [name, str(device_index), str(PROBE_BYTES), str(deadline_s)], deadline_s)
        after = gds_operations()
    except OSError as error:
        raise failed("probe", name, 0, error) from error
    finally:
        os.close(file)
        os.unlink(name)
    if refusal:
        return ProbeResult(False, "posix", f"GDS_MT of NIXL: {refusal}")
    if min(new - old for old, new in zip(before, after, strict=True)) > 0:
        return ProbeResult(True, "gds", f"nvidia-fs counted {after[0] - before[0]} reads of the probe")
    return ProbeResult(True, "compat", "GDS_MT of NIXL works, but nvidia-fs counted no I/O of the probe")
