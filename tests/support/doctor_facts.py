"""Facts of machines, as `gdscache doctor` finds them."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

from gdscache.commands.doctor import Facts
from gdscache.commands.doctor.facts import Found, Moved, Row
from gdscache.commands.doctor.gpu import calibration_row, device_row, driver_row
from gdscache.cuda.numa import Placement
from gdscache.kernels.choice import Calibration
from gdscache.sizes import MIB
from tests.support.rates import DOWN, UP

KEY = {"gpu": "H200", "gpu_uuid": "GPU-1", "driver": "13000", "copy_engine": "batch_13", "kernels": "0123456789abcdef"}

MEASURED = Calibration(UP, DOWN, KEY, 0.5)

HINT = "install it"

H200 = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, total_memory=140 << 30, multi_processor_count=132)

WHOLE = Facts(
    torch="2.11.0",
    torch_cuda="13.0",
    driver=Found(driver_row(13000, "580.82.07")),
    devices=Found((device_row(0, H200, Placement()),)),
    device=Found("cuda:0"),
    compiler=Found("cuda-core 1.2.2"),
    nvrtc=Found("13.0"),
    built=Found(0.25),
    mover=Found(("cuda", "")),
    pinned=Found(0.01),
    api=Found("batch_13"),
    calibration=Found(calibration_row(MEASURED, "/c/calibration.json", cached=True, kept=True)),
    engines=(Row("vLLM", "not installed"),),
)


def changed(facts: Facts, **parts: Any) -> Facts:
    return dataclasses.replace(facts, **parts)


def lacking(cause: str, hint: str = HINT) -> Any:
    return Found(None, cause, hint)


def answered(name: str = "posix", **changes: Any) -> Found[Moved]:
    facts = Moved(name, "host", "host", True, 32 * MIB, 0.01, 0.02, "configured")
    return Found(dataclasses.replace(facts, **changes))


PLAIN = changed(  # no GPU, as torch's CPU build shows it
    WHOLE,
    torch_cuda=None,
    driver=lacking("there is no CUDA driver"),
    devices=lacking("torch was built without CUDA"),
    device=Found("cpu"),
    compiler=lacking("cuda-core is not installed", ""),
    nvrtc=None,
    built=None,
    pinned=lacking("CUDA is not available"),
    api=None,
    calibration=None,
    mover=Found(("native", "the planes are in host memory")),
)
