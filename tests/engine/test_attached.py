"""The engine attached to somebody else's planes: every shape that is taken, bit for bit, and nothing beside touched."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gdscache import CacheEngine, Hit, PageStatus
from gdscache.errors import (
    EngineClosedError,
    GdsCacheError,
    PlanesError,
    SequenceStateError,
    SlotCountError,
    SlotRangeError,
    TokensError,
)
from gdscache.storage.base import Op
from tests.support.faulty import PLAN, Fault
from tests.support.helpers import (
    EXTRA,
    LONG,
    MHA,
    MLA,
    SMALL,
    WAIT,
    Host,
    drop_from,
    expected,
    make_config,
    prompt,
    quiet,
    read_page,
    settle,
    tokens_of,
    until,
    untouched,
    write_page,
)

OpenHost = Callable[..., Host]
FAULTY = "tests.support.faulty:FaultyTransport"
LOADED = PageStatus.LOADED


@pytest.fixture(autouse=True)
def _no_faults_left() -> Any:
    PLAN.reset()
    yield
    PLAN.reset()


# -- bit for bit -----------------------------------------------------------------------------------------------------

KINDS = {"mha": MHA, "mla": MLA, "extra": EXTRA}


def there_and_back(open_host: OpenHost, tokens: list[int], **options: Any) -> None:
    """GPU -> CPU -> SSD -> restart -> GPU, with every page's bytes compared on each way."""
    pages = len(tokens) // options["model"]["page_tokens"]
    host = open_host(**options)
    host.store(tokens)
    quiet(host.engine)
    assert host.load(tokens).pages == (LOADED,) * pages
    drop_from(host.engine, "cpu")
    assert host.load(tokens).bytes_by_tier == {"ssd": pages * host.layout.page_bytes}
    settle(host.engine)
    host.engine.close()
    host = open_host(**options)
    assert host.engine.lookup(tokens).tiers == ("ssd",) * pages
    assert host.load(tokens).pages == (LOADED,) * pages
    assert host.load(tokens).pages == (LOADED,) * pages


@pytest.mark.parametrize("block_tokens", [1, 2, 4])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn"])
@pytest.mark.parametrize("kind", KINDS)
def test_bytes_survive_every_tier_and_a_restart(
    open_host: OpenHost, device: str, kind: str, dtype: str, block_tokens: int
) -> None:
    model = KINDS[kind] | {"dtype": dtype}
    there_and_back(open_host, prompt(1, 5, extra=1), device=device, model=model, block_tokens=block_tokens)


@pytest.mark.parametrize(
    ("page_tokens", "block_tokens"), [(1, 1), (3, 3), (3, 1), (16, 16), (16, 8), (16, 1), (512, 512), (512, 16)]
)
def test_pages_of_any_size(open_host: OpenHost, device: str, page_tokens: int, block_tokens: int) -> None:
    model = MHA | {"page_tokens": page_tokens, "layers": 2, "kv_heads": 1, "head_dim": 8, "v_head_dim": 3}
    blocks = 14 * page_tokens // block_tokens
    there_and_back(
        open_host, prompt(1, 5, page_tokens), device=device, model=model, block_tokens=block_tokens, blocks=blocks
    )


@pytest.mark.parametrize("order", ["kv_first", "blocks_first"])
@pytest.mark.parametrize("block_tokens", [1, 4])
@pytest.mark.parametrize("cpu", [None, 6])
def test_strided_planes(open_host: OpenHost, device: str, order: str, block_tokens: int, cpu: int | None) -> None:
    options: dict[str, Any] = {"device": device, "order": order, "block_tokens": block_tokens, "cpu": cpu}
    tokens = prompt(1, 5)
    host = open_host(**options)
    host.store(tokens)
    quiet(host.engine)
    assert host.load(tokens).tokens == 20
    host.engine.close()
    assert open_host(**options).load(tokens).tokens == 20


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_slots_of_both_widths(open_host: OpenHost, device: str, dtype: torch.dtype) -> None:
    host = open_host(device=device)
    tokens = prompt(1, 4)
    host.store(tokens, dtype=dtype)
    quiet(host.engine)
    for make in (lambda b: torch.tensor(b, dtype=dtype), lambda b: torch.tensor(b, dtype=dtype).numpy(), list):
        hit = host.engine.lookup(tokens)
        blocks = host.take(4)
        load = host.engine.load(hit, make(blocks))
        assert host.finish(load, blocks, [p.key for p in hit.pages]).tokens == 16


# -- lookup, load, store ---------------------------------------------------------------------------------------------


def test_start_skips_what_the_engine_has(open_host: OpenHost, device: str) -> None:
    host = open_host(device=device, block_tokens=2)
    tokens = prompt(1, 6, extra=2)
    host.store(tokens)
    quiet(host.engine)
    for start in range(0, 28, 4):
        assert host.load(tokens, start=start).tokens == 24 - start
    other = [*tokens[:12], *prompt(2, 2)]
    host.store(other, start=12)
    quiet(host.engine)
    assert tokens_of(host.engine, other) == 20
    assert host.load(other).tokens == 20


def test_a_store_past_a_gap_is_found_only_from_behind_it(open_host: OpenHost) -> None:
    host = open_host()
    tokens = prompt(1, 4)
    host.store(tokens, start=8)
    quiet(host.engine)
    assert tokens_of(host.engine, tokens) == 0
    assert host.load(tokens, start=8).tokens == 8
    host.store(tokens[:8])
    quiet(host.engine)
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
    host = open_host(device=device)
    tokens = prompt(1, 4)
    host.store(tokens)
    quiet(host.engine)
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


def test_lookup_changes_nothing_but_recency(open_host: OpenHost) -> None:
    host = open_host()
    host.store(prompt(1, 4))
    quiet(host.engine)
    before = {n: (t["pages"], t["free_slots"], t["evictions"]) for n, t in host.engine.stats()["tiers"].items()}
    for tokens in (prompt(1, 4), prompt(2, 4), []):
        hit = host.engine.lookup(tokens)
        assert hit.tokens == 4 * len(hit.tiers) == 4 * len(hit.pages)
    assert before == {n: (t["pages"], t["free_slots"], t["evictions"]) for n, t in host.engine.stats()["tiers"].items()}
    assert host.engine.stats()["leases"] == []


def test_a_batch_of_loads_with_a_prefix_twice(open_host: OpenHost, device: str) -> None:
    host = open_host(device=device, cpu=4)
    tokens = prompt(1, 5)
    branch = [*tokens[:12], *prompt(2, 2)]
    for t in (tokens, branch):
        host.store(t)
        quiet(host.engine)
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


def test_a_batch_of_nothing(open_host: OpenHost) -> None:
    host = open_host()
    load = host.engine.load_many([])
    assert load.tokens == 0
    assert load.results(WAIT) == []
    assert load.result(WAIT).tokens == 0
    load.wait(2)


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
    host.store(prompt(2, 2))
    quiet(host.engine)
    assert host.load(prompt(2, 2)).tokens == 8


def test_a_queue_smaller_than_a_store_keeps_its_head(open_host: OpenHost) -> None:
    host = open_host(queue=2)
    handle = host.store(prompt(1, 5))
    assert handle.result(WAIT).dropped == dict.fromkeys((2, 3, 4), "queue_full")
    quiet(host.engine)
    assert host.load(prompt(1, 5)).tokens == 8


def test_release_event_is_the_moment_from_which_slots_are_free(open_host: OpenHost, device: str) -> None:
    host = open_host(device=device, transport=FAULTY)
    tokens = prompt(1, 5)
    with PLAN.rule(Op.WRITE, Fault.HANG):
        blocks = host.compute(tokens)
        handle = host.engine.store(tokens, blocks)
        handle.release_event.synchronize(WAIT)
        host.give(blocks)  # overwrites them, while the SSD has nothing yet
        assert not handle.done()
    host.engine.drain(WAIT)
    assert host.load(tokens).tokens == 20
    drop_from(host.engine, "cpu")
    assert host.load(tokens).tokens == 20


def test_the_cpu_tier_serves_while_the_ssd_is_written(open_host: OpenHost) -> None:
    host = open_host(transport=FAULTY)
    with PLAN.rule(Op.WRITE, Fault.HANG):
        handle = host.store(prompt(1, 4))
        until(lambda: tokens_of(host.engine, prompt(1, 4)) == 16, "the CPU tier has the pages")
        assert host.load(prompt(1, 4)).bytes_by_tier == {"cpu": 4 * host.layout.page_bytes}
        assert not handle.done()
        assert host.engine.manager.tiers["ssd"].index.evictions == 0
        assert host.engine.lookup(prompt(1, 4)).tiers == ("cpu",) * 4


def test_pages_on_their_way_to_the_ssd_are_not_evicted(open_host: OpenHost) -> None:
    host = open_host(transport=FAULTY, cpu=3, ssd=12)
    with PLAN.rule(Op.WRITE, Fault.HANG):
        host.store(prompt(1, 3))
        until(lambda: tokens_of(host.engine, prompt(1, 3)) == 12, "the CPU tier has the pages")
        handle = host.engine.store(prompt(2, 2), host.compute(prompt(2, 2)))
        handle.release_event.synchronize(WAIT)
        assert tokens_of(host.engine, prompt(1, 3)) == 12
        assert tokens_of(host.engine, prompt(2, 2)) == 0  # in the bounce reserve, on no tier yet
    host.engine.drain(WAIT)
    assert host.load(prompt(1, 3)).tokens == 12
    assert host.load(prompt(2, 2)).tokens == 8


def test_more_pages_than_bounce_slots_pass_through(open_host: OpenHost, device: str) -> None:
    host = open_host(device=device, cpu=None, ssd=20, bounce=2)
    tokens = prompt(1, 15)
    host.store(tokens)
    quiet(host.engine)
    assert host.load(tokens).bytes_by_tier == {"ssd": 15 * host.layout.page_bytes}


def test_two_loads_at_once_that_exceed_the_cpu_pool(open_host: OpenHost, device: str) -> None:
    host = open_host(device=device, cpu=4, ssd=20, bounce=2)
    prompts = [prompt(1, 8), prompt(2, 8)]
    for tokens in prompts:
        host.store(tokens)
        quiet(host.engine)
    for _ in range(5):
        drop_from(host.engine, "cpu")
        begun = [host.begin(t) for t in prompts]
        for load, _, _ in reversed(begun):
            # finish() holds everything free against the sentinel, so both must have ended
            load.result()
        for load, blocks, keys in begun:
            assert host.finish(load, blocks, keys).tokens == 32


# -- cancel ----------------------------------------------------------------------------------------------------------


def test_a_cancelled_load_ends_and_its_slots_come_back(open_host: OpenHost, device: str) -> None:
    host = open_host(device=device, transport=FAULTY, cpu=3)
    tokens = prompt(1, 10)
    host.store(tokens)
    quiet(host.engine)
    drop_from(host.engine, "cpu")
    with PLAN.rule(Op.READ, Fault.HANG):
        load, blocks, _ = host.begin(tokens)
        load.cancel()
        assert load.cancelled
        assert not load.release_event.done()
    load.release_event.synchronize(WAIT)
    report = load.result()
    assert set(report.pages) <= {PageStatus.CANCELLED, LOADED}
    assert report.tokens < 40
    host.give(blocks)
    settle(host.engine)
    assert host.load(tokens).tokens == 40  # nothing was dropped
    load.cancel()


def test_cancelling_one_load_costs_no_other(open_host: OpenHost) -> None:
    """Two requests want the same pages from the SSD; the first one gives up while they are being read."""
    host = open_host(transport=FAULTY)
    tokens = prompt(1, 4)
    host.store(tokens)
    quiet(host.engine)
    drop_from(host.engine, "cpu")
    with PLAN.rule(Op.READ, Fault.HANG) as rule:
        first, blocks, _ = host.begin(tokens)
        until(lambda: rule.met > 0, "the first load reads")
        second = host.begin(tokens)
        first.cancel()
    first.result()
    host.give(blocks)
    assert host.finish(*second).pages == (LOADED,) * 4


@pytest.mark.parametrize("reopened", [False, True])
@pytest.mark.parametrize("cpu", [None, 6])
def test_a_clear_does_not_spoil_a_load_that_holds_its_pages(
    open_host: OpenHost, cpu: int | None, reopened: bool
) -> None:
    """A leased page stays readable until its load is over; a clear is no checksum error."""
    options: dict[str, Any] = {"transport": FAULTY, "cpu": cpu, "limits": dataclasses.replace(SMALL, load_threads=1)}
    host = open_host(**options)
    first, tokens = prompt(1, 2), prompt(2, 3)
    for t in (first, tokens):
        host.store(t)
        quiet(host.engine)
    if reopened:  # then no checksum is in memory yet
        host.engine.close()
        host = open_host(**options)
    elif cpu:
        drop_from(host.engine, "cpu")
    with PLAN.rule(Op.READ, Fault.HANG) as rule:
        blocking = host.begin(first)
        until(lambda: rule.met > 0, "the only thread for loads is busy")
        waiting = host.begin(tokens)
        removed = host.engine.clear()
        assert removed["ssd"] == 5
    for load, _, _ in (blocking, waiting):
        load.result()
    assert host.finish(*blocking).pages == (LOADED,) * 2
    assert host.finish(*waiting).pages == (LOADED,) * 3
    assert tokens_of(host.engine, tokens) == 0
    settle(host.engine)


def test_deadlines_are_kept_and_what_is_late_is_harmless(open_host: OpenHost) -> None:
    host = open_host(transport=FAULTY, deadline=0.3, cpu=3, ssd=12)
    tokens = prompt(1, 4)
    host.store(tokens)
    quiet(host.engine)
    drop_from(host.engine, "cpu")
    blocks = host.take(4)
    with PLAN.rule(Op.READ, Fault.HANG):
        hit = host.engine.lookup(tokens)
        load = host.engine.load(hit, blocks)
        with pytest.raises(GdsCacheError, match=r"verdict|ready"):
            load.result(0.05)
        report = load.result(WAIT)
        assert report.tokens == 0
        assert set(report.pages) == {PageStatus.DEADLINE}
    assert host.engine.stats()["misses"]["deadline"] == 4
    until(lambda: tokens_of(host.engine, tokens) == 16, "the late reads end")  # late is not bad: the pages stay
    assert host.engine.check().problems == ()
    host.engine.close()


# -- bad input -------------------------------------------------------------------------------------------------------


def state(host: Host) -> Any:
    stats = host.engine.stats()
    return [(n, t["pages"], t["free_slots"]) for n, t in stats["tiers"].items()], stats["leases"], stats["store_queue"]


@pytest.mark.parametrize(
    ("slots", "error", "words"),
    [
        ([0, 1, 64], SlotRangeError, "0 ... 64.*0 ... 63"),
        ([-1, 1, 2], SlotRangeError, "-1 ... 2"),
        ([3, 4, 3], SlotRangeError, "twice"),
        ([0.0, 1.0, 2.0], SlotRangeError, "float"),
        ([0, 1, 2, 3, 4], SlotCountError, "5 pages.*4"),
        (torch.tensor([1, 2], dtype=torch.int16), SlotRangeError, "int16"),
    ],
)
def test_bad_slots_hold_nothing(open_host: OpenHost, slots: Any, error: type[GdsCacheError], words: str) -> None:
    host = open_host()
    tokens = prompt(1, 4, extra=1)
    host.store(tokens)
    quiet(host.engine)
    before, hit = state(host), host.engine.lookup(tokens)
    for use in (
        lambda: host.engine.load(hit, slots),
        lambda: host.engine.load_many([(hit, [7, 8]), (hit, slots)]),
        lambda: host.engine.store(tokens, slots),
    ):
        with pytest.raises(error, match=words):
            use()
    assert state(host) == before
    assert untouched(host.planes, range(64))


def test_a_slot_may_not_be_in_two_requests_of_a_batch(open_host: OpenHost) -> None:
    host = open_host()
    tokens = prompt(1, 2)
    host.store(tokens)
    quiet(host.engine)
    before, hit = state(host), host.engine.lookup(tokens)
    with pytest.raises(SlotRangeError, match="twice"):
        host.engine.load_many([(hit, [1, 2]), (hit, [3, 2])])
    assert state(host) == before


def test_a_broken_page_of_blocks(open_host: OpenHost) -> None:
    host = open_host(block_tokens=1)
    host.store(prompt(1, 2))
    quiet(host.engine)
    before = state(host)
    with pytest.raises(SlotCountError, match=r"6 blocks.*4 blocks"):
        host.engine.load(host.engine.lookup(prompt(1, 2)), range(6))
    with pytest.raises(SlotCountError):
        host.engine.store(prompt(1, 2), range(6))
    assert state(host) == before


def test_bad_tokens_and_starts_hold_nothing(open_host: OpenHost) -> None:
    host = open_host()
    before = state(host)
    for bad in ("text", [1.5], [-1], [[1]]):
        with pytest.raises(TokensError):
            host.engine.store(bad, [])
        with pytest.raises(TokensError):
            host.engine.lookup(bad)
    for start in (-4, 1, 3):
        with pytest.raises(TokensError, match=f"start is {start}"):
            host.engine.store(prompt(1, 2), [1], start)
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
    assert not [t for t in threading.enumerate() if t.name.startswith("gdscache")]
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
    failures: list[BaseException] = []
    done = [0] * 6

    def work(number: int) -> None:
        rng = random.Random(number)
        mine = list(range(16 * number, 16 * number + 16))
        try:
            while time.monotonic() < end and not failures:
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
        except BaseException as error:  # noqa: BLE001 - handed to the main thread
            failures.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(len(done))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(3 * WAIT)
    if failures:
        raise failures[0]
    assert min(done) > 0
    assert set(engine.stats().get("misses", {})) <= {"absent", "cancelled"}, engine.stats()["misses"]
