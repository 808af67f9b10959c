"""What each of SGLang's ranks keeps, and where; and what they do together when they open."""

from __future__ import annotations

import contextlib
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from gdscache.config import Config
from gdscache.errors import CapacityError, ParallelismUnsupportedError, RankError, ShardsError
from gdscache.integrations.settings import Rows, planes_section
from gdscache.integrations.sglang.ranks import ALONE, RankPlace, storage_group, together
from tests.support.processes import Child


def config(path: Path, **more: Any) -> Config:
    ssd = {"path": str(path / "a"), "stripes": [str(path / "b")], "capacity": "8MiB", **more}
    model = {"name": "tiny", **planes_section([{"latent": Rows(512)}], 4)}
    return Config.from_dict({"model": model, "ssd": ssd, "host_buffer": "4MiB", "store": {"queue": "2MiB"}})


def test_sizes_are_of_all_ranks_together(tmp_path: Path) -> None:
    given = config(tmp_path, endurance="1GiB")
    assert ALONE.part(given) is given
    parts = [RankPlace(rank, 4).part(given) for rank in range(4)]
    for rank, part in enumerate(parts):
        assert part.ssd is not None
        assert part.ssd.path == tmp_path / f"a/rank-{rank}-of-4"
        assert part.ssd.stripes == (tmp_path / f"b/rank-{rank}-of-4",)
        assert (part.ssd.capacity, part.ssd.endurance) == (2 << 20, 256 << 20)
        assert (part.host_buffer, part.store.queue) == (1 << 20, 512 << 10)
        assert part.model == given.model


def test_equal_ranks_have_one_slab(tmp_path: Path) -> None:
    given = config(tmp_path)
    for rank in range(2):
        part = RankPlace(rank, 2, equal=True).part(given)
        assert part.ssd == given.ssd
        assert part.host_buffer == 2 << 20
    assert [RankPlace(rank, 2, equal=True).leads for rank in range(2)] == [True, False]
    assert all(RankPlace(rank, 2).leads for rank in range(2))


def test_a_part_that_is_too_small_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CapacityError, match="rank 0's part"):
        RankPlace(0, 8).part(config(tmp_path, endurance="64KiB"))


def test_names_tell_numbers_of_ranks_apart() -> None:
    """And not ranks: with the same names they evict in the same order."""
    assert ALONE.described() == {}
    assert RankPlace(0, 2).described() == RankPlace(1, 2).described() != RankPlace(0, 4).described() != {}


def test_a_directory_of_another_rank_is_refused(tmp_path: Path) -> None:
    ALONE.claim(tmp_path)
    RankPlace(1, 2, equal=True).claim(tmp_path)
    assert not [*tmp_path.iterdir()]
    for _ in range(2):
        RankPlace(1, 2).claim(tmp_path)
    for other in (RankPlace(0, 2), RankPlace(1, 4)):
        with pytest.raises(ShardsError, match="is of rank '1 of 2', and this is rank"):
            other.claim(tmp_path)


@pytest.mark.parametrize("there", ["catalog.sqlite", "groups-0", "rank-0-of-4"])
def test_a_directory_of_another_number_of_ranks_is_refused(tmp_path: Path, there: str) -> None:
    for place in (ALONE, RankPlace(0, 2), RankPlace(1, 4), RankPlace(1, 2, equal=True)):
        place.refuse_directory(tmp_path / "none")
        place.refuse_directory(tmp_path)
    (tmp_path / there).mkdir()
    (tmp_path / "lost+found").mkdir()
    ranks = 4 if there.startswith("rank") else 1
    for place in (ALONE, RankPlace(0, 2), RankPlace(1, 4), RankPlace(1, 2, equal=True)):
        if (1 if place.equal else place.ranks) == ranks:
            place.refuse_directory(tmp_path)
            continue
        with pytest.raises(ShardsError, match=f"holds pages in {ranks} parts") as raised:
            place.refuse_directory(tmp_path)
        assert "ssd.path" in raised.value.hint


# -- together --------------------------------------------------------------------------------------------------------


def test_other_processes_than_ranks_are_refused() -> None:
    with pytest.raises(ParallelismUnsupportedError, match="1 processes serve a model of tp_size 2"):
        storage_group(RankPlace(0, 2)).__enter__()


def _fails() -> str:
    raise ValueError("mine")


def _rank(line: Connection, folder: str, rank: int) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=2)
    with storage_group(RankPlace(rank, 2)) as group:
        line.send(together(group, lambda: f"rank {rank}"))
        try:
            line.send(together(group, _fails if rank == 1 else lambda: ""))
        except (ValueError, RankError) as error:
            line.send((type(error).__name__, str(error)))
        line.send(together(group, lambda: "on"))
    torch.distributed.destroy_process_group()


def test_what_fails_on_one_rank_fails_on_all_and_leaves_none_waiting(tmp_path: Path) -> None:
    with contextlib.ExitStack() as ends:
        ranks = [ends.enter_context(Child(_rank, str(tmp_path), rank)) for rank in range(2)]
        told = [[rank.receive() for _ in range(3)] for rank in ranks]
    assert [some[0] for some in told] == [["rank 0", "rank 1"]] * 2
    assert [some[1][0] for some in told] == ["RankError", "ValueError"]
    assert "rank 1 cannot be opened: ValueError('mine')" in told[0][1][1]
    assert [some[2] for some in told] == [["on"] * 2] * 2
