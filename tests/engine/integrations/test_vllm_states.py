"""States of hybrid models in vLLM's KV cache: padded to a block there, and stored as they are."""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gdscache.config import Config
from gdscache.config.pools import pool_parts
from gdscache.hybrid import HybridEngine
from gdscache.integrations.group_fetching import GroupCache
from gdscache.integrations.vllm.cache_groups import block_tokens, state_layers
from gdscache.integrations.vllm.facts import model_of
from gdscache.integrations.vllm.groups import GroupStoreOrder, GroupTable
from gdscache.integrations.vllm.planes import VllmPlanes, planes_of
from gdscache.integrations.vllm.session import VllmSession
from gdscache.integrations.vllm.worker import EngineWorker
from tests.support.helpers import WAIT, drop_from, until
from tests.support.vllm_setup import FullAttentionSpec, MambaSpec, setup

BLOCKS = 12


@dataclasses.dataclass(frozen=True)
class Shape:
    """A model as vLLM groups it: layer `i` of each group is at address `i`.

    `states`: layers of each group of states; `full`: of the group of full attention; `content`: bytes of a layer's
    state; `page`: bytes of a block, of `tokens` tokens.
    """

    states: tuple[int, ...]
    full: int
    content: int
    page: int
    tokens: int

    def state_bytes(self, group: int) -> int:
        return self.states[group] * self.content


SHAPES = {
    "LFM2 of the tests": Shape((2,), 2, 1_024, 65_536, 128),
    "Qwen3-Next of the tests": Shape((1, 1, 1), 1, 268_288, 327_680, 640),
    "LFM2-1.2B": Shape((5, 5), 6, 8_192, 262_144, 128),
    "Qwen3-Next-80B-A3B": Shape((12, 12, 12), 12, 2_146_304, 2_162_688, 1056),
    "groups of unequal length": Shape((4, 4, 3), 4, 40_960, 65_536, 16),
}
SMALL = Shape((2, 2, 1), 2, 10_000, 16_384, 16)


class Cache:
    """vLLM's KV cache of a shape, and its configuration objects."""

    def __init__(self, shape: Shape, blocks: int = BLOCKS) -> None:
        self.shape = shape
        self.memory = torch.zeros((max(shape.full, *shape.states), blocks, shape.page), dtype=torch.uint8)
        self.caches: dict[str, torch.Tensor] = {}
        groups: list[Any] = []
        for number, layers in enumerate((*shape.states, shape.full)):
            names = [f"{number}.{layer}" for layer in range(layers)]
            state = number < len(shape.states)
            for at, name in enumerate(names):
                whole = self.memory[at]
                own = (
                    whole[:, : shape.content].view(blocks, 1, 1, -1)
                    if state
                    else whole.view(blocks, 1, shape.tokens, -1)
                )
                self.caches[name] = own
            kind = MambaSpec if state else FullAttentionSpec
            groups.append(SimpleNamespace(layer_names=names, kv_cache_spec=kind(block_size=shape.tokens)))
        self.vllm, self.config = setup(cache__kv_cache_groups=groups, cache__hash_block_size=shape.tokens)

    def planes(self) -> VllmPlanes:
        tokens = block_tokens(self.config)
        return planes_of(self.caches, self.memory.shape[1], tokens, "LBNHC", state_layers(self.config))

    def model(self) -> dict[str, object]:
        return model_of(self.vllm, self.config, self.planes(), "0.33.0", {}) | {"weights": "x"}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_state_takes_its_own_bytes_on_every_tier(shape: Shape) -> None:
    """At most 1.05 times its content, and what fills up 4 KiB. Full attention takes a whole block."""
    roomy = {"gpu": {"capacity": "64GiB", "staging": "8GiB"}, "host_buffer": "8GiB", "store": {"queue": "8GiB"}}
    parts = pool_parts(Config.from_dict({"model": Cache(shape, 2).model(), "cpu": {"capacity": "64GiB"}, **roomy}))
    seen: list[int] = []
    for part in parts:
        layout = part.config.model.layout()
        for g in part.pool.groups:
            if g < len(shape.states):
                content = shape.states[g] * shape.content
                assert layout.page_bytes == content
                assert layout.extent_bytes <= 1.05 * content + 4096
            else:
                assert layout.page_bytes == shape.full * shape.page
        seen += part.pool.groups
    assert sorted(seen) == list(range(len(shape.states) + 1))


class Engine:
    """An engine and a worker over vLLM's KV cache, and a request whose pages are in blocks of their own numbers."""

    def __init__(self, path: Path) -> None:
        self.cache = Cache(SMALL)
        planes = self.cache.planes()
        config = {
            "model": self.cache.model(),
            "cpu": {"capacity": "8MiB"},
            "ssd": {"path": str(path), "capacity": "16MiB", "transport": "posix", "gds": "off", "threads": 2},
            "gpu": {"device": "cpu"},
            "host_buffer": "16MiB",
            "deadline": WAIT,
        }
        self.engine = HybridEngine(Config.from_dict(config), [(tensor,) for tensor in planes.tensors])
        self.session = VllmSession(self.engine, 60.0)
        self.counts = Counter[str]()
        self.worker = EngineWorker(self.session, planes.tensors, self.counts, overlapping=True)
        self.names = GroupCache(self.session, self.engine, SMALL.tokens)

    def close(self) -> None:
        self.worker.close()
        self.session.close()


FULL_BLOCKS, STATE_BLOCKS = (1, 2, 3, 4, 5), (6, 7, 8)  # of a prompt of five blocks, where it is computed
OTHERS = ((8, 7, 6, 5, 4), (3, 2, 1))  # where it is loaded
PROMPT = 5 * SMALL.tokens + 3
UNTOUCHED = 0xAA


def request(name: str) -> Any:
    hashes = [hashlib.sha256(bytes([page])).digest() for page in range(5)]
    return SimpleNamespace(
        request_id=name,
        block_hashes=hashes,
        num_tokens=PROMPT,
        num_prompt_tokens=PROMPT,
        num_computed_tokens=0,
        shared_prefix_boundary=0,
    )


def tables(full: tuple[int, ...], states: tuple[int, ...]) -> tuple[list[int], ...]:
    """As vLLM has them when five blocks are there: of a state the last one alone."""
    return (*([0, 0, 0, 0, state] for state in states), list(full))


def load(engine: Engine, table: GroupTable, name: str) -> None:
    """The prompt comes again, and its hit goes into other blocks, between two steps."""
    engine.cache.memory.fill_(UNTOUCHED)
    asked = request(name)
    table.add(asked)
    until(lambda: table.ask(asked, 0) == (80, True), "its pages come")
    table.place(asked, tables(*OTHERS), 80)
    loads = table.take_loads()
    assert [(order.between, order.pool, len(order.blocks)) for order in loads] == [
        (True, 0, 2),
        (True, 1, 1),
        (True, 2, 5),
    ]
    engine.worker.begin(loads)
    arrived: set[str] = set()

    def comes() -> bool:
        engine.worker.end([], idle=True, last=False)
        arrived.update(engine.worker.loads.take_arrived())
        return bool(arrived)

    until(comes, "it arrives")
    assert (arrived, engine.worker.loads.take_failed()) == ({name}, set())


def test_states_and_blocks_go_and_come_back(tmp_path: Path) -> None:
    """Through the CPU tier, from the SSD, and behind a restart; what lies behind a state in its block is left alone."""
    written = torch.randint(
        0, 256, (2, BLOCKS, SMALL.page), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
    )

    def compare(engine: Engine) -> None:
        memory, content = engine.cache.memory, SMALL.content
        for block, before in zip(OTHERS[0], FULL_BLOCKS, strict=True):
            assert torch.equal(memory[:, block], written[:, before])
        for layers, block, before in zip(SMALL.states, OTHERS[1], STATE_BLOCKS, strict=True):
            assert torch.equal(memory[:layers, block, :content], written[:layers, before, :content])
            assert bool((memory[:layers, block, content:] == UNTOUCHED).all())
            assert bool((memory[layers:, block] == UNTOUCHED).all())

    def opened() -> tuple[Engine, GroupTable]:
        engine = Engine(tmp_path)
        return engine, GroupTable(engine.engine.groups, engine.names, 8192, wait=WAIT)

    engine, table = opened()
    try:
        first = request("first")
        table.add(first)
        assert table.ask(first, 0) == (0, False)
        blocks = tables(FULL_BLOCKS, STATE_BLOCKS)
        table.place(first, blocks, 0)
        offered = [(g, block, 80) for g, block in enumerate(STATE_BLOCKS)]
        stores = list(table.stores({"first": PROMPT}, lambda name: blocks, {"first": offered}))
        assert [(order.pool, len(order.blocks)) for order in stores if isinstance(order, GroupStoreOrder)] == [
            (0, 2),
            (1, 1),
            (2, 5),
        ]
        engine.cache.memory.copy_(written)
        engine.worker.end(stores, idle=False, last=True)
        assert table.take_fresh() >= {*STATE_BLOCKS}, "a state is promised no longer than to the end of its step"
        engine.session.settle({*FULL_BLOCKS, *STATE_BLOCKS})
        engine.worker.stores.settle({*FULL_BLOCKS, *STATE_BLOCKS})
        engine.engine.drain(WAIT)
        load(engine, table, "from the CPU tier")
        compare(engine)
        for one in engine.engine.engines:
            drop_from(one, "cpu")
        load(engine, table, "from the SSD")
        compare(engine)
        assert engine.counts["loads"] == 2
        assert engine.engine.check().ok
    finally:
        engine.close()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["groups-0-1", "groups-2", "groups-3"]
    engine, table = opened()
    try:
        load(engine, table, "behind a restart")
        compare(engine)
        for pool, one in zip(engine.engine.pools, engine.engine.engines, strict=True):
            taken = one.stats()["tiers"]["ssd"]["pages"] * one.layout.extent_bytes
            content = sum(SMALL.states[g] * SMALL.content for g in pool.groups if g < 3)
            assert not content or content <= taken <= 1.05 * content + 4096 * len(pool.groups)
    finally:
        engine.close()
