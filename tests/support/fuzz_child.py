"""Fuzzes targets of fuzz_targets.py, each in a process of its own, forked off this one.

Started by fuzz.py. Reads jobs from its input, a JSON object a line, and answers each with the status of its process.
With atheris, libFuzzer is guided by the branches of the engine's modules. Without it, or for the argument `own`, a loop
mutates a corpus and keeps what reaches new lines. For the arguments `TARGET FILE` that input is tried, and no other.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from tests.support import fuzz_base

UNDER_TEST = (
    *("gdscache.disk", "gdscache.gate.costs", "gdscache.disk.costs_file", "gdscache.gate.fit", "gdscache.mooncake.io"),
    *("gdscache.pages.checksum", "gdscache.pages.keys"),
)
TRACED = tuple(f"/{name.replace('.', '/')}" for name in (*UNDER_TEST, fuzz_base.__name__))
WORDS = (b"\xff" * 8, bytes(8), bytes(7) + b"\x80")
Run = Callable[[bytes], None]


def with_atheris() -> Any:
    """atheris, once the modules under test are imported and tell it where they come; None where it is not there."""
    try:
        atheris = importlib.import_module("atheris")
    except ImportError:
        return None
    with (
        open(os.devnull, "w") as nothing,
        contextlib.redirect_stderr(nothing),  # it says each of their names
        atheris.instrument_imports(include=list(UNDER_TEST), enable_loader_override=False),
    ):
        importlib.import_module("tests.support.fuzz_targets")
    for name, target in fuzz_base.PLANTED.items():
        fuzz_base.PLANTED[name] = target._replace(run=atheris.instrument_func(target.run))
    return atheris


def found_target(name: str) -> fuzz_base.Target:
    if name in fuzz_base.PLANTED:
        return fuzz_base.PLANTED[name]
    targets = importlib.import_module("tests.support.fuzz_targets")
    targets.strict_logs()
    target: fuzz_base.Target = targets.TARGETS[name]
    return target


def fuzz(atheris: Any, job: dict[str, Any]) -> None:
    """Ends with an exception, or with the process, where an input does what none may, which is in `found` then."""
    folder = Path(job["folder"])
    scratch, found, corpus = (folder / name for name in ("scratch", "found", "corpus"))
    for path in (scratch, found, corpus):
        path.mkdir(parents=True, exist_ok=True)
    if "file" not in job:
        log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
    os.environ["TMPDIR"] = str(scratch)
    target = found_target(job["target"])
    place = scratch / "place"

    def run(data: bytes) -> None:
        place.mkdir()
        try:
            with fuzz_base.watched():
                target.run(data, place)
        except BaseException:
            (found / f"crash-{hashlib.sha256(data).hexdigest()[:20]}").write_bytes(data)
            raise
        finally:
            shutil.rmtree(place)

    run(b"")  # makes what is made once
    if "file" in job:
        run(Path(job["file"]).read_bytes())
        return
    place.mkdir()
    for number, seed in enumerate(target.seeds(place)):
        (corpus / f"seed-{number:03d}").write_bytes(seed[: target.longest])
    shutil.rmtree(place)
    if atheris is None:
        _mutate(run, target, job, corpus, found)
        return
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    options = {
        "max_total_time": job["seconds"],
        "seed": job["seed"],
        "timeout": target.timeout,
        "rss_limit_mb": resident + 2 * (fuzz_base.MEMORY >> 20),
        "max_len": target.longest,
        "len_control": 0,
        "artifact_prefix": f"{found}/",
        "print_final_stats": 1,
    }
    if target.words:
        options["dict"] = f"{folder}/words"
        words = ("".join(f"\\x{byte:02x}" for byte in word) for word in target.words)
        Path(options["dict"]).write_text("".join(f'"{word}"\n' for word in words))
    arguments = [f"-{name}={value}" for name, value in options.items()]
    atheris.Setup([sys.argv[0], *arguments, str(corpus)], run)
    atheris.Fuzz()


def _mutate(run: Run, target: Any, job: dict[str, Any], corpus: Path, found: Path) -> None:
    """What libFuzzer does, simply: mutate an input that reached lines which none before it did."""
    draw = random.Random(job["seed"])
    lines: set[tuple[str, int]] = set()
    kept: list[bytes] = []

    def traced(frame: FrameType, event: str, argument: object) -> Any:
        name = frame.f_code.co_filename
        if not any(part in name for part in TRACED):
            return None
        if event == "line":
            lines.add((name, frame.f_lineno))
        return traced

    def attempt(data: bytes) -> None:
        before = len(lines)
        current = found / f"timeout-{hashlib.sha256(data).hexdigest()[:20]}"
        current.write_bytes(data)
        signal.alarm(target.timeout)  # ends the process, and leaves the input
        sys.settrace(traced)
        try:
            run(data)
        finally:
            sys.settrace(None)
            signal.alarm(0)
            current.unlink()
        if len(lines) > before:
            kept.append(data)
            (corpus / hashlib.sha256(data).hexdigest()[:20]).write_bytes(data)

    runs, end = 0, time.monotonic() + job["seconds"]
    for seed in [b"", *(path.read_bytes() for path in sorted(corpus.iterdir()))]:
        attempt(seed)
    while time.monotonic() < end:
        runs += 1
        attempt(_mutated(draw, kept, target.words or WORDS)[: target.longest])
    print(f"#{runs} DONE cov: {len(lines)} corp: {len(kept)}")


def _mutated(draw: random.Random, kept: list[bytes], words: Sequence[bytes]) -> bytes:
    data = bytearray(draw.choice(kept))
    for _ in range(draw.choice((1, 1, 2, 4))):
        at = draw.randrange(len(data) + 1)
        match draw.randrange(6):
            case 0:
                data[at : at + 1] = draw.randbytes(1)
            case 1:
                data[at:at] = draw.randbytes(draw.choice((1, 2, 4, 8)))
            case 2:
                del data[at : at + draw.choice((1, 2, 4, 16))]
            case 3:
                data[at : at + 8] = draw.choice(WORDS)
            case 4:
                other = draw.choice(kept)
                data[at:] = other[draw.randrange(len(other) + 1) :]
            case _:
                data[at:at] = draw.choice(words)
    return bytes(data)


def main() -> None:
    if len(sys.argv) == 3:
        with tempfile.TemporaryDirectory() as folder:
            fuzz(None, {"target": sys.argv[1], "file": sys.argv[2], "folder": folder})
        return
    atheris = None if "own" in sys.argv else with_atheris()
    print(json.dumps({"guided": atheris is not None}), flush=True)
    for line in sys.stdin:
        child = os.fork()
        if not child:
            status = 1
            try:
                fuzz(atheris, json.loads(line))
                status = 0
            except BaseException:  # noqa: BLE001
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        _, ended = os.waitpid(child, 0)
        print(json.dumps({"status": os.waitstatus_to_exitcode(ended)}), flush=True)


if __name__ == "__main__":
    main()
