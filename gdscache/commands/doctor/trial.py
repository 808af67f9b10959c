"""A transport's trial: some MiB written and read back in the real directory, in a child process with a deadline,
because what moves bytes past the CPU can hang or crash the process that asks it."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import json
import logging
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from gdscache.commands.doctor.facts import Found, TrialFacts
from gdscache.errors import GdsCacheError, StorageError
from gdscache.sizes import MIB, about
from gdscache.storage import IORequest, Op, Transport, open_transport
from gdscache.storage.base import Switch
from gdscache.storage.probe import gds_operations

TRIAL_BYTES = 32 * MIB
REQUEST_BYTES = 1 * MIB
DEADLINE_S = 60.0  # opening may itself wait for two probes of 20 s
FILE_NAME = "trial.bin"

_KILL_WAIT_S = 5.0
_MARK = "trial: "  # of the child's answer: libraries print too
_CODE = "from gdscache.commands.doctor.trial import main; main()"


@dataclasses.dataclass(frozen=True, slots=True)
class Trial:
    """What to try: the arguments of `open_transport`, and the bytes to move (a multiple of 1 MiB)."""

    transport: str
    directory: str
    device: str
    threads: int
    direct_io: Switch
    gds: Switch
    nbytes: int = TRIAL_BYTES


def try_transport(trial: Trial, deadline_s: float = DEADLINE_S) -> Found[TrialFacts]:
    """Run a trial in a child, which is killed after `deadline_s` seconds with all that it started."""
    status, output = run_child(_CODE, [json.dumps(dataclasses.asdict(trial))], deadline_s)
    if status is None:
        hint = "cuFile may spin for ever where the kernel or the container lacks something: set ssd.transport to posix"
        return Found(None, f"no answer within {deadline_s:g} s: killed", hint)
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    answers = [line.removeprefix(_MARK) for line in lines if line.startswith(_MARK)]
    if status != 0 or len(answers) != 1:
        return Found(None, f"{lines[-1] if lines else 'no message'} (exit status {status})")
    answer = json.loads(answers[0])
    if "facts" not in answer:
        return Found(None, answer["cause"], answer["hint"])
    return Found(TrialFacts(**{**answer["facts"], "kinds": tuple(answer["facts"]["kinds"])}))


def run_child(code: str, arguments: Sequence[str], deadline_s: float) -> tuple[int | None, str]:
    """Run Python code in a child with this process's import path: (exit status or None if it was killed, its output).

    The child leads a session of its own, and whatever is left of it at the end is killed.
    """
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")}
    environment["CUFILE_LOGFILE_PATH"] = os.devnull
    environment["PYTHONPATH"] = os.pathsep.join(os.path.abspath(path) for path in sys.path)
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", code, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        status: int | None = None
        try:
            status = process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            _end(process)
        output.seek(0)
        return status, output.read().decode(errors="replace")


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    try:
        process.wait(_KILL_WAIT_S)
    except subprocess.TimeoutExpired:
        logging.getLogger("gdscache.doctor").warning("process %d cannot be killed: it hangs in the kernel", process.pid)


def main() -> None:
    """The child: a trial as JSON in, its facts, or the cause and the hint of its failure, as one line of JSON out."""
    trial = Trial(**json.loads(sys.argv[1]))
    answer: dict[str, Any]
    try:
        answer = {"facts": dataclasses.asdict(carry_out(trial))}
    except GdsCacheError as error:
        answer = {"cause": error.message, "hint": error.hint}
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        hint = f"free {about(trial.nbytes)} there, or set another ssd.path" if full else ""
        answer = {"cause": str(error), "hint": hint}
    print(f"\n{_MARK}{json.dumps(answer)}", flush=True)


def carry_out(trial: Trial) -> TrialFacts:
    """Make `trial.bin` in the directory, write and read it. Raises what the transport raises, `StorageError` where the
    bytes differ, and `OSError` where the file cannot be made. The file stays."""
    reasons = _Reasons()
    logger = logging.getLogger("gdscache.storage")
    level = logger.level
    logger.addHandler(reasons)
    logger.setLevel(logging.INFO)
    try:
        transport = open_transport(
            trial.transport,
            directory=Path(trial.directory),
            device=trial.device,
            threads=trial.threads,
            direct_io=trial.direct_io,
            gds=trial.gds,
        )
    finally:
        logger.removeHandler(reasons)
        logger.setLevel(level)
    with transport:
        return _move(trial, transport, reasons.last.rpartition(f"{trial.directory}: ")[2])


class _Reasons(logging.Handler):
    """Keeps the last line of the storage's log."""

    last = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.last = record.getMessage()


def _move(trial: Trial, transport: Transport, reason: str) -> TrialFacts:
    path = Path(trial.directory, FILE_NAME)
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, trial.nbytes)
    content = os.urandom(trial.nbytes)
    kind: Literal["host", "cuda"] = (
        "cuda" if trial.device.startswith("cuda") and "cuda" in transport.memory_kinds else "host"
    )
    source, target = (_memory(kind, trial.device, trial.nbytes) for _ in range(2))
    _fill(source, content)
    handle = transport.open(path)
    for memory in (source, target):
        transport.register(memory)
    before = gds_operations()
    began = time.perf_counter()
    _carry(transport, Op.WRITE, handle, source)
    transport.flush(handle)
    write_s = time.perf_counter() - began
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    began = time.perf_counter()
    _carry(transport, Op.READ, handle, target)
    read_s = time.perf_counter() - began
    counted = all(new > old for old, new in zip(before, gds_operations(), strict=True))
    direct = transport.direct
    for memory in (source, target):
        transport.deregister(memory)
    _compare("read into memory", _bytes(target), content)
    _compare("in the file", path.read_bytes(), content)
    word = word_for(kind, transport.describe(), counted=counted)
    kinds = tuple(sorted(transport.memory_kinds))
    return TrialFacts(transport.name, kind, word, direct, trial.nbytes, write_s, read_s, reason, kinds)


def word_for(kind: str, described: dict[str, object], *, counted: bool) -> Literal["gds", "compat", "posix"]:
    """`posix` for host memory; `gds` where nvidia-fs `counted` reads and writes meanwhile, unless the transport's
    `describe()` says that it stays off cuFile: then they were somebody else's."""
    if kind == "host":
        return "posix"
    off = described.get("compat") == "on" or described.get("gds") is False
    return "gds" if counted and not off else "compat"


def _memory(kind: str, device: str, nbytes: int) -> memoryview | torch.Tensor:
    if kind == "host":
        return memoryview(mmap.mmap(-1, nbytes))
    torch.cuda.set_device(device)
    return torch.zeros(nbytes, dtype=torch.uint8, device=device)


def _fill(memory: memoryview | torch.Tensor, content: bytes) -> None:
    if isinstance(memory, memoryview):
        memory[:] = content
    else:
        memory.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        torch.cuda.synchronize()


def _bytes(memory: memoryview | torch.Tensor) -> bytes:
    return memory.tobytes() if isinstance(memory, memoryview) else memory.cpu().numpy().tobytes()


def _carry(transport: Transport, op: Op, handle: int, memory: memoryview | torch.Tensor) -> None:
    nbytes = len(memory)
    requests = [IORequest(handle, at, memory[at : at + REQUEST_BYTES]) for at in range(0, nbytes, REQUEST_BYTES)]
    for error in filter(None, transport.submit(op, requests).wait()):
        raise error


def _compare(where: str, found: bytes, wanted: bytes) -> None:
    if found != wanted:
        at = next(at for at, (one, other) in enumerate(itertools.zip_longest(found, wanted)) if one != other)
        raise StorageError(f"the bytes {where} are not those written, from {at} on", "set ssd.transport to posix")
