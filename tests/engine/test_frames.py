"""How deep calls are: functions of Python between a public call and the native library, or what it asks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType

import pytest

import gdscache
from gdscache.moves.native import NativeMoves
from tests.support.helpers import WAIT, OpenHost, drop_from, prompt

PACKAGE = str(Path(gdscache.__file__).parent)


def deepest(call: Callable[[], object], of: CodeType | None = None) -> list[str]:
    """The functions of gdscache above each other where most are, or where `of` begins."""
    found: list[str] = []

    def look(frame: FrameType, event: str, argument: object) -> None:
        nonlocal found
        if event == "call" and (of is None or frame.f_code is of):
            frames, at = [], frame if frame.f_code.co_filename.startswith(PACKAGE) else None
            while at is not None:
                if at.f_code.co_filename.startswith(PACKAGE):
                    frames.append(at.f_code.co_qualname)
                at = at.f_back
            found = max(found, frames, key=len)

    sys.setprofile(look)
    try:
        call()
    finally:
        sys.setprofile(None)
    assert found, "nothing is called"
    return found[::-1]


@pytest.mark.parametrize("tier", ["cpu", "ssd"])
def test_a_load_is_ten_functions_from_the_library_and_a_lookup_eight_deep(open_host: OpenHost, tier: str) -> None:
    host = open_host(cpu=16, ssd=40)
    host.keep(prompt(1, 8))
    if tier == "ssd":
        drop_from(host.engine, "cpu")
    begin = NativeMoves.start.__code__
    for _ in range(2):  # the second time the pages are known
        frames = deepest(lambda: host.engine.lookup(prompt(1, 8)))
        assert len(frames) <= 8, frames
    hit, blocks = host.engine.lookup(prompt(1, 8)), host.take(8)
    frames = deepest(lambda: host.engine.load(hit, blocks).result(WAIT), begin)
    assert len(frames) <= 10, frames
    assert frames[0] == "CacheEngine.load"
