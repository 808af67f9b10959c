"""`gdscache config init ENGINE`: a configuration to begin with, for an inference engine that knows its model itself."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from gdscache.config import load_config
from gdscache.errors import ConfigFileError, GdsCacheError, InvalidValueError
from gdscache.sizes import GIB, MIB, about, format_size, parse_size

DIRECTORY = "~/.cache/gdscache/vllm/{rank}"
_STEP = 64 * MIB  # sizes that follow from the machine are whole numbers of it
_MOST_CPU, _MOST_SSD = 64 * GIB, 512 * GIB
_LEAST = 256 * MIB
_SAMPLE = {"name": "sample", "layers": 1, "kv_heads": 1, "head_dim": 64}  # to check what is written with


class InferenceEngine(Enum):
    """What a configuration can be written for."""

    VLLM = "vllm"


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Bytes of the tiers, and what they were chosen by, in words."""

    cpu: int
    ssd: int
    cpu_reason: str
    ssd_reason: str


def init(
    engine: Annotated[InferenceEngine, typer.Argument(help="The inference engine that reads it.")],
    file: Annotated[Path, typer.Argument(help="The file to write.")] = Path("gdscache.yaml"),
    cpu: Annotated[str | None, typer.Option("--cpu", metavar="SIZE", help="cpu.capacity, e.g. 32GiB.")] = None,
    ssd: Annotated[str | None, typer.Option("--ssd", metavar="SIZE", help="ssd.capacity, e.g. 500GiB.")] = None,
    directory: Annotated[str, typer.Option("--dir", help="ssd.path: a directory on a fast local disk.")] = DIRECTORY,
    force: Annotated[bool, typer.Option("--force", help="Write over a file that is there.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Write a configuration for an inference engine, and print the command that uses it.

    Sizes that are not given follow from this machine: a quarter of the memory that is available, half of the disk's
    free space. The file is checked before it is written, and never written over another one without --force.
    """
    if not directory.startswith(("/", "~", "$")):
        directory = str(Path.cwd() / directory)  # vLLM may start elsewhere
    sizes = choose(cpu, ssd, directory)
    text = vllm_text(sizes, directory)
    target = file.expanduser()
    _write(target, text, force=force)
    absolute = str(target.resolve())
    command = vllm_command(absolute)
    if as_json:
        said = {"engine": engine.value, "file": absolute, "cpu_bytes": sizes.cpu, "ssd_bytes": sizes.ssd}
        typer.echo(json.dumps({**said, "kv_transfer_config": transfer_config(absolute), "command": command}, indent=2))
        return
    typer.echo(f"{absolute}: written")
    typer.echo(f"  cpu.capacity {format_size(sizes.cpu)}: {sizes.cpu_reason}")
    typer.echo(f"  ssd.capacity {format_size(sizes.ssd)} in {directory}: {sizes.ssd_reason}")
    typer.echo("\nStart vLLM with\n")
    typer.echo(f"  {shlex.join(command)}")


def transfer_config(file: str) -> dict[str, Any]:
    """What `--kv-transfer-config` of vLLM takes."""
    return {
        "kv_connector": "GdsCacheConnector",
        "kv_connector_module_path": "gdscache.integrations.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"config": file},
    }


def vllm_command(file: str) -> list[str]:
    """A command that serves a model with the cache, as arguments."""
    return ["vllm", "serve", "MODEL", "--kv-transfer-config", json.dumps(transfer_config(file))]


def choose(cpu: str | None, ssd: str | None, directory: str) -> Sizes:
    """The sizes that were given, or what suits this machine. Raises `InvalidValueError` for what is no size."""
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
    from gdscache.allocation import host_bytes

    there = host_bytes()
    if there is None:
        return 4 * GIB, "the system does not say how much memory there is"
    return _whole(there // 4, _MOST_CPU), f"a quarter of the memory that is available, {about(there)}"


def _of_disk(directory: str) -> tuple[int, str]:
    place = Path(os.path.expandvars(directory)).expanduser()
    while not place.exists() and place != place.parent:
        place = place.parent
    status = os.statvfs(place)
    free = status.f_bavail * status.f_frsize
    return _whole(free // 2, _MOST_SSD), f"half of what is free there, {about(free)}"


def _whole(nbytes: int, most: int) -> int:
    step = GIB if nbytes >= 4 * GIB else _STEP
    return max(_LEAST, min(most, nbytes // step * step))


def _write(file: Path, text: str, *, force: bool) -> None:
    """Check a configuration and put it into a file: whole, or not at all."""
    beside = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        if not force and (file.exists() or file.is_symlink()):
            raise ConfigFileError(f"{file} is there already", "name another file, or pass --force")
        try:
            beside.write_text(text, encoding="utf-8")
            load_config(beside, model=_SAMPLE)
            if force:
                beside.replace(file)
            else:
                os.link(beside, file)  # which fails where somebody was faster
        finally:
            beside.unlink(missing_ok=True)
    except FileExistsError:
        raise ConfigFileError(f"{file} is there already", "name another file, or pass --force") from None
    except OSError as error:
        raise ConfigFileError(
            f"{file}: cannot be written: {error.strerror}", "name a file in a directory of yours"
        ) from None
    except GdsCacheError as error:
        message = error.message.replace(str(beside), "what would be written")
        raise type(error)(message, error.hint) from None


def vllm_text(sizes: Sizes, directory: str) -> str:
    """The file for vLLM, every key that one may want to change with what it is for."""
    return _VLLM.format(
        cpu=f"capacity: {format_size(sizes.cpu)}",
        cpu_reason=sizes.cpu_reason,
        ssd=f"capacity: {format_size(sizes.ssd)}",
        ssd_reason=sizes.ssd_reason,
        directory=json.dumps(directory),
    )


_VLLM = """\
# gdscache under vLLM, which says what the model is. What is not named here has its default: docs/configuration.md has
# all keys, with their meaning. With a key that nobody knows vLLM does not start.

# model:
#   weights: "2026-11-23"     # names the weights where no files do: dummy weights, a remote store

gpu:
  staging: 256MiB             # GPU memory for copies, beside what vLLM takes (--gpu-memory-utilization)

cpu:
  {cpu:<27} # page-locked host memory: {cpu_reason};
                              # half of it at most is for pages of requests that wait for their turn

ssd:                          # take the section out to have no SSD tier: then nothing outlives a restart
  # On a fast local disk, a directory for each server. ~, $VARS and {{rank}} are replaced.
  path: {directory}
  {ssd:<27} # reserved when vLLM starts, and never exceeded: {ssd_reason}
  durability: process         # what a stored page survives: process (any kill) | power (a power cut; slower stores)
  endurance: null             # bytes that may be written in any 24 hours, e.g. 2TiB; null is no limit
  admission: all              # pages that are written: all | second_offer (seen twice) | tinylfu

host_buffer: 256MiB           # host memory for pages that find no room in the CPU tier

store:
  queue: 2GiB                 # bytes on their way to the CPU tier, and as many to the SSD; what is beyond is not stored
  write_policy: write_through # when a page goes on to the SSD: write_through (when it is stored) |
                              # write_through_selective (after two hits) | write_back (before the CPU tier gives it up)

load:
  verify: once                # checksums are compared when bytes come from the SSD, and not again for each load
  gate: enforcing             # what is slower to load than to compute is computed: enforcing | advisory (loaded) | off
  deadline: 30                # seconds until a read of the SSD that hangs is given up

prefetch:                     # from the SSD to the CPU tier, while a request waits for its turn
  chunk: 32MiB                # bytes that move before it is another request's turn
  concurrent: 2               # chunks on their way at once
"""
