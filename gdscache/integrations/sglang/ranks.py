"""SGLang's ranks of one host, each with its own storage: their parts, directories and joint steps.

SGLang asks each rank and takes the least answer. Ranks with parts of the heads keep them in their own directories. If
all ranks have the same bytes (MLA), the first one keeps them, and the others read its directory (`BorrowedPages`).
"""

from __future__ import annotations

import contextlib
import datetime
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from gdscache.config import Config
from gdscache.config.pools import POOL_PREFIX, put_below, set_size, shared_sizes
from gdscache.disk.catalog_file import CATALOG_NAME
from gdscache.errors import ParallelismUnsupportedError, RankError, ShardsError
from gdscache.runtime.files import start_empty

_OPEN = datetime.timedelta(minutes=30)  # for all ranks, while files are allocated
_MARK = "rank"  # a file with the owner of a directory
_Made = TypeVar("_Made")
_RANK = re.compile(r"rank-\d+-of-(\d+)")


class RankPlace(NamedTuple):
    """This process's rank. `equal`: all ranks have the same bytes."""

    rank: int = 0
    ranks: int = 1
    equal: bool = False

    @property
    def leads(self) -> bool:
        return self.rank == 0 or not self.equal

    def described(self) -> dict[str, object]:
        """The facts that tell its pages' bytes from those of other numbers of ranks.

        The rank's own number is not among them, since `claim` checks it: with equal names, ranks that evict by
        themselves keep the same pages.
        """
        return {} if self.ranks == 1 else {"ranks": self.ranks}

    def part(self, config: Config) -> Config:
        """The rank's part of a configuration, whose sizes are for all ranks together."""
        if self.ranks == 1:
            return config
        data = config.dump()
        for path, size in shared_sizes(config):
            if path[0] != "ssd" or not self.equal:  # equal ranks share the first one's slab as a whole
                set_size(data, path, size // self.ranks)
        if not self.equal:
            put_below(data, config, f"rank-{self.rank}-of-{self.ranks}")
        return Config.from_dict(data, f"rank {self.rank}'s part, a {self.ranks}th of each size")

    def refuse_directory(self, path: Path) -> None:
        """Raise `ShardsError` if another number of ranks has pages below `path`: they would take room too."""
        names = [entry.name for entry in path.iterdir()] if path.is_dir() else []
        ranks = 1 if self.equal else self.ranks
        found = {int(match[1]) for name in names if (match := _RANK.fullmatch(name))}
        if any(name == CATALOG_NAME or name.startswith(POOL_PREFIX) for name in names):
            found.add(1)
        if others := sorted(found - {ranks}):
            raise ShardsError(
                f"{path} holds pages in {others[0]} parts, one a rank, and this server has {ranks}",
                "use as many GPUs (--tp-size) as wrote it, set another ssd.path for this number of them, or "
                f"{start_empty(path)}",
            )

    def claim(self, path: Path) -> None:
        """Write the rank into its open directory. Raises `ShardsError` if the directory is another rank's."""
        if self.ranks == 1 or self.equal:
            return
        mine, told = f"{self.rank} of {self.ranks}\n", path / _MARK
        if not told.exists():
            told.write_text(mine)
        if (found := told.read_text()) != mine:
            raise ShardsError(
                f"{path} is of rank {found.strip()[:40]!r}, and this is rank {self.rank} of {self.ranks}",
                f"give it its name back, or {start_empty(path)}",
            )


ALONE = RankPlace()


def place_in(group: Any) -> tuple[int, int]:
    """This process's rank in a group of torch.distributed's, and the number of ranks. (0, 1) without a group."""
    if group is None:
        return 0, 1
    return torch.distributed.get_rank(group), torch.distributed.get_world_size(group)


def together(group: Any, work: Callable[[], _Made]) -> list[_Made]:
    """Call `work()` on every rank. Returns all ranks' results.

    If one rank fails, all raise. Every rank enters the one collective, even after a failure.
    """
    _, ranks = place_in(group)
    if ranks == 1:
        return [work()]
    made: _Made | None = None
    error: Exception | None = None
    try:
        made = work()
    except Exception as raised:  # noqa: BLE001 - the other ranks wait for this one's result
        error = raised
    message, hint = getattr(error, "message", repr(error)), getattr(error, "hint", "")
    told: list[Any] = [None] * ranks
    torch.distributed.all_gather_object(told, (made, error and (message, hint)), group=group)
    if error is not None:
        raise error
    for rank, (_, failed) in enumerate(told):
        if failed:
            raise RankError(f"rank {rank} cannot be opened: {failed[0]}", failed[1] or "see its log")
    return [made for made, _ in told]


@contextlib.contextmanager
def storage_group(place: RankPlace) -> Iterator[Any]:
    """A group for the joint start of all ranks' storages, made by all ranks alike; SGLang waits for all of them there
    too. None of a single rank. Raises `ParallelismUnsupportedError` if there are other processes."""
    if place.ranks == 1:
        yield None
        return
    distributed = torch.distributed
    there = distributed.get_world_size() if distributed.is_initialized() else 1
    if there != place.ranks:
        raise ParallelismUnsupportedError(
            f"{there} processes serve a model of tp_size {place.ranks}",
            "set --tp-size alone: the ranks of one host are supported",
        )
    group = distributed.new_group(backend="gloo", timeout=_OPEN)
    try:
        yield group
    finally:
        distributed.destroy_process_group(group)
