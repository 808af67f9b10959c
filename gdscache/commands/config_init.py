"""`gdscache config init ENGINE` and `config print NAME`: a configuration to start with.

An inference engine describes its model itself. NAME is a file of configs/, which the wheel contains too.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
import yaml

from gdscache.arguments import shown
from gdscache.commands.console import size_of
from gdscache.config import Config, assembled, described_elsewhere, load_config
from gdscache.config.file import read_places
from gdscache.errors import ConfigFileError, GdsCacheError, InvalidValueError
from gdscache.runtime.files import free_space
from gdscache.sizes import GIB, MIB, about, format_size

_DIRECTORY = "~/.cache/gdscache/{engine}"
_STEP = 64 * MIB  # granularity of sizes chosen for the machine
_MOST_CPU, _MOST_SSD = 64 * GIB, 512 * GIB
_LEAST = 256 * MIB
_SAMPLE = {"name": "sample", "layers": 1, "kv_heads": 1, "head_dim": 64}  # where an inference engine has the model
_FIRST_REPLICA = {"GDSCACHE_DP_RANK": "0"}
SHIPPED = ("default", "cpu_only", "three_tier_gds", "ssd_direct", "llama3_8b", "deepseek_v3_mla")
PRINTED = (*SHIPPED, "alerts", "grafana")


def _name(metavar: str, names: tuple[str, ...], text: str) -> Any:
    """An argument that is one of `names`. In the help they stand in the text, whose lines break between them."""

    def known(name: str) -> str:
        if name not in names:
            raise InvalidValueError(f"{metavar} is {shown(name)}", f"choose of {', '.join(names)}")
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
    engine: Annotated[str, _name("ENGINE", tuple(ENGINES), "The inference engine")],
    file: Annotated[Path, typer.Argument(help="The file to write.")] = Path("gdscache.yaml"),
    cpu: Annotated[str | None, typer.Option("--cpu", metavar="SIZE", help="cpu.capacity, e.g. 32GiB.")] = None,
    ssd: Annotated[str | None, typer.Option("--ssd", metavar="SIZE", help="ssd.capacity, e.g. 500GiB.")] = None,
    directory: Annotated[str | None, typer.Option("--dir", help="ssd.path: a directory on a fast local disk.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Write a configuration file for an inference engine, and print the command that uses the file.

    An inference engine describes its model itself, so its file has no model section. Sizes that you leave out are
    chosen for this machine: a quarter of the available memory, at most 64 GiB, and half of the free disk space, at most
    512 GiB; 256 MiB at least. The file is checked before it is written. An existing file is replaced only with --force.
    `gdscache config print` has other files to begin with.
    """
    if directory is None:
        directory = _DIRECTORY.format(engine=engine)
    if not directory:
        raise InvalidValueError("--dir is empty", "name a directory on a fast local disk, or leave --dir out")
    if not directory.startswith(("/", "~", "$")):
        directory = str(Path(os.getcwd().replace("$", "$$"), directory))  # the engine's working directory may differ
    about = ENGINES[engine]
    if cpu is not None and "C" not in about.lines:
        raise InvalidValueError("--cpu is given, but HiCache keeps pages in host memory itself", "leave --cpu out")
    tiers = {"cpu": _size(cpu, "--cpu", _of_memory), "ssd": _size(ssd, "--ssd", lambda: _of_disk(directory))}
    absolute = _write(file, about.text(tiers, directory), force=force)
    tiers = tiers if "C" in about.lines else {"ssd": tiers["ssd"]}
    option = json.dumps(about.option(absolute))
    command = [*about.command.split(), option]
    if as_json:
        said: dict[str, Any] = {"engine": engine, "file": absolute}
        said |= {f"{tier}_bytes": nbytes for tier, (nbytes, _) in tiers.items()}
        typer.echo(json.dumps({**said, about.key: json.loads(option), "command": command}, indent=2))
        return
    typer.echo(f"{absolute}: written")
    for tier, (nbytes, reason) in tiers.items():
        place = f" in {directory}" if tier == "ssd" else ""
        typer.echo(f"  {tier}.capacity {format_size(nbytes)}{place}: {reason}")
    typer.echo(f"\nStart {about.name} with\n\n  {shlex.join(command)}")


def load_any(file: Path) -> tuple[Config, bool]:
    """The configuration of a file, and whether the file describes its model. If an inference engine does that, a small
    model stands in, and paths are those of the first replica. Raises a `ConfigError`."""
    data, places = read_places(file)  # once: a pipe has it no second time
    if described_elsewhere(data.get("model")):
        return assembled(data, places, str(file), _SAMPLE, _FIRST_REPLICA), False
    return assembled(data, places, str(file)), True


def _size(text: str | None, option: str, choose: Callable[[], tuple[int, str]]) -> tuple[int, str]:
    """A tier's bytes and the reason for them: as given, or chosen for this machine. Raises `InvalidValueError`."""
    return choose() if text is None else (size_of(text, option), "as asked for")


def _of_memory() -> tuple[int, str]:
    from gdscache.cuda.host_memory import host_bytes

    there = host_bytes()
    if there is None:
        return 4 * GIB, "the system does not report its memory"
    return _part(there, 4, _MOST_CPU, "a quarter of the available memory")


def _of_disk(directory: str) -> tuple[int, str]:
    place = os.path.realpath(os.path.expanduser(os.path.expandvars(directory)))
    while not os.path.exists(place):  # `/` is there
        place = os.path.dirname(place)
    free = free_space(Path(place))
    if free is None:
        return 4 * GIB, "the file system there does not report its size"
    return _part(free, 2, _MOST_SSD, "half of the free space there")


def _part(there: int, by: int, most: int, words: str) -> tuple[int, str]:
    """A part of bytes in whole steps, between `_LEAST` and `most`, and the reason in `words`."""
    step = GIB if there // by >= 4 * GIB else _STEP
    part = there // by // step * step
    reason = f"{words}, {about(there)}"
    if part > most:
        return most, f"{reason}, at most {about(most)}"
    return (part, reason) if part >= _LEAST else (_LEAST, f"{reason}, at least {about(_LEAST)}")


def _write(file: Path, text: str, *, force: bool) -> str:
    """Check a configuration and write it to a file atomically; to a pipe or a device as it is. Returns the file's
    absolute path."""
    file = Path(os.path.expanduser(file))  # that of an unknown user stays
    in_place = force and file.exists() and not file.is_file()
    whole = Path(os.path.realpath(file)) if force and not in_place else file  # a link stays
    beside = whole.parent / f".{whole.name}.{os.getpid()}"
    try:
        try:
            beside.write_text(text, encoding="utf-8")
            load_config(beside, model=_SAMPLE, variables=_FIRST_REPLICA)
            if in_place:
                file.write_text(text, encoding="utf-8")
            elif force:
                beside.replace(whole)
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


def vllm_transfer(config: object) -> dict[str, Any]:
    """vLLM's `KVTransferConfig` for gdscache. `config`: a file, or its sections."""
    return {
        "kv_connector": "GdsCacheConnector",
        "kv_connector_module_path": "gdscache.integrations.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"config": config},
    }


def sglang_linker(config: object) -> dict[str, Any]:
    """SGLang's configuration of gdscache's cache linker."""
    return {
        "linker": "GdsCacheLinker",
        "linker_module_path": "gdscache.integrations.sglang.linker",
        "linker_extra_config": {"config": config},
    }


def hicache_storage(config: object) -> dict[str, Any]:
    """HiCache's extra configuration of gdscache's storage."""
    return {
        "backend_name": "gdscache",
        "module_path": "gdscache.integrations.sglang.storage",
        "class_name": "GdsCacheStorage",
        "interface_v1": 1,
        "hicache_storage_pass_prefix_keys": True,
        "config": config,
    }


class WrittenFor(NamedTuple):
    """An inference engine. `room`: its setting for GPU memory. `lines`: the marks of its lines in `_TEXT`. `command`
    ends with an option whose value is `option(file)` in JSON, which `config init --json` has as `key`."""

    name: str
    room: str
    lines: str
    command: str
    option: Callable[[str], dict[str, Any]]
    key: str

    def text(self, tiers: Mapping[str, tuple[int, str]], directory: str) -> str:
        """The file: the keys that a user may change, each with its purpose."""
        given = {tier: f"capacity: {format_size(nbytes)}" for tier, (nbytes, _) in tiers.items()}
        given |= {f"{tier}_reason": reason for tier, (_, reason) in tiers.items()}
        text = "\n".join(line[1:] for line in _TEXT.splitlines() if line[:1] in ("", "|", *self.lines))
        path = yaml.dump(directory, default_style='"', width=MIB, allow_unicode=True).strip()
        return text.format(name=self.name, room=self.room, directory=path, **given) + "\n"


_LAUNCH = "python -m sglang.launch_server --model-path MODEL --page-size 64"
_LINKER = "--schedule-policy lpm --enable-unified-cache-external-linker --unified-cache-external-linker-backend dynamic"
_HICACHE = "--enable-hierarchical-cache --hicache-mem-layout page_first --hicache-storage-backend dynamic"
_VLLM = "vllm serve MODEL --block-size 64 --kv-transfer-config"
_SGLANG = "SGLang", "--mem-fraction-static"
ENGINES = {  # the last two: the cache linker, and the storage below HiCache
    "vllm": WrittenFor("vLLM", "--gpu-memory-utilization", "CG", _VLLM, vllm_transfer, "kv_transfer_config"),
    "sglang": WrittenFor(
        *_SGLANG, "C", f"{_LAUNCH} {_LINKER} --unified-cache-external-linker-config", sglang_linker, "linker_config"
    ),
    "sglang-hicache": WrittenFor(
        *_SGLANG, "H", f"{_LAUNCH} {_HICACHE} --hicache-storage-backend-extra-config", hicache_storage, "storage_config"
    ),
}

# A line is for all engines (|), for those with a CPU tier (C), for HiCache (H), or for engines that report the times
# of their computing (G).
_TEXT = """\
|# gdscache under {name}, which describes the model. Omitted keys have their defaults: docs/configuration.md has
|# all keys, with their meaning. With an unknown key {name} does not start.

|# model:
|#   weights: "2026-11-23"     # names the weights where no files do: dummy weights, a remote store

Cgpu:
C  staging: 256MiB             # GPU memory for copies, beside {name}'s own ({room})
C
Ccpu:
C  {cpu:<27} # page-locked host memory: {cpu_reason};
C                              # half of it at most is for pages of requests that wait for their turn
C
Cssd:                          # take the section out to have no SSD tier: then nothing outlives a restart
Hssd:
|  # On a fast local disk, a directory for each server. ~ and $VARS are replaced.
|  path: {directory}
|  {ssd:<27} # reserved when {name} starts, and never exceeded:
|                              # {ssd_reason}
|  durability: process         # a stored page survives: process (any kill) | power (a power cut; slower stores)
|  endurance: null             # bytes that may be written in any 24 hours, e.g. 2TiB; null is no limit

Chost_buffer: 256MiB           # host memory for pages that find no room in the CPU tier
Hhost_buffer: 256MiB           # host memory for pages that pass through between HiCache's and the SSD

|store:
C  queue: 2GiB                 # bytes on their way to the CPU tier, and as many to the SSD; more pages are not stored
H  queue: 2GiB                 # bytes on their way to the SSD; more pages are not stored
C  write_policy: write_through # when a page goes on to the SSD: write_through (when it is stored) |
C                              # write_through_selective (after two hits) | write_back (before the CPU tier gives it up)
|  admission: all              # pages that are written to the SSD: all | second_offer (seen twice) | tinylfu

|load:
|  verify: once                # checksums are compared when bytes come from the SSD, and not again for each load
G  gate: enforcing             # compute hits that would load more slowly: enforcing | advisory (loaded) | off

|deadline: 30                  # seconds until a read or a write of the SSD that hangs is given up
"""
