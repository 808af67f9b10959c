"""What an engine does on a small file system of its own: run by test_adversity.py in a mount namespace.

`python adversity_child.py SCENARIO MOUNT_POINT on|off`, where `on` packs the pages; the last line it prints is `fine`,
or there is a traceback.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gdscache.errors import DirectoryNotWritableError, GdsCacheError, IOFailedError, NoSpaceError
from tests.support.helpers import PACKED, Host, drop_from, make_config, prompt, quiet, tokens_of

PAGES = 6


PACK = "off"


def open_host(path: Path) -> Host:
    if PACK == "on":  # six slots, which are a sixteenth, for pages that do not fit
        return Host(make_config(path, model=PACKED, cpu=96, ssd=96, bounce=96, ssd_options={"threads": 8}))
    return Host(make_config(path, cpu=8, ssd=12, ssd_options={"threads": 8}))


def stored(host: Host, seed: int) -> int:
    """Store a prompt; the tokens of it that the SSD tier then has."""
    host.keep_on_ssd(prompt(seed, PAGES))
    return tokens_of(host.engine, prompt(seed, PAGES))


def leave(path: Path, free: int) -> Path:
    """Fill a file system up to `free` bytes, as others do."""
    filler = path / "others.bin"
    system = os.statvfs(path)
    with open(filler, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, system.f_bavail * system.f_frsize - free)
    return filler


def full_at_open(mount: Path) -> None:
    filler = leave(mount, 32 << 10)
    with pytest.raises((NoSpaceError, IOFailedError), match=r"free|full") as caught:
        open_host(mount / "cache")
    assert "free" in caught.value.hint
    filler.unlink()
    host = open_host(mount / "cache")
    assert stored(host, 1) == 4 * PAGES
    host.engine.close()


def full_in_use(mount: Path) -> None:
    host = open_host(mount / "cache")
    assert stored(host, 1) == 4 * PAGES
    filler = leave(mount, 0)
    for seed in range(2, 80):  # until the catalogue's log cannot grow; the slab has its blocks
        if stored(host, seed) < 4 * PAGES:
            break
    else:
        raise AssertionError("the disk was never full")
    assert host.load(prompt(seed - 1, PAGES)).tokens == 4 * PAGES
    filler.unlink()
    assert stored(host, 90) == 4 * PAGES
    assert not host.engine.check().problems
    for _ in range(2):
        for kept in (seed - 1, 90):
            assert host.load(prompt(kept, PAGES)).tokens == 4 * PAGES
        host.engine.close()
        host = open_host(mount / "cache")
    host.engine.close()


def read_only(mount: Path) -> None:
    host = open_host(mount / "cache")
    assert stored(host, 1) == 4 * PAGES
    host.engine.close()
    subprocess.run(["mount", "-o", "remount,ro", str(mount)], check=True)
    with pytest.raises(DirectoryNotWritableError, match="Read-only"):
        open_host(mount / "cache")
    subprocess.run(["mount", "-o", "remount,rw", str(mount)], check=True)
    host = open_host(mount / "cache")
    assert host.load(prompt(1, PAGES)).tokens == 4 * PAGES
    host.engine.close()


def few_descriptors(path: Path) -> None:
    """64 are enough for an engine; when there are none, that is an error, and what was open is closed again."""
    torch.ones(1).sum()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
    host = open_host(path / "cache")
    for seed in range(8):
        host.store(prompt(seed, PAGES))
        quiet(host.engine)  # or the next store may be refused: the CPU tier has room for little more than one
    drop_from(host.engine, "cpu")
    for seed in (6, 7):
        assert host.load(prompt(seed, PAGES)).tokens == 4 * PAGES
    host.engine.close()
    before = sorted(os.listdir("/proc/self/fd"))
    taken: list[int] = []
    refused = 0
    try:
        while True:
            taken.append(os.dup(0))
    except OSError:
        pass
    while True:  # one descriptor more each time: every step of opening fails once
        try:
            host = open_host(path / "cache")
            break
        except GdsCacheError:
            refused += 1
            os.close(taken.pop())
    assert refused, "an engine opened without descriptors"
    for seed in (6, 7):
        assert host.load(prompt(seed, PAGES)).tokens == 4 * PAGES
    host.engine.close()
    for descriptor in taken:
        os.close(descriptor)
    assert sorted(os.listdir("/proc/self/fd")) == before


if __name__ == "__main__":
    PACK = sys.argv[3]
    globals()[sys.argv[1]](Path(sys.argv[2]))
    print("fine")
