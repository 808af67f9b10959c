"""A machine's facts as plain objects. Checks judge them; tests construct them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from gdscache.commands.doctor.report import Found, Row
from gdscache.commands.doctor.trial import Moved
from gdscache.config import Config
from gdscache.storage.files import Mount


@dataclasses.dataclass(frozen=True, slots=True)
class Asked:
    """The configuration to check. `directory`: the SSD tier's directory to check, in place of `ssd.path`."""

    config: Config
    directory: Path | None = None

    @property
    def stripes(self) -> tuple[Path, ...]:
        """The SSD tier's further directories; none if `directory` replaces `ssd.path`."""
        return self.config.ssd.stripes if self.config.ssd and self.directory is None else ()

    @property
    def ssd_directory(self) -> Path | None:
        return self.directory or (self.config.ssd.path if self.config.ssd else None)


def defaults() -> Asked:
    """Without a file: a sample model, and no SSD tier."""
    model = {"name": "sample", "layers": 1, "kv_heads": 8, "head_dim": 128}
    return Asked(Config.from_dict({"model": model, "cpu": {}}))


@dataclasses.dataclass(frozen=True, slots=True)
class FreeSpace:
    """Bytes that this user may still write, and bytes of the existing slab."""

    free: int
    slab: int


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """A directory, its mount and disks. `direct_io`: the cause why O_DIRECT fails; empty if it works. `chosen`: the
    result of `ssd.transport` there. None: not tried."""

    directory: Row
    space: Found[FreeSpace]
    mount: Mount
    disks: tuple[Row, ...] = ()
    direct_io: Found[str] | None = None
    chosen: Found[Moved] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Ssd:
    """The SSD tier's directories, `ssd.path` first. `kernel`: GPUDirect Storage in the kernel. `packages`: libcufile,
    kvikio, nixl. `trials`: by transport. `route`: the result of `ssd.route`."""

    places: tuple[Place, ...]
    kernel: tuple[Row, ...]
    packages: dict[str, Found[str]]
    trials: dict[str, Found[Moved]]
    route: Found[str] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Facts:
    """All facts; None: not tried.

    `torch_cuda`: the CUDA version of torch's build. `device`: the result of `gpu.device`. `compiler`: name and version
    of the kernel compiler. `built`: seconds of the kernel build. `mover`: the page copier that an engine would use, and
    the reason against a faster one. `pinned`: seconds to page-lock 64 MiB. `engines`: rows of inference engines.
    """

    torch: str
    torch_cuda: str | None
    driver: Found[Row]
    devices: Found[tuple[Row, ...]]
    device: Found[str]
    compiler: Found[str]
    nvrtc: Found[str] | None
    built: Found[float] | None
    mover: Found[tuple[str, str]] | None
    pinned: Found[float]
    api: Found[str] | None
    calibration: Found[Row] | None
    ssd: Ssd | None = None
    engines: tuple[Row, ...] = ()

    @property
    def has_gpu(self) -> bool:
        """Whether torch can use a GPU. Without one, missing GPU parts are no defect."""
        return bool(self.devices.value)
