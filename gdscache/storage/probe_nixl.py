"""What NIXL can do with GPU memory on this machine, found out in a child process, as for cuFile."""

from __future__ import annotations

from pathlib import Path

from gdscache.storage.probe import ProbeResult, probe_transport

_OPENED = """
def transport(device):
    from gdscache.storage.nixl import NixlTransport
    return NixlTransport(threads=2, gds=True)
"""


def probe_nixl(directory: Path, device_index: int, deadline_s: float = 20.0) -> ProbeResult:
    """What `probe_transport` finds with GDS_MT."""
    return probe_transport(_OPENED, "GDS_MT of NIXL", directory, device_index, deadline_s)
