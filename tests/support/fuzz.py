"""A process that fuzzes, and what it says of each target."""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple, Self

from tests.support.places import ROOT, SUPPORT
from tests.support.processes import ONE_THREAD

STARTS_S, ENDS_S = 120.0, 60.0
MEMORY = Path("/dev/shm")  # a file system in memory: syncs cost nothing there


class Fuzzed(NamedTuple):
    """`failing`: the inputs that did what none may, where they are kept. `log`: the last lines of the process."""

    status: int
    runs: int
    coverage: int
    corpus: int
    failing: list[Path]
    log: str


class Fuzzer:
    """Fuzzes one target after the other. `kept`: a folder for inputs that fail."""

    def __init__(self, kept: Path) -> None:
        self._kept = kept
        self._scratch = Path(tempfile.mkdtemp(prefix="gdscache-fuzz-", dir=MEMORY if MEMORY.is_dir() else None))
        self._process = subprocess.Popen(
            [sys.executable, SUPPORT / "fuzz_child.py"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | ONE_THREAD | {"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "0"},
            start_new_session=True,
        )
        try:
            self._answer(STARTS_S)
        except BaseException:
            self.close()
            raise

    def fuzz(self, target: str, seconds: int, seed: int) -> Fuzzed:
        folder = self._scratch / target
        self._process.stdin.write(
            json.dumps({"target": target, "folder": str(folder), "seconds": seconds, "seed": seed}) + "\n"
        )
        self._process.stdin.flush()
        status = int(self._answer(seconds + ENDS_S)["status"])
        log = (folder / "log").read_text(errors="replace")
        failing = []
        for path in sorted((folder / "found").iterdir()):
            self._kept.mkdir(parents=True, exist_ok=True)
            failing.append(Path(shutil.copy(path, self._kept / f"{target}-{path.name}")))
        done = re.findall(r"^#(\d+)\s+\w+\s+cov: (\d+).*? corp: (\d+)", log, re.MULTILINE)
        runs, coverage, corpus = map(int, done[-1]) if done else (0, 0, 0)
        shutil.rmtree(folder)
        return Fuzzed(status, runs, coverage, corpus, failing, log[-6000:])

    def _answer(self, seconds: float) -> dict[str, Any]:
        ready, _, _ = select.select([self._process.stdout], [], [], seconds)
        assert ready, f"the fuzzing process said nothing for {seconds:.0f} s"
        line = self._process.stdout.readline()
        assert line, f"the fuzzing process ended with status {self._process.wait(ENDS_S)}"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, 9)
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
