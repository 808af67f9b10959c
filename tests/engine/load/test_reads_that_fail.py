"""Reads that fail for a while: every page is a miss of its own, and all that was committed is left when it is over."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from gdscache import CacheEngine, PageStatus, native
from gdscache.disk.catalog import Catalog
from gdscache.errors import IOFailedError, TransportUnavailableError
from gdscache.storage.base import Op
from gdscache.tiers import ssd as ssd_tier
from gdscache.tiers.quarantine import AGAIN_S, OFF_PAGES, OFF_S, TRY_S
from tests.support.faulty import PLAN, Fault
from tests.support.helpers import Host, OpenHost, drop_from, prompt, quiet, raising, settle, tokens_of, until
from tests.support.pages import FAULTY, misses, offset_of
from tests.support.pairs import pairs
from tests.support.rings import break_rings

URING = "tests.support.faulty:FaultyUring"
PAGES, DOCUMENTS = 6, 4
LOADED, FAILED = PageStatus.LOADED, PageStatus.IO_ERROR


@contextlib.contextmanager
def failing(what: str, monkeypatch: pytest.MonkeyPatch, fault: Fault = Fault.EIO) -> Iterator[None]:
    """Reads of the slab fail, those of checksums in the catalogue, or both."""
    with monkeypatch.context() as patch, contextlib.ExitStack() as rules:
        if what != "catalogue":
            rules.enter_context(PLAN.rule(Op.READ, fault))
        if what != "slab":
            patch.setattr(Catalog, "checksum_rows", raising(IOFailedError("the catalogue cannot be read", "", 5)))
        yield


def stored(open_host: OpenHost, **options: Any) -> tuple[Host, list[list[int]]]:
    """A host over pages of the SSD that no process has read yet."""
    documents = [prompt(seed, PAGES) for seed in range(DOCUMENTS)]
    options = {"ssd": 64, "transport": FAULTY, **options}
    first = open_host(**options)
    for tokens in documents:
        first.keep(tokens)
    first.engine.close()
    return open_host(**options), documents


def clock(engine: CacheEngine) -> list[float]:
    """The time of what failed reads say, for the test to move."""
    now = [0.0]
    engine.manager.quarantine.failed_reads.clock = lambda: now[0]
    return now


def said(caplog: pytest.LogCaptureFixture, words: str) -> None:
    """One warning has these words. A thread of the engine's writes it, behind its work."""
    until(lambda: words in caplog.text, f"a line with {words!r}")
    assert [record.levelname for record in caplog.records if words in record.message] == ["WARNING"]


@pytest.mark.parametrize(
    ("case", "cpu"),
    pairs(
        [
            ("slab", Fault.EIO, FAULTY), ("slab", Fault.SHORT, URING), ("both", Fault.EIO, URING),
            ("slab", Fault.EIO, "tests.support.faulty:FaultyMerging"), ("both", Fault.SHORT, FAULTY),
            ("catalogue", Fault.EIO, FAULTY),
        ],
        [None, 8],
    ),
)  # fmt: skip
def test_all_that_was_committed_is_left(
    open_host: OpenHost, monkeypatch: pytest.MonkeyPatch, cpu: int | None, case: tuple[str, Fault, str]
) -> None:
    what, fault, transport = case
    host, documents = stored(open_host, cpu=cpu, transport=transport)
    pages = host.engine.stats()["tiers"]["ssd"]["pages"]
    with failing(what, monkeypatch, fault):
        for tokens in documents * 2:
            status = PageStatus.SHORT_READ if what == "slab" and fault is Fault.SHORT else FAILED
            assert host.load(tokens).pages == (status,) * PAGES
            if cpu:
                assert host.engine.prefetch(tokens).result(10).tokens == 0
            host.store(tokens)  # what was computed in their place
    quiet(host.engine)
    assert not host.engine.stats()["leases"]
    for _ in range(2):
        drop_from(host.engine, *(["cpu"] if cpu else []))
        assert host.engine.stats()["tiers"]["ssd"]["pages"] == pages
        assert [host.load(tokens).tokens for tokens in documents] == [4 * PAGES] * DOCUMENTS
        settle(host.engine)
        host.engine.close()
        host = open_host(cpu=cpu, ssd=64, transport=transport)


def test_a_page_that_fails_again_while_others_are_read_is_given_up(
    open_host: OpenHost, caplog: pytest.LogCaptureFixture
) -> None:
    host, (tokens, other, *_) = stored(open_host, cpu=None)
    now = clock(host.engine)
    bad = offset_of(host.engine, tokens, 2)
    with PLAN.rule(Op.READ, Fault.EIO, lambda offset: offset == bad), caplog.at_level(logging.WARNING, "gdscache"):
        for seconds in (0.0, AGAIN_S / 2, AGAIN_S - 1):
            now[0] = seconds
            assert host.load(tokens).pages == (LOADED, LOADED, FAILED, LOADED, LOADED, LOADED)
        now[0] = AGAIN_S + 1
        assert host.load(other).tokens == 4 * PAGES
        assert host.load(tokens).tokens == 8
    assert tokens_of(host.engine, tokens) == 8
    assert host.engine.stats()["tiers"]["ssd"]["quarantine"]["given_up"] == 1
    said(caplog, "is given up")
    host.keep(tokens)
    assert host.load(tokens).tokens == 4 * PAGES


def test_a_tier_that_only_fails_is_switched_off_and_on_again(
    open_host: OpenHost, caplog: pytest.LogCaptureFixture
) -> None:
    host, documents = stored(open_host, cpu=None)
    now = clock(host.engine)
    new = prompt(99, PAGES)
    with PLAN.rule(Op.READ, Fault.EIO), caplog.at_level(logging.WARNING, "gdscache"):
        for tokens in documents:
            host.load(tokens)
        now[0] = OFF_S
        assert host.load(documents[0]).pages == (FAILED,) * PAGES
        assert host.engine.lookup(documents[0]).tokens == 0
        assert misses(host.engine)["switched_off"] == PAGES
        assert host.engine.stats()["tiers"]["ssd"]["quarantine"]["switched_off_by_errors"] == ["ssd"]
        report = host.store(new).result(10)
        assert set(report.dropped.values()) == {"switched_off"}
        now[0] += TRY_S
        assert host.load(documents[0]).pages == (FAILED,) * PAGES, "tried again"
        assert host.engine.lookup(documents[0]).tokens == 0
        said(caplog, "is switched off")
    now[0] += TRY_S
    with caplog.at_level(logging.WARNING, "gdscache"):
        assert [host.load(tokens).tokens for tokens in documents] == [4 * PAGES] * DOCUMENTS
        said(caplog, "is switched on again")
    quarantine = host.engine.stats()["tiers"]["ssd"]["quarantine"]
    assert (quarantine["switched_off_by_errors"], quarantine["error_switch_offs"], quarantine["given_up"]) == ([], 1, 0)
    host.keep(new)
    assert host.load(new).tokens == 4 * PAGES
    assert DOCUMENTS * PAGES >= OFF_PAGES


def test_checksums_that_another_load_reads_meanwhile_judge_no_page(
    open_host: OpenHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, (tokens, *_) = stored(open_host, cpu=None)
    ssd = host.engine.manager.ssd
    take = native.take_unbound

    def meanwhile(sums: Any, rows: Any, keys: Any) -> Any:
        taken = take(sums, rows, keys)
        ssd._learn_checksums(rows.tolist())  # reads of the catalogue succeed again
        return taken

    def refuse_once(*_: Any) -> Any:
        patch.undo()
        patch.setattr(ssd_tier, "take_unbound", meanwhile)
        raise IOFailedError("the catalogue cannot be read", "", 5)

    with monkeypatch.context() as patch:
        patch.setattr(Catalog, "checksum_rows", refuse_once)
        assert set(host.load(tokens).pages) == {FAILED}
    assert host.load(tokens).tokens == 4 * PAGES


# -- a ring that fails -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cpu", [None, 8])
def test_a_ring_that_fails_costs_no_page(open_host: OpenHost, cpu: int | None) -> None:
    try:
        host = open_host(cpu=cpu, ssd=64, transport="uring")
    except TransportUnavailableError as error:
        pytest.skip(f"no io_uring: {error.message}")
    for seed in range(3):
        host.keep(prompt(seed, PAGES))
        drop_from(host.engine, *(["cpu"] if cpu else []))
        assert break_rings() > 0, "there is no ring"
        assert [host.load(prompt(n, PAGES)).tokens for n in range(seed + 1)] == [4 * PAGES] * (seed + 1)
        assert break_rings() > 0
        host.keep(prompt(10 + seed, PAGES))
        assert host.load(prompt(10 + seed, PAGES)).tokens == 4 * PAGES
    assert not {"io_error", "short_read"} & misses(host.engine).keys()
    settle(host.engine)
    host.engine.close()
    assert open_host(cpu=cpu, ssd=64).engine.stats()["tiers"]["ssd"]["pages"] == 6 * PAGES
