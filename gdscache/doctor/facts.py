"""What is found out about a machine, as plain objects: the checks judge them, and tests make them up."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Generic, TypeVar

import torch

from gdscache.config import Config
from gdscache.errors import GdsCacheError
from gdscache.tiers.paths import Calibration

T = TypeVar("T")

_EXPECTED = (ImportError, OSError, MemoryError, RuntimeError, torch.cuda.DeferredCudaCallError)


@dataclasses.dataclass(frozen=True)
class Found(Generic[T]):
    """A fact; or None, the cause, and what to do about it."""

    value: T | None
    cause: str = ""
    hint: str = ""


def attempt(find: Callable[[], T]) -> Found[T]:
    """What `find` returns, or why it could not: errors of gdscache, imports, the system, and CUDA in torch and cupy."""
    try:
        return Found(find())
    except GdsCacheError as error:
        return Found(None, error.message, error.hint)
    except _EXPECTED as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return Found(None, ": ".join([type(error).__name__, *lines[:1]]))


@dataclasses.dataclass(frozen=True, slots=True)
class Asked:
    """The configuration to check against; `given` is False where it is only the defaults, with a sample model."""

    config: Config
    given: bool = True


def defaults() -> Asked:
    """Every default, and a CPU tier."""
    model = {"name": "sample", "layers": 1, "kv_heads": 8, "head_dim": 128}
    return Asked(Config.from_dict({"model": model, "cpu": {}}), given=False)


@dataclasses.dataclass(frozen=True, slots=True)
class DriverFacts:
    """The NVIDIA driver: the newest CUDA version that it runs (13000 is 13.0), its own version where that is known.

    `cause`: why it finds no GPU.
    """

    cuda: int
    version: str = ""
    cause: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceFacts:
    """One GPU as torch sees it."""

    name: str
    capability: tuple[int, int]
    memory_bytes: int
    processors: int


@dataclasses.dataclass(frozen=True, slots=True)
class GpuFacts:
    """`torch` and the CUDA version that it was built with; `device` is what the configured one means here."""

    torch: str
    torch_cuda: str | None
    driver: Found[DriverFacts]
    devices: Found[tuple[DeviceFacts, ...]]
    device: Found[str]


@dataclasses.dataclass(frozen=True, slots=True)
class MoverFacts:
    """What an engine would copy pages with (`cuda`, `torch`, `numpy`), and why not with something faster."""

    name: str
    cause: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class KernelFacts:
    """`built`: the seconds that building the kernels took; `cache`: where cupy keeps them."""

    cupy: Found[str]
    nvrtc: Found[str]
    cache: Found[str]
    built: Found[float]


@dataclasses.dataclass(frozen=True, slots=True)
class CalibrationFacts:
    """`cached`: it was there already; `kept`: it is there for the next time."""

    calibration: Calibration
    file: str
    cached: bool
    kept: bool


@dataclasses.dataclass(frozen=True, slots=True)
class CopyFacts:
    """`pinned`: the seconds that page-locking 64 MiB took; `locked_limit`: of `ulimit -l` in bytes, None for none."""

    pinned: Found[float]
    locked_limit: int | None
    api: Found[str]
    calibration: Found[CalibrationFacts]


@dataclasses.dataclass(frozen=True, slots=True)
class Facts:
    """Everything."""

    gpu: GpuFacts
    kernels: KernelFacts
    copies: CopyFacts
    mover: Found[MoverFacts]

    @property
    def has_gpu(self) -> bool:
        """Whether torch can use a GPU; where it cannot, what needs one is no defect."""
        return bool(self.gpu.devices.value)
