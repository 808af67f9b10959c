"""The linker's parts on several ranks without SGLang: what its scheduler processes do in step is done here in turn, and
its reductions by hand. Each rank has blocks of its own, and a part of each page's bytes."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gdscache import CacheEngine, Rank
from gdscache.config import Config
from gdscache.integrations.settings import Rows, planes_section
from gdscache.integrations.sglang.linker_ranks import LinkerRanks
from gdscache.integrations.sglang.loads import STOPPED_S, LoadTable, RankTable
from gdscache.integrations.sglang.moves import LayerLoads, Offloads
from gdscache.integrations.sglang.pages import PageLinks
from gdscache.integrations.sglang.planes import PoolPlanes
from gdscache.integrations.sglang.served import SinglePool
from tests.support.helpers import until

LAYERS, BLOCKS, TOKENS, WIDTH = 2, 48, 4, 16
EXTENT = 4096  # bytes: a page of a rank


def keys_of(tokens: Sequence[int]) -> list[str]:
    """A page a token here: each key names all tokens up to it."""
    return [hashlib.sha256(repr([*tokens[: end + 1]]).encode()).hexdigest() for end in range(len(tokens))]


class Process:
    def __init__(self, number: int, shard: int) -> None:
        self.number, self.shard = number, shard
        self.planes = [(torch.zeros((BLOCKS, TOKENS, WIDTH), dtype=torch.uint8),) for _ in range(LAYERS)]
        self.rank = Rank(self.planes, number, shard=shard)
        self.counts: Counter[str] = Counter()
        self.free = [*range(BLOCKS)]
        random.Random(number).shuffle(self.free)

    def open(self, engine: CacheEngine | None, table: RankTable) -> None:
        self.table = table
        self.loads = LinkerRanks(PoolPlanes(self.planes, {}, []), [self.rank])
        self.leading = self.loads.leading = engine and SinglePool(engine, 60 + STOPPED_S, ranked=True)
        self.offloads = Offloads(self.leading, self.counts, self.loads)
        self.layers = LayerLoads(self.loads.begin, LAYERS, self.counts)

    def bytes_of(self, keys: Sequence[str], layer: int) -> np.ndarray[Any, Any]:
        """The byte that fills the part of each page in a layer."""
        named = [f"{key} {layer} {self.shard}".encode() for key in keys]
        found = b"".join(hashlib.blake2b(name, digest_size=1).digest() for name in named)
        return np.frombuffer(found, np.uint8).reshape(-1, 1, 1)

    def compute(self, keys: Sequence[str], blocks: Sequence[int]) -> None:
        assert len(keys) == len(blocks)
        for layer, (plane,) in enumerate(self.planes):
            plane.numpy()[[*blocks]] = self.bytes_of(keys, layer)

    def check(self, keys: Sequence[str], blocks: Sequence[int]) -> None:
        assert len(keys) == len(blocks)
        for layer, (plane,) in enumerate(self.planes):
            right = plane.numpy()[[*blocks]] == self.bytes_of(keys, layer)
            assert right.all(), f"rank {self.number} has a wrong byte"


class Ranks:
    """All of them; the first leads. `shards`: of each rank."""

    def __init__(self, path: Path, shards: Sequence[int], *, cpu: int = 64, ssd: int = 128, **config: Any) -> None:
        """`cpu`, `ssd`: pages."""
        self.of = [Process(number, shard) for number, shard in enumerate(shards)]
        parts = 1 + max(shards)
        model = planes_section([{"latent": Rows(WIDTH)}] * LAYERS, TOKENS)
        sections = {
            "model": {"name": "tiny", "weights": "w", **model},
            "cpu": {"capacity": cpu * parts * EXTENT},
            "ssd": {"path": str(path), "capacity": ssd * parts * EXTENT, "transport": "posix", "threads": 1},
            "host_buffer": 8 * parts * EXTENT,
            "deadline": 20,
            **config,
        }
        self.engine = CacheEngine(Config.from_dict(sections), ranks=[one.rank.address for one in self.of])
        self.cache, self.links, self.counts = (
            SinglePool(self.engine, 60 + STOPPED_S, ranked=True),
            PageLinks(),
            Counter[str](),
        )
        self.alone = True
        table = LoadTable(self.cache, self.links, wait=5.0, alone=lambda: self.alone, ranked=True, counts=self.counts)
        for number, one in enumerate(self.of):
            one.open(None if number else self.engine, RankTable(one.counts) if number else table)
        self.table = table
        self.reading: list[list[list[int]]] = []  # of each offload: blocks, rank by rank

    def lookup(self, rid: str, keys: Sequence[str]) -> int:
        """The other ranks answer every length."""
        return self.table.lookup(rid, keys)

    def take(self, count: int) -> list[list[int]]:
        """Blocks, rank by rank, as soon as there are so many that no offload reads."""
        until(lambda: self.poll() or len(self.of[0].free) >= count, "blocks are free")
        taken = [one.free[:count] for one in self.of]
        for one in self.of:
            del one.free[:count]
        return taken

    def give(self, blocks: Sequence[Sequence[int]]) -> None:
        for one, some in zip(self.of, blocks, strict=True):
            one.free += some

    def load(self, rid: str, keys: Sequence[str]) -> list[list[int]]:
        """Queue a load on every rank, into these blocks."""
        blocks = self.take(len(keys))
        answers = [
            one.table.load(rid, keys, lambda b=b: lambda: {"kv": b}) for one, b in zip(self.of, blocks, strict=True)
        ]
        assert answers == [True] * len(self.of)
        return blocks

    def start(self) -> int:
        """Of a batch: the same number on every rank."""
        numbers = set()
        for one in self.of:
            queued = one.table.take()
            number = one.layers.queue(queued)
            one.loads.order(number, queued)
            numbers.add(number)
        (number,) = numbers
        return number

    def run(self, number: int) -> list[bool]:
        """The forward pass of a batch; whether it had all pages, rank by rank."""
        for one in self.of:
            one.layers.set_consumer(number)
        for one in self.of:
            for layer in range(LAYERS):
                one.layers.wait_until(layer)
        return [one.layers.finish(number) for one in self.of]

    def offload(self, keys: Sequence[str], blocks: Sequence[Sequence[int]]) -> None:
        for one, its in zip(self.of, blocks, strict=True):
            one.table.computed(keys)
            hashes = keys if one.number else self.links.named(keys)
            one.offloads.start(hashes, lambda b=its: {"kv": b}, self.cache.salt, None)
        self.reading.append([[*its] for its in blocks])

    def poll(self) -> None:
        """Offloads that are over on all ranks: their blocks are free."""
        for _ in range(min(one.offloads.completed() for one in self.of)):
            assert len({one.offloads.pop() for one in self.of}) == 1
            self.give(self.reading.pop(0))

    def settle(self) -> None:
        until(lambda: self.poll() or not self.reading, "offloads complete")

    def reset(self) -> None:
        for one in self.of:  # the leader first: in processes of their own they wait for it
            one.table.reset()
            one.layers.reset()
            one.offloads.wait()
            one.loads.reset(one.layers.take_number())
            one.offloads.forget()
        for blocks in self.reading:
            self.give(blocks)
        self.reading.clear()

    def close(self) -> None:
        for one in self.of:
            one.table.reset()
            one.offloads.close()
        self.engine.close()
        for one in self.of:
            one.rank.close()
