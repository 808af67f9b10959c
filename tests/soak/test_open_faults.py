"""An I/O error at every read and write of an open: an error by its name at most, and the cache is there afterwards.

The calls of the C library are failed in a child process, so that whatever reads and writes does so through them.
"""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.helpers import Host
from tests.support.io_child import PAGES, PROMPTS, config
from tests.support.shims import shim, under

EIO, ENOMEM, ENXIO, ENOSPC = 5, 12, 6, 28


@pytest.fixture(scope="module")
def templates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return made(tmp_path_factory.mktemp("templates"), "off")


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return made(tmp_path_factory.mktemp("packed"), "on")


def made(base: Path, pack: str) -> dict[str, Path]:
    """A directory that was closed, one as a kill leaves it, and one whose catalogue is under suspicion."""
    live, found = base / "live", {name: base / name for name in ("closed", "killed", "suspect")}
    host = Host(config(live, pack), 32)
    for tokens in PROMPTS:
        host.store(tokens).result(20)
    shutil.copytree(live, found["killed"])
    host.engine.close()
    shutil.copytree(live, found["closed"])
    shutil.copytree(live, found["suspect"])
    (found["suspect"] / "catalog.suspect").touch()
    return found


def nothing_is_lost(work: Path, jobs: list[dict[str, Any]]) -> None:
    """Behind opens in a child process under the shim."""
    library = shim("io_shim")
    said = under([library], "io_child.py", library, work, json.dumps(jobs, default=str))
    found = [json.loads(line) for line in said.splitlines()]
    assert any(one["failed"] for one in found), "no call failed: the shim does not reach them"
    for one in found:
        assert not one["error"].startswith(("unnamed", "not public")), one
        assert (one["aside"], one["served"], one["problems"]) == (0, PAGES, []), one


def test_some_errors_of_an_open(templates: dict[str, Path], tmp_path: Path) -> None:
    jobs: list[dict[str, Any]] = [
        {"template": template, "first": first, "step": 29, "kinds": "rws", "errno": EIO}
        for first, template in enumerate(templates.values(), 3)
    ]
    jobs += [
        {"template": templates[name], "kinds": "r", "share": 30_000, "seed": seed}
        for name in ("closed", "killed")
        for seed in range(3)
    ]
    nothing_is_lost(tmp_path / "work", jobs)


@pytest.mark.suite
def test_an_error_at_every_third_read_and_write_of_an_open(
    templates: dict[str, Path], packed: dict[str, Path], tmp_path: Path
) -> None:
    """The short form of the next one, which has each of them. Of packed pages every 31st."""
    every = {"first": 1, "kinds": "rws", "errno": EIO}
    jobs = [every | {"template": path, "step": 3} for path in templates.values()]
    jobs += [every | {"template": path, "step": 31, "pack": "on"} for path in packed.values()]
    nothing_is_lost(tmp_path / "work", jobs)


@pytest.mark.soak
@pytest.mark.parametrize("errno", [EIO, ENXIO, ENOMEM, ENOSPC])
@pytest.mark.parametrize("template", ["closed", "killed", "suspect"])
def test_whole_errors_of_every_kind_at_every_call_and_at_random(
    templates: dict[str, Path], tmp_path: Path, template: str, errno: int
) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    print("seed", seed)
    where = {"template": templates[template], "errno": errno}
    jobs: list[dict[str, Any]] = [where | {"first": 1, "step": 1, "kinds": kinds} for kinds in ("r", "w", "s")]
    for share in (10_000, 30_000, 100_000, 300_000, 900_000):
        jobs += [where | {"kinds": "rws", "share": share, "seed": seed + n} for n in range(40)]
    nothing_is_lost(tmp_path / "work", jobs)
