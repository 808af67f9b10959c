"""What is found out about a machine, as plain objects: the checks judge them, and tests make them up."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from gdscache.commands.doctor.report import Found, Row
from gdscache.commands.doctor.trial import Moved
from gdscache.config import Config
from gdscache.cuda.numa import Placement
from gdscache.kernels.choice import Calibration


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
class NvidiaDriver:
    """The NVIDIA driver: the newest CUDA version that it runs (13000 is 13.0), its own version where that is known.

    `cause`: why it finds no GPU.
    """

    cuda: int
    version: str = ""
    cause: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU as torch sees it."""

    name: str
    capability: tuple[int, int]
    memory_bytes: int
    processors: int
    numa: Placement = dataclasses.field(default_factory=Placement)


@dataclasses.dataclass(frozen=True, slots=True)
class Kept:
    """A calibration. `cached`: it was there already; `kept`: it is there for the next time."""

    calibration: Calibration
    file: str
    cached: bool
    kept: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Directory:
    """A directory of an SSD tier. `place`: itself, or the nearest parent that exists, which is what was looked at.

    `user` and `mode` are those of `place`; `holder`: the engine that uses it now; `problem`: why it cannot be used.
    `format`: the format version of the cache that is there, where that can be told without its log.
    """

    path: str
    exists: bool
    place: str
    user: str = ""
    mode: str = ""
    holder: str = ""
    problem: str = ""
    hint: str = ""
    format: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class FreeSpace:
    """Bytes that this user may still write, free inodes (None: not counted), bytes of the slab that is there now."""

    free: int
    inodes: int | None
    slab: int


@dataclasses.dataclass(frozen=True, slots=True)
class Mount:
    """`device`: `major:minor`; `source`: what is mounted."""

    file_system: str
    source: str
    device: str
    options: str


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """A directory and what is below it. `disks`: what is to be said of them. `direct_io`: why O_DIRECT does not work,
    empty where it does. `chosen`: what `ssd.transport` comes to there. None is what was not tried."""

    directory: Directory
    space: Found[FreeSpace]
    mount: Found[Mount]
    disks: tuple[Row, ...] = ()
    direct_io: Found[str] | None = None
    chosen: Found[Moved] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Ssd:
    """The directories of an SSD tier, `ssd.path` first. `kernel`: what is to be said of GPUDirect Storage; `packages`:
    libcufile, kvikio and nixl; `trials`: by transport; `route`: what `ssd.route` comes to."""

    places: tuple[Place, ...]
    kernel: tuple[Row, ...]
    packages: dict[str, Found[str]]
    trials: dict[str, Found[Moved]]
    route: Found[str] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Facts:
    """Everything; None is what was not tried.

    `torch_cuda`: the CUDA version that torch was built with. `device`: what `gpu.device` means here. `compiler`: name
    and version of what compiles kernels. `built`: seconds
    that the kernels took. `mover`: what an engine would copy pages with, and why not with something faster. `pinned`:
    seconds that page-locking 64 MiB took. `engines`: what is to be said of inference engines.
    """

    torch: str
    torch_cuda: str | None
    driver: Found[NvidiaDriver]
    devices: Found[tuple[Gpu, ...]]
    device: Found[str]
    compiler: Found[str]
    nvrtc: Found[str] | None
    built: Found[float] | None
    mover: Found[tuple[str, str]] | None
    pinned: Found[float]
    api: Found[str] | None
    calibration: Found[Kept] | None
    ssd: Ssd | None = None
    engines: tuple[Row, ...] = ()

    @property
    def has_gpu(self) -> bool:
        """Whether torch can use a GPU; where it cannot, what needs one is no defect."""
        return bool(self.devices.value)
