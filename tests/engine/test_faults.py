"""Bad luck: every fault is a miss of its own cause, the good prefix stays, the rest is unharmed.

A page whose bytes are bad goes; one that could not be read stays."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import sqlite3
from collections import deque
from pathlib import Path
from typing import Any

import pytest

from gdscache import PageStatus
from gdscache.disk import catalog_file
from gdscache.errors import IOFailedError, LoadFailedError, StorageError
from gdscache.storage.base import Op
from gdscache.store import plan
from gdscache.tiers.base import Lease
from tests.support.faults import ExtentPart
from tests.support.faulty import PLAN, READ_FAULTS, Fault
from tests.support.helpers import (
    WAIT,
    OpenEngine,
    OpenHost,
    drop_from,
    flip_file,
    kept,
    our_threads,
    prompt,
    quiet,
    raising,
    reserve_used,
    run,
    settle,
    tokens_of,
)
from tests.support.pages import FAULTY, lose, misses, offset_of, slot_of

LOADED = PageStatus.LOADED


# -- reads -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cancelled", [True, False])
def test_a_corrupt_page_that_nobody_copies_on_stays_out_of_the_cpu_tier(
    open_host: OpenHost, device: str, cancelled: bool
) -> None:
    """Checksums are taken by the copy into the planes: a cancelled load and a prefetch have none, and must look."""
    host = open_host(device=device, transport=FAULTY, cpu=8)
    tokens = prompt(1, 5)
    with PLAN.rule(Op.WRITE, Fault.FLIP, lambda offset: offset == 0, bit=7):
        host.keep(tokens)
    drop_from(host.engine, "cpu")
    with PLAN.rule(Op.READ, Fault.HANG):
        if cancelled:
            load, blocks, _ = host.begin(tokens)
            load.cancel()
        else:
            prefetch = host.engine.prefetch(tokens)
    if cancelled:
        load.result()
        host.give(blocks)
    else:
        assert prefetch.result().pages == {"checksum": 1, "loaded": 4}
    quiet(host.engine)
    assert host.engine.check().problems == ()
    assert tokens_of(host.engine, tokens) == 0


@pytest.mark.parametrize(("fault", "status"), READ_FAULTS)
def test_a_sequence_names_the_bad_page_and_keeps_what_is_before_it(
    open_engine: OpenEngine, device: str, fault: Fault, status: PageStatus
) -> None:
    engine = open_engine(device=device, transport=FAULTY, gpu=16)
    tokens = prompt(1, 5, extra=2)
    run(engine, tokens)
    lose(engine, tokens, range(1, 5), "gpu")  # page 0 stays, so that positions in the load and in the sequence differ
    lose(engine, tokens, range(5), "cpu")
    bad = offset_of(engine, tokens, 3)
    with PLAN.rule(Op.READ, fault, lambda offset: offset == bad), engine.sequence(tokens) as seq:
        assert seq.cached_tokens == 20
        with pytest.raises(LoadFailedError, match="page 3") as caught:
            seq.commit()
        assert (caught.value.page, caught.value.cause) == (3, status.value)
        assert "recompute" in caught.value.hint
        assert seq.cached_tokens == 20
    stays = status is not PageStatus.CHECKSUM
    assert engine.lookup(tokens).tiers == (("gpu", "gpu", "gpu", "ssd", "cpu") if stays else ("gpu",) * 3)
    assert run(engine, tokens) == (20 if stays else 12)
    assert run(engine, tokens) == 20


@pytest.mark.parametrize("cpu", [None, 8])
@pytest.mark.parametrize(("fault", "status"), READ_FAULTS)
def test_a_bad_page_within_a_merged_read_costs_its_own_suffix(
    open_host: OpenHost, device: str, fault: Fault, status: PageStatus, cpu: int | None
) -> None:
    """Neighbours come as one request; when it fails its pages are tried one by one, and only the bad one is a miss."""
    host, tokens = kept(open_host, 5, device=device, transport="tests.support.faulty:FaultyMerging", cpu=cpu, bounce=40)
    drop_from(host.engine, *(["cpu"] if cpu else []))
    offsets = [offset_of(host.engine, tokens, page) for page in range(5)]
    extent = host.layout.extent_bytes
    assert offsets == [offsets[0] + page * extent for page in range(5)]
    of_the_page = ExtentPart(offsets[3], offsets[3] + host.layout.page_bytes, 1 << 40)
    already = len(PLAN.moved[Op.READ])
    with PLAN.rule(Op.READ, fault, part=of_the_page, bit=77) as rule:
        report = host.load(tokens)  # compares the bytes
    read = sorted(PLAN.moved[Op.READ][already:])
    if fault is Fault.FLIP:  # nobody was told, so nothing was tried again
        assert (rule.met, read) == (1, offsets[:1])
    else:
        # What came of a short read stays: half of five pages, and then half of one.
        again = [*offsets[2:], offsets[3] + extent // 2] if fault is Fault.SHORT else offsets
        assert (rule.met, read) == (3 if fault is Fault.SHORT else 2, sorted([offsets[0], *again]))
    assert report.pages == (LOADED, LOADED, LOADED, status, LOADED)
    assert report.tokens == 12
    assert misses(host.engine) == {status.value: 1}
    left = 12 if fault is Fault.FLIP else 20
    assert tokens_of(host.engine, tokens) == left
    assert host.load(tokens).tokens == left


# -- memory and files ------------------------------------------------------------------------------------------------


def test_a_bad_page_of_the_cpu_pool_is_not_written_on_unseen(open_host: OpenHost) -> None:
    host = open_host(transport=FAULTY)
    tokens = prompt(1, 3)
    with PLAN.rule(Op.WRITE, Fault.EIO):
        host.keep(tokens)
    cpu = host.engine.manager.cpu
    cpu.extents.memory(slot_of(host.engine, tokens, 1, "cpu"))[0] ^= 1
    host.keep_on_ssd(tokens)
    assert host.load(tokens).tokens in (4, 12)


@pytest.mark.parametrize("cpu", [None, 6])
def test_a_slab_truncated_while_it_is_open(open_host: OpenHost, slab: Path, cpu: int | None) -> None:
    host, tokens = kept(open_host, 5, cpu=cpu)
    drop_from(host.engine, *(["cpu"] if cpu else []))
    slots = [slot_of(host.engine, tokens, i) for i in range(5)]
    cut = sorted(slots)[3]
    os.truncate(slab / "slab-0.bin", cut * host.layout.extent_bytes + 4096)
    report = host.load(tokens)
    lost = [i for i, slot in enumerate(slots) if slot >= cut]
    assert [i for i, status in enumerate(report.pages) if status is PageStatus.SHORT_READ] == lost
    assert misses(host.engine) == {"short_read": len(lost)}
    assert "slab-0.bin has" in host.engine.check().problems[0]
    assert tokens_of(host.engine, tokens) == 20, "the file may come back whole"
    host.engine.close()
    host = open_host(cpu=cpu)
    assert host.load(tokens).tokens == 4 * lost[0]
    host.keep(tokens)
    assert host.load(tokens).tokens == 20


@pytest.mark.parametrize("left", [None, 0, 2, 2.5])
def test_a_slab_truncated_or_missing_at_reopen(open_host: OpenHost, slab: Path, left: float | None) -> None:
    host, tokens = kept(open_host, 5)
    slots = [slot_of(host.engine, tokens, i) for i in range(5)]
    host.engine.close()
    if left is None:
        (slab / "slab-0.bin").unlink()
    else:
        os.truncate(slab / "slab-0.bin", int(left * host.layout.extent_bytes))
    host = open_host()
    whole = [slot < int(left or 0) for slot in slots]
    good = next((i for i, there in enumerate(whole) if not there), 5)
    assert host.load(tokens).tokens == 4 * good
    described = host.engine.stats()["tiers"]["ssd"]
    assert described["pages"] == sum(whole)
    assert sum(described["lost_at_recovery"].values()) == 5 - sum(whole)
    host.keep_on_ssd(tokens)
    assert host.load(tokens).tokens == 20


# -- the catalogue ---------------------------------------------------------------------------------------------------


def catalogue(slab: Path) -> Path:
    (path,) = slab.glob("*.sqlite")
    return path


def test_checksums_that_are_gone_or_of_another_page(open_host: OpenHost, slab: Path) -> None:
    host, tokens = kept(open_host, 5)
    slots = [slot_of(host.engine, tokens, i) for i in range(5)]
    host.engine.close()
    with sqlite3.connect(catalogue(slab)) as db:
        db.execute("DELETE FROM checksums WHERE place = ?", (slots[1],))
        db.execute("UPDATE checksums SET sums = zeroblob(16) WHERE place = ?", (slots[2],))
        sums = "(SELECT sums FROM checksums WHERE place = ?)"
        db.execute(f"UPDATE checksums SET sums = {sums} WHERE place = ?", (slots[4], slots[3]))
    db.close()
    host = open_host()
    bad = PageStatus.CHECKSUM
    assert host.load(tokens).pages == (LOADED, bad, bad, bad, LOADED)
    assert tokens_of(host.engine, tokens) == 4


@pytest.mark.parametrize("change", ["place = 11", "key = zeroblob(32)"])
def test_check_finds_a_row_that_names_no_page_and_a_page_without_row(open_host: OpenHost, change: str) -> None:
    host, tokens = kept(open_host, 3, cpu=None)
    ssd = host.engine.manager.ssd
    with ssd._catalog._transaction() as writer:
        writer.execute(f"UPDATE pages SET {change} WHERE place = ?", (slot_of(host.engine, tokens, 2),))
    assert len(host.engine.check().problems) == 2
    assert tokens_of(host.engine, tokens) == 12
    host.engine.close()
    host = open_host(cpu=None)
    assert host.engine.check().problems == ()
    assert host.load(tokens).tokens == 8


@pytest.mark.parametrize("cpu", [None, 2, 6])
def test_a_catalogue_that_breaks_in_use_is_a_miss(open_host: OpenHost, slab: Path, cpu: int | None) -> None:
    """Checksums are read when pages are; where they cannot be, no page can be verified, and no load may raise."""
    host = open_host(cpu=cpu)
    tokens = prompt(1, 4)
    host.store(tokens)
    host.engine.close()
    host = open_host(cpu=cpu)
    with sqlite3.connect(catalogue(slab)) as db:
        db.execute("DROP TABLE checksums")
    db.close()
    for _ in range(4):  # more often than there are bounce slots
        hit = host.engine.lookup(tokens)
        blocks = host.take(len(hit.pages))
        load = host.engine.load(hit, blocks)
        report = load.result(WAIT)
        assert report.tokens == 0
        assert LOADED not in report.pages
        host.give(blocks)
    assert not reserve_used(host.engine)
    assert host.engine.stats()["leases"] == []
    for cause in misses(host.engine):
        assert cause in {"io_error", "checksum"}
    with contextlib.suppress(StorageError):  # close() may say that the last deletions were not written
        host.engine.close()
    assert not our_threads()


@pytest.mark.parametrize(("free", "said", "blocks"), [(1 << 20, True, 1), (1 << 40, False, 1), (0, False, 0)])
def test_room_for_the_catalogue_is_looked_for(
    open_host: OpenHost,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    free: int,
    said: bool,
    blocks: int,
) -> None:
    right = os.statvfs

    def found(path: Any) -> Any:
        return os.statvfs_result(
            [*right(path)[:1], 1, blocks, *right(path)[3:4], free, *right(path)[5:]]
        )  # units of a byte

    monkeypatch.setattr(catalog_file.os, "statvfs", found)
    with caplog.at_level(logging.WARNING, "gdscache"):
        host = open_host()
    lines = [record.message for record in caplog.records if "the catalogue may need" in record.message]
    assert bool(lines) == said
    assert all("not stored (disk_full)" in line for line in lines)
    host.keep(prompt(1, 3))
    assert host.load(prompt(1, 3)).tokens == 12


def test_a_catalogue_that_takes_no_more_costs_stores_only(open_host: OpenHost, monkeypatch: pytest.MonkeyPatch) -> None:
    host, tokens = kept(open_host, 3)
    ssd = host.engine.manager.ssd
    with monkeypatch.context() as patch:
        patch.setattr(ssd._catalog, "commit", raising(IOFailedError("injected", "free space", errno.ENOSPC)))
        handle = host.store(prompt(2, 2))
        assert set(handle.result(WAIT).dropped.values()) == {"disk_full"}
        assert host.load(prompt(2, 2)).bytes_by_tier == {"cpu": 2 * host.layout.page_bytes}
        drop_from(host.engine, "cpu")
        bad = offset_of(host.engine, tokens, 2)
        flip_file(ssd.path / "slab-0.bin", bad)
        assert host.load(tokens).tokens == 8  # its deletion cannot be committed either, and the load says what it knows
    assert tokens_of(host.engine, prompt(2, 2)) == 0
    settle(host.engine)
    host.keep(prompt(2, 2))
    for _ in range(2):
        drop_from(host.engine, "cpu")
        assert (host.load(prompt(2, 2)).tokens, host.load(tokens).tokens) == (8, 8)
        host.engine.close()
        host = open_host()


@pytest.mark.parametrize("method", ["reserve", "begin", "commit"])
def test_an_unexpected_error_in_the_writer_strands_nothing(
    open_host: OpenHost, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    host = open_host()
    owner = host.engine._parts.executor if method == "begin" else host.engine.manager.ssd
    assert owner is not None
    with monkeypatch.context() as patch:
        patch.setattr(owner, method, raising(ArithmeticError("injected")))
        handle = host.store(prompt(1, 3))
        try:
            dropped = handle.result(3).dropped
        finally:
            if not handle.done():  # close() would wait for ever for what is stranded
                host.engine._parts.storer._queued = 0
                host.engine.manager._leases.clear()
    assert set(dropped) == {0, 1, 2}
    settle(host.engine)
    host.keep_on_ssd(prompt(1, 3))
    assert host.load(prompt(1, 3)).tokens == 12


@pytest.mark.parametrize(("owner", "name", "cpu"), [(plan, "Parcel", 6), (Lease, "take", 6), (plan, "Parcel", None)])
def test_an_error_while_pages_find_slots_loses_none(
    open_host: OpenHost, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, cpu: int | None
) -> None:
    host = open_host(cpu=cpu)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, raising(MemoryError))
        assert set(host.store(prompt(1, 2)).result(WAIT).dropped) == {0, 1}
    settle(host.engine)
    for seed in (1, 2, 3):
        assert host.store(prompt(seed, 2)).result(5).dropped == {}
    assert host.load(prompt(3, 2)).tokens == 8


def test_an_error_while_dirty_pages_set_out_leaves_none_on_its_way(
    open_host: OpenHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = open_host(store={"write_policy": "write_back"})
    for priority in (0, 1):  # a parcel each
        host.store(prompt(priority, 1), priority=priority)
    host.engine.drain(WAIT)
    made = iter((plan.Parcel, raising(MemoryError)))
    with monkeypatch.context() as patch:
        patch.setattr(plan, "Parcel", lambda *call, **options: next(made)(*call, **options))
        with pytest.raises(MemoryError):
            host.engine.flush(WAIT)
    host.engine.flush(5)
    settle(host.engine)
    assert host.engine.stats()["stored"]["ssd"] == 2


def test_an_error_while_a_batch_is_chosen_gives_its_pages_their_outcome(open_host: OpenHost) -> None:
    class Ready(deque[Any]):
        popped = 0

        def popleft(self) -> Any:
            self.popped += 1
            part = super().popleft()
            if self.popped == 1:
                raise MemoryError
            return part

    host = open_host()
    writer = host.engine._parts.storer.writers["ssd"]
    writer._ready = Ready()
    assert host.store(prompt(1, 2)).result(5).dropped == {0: "error", 1: "error"}
    settle(host.engine)
    assert host.store(prompt(2, 2)).result(5).dropped == {}
