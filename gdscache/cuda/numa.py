"""Which NUMA node a GPU is on. What serves it is made by a thread that runs there: its threads run there, too, and the
memory that they touch first lies there."""

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
    """`node`: of a GPU, None where it does not matter or is not known. `cpus`: of that node, those that this thread may
    use. `lacks`: why what serves the GPU does not lie there, or ""."""

    node: int | None = None
    cpus: frozenset[int] = frozenset()
    lacks: str = ""


def gpu_address(device: torch.device) -> str:
    """The PCI address of a GPU, as `0000:18:00.0`; "" where torch does not tell it."""
    told: Any = torch.cuda.get_device_properties(device)
    if not hasattr(told, "pci_bus_id"):
        return ""
    return f"{told.pci_domain_id:04x}:{told.pci_bus_id:02x}:{told.pci_device_id:02x}.0"


def gpu_numa_node(address: str, root: Path = ROOT) -> int | None:
    """The NUMA node of the GPU at a PCI address; None where it is not known."""
    text = text_of(root / "sys/bus/pci/devices" / address / "numa_node")
    return int(text) if text.isdecimal() else None  # -1: the machine does not say


def placement(address: str, root: Path = ROOT) -> Placement:
    """Where what serves the GPU at a PCI address is to lie. Nowhere in particular on a machine with one node."""
    if len([*root.glob("sys/devices/system/node/node[0-9]*")]) < 2:
        return Placement()
    node = gpu_numa_node(address, root) if address else None
    if node is None:
        return Placement(lacks="the machine does not say which NUMA node it is on")
    mine = _cpus(text_of(root / f"sys/devices/system/node/node{node}/cpulist")) & os.sched_getaffinity(0)
    if not mine:
        return Placement(node, lacks=f"this process may use no processor of NUMA node {node}")
    return Placement(node, frozenset(mine))


@contextlib.contextmanager
def near(device: torch.device, root: Path = ROOT) -> Iterator[None]:
    """This thread, and threads that it starts meanwhile, run on the NUMA node of a GPU. Says where that cannot be."""
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
