"""The engine with a pool of its own: sequences over all sets of tiers, through restarts, pressure and threads."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gdscache import CacheEngine, GdsCacheError, errors
from gdscache.store.handle import StoreHandle
from tests.support.helpers import (
    EXTRA,
    MHA,
    WAIT,
    OpenEngine,
    drop_from,
    expected,
    fill,
    holds,
    layout_of,
    make_config,
    our_threads,
    prompt,
    quiet,
    ran,
    read_page,
    run,
    settle,
    tokens_of,
    until,
)
from tests.support.pages import lose

# -- one request after another ---------------------------------------------------------------------------------------


def test_the_pool_alone_is_a_cache(open_engine: OpenEngine, device: str) -> None:
    engine = open_engine(device=device, cpu=None, ssd=None)
    assert list(engine.manager.tiers) == ["gpu"]
    tokens = prompt(1, 6, extra=1)
    assert run(engine, tokens) == 0
    assert run(engine, tokens) == 24
    drop_from(engine, "gpu")
    assert run(engine, tokens) == 0


@pytest.mark.parametrize(
    ("pages", "extra", "cached"), [(4, 0, 12), (4, 1, 16), (1, 0, 0), (1, 1, 4), (0, 3, 0), (0, 0, 0)]
)
def test_at_least_one_token_is_left_to_compute(
    open_engine: OpenEngine, device: str, pages: int, extra: int, cached: int
) -> None:
    engine = open_engine(device=device)
    tokens = prompt(1, pages, extra=extra)
    run(engine, tokens)
    for tiers in ((), ("gpu",), ("gpu", "cpu")):
        drop_from(engine, *tiers)
        with engine.sequence(tokens) as seq:
            assert seq.cached_tokens == cached
            assert len(seq) == len(tokens)
            assert seq.tokens == tokens
            assert len(seq.slots) == -(-len(tokens) // 4)
            holds(engine, seq)


@pytest.mark.parametrize("tier", ["cpu", "ssd"])
def test_a_commit_leaves_what_was_loaded_in_the_pool(open_engine: OpenEngine, device: str, tier: str) -> None:
    engine, tokens = ran(open_engine, 5, device=device)
    drop_from(engine, *(("gpu",) if tier == "cpu" else ("gpu", "cpu")))
    with engine.sequence(tokens) as seq:
        assert seq.load.result().bytes_by_tier == {tier: 5 * engine.layout.page_bytes}
        fill(engine, seq)
        seq.commit()
    assert engine.lookup(tokens).tiers == ("gpu",) * 5
    assert run(engine, tokens) == 20


def test_a_prefix_over_three_tiers_is_one_hit(open_engine: OpenEngine, device: str) -> None:
    engine, tokens = ran(open_engine, 6, device=device, gpu=8)
    lose(engine, tokens, [2, 3, 4, 5], "gpu")
    lose(engine, tokens, [4, 5], "cpu")
    assert engine.lookup(tokens).tiers == ("gpu", "gpu", "cpu", "cpu", "ssd", "ssd")
    assert run(engine, tokens) == 24


def test_a_salt_s_pages_in_the_pool_are_its_own_and_go_with_it(open_engine: OpenEngine, device: str) -> None:
    engine = open_engine(device=device)
    tokens = prompt(1, 3, extra=1)
    run(engine, tokens, "a")
    assert tokens_of(engine, tokens, "b") == 0
    assert run(engine, tokens, "b") == 0
    assert run(engine, tokens, "a") == 12
    assert engine.invalidate(engine.namespace("a")) == {"gpu": 3, "cpu": 3, "ssd": 3}
    assert tokens_of(engine, tokens, "a") == 0
    assert tokens_of(engine, tokens, "b") == 12
    assert engine.clear() == {"gpu": 3, "cpu": 3, "ssd": 3}
    assert engine.clear() == {"gpu": 0, "cpu": 0, "ssd": 0}


# -- sequences -------------------------------------------------------------------------------------------------------


def test_a_new_salt_does_not_wait_for_the_catalogue(open_engine: OpenEngine) -> None:
    """What a namespace means is written with its first pages, by the writer: a commit may take its time."""
    engine = open_engine()
    catalog = engine.manager.ssd._catalog
    handles: list[StoreHandle] = []

    def request() -> None:
        with engine.sequence(prompt(1, 3), "tenant") as sequence:
            fill(engine, sequence, "tenant")
            handles.append(sequence.commit())

    with catalog._write_lock:
        caller = threading.Thread(target=request)
        caller.start()
        caller.join(WAIT)
        assert not caller.is_alive(), "the caller waits for the catalogue"
        assert not handles[0].done()
        assert engine.namespace("tenant") not in catalog.namespaces()
    quiet(engine)
    assert catalog.namespaces()[engine.namespace("tenant")]["request_salt"] == "tenant"


def test_two_sequences_share_slots_and_the_last_one_to_leave_counts(open_engine: OpenEngine, device: str) -> None:
    engine, tokens = ran(open_engine, 3, device=device, gpu=8)
    with engine.sequence(tokens) as first:
        with engine.sequence([*tokens[:12], 9, 9, 9, 9]) as second:
            assert second.slots[:3].tolist() == first.slots[:3].tolist()
            assert second.slots[3] != first.slots[3]
        with pytest.raises(errors.PoolFullError):
            engine.sequence(prompt(2, 8))
        holds(engine, first)  # its pages were not given away


def test_a_page_that_another_sequence_published_is_stored_behind_its_stream(
    open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, tokens, behind = open_engine(), prompt(1, 2), list[int]()
    with engine.sequence(tokens) as first, engine.sequence(tokens) as second:
        first.commit().result(WAIT)
        monkeypatch.setattr(engine.gpu, "order_after", lambda slots: behind.extend(slots))
        second.commit().result(WAIT)
    assert behind == first.slots.tolist()


def test_append_grows_a_sequence_page_by_page(open_engine: OpenEngine, device: str) -> None:
    engine = open_engine(device=device)
    tokens = prompt(1, 5)
    with engine.sequence(tokens[:2]) as seq:
        for at in range(2, 20, 3):
            seq.append(tokens[at : at + 3])
        assert len(seq) == 20
        assert len(seq.slots) == 5
        assert len(set(seq.slots.tolist())) == 5
        fill(engine, seq)
        seq.commit()
        before = seq.slots.tolist()
        seq.append(prompt(2, 1))
        assert seq.slots.tolist()[:5] == before
        fill(engine, seq, start=5)
        handle = seq.commit()
        assert len(handle.result(WAIT).tiers) == 6
    drop_from(engine, "gpu")
    assert tokens_of(engine, [*tokens, *prompt(2, 1)]) == 24
    assert run(engine, [*tokens, 1]) == 20


def test_a_failed_append_changes_nothing(open_engine: OpenEngine) -> None:
    engine = open_engine(gpu=4)
    with engine.sequence(prompt(1, 3)) as seq:
        before = (seq.tokens, seq.slots.tolist(), engine.gpu.index.free_slots)
        with pytest.raises(errors.PoolFullError, match=r"2 pages.*1 of 4") as caught:
            seq.append(prompt(2, 2))
        assert "gpu.capacity" in caught.value.hint
        with pytest.raises(errors.TokensError):
            seq.append(["a"])
        assert (seq.tokens, seq.slots.tolist(), engine.gpu.index.free_slots) == before
        seq.append(prompt(2, 1))
        fill(engine, seq)
        seq.commit()
    assert tokens_of(engine, [*prompt(1, 3), *prompt(2, 1)]) == 16


def test_a_full_pool_holds_nothing(open_engine: OpenEngine, device: str) -> None:
    engine, tokens = ran(open_engine, 3, device=device, gpu=6)
    with engine.sequence(prompt(2, 4)):
        with pytest.raises(errors.PoolFullError, match="3 pages"):
            engine.sequence(prompt(3, 3))
        with pytest.raises(errors.PoolFullError):  # shares three pages, and they may be evicted again afterwards
            engine.sequence([*tokens[:12], *prompt(4, 5)])
        until(lambda: len(engine.stats()["leases"]) == 1, "only the open sequence holds a lease")
    with engine.sequence(prompt(3, 6)):
        pass


def test_leaving_without_commit_publishes_nothing(open_engine: OpenEngine) -> None:
    engine = open_engine()
    tokens = prompt(1, 3)
    with engine.sequence(tokens) as seq:
        fill(engine, seq)
    seq.close()
    assert tokens_of(engine, tokens) == 0
    with pytest.raises(ZeroDivisionError), engine.sequence(tokens):
        raise ZeroDivisionError
    assert engine.gpu.index.free_slots == engine.gpu.index.slots


def test_a_sequence_that_was_left_is_refused(open_engine: OpenEngine) -> None:
    engine = open_engine()
    with engine.sequence(prompt(1, 2)) as seq:
        pass
    for use in (seq.commit, seq.verify, lambda: seq.append([1]), lambda: seq.wait(0)):
        with pytest.raises(errors.SequenceStateError, match="left"):
            use()


def test_a_sequence_left_while_it_loads_gives_its_slots_back(open_engine: OpenEngine, device: str) -> None:
    engine, tokens = ran(open_engine, 5, device=device)
    drop_from(engine, "gpu", "cpu")
    for _ in range(20):
        with engine.sequence(tokens):
            pass
    assert run(engine, tokens) == 20


def test_the_same_prompt_twice_at_once_publishes_one_copy(open_engine: OpenEngine, device: str) -> None:
    engine = open_engine(device=device, gpu=12)
    tokens = prompt(1, 3, extra=1)
    with engine.sequence(tokens) as one, engine.sequence(tokens) as two:
        for seq in (one, two):
            fill(engine, seq)
            seq.commit()
        assert set(one.slots.tolist()).isdisjoint(two.slots.tolist())
    engine.drain(WAIT)
    assert {name: tier["pages"] for name, tier in engine.stats()["tiers"].items()} == {"gpu": 3, "cpu": 3, "ssd": 3}
    assert engine.stats()["stored"] == {"cpu": 3, "ssd": 3}


def test_a_clear_between_begin_and_commit_is_final(open_engine: OpenEngine) -> None:
    engine, tokens = ran(open_engine, 3)
    longer = [*tokens[:12], *prompt(2, 2)]
    with engine.sequence(longer) as seq:
        assert seq.cached_tokens == 12
        fill(engine, seq)
        assert engine.clear() == {"gpu": 3, "cpu": 3, "ssd": 3}
        holds(engine, seq)  # what was shared is ours as long as we hold it
        assert seq.commit().result(WAIT).tiers == ()
    engine.drain(WAIT)
    assert tokens_of(engine, longer) == 0


# -- pressure --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", ["cpu", "ssd"])
def test_a_sequence_that_outgrows_a_tier_keeps_a_prefix_there(open_engine: OpenEngine, tier: str) -> None:
    """A request that decodes page after page must not push its own head out for tails that nobody can reach."""
    engine = open_engine(gpu=16, cpu=4 if tier == "cpu" else None, ssd=4 if tier == "ssd" else None)
    tokens = prompt(1, 8)
    with engine.sequence(tokens[:4]) as seq:
        for page in range(8):
            if page:
                seq.append(tokens[4 * page : 4 * page + 4])
            fill(engine, seq, start=page)
            seq.commit()
            engine.drain(WAIT)
    drop_from(engine, "gpu")
    assert tokens_of(engine, tokens) >= 12


# -- opening and closing ---------------------------------------------------------------------------------------------


def test_close_twice_and_use_after_it(open_engine: OpenEngine) -> None:
    engine = open_engine()
    run(engine, prompt(1, 2))
    engine.close()
    engine.close()
    engine.close(drain=False)
    uses: list[Callable[[], object]] = [
        lambda: engine.lookup([1]),
        lambda: engine.sequence([1]),
        lambda: engine.prefetch([1]),
        lambda: engine.load(None, []),  # type: ignore[arg-type]
        lambda: engine.load_many([]),
        lambda: engine.store([1], []),
        lambda: engine.clear(),
        lambda: engine.invalidate(engine.namespace()),
        lambda: engine.drain(),
        lambda: engine.stats(),
        lambda: engine.check(),
        lambda: engine.gpu,
        lambda: engine.manager,
        lambda: engine.__enter__().lookup([1]),
    ]
    for use in uses:
        with pytest.raises(errors.EngineClosedError, match="closed") as caught:
            use()
        assert caught.value.hint


def test_close_with_sequences_open_and_work_in_flight(slab: Path, device: str) -> None:
    tokens = prompt(1, 5, extra=1)
    engine = CacheEngine.from_config(make_config(slab, device=device, gpu=16))
    run(engine, tokens)
    drop_from(engine, "gpu", "cpu")
    loading = engine.sequence(tokens)
    storing = engine.sequence(prompt(2, 5))
    fill(engine, storing)
    handle = storing.commit()
    engine.close()
    assert handle.done()
    assert loading.load.done()
    loading.close()
    storing.close()
    with CacheEngine.from_config(make_config(slab, device=device, gpu=16)) as engine:
        assert run(engine, tokens) == 20
        assert run(engine, prompt(2, 5)) == 16
        settle(engine)


def test_close_without_drain_stays_consistent(slab: Path) -> None:
    tokens = prompt(1, 6)
    engine = CacheEngine.from_config(make_config(slab, gpu=8))
    with engine.sequence(tokens) as seq:
        fill(engine, seq)
        handle = seq.commit()
    engine.close(drain=False)
    report = handle.result(0)
    with CacheEngine.from_config(make_config(slab)) as engine:
        committed = [("ssd" in tiers) for tiers in report.tiers]
        found = tokens_of(engine, tokens) // 4
        assert found == next((i for i, there in enumerate(committed) if not there), 6)
        assert {report.dropped.get(i) for i, there in enumerate(committed) if not there} <= {"closed"}
        settle(engine)


def test_close_ends_every_thread_and_every_file(slab: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    with CacheEngine.from_config(make_config(slab)) as engine:
        run(engine, prompt(1, 3))
        assert our_threads()
    assert our_threads() == []
    assert set(os.listdir("/proc/self/fd")) <= before


def other_version(slab: Path) -> None:
    with contextlib.closing(sqlite3.connect(next(slab.glob("*.sqlite")))) as db, db:
        db.execute("UPDATE meta SET value = 99 WHERE name = 'format_version'")


@pytest.mark.parametrize(
    ("before", "changes", "error"),
    [
        (lambda slab: slab.write_text(""), {}, errors.NotADirectoryPathError),
        (None, {"model": MHA | {"page_tokens": 8}}, errors.ExtentSizeError),
        (other_version, {}, errors.CatalogVersionError),
        (None, {"device": "cuda:99"}, errors.DeviceError),
        (None, {"transport": "nowhere.at_all:Transport"}, errors.TransportUnavailableError),
        (None, {"host_buffer": 100}, errors.CapacityError),
    ],
)
def test_an_engine_that_cannot_open_leaves_nothing_open(
    slab: Path, before: Callable[[Path], object] | None, changes: dict[str, Any], error: type[GdsCacheError]
) -> None:
    if error is not errors.NotADirectoryPathError:
        CacheEngine.from_config(make_config(slab)).close()
    if before is not None:
        before(slab)
    config = make_config(slab, **changes)
    files = set(os.listdir("/proc/self/fd"))
    with pytest.raises(error) as caught:
        CacheEngine.from_config(config)
    assert caught.value.hint
    assert our_threads() == []
    assert set(os.listdir("/proc/self/fd")) <= files


def test_an_engine_with_a_pool_refuses_attached_calls(open_engine: OpenEngine) -> None:
    engine = open_engine()
    run(engine, prompt(1, 3))
    hit = engine.lookup(prompt(1, 3))
    for use in (
        lambda: engine.load(hit, [0, 1, 2]),
        lambda: engine.load_many([(hit, [0, 1, 2])]),
        lambda: engine.store(prompt(1, 3), [0]),
    ):
        with pytest.raises(errors.SequenceStateError, match="owns its pool"):
            use()


def test_planes_are_the_pool(open_engine: OpenEngine) -> None:
    engine = open_engine(model=EXTRA)
    layout = layout_of(EXTRA)
    for layer, planes in enumerate(layout.layers):
        tensors = engine.gpu.planes(layer)
        assert [tuple(t.shape[1:]) for t in tensors] == [(4, *p.shape) for p in planes]
        assert [str(t.dtype) for t in tensors] == [f"torch.{p.dtype}" for p in planes]
    with engine.sequence(prompt(1, 2)) as seq:
        fill(engine, seq)
        seq.commit()
        planes = [engine.gpu.planes(layer) for layer in range(3)]
        got = read_page(planes, layout, [int(seq.slots[1])])
        assert np.array_equal(got, expected(layout, engine.pages(prompt(1, 2))[1].key))
