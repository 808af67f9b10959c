"""HybridEngine: what all groups of layers have is found, loaded bit for bit and kept; what one lacks is no hit."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from prometheus_client import CollectorRegistry

from examples.shared_pool.view import CacheView
from gdscache import CacheEngine, HybridEngine, PageHashes, PageStatus, RankAddress
from gdscache.errors import (
    ConfigError,
    EngineClosedError,
    ExtentSizeError,
    GdsCacheError,
    InvalidValueError,
    PlanesError,
    PoolFullError,
    SlotCountError,
    SlotRangeError,
    TokensError,
)
from gdscache.events.base import BlockStored, KVEventBatch
from gdscache.gate.fit import ENOUGH
from gdscache.gate.gate import EXPLORE_EVERY
from gdscache.metrics import EngineCollector
from gdscache.storage.base import Op
from tests.support.dict_tier import DictTier
from tests.support.faulty import PLAN, Fault
from tests.support.helpers import WAIT, flip_file, prompt, raising, read_page, together, until, untouched
from tests.support.hybrid import (
    FULL,
    KV,
    LOADED,
    MODELS,
    PROMPT,
    WINDOW,
    HybridHost,
    OpenHybrid,
    drop,
    hybrid_config,
    pages_for,
    planes_of,
)
from tests.support.pages import FAULTY
from tests.support.pairs import pairs
from tests.support.prometheus import fetched, free_port

# -- bit for bit -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("per_page", [1, 2])
@pytest.mark.parametrize("model", MODELS)
def test_bytes_survive_every_tier_and_a_restart(
    open_hybrid: OpenHybrid, device: str, model: str, per_page: int
) -> None:
    host = open_hybrid(model, device=device, per_page=per_page)
    host.store(PROMPT)
    assert host.load(PROMPT).tokens == 48
    drop(host, "cpu")
    report = host.load(PROMPT)
    assert (report.tokens, list(report.bytes_by_tier)) == (48, ["ssd"])
    host.engine.close()
    host = open_hybrid(model, device=device, per_page=per_page)
    assert host.load(PROMPT).tokens == 48
    assert host.load(PROMPT[:40]).tokens == host.longest(PROMPT[:40]) >= 32  # windows are kept every 16 tokens


@pytest.mark.parametrize("model", ["apart", "mixed", "state"])
def test_packed_bytes_survive_every_tier_and_a_restart(open_hybrid: OpenHybrid, device: str, model: str) -> None:
    """Half of the pages of tokens fit, and the others have eight slots of each tier; states are as they are. A
    directory says that it is packed, and its pages have other names than unpacked ones."""
    tokens = PROMPT[:24]
    tiers = {"device": device, "cpu": 200, "ssd": 200, "bounce": 64, "per_page": 2}
    host = open_hybrid(MODELS[model] | {"pack": "on"}, **tiers)
    states = [group.name for group in host.groups if group.keeps == "state"]
    assert [engine.layout.packed for engine in host.engine.engines] == [
        not {*names} & {*states} for names in host.engine.names
    ]
    host.store(tokens)
    for tiers_of, cold in (("cpu", False), ("ssd", True)):
        if cold:
            drop(host, "cpu", "cpu_plain")
        report = host.load(tokens)
        assert report.tokens == 24
        assert {*report.bytes_by_tier} == {tiers_of, f"{tiers_of}_plain"}
    host.engine.close()
    for pack in ("auto", "on"):
        host = open_hybrid(MODELS[model] | {"pack": pack}, **tiers)
        assert host.engine.config.model.pack == "on"
        for tiers_of in ("ssd", "cpu"):
            report = host.load(tokens)
            assert (report.tokens, {*report.bytes_by_tier}) == (24, {tiers_of, f"{tiers_of}_plain"})
        host.engine.close()
    host = open_hybrid(MODELS[model] | {"pack": "off"}, **tiers)
    assert host.found(tokens) == 0


def test_a_first_pool_that_is_not_packed_beside_packed_ones(open_hybrid: OpenHybrid) -> None:
    """Only the packed ones have tiers of plain pages."""
    model = MODELS["state"]
    groups = sorted(model["groups"], key=lambda group: group["name"] != "state")
    host = open_hybrid(model | {"groups": groups, "pack": "on"}, cpu=200, ssd=200, bounce=64)
    assert [engine.layout.packed for engine in host.engine.engines] == [False, True, True]
    host.store(PROMPT[:24])
    assert {*host.load(PROMPT[:24]).bytes_by_tier} == {"cpu", "cpu_plain"}
    hit = host.engine.stats()["tokens"]["hit"]
    assert hit["cpu"] + hit["cpu_plain"] == 24
    host.engine.observe_load("cpu_plain", 4096, 1.0)
    with pytest.raises(InvalidValueError, match="no tier 'plain'"):
        host.engine.observe_load("plain", 4096, 1.0)


@pytest.mark.parametrize("model", MODELS)
def test_a_hit_has_the_pages_that_its_next_token_attends_to_and_no_others(open_hybrid: OpenHybrid, model: str) -> None:
    host = open_hybrid(model)
    host.store(PROMPT)
    for start in range(0, 48, host.engine.alignment):
        hit = host.engine.lookup(PROMPT, start)
        assert hit.tokens == 48 - start
        for group in host.groups:
            assert list(hit.pages[group.name]) == pages_for(group, 48, start), group.name
        assert host.load(PROMPT, start).tokens == 48 - start


@pytest.mark.parametrize("model", MODELS)
def test_requests_that_name_themselves(open_hybrid: OpenHybrid, model: str) -> None:
    host = open_hybrid(model)
    size = host.engine.hash_tokens
    hashes = PageHashes([hashlib.sha256(repr(PROMPT[: at + size]).encode()).digest() for at in range(0, 48, size)], 49)
    host.store(PROMPT, named=hashes)
    assert host.found(PROMPT) == 0, "keys of tokens and of hashes meet"
    hit = host.engine.lookup(hashes)
    assert hit.tokens == 48
    assert host.finish(hit, *host.begin(hit), PROMPT).tokens == 48
    short = PageHashes([hashlib.sha256(repr(PROMPT[: at + size]).encode()).digest() for at in range(0, 32, size)])
    assert host.engine.lookup(short).tokens == 32
    with pytest.raises(TokensError, match="middle"):
        host.engine.lookup(PageHashes([bytes(32)], parent=bytes([1]) * 32))


def test_salts_are_apart_and_go_one_by_one(open_hybrid: OpenHybrid) -> None:
    host = open_hybrid("mixed", cpu=40, ssd=80)
    for salt in ("", "a"):
        host.store(PROMPT, salt=salt)
    assert host.load(PROMPT, salt="b").tokens == 0
    there = {tier: sum(len(e.manager.tiers[tier].index) for e in host.engine.engines) for tier in ("cpu", "ssd")}
    removed = host.engine.invalidate("a")
    assert removed == {tier: n // 2 for tier, n in there.items()}
    assert [host.load(PROMPT, salt=salt).tokens for salt in ("", "a")] == [48, 0]
    assert host.engine.clear() == removed
    assert host.load(PROMPT).tokens == 0


def test_the_groups_of_a_salt_go_together_while_a_few_salts_are_known(
    open_hybrid: OpenHybrid, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gdscache.engine.engine._SALTS_KEPT", 3)
    host = open_hybrid("together")
    [engine] = host.engine.engines
    salts = ["a", "b", "c"]
    for salt in salts:
        host.store(PROMPT[:16], salt=salt)
    for salt in salts:
        engine.invalidate(engine.namespace(salt, engine.groups[0]))
    assert len(engine.manager.tiers["cpu"].index) == 0, "pages of a salt's other group are left"


# -- pages that go, or are bad -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["apart", "together", "uneven", "mixed"])
@pytest.mark.parametrize("name", ["full", "window"])
def test_a_page_that_one_group_lost_costs_its_lengths_and_nothing_worse(
    open_hybrid: OpenHybrid, model: str, name: str
) -> None:
    host = open_hybrid(model)
    host.store(PROMPT)
    last = 48 // next(group.page_tokens for group in host.groups if group.name == name) - 1
    host.lose(name, PROMPT, [last])
    assert 48 > host.found(PROMPT) == host.load(PROMPT).tokens == host.longest(PROMPT) >= 32
    host.store(PROMPT, 32)
    assert host.load(PROMPT).tokens == 48


@pytest.mark.parametrize("model", ["apart", "together", "uneven", "mixed"])
@pytest.mark.parametrize("name", ["full", "window"])
@pytest.mark.parametrize("tier", ["cpu", "ssd"])
def test_a_wrong_byte_of_one_group_is_no_hit_and_a_shorter_one_next_time(
    open_hybrid: OpenHybrid, slab: Path, model: str, name: str, tier: str
) -> None:
    host = open_hybrid(model)
    host.store(PROMPT)
    engine = host.of(name)[0]
    last = 48 // next(group.page_tokens for group in host.groups if group.name == name) - 1
    slot = engine.manager.tiers[tier].index.get(host.key(name, PROMPT, last)).slot
    if tier == "ssd":
        drop(host, "cpu")
        flip_file(engine.manager.ssd.path / "slab-0.bin", slot * engine.layout.extent_bytes + 100)
    else:
        engine.manager.cpu.extents.memory(slot)[100] ^= 1
    hit = host.engine.lookup(PROMPT)
    report = host.finish(hit, *host.begin(hit), PROMPT)
    assert (hit.tokens, report.tokens) == (48, 0)
    statuses = {(group, status) for group, some in report.pages.items() for status in some}
    assert {(group, status) for group, status in statuses if status is not LOADED} == {(name, PageStatus.CHECKSUM)}
    if tier == "cpu":  # the SSD's copy is good, and the page dropped from all that it came through
        assert host.load(PROMPT).tokens == 48
    else:
        assert 48 > host.load(PROMPT).tokens == host.longest(PROMPT) >= 32


@pytest.mark.parametrize("model", ["apart", "together", "mixed", "state"])
def test_a_batch_is_loaded_in_one_call_and_each_request_has_its_verdict(open_hybrid: OpenHybrid, model: str) -> None:
    """A bad page costs the request that has it, and no other."""
    host = open_hybrid(model)
    prompts = [[token + 1000 * n for token in PROMPT[:length]] for n, length in enumerate((16, 32, 16))]
    for tokens in prompts:
        host.store(tokens)
    engine = host.of("full")[0]
    slot = engine.manager.cpu.index.get(host.key("full", prompts[1], 0)).slot
    engine.manager.cpu.extents.memory(slot)[100] ^= 1
    hits = [host.engine.lookup(tokens) for tokens in prompts]
    nothing = host.engine.lookup([9] * 48)
    slots = [{name: host.take(name, len(pages)) for name, pages in hit.pages.items()} for hit in hits]
    load = host.engine.load_many([(hits[0], slots[0]), (nothing, {}), *zip(hits[1:], slots[1:], strict=True)])
    assert load.tokens_by_request == (16, 0, 32, 16)
    assert load.tokens == 64
    for layer in range(len(host.planes)):
        load.wait(layer, WAIT)
    reports = load.results(WAIT)
    assert [report.tokens for report in reports] == [16, 0, 0, 16]
    assert reports[2].pages["full"][0] is PageStatus.CHECKSUM
    whole = load.result(WAIT)
    assert whole.tokens == 32
    assert sum(map(len, whole.pages.values())) == sum(len(pages) for hit in hits for pages in hit.pages.values())
    load.released(WAIT)
    for tokens, hit, some in zip(prompts, hits, slots, strict=True):
        for group in host.groups if tokens != prompts[1] else ():
            layout, each = host.of(group.name)[0].layout, host.per_page(group.name)
            for row, number in enumerate(hit.pages[group.name]):
                got = read_page(host.of(group.name)[1], layout, some[group.name][row * each : (row + 1) * each])
                assert np.array_equal(got, host.data(group, tokens, number, ""))
    for some in slots:
        host.give(some)
    for tokens in (prompts[0], prompts[2]):
        assert host.load(tokens).tokens == 16


def test_a_batch_is_of_hits_of_this_engine_and_no_block_is_in_it_twice(open_hybrid: OpenHybrid, tmp_path: Path) -> None:
    host = open_hybrid("apart")
    host.store(PROMPT)
    hit = host.engine.lookup(PROMPT)
    slots = {name: host.take(name, len(pages)) for name, pages in hit.pages.items()}
    for batch in ([hit], [(hit.parts[0], slots)], hit, [(hit, slots, None)]):
        with pytest.raises(InvalidValueError, match="without a hit"):
            host.engine.load_many(batch)  # type: ignore[arg-type]
    with pytest.raises(SlotRangeError, match="twice"):
        host.engine.load_many([(hit, slots), (hit, slots)])
    more = {name: host.take(name, len(pages)) for name, pages in hit.pages.items()}
    with pytest.raises(SlotRangeError, match="twice"):  # in the second pool alone
        host.engine.load_many([(hit, slots), (hit, {**more, "window": slots["window"]})])
    assert untouched(host.of("full")[1], slots["full"] + more["full"]), "a call that is refused has begun a load"
    assert not any(engine.stats()["leases"] for engine in host.engine.engines)
    other = open_hybrid("windows", tmp_path / "other")
    for one, foreign in ((other, hit), (host, other.engine.lookup(PROMPT))):
        with pytest.raises(InvalidValueError, match="another engine"):
            one.engine.load(foreign, {group.name: [] for group in one.groups})
    empty = host.engine.load_many([])
    assert (empty.tokens, empty.results(WAIT), empty.result(WAIT).tokens) == (0, [], 0)
    host.give(slots)
    host.give(more)


def test_a_page_that_goes_behind_a_lookup_is_seen_by_the_load(open_hybrid: OpenHybrid) -> None:
    host = open_hybrid("mixed")
    host.store(PROMPT)
    hit = host.engine.lookup(PROMPT)
    host.lose("window", PROMPT, [11])
    load, slots = host.begin(hit)
    assert load.tokens == 0
    report = host.finish(hit, load, slots, PROMPT)
    assert report.tokens == 0
    assert report.pages["window"][-1] is PageStatus.GONE
    assert len(report.pages["full"]) == 12


def test_pages_that_expire_end_one_length_after_the_other(open_hybrid: OpenHybrid) -> None:
    host = open_hybrid("together", every=0)
    host.store(PROMPT[:16])
    host.store(PROMPT[:32], ttl=0.2)
    host.store(PROMPT, ttl=0.2)
    until(lambda: host.found(PROMPT) == 16, "what has a ttl is over")
    assert host.load(PROMPT).tokens == 16


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["apart", "together"])
def test_wrong_slots_are_clear_errors_and_begin_nothing(open_hybrid: OpenHybrid, model: str) -> None:
    host = open_hybrid(model)
    host.store(PROMPT)
    hit = host.engine.lookup(PROMPT)
    good = {name: host.take(name, len(pages)) for name, pages in hit.pages.items()}
    both = {**good, "window": good["full"][: len(good["window"])]}
    wrong: list[tuple[Any, type[GdsCacheError], str]] = [
        ({"full": good["full"]}, InvalidValueError, "no slots are given for group 'window'"),
        ({**good, "windows": [1]}, InvalidValueError, "there is no group 'windows'"),
        (good["full"], InvalidValueError, "mapping"),
        ({**good, "window": good["window"][1:]}, SlotCountError, "'window': slots for 2 pages, and the hit has 3"),
        ({**good, "window": [*good["window"][1:], 64]}, SlotRangeError, "0 ... 63"),
        ({**good, "window": [*good["window"][1:], -1]}, SlotRangeError, "0 ... 63"),
        ({**good, "full": [*good["full"][1:], good["full"][1]]}, SlotRangeError, "twice"),
        ({**good, "full": [0.5] * 12}, SlotRangeError, "dtype"),
        *([(both, SlotRangeError, "twice")] if model == "together" else []),
    ]
    for slots, kind, message in wrong:
        with pytest.raises(kind) as caught:
            host.engine.load(hit, slots)
        assert message in str(caught.value) + str(caught.value.hint)
    with pytest.raises(InvalidValueError, match="without a hit"):
        host.engine.load(hit.parts[0], good)  # type: ignore[arg-type]
    assert all(engine.stats()["leases"] == [] for engine in host.engine.engines)
    host.give(good)  # and all blocks are as they were
    assert host.load(PROMPT).tokens == 48


def test_starts_and_tokens_at_the_edges(open_hybrid: OpenHybrid) -> None:
    host = open_hybrid("mixed")
    host.store(PROMPT)
    host.store([])
    host.store([1, 2, 3])
    host.engine.store(PROMPT, {group.name: [] for group in host.groups}).result(WAIT)
    for tokens, start in (([], 0), ([], 8), (PROMPT, 48), (PROMPT, 4800), (PROMPT[:3], 0)):
        hit = host.engine.lookup(tokens, start)
        assert (hit.start, hit.tokens, {len(pages) for pages in hit.pages.values()}) == (start, 0, {0})
        report = host.finish(hit, *host.begin(hit), tokens)
        assert (report.tokens, report.bytes_by_tier, report.seconds) == (0, {}, 0.0)


def test_what_cannot_be_opened_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, planes = MODELS["apart"], planes_of(3)
    odd = [*planes[:2], [planes[2][0][:, :, :2]] * 2]
    wrong: list[tuple[dict[str, Any], Any, type[GdsCacheError], str]] = [
        ({"model": {**model, "groups": []}}, planes, InvalidValueError, "model.groups is empty"),
        ({}, planes[:2], PlanesError, "2 layers of planes for a model of 3"),
        ({}, 7, PlanesError, "planes are of type int"),
        ({}, odd, PlanesError, "groups window, whose layers are [0, 2] of the model: layer 1"),
        ({"tiers": [{"tier": "tests.support.dict_tier:DictTier"}]}, planes, InvalidValueError, "tiers names"),
        ({"events": {"endpoint": "tcp://127.0.0.1:5557"}}, planes, InvalidValueError, "several engines"),
    ]
    for changes, given, kind, message in wrong:
        with pytest.raises(kind) as caught:
            HybridEngine.from_config(hybrid_config(tmp_path, model) | changes, given)
        assert message in str(caught.value)
    monkeypatch.setattr(DictTier, "served", False)
    asked = {"tiers": [{"tier": "tests.support.dict_tier:DictTier"}], "ssd": None}
    with pytest.raises(InvalidValueError, match="tiers has dict, which a prefetch asks"):
        HybridEngine.from_config(hybrid_config(tmp_path, MODELS["together"]) | asked, planes_of(2))
    with pytest.raises(ConfigError, match="from_config"):
        HybridEngine({"model": model})  # type: ignore[arg-type]
    with (
        HybridEngine.from_config(hybrid_config(tmp_path, model), planes) as engine,
        pytest.raises(InvalidValueError, match="keep_at is 5"),
    ):
        engine.window_ends(40, 5)  # type: ignore[arg-type]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("gdscache-store")]


def test_an_engine_of_one_pool_refuses_what_it_cannot_do(tmp_path: Path) -> None:
    together = hybrid_config(tmp_path, MODELS["together"])
    with CacheEngine.from_config(together, planes_of(2)) as engine:
        small = hybrid_config(tmp_path, MODELS["apart"]) | {"cpu": {"capacity": 1 << 13}}
        calls: list[tuple[str, Callable[[], object]]] = [
            ("2 pools", lambda: CacheEngine.from_config(small, planes_of(3))),
            ("2 pools", lambda: CacheEngine.from_config(hybrid_config(tmp_path, MODELS["apart"]), planes_of(3))),
            ("no planes", lambda: CacheEngine.from_config(together)),
            (r"groups of layers \(full, window\)", lambda: engine.lookup(PROMPT)),
            (r"groups of layers \(full, window\)", lambda: engine.store(PROMPT, [0])),
            (r"groups of layers \(full, window\)", lambda: engine.prefetch(PROMPT)),
            (r"groups of layers \(full, window\)", lambda: engine.pin(PROMPT, 1.0)),
            (r"groups of layers \(full, window\)", lambda: engine.pages(PROMPT)),
        ]
        for message, call in calls:
            with pytest.raises(InvalidValueError, match=message) as caught:
                call()
            assert "HybridEngine" in str(caught.value.hint)
        with pytest.raises(GdsCacheError, match="attached"):
            engine.sequence(PROMPT)


def test_ranks_are_of_each_pool(tmp_path: Path) -> None:
    """What they do is in `integrations/test_vllm_states.py`."""
    config, address = hybrid_config(tmp_path, MODELS["apart"]), RankAddress("nobody", 0, 0)
    with pytest.raises(InvalidValueError, match="ranks of 1 pools"):
        HybridEngine.from_config(config, ranks=[[address]])
    with pytest.raises(InvalidValueError, match="ranks of 0 pools"):
        HybridEngine.from_config(config, ranks=address)  # type: ignore[arg-type]
    with pytest.raises(InvalidValueError, match="for 2 pools and 3 layers of planes"):
        HybridEngine.from_config(config, planes_of(3), ranks=[[address]] * 2)


# -- the same directory again ------------------------------------------------------------------------------------------


def layouts() -> dict[str, dict[str, Any]]:
    """Models of the same name and planes, whose groups differ."""
    three = KV | {"layers": 3}
    return {
        "as it was": three | {"groups": [FULL | {"layers": [1]}, WINDOW | {"layers": [0, 2]}]},
        "renumbered": three | {"groups": [FULL | {"layers": [2]}, WINDOW | {"layers": [0, 1]}]},
        "in another order": three | {"groups": [WINDOW | {"layers": [1]}, FULL | {"layers": [0, 2]}]},
        "another window": three | {"groups": [FULL | {"layers": [1]}, WINDOW | {"layers": [0, 2], "window": 11}]},
        "a chunk": three | {"groups": [FULL | {"layers": [1]}, {"name": "window", "chunk": 10, "layers": [0, 2]}]},
        "more layers": KV | {"layers": 4, "groups": [FULL | {"layers": [1, 3]}, WINDOW | {"layers": [0, 2]}]},
        "all in one": three | {"groups": [FULL | {"layers": [0, 1, 2]}, WINDOW | {"layers": [0, 1, 2]}]},
        "all in one, another window": three
        | {"groups": [FULL | {"layers": [0, 1, 2]}, WINDOW | {"layers": [0, 1, 2], "window": 9}]},
    }


def test_another_layout_of_groups_finds_no_page_of_the_one_before(open_hybrid: OpenHybrid) -> None:
    """Nor does the first one find any of theirs when it comes back, and it has all of its own."""
    tokens, stored = PROMPT, set[str]()
    for name in [*layouts(), *layouts()]:
        try:
            host = open_hybrid(layouts()[name], ssd=400, cpu=None)
        except ExtentSizeError:
            assert name in ("more layers", "in another order")  # a directory has pages of one size
            continue
        host.content = lambda group, tokens, salt, name=name: hash(name)  # type: ignore[misc]
        assert (host.load(tokens).tokens == 48) is (name in stored), name
        assert (host.found(tokens) > 0) is (name in stored), name
        host.store(tokens)
        stored.add(name)
        assert host.load(tokens).tokens == 48
        host.engine.close()
    assert len(stored) >= 6


# -- its own planes ----------------------------------------------------------------------------------------------------


def test_planes_of_its_own_and_their_blocks(tmp_path: Path) -> None:
    with HybridEngine.from_config(hybrid_config(tmp_path, MODELS["mixed"], gpu=10)) as engine:
        slots = {group.name: engine.take(group.name, 2) for group in engine.groups}
        for layer in range(4):
            for plane in engine.planes[layer]:
                plane[:] = layer + 1
        engine.store(PROMPT[:16], {"chunk": [-1, *slots["chunk"][:1]], "full": slots["full"], "window": [-1] * 4})
        engine.drain(WAIT)
        engine.give("full", slots["full"])
        for given in (slots["full"], [slots["chunk"][0]] * 2, [1000]):
            with pytest.raises(SlotRangeError, match="not taken"):
                engine.give("chunk" if given is not slots["full"] else "full", given)
        for nothing in (None, 3, np.array(3), torch.tensor(3)):
            with pytest.raises(SlotRangeError, match="blocks are"):
                engine.give("full", nothing)  # type: ignore[arg-type]
        for kind in (np.array, torch.tensor):
            engine.give("full", kind(engine.take("full", 2)))
            assert {type(block) for block in engine._free[1]} == {int}
        for lengths in (-1, 1 << 63, "8"):  # the lengths at which windows are kept would fill the memory
            with pytest.raises(InvalidValueError, match="length is"):
                engine.window_ends(lengths, ())  # type: ignore[arg-type]
        with pytest.raises(InvalidValueError, match="pages is -1"):
            engine.take("full", -1)
        with pytest.raises(InvalidValueError, match="no group 'other'"):
            engine.take("other", 1)
        with pytest.raises(PoolFullError, match="group 'full' needs 1000 blocks") as caught:
            engine.take("full", 1000)
        assert "gpu.capacity" in str(caught.value.hint)
        before = len(engine._free[1])
        held: list[list[int]] = [[] for _ in range(4)]

        def work(number: int) -> None:
            for _ in range(300):
                try:
                    held[number] = engine.take("window", 1)
                except PoolFullError:
                    continue
                assert sum(held[number][0] in other for other in held) == 1, "two have one block"
                block, held[number] = held[number], []
                engine.give("full", block)  # of the same pool

        together(work, 4)
        assert len(engine._free[1]) == len(set(engine._free[1])) == before


def test_planes_of_its_own_hold_a_prompt_and_its_windows(tmp_path: Path) -> None:
    """Four windows of 6 pages and one that is begun, and more where they are kept at intervals, or for many prompts."""
    section = {"name": "m", "layers": 3, "kv_heads": 2, "head_dim": 8, "dtype": "float32", "page_tokens": 16}
    full, window = {"name": "full", "layers": [2]}, {"name": "window", "layers": [0, 1], "window": 96}
    page = 16 * 2 * 2 * 8 * 4  # bytes in a layer
    for groups, every, expected in (
        ([full, window], 0, [10, 10]),
        ([full, window], 0, [100, 28]),
        ([full, window], 0, [512, 35]),  # 8192 tokens
        ([full, window], 200, [100, 84]),
        ([{**window, "layers": [0, 1, 2]}], 0, [700]),
    ):
        capacity = page * sum(n * len(group["layers"]) for n, group in zip(expected, groups, strict=True))
        config = {"model": {**section, "groups": groups}, "gpu": {"device": "cpu", "capacity": capacity}}
        config |= {"cpu": {"capacity": "8MiB"}, "store": {"window_every": every}, "host_buffer": "4MiB"}
        with HybridEngine.from_config(config) as engine:
            assert [one.tables.blocks for one in engine.engines] == expected


def test_blocks_of_attached_planes_are_the_caller_s(open_hybrid: OpenHybrid) -> None:
    host = open_hybrid("apart")
    for call in (lambda: host.engine.take("full", 1), lambda: host.engine.give("full", [1])):
        with pytest.raises(InvalidValueError, match="attached"):
            call()
    for layer in (-1, 3, 1.0, True):
        with pytest.raises(InvalidValueError, match="layer is"):
            host.engine.place(layer)  # type: ignore[arg-type]
    assert [host.engine.place(layer) for layer in range(3)] == [(1, 0), (0, 0), (1, 1)]


# -- all of it together ------------------------------------------------------------------------------------------------


def test_many_threads_at_once(open_hybrid: OpenHybrid) -> None:
    host = open_hybrid("mixed", blocks=400, cpu=30, ssd=60)
    lock = threading.Lock()
    tokens = {n: [*PROMPT[:24], *prompt(10 + n, 6)] for n in range(4)}
    for n in tokens:
        host.store(tokens[n])

    def work(number: int) -> None:
        engine = host.engine
        for turn in range(12):
            mine = tokens[(number + turn) % 4]
            hit = engine.lookup(mine)
            with lock:
                slots = {name: host.take(name, len(pages)) for name, pages in hit.pages.items()}
            load = engine.load(hit, slots)
            for layer in range(4):
                load.wait(layer, WAIT)
            report = load.result(WAIT)
            load.released(WAIT)
            assert report.tokens in (0, hit.tokens)
            for group in host.groups:
                _, planes = host.of(group.name)
                for row, (page, status) in enumerate(zip(hit.pages[group.name], report.pages[group.name], strict=True)):
                    if status is LOADED:
                        block = slots[group.name][row]
                        got = np.concatenate(
                            [t[block].view(torch.uint8).numpy().reshape(-1) for layer in planes for t in layer]
                        )
                        assert np.array_equal(got, host.data(group, mine, page, ""))
            with lock:
                host.give(slots)
            if turn % 4 == number % 4:
                engine.prefetch(mine).wait(0.01)
                engine.pin(mine, 0.01).release()

    together(work, 4)


def test_a_close_in_the_middle_ends_what_is_under_way(open_hybrid: OpenHybrid) -> None:
    host = open_hybrid("apart", transport=FAULTY)
    host.store(PROMPT)
    drop(host, "cpu")
    with PLAN.rule(Op.READ, Fault.DELAY, seconds=0.2):
        hit = host.engine.lookup(PROMPT)
        load, slots = host.begin(hit)
        prefetch = host.engine.prefetch(PROMPT, pin=1.0)
        host.engine.close()
    assert host.finish(hit, load, slots, PROMPT).tokens in (0, 48)
    assert prefetch.verified == 0
    assert not hasattr(prefetch, "released"), "a prefetch has none of the caller's slots"
    host.engine.close()
    calls: list[Callable[[], object]] = [
        lambda: host.engine.lookup(PROMPT),
        lambda: host.engine.load(hit, slots),
        lambda: host.engine.store(PROMPT[:4], {"full": [1], "window": [1]}),
        lambda: host.engine.prefetch(PROMPT),
        lambda: host.engine.pin(PROMPT, 1.0),
        host.engine.clear,
        host.engine.invalidate,
        host.engine.stats,
        host.engine.check,
        host.engine.drain,
        host.engine.flush,
    ]
    for call in calls:
        with pytest.raises(EngineClosedError):
            call()


@pytest.mark.parametrize("pool", [0, 1])
def test_ctrl_c_in_a_call_of_one_pool_ends_all(
    open_hybrid: OpenHybrid, monkeypatch: pytest.MonkeyPatch, pool: int
) -> None:
    host = open_hybrid("apart")
    engines = host.engine.engines
    host.store(PROMPT)
    with monkeypatch.context() as patched:
        patched.setattr(engines[pool].manager, "lookup", raising(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            host.engine.lookup(PROMPT)
    for engine in engines:
        with pytest.raises(EngineClosedError, match="interrupted by KeyboardInterrupt"):
            engine.clear()
    until(lambda: all(engine._closing._over.is_set() for engine in engines), "all are closed, without a call of close")
    host.engine.close()
    assert open_hybrid("apart").load(PROMPT).tokens == 48


def test_a_load_that_one_pool_cannot_begin_leaves_none_behind(
    open_hybrid: OpenHybrid, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Ctrl-C between two pools: nobody has a handle of the first one's load, and it ends."""
    host = open_hybrid("apart", transport=FAULTY)
    host.store(PROMPT)
    drop(host, "cpu")
    hit = host.engine.lookup(PROMPT)
    slots = {name: host.take(name, len(pages)) for name, pages in hit.pages.items()}
    with PLAN.rule(Op.READ, Fault.DELAY, seconds=0.1):
        monkeypatch.setattr(host.engine.engines[1], "load_many", raising(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            host.engine.load(hit, slots)
        monkeypatch.undo()
        until(lambda: not host.engine.engines[0].stats()["leases"], "the load of the first pool ends")
    host.give(slots)
    assert host.load(PROMPT).tokens == 48


def test_a_load_that_one_pool_refuses_writes_nothing_behind_the_error(
    open_hybrid: OpenHybrid, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, begun = open_hybrid("apart", transport=FAULTY), list[Any]()
    host.store(PROMPT)
    drop(host, "cpu")
    hit = host.engine.lookup(PROMPT)
    slots = {name: host.take(name, len(pages)) for name, pages in hit.pages.items()}
    first, second = host.engine.engines
    whole = first.load_many
    monkeypatch.setattr(first, "load_many", lambda *call: begun.append(whole(*call)) or begun[-1])
    monkeypatch.setattr(second, "load_many", raising(EngineClosedError("the engine was closed", "open a new one")))
    with PLAN.rule(Op.READ, Fault.DELAY, seconds=0.2):
        with pytest.raises(EngineClosedError):
            host.engine.load(hit, slots)
        assert begun[0].release_event.done()
    monkeypatch.undo()
    host.give(slots)
    assert host.load(PROMPT).tokens == 48


def test_waits_share_one_limit(open_hybrid: OpenHybrid) -> None:
    host = open_hybrid("apart", transport=FAULTY)
    host.store(PROMPT)
    drop(host, "cpu")
    hit = host.engine.lookup(PROMPT)
    with PLAN.rule(Op.READ, Fault.HANG) as rule:
        load, slots = host.begin(hit)
        begun = time.monotonic()
        with pytest.raises(GdsCacheError):
            load.result(0.2)
        assert time.monotonic() - begun < 5
        assert not load.done()
        rule.release()
    host.finish(hit, load, slots, PROMPT)
    assert load.done()


# -- load or recompute -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("model", "mode"), pairs(["apart", "together"], ["enforcing", "advisory", "off"]))
def test_the_gate_takes_or_leaves_a_hit_as_a_whole(open_hybrid: OpenHybrid, model: str, mode: str) -> None:
    host = open_hybrid(model, load={"gate": mode})
    host.store(PROMPT)
    drop(host, "cpu")
    engine = host.engine
    assert engine.lookup(PROMPT).tokens == 48  # nothing is known yet
    for _ in range(ENOUGH):
        engine.observe_load("ssd", 1 << 20, 100.0)
        engine.observe_prefill(1000, 0, 0.01)
    found = [engine.lookup(PROMPT) for _ in range(EXPLORE_EVERY)]
    if mode == "enforcing":
        assert sorted({(hit.tokens, hit.declined) for hit in found}) == [(0, 48), (48, 0)]
        assert sum(hit.tokens == 48 for hit in found) == 1, "one in so many is tried"
        assert all(hit.pages["full"] == range(0) for hit in found if hit.declined)
    else:
        assert {(hit.tokens, hit.declined) for hit in found} == {(48, 0)}
    loaded = next(hit for hit in found if hit.tokens)
    assert loaded.seconds == pytest.approx(15 * engine.engines[0].layout.page_bytes / (1 << 20) * 100, rel=1)
    assert (loaded.recompute_seconds is None) is (mode == "off")
    gate = engine.stats()["gate"]
    assert gate["mode"] == mode
    assert sum(gate["hits"].values()) == (0 if mode == "off" else EXPLORE_EVERY + 1)
    assert sum(gate["tokens"].values()) == 48 * sum(gate["hits"].values()), "of the request, not of each pool's pages"
    assert engine.pin(PROMPT, 0.05).tokens == engine.prefetch(PROMPT).wait(WAIT) == 48, "neither is gated"
    for _ in range(4 * ENOUGH):
        engine.observe_prefill(1000, 0, 1000.0)
    assert engine.lookup(PROMPT).tokens == 48


# -- what it says of itself --------------------------------------------------------------------------------------------


def test_stats_and_checks_name_the_groups(open_hybrid: OpenHybrid) -> None:
    host = open_hybrid("mixed")
    host.store(PROMPT)
    host.load(PROMPT)
    stats = json.loads(json.dumps(host.engine.stats()))
    assert list(stats["pools"]) == ["chunk", "full, window"] == list(host.engine.by_groups)
    assert [pool.get("loaded") for pool in stats["pools"].values()] == [None, {"cpu": 15}]  # at 48 a chunk begins
    assert host.engine.check().ok
    engine = host.of("window")[0]
    slot = engine.manager.cpu.index.get(host.key("window", PROMPT, 11)).slot
    byte = engine.manager.cpu.extents.memory(slot)[:1]
    byte[0] ^= 1
    [problem] = host.engine.check().problems
    assert problem.startswith("full, window: cpu: ")
    byte[0] ^= 1


def test_metrics_of_each_pool(open_hybrid: OpenHybrid) -> None:
    host = open_hybrid("mixed")
    registry = CollectorRegistry()
    registry.register(EngineCollector(host.engine))
    value = registry.get_sample_value
    assert value("gdscache_lookup_tokens_total", {"group": ""}) == 0
    host.store(PROMPT)
    for names, engine in host.engine.by_groups.items():
        stored = value("gdscache_stored_pages_total", {"group": names, "tier": "cpu"})
        assert stored == len(engine.manager.tiers["cpu"].index)
        assert value("gdscache_lookup_tokens_total", {"group": names}) is None
        assert value("gdscache_load_duration_seconds_count", {"group": names, "tier": "cpu", "size": "1MiB"}) == 0
    hit = host.engine.lookup(PROMPT)
    assert hit.tokens > 0
    asked = len(PROMPT) // host.engine.alignment * host.engine.alignment
    assert value("gdscache_lookup_tokens_total", {"group": ""}) == asked
    assert value("gdscache_hit_tokens_total", {"group": "", "tier": "cpu"}) == hit.tokens
    assert value("gdscache_open") == 1


def test_metrics_port_serves_all_pools(open_hybrid: OpenHybrid) -> None:
    port = free_port()
    host = open_hybrid("mixed", metrics={"port": port})
    text = fetched(f"http://127.0.0.1:{port}/metrics")
    for names in host.engine.by_groups:
        assert f'gdscache_tier_slots{{group="{names}",tier="cpu"}}' in text
    host.engine.close()
    with pytest.raises(OSError, match="refused"):
        fetched(f"http://127.0.0.1:{port}/metrics")


@pytest.mark.parametrize("model", MODELS)
def test_events_say_the_group_its_kind_and_its_window(open_hybrid: OpenHybrid, model: str) -> None:
    kinds = {"all": "full_attention", "window": "sliding_window", "chunk": "chunked_local_attention"}
    kinds["state"] = "mamba"
    for restarted in (False, True):
        host = open_hybrid(model, events={}, every=8)
        heard: list[tuple[str, KVEventBatch]] = []
        views = {names: CacheView() for names in host.engine.by_groups}

        def hear(
            names: str,
            batch: KVEventBatch,
            heard: list[tuple[str, KVEventBatch]] = heard,
            views: dict[str, CacheView] = views,
        ) -> None:
            heard.append((names, batch))
            assert views[names].apply(batch)

        remove = host.engine.on_events(hear)
        if restarted:
            drop(host, "cpu")
            assert host.load(PROMPT).tokens == 48  # pages of the restart come into the CPU tier
        else:
            host.store(PROMPT)

        def agrees(host: HybridHost = host, views: dict[str, CacheView] = views) -> bool:
            return all(
                len(views[names]) >= len(engine.manager.tiers["cpu"].index)
                for names, engine in host.engine.by_groups.items()
            )

        until(agrees, "all is told")
        told: dict[bytes, BlockStored] = {}
        for names, batch in heard:
            for event in batch.events:
                assert isinstance(event, BlockStored)
                assert host.groups[[g.name for g in host.groups].index(names.split(", ")[event.group_idx or 0])]
                told |= dict.fromkeys(event.block_hashes, event)
        for group in host.groups:
            for number in range(48 // group.page_tokens):
                if "cpu" in host.on_tiers(group.name, PROMPT, number):
                    event = told[host.key(group.name, PROMPT, number)]
                    assert event.block_size == group.page_tokens
                    assert event.kv_cache_spec_kind == kinds[group.keeps]
                    assert event.kv_cache_spec_sliding_window == (group.span if group.keeps == "window" else None)
        remove()
        host.engine.close()


def test_arguments_that_are_refused_are_no_lookup(open_hybrid: OpenHybrid) -> None:
    engine = open_hybrid("apart").engine
    calls: list[Callable[[], object]] = [
        lambda: engine.prefetch(PROMPT, pin=-1),  # also where no page is found
        lambda: engine.pin(PROMPT, float("nan")),
    ]
    for call in calls:
        with pytest.raises(InvalidValueError, match=r"(seconds|pin) is"):
            call()
    assert engine.stats()["tokens"]["asked"] == 0


@pytest.mark.parametrize("model", MODELS)
def test_a_router_that_puts_the_events_of_all_pools_together_knows_what_a_clear_of_one_leaves(
    open_hybrid: OpenHybrid, model: str
) -> None:
    host = open_hybrid(model, events={})
    view, numbers, turn = CacheView(), itertools.count(), threading.Lock()

    def hear(_: str, batch: KVEventBatch) -> None:
        with turn:
            view.apply(dataclasses.replace(batch, seq=next(numbers)))

    host.engine.on_events(hear)

    def agrees() -> bool:
        there = {
            (entry.key, name)
            for engine in host.engine.engines
            for name, tier in engine.manager.tiers.items()
            for entry in tier.index
        }
        with turn:
            return {(key, name) for key, names in view._pages.items() for name in names} == there

    host.store(PROMPT)
    until(agrees, "all is told")
    for engine in host.engine.engines:
        engine.clear()
        until(agrees, "the pages of the other pools are still known")
    assert not len(view)
    host.store(PROMPT)
    assert any(host.engine.clear().values())
    until(lambda: not len(view), "all have gone")
