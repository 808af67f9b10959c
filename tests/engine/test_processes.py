"""Several processes and one directory: ownership and forks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from gdscache import CacheEngine
from gdscache.errors import DirectoryInUseError
from tests.support.helpers import make_config, prompt, run
from tests.support.process_parts import (
    fork_that_closes,
    fork_that_exits,
    try_open,
)
from tests.support.processes import Child

PAGE_TOKENS = 4


# -- ownership ---------------------------------------------------------------------------------------------------------


def _files(slab: Path) -> dict[str, bytes]:
    """What lies in a directory, but for the page that its owner rewrites every second."""
    return {path.name: path.read_bytes() for path in slab.iterdir() if path.name != "status"}


def test_a_refused_process_changes_nothing(slab: Path) -> None:
    config, tokens = make_config(slab), prompt(1, 5)
    with CacheEngine.from_config(config) as engine:
        run(engine, tokens)
        before = _files(slab)
        with Child(try_open, config) as other:
            error = other.receive()
            assert isinstance(error, DirectoryInUseError)
            assert f"process {os.getpid()} " in str(error)
            other.end()
        assert _files(slab) == before
        assert run(engine, tokens) == 4 * PAGE_TOKENS


# -- forks -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", [fork_that_closes, fork_that_exits])
def test_what_a_forked_process_does_at_its_end_does_not_disturb_the_owner(slab: Path, target: Any) -> None:
    config, first, second = make_config(slab), prompt(1, 5), prompt(2, 5)
    with Child(target, config, first, second) as owner:
        assert owner.receive() == 0, "the forked process failed"
        with pytest.raises(DirectoryInUseError, match=f"process {owner.pid} "):
            CacheEngine.from_config(config)
        owner.send("go on")
        assert owner.receive() == (4 * PAGE_TOKENS, 0)
        owner.send("end")
        owner.end()
    with CacheEngine.from_config(config) as engine:
        assert engine.check().problems == ()
        assert engine.stats()["tiers"]["ssd"]["lost_at_recovery"] == {}
        assert run(engine, first) == run(engine, second) == 4 * PAGE_TOKENS
