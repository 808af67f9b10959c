"""HybridEngine: the pages of which groups are kept, pinned and evicted, and the states that stand behind pages."""

from __future__ import annotations

import logging
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from gdscache import HybridEngine
from gdscache.engine.hybrid_handles import HybridHit
from gdscache.engine.hybrid_states import StandingStates
from gdscache.errors import (
    CapacityError,
    EngineClosedError,
    GdsCacheError,
    InvalidValueError,
    SlotCountError,
    SlotRangeError,
    StorageError,
    TokensError,
)
from gdscache.groups.base import Group
from gdscache.groups.names import GroupNames
from gdscache.store.handle import StoreHandle
from tests.support.helpers import WAIT, prompt, raising, together, until
from tests.support.hybrid import FULL, KV, MODELS, PROMPT, WINDOW, OpenHybrid, drop, hybrid_config, planes_of
from tests.support.pairs import one_in

# -- stores ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
def test_windows_are_kept_where_prompts_end_and_where_it_was_asked_for(open_hybrid: OpenHybrid, model: str) -> None:
    host = open_hybrid(model, every=0)
    host.store(PROMPT, keep_at=[17, 24])
    for length in range(0, 49, 8):
        ended = host.found(PROMPT[:length])
        assert ended == host.longest(PROMPT[:length])
        assert ended >= {48: 48, 16: 16, 24: 24, 32: 24, 40: 24, 8: 0, 0: 0}[length]
        assert ended <= {48: 48, 16: 16, 24: 24, 32: 24, 40: 24, 8: 0, 0: 0}[length] or model not in (
            "apart",
            "together",
        )
        assert host.load(PROMPT[:length]).tokens == ended


def test_what_all_groups_had_up_to_where_prompts_part_is_said(open_hybrid: OpenHybrid) -> None:
    """So that the second prompt keeps its windows there, and the third finds them."""
    host = open_hybrid("apart", every=0)
    host.store(PROMPT)
    second = [*PROMPT[:24], *prompt(2, 6)]
    hit = host.engine.lookup(second)
    assert (hit.tokens, hit.parted) == (0, 24)
    host.store(second, keep_at=[hit.parted])
    third = [*PROMPT[:24], *prompt(3, 6)]
    assert host.engine.lookup(third).tokens == host.load(third).tokens == 24


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("chunk", [8, 16])
def test_a_prompt_that_is_stored_chunk_by_chunk_with_windows_that_go(
    open_hybrid: OpenHybrid, model: str, chunk: int
) -> None:
    """A window that ends behind a chunk has its pages kept when the chunk is stored, and not let go before."""
    host, tokens = open_hybrid(model, every=24, blocks=96), PROMPT[:48]
    for stop in range(chunk, 49, chunk):
        gone = {group.name: group.first(stop - chunk) for group in host.groups}
        host.store(tokens[:stop], max(0, stop - chunk), gone=gone, keep_at=[40])
    for length in (24, 40, 48):
        assert host.load(tokens[:length]).tokens == length == host.longest(tokens[:length])


def test_pages_that_were_let_go_are_not_stored_and_others_are(open_hybrid: OpenHybrid) -> None:
    host = open_hybrid("together", per_page=2)
    slots = host.compute(PROMPT)
    lost = dict(slots)
    lost["window"] = [*slots["window"]]
    lost["window"][2 * 10] = -1  # half of page 10 went
    store = host.engine.store(PROMPT, lost)
    store.released(WAIT)
    report = store.result(WAIT)
    host.give(slots)
    host.rest()
    assert list(report.tiers["full"]) == list(range(12))
    assert 10 not in report.tiers["window"]
    assert set(report.tiers["window"].values()) == {("cpu", "ssd")}
    assert report.dropped == {"full": {}, "window": {}}
    assert host.found(PROMPT) == 32 == host.longest(PROMPT)
    assert host.store(PROMPT).tiers["window"][10] == ("cpu", "ssd")  # again, with all of it
    assert host.load(PROMPT).tokens == 48


# -- pages that go -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drop", ["invalidate", "clear"])
def test_an_error_of_one_pool_leaves_no_page_of_the_others(
    open_hybrid: OpenHybrid, monkeypatch: pytest.MonkeyPatch, drop: str
) -> None:
    host = open_hybrid("apart")
    host.store(PROMPT)
    with monkeypatch.context() as patched:
        patched.setattr(host.engine.engines[0], drop, raising(StorageError("the disk is broken")))
        with pytest.raises(StorageError):
            getattr(host.engine, drop)()
    assert (host.found(PROMPT), [len(engine.manager.cpu.index) > 0 for engine in host.engine.engines]) == (
        0,
        [True, False],
    )


@pytest.mark.parametrize("model", one_in(2, zip(MODELS)))
def test_hot_prompts_outlive_cold_ones_whole(open_hybrid: OpenHybrid, model: str) -> None:
    """Each pool is under pressure by itself, and what a hit needs of each is used when it is: it stays in all."""
    host = open_hybrid(model, cpu=None, ssd=36)
    hot = PROMPT[:41]
    host.store(hot)
    for seed in range(2, 40):
        assert host.load(hot).tokens == 40, f"lost behind {seed} cold prompts"
        host.store(prompt(seed, 6))
    cold = [host.longest(prompt(seed, 6)) for seed in range(2, 40)]
    assert all(engine.stats()["tiers"]["ssd"]["evictions"] for engine in host.engine.engines)
    assert not any(cold[:20])
    assert cold[-1] == 24


@pytest.mark.parametrize(("model", "groups"), [("together", [2]), ("mixed", [1, 2]), ("state", [1, 1, 1])])
def test_each_pool_evicts_by_the_groups_that_keep_tokens(
    open_hybrid: OpenHybrid, model: str, groups: list[int]
) -> None:
    for engine, wanted in zip(open_hybrid(model).engine.engines, groups, strict=True):
        orders = [tier.index.orders.policy for tier in engine.manager.tiers.values()]
        assert [getattr(order, "groups", 0) for order in orders] == [wanted] * 2


@pytest.mark.parametrize("model", ["together", "uneven"])
def test_in_one_pool_the_last_window_goes_behind_the_pages_that_end_with_it(
    open_hybrid: OpenHybrid, model: str
) -> None:
    """Without its last window a prefix is out of reach, without its last page it is shorter by a page."""
    host = open_hybrid(model, cpu=None, ssd=36, every=8)
    host.store(PROMPT)
    [engine] = host.engine.engines
    found = [48]
    while found[-1]:
        with engine.manager.lock:
            engine.manager.tiers["ssd"].index.evict(1)
        found.append(host.longest(PROMPT))
        assert found[-1] >= found[-2] - 8, found
    assert found.count(0) == 1


# -- prefetches and pins -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
def test_a_prefetch_brings_the_hit_and_pins_keep_it(open_hybrid: OpenHybrid, model: str) -> None:
    host = open_hybrid(model, cpu=40, ssd=80)
    host.store(PROMPT)
    drop(host, "cpu")
    with host.engine.prefetch(PROMPT, pin=WAIT) as prefetch:
        prefetch.result(WAIT)
        assert (prefetch.tokens, prefetch.verified, prefetch.done()) == (48, 48, True)
        drop(host, "ssd")
        hit = prefetch.hit()
        assert hit.tokens == 48
        load, slots = host.begin(hit)
    report = host.finish(hit, load, slots, PROMPT)
    assert (report.tokens, list(report.bytes_by_tier)) == (48, ["cpu"])
    assert prefetch.verified == 0
    assert prefetch.hit().tokens == 0


def test_a_prefetch_of_a_hit_and_what_it_refuses(open_hybrid: OpenHybrid) -> None:
    host = open_hybrid("apart")
    host.store(PROMPT)
    drop(host, "cpu")
    hit = host.engine.lookup(PROMPT, 16)
    with host.engine.prefetch(hit) as prefetch:
        assert prefetch.wait(WAIT) == 32
        with pytest.raises(InvalidValueError, match="no pins"):
            prefetch.hit()
    assert set(host.engine.lookup(PROMPT, 16).parts[0].tiers) == {"cpu"}
    for wrong in ({"start": 16}, {"salt": "a"}):
        with pytest.raises(InvalidValueError, match="a hit is given"):
            host.engine.prefetch(hit, **wrong)
    with pytest.raises(InvalidValueError, match="pin"):
        host.engine.prefetch(hit, pin=-1)
    with pytest.raises(InvalidValueError, match="of another engine"):
        host.engine.prefetch(HybridHit(0, 0, {}, 0))
    assert host.engine.prefetch(prompt(5, 4)).wait() == 0


def test_a_prefetch_of_a_hit_that_begins_within_a_page_of_the_planes(open_hybrid: OpenHybrid) -> None:
    groups = [FULL | {"layers": [0, 1], "page_tokens": 2}, WINDOW | {"layers": [0, 1], "page_tokens": 6}]
    host = open_hybrid(KV | {"layers": 2, "groups": groups}, cpu=60, ssd=60)
    tokens = prompt(1, 9)
    host.store(tokens)
    for start in (6, 12):
        drop(host, "cpu")
        with host.engine.prefetch(host.engine.lookup(tokens, start), pin=WAIT) as prefetch:
            prefetch.result(WAIT)
            hit = prefetch.hit()
            assert (hit.start, hit.tokens) == (start, 36 - start)
            assert host.finish(hit, *host.begin(hit), tokens).tokens == 36 - start


def test_a_pinned_page_that_is_cleared_is_no_part_of_a_hit(open_hybrid: OpenHybrid) -> None:
    host = open_hybrid("apart", cpu=40)
    host.store(PROMPT)
    with host.engine.prefetch(PROMPT, pin=WAIT) as prefetch:
        prefetch.result(WAIT)
        host.lose("window", PROMPT, [11])
        assert prefetch.verified == 0
        assert prefetch.hit().tokens == 0


@pytest.mark.parametrize("model", ["apart", "together"])
def test_a_pin_keeps_all_that_a_hit_needs(open_hybrid: OpenHybrid, model: str) -> None:
    host = open_hybrid(model, cpu=40, ssd=40, every=0)
    host.store(PROMPT)
    with host.engine.pin(PROMPT, WAIT) as pin:
        assert pin.tokens == 48
        for seed in range(2, 20):
            host.store(prompt(seed, 6))
        assert host.load(PROMPT).tokens == pin.tokens == 48
        host.lose("window", PROMPT, [11])
        assert pin.tokens == 0
    assert host.engine.pin(prompt(9, 3), 0.05).tokens == 0


def test_a_pin_of_a_hit_without_pages_ends(open_hybrid: OpenHybrid) -> None:
    host = open_hybrid(KV | {"layers": 2, "groups": [{"name": "chunk", "layers": [0, 1], "chunk": 16}]})
    host.store(PROMPT)
    with host.engine.pin(PROMPT, WAIT) as pin:
        assert pin.tokens == 48
        assert not any(host.engine.lookup(PROMPT).pages.values())
    assert pin.tokens == 0
    brief = host.engine.pin(PROMPT, 0.01)
    until(lambda: brief.tokens == 0, "the pin's time is up")


# -- stores that are refused -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["apart", "together"])
def test_wrong_stores_are_clear_errors_and_store_nothing(open_hybrid: OpenHybrid, model: str) -> None:
    host = open_hybrid(model)
    slots = host.compute(PROMPT)
    both = {**slots, "window": slots["full"]}
    wrong: list[tuple[Any, dict[str, Any], type[GdsCacheError], str]] = [
        ({"full": slots["full"]}, {}, InvalidValueError, "no slots are given for group 'window'"),
        ({**slots, "other": []}, {}, InvalidValueError, "there is no group 'other'"),
        (None, {}, InvalidValueError, "mapping"),
        ({**slots, "window": [*slots["window"], 5]}, {}, SlotCountError, "group 'window': 13 blocks"),
        (slots, {"start": 16}, SlotCountError, "group 'full': 12 blocks"),
        (slots, {"start": 480}, SlotCountError, "group 'full': 12 blocks"),
        ({**slots, "window": [-2, *slots["window"][1:]]}, {}, SlotRangeError, "0 ... 63"),
        ({**slots, "window": [slots["window"][1], *slots["window"][1:]]}, {}, SlotRangeError, "twice"),
        (slots, {"start": 2}, TokensError, "start is 2"),
        (slots, {"start": -4}, TokensError, "start is -4"),
        (slots, {"salt": 5}, InvalidValueError, "salt"),
        (slots, {"keep_at": [1.5]}, InvalidValueError, "keep_at"),
        (slots, {"keep_at": [-1]}, InvalidValueError, "keep_at"),
        (slots, {"keep_at": 16}, InvalidValueError, "keep_at is 16"),
        (slots, {"keep_at": torch.tensor(16)}, InvalidValueError, "keep_at is of type Tensor"),
        (slots, {"priority": 9}, InvalidValueError, "priority"),
        (slots, {"ttl": 0}, InvalidValueError, "ttl"),
        *([(both, {}, SlotRangeError, "twice")] if model == "together" else []),
    ]
    for given, options, kind, message in wrong:
        with pytest.raises(kind) as caught:
            host.engine.store(PROMPT, given, **options)
        assert message in str(caught.value) + str(caught.value.hint)
    host.rest()
    assert [engine.stats()["tiers"]["cpu"]["pages"] for engine in host.engine.engines] == [0] * len(host.engine.engines)
    for start in (2, -4, True, 1.0):
        with pytest.raises(TokensError, match="start is"):
            host.engine.lookup(PROMPT, start)  # type: ignore[arg-type]
    host.engine.store(PROMPT, slots).released(WAIT)
    host.give(slots)
    host.rest()
    assert host.load(PROMPT).tokens == 48


def test_fewer_slots_store_fewer_pages(open_hybrid: OpenHybrid) -> None:
    host = open_hybrid("apart", every=8)
    slots = host.compute(PROMPT)
    host.engine.store(PROMPT, {name: blocks[:6] for name, blocks in slots.items()}).released(WAIT)
    host.give(slots)
    host.rest()
    assert host.load(PROMPT).tokens == 24


def test_a_store_that_one_pool_refuses_reads_nothing_behind_the_error(
    open_hybrid: OpenHybrid, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, begun = open_hybrid("apart"), StoreHandle(1)
    slots = host.compute(PROMPT)
    refused = raising(EngineClosedError("the engine was closed meanwhile", "open a new one"))
    for engine, store in zip(host.engine.engines, (lambda *_, **__: begun, refused), strict=True):
        monkeypatch.setattr(engine, "store_pages", store)
    threading.Timer(0.1, begun.read, [None]).start()
    with pytest.raises(EngineClosedError):
        host.engine.store(PROMPT, slots)
    assert begun.release_event.done()


# -- states ------------------------------------------------------------------------------------------------------------


def test_a_state_leaves_with_the_page_that_it_stands_behind(open_hybrid: OpenHybrid) -> None:
    """Its pool has room for it, and cannot learn that no hit ends there any more."""
    host = open_hybrid("state", ssd=None)
    host.store(PROMPT)
    full, states = (host.engine.by_groups[name].manager for name in ("full", "state"))
    assert (host.found(PROMPT), len(states.cpu.index)) == (48, 3)
    with full.lock:
        full.cpu.index.evict(1)  # the last page, where the last state is
    assert len(states.cpu.index) == 3
    host.store(prompt(2, 2))
    assert (host.found(PROMPT), len(states.cpu.index)) == (32, 2 + 1)
    host.store(PROMPT)
    assert (host.found(PROMPT), len(states.cpu.index)) == (48, 3 + 1)


def test_a_state_that_comes_again_with_its_page_leaves_with_it_again(open_hybrid: OpenHybrid) -> None:
    host = open_hybrid("state", ssd=None)
    full, states = (host.engine.by_groups[name].manager for name in ("full", "state"))
    for _ in range(2):
        host.store(PROMPT)
        assert len(states.cpu.index) == 3
        with full.lock:
            full.cpu.index.evict(12)
    host.store(prompt(2, 2))
    assert len(states.cpu.index) == 1


def test_a_state_that_is_read_stays_until_then(open_hybrid: OpenHybrid) -> None:
    host = open_hybrid("state", ssd=None)
    host.store(PROMPT)
    full, states = (host.engine.by_groups[name].manager for name in ("full", "state"))
    with full.lock, states.lock:
        (key,) = host.engine.lookup(PROMPT).parts[-1].pages
        lease = states.lease("a load")
        lease.add(states.cpu.index, states.cpu.index.get(key.key))
        full.cpu.index.evict(1)
    host.store(prompt(2, 2))
    assert len(states.cpu.index) == 3 + 1
    states.end(lease)


def test_an_interrupt_while_a_state_leaves_ends_its_engine(
    open_hybrid: OpenHybrid, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its index may be half changed."""
    host = open_hybrid("state", ssd=None)
    host.store(PROMPT)
    full, states = (host.engine.by_groups[name] for name in ("full", "state"))
    with full.manager.lock:
        full.manager.cpu.index.evict(1)  # the last page, where the last state is
    with monkeypatch.context() as patched:
        patched.setattr(type(states.manager.cpu.index), "drop", raising(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            host.engine.lookup(PROMPT)
    assert states.calls.broken_by == "KeyboardInterrupt"
    states.close()


def test_a_state_before_the_end_of_the_first_page_stands_behind_none(open_hybrid: OpenHybrid) -> None:
    groups = (Group("full", (0,), 8), Group("state", (1,), 4, "state"))
    managers = [engine.manager for engine in open_hybrid("apart").engine.engines]
    states, names = StandingStates(groups, [(0,), (1,)], managers), GroupNames(groups, [bytes(32)] * 2, 4)
    for digest in range(3):
        names.extend([bytes([digest]) * 32])
        states.stand(names, [[], [0]])
    assert not states._behind


def test_states_are_noted_and_leave_while_many_threads_look(open_hybrid: OpenHybrid) -> None:
    host = open_hybrid("state", ssd=None)
    states, [whole, *_] = host.engine.states, host.engine.engines
    prompts = [prompt(seed, 8) for seed in range(40)]
    host.store(PROMPT)
    named = [host.engine._request(tokens, "")[0] for tokens in prompts for _ in range(8)]
    pages = [range(len(tokens) // group.page_tokens) for tokens in prompts[:1] for group in host.groups]
    keys = [names.key(0, number) for names in named for number in range(8)]

    def look(thread: int) -> None:
        for names in named[thread::8] * 20:
            with whole.manager.lock:
                whole.manager.cpu.index.on_evict(keys[:64])  # as if these had just gone
            states.stand(names, pages)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        together(look, 8)
    finally:
        sys.setswitchinterval(interval)
    assert host.load(PROMPT).tokens == 48


# -- sizes -------------------------------------------------------------------------------------------------------------


def test_pools_share_every_size(open_hybrid: OpenHybrid, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "gdscache")
    host = open_hybrid("mixed", cpu=40)
    total, parts = host.engine.config, [engine.config for engine in host.engine.engines]
    for read in (
        lambda config: config.cpu.capacity,
        lambda config: config.ssd.capacity,
        lambda config: config.gpu.staging,
        lambda config: config.host_buffer,
        lambda config: config.store.queue,
    ):
        assert read(total) - len(parts) <= sum(map(read, parts)) <= read(total)
    said = [record.getMessage() for record in caplog.records if "of each size" in record.getMessage()]
    assert len(said) == len(parts) == 2
    assert {line.split(":")[0] for line in said} == {"groups chunk", "groups full, window"}


@pytest.mark.parametrize(
    ("key", "sizes"),
    [
        ("cpu.capacity", {"cpu": {"capacity": 50_000}}),
        ("gpu.staging", {"gpu": {"device": "cpu", "staging": 50_000}}),
        ("host_buffer", {"host_buffer": 50_000}),
        ("store.queue", {"store": {"queue": 50_000, "window_every": 0}}),
    ],
)
def test_a_share_that_holds_no_page_is_one_error_with_the_setting(
    tmp_path: Path, key: str, sizes: dict[str, Any]
) -> None:
    model = KV | {"layers": 2, "groups": [FULL | {"layers": [0]}, WINDOW | {"layers": [1]}]}
    planes, config = planes_of(2), hybrid_config(tmp_path, model, every=0, cpu=8) | sizes
    with pytest.raises(CapacityError) as caught:
        HybridEngine.from_config(config, planes)
    message = str(caught.value)
    assert f"{key} is 50,000 bytes" in message or f"{key} is 50000" in message
    assert "window 0.2 % (" in message
    assert f"raise {key} to " in str(caught.value.hint)
    assert not list(tmp_path.iterdir())
    least = str(caught.value.hint).partition(f"raise {key} to ")[2].split(" ")[0]
    section, _, inner = key.partition(".")
    config[section] = {**config[section], inner: least} if inner else least
    HybridEngine.from_config(config, planes).close()


def test_endurance_is_shared(open_hybrid: OpenHybrid) -> None:
    host = open_hybrid("apart")
    data = host.engine.config.dump()
    host.engine.close()
    data["ssd"]["endurance"] = "64MiB"
    with HybridEngine.from_config(data, host.planes) as engine:
        assert sum(e.config.ssd.endurance for e in engine.engines if e.config.ssd) <= 64 << 20
