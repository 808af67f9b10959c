"""What is found out about a machine, as plain objects: the checks judge them, and tests make them up."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Generic, Literal, TypeVar

import torch

from gdscache.config import Config
from gdscache.errors import GdsCacheError
from gdscache.movers.choice import Calibration

T = TypeVar("T")

_EXPECTED = (ImportError, OSError, MemoryError, RuntimeError, torch.cuda.DeferredCudaCallError)


@dataclasses.dataclass(frozen=True)
class Found(Generic[T]):
    """A fact; or None, the cause, and what to do about it."""

    value: T | None
    cause: str = ""
    hint: str = ""


def attempt(find: Callable[[], T]) -> Found[T]:
    """What `find` returns, or why it could not: errors of gdscache, imports, the system, and CUDA's."""
    try:
        return Found(find())
    except GdsCacheError as error:
        return Found(None, error.message, error.hint)
    except _EXPECTED as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return Found(None, ": ".join([type(error).__name__, *lines[:1]]))


@dataclasses.dataclass(frozen=True, slots=True)
class Asked:
    """The configuration to check against; `given` is False where it is only the defaults, with a sample model.

    `directory`: look at this one for an SSD tier, whatever `ssd.path` is.
    """

    config: Config
    given: bool = True
    directory: Path | None = None

    @property
    def stripes(self) -> tuple[Path, ...]:
        """The further directories of the SSD tier; none where another directory is looked at."""
        return self.config.ssd.stripes if self.given and self.config.ssd and self.directory is None else ()

    @property
    def ssd_directory(self) -> Path | None:
        """The directory of the SSD tier, if any was given."""
        return self.directory or (self.config.ssd.path if self.config.ssd else None)


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
    """`compiler`: name and version of what compiles kernels; `cache`: the directory that keeps them; `built`: the
    seconds that building them took."""

    compiler: Found[str]
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
class DirectoryFacts:
    """The directory of an SSD tier. `place`: itself, or the nearest parent that exists, which is what was looked at.

    `user` and `mode` are those of `place`; `holder`: the engine that uses it now; `problem`: why it cannot be used.
    """

    path: str
    exists: bool
    place: str
    user: str
    mode: str
    holder: str = ""
    problem: str = ""
    hint: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class SpaceFacts:
    """Bytes that this user may still write, free inodes (None: not counted), bytes of the slab that is there now."""

    free: int
    inodes: int | None
    slab: int


@dataclasses.dataclass(frozen=True, slots=True)
class MountFacts:
    """`device`: `major:minor`; `source`: what is mounted."""

    file_system: str
    source: str
    device: str
    options: str


@dataclasses.dataclass(frozen=True, slots=True)
class LinkFacts:
    """A PCIe link as it runs and as the device could: GT/s and lanes."""

    speed: float
    width: int
    max_speed: float
    max_width: int


@dataclasses.dataclass(frozen=True, slots=True)
class DiskFacts:
    """One disk below the directory's file system; None is what the kernel does not say."""

    name: str
    model: str | None
    rotational: bool | None
    link: LinkFacts | None
    numa_node: int | None


@dataclasses.dataclass(frozen=True, slots=True)
class AlignmentFacts:
    """What O_DIRECT demands in bytes, of memory (None: not known) and of offsets; said by statx, or tried out."""

    memory: int | None
    offset: int
    by: Literal["statx", "trial"]


@dataclasses.dataclass(frozen=True, slots=True)
class KernelSideFacts:
    """What of GPUDirect Storage the kernel shows.

    `nvidia_fs`: the module is loaded, with its version if it says one; `counts`: whether it counts I/O (None: not
    said); `p2pdma`: what that path needs, each True, False, or None where it cannot be seen; `udev`: `/run/udev` is
    there, and `udev_record`: it knows the device of the file system; `iommu_groups` and `iommu` (kernel arguments).
    """

    nvidia_fs: bool
    nvidia_fs_version: str
    counts: bool | None
    p2pdma: dict[str, bool | None]
    udev: bool
    udev_record: bool
    modules: bool
    iommu_groups: int
    iommu: str


@dataclasses.dataclass(frozen=True, slots=True)
class TrialFacts:
    """A transport that wrote and read `nbytes` there, the same bytes; `seconds` of the write with its flush, and of the
    read. `word`: `gds` only if nvidia-fs counted these reads and writes, `compat` for GPU memory without that proof,
    `posix` for host memory. `reason`: why this transport, in the words of its log line. `kinds`: the memory
    that it moves.
    """

    name: str
    memory: Literal["host", "cuda"]
    word: Literal["gds", "compat", "posix"]
    direct: bool
    nbytes: int
    write_s: float
    read_s: float
    reason: str
    kinds: tuple[str, ...] = ("host",)


@dataclasses.dataclass(frozen=True, slots=True)
class StripeFacts:
    """A directory and the disks below it. `chosen`: what `ssd.transport` comes to there."""

    directory: DirectoryFacts
    space: Found[SpaceFacts]
    mount: Found[MountFacts]
    disks: tuple[DiskFacts, ...]
    direct_io: Found[str]
    alignment: Found[AlignmentFacts]
    chosen: Found[TrialFacts]


@dataclasses.dataclass(frozen=True, slots=True)
class SsdFacts(StripeFacts):
    """`ssd.path` and all that is below it. `trials`: by transport; `stripes`: the directories of `ssd.stripes`;
    `route`: what `ssd.route` comes to with the transport that would be used."""

    gpu_numa_node: int | None
    kernel: KernelSideFacts
    cufile: Found[str]
    kvikio: Found[str]
    nixl: Found[str]
    trials: dict[str, Found[TrialFacts]]
    stripes: tuple[StripeFacts, ...] = ()
    route: Found[str] = Found(None, "no SSD tier is asked for")


@dataclasses.dataclass(frozen=True, slots=True)
class EngineFacts:
    """An inference engine that is installed; `tried`: our integration was, with this version of this distribution."""

    distribution: str
    version: str
    tried: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Facts:
    """Everything. `ssd` is None where no directory was given; `engines`: inference engines, by their names."""

    gpu: GpuFacts
    kernels: KernelFacts
    copies: CopyFacts
    mover: Found[MoverFacts]
    ssd: SsdFacts | None = None
    engines: Mapping[str, Found[EngineFacts]] = dataclasses.field(default_factory=dict)

    @property
    def has_gpu(self) -> bool:
        """Whether torch can use a GPU; where it cannot, what needs one is no defect."""
        return bool(self.gpu.devices.value)
