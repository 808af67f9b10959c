"""The ways of `gdscache bench io` between a disk and memory: a transport on one file, and its memory."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from gdscache.arrays import integers
from gdscache.commands.bench.measure import Closeable
from gdscache.cuda.host_memory import HostBuffer
from gdscache.errors import ShortIOError, StorageError
from gdscache.native import Disk, error_of
from gdscache.sizes import KIB, MIB
from gdscache.storage.base import Op, Transport, address_of, failed, memory_of, part
from gdscache.storage.native import NativeTransport

CHECKED = ((16 * KIB, 16), (1 * MIB, 6))  # request sizes and counts of the byte check
CHECK_BYTES = 8 * MIB  # of the file and of memory for the check
CALL_BYTES = 4 * MIB  # bytes of one call, as in an engine
UNDER_WAY = 8  # calls in flight for each io_uring thread

Request = tuple[int, int]
"""Offset in the file, offset in the memory."""


@dataclasses.dataclass(frozen=True)
class Way:
    """A way of bytes. `memory`: its memory end; `cufile`: whether cuFile takes part."""

    name: str
    label: str
    memory: str
    cufile: bool = False


WAYS = (  # in the order of measuring
    Way("cufile", "direct GPU, native", "cuda", cufile=True),
    Way("direct", "direct GPU, kvikio", "cuda", cufile=True),
    Way("nixl_gds_mt", "NIXL GDS_MT", "cuda", cufile=True),
    Way("kvikio_compat", "kvikio compat", "cuda"),
    Way("nixl_posix", "NIXL POSIX", "host"),
    Way("host_gpu", "host then GPU", "cuda"),
    Way("uring", "host only, io_uring", "host"),
    Way("host", "host only", "host"),
)
BY_NAME = {way.name: way for way in WAYS}


class Batch:
    """Requests of `nbytes` each, as calls of at most `CALL_BYTES`, and their ends."""

    def __init__(self, op: Op, some: Sequence[Request], nbytes: int) -> None:
        self.op = op
        self.calls = [  # offset in the file, offset in the memory, bytes
            (offset + n, at + n, min(CALL_BYTES, nbytes - n))
            for offset, at in some
            for n in range(0, nbytes, CALL_BYTES)
        ]
        self.left = len(self.calls)
        self.ended: list[slice] = []  # of the memory: good calls since the last look
        self.failure: BaseException | None = None
        self.kept: Any = None  # the calls in flight

    def end(self, call: int, error: BaseException | None, moved: int, path: Path) -> None:
        self.left -= 1
        offset, at, nbytes = self.calls[call]
        if error is None and moved == nbytes:
            self.ended.append(slice(at, at + nbytes))
            return
        if error is None:
            error = ShortIOError(f"{self.op.value} moved {moved} of {nbytes} bytes at offset {offset} of {path}")
        elif isinstance(error, OSError):
            error = failed(self.op.value, str(path), offset, error)
        self.failure = self.failure or error


class OpenWay(Closeable):
    """A transport with `threads` threads on an existing file, and `nbytes` of memory for its requests.

    The bytes end (or begin) in `memory`: on the GPU for the GPU ways, else in host memory. `host_gpu` also has `host`,
    page-locked memory of the same size, which the transport uses. Raises the transport's errors.
    """

    def __init__(self, name: str, path: Path, threads: int, nbytes: int, device: torch.device) -> None:
        self.way: Way = BY_NAME[name]
        self.path = path
        self.host: HostBuffer | None = None
        self.gpu: torch.Tensor | None = None
        with contextlib.ExitStack() as undo:
            if self.way.memory == "cuda":
                self.gpu = torch.zeros(nbytes, dtype=torch.uint8, device=device)
            if name == "host_gpu" or self.way.memory == "host":
                self.host = undo.enter_context(HostBuffer(nbytes, "on" if name == "host_gpu" else "auto", unit=MIB))
            _idle(self.gpu)
            self.transport = undo.enter_context(open_transport(name, threads, device))
            self._file = self.transport.open(path)
            buffer = self._io_memory
            self.transport.register(buffer)
            undo.callback(self.transport.deregister, buffer)
            self._whole = buffer if isinstance(buffer, memoryview) else memory_of(buffer)
            self._disk: Disk | None = None
            self._pool = undo.enter_context(ThreadPoolExecutor(threads))
            if isinstance(transport := self.transport, NativeTransport):  # as in an engine
                kind: Literal["ring", "threads"] = "ring" if transport.uring else "threads"
                self._disk = Disk(kind, threads, UNDER_WAY * threads, transport.cufile)
                undo.callback(self._disk.close)
            self._batches: dict[int, Batch] = {}
            self._numbers = itertools.count()
            self._undo = undo.pop_all()

    @property
    def _io_memory(self) -> memoryview | torch.Tensor:
        """The transport's memory."""
        if self.host is not None:
            return self.host.view
        assert self.gpu is not None
        return self.gpu

    def begin(self, op: Op, some: Sequence[Request], nbytes: int) -> Batch:
        """Submit requests of `nbytes` each. GPU bytes that go through the host are copied down first."""
        if op is Op.WRITE and self.host is not None and self.gpu is not None:
            for _, at in some:
                self.host.tensor[at : at + nbytes].copy_(self.gpu[at : at + nbytes], non_blocking=True)
            _idle(self.gpu)
        batch = Batch(op, some, nbytes)
        if self._disk is None:
            call, whole = self.transport.read if op is Op.READ else self.transport.write, self._whole
            batch.kept = [
                self._pool.submit(call, self._file, offset, part(whole, at, at + size))
                for offset, at, size in batch.calls
            ]
            return batch
        self._batches[number := next(self._numbers)] = batch
        offsets, places, sizes = integers(batch.calls).reshape(-1, 3).T
        address = address_of(self._whole) if isinstance(self._whole, memoryview) else self._whole.address
        batch.kept = np.stack([places + address, sizes], axis=1).astype(np.uint64)
        calls, copied = np.arange(batch.left), not self.transport.direct
        columns = number << 32 | calls, op is Op.WRITE, self._file, offsets, calls, 1, copied
        self._disk.submit(integers(np.stack(np.broadcast_arrays(*columns), axis=1)), batch.kept)
        return batch

    def finish(self, batch: Batch) -> None:
        """Wait for a whole batch, and copy its reads on to the GPU. Raises its first error."""
        while batch.left or batch.ended:
            if batch.op is Op.READ and self.host is not None and self.gpu is not None:
                for at in batch.ended:
                    self.gpu[at].copy_(self.host.tensor[at], non_blocking=True)
            batch.ended.clear()
            if batch.left:
                self._reap(batch)
        _idle(self.gpu)
        if batch.failure is not None:
            raise batch.failure

    def _reap(self, batch: Batch) -> None:
        """Wait for calls of a batch, or of another batch of the disk."""
        if self._disk is None:
            for number, call in enumerate(batch.kept):
                error = call.exception()
                batch.end(number, error, 0 if error else call.result(), self.path)
            return
        for tag, _, _, code, moved in self._disk.reap().tolist():
            other = self._batches[tag >> 32]
            other.end(tag & 0xFFFFFFFF, error_of(code) if code else None, moved, self.path)
            if not other.left:
                del self._batches[tag >> 32]

    def move(self, op: Op, some: Sequence[Request], nbytes: int) -> None:
        """Submit requests and wait for them. Raises the first error."""
        self.finish(self.begin(op, some, nbytes))

    def flush(self) -> None:
        """Wait until the written bytes are on the device."""
        self.transport.flush(self._file)

    # -- the bytes, for checks ---------------------------------------------------------------------------------------

    def put(self, content: bytes) -> None:
        """Set the first bytes of the memory at this way's far end."""
        if self.gpu is not None:
            self.gpu[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(self.gpu.device)
            _idle(self.gpu)
        elif self.host is not None:
            self.host.view[: len(content)] = content

    def get(self, at: int, nbytes: int) -> bytes:
        """Bytes of the memory at the far end."""
        if self.gpu is not None:
            return bytes(self.gpu[at : at + nbytes].cpu().numpy().tobytes())
        assert self.host is not None
        return bytes(self.host.view[at : at + nbytes])

    def close(self) -> None:
        """Free everything after the GPU is idle."""
        _idle(self.gpu)
        self._undo.close()
        self.gpu = None
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def open_transport(name: str, threads: int, device: torch.device) -> Transport:
    """A way's transport. Raises `TransportUnavailableError`."""
    if name in ("host", "host_gpu", "uring"):
        return NativeTransport(threads, uring=name == "uring")
    if name == "cufile":
        from gdscache.cuda.driver import Driver
        from gdscache.storage.cufile import CufileTransport

        return CufileTransport(threads, gpu=Driver(device))
    if name in ("direct", "kvikio_compat"):
        from gdscache.storage.kvikio import KvikioTransport

        return KvikioTransport(threads, compat="off" if name == "direct" else "on")
    from gdscache.storage.nixl import NixlTransport

    return NixlTransport(threads, gds=name == "nixl_gds_mt")


def check(way: OpenWay) -> None:
    """Write and read scattered requests through a way, and compare every byte with plain reads of the file. Uses the
    first `CHECK_BYTES` of the file and of the memory. Raises `StorageError` if a byte differs."""
    rng = np.random.default_rng(1)
    for nbytes, count in CHECKED:
        offsets = (rng.permutation(CHECK_BYTES // nbytes)[:count] * nbytes).tolist()
        some = [(int(offset), number * nbytes) for number, offset in enumerate(offsets)]
        content = rng.bytes(count * nbytes)
        way.put(content)
        way.move(Op.WRITE, some, nbytes)
        way.flush()
        with way.path.open("rb", buffering=0) as file:
            for offset, at in some:
                file.seek(offset)
                _compare(way, "in the file", offset, file.read(nbytes), content[at : at + nbytes])
        way.put(bytes(count * nbytes))
        way.move(Op.READ, some[::-1], nbytes)
        for offset, at in some:
            _compare(way, "read", offset, way.get(at, nbytes), content[at : at + nbytes])


def _compare(way: OpenWay, where: str, offset: int, found: bytes, wanted: bytes) -> None:
    if found != wanted:
        raise StorageError(
            f"{way.way.label}: {len(wanted)} bytes {where} at offset {offset} are not those written",
            "do not use this way here",
        )


def _idle(gpu: torch.Tensor | None) -> None:
    if gpu is not None and gpu.is_cuda:
        torch.cuda.synchronize(gpu.device)
