"""Facts of machines, as `gdscache doctor` finds them."""

from __future__ import annotations

import dataclasses
from typing import Any

from gdscache.commands.doctor import Facts
from gdscache.commands.doctor.facts import (
    CalibrationFacts,
    CopyFacts,
    DeviceFacts,
    DriverFacts,
    Found,
    GpuFacts,
    KernelFacts,
    MoverFacts,
)
from gdscache.movers.choice import Calibration
from tests.support.rates import DOWN, UP

KEY = {"gpu": "H200", "gpu_uuid": "GPU-1", "driver": "13000", "copy_engine": "batch_13", "kernels": "0123456789abcdef"}

MEASURED = Calibration(UP, DOWN, KEY, 0.5)

HINT = "install it"

WHOLE = Facts(
    GpuFacts(
        "2.11.0",
        "13.0",
        Found(DriverFacts(13000, "580.82.07")),
        Found((DeviceFacts("NVIDIA H200", (9, 0), 140 << 30, 132),)),
        Found("cuda:0"),
    ),
    KernelFacts(Found("14.2.0"), Found("13.0"), Found("/home/somebody/.cupy/kernel_cache"), Found(0.25)),
    CopyFacts(
        Found(0.01), None, Found("batch_13"), Found(CalibrationFacts(MEASURED, "/c/calibration.json", True, True))
    ),
    Found(MoverFacts("cuda")),
)


def changed(facts: Facts, **parts: Any) -> Facts:
    """Facts with fields of `gpu`, `kernels` and `copies` replaced, by their names; and `mover`."""
    for part in ("gpu", "kernels", "copies"):
        inside = getattr(facts, part)
        mine = {name: parts.pop(name) for name in list(parts) if name in inside.__dataclass_fields__}
        facts = dataclasses.replace(facts, **{part: dataclasses.replace(inside, **mine)})
    return dataclasses.replace(facts, **parts)


def lacking(cause: str, hint: str = HINT) -> Any:
    return Found(None, cause, hint)


PLAIN = changed(  # no GPU, as torch's CPU build shows it
    WHOLE,
    torch_cuda=None,
    driver=lacking("there is no CUDA driver"),
    devices=lacking("torch was built without CUDA"),
    device=Found("cpu"),
    cupy=lacking("No module named 'cupy'", ""),
    nvrtc=lacking("not tried", ""),
    built=lacking("not tried", ""),
    pinned=lacking("CUDA is not available"),
    api=lacking("not tried", ""),
    calibration=lacking("not tried", ""),
    mover=Found(MoverFacts("native", "the planes are in host memory")),
)
