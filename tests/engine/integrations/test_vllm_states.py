"""States of hybrid models in vLLM's KV cache: padded to a block there, and stored as they are."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import pickle
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gdscache.config import Config
from gdscache.config.pools import pool_parts
from gdscache.engine.hybrid import HybridEngine
from gdscache.groups.pools import pools_of
from gdscache.integrations.vllm.cache_groups import block_tokens, state_layers
from gdscache.integrations.vllm.groups import GroupTable, KeptStates
from gdscache.integrations.vllm.planes import VllmPlanes, planes_of
from gdscache.integrations.vllm.ranks import Lead, RankWorker, addresses_of
from gdscache.integrations.vllm.requests import LoadOrder, StoreOrder
from gdscache.integrations.vllm.session import GroupSession
from gdscache.integrations.vllm.setup import model_of
from gdscache.integrations.vllm.worker import EngineWorker
from tests.support.helpers import WAIT, drop_from, flip_file, until
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


@pytest.mark.parametrize("change", [{"dtypes": (torch.bfloat16,) * 2}, {"shapes": ((8, 2), (4, 4))}], ids=str)
def test_states_of_other_types_or_in_another_order_have_another_name(change: dict[str, object]) -> None:
    """vLLM hands states over as bytes, as many as before."""
    cache = Cache(SMALL)
    before = cache.model()
    vars(cache.config.kv_cache_groups[1].kv_cache_spec).update(change)
    after = cache.model()
    assert before.pop("salt") != after.pop("salt")
    assert before == after


class Engine:
    """An engine over vLLM's KV cache in this process, or over those of several ranks, in this process, too."""

    def __init__(self, path: Path, ranks: int) -> None:
        self.caches = [Cache(SMALL) for _ in range(ranks)]
        planes = [cache.planes().tensors for cache in self.caches]
        config = Config.from_dict(
            {
                "model": self.caches[0].model(),
                "cpu": {"capacity": "32MiB"},
                "ssd": {"path": str(path), "capacity": "32MiB", "transport": "posix", "gds": "off", "threads": 2},
                "gpu": {"device": "cpu"},
                "host_buffer": "32MiB",
                "deadline": WAIT,
            }
        )
        self.counts = Counter[str]()
        self.workers: list[RankWorker] = []
        if ranks == 1:
            self.engine = HybridEngine(config, [(tensor,) for tensor in planes[0]])
            self.session = GroupSession(self.engine, 60.0, SMALL.tokens)
            self.worker = EngineWorker(self.session, planes[0], self.counts, overlapping=True)
            self.session.stores, self.session.loads = self.worker.stores, self.worker.loads
        else:
            pools = [pool.layers for pool in pools_of(config.model.layer_groups())]
            for rank, own in enumerate(planes):
                self.workers.append(RankWorker(own, rank, rank, overlapping=True, pools=pools))
            told = {rank: [one.address for one in worker.ranks] for rank, worker in enumerate(self.workers)}
            self.engine = HybridEngine(config, ranks=addresses_of(told, ranks))
            self.session = GroupSession(self.engine, 60.0, SMALL.tokens)
            self.lead = Lead(self.session.engines, self.counts, overlapping=True)
            self.session.stores, self.session.loads = self.lead, self.lead.loads
        self.pool, states = BlockPool(), KeptStates()
        states.bind(self.pool)
        self.table = GroupTable(self.session, states, wait=WAIT)

    def step(self, loads: Sequence[LoadOrder] = (), stores: Sequence[StoreOrder] = ()) -> None:
        """A step of vLLM's, which computes something where it has stores."""
        idle = not stores
        if not self.workers:
            self.worker.begin(loads)
            self.worker.end(stores, idle=idle, last=True)
            return
        told, marks = pickle.loads(pickle.dumps(self.lead.step(loads, stores, set(), idle=idle, last=True)))
        for worker in self.workers:
            worker.begin(told)
            worker.end(marks, idle=idle)

    def until_arrived(self) -> tuple[set[str], set[str]]:
        """Idle steps, until a load between steps has come on all ranks; whose it was, and whose was bad."""
        loads = [worker.loads for worker in self.workers] or [self.worker.loads]
        arrived: list[set[str]] = [set() for _ in loads]

        def all_there() -> bool:
            self.step()
            for some, its in zip(arrived, loads, strict=True):
                some |= its.take_arrived()
            return all(arrived)

        until(all_there, "the load ends")
        return set.union(*arrived), set.union(*(its.take_failed() for its in loads))

    def close(self) -> None:
        self.lead.close() if self.workers else self.worker.close()
        self.session.close()
        for worker in self.workers:
            worker.close()


class BlockPool:
    """Of vLLM's: who counts the owners of blocks."""

    def __init__(self) -> None:
        self.blocks = [SimpleNamespace(block_id=number) for number in range(BLOCKS)]
        self.owners = Counter[int]()

    def touch(self, blocks: Sequence[Any]) -> None:
        self.owners.update(block.block_id for block in blocks)

    def free_blocks(self, blocks: Sequence[Any]) -> None:
        self.owners.subtract(block.block_id for block in blocks)


@contextlib.contextmanager
def opened(path: Path, ranks: int) -> Iterator[Engine]:
    engine = Engine(path, ranks)
    try:
        yield engine
    finally:
        engine.close()


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


def load(engine: Engine, name: str) -> tuple[set[str], set[str]]:
    """The prompt comes again, and its hit goes into other blocks, between two steps."""
    for cache in engine.caches:
        cache.memory.fill_(UNTOUCHED)
    asked, table = request(name), engine.table
    table.add(asked)
    until(lambda: table.ask(asked, 0) == (80, True), "its pages come")
    table.place(asked, tables(*OTHERS), 80)
    loads = table.take_loads()
    placed = [(order.between, order.pool, len(order.blocks)) for order in loads]
    assert placed == [(True, 0, 2), (True, 1, 1), (True, 2, 5)]
    engine.step(loads)
    return engine.until_arrived()


def written(rank: int) -> torch.Tensor:
    """What all blocks of a rank have, where the prompt is computed."""
    shape, source = (2, BLOCKS, SMALL.page), torch.Generator().manual_seed(rank)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=source)


def store(engine: Engine) -> None:
    """The prompt is computed in one step, and stored."""
    first, table, blocks = request("first"), engine.table, tables(FULL_BLOCKS, STATE_BLOCKS)
    table.add(first)
    assert table.ask(first, 0) == (0, False)
    table.place(first, blocks, 0)
    offered = [(g, block, 80) for g, block in enumerate(STATE_BLOCKS)]
    stores = list(table.stores({"first": PROMPT}, lambda name: blocks, {"first": offered}))
    assert [(order.pool, len(order.blocks)) for order in stores] == [(0, 2), (1, 1), (2, 5)]
    for rank, cache in enumerate(engine.caches):
        cache.memory.copy_(written(rank))
    engine.step(stores=stores)
    engine.table.states.let_go(engine.session.stores.reads)
    engine.step()
    table.finish("first")
    fresh = table.take_fresh()
    assert engine.pool.owners.total() == 0, "nothing is kept behind the end of a request"
    engine.session.stores.wait_until_read(fresh)
    assert not engine.session.stores.reads() & fresh
    engine.engine.drain(WAIT)


def compare(engine: Engine) -> None:
    """The hit is in its blocks on each rank, and nothing else was written."""
    content = SMALL.content
    for rank, cache in enumerate(engine.caches):
        before, memory = written(rank), cache.memory
        for block, place in zip(OTHERS[0], FULL_BLOCKS, strict=True):
            assert torch.equal(memory[:, block], before[:, place])
        for layers, block, place in zip(SMALL.states, OTHERS[1], STATE_BLOCKS, strict=True):
            assert torch.equal(memory[:layers, block, :content], before[:layers, place, :content])
            assert bool((memory[:layers, block, content:] == UNTOUCHED).all())
            assert bool((memory[layers:, block] == UNTOUCHED).all())


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_block_with_a_state_is_kept_until_it_is_read(tmp_path: Path, ranks: int) -> None:
    """The next step waits for nothing: no other owner gets the block. It goes back once every rank has read it."""
    with opened(tmp_path, ranks) as engine:
        first, table, states = request("first"), engine.table, engine.table.states
        table.add(first)
        table.ask(first, 0)
        table.place(first, tables(FULL_BLOCKS, STATE_BLOCKS), 0)
        blocks = tables(FULL_BLOCKS, STATE_BLOCKS)
        offered = [(g, block, 80) for g, block in enumerate(STATE_BLOCKS)]
        stores = list(table.stores({"first": PROMPT}, lambda name: blocks, {"first": offered}))
        table.take_fresh()
        assert {*engine.pool.owners.elements()} == {*STATE_BLOCKS}
        engine.step(stores=stores)
        if ranks > 1:
            assert engine.session.stores.reads() >= {*STATE_BLOCKS}, (
                "the leader hears of a step's end with the next one"
            )
        assert table.take_fresh() == set(), "so that nobody waits for the step that is being computed"

        def given_back() -> bool:
            engine.step()
            states.let_go(engine.session.stores.reads)
            return engine.pool.owners.total() == 0

        until(given_back, "the blocks are given back")
        table.finish("first")
        assert table.take_fresh() == set()


def test_a_block_with_a_state_is_not_kept_behind_a_change_of_weights(tmp_path: Path) -> None:
    """vLLM resets its cache where all blocks are free."""
    with opened(tmp_path, 1) as engine:
        first, table, blocks = request("first"), engine.table, tables(FULL_BLOCKS, STATE_BLOCKS)
        table.add(first)
        table.ask(first, 0)
        table.place(first, blocks, 0)
        offered = [(g, block, 80) for g, block in enumerate(STATE_BLOCKS)]
        engine.step(stores=list(table.stores({"first": PROMPT}, lambda name: blocks, {"first": offered})))
        table.take_fresh()
        table.leave_alone(stale=True)
        assert engine.pool.owners.total() == 0
        assert table.take_fresh() == {*STATE_BLOCKS}, "their next owners wait for the stores that read them"


@pytest.mark.parametrize("ranks", [1, 2])
def test_states_and_blocks_go_and_come_back(tmp_path: Path, ranks: int) -> None:
    """Through the CPU tier, from the SSD, and behind a restart; what lies behind a state in its block is left alone."""
    with opened(tmp_path, ranks) as engine:
        store(engine)
        assert load(engine, "from the CPU tier") == ({"from the CPU tier"}, set())
        compare(engine)
        for one in engine.engine.engines:
            drop_from(one, "cpu")
        assert load(engine, "from the SSD") == ({"from the SSD"}, set())
        compare(engine)
        assert engine.counts["loads"] == 2
        assert engine.engine.check().ok
    assert sorted(path.name for path in tmp_path.iterdir()) == ["groups-0-1", "groups-2", "groups-3"]
    with opened(tmp_path, ranks) as engine:
        assert load(engine, "behind a restart") == ({"behind a restart"}, set())
        compare(engine)
        for pool, one in zip(engine.engine.pools, engine.engine.engines, strict=True):
            stored = one.stats()["tiers"]["ssd"]["pages"] * one.layout.extent_bytes
            content = sum(SMALL.states[g] * SMALL.content for g in pool.groups if g < 3)  # of one rank
            assert not content or content <= stored <= 1.05 * content + 4096 * len(pool.groups)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_bad_state_is_all_the_hit(tmp_path: Path, ranks: int) -> None:
    """On the last rank alone: what other pools have brought is of no use, and is not promised to vLLM."""
    with opened(tmp_path, ranks) as engine:
        store(engine)
        slab = max((tmp_path / "groups-2").glob("slab*"), key=lambda path: len(path.name))
        for one in engine.engine.engines:
            drop_from(one, "cpu")
        manager = engine.engine.engines[1].manager
        (slot,) = manager.tiers["ssd"].index.slots_of(manager.tiers["ssd"].index.all_keys())
        flip_file(slab, slot * engine.engine.engines[1].layout.extent_bytes + 50)
        asked = request("bad")
        engine.table.add(asked)
        until(lambda: engine.table.ask(asked, 0)[0] is not None, "its pages come, or not")
        assert engine.table.ask(asked, 0) == (0, False)
