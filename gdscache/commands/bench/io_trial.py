"""Which ways work on this machine: each is tried in a child process with a deadline, because cuFile can hang or crash
the process that asks it. Bytes are compared; the nvidia-fs driver's counters say whether it was GPUDirect Storage."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from gdscache.commands.bench.io_cells import BY_NAME
from gdscache.commands.bench.io_ways import CHECK_BYTES, OpenWay, check
from gdscache.commands.bench.measure import Progress, silent
from gdscache.commands.doctor.trial import run_child
from gdscache.errors import GdsCacheError, TransportUnavailableError
from gdscache.storage.base import PROBE_PREFIX
from gdscache.storage.probe import gds_operations, no_gds_driver, probe_cufile

DEADLINE_S = 60.0

_MARK = "trial: "  # of the child's answer: libraries print too
_CODE = "from gdscache.commands.bench.io_trial import main; main()"


@dataclasses.dataclass(frozen=True)
class Trial:
    """The trial of a way. `cause`: why it cannot run, empty where it can.

    `word`: `gds` where nvidia-fs counted its reads and writes, `compat` where bytes went to the GPU without that,
    `posix` for host memory. `direct`: whether the page cache was bypassed.
    """

    way: str
    cause: str = ""
    word: str = ""
    direct: bool = False

    def describe(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "label": BY_NAME[self.way].label}


def device_or_cpu() -> torch.device:
    """The current CUDA device; the CPU where there is none."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def try_ways(ways: Iterable[str], directory: Path, threads: int, progress: Progress = silent) -> list[Trial]:
    """Try each way on a small file in the directory."""
    names, device, found = list(ways), device_or_cpu(), []
    for number, name in enumerate(names):
        progress(number, len(names), f"trial of {BY_NAME[name].label}")
        if device.type == "cpu" and BY_NAME[name].memory != "host":
            found.append(Trial(name, "torch sees no CUDA device"))
        else:
            found.append(try_way(name, directory, threads, str(device)))
    return found


def try_way(name: str, directory: Path, threads: int, device: str, deadline_s: float = DEADLINE_S) -> Trial:
    """Try one way in a child, which is killed after `deadline_s` seconds. Raises `OSError` if no file can be made."""
    file, path = tempfile.mkstemp(prefix=PROBE_PREFIX, dir=directory)
    try:
        os.posix_fallocate(file, 0, CHECK_BYTES)
        status, output = run_child(_CODE, [name, path, str(threads), device], deadline_s)
    finally:
        os.close(file)
        os.unlink(path)
    if status is None:
        return Trial(name, f"no answer within {deadline_s:g} s")
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    answers = [line.removeprefix(_MARK) for line in lines if line.startswith(_MARK)]
    if status or len(answers) != 1:
        return Trial(name, f"{lines[-1] if lines else 'no message'} (exit status {status})")
    return Trial(name, **json.loads(answers[0]))


def main() -> None:
    """The child: way, file, threads and device in; one line of JSON out."""
    name, path, threads, device = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), torch.device(sys.argv[4])
    answer: dict[str, Any]
    try:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        before = gds_operations()
        with OpenWay(name, path, threads, CHECK_BYTES, device) as way:
            check(way)
            direct = way.transport.direct
        moved = all(new > old for old, new in zip(before, gds_operations(), strict=True))
        kind = BY_NAME[name]
        word = "posix" if name == "host_gpu" or kind.memory == "host" else "gds" if kind.cufile and moved else "compat"
        answer = {"word": word, "direct": direct}
    except (GdsCacheError, RuntimeError, OSError) as error:
        answer = {"cause": cause_of(error)}
    print(f"\n{_MARK}{json.dumps(answer)}", flush=True)


def require_gds(directory: Path) -> str:
    """What proves that GPUDirect Storage works in the directory.

    Raises `TransportUnavailableError` with the cause unless the nvidia-fs driver counted reads and writes of a probe.
    """
    device = device_or_cpu()
    cause = "torch sees no CUDA device" if device.type == "cpu" else no_gds_driver()
    if not cause:
        probe = probe_cufile(directory, device.index)
        if probe.mode == "gds":
            return probe.reason
        cause = probe.reason
    raise TransportUnavailableError(
        f"--require-gds: GPUDirect Storage is not proven to work in {directory}: {cause}",
        "see gdscache doctor --dir and docs/gds.md",
    )


def cause_of(error: BaseException) -> str:
    """An error in one line."""
    message = error.message if isinstance(error, GdsCacheError) else str(error)
    return " ".join(message.split()) or type(error).__name__
