"""KV events in an inference engine's own names: an index that hears of them has what the tiers have, and no more."""

from __future__ import annotations

import contextlib
import hashlib
import random
import threading
from array import array
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from gdscache import PageHashes
from gdscache.events.base import BlockRemoved, KVEventBatch
from gdscache.events.names import BlockName, NamedEvents
from tests.support.helpers import Host, OpenHost, drop_from, prompt, quiet, until

ON: dict[str, Any] = {}


def names_of(tokens: Sequence[int], size: int = 4) -> list[BlockName]:
    """What an engine calls the blocks of a request: digests that are chained."""
    found: list[BlockName] = []
    for at in range(0, len(tokens) // size * size, size):
        parent = found[-1].digest if found else None
        mine = array("I", tokens[at : at + size])
        found.append(BlockName(hashlib.sha256((parent or b"") + mine.tobytes()).digest(), parent, mine))
    return found


class Router:
    """What a router knows: blocks by medium. It refuses what no index could take in."""

    def __init__(self, host: Host, **limits: int) -> None:
        manager = host.engine.manager
        self.host = host
        self.events = NamedEvents(manager.tiers.values(), manager.lock, **limits)
        host.engine.on_events(self.events.heard)
        self.blocks: dict[str, dict[bytes, BlockName]] = {}

    def name(self, tokens: Sequence[int]) -> PageHashes:
        names = names_of(tokens)
        hashes = PageHashes([name.digest for name in names])
        self.events.name([page.key for page in self.host.engine.pages(hashes)], names)
        return hashes

    def store(self, tokens: Sequence[int]) -> None:
        hashes = self.name(tokens)
        blocks = self.host.compute(hashes)
        self.host.engine.store(hashes, blocks).release_event.synchronize()
        self.host.give(blocks)

    def hear(self) -> None:
        for stored, medium, blocks in self.events.take():
            there = self.blocks.setdefault(medium, {})
            for before, block in zip([None, *blocks], blocks, strict=False):
                if stored:
                    assert block.digest not in there, "a block is stored twice"
                    assert before is None or block.parent == before.digest
                    there[block.digest] = block
                else:
                    del there[block.digest]

    def agrees(self, tokens: Sequence[Sequence[int]]) -> bool:
        """Whether it has of these prompts what the tiers have."""
        self.hear()
        tiers = self.host.engine.manager.tiers
        for medium, tier in (("CPU", "cpu"), ("STORAGE", "ssd")):
            has: set[bytes] = set()
            for some in tokens:
                names = names_of(some)
                pages = self.host.engine.pages(PageHashes([name.digest for name in names]))
                has.update(n.digest for n, page in zip(names, pages, strict=True) if tiers[tier].index.has(page.key))
            if has != set(self.blocks.get(medium, {})):
                return False
        return True

    def settles(self, *tokens: Sequence[int]) -> None:
        quiet(self.host.engine)
        until(lambda: self.agrees(tokens), "the router has what the tiers have")


def test_a_prompt_is_told_tier_by_tier_with_its_tokens_and_chain(open_host: OpenHost) -> None:
    router = Router(open_host(cpu=8, ssd=16, events=ON))
    tokens = prompt(1, 4)
    router.store(tokens)
    router.settles(tokens)
    for medium in ("CPU", "STORAGE"):
        assert list(router.blocks[medium].values()) == names_of(tokens)
    drop_from(router.host.engine, "cpu")
    router.settles(tokens)
    assert not router.blocks["CPU"]
    assert len(router.blocks["STORAGE"]) == 4
    router.host.engine.prefetch(router.name(tokens)).result()
    router.settles(tokens)
    assert len(router.blocks["CPU"]) == 4
    router.host.engine.clear()
    router.settles(tokens)
    assert not any(router.blocks.values())
    router.store(tokens)
    router.settles(tokens)
    assert len(router.blocks["CPU"]) == len(router.blocks["STORAGE"]) == 4


def test_pages_of_an_earlier_process_are_told_when_a_request_begins_with_them(open_host: OpenHost) -> None:
    first = Router(open_host(cpu=8, ssd=16, events=ON))
    tokens, other = prompt(1, 4), prompt(2, 2)
    first.store(tokens)
    first.store(other)
    quiet(first.host.engine)
    first.host.engine.close()
    router = Router(open_host(cpu=8, ssd=16, events=ON))
    until(lambda: router.host.engine.stats()["events"]["batches"] > 0, "the pages were told of")
    router.hear()
    assert not router.blocks
    router.name([*tokens, 7, 8, 9, 10])
    router.settles(tokens)
    assert list(router.blocks["STORAGE"].values()) == names_of(tokens)
    router.name(tokens)  # again is no news
    drop_from(router.host.engine, "ssd")
    router.settles(tokens, other)
    assert not any(router.blocks.values())


def test_whatever_happens_the_router_has_what_the_tiers_have(open_host: OpenHost) -> None:
    router, draw = Router(open_host(cpu=6, ssd=12, events=ON)), random.Random(3)
    prompts = [prompt(seed, 3) for seed in range(12)]
    for _ in range(60):
        tokens = draw.choice(prompts)
        act = draw.choice(["store", "store", "name", "drop", "prefetch"])
        if act == "store":
            router.store(tokens)
        elif act == "name":
            router.name(tokens)
        elif act == "drop":
            drop_from(router.host.engine, draw.choice(["cpu", "ssd"]))
        else:
            router.host.engine.prefetch(router.name(tokens)).result()
        router.hear()
    router.store(prompts[0])
    router.settles(*prompts)
    assert any(router.blocks.values())


def test_a_page_that_is_lost_while_it_is_named_is_not_told_as_there() -> None:
    """The batch with its removal comes right behind the look at the tiers."""
    key, name = bytes(32), BlockName(b"a", None, array("I", [1, 2, 3, 4]))
    gone = KVEventBatch(1, 0.0, [BlockRemoved([key], "CPU", "LOCAL", "cpu")])
    tier: Any = SimpleNamespace(name="cpu", kind="memory", served=True, index=SimpleNamespace(has=lambda _: True))
    hearing = [threading.Thread(target=lambda: events.heard(gone))]

    class Lock(contextlib.nullcontext[None]):
        def __exit__(self, *error: object) -> None:
            hearing[0].start()
            hearing[0].join(0.2)

    events = NamedEvents([tier], Lock())
    events.heard(KVEventBatch(0, 0.0, []))
    events.name([key], [name])
    hearing[0].join()
    assert [run.stored for run in events.take()] == [True, False]


def test_of_new_weights_only_the_new_pages_are_told() -> None:
    """The engine's names stay with new weights, and the keys do not."""
    old, new, there = bytes([1]), bytes([2]), {bytes([1])}
    tier: Any = SimpleNamespace(name="cpu", kind="memory", served=True, index=SimpleNamespace(has=lambda k: k in there))
    events, name = NamedEvents([tier], threading.Lock()), BlockName(b"a", None, array("I", [1, 2, 3, 4]))
    events.heard(KVEventBatch(0, 0.0, []))
    events.name([old], [name])
    events.forget_all()
    assert [run.stored for run in events.take()] == [True, False]
    there.add(new)
    events.name([new], [name])
    events.heard(KVEventBatch(1, 0.0, [BlockRemoved([old], "CPU", "LOCAL", "cpu")]))
    events.heard(KVEventBatch(3, 0.0, []))  # all tiers are looked at
    assert [run.stored for run in events.take()] == [True]


def test_behind_a_missing_number_the_tiers_are_looked_at_again() -> None:
    there = {bytes([n]) for n in range(3)}
    tier: Any = SimpleNamespace(name="cpu", kind="memory", served=True, index=SimpleNamespace(has=lambda k: k in there))
    events = NamedEvents([tier], threading.Lock())
    names = [BlockName(n, None, array("I", [n])) for n in range(4)]
    events.heard(KVEventBatch(0, 0.0, []))
    events.name([bytes([n]) for n in range(4)], names)
    assert [len(run.blocks) for run in events.take()] == [1, 1, 1]
    there.symmetric_difference_update({bytes([0]), bytes([3])})  # no event tells of it
    events.heard(KVEventBatch(1, 0.0, []))
    assert events.take() == []
    events.heard(KVEventBatch(3, 0.0, []))
    assert {(run.stored, block.digest) for run in events.take() for block in run.blocks} == {(False, 0), (True, 3)}


def test_names_of_pages_that_never_come_are_bounded(open_host: OpenHost) -> None:
    router = Router(open_host(cpu=8, ssd=16, events=ON), expected=5)
    for seed in range(10):
        router.name(prompt(seed, 3))
    assert len(router.events._expected) == 5
    router.store(prompt(20, 4))
    router.settles(prompt(20, 4))
    assert len(router.blocks["CPU"]) == 4
