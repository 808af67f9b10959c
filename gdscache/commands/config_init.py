"""`gdscache config init ENGINE` and `config print NAME`: a configuration to start with.

An inference engine describes its model itself. NAME is a file of configs/, which the wheel contains too.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from gdscache.arguments import shown
from gdscache.commands.console import size_of
from gdscache.config import Config, described_elsewhere, load_config
from gdscache.config.file import read_mapping
from gdscache.errors import ConfigFileError, GdsCacheError, InvalidValueError
from gdscache.sizes import GIB, MIB, about, format_size

_DIRECTORY = "~/.cache/gdscache/{engine}"
_STEP = 64 * MIB  # granularity of sizes chosen for the machine
_MOST_CPU, _MOST_SSD = 64 * GIB, 512 * GIB
_LEAST = 256 * MIB
_SAMPLE = {"name": "sample", "layers": 1, "kv_heads": 1, "head_dim": 64}  # where an inference engine has the model
_FIRST_REPLICA = {"GDSCACHE_DP_RANK": "0"}


ENGINES = ("vllm", "sglang", "sglang-hicache")  # the cache linker, and the storage below HiCache
SHIPPED = ("default", "cpu_only", "three_tier_gds", "ssd_direct", "llama3_8b", "deepseek_v3_mla")

PRINTED = (*SHIPPED, "alerts", "grafana")


def _name(metavar: str, names: tuple[str, ...], text: str) -> Any:
    """An argument that is one of `names`. In the help they stand in the text, whose lines break between them."""

    def known(name: str) -> str:
        if name not in names:
            raise InvalidValueError(f"there is no configuration {shown(name)}", f"choose of {', '.join(names)}")
        return name

    help_text = f"{text}: {', '.join(names)}."
    return typer.Argument(metavar=metavar, help=help_text, callback=known, autocompletion=lambda: list(names))


def shipped_text(name: str) -> str:
    """The text of a file of configs/: inside the installed package, or beside it in a source tree."""
    package = Path(__file__).resolve().parents[1]
    inside, beside = package / "configs", package.parent / "configs"
    [file] = (inside if inside.is_dir() else beside).glob(f"{name}.*")
    return file.read_text(encoding="utf-8")


def print_shipped(
    name: Annotated[str, _name("NAME", PRINTED, "One of the files that gdscache ships")] = "default",
) -> None:
    """Print a file that gdscache ships. `default` is a configuration that has every key with its default value, and
    `alerts` has rules for Prometheus, `grafana` a dashboard."""
    typer.echo(shipped_text(name), nl=False)


def init(
    engine: Annotated[str, _name("ENGINE", ENGINES, "The inference engine")],
    file: Annotated[Path, typer.Argument(help="The file to write.")] = Path("gdscache.yaml"),
    cpu: Annotated[str | None, typer.Option("--cpu", metavar="SIZE", help="cpu.capacity, e.g. 32GiB.")] = None,
    ssd: Annotated[str | None, typer.Option("--ssd", metavar="SIZE", help="ssd.capacity, e.g. 500GiB.")] = None,
    directory: Annotated[str | None, typer.Option("--dir", help="ssd.path: a directory on a fast local disk.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Write a configuration file for an inference engine, and print the command that uses the file.

    An inference engine describes its model itself, so its file has no model section. Sizes that you leave out are
    chosen for this machine: a quarter of the available memory, and half of the free disk space. The file is checked
    before it is written. An existing file is replaced only with --force. `gdscache config print` has other files to
    begin with.
    """
    if directory is None:
        directory = _DIRECTORY.format(engine=engine)
    if not directory.startswith(("/", "~", "$")):
        directory = str(Path.cwd() / directory)  # the engine's working directory may differ
    written_for = WRITTEN_FOR[engine]
    if cpu is not None and not written_for.cpu:
        raise InvalidValueError("--cpu is given, but HiCache keeps pages in host memory itself", "leave --cpu out")
    sizes = choose(cpu, ssd, directory)
    absolute = _write(file, written_for.text(sizes, directory), force=force)
    command = written_for.command(absolute)
    if as_json:
        said: dict[str, Any] = {"engine": engine, "file": absolute, "ssd_bytes": sizes.ssd}
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


def load_any(file: Path) -> tuple[Config, bool]:
    """The configuration of a file, and whether the file describes its model. If an inference engine does that, a small
    model stands in, and paths are those of the first replica. Raises a `ConfigError`."""
    if described_elsewhere(read_mapping(file).get("model")):
        return load_config(file, model=_SAMPLE, variables=_FIRST_REPLICA), False
    return load_config(file), True


def choose(cpu: str | None, ssd: str | None, directory: str) -> Sizes:
    """The given sizes, or sizes for this machine. Raises `InvalidValueError`."""
    cpu_bytes, cpu_reason = (size_of(cpu, "--cpu"), "as asked for") if cpu is not None else _of_memory()
    ssd_bytes, ssd_reason = (size_of(ssd, "--ssd"), "as asked for") if ssd is not None else _of_disk(directory)
    return Sizes(cpu_bytes, ssd_bytes, cpu_reason, ssd_reason)


def _of_memory() -> tuple[int, str]:
    from gdscache.cuda.host_memory import host_bytes

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


def _write(file: Path, text: str, *, force: bool) -> str:
    """Check a configuration and write it to a file atomically. Returns the file's absolute path."""
    file = file.expanduser()
    beside = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        try:
            beside.write_text(text, encoding="utf-8")
            load_config(beside, model=_SAMPLE, variables=_FIRST_REPLICA)
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


# -- inference engines -------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The tiers' bytes, and the reasons for them."""

    cpu: int
    ssd: int
    cpu_reason: str
    ssd_reason: str


@dataclasses.dataclass(frozen=True)
class WrittenFor:
    """An inference engine. `room`: its setting for GPU memory. `option`: JSON of `command`'s last argument. `cpu`:
    whether the configuration has a CPU tier; `gate`: whether the engine reports its computing times."""

    name: str
    room: str
    option: str
    command: Callable[[str], list[str]]
    cpu: bool = True
    gate: bool = False

    def text(self, sizes: Sizes, directory: str) -> str:
        """The file: the keys that a user may change, each with its purpose."""
        return "\n".join([_HEAD, *([_GPU, _CPU] if self.cpu else []), _SSD, _BUFFER, _STORE, _LOAD]).format(
            name=self.name,
            room=self.room,
            optional=_OPTIONAL if self.cpu else "",
            passing="find no room in the CPU tier" if self.cpu else "pass through between HiCache's and the SSD",
            queued="the CPU tier, and as many to the SSD" if self.cpu else "the SSD",
            policy=_POLICY if self.cpu else "",
            gate=_GATE if self.gate else "",
            cpu=f"capacity: {format_size(sizes.cpu)}",
            cpu_reason=sizes.cpu_reason,
            ssd=f"capacity: {format_size(sizes.ssd)}",
            ssd_reason=sizes.ssd_reason,
            directory=json.dumps(directory),
        )


def _vllm(file: str) -> list[str]:
    transfer = {
        "kv_connector": "GdsCacheConnector",
        "kv_connector_module_path": "gdscache.integrations.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"config": file},
    }
    return ["vllm", "serve", "MODEL", "--block-size", "64", "--kv-transfer-config", json.dumps(transfer)]


_SGLANG = ["python", "-m", "sglang.launch_server", "--model-path", "MODEL", "--page-size", "64"]


def _linker(file: str) -> list[str]:
    config: dict[str, Any] = {
        "linker": "GdsCacheLinker",
        "linker_module_path": "gdscache.integrations.sglang.linker",
        "linker_extra_config": {"config": file},
    }
    flags = ["--schedule-policy", "lpm", "--enable-unified-cache-external-linker"]
    flags += ["--unified-cache-external-linker-backend", "dynamic"]
    return [*_SGLANG, *flags, "--unified-cache-external-linker-config", json.dumps(config)]


def _hicache(file: str) -> list[str]:
    config = {
        "backend_name": "gdscache",
        "module_path": "gdscache.integrations.sglang.storage",
        "class_name": "GdsCacheStorage",
        "interface_v1": 1,
        "hicache_storage_pass_prefix_keys": True,
        "config": file,
    }
    flags = ["--enable-hierarchical-cache", "--hicache-mem-layout", "page_first"]
    flags += ["--hicache-storage-backend", "dynamic"]
    return [*_SGLANG, *flags, "--hicache-storage-backend-extra-config", json.dumps(config)]


WRITTEN_FOR = {
    "vllm": WrittenFor("vLLM", "--gpu-memory-utilization", "kv_transfer_config", _vllm, gate=True),
    "sglang": WrittenFor("SGLang", "--mem-fraction-static", "linker_config", _linker),
    "sglang-hicache": WrittenFor("SGLang", "--mem-fraction-static", "storage_config", _hicache, cpu=False),
}


_HEAD = """\
# gdscache under {name}, which describes the model. Omitted keys have their defaults: docs/configuration.md has
# all keys, with their meaning. With an unknown key {name} does not start.

# model:
#   weights: "2026-11-23"     # names the weights where no files do: dummy weights, a remote store
"""

_GPU = """\
gpu:
  staging: 256MiB             # GPU memory for copies, beside {name}'s own ({room})
"""

_CPU = """\
cpu:
  {cpu:<27} # page-locked host memory: {cpu_reason};
                              # half of it at most is for pages of requests that wait for their turn
"""

_OPTIONAL = "                          # take the section out to have no SSD tier: then nothing outlives a restart"

_SSD = """\
ssd:{optional}
  # On a fast local disk, a directory for each server. ~ and $VARS are replaced.
  path: {directory}
  {ssd:<27} # reserved when {name} starts, and never exceeded: {ssd_reason}
  durability: process         # a stored page survives: process (any kill) | power (a power cut; slower stores)
  endurance: null             # bytes that may be written in any 24 hours, e.g. 2TiB; null is no limit
"""

_BUFFER = "host_buffer: 256MiB           # host memory for pages that {passing}\n"

_STORE = """\
store:
  queue: 2GiB                 # bytes on their way to {queued}; further pages are not stored
{policy}  admission: all              # pages that are written to the SSD: all | second_offer (seen twice) | tinylfu
"""

_POLICY = """\
  write_policy: write_through # when a page goes on to the SSD: write_through (when it is stored) |
                              # write_through_selective (after two hits) | write_back (before the CPU tier gives it up)
"""

_GATE = (
    "  gate: enforcing             # compute hits that would load more slowly: enforcing | advisory (loaded) | off\n"
)

_LOAD = """\
load:
  verify: once                # checksums are compared when bytes come from the SSD, and not again for each load
{gate}
deadline: 30                  # seconds until a read or a write of the SSD that hangs is given up
"""
