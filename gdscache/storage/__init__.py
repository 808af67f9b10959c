"""Bytes between files and memory: `open_transport` chooses a transport, and imports only that one."""

from __future__ import annotations

import dataclasses
import functools
import logging
from pathlib import Path

from gdscache.errors import IOFailedError, TransportUnavailableError
from gdscache.storage.base import GDS, DeviceMemory, Memory, Op, Switch, Transport, named_object
from gdscache.storage.files import IN_MEMORY, NativeTransport, find_mount

__all__ = ["DeviceMemory", "Memory", "Op", "Transport", "choose_and_open", "open_transport"]

_log = logging.getLogger("gdscache.storage")


def open_transport(
    transport: str, *, directory: Path, device: str, threads: int, direct_io: Switch, gds: Switch
) -> Transport:
    """The transport for the files in `directory`; a log line names it and the reason.

    `transport` is `posix`, `uring`, `cufile`, `kvikio`, `nixl`, `package.module:Class`, or `auto`: cufile if `device`
    (`cpu` or `cuda:N`) is a GPU and a byte-checked probe in `directory` proves that GPUDirect Storage works; else
    uring, or posix if the kernel has no io_uring or the files are in memory.

    `direct_io` and `gds` are `auto`, `on` or `off`; with `gds="on"` anything but proven GPUDirect Storage is refused.
    `nixl` moves GPU memory if such a probe proves it, and only host memory otherwise; `cufile` if a probe moves the
    right bytes, by any path.

    Raises `TransportUnavailableError` with the reason and the setting to change.
    """
    opened, reason = choose_and_open(transport, directory, device, threads, direct_io, gds)
    _log.info("transport %s, %d threads, for %s: %s", opened.name, threads, directory, reason)
    return opened


def choose_and_open(
    transport: str, directory: Path, device: str, threads: int, direct_io: Switch, gds: Switch
) -> tuple[Transport, str]:
    """The transport of `open_transport`, and the reason for it."""
    if transport not in ("auto", "posix", "uring", "cufile", "kvikio", "nixl") and ":" not in transport:
        raise TransportUnavailableError(
            f"unknown transport {transport!r}",
            "set ssd.transport to auto, posix, uring, cufile, kvikio, nixl or package.module:Class",
        )
    choice, compat, reason = _choose(transport, directory, device, gds)
    if choice == "posix" and transport == "auto":
        return _without_gds(directory, threads, direct_io, reason)
    if choice in ("posix", "uring"):
        return NativeTransport(threads, direct_io, uring=choice == "uring"), reason
    if choice == "cufile" and compat != "off":  # only host memory is moved
        return NativeTransport(threads, direct_io, uring=False, name=choice), reason
    if choice == "cufile":
        from gdscache.storage.cufile import open_cufile

        return open_cufile(threads, direct_io, device), reason
    if choice == "kvikio":
        from gdscache.storage.kvikio import KvikioTransport

        return KvikioTransport(threads, direct_io, compat), reason
    if choice == "nixl":
        from gdscache.storage.nixl import NixlTransport

        return NixlTransport(threads, direct_io, gds=compat == "off"), reason
    refuse = functools.partial(_bad_class, choice)
    return named_object(choice, Transport, refuse, threads=threads, direct_io=direct_io), reason


def _without_gds(directory: Path, threads: int, direct_io: Switch, reason: str) -> tuple[Transport, str]:
    """io_uring if the kernel has it, else threads; and the reason. Files in memory are copied by a thread either way,
    and the kernel's own threads are slower with pages of 4 MiB and more (docs/design/transports.md)."""
    kind = find_mount(directory).file_system
    if kind in IN_MEMORY:
        why = f"files of {kind} are copied by threads, without io_uring"
    else:
        try:
            return NativeTransport(threads, direct_io, uring=True), f"{reason}; io_uring reads the right bytes"
        except (TransportUnavailableError, IOFailedError) as error:  # refused, or no memory or descriptor for a ring
            why = f"no io_uring: {error.message}"
    return NativeTransport(threads, direct_io, uring=False), f"{reason}; {why}"


def _choose(transport: str, directory: Path, device: str, gds: Switch) -> tuple[str, Switch, str]:
    """(transport to open, kvikio's compat mode or `off` if cuFile or nixl move GPU memory, the reason)."""
    may, on_gpu = transport in ("auto", *GDS), device.startswith("cuda")
    if gds == "on" or (gds == "auto" and may and on_gpu):
        return _choose_for_gpu(transport, directory, device, required=gds == "on")
    if not may:
        return transport, "auto", "configured"
    why = "gds is off" if on_gpu else f"the device is {device}"
    return ("posix", "auto", why) if transport == "auto" else (transport, "on", f"configured, for host memory: {why}")


def _choose_for_gpu(transport: str, directory: Path, device: str, *, required: bool) -> tuple[str, Switch, str]:
    """The transport to open for files in `directory`: its name, kvikio's compat mode or `off` if cuFile or nixl move
    GPU memory, and the reason. `required`: only proven GPUDirect Storage is accepted.

    Raises `TransportUnavailableError` with the reason and the setting to change.
    """
    from gdscache.storage import probe

    if required and transport not in ("auto", *GDS):
        message = f"ssd.gds is on, and ssd.transport is {transport}, which does not use GPUDirect Storage"
        raise TransportUnavailableError(message, f"set ssd.transport to auto, {', '.join(GDS)}, or ssd.gds to auto")
    if required and not device.startswith("cuda"):
        raise _no_gds(f"the device is {device}")
    name = "cufile" if transport == "auto" else transport
    any_path = transport in ("cufile", "kvikio") and not required
    ok, cause = False, probe.no_gds_driver()
    if any_path or not cause:
        try:
            ok, mode, cause = dataclasses.astuple(probe.probe(name, directory, int(device.partition(":")[2] or 0)))
        except IOFailedError as error:  # the disk is full, perhaps of our own slab, which others can read and write
            if required or transport != "auto":
                raise
            mode, cause = "posix", error.message
        if mode == "gds":
            return name, "off", f"GPUDirect Storage works: {cause}"
    if required:
        raise _no_gds(cause)
    if transport == "auto":
        return "posix", "auto", f"no GPUDirect Storage: {cause}"
    if name == "nixl":
        return "nixl", "on", f"configured, for host memory only; no GPUDirect Storage: {cause}"
    if not ok:
        raise TransportUnavailableError(f"{name} does not work in {directory}: {cause}", "set ssd.transport to posix")
    # Without proof, kvikio runs without cuFile; for `cufile`, its own compat mode or P2PDMA was asked for.
    return name, "off" if name == "cufile" else "on", f"configured, but no GPUDirect Storage: {cause}"


def _no_gds(cause: str) -> TransportUnavailableError:
    return TransportUnavailableError(
        f"ssd.gds is on, but GPUDirect Storage is not proven to work: {cause}",
        "set ssd.gds to auto, or repair GPUDirect Storage (gdscheck -p shows its missing parts)",
    )


def _bad_class(target: str, cause: str) -> TransportUnavailableError:
    return TransportUnavailableError(
        f"transport {target!r}: {cause}", "name a subclass of gdscache.storage.Transport as package.module:Class"
    )
