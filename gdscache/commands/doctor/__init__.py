"""`gdscache doctor`: what this machine gives, what is missing, and whether a configuration gets what it asks for.

First facts are found out, each with its value or the cause why it could not be had; then checks judge them, a section
each. To add a section: find its facts in a file of their own, give `Facts` a field, and add its check to `CHECKS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from gdscache.commands.doctor.copies import copy_rows, find_copies
from gdscache.commands.doctor.engines import engine_rows, find_engines
from gdscache.commands.doctor.facts import Asked, Facts, Found, MoverFacts, attempt, defaults
from gdscache.commands.doctor.gpu import find_gpu, gpu_rows, gpu_to_look_at
from gdscache.commands.doctor.kernels import find_kernels, find_mover, kernel_rows
from gdscache.commands.doctor.report import Report, Row, Section, tables
from gdscache.commands.doctor.storage import find_ssd
from gdscache.commands.doctor.storage_rows import ssd_rows

__all__ = ["CHECKS", "Asked", "Facts", "Report", "Row", "Section", "defaults", "examine", "find", "tables"]

Check = Callable[[Facts, Asked], Iterable[Row]]

CHECKS: tuple[tuple[str, Check], ...] = (
    ("GPU", gpu_rows),
    ("Kernels", kernel_rows),
    ("GPU <-> CPU", copy_rows),
    ("SSD", ssd_rows),
    ("Inference engines", engine_rows),
)


def find(asked: Asked, *, recalibrate: bool = False) -> Facts:
    """Look at the machine. Builds kernels, measures the bus where nobody has, opens what copies the pages,
    and writes and reads some MiB in the SSD tier's directories, with nothing left there."""
    gpu = find_gpu(asked)
    device = gpu_to_look_at(gpu)
    kernels = find_kernels(device)
    copies = find_copies(device, kernels=kernels.built.value is not None, recalibrate=recalibrate)
    mover: Found[MoverFacts] = Found(None, "not tried: no device")
    if gpu.device.value:
        engines = torch.device(gpu.device.value)
        mover = attempt(lambda: find_mover(asked, engines))
    directory = asked.ssd_directory
    ssd = None if directory is None else find_ssd(asked, directory, gpu.device.value or "cpu")
    return Facts(gpu, kernels, copies, mover, ssd, find_engines())


def examine(facts: Facts, asked: Asked) -> Report:
    """Judge what was found."""
    return Report(tuple(Section(title, tuple(check(facts, asked))) for title, check in CHECKS))
