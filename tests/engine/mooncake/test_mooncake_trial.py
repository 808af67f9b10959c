"""A client is tried in a child before one is made here: making one holds the interpreter's lock."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gdscache.errors import TierUnavailableError
from gdscache.mooncake import client
from gdscache.mooncake.client import MooncakeAddress, mooncake
from tests.support.helpers import raising

PACKAGE = """
import os, sys, time

if "torch" not in sys.modules:
    raise ImportError("libcudart.so.12: cannot open shared object file")

class ReplicateConfig:
    replica_num = 1

class MooncakeDistributedStore:
    def setup(self, *, tenant_id, local_hostname, global_segment_size, metadata_server, **others):
        with open(tenant_id, "a") as file:
            print(os.getpid(), global_segment_size, metadata_server, file=file)
        time.sleep(20 if local_hostname == "hangs" else 0)
        return -600 if local_hostname == "refused" else 0

    def batch_is_exist(self, names):
        return [0] * len(names)
"""


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file with the process, the segment and the metadata server of each client that is made. `tenant`: its path.
    The package's libraries come with torch, as CUDA's do."""
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake" / "__init__.py").touch()
    (tmp_path / "mooncake" / "store.py").write_text(PACKAGE)
    (tmp_path / "torch.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("mooncake", "mooncake.store"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield tmp_path / "made"
    for name in ("mooncake", "mooncake.store"):
        sys.modules.pop(name, None)


def clients(made: Path) -> list[tuple[bool, int, str]]:
    """Whether each was made here, its segment, and its metadata server."""
    rows = [line.split() for line in made.read_text().splitlines()]
    return [(int(process) == os.getpid(), int(segment), metadata) for process, segment, metadata in rows]


def wanted() -> bool:
    return True


@pytest.mark.parametrize(("hostname", "cause"), [("hangs", "no answer within 4 s"), ("refused", "code -600")])
def test_what_fails_in_the_child_is_not_done_here(
    made: Path, monkeypatch: pytest.MonkeyPatch, hostname: str, cause: str
) -> None:
    monkeypatch.setattr(client, "_TRIAL_S", 4.0)
    with pytest.raises(TierUnavailableError, match=cause):
        mooncake(MooncakeAddress("h:1", hostname=hostname, tenant=str(made)), wanted)
    assert [here for here, *_ in clients(made)] == [False]


def test_an_engine_that_closes_meanwhile_makes_none(made: Path) -> None:
    with pytest.raises(TierUnavailableError, match="closed meanwhile"):
        mooncake(MooncakeAddress("h:1", tenant=str(made)), lambda: False)
    assert [here for here, *_ in clients(made)] == [False]


def test_nothing_is_done_here_where_no_child_can_be_made(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "run_child", raising(BlockingIOError("no more processes")))
    with pytest.raises(TierUnavailableError, match="no more processes"):
        mooncake(MooncakeAddress("h:1", tenant=str(made)), wanted)
    assert not made.exists()


def test_what_works_in_the_child_is_done_here(made: Path) -> None:
    """The child leaves no name at a metadata server: nobody would take it away."""
    mooncake(MooncakeAddress("h:1", segment=1 << 30, metadata="http://m", tenant=str(made)), wanted)
    assert clients(made) == [(False, 0, "P2PHANDSHAKE"), (True, 1 << 30, "http://m"), (True, 0, "http://m")]
