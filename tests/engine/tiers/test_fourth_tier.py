"""A fourth tier is a file and a config entry: pages in a dictionary, behind the SSD."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest

from gdscache import CacheEngine, Config, PageStatus, errors
from tests.support.dict_tier import DictTier
from tests.support.helpers import (
    MHA,
    PACKED,
    Host,
    OpenEngine,
    OpenHost,
    drop_from,
    layout_of,
    make_config,
    prompt,
    quiet,
    settle,
)

EXTENT = layout_of(MHA).extent_bytes
PAGES = 4


def entry(pages: int, tier: str = "tests.support.dict_tier:DictTier", **options: Any) -> dict[str, Any]:
    return {"tier": tier, "capacity": pages * EXTENT, "options": options}


@pytest.fixture
def host(open_host: OpenHost) -> Host:
    return open_host(cpu=8, ssd=12, tiers=[entry(24)])


def tier_of(host: Host, name: str = "dict") -> DictTier:
    return cast(DictTier, host.engine.manager.tiers[name])


def stored(host: Host, seed: int = 1) -> list[int]:
    tokens = prompt(seed, PAGES)
    host.keep(tokens)
    return tokens


def only(host: Host, *names: str) -> None:
    """What is stored lies in these tiers only."""
    for name in ("cpu", "ssd", "dict"):
        if name not in names:
            drop_from(host.engine, name)


def test_a_commit_that_breaks_off_before_its_store_keeps_no_page_and_is_told_again(
    open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, told = open_engine(gpu=8, cpu=8, ssd=12, tiers=[entry(24)]), list[bytes]()

    def describe(digest: bytes, description: dict[str, object]) -> None:
        told.append(digest)
        if len(told) == 1:
            raise ValueError("no description")

    monkeypatch.setattr(engine.manager.tiers["dict"], "describe_namespace", describe)
    with engine.sequence(prompt(1, PAGES)) as sequence, pytest.raises(ValueError, match="no description"):
        sequence.commit()
    assert not any(lease["pages"] for lease in engine.stats()["leases"])
    with engine.sequence(prompt(1, PAGES + 1)) as sequence:
        sequence.commit().result(10.0)
    assert told == [engine.namespace()] * 2


def test_a_store_reaches_every_tier_and_says_so(host: Host) -> None:
    tokens = prompt(1, PAGES)
    report = host.store(tokens).result(10.0)
    assert all({*tiers} == {"cpu", "ssd", "dict"} for tiers in report.tiers)
    quiet(host.engine)
    assert {name: tier["pages"] for name, tier in host.engine.stats()["tiers"].items()} == dict.fromkeys(
        ("cpu", "ssd", "dict"), PAGES
    )
    settle(host.engine)


def test_a_page_comes_from_the_fastest_tier_that_has_it_and_stays_in_the_cpu_tier(host: Host) -> None:
    tokens = stored(host)
    for names, first in ((("cpu", "ssd", "dict"), "cpu"), (("ssd", "dict"), "ssd"), (("dict",), "dict")):
        only(host, *names)
        assert host.engine.lookup(tokens).tiers == (first,) * PAGES
        assert host.load(tokens).bytes_by_tier == {first: PAGES * host.layout.page_bytes}  # and the bytes are right
        assert host.engine.lookup(tokens).tiers == ("cpu",) * PAGES
        drop_from(host.engine, "cpu")
    settle(host.engine)


def test_one_load_takes_pages_of_three_tiers(host: Host) -> None:
    tokens = stored(host)
    pages = host.engine.pages(tokens)
    manager = host.engine.manager
    with manager.lock:
        for name, numbers in (("cpu", (1, 2, 3)), ("ssd", (2, 3))):
            for number in numbers:
                found = manager.tiers[name].index.find(pages[number].key)
                assert found is not None
                manager.tiers[name].index.drop(found)
    assert host.engine.lookup(tokens).tiers == ("cpu", "ssd", "dict", "dict")
    assert host.load(tokens).pages == (PageStatus.LOADED,) * PAGES
    settle(host.engine)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("dict", {"cpu": None, "ssd": 12, "bounce": 4, "tiers": [entry(24)]}),  # pages pass through the reserve
        ("dict", {"cpu": None, "ssd": None, "bounce": 4, "tiers": [entry(24)]}),
        ("farther", {"cpu": 8, "ssd": 12, "tiers": [entry(24), entry(24, name="farther")]}),
    ],
)
def test_it_may_be_any_tier_behind_the_planes(open_host: OpenHost, name: str, options: dict[str, Any]) -> None:
    host = open_host(**options)
    tokens = stored(host)
    only(host, name)
    assert host.engine.lookup(tokens).tiers == (name,) * PAGES
    assert host.load(tokens).bytes_by_tier == {name: PAGES * host.layout.page_bytes}
    settle(host.engine)


# What the tier raises, the verdict, whether the page stays.
FAILURES: list[tuple[Exception | None, PageStatus, bool]] = [
    (None, PageStatus.CHECKSUM, False),  # but its bytes are wrong
    (errors.PageBytesError("found out"), PageStatus.CHECKSUM, False),
    (errors.PageGoneError("nowhere"), PageStatus.GONE, False),
    (errors.ShortIOError("half of it"), PageStatus.SHORT_READ, True),
    (errors.IOFailedError("broken"), PageStatus.IO_ERROR, True),
    (OSError(errno.ENOENT, "no such file"), PageStatus.IO_ERROR, True),
    (ValueError("a bug"), PageStatus.IO_ERROR, True),
]


@pytest.mark.parametrize(("error", "status", "stays"), FAILURES, ids=[type(error).__name__ for error, _, _ in FAILURES])
def test_what_it_spoils_is_found_and_goes_if_its_bytes_are_bad(
    host: Host, error: Exception | None, status: PageStatus, stays: bool
) -> None:
    tokens = stored(host)
    only(host, "dict")
    tier = tier_of(host)
    slot = tier.index.slot(host.engine.pages(tokens)[1].key)
    assert slot is not None
    if error is not None:
        tier.io.broken[slot] = error
    else:
        tier.io.content[slot][5] ^= 1
    assert host.load(tokens).pages == (PageStatus.LOADED, status, PageStatus.LOADED, PageStatus.LOADED)
    assert tier.index.slot(host.engine.pages(tokens)[1].key) == (slot if stays else None)
    settle(host.engine)


def test_a_prefetch_brings_its_pages_up(host: Host) -> None:
    tokens = stored(host)
    only(host, "dict")
    assert host.engine.prefetch(tokens).result(10.0).pages == {"loaded": PAGES}
    assert host.engine.lookup(tokens).tiers == ("cpu",) * PAGES
    settle(host.engine)


def test_cleared_is_gone_there_too(host: Host) -> None:
    tokens = stored(host)
    assert host.engine.clear() == dict.fromkeys(("cpu", "ssd", "dict"), PAGES)
    assert host.engine.lookup(tokens).tokens == 0
    assert tier_of(host).index.free_slots == tier_of(host).index.slots
    settle(host.engine)


def test_what_the_ssd_refuses_goes_there_alone(open_host: OpenHost) -> None:
    host = open_host(cpu=8, ssd=12, ssd_options={"endurance": 8 * EXTENT}, tiers=[entry(24)])  # one page at once
    first, *others = host.store(prompt(1, PAGES)).result(10.0).tiers
    assert {*first} == {"cpu", "ssd", "dict"}
    assert all({*tiers} == {"cpu", "dict"} for tiers in others)
    quiet(host.engine)
    settle(host.engine)


def test_pages_written_back_leave_the_cpu_tier_clean_when_every_tier_has_them(open_host: OpenHost) -> None:
    host = open_host(cpu=8, ssd=12, store={"write_policy": "write_back"}, tiers=[entry(24)])
    tokens = stored(host)
    assert host.engine.stats()["tiers"]["cpu"]["dirty_pages"] == PAGES
    host.engine.flush(10.0)
    assert host.engine.stats()["tiers"]["cpu"]["dirty_pages"] == 0
    only(host, "dict")
    assert host.load(tokens).pages == (PageStatus.LOADED,) * PAGES
    settle(host.engine)


def test_it_is_closed_with_the_engine(host: Host) -> None:
    tier = tier_of(host)
    stored(host)
    host.engine.close()
    assert tier.closed


@pytest.mark.parametrize(
    ("broken", "cause"),
    [
        (entry(4, "no_such_module:Tier"), "cannot be imported"),
        (entry(4, "tests.support.dict_tier:DictFiles"), "no subclass"),
        (entry(4, "gdscache.tiers.base:DurableTier"), "it lacks"),
        (entry(4, sort="fast"), "keywords sort.* It takes name"),
        (entry(4, name="ssd"), "'ssd'"),
        (entry(4, name="dict_plain"), "'dict_plain'"),
        (entry(4, name="first"), "'first'"),
    ],
)
def test_a_class_that_is_none_is_refused(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, broken: dict[str, Any], cause: str
) -> None:
    opened: list[DictTier] = []
    monkeypatch.setattr(DictTier, "close", lambda tier: opened.append(tier))
    with pytest.raises(errors.TierUnavailableError, match=cause):
        CacheEngine.from_config(Config.from_dict(make_config(tmp_path, tiers=[entry(4, name="first"), broken])))
    assert "first" in {tier.name for tier in opened}, "it stays open"


def test_pages_that_cannot_be_packed_need_a_tier_of_ours(tmp_path: Any) -> None:
    config = Config.from_dict(make_config(tmp_path, model=PACKED, cpu=None, ssd=None, tiers=[entry(24)]))
    with pytest.raises(errors.InvalidValueError, match="have no tier"):
        CacheEngine.from_config(config)


@pytest.mark.parametrize("broken", [{"tier": "DictTier"}, entry(4) | {"colour": "red"}, entry(0)])
def test_an_entry_that_is_none_is_refused(tmp_path: Any, broken: dict[str, Any]) -> None:
    with pytest.raises(errors.ConfigError, match="tiers"):
        Config.from_dict(make_config(tmp_path, tiers=[broken]))


# -- a tier that answers what no tier can ------------------------------------------------------------------------------


def spread(sums: Any) -> Any:
    """The same numbers, with others between them in memory."""
    return np.repeat(sums, 2, axis=1)[:, ::2]


ANSWERS: dict[str, Callable[[Any], Any]] = {
    "a list": lambda sums: sums.tolist(),
    "nothing but a number": lambda sums: 7,
    "signed": lambda sums: sums.astype(np.int64),
    "a page less": lambda sums: sums[1:],
    "a layer more": lambda sums: np.pad(sums, ((0, 0), (0, 1))),
    "flat": lambda sums: sums.ravel(),
}


@pytest.mark.parametrize("answer", ANSWERS)
def test_checksums_that_are_none_break_the_load_off(host: Host, monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    tokens = stored(host)
    only(host, "dict")
    tier = tier_of(host)
    right = tier.checksums
    with monkeypatch.context() as patch:
        patch.setattr(tier, "checksums", lambda entries: ANSWERS[answer](right(entries)))
        hit = host.engine.lookup(tokens)
        blocks = host.take(len(hit.pages))
        with pytest.raises(errors.TierAnswerError, match="checksums of 4 pages of the dict tier") as caught:
            host.engine.load(hit, blocks).result(10)
        assert "uint64" in caught.value.hint
        host.give(blocks)
    assert host.load(tokens).pages == (PageStatus.LOADED,) * PAGES
    settle(host.engine)


def test_checksums_may_lie_apart(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = stored(host)
    only(host, "dict")
    right = tier_of(host).checksums
    monkeypatch.setattr(tier_of(host), "checksums", lambda entries: spread(right(entries)))
    assert host.load(tokens).pages == (PageStatus.LOADED,) * PAGES
    settle(host.engine)


def test_a_commit_that_says_less_than_it_was_asked_for_commits_nothing(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = tier_of(host)
    monkeypatch.setattr(tier, "commit", lambda entries, sums: [True])
    report = host.store(prompt(1, PAGES)).result(10)
    assert all("dict" not in tiers for tiers in report.tiers)
    quiet(host.engine)
    assert host.engine.stats()["leases"] == []
    assert len(tier.index) == 0
    settle(host.engine)
