"""`gdscache config init NAME` and `config print NAME`: a configuration to start with.

NAME is a file of configs/, which the wheel contains too, or an inference engine, which describes its model itself.
"""

from __future__ import annotations

import json
import os
import shlex
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from gdscache.commands.config_engines import WRITTEN_FOR, Sizes, SupportedEngine
from gdscache.config import load_config
from gdscache.errors import ConfigFileError, GdsCacheError, InvalidValueError
from gdscache.sizes import GIB, MIB, about, format_size, parse_size

_DIRECTORY = "~/.cache/gdscache/{engine}"
_STEP = 64 * MIB  # granularity of sizes chosen for the machine
_MOST_CPU, _MOST_SSD = 64 * GIB, 512 * GIB
_LEAST = 256 * MIB
_SAMPLE = {"name": "sample", "layers": 1, "kv_heads": 1, "head_dim": 64}  # for the check of written files


class Shipped(Enum):
    DEFAULT = "default"
    CPU_ONLY = "cpu_only"
    THREE_TIER_GDS = "three_tier_gds"
    SSD_DIRECT = "ssd_direct"
    LLAMA3_8B = "llama3_8b"
    DEEPSEEK_V3_MLA = "deepseek_v3_mla"


Start = Enum("Start", {kind.name: kind.value for kind in (*SupportedEngine, *Shipped)})  # type: ignore[misc]
Printed = Enum("Printed", {**{kind.name: kind.value for kind in Shipped}, "ALERTS": "alerts", "GRAFANA": "grafana"})  # type: ignore[misc]


def shipped_text(name: str) -> str:
    """The text of a file of configs/: inside the installed package, or beside it in a source tree."""
    package = Path(__file__).resolve().parents[1]
    inside, beside = package / "configs", package.parent / "configs"
    [file] = (inside if inside.is_dir() else beside).glob(f"{name}.*")
    return file.read_text(encoding="utf-8")


def print_shipped(
    name: Annotated[Printed, typer.Argument(help="One of the files that gdscache ships.")] = Printed("default"),  # noqa: B008
) -> None:
    """Print a file that gdscache ships. `default` is a configuration that has every key with its default value, and
    `alerts` has rules for Prometheus, `grafana` a dashboard."""
    typer.echo(shipped_text(name.value), nl=False)


def init(
    name: Annotated[
        Start, typer.Argument(help="An inference engine, or one of the files that gdscache ships.")
    ] = Start("default"),  # noqa: B008
    file: Annotated[Path, typer.Argument(help="The file to write.")] = Path("gdscache.yaml"),
    cpu: Annotated[
        str | None, typer.Option("--cpu", metavar="SIZE", help="cpu.capacity for an inference engine, e.g. 32GiB.")
    ] = None,
    ssd: Annotated[
        str | None, typer.Option("--ssd", metavar="SIZE", help="ssd.capacity for an inference engine, e.g. 500GiB.")
    ] = None,
    directory: Annotated[
        str | None, typer.Option("--dir", help="ssd.path for an inference engine: a directory on a fast local disk.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Write a configuration file. For an inference engine, also print the command that uses the file.

    An inference engine describes its model itself, so its file has no model section. Sizes that you leave out are
    chosen for this machine: a quarter of the available memory, and half of the free disk space. The file is checked
    before it is written. An existing file is replaced only with --force.
    """
    if name.value in {kind.value for kind in Shipped}:
        if given := [option for option, value in (("--cpu", cpu), ("--ssd", ssd), ("--dir", directory)) if value]:
            raise InvalidValueError(
                f"{' and '.join(given)}: {name.value} has sizes and a path of its own",
                "leave the option out and edit the file, or name an inference engine",
            )
        absolute = _write(file, shipped_text(name.value), force=force, model=None)
        if as_json:
            typer.echo(json.dumps({"name": name.value, "file": absolute}, indent=2))
        else:
            typer.echo(
                f"{absolute}: written. Its first lines name its requirements. To check it: gdscache config check {file}"
            )
        return
    engine = SupportedEngine(name.value)
    if directory is None:
        directory = _DIRECTORY.format(engine=engine.value)
    if not directory.startswith(("/", "~", "$")):
        directory = str(Path.cwd() / directory)  # the engine's working directory may differ
    written_for = WRITTEN_FOR[engine]
    if cpu is not None and not written_for.cpu:
        raise InvalidValueError("--cpu is given, but HiCache keeps pages in host memory itself", "leave --cpu out")
    sizes = choose(cpu, ssd, directory)
    absolute = _write(file, written_for.text(sizes, directory), force=force, model=_SAMPLE)
    command = written_for.command(absolute)
    if as_json:
        said: dict[str, Any] = {"engine": engine.value, "file": absolute, "ssd_bytes": sizes.ssd}
        said |= {"cpu_bytes": sizes.cpu} if written_for.cpu else {}
        said |= {written_for.option: json.loads(command[-1]), "command": command}
        typer.echo(json.dumps(said, indent=2))
        return
    typer.echo(f"{absolute}: written")
    if written_for.cpu:
        typer.echo(f"  cpu.capacity {format_size(sizes.cpu)}: {sizes.cpu_reason}")
    typer.echo(f"  ssd.capacity {format_size(sizes.ssd)} in {directory}: {sizes.ssd_reason}")
    typer.echo(f"\nStart {written_for.name} with\n")
    typer.echo(f"  {shlex.join(command)}")


def choose(cpu: str | None, ssd: str | None, directory: str) -> Sizes:
    """The given sizes, or sizes for this machine. Raises `InvalidValueError`."""
    cpu_bytes, cpu_reason = _given(cpu, "--cpu") or _of_memory()
    ssd_bytes, ssd_reason = _given(ssd, "--ssd") or _of_disk(directory)
    return Sizes(cpu_bytes, ssd_bytes, cpu_reason, ssd_reason)


def _given(size: str | None, option: str) -> tuple[int, str] | None:
    if size is None:
        return None
    try:
        return parse_size(size), "as asked for"
    except ValueError as error:
        raise InvalidValueError(f"{option} is {size!r}: {error}", "write a size as 32GiB") from None


def _of_memory() -> tuple[int, str]:
    from gdscache.runtime.allocation import host_bytes

    there = host_bytes()
    if there is None:
        return 4 * GIB, "the system does not report its memory"
    return _whole(there // 4, _MOST_CPU), f"a quarter of the memory that is available, {about(there)}"


def _of_disk(directory: str) -> tuple[int, str]:
    place = Path(os.path.expandvars(directory)).expanduser()
    while not place.exists() and place != place.parent:
        place = place.parent
    status = os.statvfs(place)
    free = status.f_bavail * status.f_frsize
    return _whole(free // 2, _MOST_SSD), f"half of the free space there, {about(free)}"


def _whole(nbytes: int, most: int) -> int:
    step = GIB if nbytes >= 4 * GIB else _STEP
    return max(_LEAST, min(most, nbytes // step * step))


def _write(file: Path, text: str, *, force: bool, model: dict[str, Any] | None) -> str:
    """Check a configuration and write it to a file atomically. `model`: the model section that the file leaves out.
    Returns the file's absolute path."""
    file = file.expanduser()
    beside = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        try:
            beside.write_text(text, encoding="utf-8")
            load_config(beside, model=model)
            if force:
                beside.replace(file)
            else:
                os.link(beside, file)  # fails if another process has created the file
        finally:
            beside.unlink(missing_ok=True)
        return str(file.resolve())
    except FileExistsError:
        raise ConfigFileError(f"{file} exists already", "name another file, or pass --force") from None
    except OSError as error:
        raise ConfigFileError(
            f"{file}: cannot be written: {error.strerror}", "name a file in a directory of yours"
        ) from None
    except GdsCacheError as error:
        message = error.message.replace(str(beside), "the new configuration")
        raise type(error)(message, error.hint) from None
