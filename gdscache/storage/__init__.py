"""Bytes between files and memory: `open_transport` chooses, and imports only what it chose."""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from gdscache.errors import DeviceError, IOFailedError, TransportUnavailableError
from gdscache.runtime.named_class import named_class
from gdscache.storage.base import DeviceMemory, Memory, Op, Switch, Transport
from gdscache.storage.files import IN_MEMORY, mount_of

if TYPE_CHECKING:
    from gdscache.storage.probe import ProbeResult

__all__ = ["DeviceMemory", "Memory", "Op", "Transport", "choose_and_open", "open_transport"]

_log = logging.getLogger("gdscache.storage")
_GDS = ("cufile", "kvikio", "nixl")  # that may use it


def open_transport(
    transport: str, *, directory: Path, device: str, threads: int, direct_io: Switch, gds: Switch
) -> Transport:
    """The transport for the files in `directory`, with one log line that says which and why.

    `transport` is `posix`, `uring`, `cufile`, `kvikio`, `nixl`, `package.module:Class`, or `auto`: cufile where
    `device` (`cpu` or `cuda:N`) is a GPU and a byte-checked probe in `directory` proves that GPUDirect Storage works,
    else uring, or posix where the kernel has no io_uring or the files are in memory.
    `direct_io` and `gds` are `auto`, `on` or `off`; with `gds="on"` anything but proven GPUDirect Storage is refused.
    `nixl` moves GPU memory where such a probe proves it, and only host memory elsewhere; `cufile` where a probe moves
    the right bytes, by whatever path.

    Raises `TransportUnavailableError` with the reason and what to change.
    """
    opened, reason = choose_and_open(transport, directory, device, threads, direct_io, gds)
    _log.info("transport %s, %d threads, for %s: %s", opened.name, threads, directory, reason)
    return opened


def choose_and_open(
    transport: str, directory: Path, device: str, threads: int, direct_io: Switch, gds: Switch
) -> tuple[Transport, str]:
    """What `open_transport` opens, and why that one."""
    if transport not in ("auto", "posix", "uring", "cufile", "kvikio", "nixl") and ":" not in transport:
        raise TransportUnavailableError(
            f"unknown transport {transport!r}",
            "set transport to auto, posix, uring, cufile, kvikio, nixl or package.module:Class",
        )
    choice, compat, reason = _choose(transport, directory, device, gds)
    opened: Transport
    if choice == "posix" and transport == "auto":
        opened, reason = _without_gds(directory, threads, direct_io, reason)
    elif choice in ("posix", "uring"):
        from gdscache.storage.native import NativeTransport

        opened = NativeTransport(threads=threads, direct_io=direct_io, uring=choice == "uring")
    elif choice == "cufile":
        opened = _open_cufile(threads, direct_io, device if compat == "off" else "")
    elif choice == "kvikio":
        from gdscache.storage.kvikio import KvikioTransport

        opened = KvikioTransport(threads=threads, direct_io=direct_io, compat=compat)
    elif choice == "nixl":
        from gdscache.storage.nixl import NixlTransport

        opened = NixlTransport(threads=threads, direct_io=direct_io, gds=compat == "off")
    else:
        opened = _construct(choice, threads, direct_io)
    return opened, reason


def _without_gds(directory: Path, threads: int, direct_io: Switch, reason: str) -> tuple[Transport, str]:
    """io_uring where the kernel has it, else threads; and why. A file in memory is copied by a thread either way, and
    the kernel's own threads are slower at pages of 4 MiB and more (docs/design/transports.md)."""
    from gdscache.storage.native import NativeTransport

    kind = mount_of(directory)[0]
    if kind in IN_MEMORY:
        why = f"{reason}; files of {kind} are copied by threads, without io_uring"
        return NativeTransport(threads, direct_io, uring=False), why
    try:
        return NativeTransport(threads, direct_io, uring=True), f"{reason}; io_uring reads what it should"
    except (TransportUnavailableError, IOFailedError) as error:  # refused, or no memory or descriptor for a ring
        return NativeTransport(threads, direct_io, uring=False), f"{reason}; no io_uring: {error.message}"


def _choose(transport: str, directory: Path, device: str, gds: Switch) -> tuple[str, Switch, str]:
    """(what to open, kvikio's compat mode or `off` where cuFile or nixl move GPU memory, the reason)."""
    if gds == "on" and transport not in ("auto", *_GDS):
        raise _no_gds(f"transport {transport} does not use it")
    if transport not in ("auto", *_GDS):
        return transport, "auto", "configured"
    if not device.startswith("cuda"):
        if gds == "on":
            raise _no_gds(f"the device is {device}")
        if transport == "auto":
            return "posix", "auto", f"the device is {device}"
        return transport, "on", f"configured; the device is {device}, so files are read into host memory"
    if gds == "off":
        return ("posix", "auto", "gds is off") if transport == "auto" else (transport, "on", "configured; gds is off")

    from gdscache.storage.probe import no_gds_driver

    missing = no_gds_driver()
    if missing and gds == "on":
        raise _no_gds(missing)
    if missing and transport == "auto":
        return "posix", "auto", f"no GPUDirect Storage: {missing}"
    if transport == "nixl":
        return _choose_nixl(missing, directory, device, gds)
    name = "cufile" if transport == "auto" else transport
    probe = _probe(name, directory, int(device.partition(":")[2] or 0))
    if probe.mode == "gds":
        return name, "off", f"GPUDirect Storage works: {probe.reason}"
    if gds == "on":
        raise _no_gds(probe.reason)
    if transport == "auto":
        return "posix", "auto", f"no GPUDirect Storage: {probe.reason}"
    if not probe.ok:
        raise TransportUnavailableError(
            f"{name} does not work in {directory}: {probe.reason}", "set transport to posix"
        )
    # kvikio does without cuFile where that proves nothing; cuFile's own compat mode, or P2PDMA, is what was asked for.
    return name, "off" if name == "cufile" else "on", f"configured, but no GPUDirect Storage: {probe.reason}"


def _probe(name: str, directory: Path, index: int) -> ProbeResult:
    from gdscache.storage import probe

    probes = {"cufile": probe.probe_cufile, "kvikio": probe.probe_kvikio, "nixl": probe.probe_nixl}
    return probes[name](directory, index)


def _open_cufile(threads: int, direct_io: Switch, device: str) -> Transport:
    """`device`: whose memory is moved; empty: only the host's is, and cuFile is not touched."""
    from gdscache.storage.cufile import CufileTransport

    if not device:
        return CufileTransport(threads, direct_io)
    import torch

    from gdscache.cuda.driver import Driver

    try:
        gpu = Driver(torch.device("cuda", int(device.partition(":")[2] or 0)))
    except DeviceError as error:
        raise TransportUnavailableError(
            f"cuFile needs the CUDA driver: {error.message}", "set transport to posix or auto"
        ) from error
    return CufileTransport(threads, direct_io, gpu=gpu)


def _choose_nixl(missing: str, directory: Path, device: str, gds: Switch) -> tuple[str, Switch, str]:
    if not missing:
        probe = _probe("nixl", directory, int(device.partition(":")[2] or 0))
        if probe.mode == "gds":
            return "nixl", "off", f"configured; GPUDirect Storage works: {probe.reason}"
        missing = probe.reason
    if gds == "on":
        raise _no_gds(missing)
    return "nixl", "on", f"configured, for host memory only; no GPUDirect Storage: {missing}"


def _construct(target: str, threads: int, direct_io: Switch) -> Transport:
    made: Transport = named_class(
        target, Transport, functools.partial(_bad_class, target), threads=threads, direct_io=direct_io
    )(threads=threads, direct_io=direct_io)
    return made


def _bad_class(target: str, cause: str) -> TransportUnavailableError:
    return TransportUnavailableError(
        f"transport {target!r}: {cause}", "name a subclass of gdscache.storage.Transport as package.module:Class"
    )


def _no_gds(cause: str) -> TransportUnavailableError:
    return TransportUnavailableError(
        f"gds is on, but GPUDirect Storage is not proven to work: {cause}",
        "set gds to auto, or repair GPUDirect Storage (gdscheck -p shows what is missing)",
    )
