"""Stands in for an engine's own planes, memories and files where ranks have the bytes."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gdscache.config import SsdConfig
from gdscache.disk.slab import Slab, stretch_slots
from gdscache.errors import IOFailedError, RankLostError
from gdscache.pages.layout import PageLayout
from gdscache.pages.planes import BlockTables
from gdscache.ranks.leader import RankSet
from gdscache.storage import open_transport
from gdscache.storage.base import Descriptors

# by which ranks read and write files: into host memory
open_host_transport = functools.partial(open_transport, device="cpu", direct_io="auto", gds="off")


class RemotePlanes(BlockTables):
    """Planes of the same blocks on every rank."""

    device = torch.device("cpu")  # no bytes are here, and so no stream

    def __init__(self, layout: PageLayout, ranks: RankSet) -> None:
        facts = ranks.links[0].facts
        super().__init__(layout, facts["blocks"], facts["block_tokens"])


class RemoteMemory:
    """A memory with the same slots on every rank. `checksums`: of all shards, uint64 (slots, sums a page)."""

    def __init__(self, layout: PageLayout, capacity: int, ranks: RankSet, space: str, setting: str) -> None:
        """`capacity`: bytes of all shards together."""
        self.layout = layout
        self.slots = capacity // (layout.extent_bytes * layout.shards)
        self.nbytes = capacity
        self.checksums = np.zeros((self.slots, layout.n_sums), np.uint64)
        self._ranks = ranks
        self._space = space
        fields = {"space": space, "slots": self.slots, "setting": setting}
        answers = [answer for shard in range(ranks.shards) for answer in ranks.share(fields, ranks.of_shard(shard))]
        self.pinned = all(answer["pinned"] for answer in answers)

    def bad_slots(self, slots: Sequence[int]) -> dict[int, int]:
        asked = {"space": self._space, "slots": [*slots], "sums": self.checksums[[*slots]]}
        answers = self._ranks.call("bad", asked, self._ranks.owners)
        return {slot: layer for _, answer in answers for slot, layer in answer["bad"]}

    def close(self) -> None:
        """Nothing: the ranks' service frees it."""


class RemoteSlab:
    """The slab of every shard. The first rank of a shard locks, checks and flushes its files. `slab`: of the first
    shard, with the smallest `valid_slots` of all."""

    def __init__(
        self, layout: PageLayout, config: SsdConfig, ranks: RankSet, space: str, flush_s: float, slots: int
    ) -> None:
        """`flush_s`: seconds for a flush of the files."""
        self._ranks, self._flush_s = ranks, flush_s
        self._space = {"space": space}
        fields: dict[str, Any] = {
            "space": space,
            "directories": [str(path) for path in (config.path, *config.stripes)],
            "slots": slots,
            "shards": ranks.shards,
            "threads": max(1, config.threads // ranks.shards),
            "transport": config.transport,
        }
        answers = ranks.call("slab", fields | {"owner": True}, ranks.owners)
        others = [link for link in ranks.links if link not in ranks.owners]
        if others:
            ranks.call("slab", fields | {"owner": False}, others)
        valid = min(answer["valid"] for _, answer in answers)
        first = answers[0][1]
        self._transport = first["transport"]
        files, extent = tuple(map(Path, first["files"])), layout.extent_bytes
        self.slab = Slab(files, extent, slots, valid, stretch_slots(extent))

    def hand_over(self) -> Descriptors:
        return Descriptors((), self.slab.stretch, 0)

    def cut(self) -> None:
        self._ranks.call("cut", self._space, self._ranks.owners)

    def check(self) -> list[str]:
        """See `Slab.check`."""
        answers = self._ranks.call("check", self._space, self._ranks.owners)
        return [problem for _, answer in answers for problem in answer["problems"]]

    def flush(self) -> None:
        """Make ended writes of every shard survive a loss of power. Raises `IOFailedError`, also for a lost rank: a
        commit fails, and its writer goes on."""
        try:
            self._ranks.call("flush", self._space, self._ranks.owners, seconds=self._flush_s)
        except RankLostError as error:
            raise IOFailedError(error.message, error.hint) from error

    def register(self, memory: object) -> None:
        """Nothing: the ranks register their memories."""

    def describe(self) -> dict[str, object]:
        return dict(self._transport)

    def close(self) -> None:
        """Nothing: the ranks' service closes it."""
