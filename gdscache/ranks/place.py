"""What an engine of ranks has in place of its own planes, memories and files: the same, of which the ranks have the
bytes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gdscache.config import SsdConfig
from gdscache.disk.slab import Slab, stretch_slots
from gdscache.pages.layout import PageLayout
from gdscache.pages.planes import BlockTables
from gdscache.ranks.leader import RankSet
from gdscache.storage.base import Descriptors

FLUSH_S = 60.0  # that a flush of the files has


class RemotePlanes(BlockTables):
    """Planes of the same blocks on every rank."""

    device = torch.device("cpu")  # nothing of it is here, and so is no stream

    def __init__(self, layout: PageLayout, ranks: RankSet) -> None:
        facts = ranks.links[0].facts
        super().__init__(layout, facts["blocks"], facts["block_tokens"])


class RemoteMemory:
    """A memory of as many slots on every rank: `checksums` are those of all shards, uint64 (slots, sums a page)."""

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
        self.pinned = all(message.fields["pinned"] for _, message in answers)

    def bad_slots(self, slots: Sequence[int]) -> dict[int, int]:
        """Those whose bytes are not what was stored, on some rank; a bad layer of each."""
        asked = {"space": self._space, "slots": [*slots]}
        answers = self._ranks.call("bad", asked, self._ranks.owners, arrays=[self.checksums[[*slots]]])
        return {slot: layer for _, message in answers for slot, layer in message.fields["bad"]}

    def close(self) -> None:
        """They go with the ranks' service."""


class RemoteSlab:
    """The slab of every shard: its files, which the first rank of the shard locks, checks and flushes. `slab`: of the
    first shard, as valid as that of any."""

    def __init__(self, layout: PageLayout, config: SsdConfig, ranks: RankSet, slots: int) -> None:
        self._ranks = ranks
        fields: dict[str, Any] = {
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
        valid = min(message.fields["valid"] for _, message in answers)
        first = answers[0][1].fields
        self._transport = first["transport"]
        files, extent = tuple(map(Path, first["files"])), layout.extent_bytes
        self.slab = Slab(files, extent, slots, valid, stretch_slots(extent))

    def hand_over(self) -> Descriptors:
        """No files: nothing is read or written here."""
        return Descriptors((), self.slab.stretch, 0)

    def check(self) -> tuple[list[str], dict[int, int]]:
        """See `Slab.check`; a file is as short as the shortest of the shards' is."""
        problems, short = list[str](), dict[int, int]()
        for _, message in self._ranks.call("check", {}, self._ranks.owners):
            problems += message.fields["problems"]
            for number, slots in message.fields["short"]:
                short[number] = min(slots, short.get(number, slots))
        return problems, short

    def lengthen(self) -> None:
        self._ranks.call("lengthen", {}, self._ranks.owners)

    def flush(self) -> None:
        """Make ended writes of every shard survive a loss of power. Raises `IOFailedError`, `RankLostError`."""
        self._ranks.call("flush", {}, self._ranks.owners, seconds=FLUSH_S)

    def register(self, memory: object) -> None:
        """The ranks' transports know their memories."""

    def describe(self) -> dict[str, object]:
        return dict(self._transport)

    def close(self) -> None:
        """They go with the ranks' service."""
