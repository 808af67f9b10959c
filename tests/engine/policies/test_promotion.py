"""Promotion from the SSD to the CPU tier: the policies against exact ones, and in engines whose bytes are checked."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gdscache.config import SsdConfig
from gdscache.policies.promotion import PROMOTIONS, REMEMBERED, new_promotion
from tests.support.admission_models import ExactRecent
from tests.support.helpers import Host, drop_from, prompt, quiet, until

OpenHost = Callable[..., Host]


def name(*path: object) -> bytes:
    return hashlib.blake2b(repr(path).encode(), digest_size=32).digest()


# -- policies --------------------------------------------------------------------------------------------------------


def test_the_table_and_the_configuration_name_the_same_policies() -> None:
    assert set(PROMOTIONS) == set(get_args(SsdConfig.model_fields["promotion"].annotation))
    assert SsdConfig(path="/x").promotion == "always"
    with pytest.raises(KeyError):
        new_promotion("sometimes", 4)


@pytest.mark.parametrize(("policy", "answer"), [("always", True), ("never", False)])
def test_always_and_never_answer_for_each_page(policy: str, answer: bool) -> None:
    promotion = new_promotion(policy, 4)
    assert list(promotion.wanted([])) == []
    for _ in range(3):
        assert list(promotion.wanted([name(1), name(2)])) == [answer] * 2
    assert promotion.selective is (policy != "always")


@given(st.lists(st.lists(st.integers(0, 39), max_size=20), max_size=80))
def test_second_hit_is_its_model(loads: list[list[int]]) -> None:
    """40 pages that are read again and again, past many generations of the counter."""
    promotion, exact = new_promotion("second_hit", 50), ExactRecent(50 * REMEMBERED, 1)
    for numbers in loads:
        assert list(promotion.wanted([name(i) for i in numbers])) == [exact.add(name(i)) == 1 for i in numbers]


def test_second_hit_forgets() -> None:
    slots = 16
    for others, answer in ((REMEMBERED * slots - 1, True), (2 * REMEMBERED * slots, False)):
        promotion = new_promotion("second_hit", slots)
        assert list(promotion.wanted([name("it")])) == [False]
        promotion.wanted([name(i) for i in range(others)])
        assert list(promotion.wanted([name("it")])) == [answer]


# -- in an engine ----------------------------------------------------------------------------------------------------


def opened(open_host: OpenHost, promotion: str, tokens: Sequence[int], **options: object) -> Host:
    """A host whose SSD has the pages of `tokens`, and nothing else does."""
    host = open_host(cpu=8, ssd=16, ssd_options={"promotion": promotion}, **options)
    host.store(tokens)
    quiet(host.engine)
    drop_from(host.engine, "cpu")
    assert host.engine.lookup(tokens).tiers == ("ssd",) * (len(tokens) // 4)
    return host


def test_always_keeps_what_a_load_reads(open_host: OpenHost) -> None:
    tokens = prompt(1, 5)
    host = opened(open_host, "always", tokens)
    assert host.load(tokens).bytes_by_tier == {"ssd": 5 * host.layout.page_bytes}
    assert host.load(tokens).bytes_by_tier == {"cpu": 5 * host.layout.page_bytes}
    assert "promotion" not in host.engine.stats()


def test_never_keeps_nothing(open_host: OpenHost) -> None:
    tokens = prompt(1, 5)
    host = opened(open_host, "never", tokens)
    for n in range(1, 4):
        assert host.load(tokens).bytes_by_tier == {"ssd": 5 * host.layout.page_bytes}
        assert host.engine.stats()["promotion"] == {"declined": 5 * n}
        assert host.engine.stats()["tiers"]["cpu"]["pages"] == 0


def test_the_second_read_from_the_ssd_keeps_the_page(open_host: OpenHost) -> None:
    tokens = prompt(1, 5)
    host = opened(open_host, "second_hit", tokens)
    assert host.load(tokens[:12]).tokens == 12
    assert host.engine.stats()["tiers"]["cpu"]["pages"] == 0
    # Three pages for the second time, two for the first.
    assert host.load(tokens).bytes_by_tier == {"ssd": 5 * host.layout.page_bytes}
    assert host.engine.lookup(tokens).tiers == ("cpu",) * 3 + ("ssd",) * 2
    assert host.load(tokens).bytes_by_tier == {"cpu": 3 * host.layout.page_bytes, "ssd": 2 * host.layout.page_bytes}
    assert host.engine.lookup(tokens).tiers == ("cpu",) * 5
    assert host.engine.stats()["promotion"] == {"declined": 5}


def test_a_lookup_is_no_read(open_host: OpenHost) -> None:
    tokens = prompt(1, 3)
    host = opened(open_host, "second_hit", tokens)
    for _ in range(5):
        host.engine.lookup(tokens)
    host.load(tokens)
    assert host.engine.stats()["tiers"]["cpu"]["pages"] == 0


def test_what_is_declined_pushes_nothing_out(open_host: OpenHost) -> None:
    """A full CPU tier stays as it is while other pages pass through the bounce reserve."""
    scanned, kept = prompt(1, 8), prompt(2, 8)
    host = opened(open_host, "second_hit", scanned)
    host.store(kept)
    quiet(host.engine)
    assert host.engine.lookup(kept).tiers == ("cpu",) * 8
    before = host.engine.stats()["tiers"]["cpu"]["evictions"]
    assert host.load(scanned).tokens == 32
    assert host.engine.lookup(kept).tiers == ("cpu",) * 8
    assert host.engine.stats()["tiers"]["cpu"]["evictions"] == before


@pytest.mark.parametrize("policy", ["never", "second_hit"])
def test_a_prefetch_keeps_its_pages_whatever_the_policy(open_host: OpenHost, policy: str) -> None:
    tokens = prompt(1, 4)
    host = opened(open_host, policy, tokens, prefetch={"quota": 1.0})
    host.engine.prefetch(tokens)
    until(lambda: host.engine.lookup(tokens).tiers == ("cpu",) * 4, "pages are prefetched")
    assert host.load(tokens).bytes_by_tier == {"cpu": 4 * host.layout.page_bytes}
    assert "promotion" not in host.engine.stats()


def test_declined_pages_are_verified_like_all_others(open_host: OpenHost) -> None:
    """More pages than the bounce reserve has slots, at once in several loads."""
    tokens = [prompt(seed, 4) for seed in range(3)]
    host = open_host(cpu=16, ssd=24, bounce=2, ssd_options={"promotion": "never"})
    for some in tokens:
        host.store(some)
    quiet(host.engine)
    drop_from(host.engine, "cpu")
    begun = [host.begin(some) for some in tokens]
    assert [host.finish(*load).tokens for load in begun] == [16] * 3  # which compares the bytes
    assert host.engine.stats()["tiers"]["cpu"]["pages"] == 0
    assert host.engine.stats()["loaded"]["ssd"] == 12
