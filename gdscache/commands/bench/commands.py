"""`gdscache bench`: the commands. What measures is imported by the command that runs it."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from gdscache.commands.flags import App
from gdscache.errors import InvalidValueError
from gdscache.sizes import parse_size

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

bench_app = App(help="Measure this machine against its own ceilings.")

Dir = Annotated[Path, typer.Option("--dir", help="Directory on the device to measure. The bench deletes its files.")]
Json = Annotated[Path | None, typer.Option("--json", help="Write the report to this file.")]
Plot = Annotated[Path | None, typer.Option(help="Draw the figures into this file (.png, .svg, .pdf).")]
Quick = Annotated[bool, typer.Option("--quick", help="Small sizes, a few seconds: to see that it works.")]
Resume = Annotated[
    Path | None, typer.Option("--resume", help="Go on where this report ends, and write it again (or to --json).")
]
Repeat = Annotated[int | None, typer.Option(min=1, help="Rounds a figure.")]
_Settings = TypeVar("_Settings", bound="DataclassInstance")


@bench_app.callback()
def bench() -> None:
    """Measure this machine against its own ceilings.

    Ctrl-C ends a bench with a report of what was measured until then; --resume goes on. The exit status is 1 where a
    case failed, and 130 after Ctrl-C.
    """
    logging.getLogger("gdscache.config").setLevel(logging.ERROR)  # their configurations are odd on purpose


@bench_app.command("index")
def index(
    directory: Dir = Path(),
    pages: Annotated[int | None, typer.Option(min=1, help="Pages of the catalogue. Default: 1000000.")] = None,
    layers: Annotated[int | None, typer.Option(min=1, max=4096, help="Layers, each a checksum a page.")] = None,
    repeat: Repeat = None,
    resume: Resume = None,
    json_file: Json = None,
    quick: Quick = False,
) -> None:
    """Lookups against the bare hash loop, reopening a large catalogue, and the index's memory.

    Reserves a slab of one 4 KiB extent a page on the disk (more for more than 32 layers), and never writes it.
    """
    from gdscache.commands.bench.index import BENCH, Settings

    settings = _replaced(Settings.of(_profile(quick=quick)), {"pages": pages, "layers": layers, "repeat": repeat})
    BENCH.command(settings, directory, json_file, None, resume)


@bench_app.command("copy")
def copy(
    total: Annotated[str | None, typer.Option(help="Bytes moved each way in a run. Default: 1GiB.")] = None,
    pairs: Annotated[int | None, typer.Option(min=1, help="Pairs of runs a figure. Default: 30.")] = None,
    pin: Annotated[str | None, typer.Option(help="The pool that is page-locked. Default: 16GiB.")] = None,
    path: Annotated[
        str, typer.Option(help="By which copies go: auto, as an engine chooses; staged, zero_copy or copy_engine.")
    ] = "auto",
    resume: Resume = None,
    json_file: Json = None,
    plot: Plot = None,
    quick: Quick = False,
) -> None:
    """Copies of pages between host and GPU against cudaMemcpyAsync, alone and beside a model's work. Needs a GPU.

    Takes four times --total of page-locked memory and six times as much of the GPU's, and for a while --pin.
    """
    from gdscache.commands.bench import copy as measured
    from gdscache.commands.bench.copy_gpu import Gpu

    given = {"total": _size("--total", total), "pairs": pairs, "pin": _size("--pin", pin), "path": path}
    settings = _replaced(measured.Settings.of(_profile(quick=quick)), given)
    settings.check()
    measured.bench(Gpu()).command(settings, Path(), json_file, plot, resume)


@bench_app.command("io")
def io(
    directory: Dir = Path(),
    ways: Annotated[list[str] | None, typer.Option("--way", help="Way, may be repeated. Default: all.")] = None,
    total: Annotated[str | None, typer.Option(help="File that the ways read and write. Default: 1GiB.")] = None,
    repeat: Repeat = None,
    threads: Annotated[
        int | None,
        typer.Option(
            min=1, max=1024, help="ssd.threads of comparisons. Default: the engine's; on a RAM disk 12 or more."
        ),
    ] = None,
    ram_disk: Annotated[str | None, typer.Option("--ram-disk", help="A tmpfs. Default: /dev/shm.")] = None,
    require_gds: Annotated[
        bool, typer.Option("--require-gds", help="Fail unless the driver's counters prove GPUDirect Storage.")
    ] = False,
    resume: Resume = None,
    json_file: Json = None,
    plot: Plot = None,
    quick: Quick = False,
) -> None:
    """Stores and loads of this cache against a raw O_DIRECT loop and other ways to keep pages, its memory, and every
    way between disk and memory over the sizes of requests.

    Needs twice --total and 1 GiB on the disk; --total and 2 GiB, with a GPU 4 GiB, of memory. For other depths, mixes
    and latencies of a disk use fio, for GPUDirect Storage NVIDIA's gdsio.
    """
    from gdscache.commands.bench.io import BENCH, Settings

    given = {
        "total": _size("--total", total),
        "repeat": repeat,
        "threads": threads,
        "ways": tuple(ways) if ways else None,
        "ram_disk": ram_disk,
        "require_gds": require_gds,
    }
    settings = _replaced(Settings.of(_profile(quick=quick)), given)
    settings.check()
    BENCH.command(settings, directory, json_file, plot, resume)


@bench_app.command("ttft")
def ttft(
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Directory of the SSD tier. Default: /dev/shm, where it is a RAM disk.")
    ] = None,
    preset: Annotated[str | None, typer.Option(help="Shape of the model. Default: 8b; without a GPU tiny.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    repeat: Repeat = None,
    resume: Resume = None,
    json_file: Json = None,
    plot: Plot = None,
    full: Annotated[bool, typer.Option("--full", help="Every prompt, share, place, overlap and gate.")] = False,
    quick: Quick = False,
) -> None:
    """Time to first token of hits from every place, against recomputing and against the ideal; what a miss costs.

    At most some eight minutes; what is left then, --resume measures. The 8B shape needs 35 GiB of the GPU's memory, 12
    GiB of the host's and 12 GiB of disk, a RAM disk's being the host's too; with --full 75, 40 and 45. A hit that gave
    other tokens than recomputing has failed.
    """
    from gdscache.commands.bench import ttft as measured
    from gdscache.commands.bench.ttft_cells import Settings
    from gdscache.commands.toy_engine import PRESETS
    from gdscache.cuda.streams import resolve_device

    if preset is not None and preset not in PRESETS:
        raise InvalidValueError(f"unknown preset {preset!r}", f"choose of {', '.join(PRESETS)}")
    settings = Settings.of(_profile(full=full, quick=quick), str(resolve_device(device)))
    settings = _replaced(settings, {"preset": preset, "repeat": repeat})
    settings.check()
    measured.BENCH.command(settings, measured.place(directory), json_file, plot, resume)


@bench_app.command("pool")
def pool(
    pages: Annotated[int | None, typer.Option(min=1, help="Pages of 1 MiB that move in a round. Default: 128.")] = None,
    repeat: Repeat = None,
    json_file: Json = None,
    quick: Quick = False,
) -> None:
    """Puts and gets of the mooncake tier against a bare loop of the same calls, on loopback; and what lookups and loads
    of pages in this process cost with the master dead.

    Needs gdscache[mooncake]. Starts a mooncake_master and an owner of memory, whose ports listen everywhere meanwhile.
    """
    from gdscache.commands.bench.pool import BENCH, Settings

    BENCH.command(_replaced(Settings.of(_profile(quick=quick)), {"pages": pages, "repeat": repeat}), Path(), json_file)


def _profile(*, full: bool = False, quick: bool) -> str:
    if full and quick:
        raise InvalidValueError("--full and --quick were both given", "choose one")
    return "full" if full else "quick" if quick else "default"


def _replaced(settings: _Settings, given: Mapping[str, Any]) -> _Settings:
    """The settings, with those options that were given."""
    return dataclasses.replace(settings, **{key: value for key, value in given.items() if value is not None})


def _size(option: str, text: str | None) -> int | None:
    if text is None:
        return None
    try:
        return parse_size(text)
    except ValueError as error:
        raise InvalidValueError(f"{option} {text!r} {error}", "write a size as 512MiB or 2GiB") from None
