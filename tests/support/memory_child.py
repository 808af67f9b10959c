"""Uses an engine while allocations of the native library fail, under memory_shim.c. Prints one JSON object a line.

Started by test_no_memory.py: the shim, a directory, a transport, whether pages are packed (on, off), at how many
allocations to begin, and a seed. First none fails; then, from each of these on, one or a hundred do. Each is tried in a
process of its own, which may crash.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import random
import select
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gdscache.errors import GdsCacheError
from tests.support.helpers import PACKED, Host, make_config, on_ssd, prompt

PAGES = 4
LONGEST_S = 30.0


def aim(shim: Any) -> None:
    """Tell the shim where the library's code lies in this process: its allocations are those that fail."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if "gdscache/_native" in line]
    ends = [[int(word, 16) for word in fields[0].split("-")] for fields in lines]
    ctypes.c_void_p.in_dll(shim, "shim_low").value = min(low for low, _ in ends)
    ctypes.c_void_p.in_dll(shim, "shim_high").value = max(high for _, high in ends)


def config(work: Path, pack: str, **more: Any) -> dict[str, Any]:
    if pack == "on":  # eight slots, which are a sixteenth, for pages that do not fit
        return make_config(work, model=PACKED, cpu=128, ssd=128, bounce=128, **more)
    return make_config(work, cpu=6, ssd=16, **more)


def use(work: Path, transport: str, pack: str) -> tuple[list[str], dict[int, int]]:
    """What went wrong that must not: errors of nobody's, waits without end. And how many pages of each prompt the SSD
    has for certain."""
    wrong, kept, host = list[str](), dict[int, int](), None

    def tried(what: str, call: Callable[[], Any]) -> Any:
        began = time.monotonic()
        try:
            return call()
        except (GdsCacheError, MemoryError):
            return None
        except BaseException as error:  # noqa: BLE001 - it is what the test looks for
            wrong.append(f"{what}: {error!r}"[:200])
            return None
        finally:
            if time.monotonic() - began > LONGEST_S / 2:
                wrong.append(f"{what} took {time.monotonic() - began:.0f} s")

    host = tried("open", lambda: Host(config(work, pack, transport=transport, deadline=3), 32))
    if host is None:
        return wrong, kept
    for seed in range(2):
        tokens = prompt(seed, PAGES)
        report = tried("store", lambda tokens=tokens: host.store(tokens).result(10))
        there = [on_ssd(tiers) for tiers in (report.tiers if report else ())]
        kept[seed] = [*there, False].index(False)
        tried("load", lambda tokens=tokens: host.load(tokens))  # compares the bytes
        tried("prefetch", lambda tokens=tokens: host.engine.prefetch(tokens).result(10))
    tried("check", lambda: host.engine.check())
    tried("close", host.engine.close)
    return wrong, kept


def attempt(shim: Any, work: Path, transport: str, pack: str, first: int, count: int) -> dict[str, Any]:
    """Behind a fork."""
    aim(shim)
    for name, value in (("count", count), ("seen", 0), ("failed", 0), ("first", first)):
        ctypes.c_long.in_dll(shim, f"shim_{name}").value = value
    wrong, kept = use(work, transport, pack)
    ctypes.c_long.in_dll(shim, "shim_first").value = 0
    seen, failed = (ctypes.c_long.in_dll(shim, f"shim_{name}").value for name in ("seen", "failed"))
    host = Host(config(work, pack), 32)  # the fault is over
    for seed in range(2):
        if host.load(prompt(seed, PAGES)).tokens < 4 * kept.get(seed, 0):
            wrong.append("what was stored is lost")
        host.store(prompt(10 + seed, PAGES)).result(10)
        host.engine.drain(10)
        if host.load(prompt(10 + seed, PAGES)).tokens != 4 * PAGES:
            wrong.append("what is stored behind the fault is not found")
    wrong += host.engine.check().problems
    host.engine.close()
    return {"seen": seen, "failed": failed, "wrong": wrong}


def forked(shim: Any, work: Path, *case: Any) -> dict[str, Any]:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writer, json.dumps(attempt(shim, work, *case)).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as answer:
        ready, _, _ = select.select([answer], [], [], 3 * LONGEST_S)
        said = answer.read() if ready else b""
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    shutil.rmtree(work, ignore_errors=True)
    return json.loads(said) if said else {"wrong": [f"it ended with {os.waitstatus_to_exitcode(status)}"]}


def main() -> None:
    path, place, transport, pack, number, seed = sys.argv[1:]
    logging.disable(logging.CRITICAL)
    shim, points = ctypes.CDLL(path), int(number)
    whole = forked(shim, Path(place, "whole"), transport, pack, 0, 0)
    print(json.dumps(whole), flush=True)
    pairs = [(1 + at * whole["seen"] // points, count) for at in range(points) for count in (1, 100)]
    random.Random(int(seed)).shuffle(pairs)
    for first, count in pairs:
        found = forked(shim, Path(place, f"{first}-{count}"), transport, pack, first, count)
        print(json.dumps({"first": first, "count": count, **found}), flush=True)


if __name__ == "__main__":
    main()
