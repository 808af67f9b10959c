"""`gdscache bench`: the commands. Each imports its bench when it runs."""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import Annotated, Any

import typer

from gdscache.commands import EXIT_FAILED, EXIT_INTERRUPTED
from gdscache.commands.console import App, progress_bar, say, size_option
from gdscache.errors import InvalidValueError

bench_app = App()

_SERVERS, _TRANSFORMERS = "vLLM and SGLang", "transformers"
_WAYS = (
    "Way to keep the cache: none; cpu, files or gdscache in vLLM; hicache, storage or linker in SGLang. "
    "Repeat it for several. Default: all."
)
_TRANSPORTS = (
    "Also measure this ssd.transport: posix, uring, cufile, kvikio or nixl. Repeat it for several. Default: none; with "
    "--all, all of them."
)
_POLICY = "When HiCache stops to fetch a prompt's files. Default: wait_complete, best_effort from a disk."
_MINUTES = (
    "Time of all cases. None begins that would end later if it took as long as the one before. Default: 9 with a GPU, "
    "13 without."
)


def _option(text: str, *names: str, **settings: Any) -> Any:
    return typer.Option(*names, help=text, **settings)


_server = functools.partial(_option, rich_help_panel=_SERVERS)
_local = functools.partial(_option, rich_help_panel=_TRANSFORMERS)
Dir = Annotated[Path, _option("Directory on the device to measure. The bench deletes its files.", "--dir")]
Json = Annotated[Path | None, _option("Write the report to this file, as JSON.", "--report", metavar="FILE")]
Plot = Annotated[Path | None, _option("Draw the figures into this file (.png, .svg, .pdf).")]
Quick = Annotated[
    bool,
    _option("Small sizes: half a minute, servers some minutes. Shows that all runs; judges nothing.", "--quick"),
]
Everything = Annotated[bool, _option("Also measure and show figures for gdscache's developers.", "--all")]
Repeat = Annotated[int | None, _option("Rounds for each figure.", min=1)]


@bench_app.callback()
def bench() -> None:
    """Measure this machine against its own ceilings.

    Ctrl-C ends a bench with a report of the cases measured so far. The exit status is 1 if a case failed, and 130 after
    Ctrl-C.
    """
    logging.getLogger("gdscache.config").setLevel(logging.ERROR)  # the benches' configurations are unusual on purpose


@bench_app.command("copy")
def copy(
    total: Annotated[int | None, size_option("--total", "Bytes that a run moves each way. Default: 1GiB.")] = None,
    pairs: Annotated[int | None, _option("Pairs of runs for each figure. Default: 30.", min=1)] = None,
    json_file: Json = None,
    plot: Plot = None,
    everything: Everything = False,
    quick: Quick = False,
) -> None:
    """Measure copies of pages between host and GPU against cudaMemcpyAsync, alone and beside a model's work.

    Needs a GPU. The bench takes four times --total of page-locked memory and six times --total of GPU memory.
    """
    options = dict(locals())
    from gdscache.commands.bench.copy import BENCH

    BENCH.command(**options)


@bench_app.command("io")
def io(
    directory: Dir = Path(),
    transports: Annotated[list[str] | None, _option(_TRANSPORTS, "--transport")] = None,
    total: Annotated[int | None, size_option("--total", "Bytes that a round moves. Default: 512MiB.")] = None,
    repeat: Repeat = None,
    threads: Annotated[
        int | None, _option("ssd.threads. Default: the engine's, and at least 12 on a RAM disk.", min=1, max=1024)
    ] = None,
    require_gds: Annotated[
        bool, _option("Fail unless the driver's counters prove GPUDirect Storage.", "--require-gds")
    ] = False,
    json_file: Json = None,
    plot: Plot = None,
    everything: Everything = False,
    quick: Quick = False,
) -> None:
    """Measure stores and loads of this cache against the disk's own speed.

    They are compared with a bare O_DIRECT loop on the same file: by the transport that an engine chooses without
    GPUDirect Storage, and by the transports that are asked for.

    The bench needs three times --total and 1 GiB of disk, and three times --total and 1 GiB of host memory. For other
    sizes, depths, mixes and latencies of a disk use fio. For GPUDirect Storage use NVIDIA's gdsio.
    """
    options = dict(locals())
    from gdscache.commands.bench.io import BENCH

    BENCH.command(**options)


@bench_app.command("ttft")
def ttft(
    ctx: typer.Context,
    directory: Annotated[
        Path | None,
        _option("Directory of the SSD tier. Default: /dev/shm, if it is a RAM disk and has the room.", "--dir"),
    ] = None,
    engine: Annotated[str, _option("Engine that computes: transformers, vllm or sglang.")] = "transformers",
    preset: Annotated[
        str | None,
        _option("Shape of the model: tiny, 1b or 8b, of servers others too. Default: 8b, tiny without a GPU."),
    ] = None,
    repeat: Repeat = None,
    json_file: Json = None,
    plot: Plot = None,
    everything: Everything = False,
    quick: Quick = False,
    device: Annotated[str | None, _local("Device of the model: auto, cpu, cuda or cuda:N.")] = None,
    pack: Annotated[bool | None, _local("Keep pages packed (model.pack).", "--pack")] = None,
    python: Annotated[str | None, _server("Python with the server and gdscache. Default: the one of gdscache.")] = None,
    disk: Annotated[str | None, _server("Second directory, on a disk: restarts from there, too.")] = None,
    ways: Annotated[list[str] | None, _server(_WAYS, "--way")] = None,
    tokens: Annotated[int | None, _server("Tokens of a prompt: 32768.")] = None,
    turns: Annotated[int | None, _server("Loads of traffic of each kind: 3. 0: first tokens only.", min=0)] = None,
    stages: Annotated[int | None, _server("Stages of 4. Restarts begin with the second.", min=1, max=4)] = None,
    policy: Annotated[str | None, _server(_POLICY)] = None,
    graphs: Annotated[bool | None, _server("Decode by CUDA graphs.", "--graphs")] = None,
    tp: Annotated[int | None, _server("GPUs of an engine: 1.", min=1)] = None,
    at_once: Annotated[int | None, _server("Engines that are open side by side: 4.", min=1)] = None,
    threads: Annotated[int | None, _server("ssd.threads for files on a RAM disk.", min=1)] = None,
) -> None:
    """Measure the time to first token of hits against computing: in transformers, or inside vLLM or SGLang.

    In transformers (the extra hf) hits from the GPU, the CPU tier and the SSD are measured, and the cost of a miss;
    with --all also longer prompts, loads without overlap, and the gate. In vLLM and SGLang, first tokens and requests a
    second are measured with no cache, the server's own caches and gdscache. Models have random weights: nothing is
    downloaded.

    Transformers take about eight minutes. The 8b shape needs 35 GiB of GPU memory, 12 GiB of host memory and 12 GiB of
    disk; with --all 75, 40 and 45 GiB. A server takes about ten minutes, 25 GiB of GPU memory for each engine that is
    open, and 40 GiB of host memory. A RAM disk takes host memory too.
    """
    options = dict(locals())
    from gdscache.commands.bench import serving, ttft
    from gdscache.cuda.streams import resolve_device

    del options["ctx"]
    if engine == _TRANSFORMERS:
        _refuse(ctx, _SERVERS)
        ttft.BENCH.command(**options | {"device": str(resolve_device(device or "auto", "--device"))})
    else:
        _refuse(ctx, _TRANSFORMERS)
        serving.BENCH.command(**options)


@bench_app.command("links")
def links(
    ranks: Annotated[
        int | None, _option("Processes with planes. Default: the number of GPUs, and 1 without.", min=1)
    ] = None,
    total: Annotated[
        int | None, size_option("--total", "Bytes that a load brings to each rank. Default: 1GiB.")
    ] = None,
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
    options = dict(locals())
    from gdscache.commands.bench.links import BENCH

    BENCH.command(**options)


@bench_app.command("report")
def report(
    out: Annotated[Path, _option("Folder for report.html and report.json.", "--out")],
    directory: Dir = Path(),
    minutes: Annotated[float | None, _option(_MINUTES, min=0.1)] = None,
    quick: Quick = False,
) -> None:
    """Run every bench that this machine can, and write one page of it.

    The page has the machine, a sentence, a plot and tables of each bench, and the causes of missing figures.
    """
    import torch

    from gdscache.commands.bench import report as measured
    from gdscache.commands.bench.kit import check_directory, check_writable

    check_directory(directory, "--dir")
    out.mkdir(parents=True, exist_ok=True)
    check_writable(out / measured.JSON_NAME, "--out")
    seconds = 60.0 * (minutes or (9 if torch.cuda.is_available() else 13))
    with progress_bar(lines=True) as progress:
        found = measured.measure(directory, out, seconds, progress, quick=quick)
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
    everything: Annotated[bool, _option("Show the figures that are the same, too.", "--all")] = False,
    as_json: Annotated[bool, _option("Print the changes as JSON.", "--json")] = False,
) -> None:
    """Show the changes from report A to report B beyond noise: figures whose spreads of four rounds or more do not
    meet."""
    from gdscache.commands.bench import report as measured

    found = measured.compare(first, second)
    rows = [{"what": one.name, "ratio": one.ratio, "word": one.word} for one in found.both]
    plain = {"changes": rows, "only_in_first": found.gone, "only_in_second": found.new, "unlike": found.unlike}
    say(plain, found.shown(everything=everything), as_json=as_json)


def _refuse(ctx: typer.Context, panel: str) -> None:
    """Raises `InvalidValueError` for a given option of another engine, by the panel of its help."""
    for option in ctx.command.params:
        if getattr(option, "rich_help_panel", None) == panel and ctx.params[option.name or ""] not in (None, (), []):
            message = f"{option.opts[0]} is an option of --engine {panel.lower()}"
            raise InvalidValueError(message, "leave it out, or choose that engine")
