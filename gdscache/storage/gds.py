"""The transport for a GPU's memory: one that a probe proves to use GPUDirect Storage."""

from __future__ import annotations

from pathlib import Path

from gdscache.errors import TransportUnavailableError
from gdscache.storage import probe
from gdscache.storage.base import GDS, Switch


def choose(transport: str, directory: Path, device: str, *, required: bool) -> tuple[str, Switch, str]:
    """The transport to open for files in `directory`: its name, kvikio's compat mode or `off` if cuFile or nixl move
    GPU memory, and the reason. `required`: only proven GPUDirect Storage is accepted.

    Raises `TransportUnavailableError` with the reason and the setting to change.
    """
    if required and transport not in ("auto", *GDS):
        raise _no_gds(f"transport {transport} does not use it")
    if required and not device.startswith("cuda"):
        raise _no_gds(f"the device is {device}")
    missing = probe.no_gds_driver()
    if missing and required:
        raise _no_gds(missing)
    if missing and transport == "auto":
        return "posix", "auto", f"no GPUDirect Storage: {missing}"
    if missing and transport == "nixl":
        return "nixl", "on", f"configured, for host memory only; no GPUDirect Storage: {missing}"
    name = "cufile" if transport == "auto" else transport
    probes = {"cufile": probe.probe_cufile, "kvikio": probe.probe_kvikio, "nixl": probe.probe_nixl}
    found = probes[name](directory, int(device.partition(":")[2] or 0))
    if found.mode == "gds":
        return name, "off", f"GPUDirect Storage works: {found.reason}"
    if required:
        raise _no_gds(found.reason)
    if transport == "auto":
        return "posix", "auto", f"no GPUDirect Storage: {found.reason}"
    if name == "nixl":
        return "nixl", "on", f"configured, for host memory only; no GPUDirect Storage: {found.reason}"
    if not found.ok:
        raise TransportUnavailableError(
            f"{name} does not work in {directory}: {found.reason}", "set transport to posix"
        )
    # Without proof, kvikio runs without cuFile; for `cufile`, its own compat mode or P2PDMA was asked for.
    return name, "off" if name == "cufile" else "on", f"configured, but no GPUDirect Storage: {found.reason}"


def _no_gds(cause: str) -> TransportUnavailableError:
    return TransportUnavailableError(
        f"gds is on, but GPUDirect Storage is not proven to work: {cause}",
        "set gds to auto, or repair GPUDirect Storage (gdscheck -p shows its missing parts)",
    )
