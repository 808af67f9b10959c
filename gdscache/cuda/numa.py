"""A GPU's NUMA node. Threads and memory that serve the GPU are placed there: they are made by a thread that runs on the
node, and inherit its processors."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from gdscache.runtime.files import text_of

ROOT = Path("/")
_log = logging.getLogger("gdscache.cuda")


@dataclasses.dataclass(frozen=True)
class Placement:
    """`node`: of a GPU, None if unknown or if the machine has one node. `cpus`: the node's processors that this thread
    may use. `lacks`: why the GPU's threads cannot be placed, or ""."""

    node: int | None = None
    cpus: frozenset[int] = frozenset()
    lacks: str = ""


def gpu_address(device: torch.device) -> str:
    """The PCI address of a GPU, such as `0000:18:00.0`; "" if torch does not tell it."""
    told: Any = torch.cuda.get_device_properties(device)
    if not hasattr(told, "pci_bus_id"):
        return ""
    return f"{told.pci_domain_id:04x}:{told.pci_bus_id:02x}:{told.pci_device_id:02x}.0"


def placement(address: str, root: Path = ROOT) -> Placement:
    """The placement for the GPU at a PCI address; empty on a machine with one node."""
    if len([*root.glob("sys/devices/system/node/node[0-9]*")]) < 2:
        return Placement()
    text = text_of(root / "sys/bus/pci/devices" / address / "numa_node") if address else ""
    if not text.isdecimal():  # -1: the machine does not say
        return Placement(lacks="the machine does not say which NUMA node it is on")
    node = int(text)
    mine = _cpus(text_of(root / f"sys/devices/system/node/node{node}/cpulist")) & os.sched_getaffinity(0)
    if not mine:
        return Placement(node, lacks=f"this process may use no processor of NUMA node {node}")
    return Placement(node, frozenset(mine))


@contextlib.contextmanager
def near(device: torch.device, root: Path = ROOT) -> Iterator[None]:
    """A block in which this thread, and threads that it starts, run on a GPU's NUMA node. Logs if that is
    impossible."""
    found = placement(gpu_address(device), root) if device.type == "cuda" else Placement()
    if found.lacks:
        _log.info("%s: %s", device, found.lacks)
    if not found.cpus:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, found.cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _cpus(text: str) -> set[int]:
    """`0-3,8,10-11`"""
    found = set[int]()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found
