"""Processes that end without `close()`, in every way: what was accepted is kept, the directory is whole and free."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from gdscache import CacheEngine
from tests.support.exit_child import PAGES
from tests.support.helpers import PACKED, WAIT, Host, make_config, prompt, settle
from tests.support.places import ROOT, SUPPORT
from tests.support.processes import ONE_THREAD, Child

POLICIES = ["write_through", "write_back", "write_through_selective", "never"]
KINDS = {  # what the process does, and how it ends
    "return": 0,
    "local": 0,
    "sys.exit": 3 << 8,
    "exception": 1 << 8,
    "interrupt": signal.SIGINT,
    "dropped": 0,
    "cycle": 0,
    "daemon": 0,
    "closed": 0,
    "os._exit": 4 << 8,
    "SIGTERM": signal.SIGTERM,
}
ABRUPT = {"os._exit", "SIGTERM"}  # what was not written by then is lost
STORED = [1, 2, 3]


class Warm:
    """A process that forks others (exit_child.py)."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(SUPPORT / "exit_child.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | ONE_THREAD | {"PYTHONPATH": str(ROOT)},
        )

    def run(self, config: dict[str, Any], kind: str, stderr: Path) -> tuple[int, str]:
        job = {"config": config, "kind": kind, "stored": STORED, "stderr": str(stderr)}
        print(json.dumps(job), file=self.process.stdin, flush=True)
        return int(self.process.stdout.readline()), stderr.read_text()


@pytest.fixture(scope="module")
def warm() -> Iterator[Warm]:
    one = Warm()
    with one.process as process:
        yield one
        process.stdin.close()
        assert process.wait(WAIT) == 0


def _found(config: dict[str, Any]) -> list[int]:
    """Open the directory again: nobody has it, it is whole; how many good pages of each prompt there are."""
    host = Host(config)
    with host.engine as engine:
        assert engine.check().problems == ()
        assert engine.stats()["tiers"]["ssd"]["lost_at_recovery"] == {}
        found = [host.load(prompt(number, PAGES)).tokens // 4 for number in STORED]
        settle(engine)
    return found


def _config(path: Path, policy: str, pack: str = "off") -> dict[str, Any]:
    """With packing, a sixteenth of the tiers holds the pages that do not fit."""
    pages = {"cpu": 20, "ssd": 40} if pack == "off" else {"cpu": 128, "ssd": 128, "bounce": 64, "model": PACKED}
    return make_config(path, **pages, store={"write_policy": policy})


# Ends that differ most, in `make test`; the others in the suite.
FEW = [("return", "write_back"), ("sys.exit", "write_through"), ("cycle", "write_back"), ("SIGTERM", "write_through")]
EVERY = [
    pytest.param(kind, policy, "off", marks=[] if (kind, policy) in FEW else [pytest.mark.suite])
    for kind in KINDS
    for policy in POLICIES
] + [pytest.param(*one, "on", marks=[pytest.mark.suite]) for one in (("return", "write_back"), FEW[-1])]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("kind", "policy", "pack"), EVERY)
def test_a_process_that_ends_without_close_keeps_what_was_accepted(
    slab: Path, tmp_path: Path, warm: Warm, kind: str, policy: str, pack: str
) -> None:
    config = _config(slab, policy, pack)
    status, said = warm.run(config, kind, tmp_path / "stderr")
    assert status == KINDS[kind], said
    assert said.count("Traceback") == (kind in ("exception", "interrupt")), said
    assert "Exception ignored" not in said
    assert "gdscache/" not in said.replace(str(ROOT / "tests"), ""), said
    found = _found(config)
    if policy in ("write_through", "write_back") and kind not in ABRUPT:
        assert found == [PAGES] * len(STORED)
    elif policy in ("never", "write_through_selective"):
        assert found == [0] * len(STORED)


def serve_and_return(pipe: Connection, config: dict[str, Any]) -> None:
    """A process of multiprocessing that ends as it likes; `atexit` knows nothing of it."""
    host = Host(config)
    for number in STORED:
        tokens = prompt(number, PAGES)
        host.engine.store(tokens, host.compute(tokens)).release_event.synchronize(WAIT)
    pipe.send("stored")
    globals()["kept"] = host


@pytest.mark.suite
@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_a_process_of_multiprocessing_keeps_what_was_accepted(slab: Path, policy: str) -> None:
    config = _config(slab, policy)
    with Child(serve_and_return, config) as child:
        assert child.receive() == "stored"
        child.end()
    assert _found(config) == [PAGES] * len(STORED)


def test_an_engine_that_is_dropped_can_be_opened_again_at_once(slab: Path) -> None:
    config = _config(slab, "write_through")
    engine = CacheEngine.from_config(config)
    with pytest.warns(ResourceWarning, match="without close"):
        del engine
    CacheEngine.from_config(config).close()
