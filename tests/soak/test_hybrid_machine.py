"""HybridEngine against a plain model: a dictionary of what each group has, and hits by what a token attends to.

The dictionary knows which content belongs to each page of each group since the last clear. After every step the tiers
of each pool are read slot by slot and held against it. Prompts come from a small tree, and tiers hold a few of them.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from gdscache import PageStatus
from gdscache.groups.base import Group
from tests.support.helpers import WAIT, Bytes, drop_from, flip_file, on_ssd, until
from tests.support.hybrid import MODELS, HybridHost, hybrid_config
from tests.support.packed_pages import bytes_in
from tests.support.places import scratch

SALTS = ["", "tenant"]
TIERS = ("cpu", "ssd", "cpu_plain", "ssd_plain")
paths = st.lists(st.integers(0, 1), min_size=0, max_size=5).map(tuple)
salts = st.sampled_from(SALTS)
starts = st.integers(0, 5)
Name = tuple[str, str, tuple[int, ...]]  # salt, group, tokens up to the page's end


def tokens_at(path: Sequence[int], tail: int = 0) -> list[int]:
    return [t for branch in path for t in (branch, *[7] * 7)] + [9] * tail


class Machine(RuleBasedStateMachine):
    """`content[name]` is the number of the content that a page was committed with."""

    model: ClassVar[str]
    options: ClassVar[dict[str, Any]] = {}
    per_page: ClassVar[int] = 1
    pack: ClassVar[str] = "off"

    def __init__(self) -> None:
        super().__init__()
        self.directory = scratch()
        self.generation = 0
        self.content: dict[Name, int] = {}
        self.named: dict[bytes, Name] = {}
        self.spoiled: set[Name] = set()  # pages whose bytes in a slab may be bad
        self.open()

    def config(self, model: dict[str, Any]) -> dict[str, Any]:
        options = {"cpu": 20, "ssd": 30, "every": 16} | self.options
        return hybrid_config(self.directory / "cache", model | {"pack": self.pack}, **options)

    def open(self) -> None:
        self.host = HybridHost(self.config(MODELS[self.model]), blocks=64, per_page=self.per_page)
        self.host.content = lambda group, tokens, salt: self.content.get(
            (salt, group.name, tuple(tokens)), self.generation
        )
        self.engine = self.host.engine

    def teardown(self) -> None:
        self.engine.close()
        shutil.rmtree(self.directory)

    # -- the model -----------------------------------------------------------------------------------------------------

    def name(self, group: Group, tokens: Sequence[int], number: int, salt: str) -> Name:
        """A page, and note its key."""
        name = salt, group.name, tuple(tokens[: (number + 1) * group.page_tokens])
        key = self.host.key(group.name, tokens, number, salt)
        assert self.named.setdefault(key, name) == name, "two pages have one key"
        return name

    def data(self, name: Name) -> Bytes:
        salt, which, tokens = name
        group = next(group for group in self.host.groups if group.name == which)
        return self.host.data(group, tokens, len(tokens) // group.page_tokens - 1, salt)

    def forget(self, salt: str | None) -> None:
        """From now on a page of this salt, or any, may have other bytes."""
        self.generation += 1
        for name in [name for name in self.content if salt in (None, name[0])]:
            del self.content[name]

    def count(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for engine in self.engine.engines:
            for tier, one in engine.manager.tiers.items():
                found[tier] = found.get(tier, 0) + len(one.index)
        return found

    @invariant()
    def at_rest_nothing_is_lost_and_nothing_is_wrong(self) -> None:
        self.host.rest()
        for engine in self.engine.engines:
            until(lambda engine=engine: not engine.stats()["leases"], "leases end")  # type: ignore[misc]
            for tier, one in engine.manager.tiers.items():
                for entry in list(one.index):
                    name = self.named[entry.key]
                    assert name in self.content, f"{tier} holds a page that was cleared, or never committed"
                    same = np.array_equal(bytes_in(engine, tier, entry.slot), self.data(name))
                    assert same or (tier == "ssd" and name in self.spoiled), f"{tier} holds other bytes"
        assert self.engine.check().problems == ()
        assert all(len(free) == 64 for free in self.host.free)

    def on_ssds(self) -> set[bytes]:
        return {e.key for engine in self.engine.engines for tier in engine.manager.files for e in tier.index}

    def aligned(self, start: int) -> int:
        return start * self.engine.alignment

    # -- rules ---------------------------------------------------------------------------------------------------------

    @rule(
        path=paths,
        salt=salts,
        tail=st.integers(0, 7),
        start=starts,
        gone=st.integers(0, 8),
        keep_at=st.lists(st.integers(0, 48), max_size=2),
        priority=st.sampled_from([0, 0, 1]),
    )
    def store(self, path: Any, salt: str, tail: int, start: int, gone: int, keep_at: list[int], priority: int) -> None:
        tokens, first = tokens_at(path, tail), self.aligned(start)
        lost = {group.name: gone for group in self.host.groups if group.keeps != "all"}
        report = self.host.store(tokens, first, salt, lost, keep_at=keep_at, priority=priority)
        for group in self.host.groups:
            for number, tiers in report.tiers[group.name].items():
                assert number >= max(first // group.page_tokens, lost.get(group.name, 0))
                name = self.name(group, tokens, number, salt)
                if tiers:
                    self.content.setdefault(name, self.generation)
                if on_ssd(tiers):
                    self.spoiled.discard(name)
                if not tiers and number not in report.dropped[group.name]:
                    assert name in self.content, "a page that was never committed counts as present"

    @rule(path=paths, salt=salts, tail=st.integers(0, 7), start=starts)
    def lookup(self, path: Any, salt: str, tail: int, start: int) -> None:
        tokens, first = tokens_at(path, tail), self.aligned(start)
        hit = self.engine.lookup(tokens, first, salt)
        assert hit.tokens == self.host.longest(tokens, first, salt)
        assert hit.parted >= first + hit.tokens

    @rule(path=paths, salt=salts, start=starts, cold=st.booleans(), held=st.booleans())
    def load(self, path: Any, salt: str, start: int, cold: bool, held: bool) -> None:
        tokens, first = tokens_at(path), self.aligned(start)
        if cold:
            drop_from(self.engine.engines[0], "cpu")
        hit = self.engine.lookup(tokens, first, salt)
        if held and self.options.get("cpu", 1) is not None:
            with self.engine.prefetch(hit, pin=WAIT) as prefetch:
                prefetch.result(WAIT)
                hit = prefetch.hit()
                load, slots = self.host.begin(hit)
        else:
            load, slots = self.host.begin(hit)
        assert load.tokens == hit.tokens
        report = self.host.finish(hit, load, slots, tokens, salt)  # compares the bytes
        assert report.tokens in (0, hit.tokens)
        bad = 0
        for group in self.host.groups:
            for number, status in zip(hit.pages[group.name], report.pages[group.name], strict=True):
                if status is not PageStatus.LOADED:
                    bad += 1
                    assert status is PageStatus.CHECKSUM
                    assert self.name(group, tokens, number, salt) in self.spoiled
        assert (report.tokens == hit.tokens) is (bad == 0) or hit.tokens == 0
        if bad:
            assert self.engine.lookup(tokens, first, salt).tokens < hit.tokens

    @rule(path=paths, salt=salts)
    def pin(self, path: Any, salt: str) -> None:
        with self.engine.pin(tokens_at(path), WAIT, salt) as pin:
            held = pin.tokens
            assert held in (0, self.host.longest(tokens_at(path), 0, salt))
            for pool in range(len(self.engine.engines)):
                for tier in TIERS:
                    self.press(pool, tier, 4)
            assert pin.tokens == held
            assert self.host.longest(tokens_at(path), 0, salt) >= held
        assert pin.tokens == 0

    @rule(pool=st.integers(0, 3), tier=st.sampled_from(TIERS), pages=st.integers(1, 3))
    def press(self, pool: int, tier: str, pages: int) -> None:
        engine = self.engine.engines[pool % len(self.engine.engines)]
        with engine.manager.lock:
            if tier in engine.manager.tiers:
                engine.manager.tiers[tier].index.evict(pages)

    @rule()
    def clear(self) -> None:
        there = self.count()
        assert self.engine.clear() == there
        self.forget(None)

    @rule(salt=salts)
    def invalidate(self, salt: str) -> None:
        mine = {engine: set(engine.namespaces(salt)) for engine in self.engine.engines}
        there: dict[str, int] = {}
        for engine, namespaces in mine.items():
            for tier, one in engine.manager.tiers.items():
                there[tier] = there.get(tier, 0) + sum(entry.namespace in namespaces for entry in one.index)
        assert self.engine.invalidate(salt) == there
        self.forget(salt)

    @rule(
        path=paths.filter(len), salt=salts, which=st.integers(0, 3), number=st.integers(0, 9), bit=st.integers(0, 8191)
    )
    def spoil_the_slab(self, path: Any, salt: str, which: int, number: int, bit: int) -> None:
        group = self.host.groups[which % len(self.host.groups)]
        number %= len(tokens_at(path)) // group.page_tokens
        engine = self.host.of(group.name)[0]
        entry = engine.manager.tiers["ssd"].index.get(self.host.key(group.name, tokens_at(path), number, salt))
        if entry is not None:
            flip_file(
                engine.manager.ssd.path / "slab-0.bin", entry.slot * engine.layout.extent_bytes + bit // 8, bit % 8
            )
            self.spoiled.add(self.name(group, tokens_at(path), number, salt))

    @rule(drain=st.booleans())
    def close_and_reopen(self, drain: bool) -> None:
        self.host.rest()
        before = self.on_ssds()
        self.engine.close(drain)
        self.engine.close()
        self.open_again()
        assert self.on_ssds() == before

    def open_again(self) -> None:
        """What is on no SSD may come back with other bytes."""
        self.open()
        kept = {self.named[key] for key in self.on_ssds()}
        self.content = {name: n for name, n in self.content.items() if name in kept}
        self.generation += 1

    @precondition(lambda self: len(self.engine.groups) > 1)
    @rule()
    def open_with_other_groups(self) -> None:
        """Over the same directory: none of these pages is found, and all are there afterwards."""
        self.host.rest()
        self.engine.close()
        model = MODELS[self.model]
        groups = [group | ({"window": group["window"] + 1} if "window" in group else {}) for group in model["groups"]]
        other = HybridHost(self.config(model | {"groups": groups}))
        for path in ((), (0,), (0, 1), (1, 1, 1), (0, 0, 0, 0, 0)):
            for salt in SALTS:
                assert not any(
                    other.on_tiers(group.name, tokens_at(path), number, salt)
                    for group in other.groups
                    for number in range(len(tokens_at(path)) // group.page_tokens)
                )
        other.engine.close()
        self.open_again()


FEWER = max(6, settings.default.max_examples // 3)
PACKED = {"pack": "on", "options": {"cpu": 40, "ssd": 60, "bounce": 16}}  # half of the pages that keep tokens fit


@pytest.mark.hypothesis
@pytest.mark.parametrize(
    ("name", "also"),
    [
        ("apart", {}),
        ("together", {}),
        ("state", {}),
        *(
            pytest.param(*case, marks=pytest.mark.suite)
            for case in [
                ("uneven", {"per_page": 2}),
                ("mixed", {"per_page": 2}),
                ("mixed", {"options": {"cpu": None}}),
                ("state", PACKED),
            ]
        ),
    ],
)
def test_random_steps(name: str, also: dict[str, Any]) -> None:
    examples = FEWER // 3 if also is PACKED else FEWER  # each packed page is unpacked by the oracle
    face = type("Face", (Machine,), {"model": name, **also})
    run_state_machine_as_test(face, settings=settings(max_examples=examples))
