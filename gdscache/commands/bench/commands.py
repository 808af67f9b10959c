"""`gdscache bench`: the commands. What measures is imported by the command that runs it."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from gdscache.commands import EXIT_FAILED, EXIT_INTERRUPTED
from gdscache.commands.console import App
from gdscache.errors import InvalidValueError
from gdscache.sizes import parse_size

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

bench_app = App()

Dir = Annotated[Path, typer.Option("--dir", help="Directory on the device to measure. The bench deletes its files.")]
Json = Annotated[Path | None, typer.Option("--report", metavar="FILE", help="Write the report to this file, as JSON.")]
Plot = Annotated[Path | None, typer.Option(help="Draw the figures into this file (.png, .svg, .pdf).")]
Quick = Annotated[
    bool,
    typer.Option("--quick", help="Small sizes, a minute or two. Shows that everything runs; judges no figure."),
]
Resume = Annotated[
    Path | None, typer.Option("--resume", help="Report to continue. It is written again, to --report if that is given.")
]
Everything = Annotated[bool, typer.Option("--all", help="Show what only developers of gdscache read, too.")]
Repeat = Annotated[int | None, typer.Option(min=1, help="Rounds for each figure.")]
_Settings = TypeVar("_Settings", bound="DataclassInstance")


@bench_app.callback()
def bench() -> None:
    """Measure this machine against its own ceilings.

    Ctrl-C ends a bench with a report of the cases that were measured until then, and --resume continues it. The exit
    status is 1 if a case failed, and 130 after Ctrl-C.
    """
    logging.getLogger("gdscache.config").setLevel(logging.ERROR)  # their configurations are odd on purpose


@bench_app.command("copy")
def copy(
    total: Annotated[str | None, typer.Option(help="Bytes that a run moves each way. Default: 1GiB.")] = None,
    pairs: Annotated[int | None, typer.Option(min=1, help="Pairs of runs for each figure. Default: 30.")] = None,
    pin: Annotated[str | None, typer.Option(help="Size of the pool that is page-locked. Default: 16GiB.")] = None,
    path: Annotated[
        str, typer.Option(help="Path of the copies: auto (as an engine chooses), staged, zero_copy or copy_engine.")
    ] = "auto",
    resume: Resume = None,
    json_file: Json = None,
    plot: Plot = None,
    quick: Quick = False,
) -> None:
    """Measure copies of pages between host and GPU against cudaMemcpyAsync, alone and beside a model's work.

    Needs a GPU. The bench takes four times --total of page-locked memory and six times --total of GPU memory. For a
    short time it also takes --pin of page-locked memory.
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
    ways: Annotated[
        list[str] | None,
        typer.Option("--way", help="A way between disk and memory. Repeat it for several ways. Default: all."),
    ] = None,
    total: Annotated[
        str | None, typer.Option(help="Size of the file that the ways read and write. Default: 1GiB.")
    ] = None,
    repeat: Repeat = None,
    threads: Annotated[
        int | None,
        typer.Option(
            min=1, max=1024, help="ssd.threads in comparisons. Default: the engine's, and at least 12 on a RAM disk."
        ),
    ] = None,
    require_gds: Annotated[
        bool, typer.Option("--require-gds", help="Fail unless the driver's counters prove GPUDirect Storage.")
    ] = False,
    resume: Resume = None,
    json_file: Json = None,
    plot: Plot = None,
    everything: Everything = False,
    quick: Quick = False,
) -> None:
    """Measure stores and loads of this cache, an engine's memory, and every way between disk and memory.

    Stores and loads are compared with a bare O_DIRECT loop and with other ways to keep pages. Each way between disk and
    memory is measured for several sizes of requests.

    The bench needs twice --total and 1 GiB of disk. It needs --total and 2 GiB of host memory, or --total and
    4 GiB with a GPU. For other depths, mixes and latencies of a disk use fio. For GPUDirect Storage use NVIDIA's gdsio.
    """
    from gdscache.commands.bench.io import BENCH, Settings

    given = {
        "total": _size("--total", total),
        "repeat": repeat,
        "threads": threads,
        "ways": tuple(ways) if ways else None,
        "require_gds": require_gds,
    }
    settings = _replaced(Settings.of(_profile(quick=quick)), given)
    settings.check()
    BENCH.command(settings, directory, json_file, plot, resume, everything=everything)


@bench_app.command("ttft")
def ttft(
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Directory of the SSD tier. Default: /dev/shm, if it is a RAM disk.")
    ] = None,
    engine: Annotated[str, typer.Option(help="Engine that computes: transformers.")] = "transformers",
    preset: Annotated[
        str | None, typer.Option(help="Shape of the model: tiny, 1b or 8b. Default: 8b, and tiny without a GPU.")
    ] = None,
    device: Annotated[str, typer.Option(help="Device of the model: auto, cpu, cuda or cuda:N.")] = "auto",
    repeat: Repeat = None,
    resume: Resume = None,
    json_file: Json = None,
    plot: Plot = None,
    full: Annotated[bool, typer.Option("--full", help="Measure every prompt, share, place, overlap and gate.")] = False,
    everything: Everything = False,
    quick: Quick = False,
) -> None:
    """Measure the time to first token of hits, against recomputing and against the ideal, and the cost of a miss.

    The engine is transformers (the extra hf), with a Llama of random weights: nothing is downloaded.

    The bench ends after about eight minutes, and --resume measures the cases that are left. The 8b shape needs 35 GiB
    of GPU memory, 12 GiB of host memory and 12 GiB of disk; with --full 75, 40 and 45 GiB. A RAM disk takes host memory
    too. A hit whose tokens differ from those of recomputing counts as failed.
    """
    from gdscache.commands.bench import ttft as measured
    from gdscache.commands.bench.ttft_cells import Settings
    from gdscache.cuda.streams import resolve_device

    settings = Settings.of(_profile(full=full, quick=quick), str(resolve_device(device)))
    settings = _replaced(settings, {"engine": engine, "preset": preset, "repeat": repeat})
    settings.check()
    place = measured.place(directory)
    measured.BENCH.command(settings, place, json_file, plot, resume, everything=everything)


@bench_app.command("links")
def links(
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Processes with planes. Default: the number of GPUs, and 1 without.")
    ] = None,
    total: Annotated[str | None, typer.Option(help="Bytes that a load brings to each rank. Default: 1GiB.")] = None,
    repeat: Repeat = None,
    json_file: Json = None,
    plot: Plot = None,
    quick: Quick = False,
) -> None:
    """Measure loads over the links of several GPUs at once against page-locked copies beside each other.

    Each GPU gets a rank in a process of its own, and this process leads. The heads of a model are divided over the
    ranks; latents are kept once for all of them. The bench takes four times --total of memory on each GPU, and for
    each rank twice --total of page-locked memory.
    """
    from gdscache.commands.bench.links import BENCH, Settings

    given = {"ranks": ranks, "total": _size("--total", total), "repeat": repeat}
    settings = _replaced(Settings.of(_profile(quick=quick)), given)
    settings.check()
    BENCH.command(settings, Path(), json_file, plot)


@bench_app.command("report")
def report(
    out: Annotated[Path, typer.Option("--out", help="Folder for report.html and report.json.")],
    directory: Dir = Path(),
    minutes: Annotated[
        float | None, typer.Option(min=0.1, help="Begin no case after these. Default: 9 with a GPU, 13 without.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the report in --out.")] = False,
    quick: Quick = False,
) -> None:
    """Run every bench that this machine can, and write one page of it.

    The page has the machine, a sentence, a plot and tables of each bench, and what could not be measured and why.
    """
    import torch

    from gdscache.commands.bench import report as measured
    from gdscache.commands.console import progress_bar

    if not directory.is_dir():
        raise InvalidValueError(f"--dir {directory} is not a directory", "name a directory that exists")
    out.mkdir(parents=True, exist_ok=True)
    seconds = 60.0 * (minutes or (9 if torch.cuda.is_available() else 13))
    with progress_bar() as progress:
        found = measured.measure(directory, out, seconds, progress, quick=quick, resume=resume)
    typer.echo(f"{out / measured.HTML_NAME}: {', '.join(found['benches'])} in {found['seconds']:.0f} s")
    for name, cause in found["cannot"].items():
        typer.echo(f"not measured: {name}: {cause}")
    if found["interrupted"]:
        raise typer.Exit(EXIT_INTERRUPTED)
    if any(one["failed"] for one in found["benches"].values()):
        raise typer.Exit(EXIT_FAILED)


@bench_app.command("compare")
def compare(
    first: Annotated[Path, typer.Argument(metavar="A", help="A report of a bench, or the folder of bench report.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="Another report, of the same bench.")],
    everything: Annotated[bool, typer.Option("--all", help="Show the figures that are the same, too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the changes as JSON.")] = False,
) -> None:
    """Say what changed from report A to report B beyond noise: where the spreads of four rounds or more do not meet."""
    from gdscache.commands.bench import compare as measured
    from gdscache.commands.console import Table, figure, show

    both, gone, new = measured.compare(first, second)
    if as_json:
        rows = [{"what": one.name, "ratio": one.ratio, "word": one.word} for one in both]
        typer.echo(json.dumps({"changes": rows, "only_in_first": gone, "only_in_second": new}, indent=2))
        return
    table = Table("", "figure", "A", "B", "B / A", "")
    for one in both:
        if everything or one.word not in measured.QUIET:
            spread = [f"{figure(f.middle)} ({figure(f.low)} to {figure(f.high)})" for f in (one.before, one.after)]
            table.add_row(one.name, *spread, figure(one.ratio), one.word)
    words = [one.word for one in both]
    counts = ", ".join(
        f"{words.count(word)} {word}" for word in ("better", "worse", "other", *measured.QUIET) if word in words
    )
    show(
        table, f"{len(both)} figures are in both reports: {counts}. {len(gone)} are in A alone, {len(new)} in B alone."
    )


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
