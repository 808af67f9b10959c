"""`gdscache bench`: the commands. What measures is imported by the command that runs it."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from gdscache.errors import InvalidValueError
from gdscache.exits import EXIT_FAILED, EXIT_INTERRUPTED
from gdscache.sizes import parse_size

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from rich.table import Table

bench_app = typer.Typer(help="Measure this machine, against its own ceilings.", no_args_is_help=True)

Dir = Annotated[Path, typer.Option("--dir", help="Directory on the device to measure; what is written is deleted.")]
Json = Annotated[Path | None, typer.Option("--json", help="Write the report to this file.")]
Plot = Annotated[Path | None, typer.Option(help="Draw the figures into this file (.png, .svg, .pdf).")]
Quick = Annotated[bool, typer.Option("--quick", help="Small sizes, a few seconds: to see that it works.")]
Resume = Annotated[Path | None, typer.Option("--resume", help="Go on where this report ends, and write it again.")]
_Settings = TypeVar("_Settings", bound="DataclassInstance")


@bench_app.callback()
def bench() -> None:
    """Measure this machine, against its own ceilings."""
    logging.getLogger("gdscache.config").setLevel(logging.ERROR)  # their configurations are odd on purpose


@bench_app.command("engine")
def engine(
    directory: Dir = Path(),
    pages: Annotated[list[str] | None, typer.Option(help="Page size, may be repeated. Default: 1MiB and 4MiB.")] = None,
    total: Annotated[str | None, typer.Option(help="Bytes moved in a round. Default: 2GiB.")] = None,
    repeat: Annotated[int | None, typer.Option(min=1, help="Rounds a figure. Default: 5.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, max=1024, help="ssd.threads. Default: the engine's.")] = None,
    json_file: Json = None,
    plot: Plot = None,
    quick: Quick = False,
) -> None:
    """SSD tier and engine in GB/s against a bare O_DIRECT loop and a plain copy, and the engine's memory.

    Needs about 1.3 times --total on the disk and 3.2 times in memory.
    """
    from gdscache.commands.bench import engine as measured
    from gdscache.commands.bench import report as reports

    _check_plot(plot)
    given: dict[str, Any] = {
        "pages": tuple(_size("--pages", page) for page in pages) if pages else None,
        "total": None if total is None else _size("--total", total),
        "repeat": repeat,
        "threads": threads,
    }
    settings = measured.Settings.quick() if quick else measured.Settings()
    settings = _replaced(settings, given)
    report = _measured(
        directory,
        json_file,
        reports.ENGINE_SCHEMA,
        {**settings.describe(), "quick": quick},
        lambda progress, _: measured.run(directory, settings, progress),
        reports.engine_tables,
    )
    if plot is not None:
        from gdscache.commands.bench import plots

        plots.engine_plot(report, plot)


@bench_app.command("index")
def index(
    directory: Dir = Path(),
    pages: Annotated[int | None, typer.Option(min=1, help="Pages of the catalogue. Default: 1000000.")] = None,
    layers: Annotated[int, typer.Option(min=1, max=4096, help="Layers, and so checksums a page.")] = 32,
    repeat: Annotated[int | None, typer.Option(min=1, help="Rounds a figure. Default: 3.")] = None,
    json_file: Json = None,
    quick: Quick = False,
) -> None:
    """Lookups against the bare hash loop, reopening a large catalogue, and the index's memory.

    Reserves a slab of one 4 KiB extent a page on the disk (more for more than 32 layers), and never writes it.
    """
    from gdscache.commands.bench import index as measured
    from gdscache.commands.bench import report as reports

    count = pages or (10_000 if quick else 1_000_000)
    rounds = repeat or (1 if quick else 3)
    settings = {"pages": count, "layers": layers, "repeat": rounds, "quick": quick}
    _measured(
        directory,
        json_file,
        reports.INDEX_SCHEMA,
        settings,
        lambda progress, _: measured.run(count, layers, rounds, progress, directory),
        reports.index_tables,
    )


@bench_app.command("copy")
def copy(
    total: Annotated[str | None, typer.Option(help="Bytes moved each way in a run. Default: 1GiB.")] = None,
    pairs: Annotated[int | None, typer.Option(min=1, help="Pairs of runs for a figure with a target.")] = None,
    pin: Annotated[str | None, typer.Option(help="The pool that is page-locked. Default: 16GiB.")] = None,
    json_file: Json = None,
    plot: Plot = None,
    full: Annotated[bool, typer.Option("--full", help="Every path, page size, geometry, direction and part.")] = False,
    quick: Quick = False,
) -> None:
    """Copies of pages between host and GPU against cudaMemcpyAsync, alone and beside a model's work. Needs a GPU.

    Takes four times --total of page-locked memory and six times as much of the GPU's, and for a while --pin. Ctrl-C
    ends it early, with a report of what was measured until then.
    """
    from gdscache.commands.bench import copy as measured
    from gdscache.commands.bench import copy_report
    from gdscache.commands.bench import report as reports
    from gdscache.commands.bench.copy_gpu import Gpu

    _check_profile(full=full, quick=quick)
    _check_plot(plot)
    given: dict[str, Any] = {
        "total": None if total is None else _size("--total", total),
        "pairs": pairs,
        "pin": None if pin is None else _size("--pin", pin),
    }
    settings = measured.Settings.full() if full else measured.Settings.quick() if quick else measured.Settings()
    settings = _replaced(settings, given)
    gpu = Gpu()
    report = _measured(
        Path(),
        json_file,
        reports.COPY_SCHEMA,
        {**settings.describe(), "quick": quick},
        lambda progress, keep: measured.run(settings, gpu, progress, keep),
        copy_report.copy_tables,
    )
    if plot is not None:
        from gdscache.commands.bench import copy_plot

        copy_plot.copy_plot(report, plot)
    if not report["complete"]:
        raise typer.Exit(EXIT_INTERRUPTED)


@bench_app.command("io")
def io(
    directory: Dir = Path(),
    ways: Annotated[list[str] | None, typer.Option("--way", help="Way, may be repeated. Default: all.")] = None,
    total: Annotated[str | None, typer.Option(help="File of the matrix. Default: 1GiB, with --full 4GiB.")] = None,
    repeat: Annotated[int | None, typer.Option(min=1, help="Rounds of a comparison. Default: 5.")] = None,
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
    full: Annotated[bool, typer.Option("--full", help="Every way, operation, size, depth and thread count.")] = False,
    quick: Quick = False,
) -> None:
    """Every way between disk and memory against a raw O_DIRECT loop, and this cache against other ways to keep pages.

    At most some eight minutes; what is left then, --resume measures. Ctrl-C ends it early, with a report. Needs twice
    --total and 1 GiB on the disk; --total and 2 GiB, with a GPU 4 GiB, of memory. Status 1 where something that works
    here failed while it was measured.
    """
    from gdscache.commands.bench import io as measured
    from gdscache.commands.bench import io_report
    from gdscache.commands.bench.io_cells import Settings

    _check_profile(full=full, quick=quick)
    _check_plot(plot)
    given: dict[str, Any] = {
        "total": None if total is None else _size("--total", total),
        "repeat": repeat,
        "threads": threads,
        "ways": tuple(ways) if ways else None,
        "ram_disk": ram_disk,
        "require_gds": require_gds,
    }
    settings = Settings.full() if full else Settings.quick() if quick else Settings()
    settings = _replaced(settings, given)
    measured.check(settings)
    done = None if resume is None else measured.resumed(resume, io_report.IO_SCHEMA, settings, directory)
    report = _measured(
        directory,
        json_file or resume,
        io_report.IO_SCHEMA,
        settings.describe(),
        lambda progress, keep: measured.run(directory, settings, progress, keep, done),
        io_report.io_tables,
        measured.write_json,
    )
    if plot is not None:
        from gdscache.commands.bench import io_plot

        io_plot.io_plot(report, plot)
    _end(report)


@bench_app.command("ttft")
def ttft(
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Directory of the SSD tier. Default: /dev/shm, where it is a RAM disk.")
    ] = None,
    client: Annotated[str, typer.Option(help="Who asks: engine or transformers.")] = "engine",
    preset: Annotated[str | None, typer.Option(help="Shape of the model. Default: 8b; without a GPU tiny.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    repeat: Annotated[int | None, typer.Option(min=1, help="Rounds a cell. Default: 5.")] = None,
    resume: Resume = None,
    json_file: Json = None,
    plot: Plot = None,
    full: Annotated[bool, typer.Option("--full", help="Every prompt, share, place, overlap and gate.")] = False,
    quick: Quick = False,
) -> None:
    """Time to first token of hits from every place, against recomputing and against the ideal; what a miss costs.

    At most some eight minutes; what is left then, --resume measures. Ctrl-C ends it early, with a report. The 8B shape
    needs 35 GiB of the GPU's memory, 12 GiB of the host's and 12 GiB of disk, a RAM disk's being the host's too; with
    --full 75, 40 and 45. Status 1 where something failed, as a hit that gave other tokens than recomputing.
    """
    from gdscache.commands.bench import ttft as measured
    from gdscache.commands.bench import ttft_report
    from gdscache.commands.bench.io import write_json
    from gdscache.commands.bench.ttft_cells import Settings, check
    from gdscache.commands.toy_engine import PRESETS
    from gdscache.cuda.streams import resolve_device

    _check_profile(full=full, quick=quick)
    if preset is not None and preset not in PRESETS:
        raise InvalidValueError(f"unknown preset {preset!r}", f"choose of {', '.join(PRESETS)}")
    _check_plot(plot)
    settings = Settings.of("full" if full else "quick" if quick else "default", str(resolve_device(device)))
    given: dict[str, Any] = {"client": client, "preset": preset, "repeat": repeat}
    settings = _replaced(settings, given)
    check(settings)
    where = measured.place(directory)
    done = None if resume is None else measured.resumed(resume, ttft_report.TTFT_SCHEMA, settings, where)
    report = _measured(
        where,
        json_file or resume,
        ttft_report.TTFT_SCHEMA,
        settings.describe(),
        lambda progress, keep: measured.run(where, settings, progress, keep, done),
        ttft_report.ttft_tables,
        write_json,
    )
    if plot is not None:
        from gdscache.commands.bench import ttft_plot

        ttft_plot.ttft_plot(report, plot)
    _end(report)


@bench_app.command("pool")
def pool(
    pages: Annotated[int | None, typer.Option(min=1, help="Pages of 1 MiB that move in a round. Default: 128.")] = None,
    repeat: Annotated[int | None, typer.Option(min=1, help="Rounds a figure. Default: 7.")] = None,
    json_file: Json = None,
    quick: Quick = False,
) -> None:
    """Puts and gets of the mooncake tier against a bare loop of the same calls, on loopback; and what lookups and loads
    of pages that lie here cost with the master dead.

    Needs gdscache[mooncake]. Starts a mooncake_master and an owner of memory, whose ports listen everywhere meanwhile.
    """
    from gdscache.commands.bench import pool as measured

    settings = measured.Settings.quick() if quick else measured.Settings()
    settings = _replaced(settings, {"pages": pages, "repeat": repeat})
    _measured(
        Path(),
        json_file,
        measured.POOL_SCHEMA,
        {**settings.describe(), "quick": quick},
        lambda progress, _: measured.run(settings, progress),
        measured.tables,
    )


def _measured(
    directory: Path,
    json_file: Path | None,
    schema: str,
    settings: Mapping[str, Any],
    run: Callable[[Any, Callable[[Mapping[str, Any]], None]], Mapping[str, Any]],
    tables: Callable[[Mapping[str, Any]], Iterable[Table]],
    write: Callable[[Path, Mapping[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Measure with a progress bar, print tables, write JSON; the whole report.

    `run(progress, keep)` may call `keep` with what it has so far, which is then in the JSON file already; `write` is
    what writes that file.
    """
    import sys

    from rich.console import Console

    from gdscache.commands.bench import machine
    from gdscache.commands.bench import report as reports

    write = write or reports.write_json
    if not directory.is_dir():
        raise InvalidValueError(f"--dir {directory} is not a directory", "make it first: it decides what is measured")
    reports.check_writable(json_file, "--json")
    head = {"schema": schema, "machine": machine.describe(directory), "settings": dict(settings)}

    def keep(found: Mapping[str, Any]) -> None:
        if json_file is not None and (json_file.is_file() or not json_file.exists()):
            write(json_file, {**head, **found})

    with reports.progress_bar() as progress:
        found = run(progress, keep)
    report = {**head, **found}
    console = Console(width=None if sys.stdout.isatty() else 140, highlight=False, markup=False)
    console.print(reports.machine_line(report["machine"]))
    for table in tables(report):
        console.print()
        console.print(table)
    if json_file is not None:
        write(json_file, report)
    return report


def _check_profile(*, full: bool, quick: bool) -> None:
    if full and quick:
        raise InvalidValueError("--full and --quick were both given", "choose one")


def _check_plot(plot: Path | None) -> None:
    """Whether the figures can be drawn, before they are measured."""
    if plot is not None:
        from gdscache.commands.bench import plots
        from gdscache.commands.bench import report as reports

        plots.require(plot)
        reports.check_writable(plot, "--plot")


def _replaced(settings: _Settings, given: Mapping[str, Any]) -> _Settings:
    """The settings, with those options that were given."""
    return dataclasses.replace(settings, **{key: value for key, value in given.items() if value is not None})


def _end(report: Mapping[str, Any]) -> None:
    """The exit status of a run that may be interrupted, and in which things may fail."""
    if report["interrupted"]:
        raise typer.Exit(EXIT_INTERRUPTED)
    if report["failed"]:
        raise typer.Exit(EXIT_FAILED)


def _size(option: str, text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise InvalidValueError(f"{option} {text!r} {error}", "write a size as 512MiB or 2GiB") from None
