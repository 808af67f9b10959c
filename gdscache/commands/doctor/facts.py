"""A machine's facts as plain objects, which checks judge and tests construct; and the rows of a check's result."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import torch

from gdscache.commands.console import Table
from gdscache.config import Config
from gdscache.errors import GdsCacheError
from gdscache.storage.files import Mount

Verdict = Literal["ok", "warn", "fail", "info"]
T = TypeVar("T")

_COLORS: dict[Verdict, str] = {"ok": "green", "warn": "yellow", "fail": "red", "info": ""}
_EXPECTED = (ImportError, OSError, MemoryError, RuntimeError, torch.cuda.DeferredCudaCallError)


@dataclasses.dataclass(frozen=True)
class Found(Generic[T]):
    """A fact's value; or None, with the cause and a hint."""

    value: T | None
    cause: str = ""
    hint: str = ""


def attempt(find: Callable[[], T]) -> Found[T]:
    """The result of `find`, or its error: gdscache's, of imports, of the system, of CUDA in torch and cuda-core."""
    try:
        return Found(find())
    except GdsCacheError as error:
        return Found(None, error.message, error.hint)
    except _EXPECTED as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return Found(None, ": ".join([type(error).__name__, *lines[:1]]))


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """`fail`: a setting of the configuration does not take effect. `data`: `value` for programs (JSON)."""

    name: str
    value: str
    verdict: Verdict = "info"
    next_step: str = ""
    data: Any = None


def answer(
    name: str, found: Found[T] | None, lack: Verdict, hint: str = "", show: Callable[[T], str] = str
) -> Iterator[Row]:
    """A fact's row: `ok`, or `lack` with the cause, and the hint if the lack is a defect. No row for a fact that was
    not tried."""
    if found is not None and found.value is not None:
        yield Row(name, show(found.value), "ok", data=found.value)
    elif found is not None:
        yield Row(name, found.cause, lack, (found.hint or hint) if lack != "info" else "")


def comes_to(wanted: str, found: str) -> str:
    """A setting and its result; one word if they are equal."""
    return found if wanted == found else f"{wanted}: {found}"


# -- facts -------------------------------------------------------------------------------------------------------------


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
class Moved:
    """A transport wrote `nbytes` and read the same bytes. `seconds`: of the write with its flush, and of the read.
    `word`: `gds` only if nvidia-fs counted these reads and writes, `compat` for GPU memory without that proof, `host`
    for host memory. `reason`: why this transport. `kinds`: its memory kinds."""

    name: str
    memory: Literal["host", "cuda"]
    word: Literal["gds", "compat", "host"]
    direct: bool
    nbytes: int
    write_s: float
    read_s: float
    reason: str
    kinds: tuple[str, ...] = ("host",)


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
    the reason against a faster one. `pinned`: seconds to page-lock 64 MiB. `tiers`: rows of the tiers behind the SSD;
    `engines`: of inference engines.
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
    tiers: tuple[Row, ...] = ()
    engines: tuple[Row, ...] = ()

    @property
    def has_gpu(self) -> bool:
        """Whether torch can use a GPU. Without one, missing GPU parts are no defect."""
        return bool(self.devices.value)


# -- reports -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """The rows of all sections by their titles, in display order."""

    sections: dict[str, tuple[Row, ...]]

    @property
    def failed(self) -> tuple[Row, ...]:
        return tuple(row for rows in self.sections.values() for row in rows if row.verdict == "fail")

    def describe(self) -> dict[str, Any]:
        """Plain data: `{"sections": [{"title", "rows": [{"name", "value", ...}]}], "ok"}`."""
        sections = [{"title": t, "rows": [*map(dataclasses.asdict, rows)]} for t, rows in self.sections.items()]
        return {"sections": sections, "ok": not self.failed}


def tables(report: Report) -> Iterator[Table]:
    """One table a section. A row's next step stands below the row."""
    for title, rows in report.sections.items():
        table = Table(title)
        for row in rows:
            table.add_row(row.verdict, row.name, row.value, color=_COLORS[row.verdict])
            if row.next_step and row.verdict != "ok":
                table.add_row("", "", f"-> {row.next_step}")
        yield table
