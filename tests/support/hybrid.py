"""Hybrid models of a few layers, a host with planes and block tables of its own, and hits by their definition."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gdscache import CacheEngine, HybridEngine, PageHashes, PageStatus
from gdscache.config import Config
from gdscache.config.pools import pool_parts
from gdscache.engine.hybrid_handles import HybridHit, HybridLoad, HybridReport, HybridStoreReport
from gdscache.groups.base import Group
from gdscache.limits import EngineLimits
from tests.support.helpers import (
    SENTINEL,
    SMALL,
    WAIT,
    Bytes,
    expected,
    new_planes,
    prompt,
    quiet,
    read_page,
    untouched,
    write_page,
)

KV: dict[str, Any] = {"name": "tiny", "kv_heads": 4, "head_dim": 32, "dtype": "bfloat16", "page_tokens": 4}
FULL, WINDOW = {"name": "full"}, {"name": "window", "window": 10}
# Groups with planes of their own; in the same planes, also of pages of unequal sizes; both; with a state; windows.
MODELS: dict[str, dict[str, Any]] = {
    "apart": KV | {"layers": 3, "groups": [FULL | {"layers": [1]}, WINDOW | {"layers": [0, 2]}]},
    "together": KV | {"layers": 2, "groups": [FULL | {"layers": [0, 1]}, WINDOW | {"layers": [0, 1]}]},
    "uneven": KV | {"layers": 2, "groups": [FULL | {"layers": [0, 1]}, WINDOW | {"layers": [1, 0], "page_tokens": 8}]},
    "mixed": KV
    | {
        "layers": 4,
        "groups": [
            {"name": "chunk", "layers": [1, 3], "chunk": 16, "page_tokens": 8},
            FULL | {"layers": [0, 2]},
            WINDOW | {"layers": [0, 2]},
        ],
    },
    "state": {
        "name": "tiny",
        "dtype": "bfloat16",
        "page_tokens": 4,
        "layers": 3,
        "planes": [
            {"name": "k", "shape": [4, 32], "layers": [0, 2]},
            {"name": "v", "shape": [4, 32], "layers": [0, 2]},
            {"name": "state", "shape": [700], "dtype": "float32", "layers": [1]},
        ],
        "groups": [
            FULL | {"layers": [0]},
            WINDOW | {"layers": [2]},
            {"name": "state", "state": True, "layers": [1], "page_tokens": 8},
        ],
    },
    "windows": KV | {"layers": 2, "groups": [WINDOW | {"layers": [1]}, {"name": "short", "window": 3, "layers": [0]}]},
}


def hybrid_config(
    path: Path | None,
    model: Mapping[str, Any],
    *,
    device: str = "cpu",
    gpu: int = 16,
    cpu: int | None = 24,
    ssd: int | None = 48,
    bounce: int = 4,
    transport: str = "posix",
    every: int = 16,
    **sections: Any,
) -> dict[str, Any]:
    """A configuration of which each pool gets at least so many pages in each tier, and one pool exactly so many."""
    store = {"window_every": every} | sections.pop("store", {})
    roomy = {"model": model, "store": store, "cpu": {}}
    parts = pool_parts(Config.from_dict(roomy))

    def total(pages: int) -> int:
        return max(math.ceil(pages * part.config.model.layout().extent_bytes / part.share) for part in parts)

    config: dict[str, Any] = {
        "model": dict(model),
        "gpu": {"device": device, "capacity": total(gpu), "staging": total(16)},
        "host_buffer": total(bounce),
        "store": {"queue": total(64)} | store,
        "deadline": WAIT,
    }
    if cpu is not None:
        config["cpu"] = {"capacity": total(cpu)}
    if ssd is not None and path is not None:
        config["ssd"] = {"path": str(path), "capacity": total(ssd), "threads": 2, "transport": transport}
    return config | sections


LOADED = PageStatus.LOADED
PROMPT = prompt(1, 12, extra=1)  # 48 tokens and one more


class HybridHost:
    """An inference engine of our own for a hybrid model. A page's bytes follow from its group and its tokens."""

    def __init__(
        self, config: dict[str, Any], blocks: int = 64, per_page: int = 1, limits: EngineLimits = SMALL
    ) -> None:
        """`blocks`: of each pool's planes, `per_page` of which make a page, but of a state, which is a row."""
        checked = Config.from_dict(config)
        self.planes: list[Any] = [()] * checked.model.layers
        for part in pool_parts(checked):
            layout = part.config.model.layout()
            own = new_planes(layout, blocks, max(1, layout.page_tokens // per_page), config["gpu"]["device"])
            for layer, tensors in zip(part.pool.layers, own, strict=True):
                self.planes[layer] = tensors
        self.engine = HybridEngine.from_config(config, self.planes, limits=limits)
        self.groups = self.engine.groups
        self.pool_of = {self.groups[g].name: p for p, pool in enumerate(self.engine.pools) for g in pool.groups}
        self.free = [list(map(int, np.random.default_rng(7).permutation(blocks))) for _ in self.engine.pools]
        self.content: Callable[[Group, Sequence[int], str], int] = lambda group, tokens, salt: 0

    # -- blocks, and what is in them -----------------------------------------------------------------------------------

    def of(self, name: str) -> tuple[CacheEngine, list[Any]]:
        """The engine of a group, and the planes of its pool."""
        pool = self.pool_of[name]
        return self.engine.engines[pool], [self.planes[layer] for layer in self.engine.pools[pool].layers]

    def per_page(self, name: str) -> int:
        return self.of(name)[0].tables.blocks_per_page

    def take(self, name: str, pages: int) -> list[int]:
        return [self.free[self.pool_of[name]].pop() for _ in range(pages * self.per_page(name))]

    def give(self, slots: Mapping[str, Sequence[int]]) -> None:
        for name, blocks in slots.items():
            taken = [block for block in blocks if block >= 0]
            for tensors in self.of(name)[1]:
                for tensor in tensors:
                    tensor.view(torch.uint8)[taken] = SENTINEL
            self.free[self.pool_of[name]] += taken

    def data(self, group: Group, tokens: Sequence[int], number: int, salt: str) -> Bytes:
        """The bytes of a page: others for another group, prefix or salt, and for another `content`."""
        prefix = list(tokens[: (number + 1) * group.page_tokens])
        named = repr((group.name, prefix, salt, self.content(group, prefix, salt)))
        return expected(self.of(group.name)[0].layout, hashlib.blake2b(named.encode(), digest_size=8).digest())

    def compute(
        self, tokens: Sequence[int], start: int = 0, salt: str = "", gone: Mapping[str, int] | None = None
    ) -> dict[str, list[int]]:
        """Blocks of all full pages from token `start` on with their bytes; -1 for the first `gone[name]` pages."""
        slots: dict[str, list[int]] = {}
        for group in self.groups:
            first, stop = start // group.page_tokens, len(tokens) // group.page_tokens
            engine, planes = self.of(group.name)
            lost = max(first, (gone or {}).get(group.name, 0))
            slots[group.name] = [-1] * (max(0, min(lost, stop) - first) * self.per_page(group.name))
            for number in range(lost, stop):
                blocks = self.take(group.name, 1)
                write_page(planes, engine.layout, blocks, self.data(group, tokens, number, salt))
                slots[group.name] += blocks
        return slots

    # -- requests ------------------------------------------------------------------------------------------------------

    def store(
        self,
        tokens: Sequence[int],
        start: int = 0,
        salt: str = "",
        gone: Mapping[str, int] | None = None,
        named: PageHashes | None = None,
        **options: Any,
    ) -> HybridStoreReport:
        """Compute and store; the slots are used for something else as soon as they were read."""
        slots = self.compute(tokens, start, salt, gone)
        store = self.engine.store(tokens if named is None else named, slots, start, salt, **options)
        store.released(WAIT)
        self.give(slots)
        report = store.result(WAIT)
        self.rest()
        return report

    def rest(self) -> None:
        """Nothing of a store is under way any more."""
        for engine in self.engine.engines:
            quiet(engine)

    def begin(self, hit: HybridHit) -> tuple[HybridLoad, dict[str, list[int]]]:
        slots = {name: self.take(name, len(pages)) for name, pages in hit.pages.items()}
        return self.engine.load(hit, slots), slots

    def finish(
        self, hit: HybridHit, load: HybridLoad, slots: dict[str, list[int]], tokens: Sequence[int], salt: str = ""
    ) -> HybridReport:
        """The verdict; every page that it calls good has its bytes, and no other block was written."""
        for layer in range(len(self.planes)):
            load.wait(layer, WAIT)
        report = load.result(WAIT)
        load.released(WAIT)
        for group in self.groups:
            engine, planes = self.of(group.name)
            statuses, each = report.pages[group.name], self.per_page(group.name)
            assert len(statuses) == len(hit.pages[group.name])
            for row, (number, status) in enumerate(zip(hit.pages[group.name], statuses, strict=True)):
                blocks = slots[group.name][row * each : (row + 1) * each]
                if status.value == "loaded":
                    same = np.array_equal(
                        read_page(planes, engine.layout, blocks), self.data(group, tokens, number, salt)
                    )
                    assert same, f"page {number} of {group.name} has other bytes"
        for pool, free in zip(self.engine.pools, self.free, strict=True):
            assert untouched([self.planes[layer] for layer in pool.layers], free), "a block that nobody named"
        self.give(slots)
        return report

    def load(self, tokens: Sequence[int], start: int = 0, salt: str = "") -> HybridReport:
        hit = self.engine.lookup(tokens, start, salt)
        return self.finish(hit, *self.begin(hit), tokens, salt)

    def found(self, tokens: Sequence[int], start: int = 0, salt: str = "") -> int:
        return self.engine.lookup(tokens, start, salt).tokens

    # -- pages by name -------------------------------------------------------------------------------------------------

    def key(self, name: str, tokens: Sequence[int], number: int, salt: str = "") -> bytes:
        g, (names, _) = [group.name for group in self.groups].index(name), self.engine._request(tokens, salt)
        return names.key(g, number)

    def on_tiers(self, name: str, tokens: Sequence[int], number: int, salt: str = "") -> list[str]:
        key, tiers = self.key(name, tokens, number, salt), self.of(name)[0].manager.tiers
        return [tier for tier in tiers if tiers[tier].index.get(key) is not None]

    def lose(self, name: str, tokens: Sequence[int], numbers: Sequence[int], *tiers: str, salt: str = "") -> None:
        """Drop pages of a group from these tiers, or from all."""
        manager = self.of(name)[0].manager
        for number in numbers:
            key = self.key(name, tokens, number, salt)
            with manager.lock:
                for tier in tiers or manager.tiers:
                    index = manager.tiers[tier].index
                    if (entry := index.get(key)) is not None:
                        index.drop(entry)

    def longest(self, tokens: Sequence[int], start: int = 0, salt: str = "") -> int:
        """The tokens of the longest hit, by what a token attends to, and by every page that a tier has."""
        for length in range(
            len(tokens) // self.engine.alignment * self.engine.alignment, start, -self.engine.alignment
        ):
            if all(
                self.on_tiers(group.name, tokens, number, salt)
                for group in self.groups
                for number in pages_for(group, length, start)
            ):
                return length - start
        return 0


OpenHybrid = Callable[..., HybridHost]


def pages_for(group: Group, length: int, start: int) -> list[int]:
    """The pages that a hit of `length` tokens needs, but for those before `start`: what the next token attends to."""
    if group.keeps == "state":
        return [length // group.page_tokens - 1] if length > start else []
    return sorted({at // group.page_tokens for at in attended(group, length) if at >= start})


def attended(group: Group, token: int) -> range:
    """The tokens before number `token` that it attends to."""
    if group.keeps == "window":
        return range(max(0, token - group.span + 1), token)
    if group.keeps == "chunk":
        return range(token // group.span * group.span, token)
    return range(token)


def drop(host: HybridHost, *tiers: str) -> None:
    """Empty tiers of all pools, as eviction would."""
    for engine in host.engine.engines:
        with engine.manager.lock:
            for tier in tiers:
                if tier in engine.manager.tiers:
                    index = engine.manager.tiers[tier].index
                    index.evict(len(index))


def planes_of(layers: int) -> list[list[torch.Tensor]]:
    return [[torch.zeros(8, 4, 4, 32, dtype=torch.bfloat16)] * 2] * layers
