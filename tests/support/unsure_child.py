"""Commits of which nobody knows whether they are on the disk: syncs of the catalogue's log fail. Run under `io_shim.c`.

Started by test_unsure_commits.py: the shim, a directory to work in. Prints one JSON object.
"""

from __future__ import annotations

import json
import logging
import shutil
import sys
from pathlib import Path

from tests.support.helpers import Host, make_config, prompt
from tests.support.io_child import Shim

FIRST, SECOND, BEFORE = prompt(1, 4), prompt(2, 4), prompt(3, 1)
SLOTS = 8  # both have no room beside each other


def opened(path: Path, *, new: bool = False) -> Host:
    """`new`: a page is there, so that the log has begun and the namespace is known."""
    host = Host(make_config(path, ssd=SLOTS, ssd_options={"durability": "power"}), 32)
    if new:
        host.store(BEFORE).result(20)
    return host


def refused(shim: Shim, host: Host, path: Path, *prompts: list[int]) -> list[str]:
    """Why pages are dropped that are stored while no sync of the log succeeds (the first), or no write (the others)."""
    causes = []
    for kinds, tokens in zip("sww", prompts, strict=False):
        shim.arm(path / "catalog.sqlite", kinds, share=1_000_000)
        causes += host.store(tokens).result(20).dropped.values()
        shim.disarm()
    return causes


def found(path: Path, *, copied: bool = False) -> dict[str, list[str]]:
    """What is served there of both; `copied`: as a kill would leave it now."""
    place = path.with_name(f"{path.name}-killed") if copied else path
    if copied:
        shutil.copytree(path, place)
    host = opened(place)
    served = {name: [s.value for s in host.load(some).pages] for name, some in (("first", FIRST), ("second", SECOND))}
    assert not host.engine.check().problems
    host.engine.close()
    return served


def main() -> None:
    logging.disable(logging.CRITICAL)
    shim, work = Shim(sys.argv[1]), Path(sys.argv[2])
    said: dict[str, object] = {}

    host = opened(work / "reused", new=True)
    said["causes"] = refused(shim, host, work / "reused", FIRST, SECOND)
    said["reused, killed"] = found(work / "reused", copied=True)
    shim.arm(work / "reused" / "catalog.sqlite", "s", share=1_000_000)
    host.engine.close()
    shim.disarm()
    said["reused, closed"] = found(work / "reused")

    host = opened(work / "cleared", new=True)
    shim.arm(work / "cleared" / "catalog.sqlite", "s", share=1_000_000)
    host.store(FIRST).result(20)
    said["unsure, killed"] = found(work / "cleared", copied=True)
    shutil.rmtree(work / "cleared-killed")
    shim.disarm()
    host.engine.invalidate(host.engine.namespace())
    said["cleared, killed"] = found(work / "cleared", copied=True)
    host.engine.close()
    said["cleared, closed"] = found(work / "cleared")

    host = opened(work / "over", new=True)
    refused(shim, host, work / "over", FIRST, SECOND)
    said["over"] = [host.store(SECOND).result(20).dropped == {} for _ in range(2)]
    said["over, killed"] = found(work / "over", copied=True)
    host.engine.close()
    print(json.dumps(said))


if __name__ == "__main__":
    main()
