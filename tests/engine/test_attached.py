"""The engine attached to somebody else's planes: every shape that is taken, bit for bit, and nothing beside touched."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from gdscache import CacheEngine, Hit, PageStatus
from gdscache.errors import (
    EngineClosedError,
    InvalidValueError,
    PlanesError,
    SequenceStateError,
    SlotCountError,
    SlotRangeError,
)
from gdscache.storage.base import Op
from gdscache.store import parcel
from tests.support.faulty import PLAN, Fault
from tests.support.helpers import (
    LONG,
    WAIT,
    Host,
    OpenEngine,
    OpenHost,
    drop_from,
    expected,
    kept,
    make_config,
    our_threads,
    prompt,
    quiet,
    read_page,
    run,
    settle,
    together,
    tokens_of,
    until,
    untouched,
    write_page,
)
from tests.support.pages import FAULTY

LOADED = PageStatus.LOADED


# -- bit for bit -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["kv_first", "blocks_first"])
@pytest.mark.parametrize("block_tokens", [1, 4])
@pytest.mark.parametrize("cpu", [None, 6])
def test_strided_planes(open_host: OpenHost, device: str, order: str, block_tokens: int, cpu: int | None) -> None:
    options: dict[str, Any] = {"device": device, "order": order, "block_tokens": block_tokens, "cpu": cpu}
    tokens = prompt(1, 5)
    host = open_host(**options)
    host.keep(tokens)
    assert host.load(tokens).tokens == 20
    host.engine.close()
    assert open_host(**options).load(tokens).tokens == 20


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_slots_of_both_widths(open_host: OpenHost, device: str, dtype: torch.dtype) -> None:
    host = open_host(device=device)
    tokens = prompt(1, 4)
    host.keep(tokens, dtype=dtype)
    for make in (lambda b: torch.tensor(b, dtype=dtype), lambda b: torch.tensor(b, dtype=dtype).numpy(), list):
        hit = host.engine.lookup(tokens)
        blocks = host.take(4)
        load = host.engine.load(hit, make(blocks))
        assert host.finish(load, blocks, [p.key for p in hit.pages]).tokens == 16


# -- lookup, load, store ---------------------------------------------------------------------------------------------


def test_start_skips_what_the_engine_has(open_host: OpenHost, device: str) -> None:
    host = open_host(device=device, block_tokens=2)
    tokens = prompt(1, 6, extra=2)
    host.keep(tokens)
    for start in range(0, 28, 4):
        assert host.load(tokens, start=start).tokens == 24 - start
    other = [*tokens[:12], *prompt(2, 2)]
    host.keep(other, start=12)
    assert tokens_of(host.engine, other) == 20
    assert host.load(other).tokens == 20


def test_a_store_past_a_gap_is_found_only_from_behind_it(open_host: OpenHost) -> None:
    host = open_host()
    tokens = prompt(1, 4)
    host.keep(tokens, start=8)
    assert tokens_of(host.engine, tokens) == 0
    assert host.load(tokens, start=8).tokens == 8
    host.keep(tokens[:8])
    assert host.load(tokens).tokens == 16


def test_fewer_slots_load_and_store_fewer_pages(open_host: OpenHost, device: str) -> None:
    host = open_host(device=device, block_tokens=2)
    tokens = prompt(1, 5)
    blocks = host.compute(tokens)
    handle = host.engine.store(tokens, blocks[:6])
    handle.release_event.synchronize(WAIT)
    assert len(handle.result(WAIT).tiers) == 3
    quiet(host.engine)
    assert tokens_of(host.engine, tokens) == 12
    host.give(blocks)
    hit = host.engine.lookup(tokens)
    blocks = host.take(2)
    load = host.engine.load(hit, blocks)
    assert load.tokens == 8
    assert host.finish(load, blocks, [p.key for p in hit.pages]).tokens == 8
    load = host.engine.load(hit, [])
    assert (load.tokens, load.result(WAIT).tokens) == (0, 0)


def test_a_stale_hit_loads_what_is_still_there(open_host: OpenHost, device: str) -> None:
    host, tokens = kept(open_host, 4, device=device)
    hit = host.engine.lookup(tokens)
    with host.engine.manager.lock:
        for tier in host.engine.manager.tiers.values():
            entry = tier.index.get(hit.pages[2].key)
            assert entry is not None
            tier.index.drop(entry)
    blocks = host.take(4)
    load = host.engine.load(hit, blocks)
    assert load.tokens == 8
    assert host.finish(load, blocks, [p.key for p in hit.pages]).tokens == 8
    host.engine.clear()
    assert host.engine.load(hit, host.take(4)).tokens == 0


def test_a_batch_of_loads_with_a_prefix_twice(open_host: OpenHost, device: str) -> None:
    host = open_host(device=device, cpu=4)
    tokens = prompt(1, 5)
    branch = [*tokens[:12], *prompt(2, 2)]
    for t in (tokens, branch):
        host.keep(t)
    for tiers in ((), ("cpu",)):
        drop_from(host.engine, *tiers)
        hits = [host.engine.lookup(t) for t in (tokens, branch, tokens, prompt(9, 2))]
        assert [h.tokens for h in hits] == [20, 20, 20, 0]
        blocks = [host.take(len(h.pages)) for h in hits]
        load = host.engine.load_many(list(zip(hits, blocks, strict=True)))
        assert load.tokens == 60
        for layer in range(3):
            load.wait(layer)
        assert [r.tokens for r in load.results()] == [20, 20, 20, 0]
        whole = load.result()
        assert (whole.tokens, len(whole.pages)) == (60, 15)
        load.release_event.synchronize(WAIT)
        for hit, mine in zip(hits, blocks, strict=True):
            for i, page in enumerate(hit.pages):
                got = read_page(host.planes, host.layout, host.page(mine, i))
                assert np.array_equal(got, expected(host.layout, page.key))
        assert untouched(host.planes, host.free)
        for mine in blocks:
            host.give(mine)
        settle(host.engine)


@pytest.mark.parametrize("cpu", [None, 8])
def test_a_page_that_is_named_twice_is_in_no_hit(open_host: OpenHost, cpu: int | None) -> None:
    host, tokens = kept(open_host, 3, cpu=cpu)
    drop_from(host.engine, *({"cpu"} & {*host.engine.tiers}))
    first, second, third = host.engine.pages(tokens)
    whole = host.engine.lookup_pages([third, first, second])
    for call in (lambda: host.engine.lookup_pages([first, second, first]), lambda: whole.part([0, 1, 0])):
        with pytest.raises(InvalidValueError, match="a page is there twice"):
            call()
    assert host.engine.load(whole.part([2, 0]), host.take(2)).result(WAIT).tokens == 8


def test_a_page_is_written_once_however_often_it_is_offered(open_host: OpenHost) -> None:
    host = open_host(transport=FAULTY, cpu=8)
    tokens = prompt(1, 4)
    with PLAN.rule(Op.WRITE, Fault.HANG) as rule:
        handles = [host.store(tokens) for _ in range(5)]
        until(lambda: rule.met > 0, "a write is under way")
        handles += [host.store(tokens), host.store([*tokens, *prompt(2, 1)])]
    host.engine.drain(WAIT)
    assert len(PLAN.moved[Op.WRITE]) == 5
    assert all(handle.done() for handle in handles)
    assert host.engine.stats()["stored"] == {"cpu": 5, "ssd": 5}
    tiers = [t for handle in handles for t in handle.result(0).tiers]
    assert tiers.count(("cpu", "ssd")) == 5
    assert tiers.count(()) == len(tiers) - 5


def test_a_full_queue_drops_and_counts(open_host: OpenHost) -> None:
    host = open_host(transport=FAULTY, queue=3, cpu=None, bounce=4)
    with PLAN.rule(Op.WRITE, Fault.HANG):
        first = host.engine.store(prompt(1, 3), host.compute(prompt(1, 3)))
        blocks = host.compute(prompt(2, 2))
        second = host.engine.store(prompt(2, 2), blocks)
        assert second.done()
        second.release_event.synchronize(0)  # a dropped store releases at once
        assert second.result(0).dropped == {0: "queue_full", 1: "queue_full"}
        assert host.engine.stats()["store_queue"]["bytes"] == host.engine.stats()["store_queue"]["limit_bytes"]
    host.engine.drain(WAIT)
    assert first.result(0).tiers == (("ssd",),) * 3
    assert host.engine.stats()["dropped"] == {"queue_full": 2}
    assert tokens_of(host.engine, prompt(2, 2)) == 0
    host.keep(prompt(2, 2))
    assert host.load(prompt(2, 2)).tokens == 8


# -- bad input -------------------------------------------------------------------------------------------------------


def state(host: Host) -> Any:
    stats = host.engine.stats()
    return [(n, t["pages"], t["free_slots"]) for n, t in stats["tiers"].items()], stats["leases"], stats["store_queue"]


def test_a_broken_page_of_blocks(open_host: OpenHost) -> None:
    host = open_host(block_tokens=1)
    host.keep(prompt(1, 2))
    before = state(host)
    with pytest.raises(SlotCountError, match=r"6 blocks.*4 blocks"):
        host.engine.load(host.engine.lookup(prompt(1, 2)), range(6))
    with pytest.raises(SlotCountError):
        host.engine.store(prompt(1, 2), range(6))
    assert state(host) == before


def test_an_attached_engine_has_no_pool(open_host: OpenHost) -> None:
    host = open_host()
    assert "gpu" not in host.engine.stats()["tiers"]
    for use in (lambda: host.engine.sequence([1, 2, 3]), lambda: host.engine.gpu):
        with pytest.raises(SequenceStateError, match="attached"):
            use()


def test_planes_that_do_not_fit_open_nothing(slab: Path) -> None:
    config = make_config(slab)
    host = Host(config)
    host.engine.close()
    for bad in ([], host.planes[:2], [layer[::-1][:1] for layer in host.planes]):
        with pytest.raises(PlanesError):
            CacheEngine.from_config(config, planes=bad)
    assert not our_threads()
    with CacheEngine.from_config(config, planes=host.planes):
        pass


def test_closed_while_in_use(slab: Path) -> None:
    host = Host(make_config(slab, transport=FAULTY))
    tokens = prompt(1, 4)
    hit = Hit(0, 0, (), None, ())
    with PLAN.rule(Op.WRITE, Fault.HANG):
        host.store(tokens)
        closer = threading.Thread(target=host.engine.close)
        closer.start()
        for _ in range(3):
            time.sleep(0.05)
            for use in (
                lambda: host.engine.store(prompt(2, 2), host.compute(prompt(2, 2))),
                lambda: host.engine.load(hit, []).result(WAIT),
                lambda: host.engine.prefetch(tokens).result(WAIT),
            ):
                with contextlib.suppress(EngineClosedError):
                    use()
    closer.join(WAIT)
    assert not closer.is_alive()
    with pytest.raises(EngineClosedError):
        host.engine.store(tokens, [1])
    host = Host(make_config(slab))
    assert host.load(tokens).tokens == 16
    host.engine.close()


# -- many threads ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", LONG)
@pytest.mark.parametrize("cpu", [None, 5])
def test_many_threads_at_once(open_host: OpenHost, device: str, cpu: int | None, seconds: float) -> None:
    host = open_host(device=device, cpu=cpu, ssd=14, bounce=4, blocks=96, block_tokens=2)
    engine, layout = host.engine, host.layout
    trunk = prompt(0, 2)
    prompts = [trunk + prompt(seed, 1 + seed % 4, extra=seed % 4) for seed in range(8)]
    end = time.monotonic() + seconds
    done = [0] * 6

    def work(number: int) -> None:
        rng = random.Random(number)
        mine = list(range(16 * number, 16 * number + 16))
        while time.monotonic() < end or not done[number]:
            tokens = rng.choice(prompts)
            rng.shuffle(mine)
            names = engine.pages(tokens)
            if rng.random() < 0.5:
                first = rng.randrange(len(names))
                pages = [mine[2 * i : 2 * i + 2] for i in range(len(names) - first)]
                for blocks, name in zip(pages, names[first:], strict=True):
                    write_page(host.planes, layout, blocks, expected(layout, name.key))
                handle = engine.store(tokens, [b for p in pages for b in p], first * 4)
                handle.release_event.synchronize(WAIT)
            else:
                hit = engine.lookup(tokens)
                pages = [mine[2 * i : 2 * i + 2] for i in range(len(hit.pages))]
                load = engine.load(hit, [b for p in pages for b in p])
                if rng.random() < 0.1:
                    load.cancel()
                report = load.result(WAIT)
                load.release_event.synchronize(WAIT)
                for i in range(report.tokens // 4):
                    got = read_page(host.planes, layout, pages[i])
                    assert np.array_equal(got, expected(layout, hit.pages[i].key))
            if rng.random() < 0.02:
                engine.clear() if rng.random() < 0.5 else engine.drain(WAIT)
            done[number] += 1

    together(work, len(done))
    assert min(done) > 0
    assert set(engine.stats().get("misses", {})) <= {"absent", "cancelled"}, engine.stats()["misses"]


# -- what adapters ask -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clear", ["clear", "invalidate"])
def test_pages_that_a_clear_was_to_drop_are_not_stored_behind_it(open_host: OpenHost, clear: str) -> None:
    host, tokens = open_host(cpu=8), prompt(1, 3)
    engine, blocks = host.engine, host.compute(tokens)
    pages, before = engine.pages(tokens), engine.epoch()
    if clear == "clear":
        engine.clear()
    else:
        engine.invalidate(engine.namespace())
    assert engine.store_pages(pages, blocks, epoch=before).result(WAIT).tiers == ((),) * 3
    assert engine.peek(tokens) == 0
    engine.store_pages(pages, blocks, epoch=engine.epoch()).result(WAIT)
    engine.drain(WAIT)
    assert engine.peek(tokens) == 12
    host.give(blocks)
    settle(engine)


def test_what_is_asked_counts_as_no_use(open_host: OpenHost) -> None:
    host, tokens = kept(open_host, 3, cpu=8)
    engine = host.engine
    before = engine.stats()["tokens"]
    assert engine.tiers == {"cpu": "memory", "ssd": "files"}
    assert engine.peek([*tokens, *range(8)]) == 12
    assert [told.cause for told in engine.told(engine.pages([*tokens[:8], *range(4)]))] == [
        "cached",
        "cached",
        "absent",
    ]
    assert not engine.asks(engine.pages(tokens))
    assert engine.stats()["tokens"] == before
    assert engine.load_seconds("nowhere", 3) is None
    engine.observe_load("ssd", 1 << 20, 0.5)
    assert engine.load_seconds("ssd", 3) is not None
    engine.observe_wait(0.5)
    engine.observe_wait(0.0)
    assert sum(engine.stats()["measured"]["wait_seconds"]["pages"]["counts"]) == 2
    assert sum(engine.stats()["measured"]["wait_seconds"]["pages"]["sums"]) == 0.5


def test_named_pages_with_wrong_blocks_are_refused_and_nothing_waits(open_host: OpenHost) -> None:
    host, tokens = open_host(cpu=8), prompt(1, 3)
    engine, blocks = host.engine, host.compute(tokens)
    pages, per_page = engine.pages(tokens), engine.tables.blocks_per_page
    for wrong, error in (
        (blocks[per_page:], SlotCountError),
        (blocks[1:], SlotCountError),
        ([*blocks[1:], 1 << 20], SlotRangeError),
        ([*blocks[1:], blocks[1]], SlotRangeError),
    ):
        with pytest.raises(error):
            engine.store_pages(pages, wrong)
    engine.drain(WAIT)
    assert all(engine.store_pages(pages, blocks).result(WAIT).tiers)
    host.give(blocks)
    settle(engine)


def test_a_store_that_fails_to_begin_leaves_nothing_waiting(open_host: OpenHost) -> None:
    host, tokens = open_host(cpu=8), prompt(1, 3)
    engine, blocks = host.engine, host.compute(tokens)
    with mock.patch.object(parcel, "take_rows", side_effect=MemoryError), pytest.raises(MemoryError):
        engine.store(tokens, blocks)
    engine.drain(WAIT)
    assert engine.stats()["store_queue"]["bytes"] == 0
    settle(engine)
    assert all(engine.store(tokens, blocks).result(WAIT).tiers)
    host.give(blocks)


def test_a_commit_that_fails_to_begin_keeps_no_lease(open_engine: OpenEngine) -> None:
    engine = open_engine(cpu=8)
    with mock.patch.object(parcel, "take_rows", side_effect=MemoryError), pytest.raises(MemoryError):
        run(engine, prompt(1, 3))
    settle(engine)
