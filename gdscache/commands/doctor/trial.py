"""A transport's trial: a child process with a deadline writes and reads back some MiB in the real directory."""

from __future__ import annotations

import dataclasses
import errno
import json
from pathlib import Path
from typing import Any, Literal

from gdscache.commands.doctor.report import Found
from gdscache.errors import GdsCacheError
from gdscache.sizes import MIB, about
from gdscache.storage import choose_and_open
from gdscache.storage.base import Switch
from gdscache.storage.probe import gds_operations, run_child, write_and_read

TRIAL_BYTES = 32 * MIB
DEADLINE_S = 60.0  # opening may wait for two probes of 20 s
FILE_NAME = "trial.bin"
_ANSWER = "answer: "


@dataclasses.dataclass(frozen=True, slots=True)
class Trial:
    """A trial's arguments: those of `open_transport`, and the bytes to move (a multiple of 1 MiB)."""

    transport: str
    directory: str
    device: str
    threads: int
    gds: Switch
    nbytes: int = TRIAL_BYTES


@dataclasses.dataclass(frozen=True, slots=True)
class Moved:
    """A transport wrote `nbytes` and read the same bytes. `seconds`: of the write with its flush, and of the read.
    `word`: `gds` only if nvidia-fs counted these reads and writes, `compat` for GPU memory without that proof, `host`
    for host memory. `reason`: why this transport. `kinds`: its memory kinds."""

    name: str
    memory: Literal["host", "cuda"]
    word: Literal["gds", "compat", "host"]
    direct: bool
    nbytes: int
    write_s: float
    read_s: float
    reason: str
    kinds: tuple[str, ...] = ("host",)


def try_transport(trial: Trial, deadline_s: float = DEADLINE_S) -> Found[Moved]:
    """Run a trial in a child. After `deadline_s` seconds the child and its descendants are killed."""
    fields = json.dumps(dataclasses.asdict(trial))
    code = f"import json; from gdscache.commands.doctor import trial; trial.answer(**json.loads({fields!r}))"
    ended = run_child(code, [], deadline_s)
    answers = [line.removeprefix(_ANSWER) for line in ended.lines if line.startswith(_ANSWER)]
    if ended.cause or len(answers) != 1:
        hint = "cuFile may hang or crash where the kernel or the container lacks something: set ssd.transport to posix"
        return Found(None, ended.cause or "a child process gave no answer", hint)
    moved, cause, hint = json.loads(answers[0])
    return Found(None, cause, hint) if cause else Found(Moved(**moved | {"kinds": tuple(moved["kinds"])}))


def answer(**fields: Any) -> None:
    """In the child: print a trial's result, or the cause and the hint of its error, in one line."""
    moved, cause, hint = None, "", ""
    try:
        moved = dataclasses.asdict(carry_out(Trial(**fields)))
    except GdsCacheError as error:
        cause, hint = error.message, error.hint
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        cause, hint = str(error), f"free {about(fields['nbytes'])} there, or set another ssd.path" if full else ""
    except (RuntimeError, MemoryError) as error:
        cause, hint = str(error) or type(error).__name__, "run it alone to see"
    said = moved, " ".join(cause.split()), hint
    print(f"\n{_ANSWER}{json.dumps(said)}", flush=True)  # libraries print too


def carry_out(trial: Trial) -> Moved:
    """Write and read `trial.bin` in the directory. The file stays. Raises as `open_transport` and `write_and_read`
    do."""
    directory = Path(trial.directory)
    transport, reason = choose_and_open(trial.transport, directory, trial.device, trial.threads, "auto", trial.gds)
    with transport:
        kinds = transport.memory_kinds
        device = trial.device if trial.device.startswith("cuda") and "cuda" in kinds else "cpu"
        before = gds_operations()
        write_s, read_s = write_and_read(transport, directory / FILE_NAME, device, trial.nbytes)
        counted = all(new > old for old, new in zip(before, gds_operations(), strict=True))
        kind: Literal["host", "cuda"] = "host" if device == "cpu" else "cuda"
        word = word_for(kind, transport.describe(), counted=counted)
        direct, nbytes = transport.direct, trial.nbytes
        return Moved(transport.name, kind, word, direct, nbytes, write_s, read_s, reason, tuple(sorted(kinds)))


def word_for(kind: str, described: dict[str, object], *, counted: bool) -> Literal["gds", "compat", "host"]:
    """`host` for host memory. `gds` if nvidia-fs `counted` reads and writes meanwhile, unless the transport's
    `describe()` says that it stays off cuFile: another process did these."""
    if kind == "host":
        return "host"
    off = described.get("compat") == "on" or described.get("gds") is False
    return "gds" if counted and not off else "compat"
