"""Fuzzes targets of fuzz_targets.py, each in a process of its own, forked off this one.

Started by fuzz.py. Reads jobs from its input, a JSON object a line, and answers each with the status of its process.
libFuzzer, by atheris, is guided by the branches of the engine's modules. For the arguments `TARGET FILE` that input is
tried, and no other.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
import resource
import shutil
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

from tests.support import fuzz_base

UNDER_TEST = (
    *("gdscache.disk", "gdscache.gate.costs", "gdscache.disk.kept", "gdscache.gate.fit", "gdscache.mooncake.tier"),
    *("gdscache.pages.checksum", "gdscache.pages.keys"),
)


def with_atheris() -> Any:
    """atheris, once the modules under test are imported and tell it where they come."""
    atheris = importlib.import_module("atheris")
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


def main() -> None:
    if len(sys.argv) == 3:
        with tempfile.TemporaryDirectory() as folder:
            fuzz(None, {"target": sys.argv[1], "file": sys.argv[2], "folder": folder})
        return
    atheris = with_atheris()
    print(json.dumps({"ready": True}), flush=True)
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
