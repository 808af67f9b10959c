"""Opens directories while reads and writes of them fail, under `io_shim.c`. Prints one JSON object a line.

Started by test_open_faults.py: the shim, a directory to work in, what to do.
"""

from __future__ import annotations

import ctypes
import json
import logging
import shutil
import sys
from pathlib import Path
from typing import Any

import gdscache.errors
from gdscache.errors import GdsCacheError
from tests.support.helpers import PACKED, Host, make_config, prompt

PROMPTS = [prompt(seed, 3) for seed in range(4)]
PAGES = 12


class Shim:
    """The faults of this process; see io_shim.c."""

    def __init__(self, path: str) -> None:
        self._library = ctypes.CDLL(path)

    def _long(self, name: str) -> Any:
        return ctypes.c_long.in_dll(self._library, name)

    def arm(self, directory: Path, kinds: str, *, at: int = 0, share: int = 0, seed: int = 0, errno: int = 5) -> None:
        for name, value in (("at", at), ("share", share), ("seed", seed), ("calls", 0), ("failed", 0)):
            self._long(f"shim_{name}").value = value
        ctypes.c_int.in_dll(self._library, "shim_errno").value = errno
        (ctypes.c_char * 8).in_dll(self._library, "shim_kinds").value = kinds.encode()
        (ctypes.c_char * 4096).in_dll(self._library, "shim_dir").value = str(directory).encode()

    def disarm(self) -> tuple[int, int]:
        """Calls that were looked at, and those that failed."""
        (ctypes.c_char * 4096).in_dll(self._library, "shim_dir").value = b""
        return self._long("shim_calls").value, self._long("shim_failed").value


def config(path: Path, pack: str = "off") -> dict[str, Any]:
    """With packing, a sixteenth of the SSD holds the pages that do not fit."""
    return make_config(path, ssd=16, cpu=4) if pack == "off" else make_config(path, ssd=128, cpu=4, model=PACKED)


def attempt(shim: Shim, template: Path, work: Path, kinds: str, pack: str = "off", **fault: int) -> dict[str, Any]:
    """Open a copy of a directory under faults, then without any: what came of it."""
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(template, work)
    error, host = "", None
    shim.arm(work, kinds, **fault)
    try:
        host = Host(config(work, pack), 32)
    except GdsCacheError as caught:
        error = type(caught).__name__ if hasattr(gdscache.errors, type(caught).__name__) else "not public"
    except BaseException as caught:  # noqa: BLE001 - what is not the engine's own is what the test looks for
        error = f"unnamed: {caught!r}"
    calls, failed = shim.disarm()
    if host is not None:
        host.engine.close()
    aside = len(list(work.glob("catalog.corrupt-*")))
    host = Host(config(work, pack), 32)
    served = sum(host.load(tokens).tokens for tokens in PROMPTS) // 4
    problems = list(host.engine.check().problems)
    host.engine.close()
    said = {"calls": calls, "failed": failed, "error": error, "aside": aside, "served": served, "problems": problems}
    return {"template": template.name, "kinds": kinds, **fault, **said}


def main() -> None:
    logging.disable(logging.CRITICAL)
    shim, work = Shim(sys.argv[1]), Path(sys.argv[2])
    for job in json.loads(sys.argv[3]):
        template = Path(job.pop("template"))
        first = job.pop("first", None)
        if first is None:
            print(json.dumps(attempt(shim, template, work, **job)), flush=True)
            continue
        step, at = job.pop("step"), first
        while True:  # every `step`th call, until the open has fewer
            found = attempt(shim, template, work, at=at, **job)
            print(json.dumps(found), flush=True)
            if found["calls"] < at:
                break
            at += step


if __name__ == "__main__":
    main()
