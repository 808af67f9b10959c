"""The command line. `gdscache --help` lists the commands."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from gdscache import __version__
from gdscache.commands import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_REFUSED
from gdscache.commands.bench.commands import bench_app
from gdscache.commands.config_init import init, load_any, print_shipped
from gdscache.commands.console import App, Table, progress_bar, say, terminable
from gdscache.commands.replay.commands import plan_tiers, replay
from gdscache.commands.top import top
from gdscache.config import Config, config_schema, load_config
from gdscache.config.pools import concerns, plain_parts, pool_parts, without_sizes
from gdscache.groups.base import Group
from gdscache.pages.keys import namespace_digest
from gdscache.pages.layout import PLAIN, PageLayout
from gdscache.sizes import about

app = App(
    name="gdscache",
    help="A tiered cache for the KV cache of transformers: GPU, pinned CPU memory, SSD.",
    pretty_exceptions_enable=False,
)
config_app = App(help="Check, print and write configuration files.")
app.add_typer(config_app, name="config")
config_app.command("init")(init)
config_app.command("print")(print_shipped)
app.add_typer(bench_app, name="bench")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"gdscache {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


@config_app.command("schema")
def schema() -> None:
    """Print the JSON schema of a configuration file, for editors."""
    typer.echo(json.dumps(config_schema(), indent=2))


@config_app.command("check")
def check(
    file: Annotated[Path, typer.Argument(help="A YAML file.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check a configuration file and show its sizes, its tiers, its namespace and settings that are probably
    unintended. Opens no tier and needs no GPU.

    Where `model.pack` is `auto`, pages are packed as the directory of the SSD tier has them.

    The file may be one for vLLM or SGLang, which describe the model: then pages and the namespace are not known here.
    """
    from gdscache.engine.packing import as_directory

    config, described = load_any(file)
    meaning = describe(as_directory(config)) if described else describe_sizes(config)
    warnings = [f"warning: {concern}" for concern in meaning["concerns"]]
    say({"file": str(file), **meaning}, [f"{file}: valid", _table(meaning), *warnings], as_json=as_json)


@app.command("doctor")
def doctor(
    file: Annotated[
        Path | None,
        typer.Option("--config", help="Configuration file to check against. Default: the default settings."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    recalibrate: Annotated[
        bool, typer.Option("--recalibrate", help="Measure copies between GPU and host again.")
    ] = False,
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Examine this directory as an SSD tier, not ssd.path of --config.")
    ] = None,
) -> None:
    """Check this machine, and report its missing parts. The exit status is 1 if the configuration asks for more.

    Works without a GPU. With a GPU it takes some seconds, 64 MiB of page-locked memory, and gpu.staging of GPU memory.
    It writes and reads 32 MiB with each transport in the SSD tier's directory, and deletes them.
    """
    from gdscache.commands import doctor as checks

    asked = checks.defaults() if file is None else checks.Asked(load_any(file)[0])
    asked = dataclasses.replace(asked, directory=directory)
    with terminable():
        report = checks.examine(checks.find(asked, recalibrate=recalibrate), asked)
    failed = ", ".join(row.name for row in report.failed)
    end = f"{file or 'the defaults'}: {f'not as asked for: {failed}' if failed else 'no check fails'}"
    say(report.describe(), [*checks.tables(report), end], as_json=as_json)
    if report.failed:
        raise typer.Exit(EXIT_FAILED)


@app.command("inspect")
def inspect_directory(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The ssd.path of a configuration.")],
    pair: Annotated[
        tuple[str, str] | None,
        typer.Option("--compare", metavar="A B", help="Two namespaces, by their first digits: show their lines alone."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the contents of an SSD tier's directory. Changes nothing, and works while an engine uses the directory.

    The groups of a hybrid model may have directories of their own below it (groups-0, ...): then each is shown.

    Pages of one namespace are interchangeable. Its lines name the model, the weights and the settings. If no page hits
    after an upgrade, the lines in which the last two namespaces differ say why, or those of two others by --compare.
    """
    from gdscache.commands.inspect import tables
    from gdscache.commands.inspect.reading import directories_of, inspect

    with progress_bar() as progress:
        reports = [inspect(one, progress) for one in directories_of(directory)]
    if pair is None:
        _show(reports, tables.inspect_tables, as_json=as_json)
    else:
        every = [namespace for report in reports for namespace in report["namespaces"]]
        found = tables.compare(every, pair)
        say(found, [tables.made_of_table(found["namespaces"])], as_json=as_json)


@app.command("explain")
def explain_request(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The ssd.path of a configuration.")],
    ids: Annotated[
        str,
        typer.Argument(
            metavar="IDS", help="A file, - or a text: token ids, or digests of pages, as JSON list or between blanks."
        ),
    ],
    file: Annotated[
        Path | None, typer.Option("--config", help="Configuration of a hybrid model, to name its pages of tokens.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show where the pages of a request are in an SSD tier's directory, in any namespace, and why others are not there.

    Changes nothing, and works while an engine uses the directory. Pages in the engine's memory alone are not shown.
    Digests are keys of pages, as in the log, or the hashes of an inference engine's blocks.
    """
    from gdscache.commands.explain import explain, explain_tables, read_ids
    from gdscache.commands.inspect.reading import directories_of

    asked, config = read_ids(ids), None if file is None else load_config(file)
    with progress_bar() as progress:
        reports = [explain(one, asked, config, progress) for one in directories_of(directory)]
    _show(reports, explain_tables, as_json=as_json)


@app.command("verify")
def verify_directory(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The ssd.path of a configuration.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Read and check every page in the directory of an SSD tier. Repairs nothing. No engine may use the directory.

    The groups of a hybrid model may have directories of their own below it (groups-0, ...): then each is checked.

    Exit status 0: all pages are good. 1: bad pages were found. 2: not every page could be checked.
    """
    from gdscache.commands.inspect import tables
    from gdscache.commands.inspect.reading import directories_of
    from gdscache.commands.inspect.verification import verify

    try:
        with progress_bar() as progress:
            reports = [verify(one, progress) for one in directories_of(directory)]
    except KeyboardInterrupt:
        typer.echo("interrupted: not all pages were checked", err=True)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    _show(reports, tables.verify_tables, as_json=as_json)
    if any(report["bad_pages"] for report in reports):
        raise typer.Exit(EXIT_FAILED)
    if any(report["unchecked_pages"] for report in reports):
        raise typer.Exit(EXIT_REFUSED)


app.command("top")(top)  # the help lists commands in this order
app.command("replay")(replay)
app.command("plan")(plan_tiers)


def describe(config: Config) -> dict[str, Any]:
    """A configuration's meaning as plain data: sizes in bytes, whole pages a tier, the namespace in hex."""
    layout = max(config.model.pool_layouts, key=lambda one: one.page_tokens)  # a page of states is one row
    return {
        "model": config.model.name,
        "kind": config.model.kind,
        "layers": config.model.layers,
        "planes": [
            f"{plane.name} {list(plane.shape)} {plane.dtype}"
            for plane in dict.fromkeys(itertools.chain(*config.model.layout().layers))
        ],
        **{name: getattr(layout, name) for name in ("page_tokens", "token_bytes", "page_bytes", "extent_bytes")},
        "tiers": {
            name: None if size is None else {"bytes": size, "pages": size // one}
            for name, (size, one) in _sizes(config, layout).items()
        },
        "ssd_path": str(config.ssd.path) if config.ssd else None,
        "groups": _groups(config),
        "namespace": namespace_digest(config.model.namespace_fields()).hex(),
        "concerns": _concerns(config),
    }


def _concerns(config: Config) -> list[str]:
    """Warnings of an engine that has planes of its own, as far as the file alone tells them."""
    found: list[str] = []
    for pool in [*pool_parts(config)] or (None,):
        one = config if pool is None else pool.config
        layout = one.model.layout()
        pages, on_gpu = one.gpu.capacity // layout.plane_bytes, one.gpu.device.startswith("cuda")
        part = plain_parts(one)[0] if layout.packed else one
        found += concerns(part, pages, on_gpu=on_gpu, whole=config, pool=pool)
    return found


def describe_sizes(config: Config) -> dict[str, Any]:
    """`describe` of a configuration whose model an inference engine describes: facts of the model are None."""
    sizes = {"cpu": config.cpu.capacity if config.cpu else None, "ssd": config.ssd.capacity if config.ssd else None}
    sizes |= {one.tier: one.capacity for one in config.tiers}
    return {
        **dict.fromkeys(describe(config)),
        "tiers": {name: None if size is None else {"bytes": size, "pages": None} for name, size in sizes.items()},
        "ssd_path": str(config.ssd.path) if config.ssd else None,
        "groups": [],
        "concerns": list(without_sizes(config)),
    }


def _sizes(config: Config, layout: PageLayout) -> dict[str, tuple[int | None, int]]:
    """The capacity of each tier (None: there is none) and the bytes of a slot. Of groups in several pools, packed pages
    and others share a tier; else the packed ones have tiers of their own. Raises as `plain_parts`."""
    tiers: dict[str, tuple[int | None, int]] = {"gpu": (config.gpu.capacity, layout.extent_bytes)}
    parts = [("", config, layout.extent_bytes)]
    if layout.packed:
        tiers["gpu"] = config.gpu.capacity, layout.plane_bytes
    if layout.packed and len(config.model.pool_layouts) == 1:
        packed, plain = plain_parts(config)
        parts = [("", packed, layout.extent_bytes), (PLAIN, plain, plain.model.layout().extent_bytes)]
    for ending, part, size in parts:
        tiers[f"cpu{ending}"] = part.cpu.capacity if part.cpu else None, size
        tiers[f"ssd{ending}"] = part.ssd.capacity if part.ssd else None, size
    return tiers | {one.tier: (one.capacity, layout.extent_bytes) for one in config.tiers}


def _groups(config: Config) -> list[dict[str, Any]]:
    """A hybrid model's groups, each with its pool's share of the tiers. Raises as `pool_parts`."""
    found: list[dict[str, Any]] = []
    for part in pool_parts(config):
        own = part.config
        layout = own.model.layout()
        with part.shares():
            extent, sizes = layout.extent_bytes, _sizes(own, layout)
        pages = {name: None if size is None else size // one for name, (size, one) in sizes.items()}
        for group, local in zip(part.groups, own.model.layer_groups(), strict=True):
            namespace = namespace_digest(own.model.namespace_fields(group=local)).hex()
            about = {"share": part.share, "pool": part.names, "extent_bytes": extent, "pages": pages}
            directory = {"ssd_path": str(own.ssd.path) if own.ssd else None}
            found.append({**group.describe(), **about, **directory, "namespace": namespace})
    return found


def _show(reports: list[dict[str, Any]], tables: Callable[[dict[str, Any]], list[Table]], *, as_json: bool) -> None:
    """One report alone; in JSON several are a list, each with its `path`."""
    found = reports[0] if len(reports) == 1 else reports
    say(found, (table for report in reports for table in tables(report)), as_json=as_json)


def _table(meaning: dict[str, Any]) -> Table:
    table, described = Table(), meaning["model"] is not None
    about_model = f"{meaning['model']}: {meaning['layers']} layers, {meaning['kind']}"
    table.add_row("model", about_model if described else "described by the inference engine that opens this file")
    for plane in meaning["planes"] or ():
        table.add_row("plane", plane)
    apart = len({group["pool"] for group in meaning["groups"]}) > 1  # pages of several sizes: told with each group
    if described and not apart:
        table.add_row("page", f"{meaning['page_tokens']} tokens, each of {meaning['token_bytes']:,} bytes")
        table.add_row("page bytes", f"{meaning['page_bytes']:,} ({about(meaning['page_bytes'])})")
        table.add_row("extent bytes", f"{meaning['extent_bytes']:,} ({about(meaning['extent_bytes'])})")
    for name, tier in meaning["tiers"].items():
        size = "none" if tier is None else about(tier["bytes"])
        if tier and described and not apart:
            size += f": {tier['pages']:,} pages, {tier['pages'] * meaning['page_tokens']:,} tokens"
        table.add_row(f"{name} tier", size)
    if meaning["ssd_path"]:
        table.add_row("ssd path", meaning["ssd_path"])
    if described and not meaning["groups"]:
        table.add_row("namespace", meaning["namespace"])
    for group in meaning["groups"]:
        pages = f"pages of {group['page_tokens']} tokens, extents of {group['extent_bytes']:,} bytes"
        words = Group(group["name"], (), 0, group["keeps"], group["span"]).words
        table.add_row("group", f"{words}; {len(group['layers'])} layers, {pages}")
        pages = ", ".join(f"{name} {count:,}" for name, count in group["pages"].items() if count is not None)
        shared = "" if group["pool"] == group["name"] else f" (with {group['pool']})"
        table.add_row("", f"{100 * group['share']:.1f} % of each size{shared}, in pages: {pages}")
        table.add_row("", f"namespace {group['namespace']}")
    return table
