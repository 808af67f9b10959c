"""The rates at which each transport reads and writes a directory, with host memory and with a GPU's: a script to adapt.

    python examples/gds_throughput.py [DIRECTORY] [--mib 256] [--request-kib 1024] [--threads 16] [--require-gds]

It moves a file once each way, by calls from threads, and compares every byte. With --require-gds it fails unless the
nvidia-fs driver counted reads and writes of GPU memory meanwhile. `gdscache bench io` measures in turns, against the
disk's own limit, what an engine makes of a transport; this shows the calls.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

import torch

from gdscache.cuda.host_memory import HostBuffer
from gdscache.errors import GdsCacheError
from gdscache.storage import Op, Transport, open_transport
from gdscache.storage.base import Memory, memory_of, part
from gdscache.storage.calls import carry
from gdscache.storage.probe import gds_operations

DEADLINE_S = 120.0


def move(transport: Transport, op: Op, file: int, memory: Memory, request: int) -> float:
    """Move the whole memory in calls of `request` bytes, by the transport's number of threads; GB/s."""
    parts = [part(memory, at, min(at + request, memory.nbytes)) for at in range(0, memory.nbytes, request)]
    start = time.perf_counter()
    carry(transport, op, [(file, n * request, some) for n, some in enumerate(parts)], DEADLINE_S)
    if op is Op.WRITE:
        transport.flush(file)
    return memory.nbytes / (time.perf_counter() - start) / 1e9


def try_one(name: str, device: str, path: Path, options: argparse.Namespace) -> bool:
    """Write and read the file by one transport and print the result. Returns whether it was GPUDirect Storage."""
    nbytes, request = options.mib << 20, options.request_kib << 10
    try:
        transport = open_transport(
            name, directory=path.parent, device=device, threads=options.threads, direct_io="auto", gds="auto"
        )
    except GdsCacheError as error:
        print(f"{name}, {device}: not here: {error.message}")
        return False
    with transport:
        if device != "cpu" and "cuda" not in transport.memory_kinds:
            print(f"{name}, {device}: not here: it moves host memory only")
            return False
        file = transport.open(path)
        content = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
        if device == "cpu":
            buffer = HostBuffer(nbytes)  # page-aligned, page-locked if CUDA is available
            tensor, whole = buffer.tensor, buffer.view
            memory: Memory = whole
        else:
            tensor = whole = torch.empty(nbytes, dtype=torch.uint8, device=device)
            memory = memory_of(tensor)
        tensor.copy_(content)
        synchronize(device)  # no transport waits for the caller's streams
        transport.register(whole)  # once, for memory that is used again and again
        before = gds_operations()
        written = move(transport, Op.WRITE, file, memory, request)
        tensor.zero_()
        synchronize(device)
        read = move(transport, Op.READ, file, memory, request)
        reads, writes = (new - old for old, new in zip(before, gds_operations(), strict=True))
        same = torch.equal(tensor.cpu(), content)
        transport.deregister(whole)
        past = "past the page cache" if transport.direct else "through the page cache"
    print(
        f"{name}, {device}: read {read:.2f}, write {written:.2f} GB/s, {past}; nvidia-fs counted {reads} and {writes}"
    )
    if not same:
        sys.exit(f"{name}, {device}: the bytes read are not those written")
    return device != "cpu" and min(reads, writes) > 0


def synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize(device)


def main() -> None:
    parser = argparse.ArgumentParser(description="Throughput of a directory by each transport, byte-checked.")
    parser.add_argument("directory", nargs="?", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--mib", type=int, default=256, help="MiB that are moved each way")
    parser.add_argument("--request-kib", type=int, default=1024, help="KiB of a request, a multiple of 4")
    parser.add_argument("--threads", type=int, default=16, help="threads of a transport")
    parser.add_argument("--require-gds", action="store_true", help="fail unless GPUDirect Storage is proven")
    options = parser.parse_args()
    devices = ["cpu", "cuda:0"] if torch.cuda.is_available() else ["cpu"]
    with tempfile.TemporaryDirectory(prefix="gdscache-throughput-", dir=options.directory) as directory:
        path = Path(directory, "data.bin")
        with path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, options.mib << 20)  # transports take files of their full size
        names = {"cpu": ["posix", "nixl"], "cuda:0": ["cufile", "kvikio", "nixl"]}
        found = [try_one(name, device, path, options) for device in devices for name in names[device]]
    print(f"GPUDirect Storage: {'yes' if any(found) else 'no'}")
    if options.require_gds and not any(found):
        sys.exit("GPUDirect Storage was required; gdscache doctor shows the missing parts")


if __name__ == "__main__":
    main()
