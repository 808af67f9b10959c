"""clear() and invalidate(): in pieces, so that others have the lock between them, and still nothing comes back."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from gdscache import CacheEngine
from gdscache.disk.catalog import Catalog
from gdscache.errors import EngineClosedError, PoolFullError
from gdscache.index.index import PageIndex
from tests.support.helpers import (
    LONG,
    WAIT,
    Bytes,
    OpenEngine,
    OpenHost,
    drop_from,
    expected,
    fill,
    prompt,
    quiet,
    raising,
    ran,
    read_page,
    run,
    tokens_of,
    until,
    write_page,
)

SALTS = ("", "tenant")


def between_pieces(engine: CacheEngine, action: Callable[[], None], piece: int = 1) -> AbstractContextManager[Any]:
    """Clear in pieces of `piece` pages, and have another thread do `action` once, after the first of them, without the
    lock."""
    left = [action]

    def pause(seconds: float) -> None:
        if left:
            with ThreadPoolExecutor(1) as other:
                other.submit(left.pop()).result()

    return mock.patch.multiple(engine.manager.clearing, piece=piece, sleep=pause)


def rows(engine: CacheEngine) -> set[bytes]:
    """Keys in the catalogue by now."""
    return set(engine.manager.ssd._catalog.rows().values())


def keys(engine: CacheEngine, tokens: list[int], salt: str = "") -> set[bytes]:
    return {page.key for page in engine.pages(tokens, salt)}


# -- how long the lock is held: counted in pages, not in seconds ------------------------------------------------------


@pytest.mark.parametrize("cleared", ["everything", "one namespace", "a namespace without pages"])
def test_the_lock_is_held_for_a_piece_at_a_time(open_engine: OpenEngine, cleared: str) -> None:
    """Of each tier. All pages together are let go of in one step, which costs nothing a page; slots of files cost."""
    engine, seen = open_engine(gpu=40, cpu=40, ssd=40), list[tuple[int, int]]()
    for salt in SALTS:
        run(engine, prompt(1, 16), salt)
    tiers = engine.manager.tiers

    def look(_: float = 0) -> None:
        seen.append((sum(len(tier.index) for tier in tiers.values()), len(tiers["ssd"]._returned)))

    gone = {"everything": 32, "one namespace": 16}.get(cleared, 0)
    look()
    with mock.patch.multiple(engine.manager.clearing, piece=4, sleep=look):
        given = [] if cleared == "everything" else [engine.namespace("" if gone else "nobody's")]
        assert engine.manager.clearing.clear(*given) == dict.fromkeys(tiers, gone)
    assert seen[-1][0] == 3 * (32 - gone)
    for (pages, slots), (left, more) in itertools.pairwise(seen):
        assert more - slots <= 2 * 4  # the first ones go with the step, too
        assert pages - left <= 3 * 4 or cleared == "everything"


# -- everything at once ----------------------------------------------------------------------------------------------


def test_everything_is_invisible_before_the_first_pause_and_room_is_there(open_host: OpenHost) -> None:
    host = open_host(ssd=12, cpu=6)
    engine, old, new = host.engine, prompt(1, 12), prompt(1, 3) + prompt(2, 2)
    host.keep(old)
    assert len(rows(engine)) == 12
    host.data = lambda key: expected(host.layout, key) ^ np.uint8(1)  # the weights have changed

    def meanwhile() -> None:
        assert tokens_of(engine, old) == 0
        assert rows(engine) >= keys(engine, old[:12]), "the old rows are to be there beside the new ones"
        handle = host.store(new)  # the same keys once more
        assert handle.result(WAIT).dropped == {}
        assert host.load(new).tokens == 20

    with between_pieces(engine, meanwhile, piece=5):
        assert engine.clear() == {"cpu": 6, "ssd": 12}
    assert rows(engine) == keys(engine, new)
    drop_from(engine, "cpu")
    assert host.load(new).tokens == 20
    assert tokens_of(engine, old) == 12


def test_of_two_rows_of_a_key_recovery_takes_the_new_one(open_host: OpenHost, slab: Path) -> None:
    """The process dies between two pieces: the directory is copied while the old rows are still there."""
    host = open_host(ssd=40, cpu=6)
    tokens, copy = prompt(1, 6), slab.with_name("copy")
    host.keep(tokens)
    host.load(tokens)  # uses are written with the next commit: they must not make the old rows the newer ones
    changed = host.data = lambda key: expected(host.layout, key) ^ np.uint8(1)

    def meanwhile() -> None:
        host.keep(tokens)
        catalogue = host.engine.manager.ssd._catalog  # type: ignore[union-attr]
        assert len(catalogue.rows()) > 6, "no key has two rows: nothing is tested"
        copy.mkdir(mode=0o700)
        for file in slab.iterdir():
            (copy / file.name).write_bytes(file.read_bytes())

    with between_pieces(host.engine, meanwhile):
        host.engine.clear()
    again = open_host(copy, ssd=40, cpu=6)
    again.data = changed
    assert again.load(tokens).tokens == 24
    assert again.engine.check().problems == ()


def test_pages_in_use_go_with_the_others(open_engine: OpenEngine) -> None:
    engine = open_engine(ssd=40, cpu=10)
    run(engine, prompt(1, 4))
    with engine.sequence(prompt(1, 4, extra=1)) as seq:
        seq.verify(WAIT)
        with between_pieces(engine, lambda: None):
            assert engine.clear() == {"gpu": 4, "cpu": 4, "ssd": 4}
        assert tokens_of(engine, prompt(1, 4)) == 0
        assert rows(engine) == set()
        seq.commit()
    quiet(engine)
    assert tokens_of(engine, prompt(1, 4)) == 0, "what a sequence had found before came back"
    assert engine.stats()["tiers"]["ssd"]["free_slots"] == 40


def test_an_interrupted_clear_ends_the_engine_and_keeps_no_slot(open_host: OpenHost) -> None:
    host = open_host(ssd=12)
    host.keep(prompt(1, 8))
    with between_pieces(host.engine, raising(KeyboardInterrupt)), pytest.raises(KeyboardInterrupt):
        host.engine.clear()
    with pytest.raises(EngineClosedError):
        tokens_of(host.engine, prompt(1, 8))
    host.engine.close()
    host = open_host(ssd=12)
    host.load(prompt(1, 8))
    host.engine.clear()
    assert rows(host.engine) == set()
    assert host.engine.stats()["tiers"]["ssd"]["free_slots"] == 12


# -- one namespace ----------------------------------------------------------------------------------------------------


def test_a_sequence_begun_meanwhile_brings_no_old_page_back(open_engine: OpenEngine) -> None:
    engine, tokens = ran(open_engine, 4, ssd=40, cpu=10)
    run(engine, tokens, "tenant")
    drop_from(engine, "gpu", "cpu")
    begun: list[Any] = []
    with between_pieces(engine, lambda: begun.append(engine.sequence(tokens))):
        engine.invalidate(engine.namespace())
    with begun[0] as seq:
        assert seq.verify(WAIT) == 0 or seq.cached_tokens < 16
        fill(engine, seq)
        seq.commit()
    quiet(engine)
    assert tokens_of(engine, tokens) == 0
    assert rows(engine) == keys(engine, tokens, "tenant")
    assert run(engine, tokens, "tenant") == 16
    run(engine, tokens)
    assert tokens_of(engine, tokens) == 16, "the namespace is not usable again"


def test_a_sequence_that_found_every_page_meanwhile_publishes_none(open_engine: OpenEngine) -> None:
    """It begins when another page is gone, and none of its own: all that it loads is older than the clear."""
    engine = open_engine(ssd=40, cpu=10)
    run(engine, prompt(1, 1))
    run(engine, prompt(2, 4, extra=1))
    drop_from(engine, "gpu", "cpu")
    begun: list[Any] = []

    def begin() -> None:
        begun.append(engine.sequence(prompt(2, 4, extra=1)))
        begun[0].verify(WAIT)

    with mock.patch.object(PageIndex, "all_keys", _ascending(engine, prompt(1, 1))), between_pieces(engine, begin):
        engine.invalidate(engine.namespace())
    with begun[0] as seq:
        assert seq.cached_tokens == 16, "the sequence found nothing: nothing is tested"
        seq.commit()
    quiet(engine)
    assert tokens_of(engine, prompt(2, 4)) == 0
    assert rows(engine) == set()
    assert all(tier["pages"] == 0 for tier in engine.stats()["tiers"].values())


def _ascending(engine: CacheEngine, first: list[int]) -> Callable[..., list[bytes]]:
    original, head = PageIndex.all_keys, keys(engine, first)
    return lambda index: sorted(original(index), key=lambda key: key not in head)


@pytest.mark.parametrize("salt", SALTS)
def test_a_store_meanwhile_is_dropped_in_this_namespace_only(open_host: OpenHost, salt: str) -> None:
    host = open_host(ssd=40, cpu=10)
    engine, tokens = host.engine, prompt(2, 2)
    host.keep_on_ssd(prompt(1, 4))
    handles: list[Any] = []
    with between_pieces(host.engine, lambda: handles.append(host.store(tokens, salt=salt))):
        assert engine.invalidate(engine.namespace()) == {"cpu": 0, "ssd": 4}
    quiet(engine)
    report = handles[0].result(WAIT)
    assert set(report.dropped.values()) == (set() if salt else {"cleared"})
    assert tokens_of(engine, tokens, salt) == (8 if salt else 0)
    assert rows(engine) == (keys(engine, tokens, salt) if salt else set())


def test_pages_of_other_namespaces_stay_at_rest(open_host: OpenHost) -> None:
    """Only pages at rest go back to their compact form: a clear must not take the others out of it for good."""
    host = open_host(ssd=40, cpu=10)
    host.keep(prompt(1, 4))
    host.engine.invalidate(host.engine.namespace("tenant"))
    assert all(not tier.index._entries for tier in host.engine.manager.tiers.values())


# -- durable when it returns -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("second", ["everything", "one namespace"])
def test_a_second_clear_waits_for_what_the_first_one_dropped(open_host: OpenHost, second: str) -> None:
    """It finds nothing, but must not return while rows are there."""
    host = open_host(ssd=40)
    engine = host.engine
    host.keep(prompt(1, 8))
    again = engine.clear if second == "everything" else lambda: engine.invalidate(engine.namespace())

    def clear_and_look() -> set[bytes]:
        again()
        return rows(engine)

    with ThreadPoolExecutor(1) as pool:
        left: list[Any] = []

        def begin() -> None:
            left.append(pool.submit(clear_and_look))
            time.sleep(0.1)  # enough for a clear that does not wait

        with between_pieces(engine, begin, piece=2):
            engine.clear()
        assert left[0].result(WAIT) == set()


def test_a_page_whose_commit_is_under_way_is_gone_when_clear_returns(open_host: OpenHost) -> None:
    host = open_host(ssd=40)
    engine, original = host.engine, Catalog.commit
    reached, go = threading.Event(), threading.Event()

    def commit(catalogue: Catalog, insert: Any, *rest: Any) -> None:
        if insert:
            reached.set()
            assert go.wait(WAIT)
        original(catalogue, insert, *rest)

    with mock.patch.object(Catalog, "commit", commit), ThreadPoolExecutor(1) as pool:
        handle = host.store(prompt(1, 4))
        assert reached.wait(WAIT)
        clearing = pool.submit(engine.clear)
        until(lambda: engine.manager.clearing.epoch(engine.namespace()) == 1, "clear begins")
        time.sleep(0.05)
        go.set()
        clearing.result(WAIT)
        assert rows(engine) == set()
        assert "ssd" not in {name for names in handle.result(WAIT).tiers for name in names}
        quiet(engine)
    assert rows(engine) == set()


def test_a_clear_may_overlap_the_close(open_host: OpenHost, slab: Path) -> None:
    """The close waits until all that was dropped is known to the SSD tier: no page is back after a restart."""
    host = open_host(ssd=40)
    host.keep(prompt(1, 8))
    with ThreadPoolExecutor(1) as pool:
        closing: list[Any] = []

        def begin() -> None:
            closing.append(pool.submit(host.engine.close))
            time.sleep(0.1)

        with between_pieces(host.engine, begin, piece=2):
            host.engine.clear()
        closing[0].result(WAIT)
    again = open_host(slab, ssd=40)
    assert again.engine.stats()["tiers"]["ssd"]["pages"] == 0


# -- all at once -------------------------------------------------------------------------------------------------------


class Versions:
    """Bytes that change with every clear, as they do with a model's weights."""

    def __init__(self) -> None:
        self.written = dict.fromkeys(SALTS, 0)  # the version that is computed now
        self.settled = dict.fromkeys(SALTS, 0)  # no older version may be served to what begins now

    def page(self, layout: Any, key: bytes, version: int) -> Bytes:
        data = expected(layout, key)
        data[:4] = np.frombuffer(version.to_bytes(4, "little"), np.uint8)
        return data


@pytest.mark.parametrize("seconds", LONG)
@pytest.mark.parametrize("seed", range(2))
def test_nothing_older_than_the_last_clear_is_ever_served(open_engine: OpenEngine, seed: int, seconds: float) -> None:
    engine = open_engine(gpu=24, cpu=10, ssd=40)
    engine.manager.clearing.piece = 2
    versions, end, served = Versions(), time.monotonic() + seconds, [0]
    documents = [prompt(n, pages, extra=1) for n, pages in enumerate((1, 3, 6, 6))]
    planes = [engine.gpu.planes(layer) for layer in range(engine.layout.n_layers)]

    def request(rng: random.Random) -> None:
        salt, tokens = rng.choice(SALTS), rng.choice(documents)
        names, floor = engine.pages(tokens, salt), versions.settled[salt]
        with engine.sequence(tokens, salt) as seq:
            for i in range(seq.verify(WAIT) // engine.layout.page_tokens):
                got = read_page(planes, engine.layout, [int(seq.slots[i])])
                version = int.from_bytes(got[:4].tobytes(), "little")
                assert version >= floor, f"version {version} is served after a clear to {floor}"
                assert np.array_equal(got, versions.page(engine.layout, names[i].key, version))
                served[0] += 1
            version = versions.written[salt]  # a sequence that is older than a clear publishes nothing
            for i in range(seq.cached_tokens // engine.layout.page_tokens, len(names)):
                data = versions.page(engine.layout, names[i].key, version)
                write_page(planes, engine.layout, [int(seq.slots[i])], data)
            seq.commit()

    def work(seed: str) -> None:
        rng = random.Random(seed)
        while time.monotonic() < end:
            what = rng.random()
            if what < 0.1:
                drop_from(engine, *rng.sample(["gpu", "cpu"], rng.randint(1, 2)))
            elif what < 0.2:
                engine.lookup(rng.choice(documents), salt=rng.choice(SALTS))
            elif what < 0.3:
                engine.prefetch(rng.choice(documents), salt=rng.choice(SALTS)).result(WAIT)
            else:
                try:
                    request(rng)
                except PoolFullError:
                    engine.drain(WAIT)

    def clear(rng: random.Random) -> None:
        while time.monotonic() < end:
            time.sleep(rng.uniform(0, 0.02))
            some = rng.choice([SALTS, *((salt,) for salt in SALTS)])
            for salt in some:
                versions.written[salt] += 1
            if len(some) > 1:
                engine.clear()
            else:
                engine.invalidate(engine.namespace(some[0]))
            for salt in some:
                versions.settled[salt] = versions.written[salt]

    with ThreadPoolExecutor(3) as pool:
        for done in [
            pool.submit(clear, random.Random(seed)),
            *(pool.submit(work, f"{seed} {thread}") for thread in range(2)),
        ]:
            done.result(seconds + WAIT)
    assert served[0] > 50, "hardly a page was served: nothing was tested"
    assert sum(versions.settled.values()) > 20
    quiet(engine)
    assert set(engine.stats()["misses"]) <= {"absent", "cancelled", "cleared"}
    engine.clear()
    assert rows(engine) == set()
    assert engine.check().problems == ()


@pytest.mark.parametrize("before", [True, False])
def test_a_slot_that_comes_back_before_or_while_its_row_is_deleted_is_free_when_that_is_done(
    open_host: OpenHost, monkeypatch: pytest.MonkeyPatch, before: bool
) -> None:
    host = open_host(cpu=None)
    host.keep(prompt(1, 3))
    ssd, manager = host.engine.manager.ssd, host.engine.manager
    entries = [entry for page in host.engine.pages(prompt(1, 3)) if (entry := ssd.index.get(page.key))]
    commit, free = ssd._catalog.commit, list[int]()

    def release() -> None:
        ssd.index.release_all(entries)
        free.append(ssd.index.free_slots)

    def committed(*args: Any) -> None:
        with manager.lock:
            if not before:
                release()
        commit(*args)

    with manager.lock:
        for entry in entries:
            ssd.index.lease(entry)
            ssd.index.drop(entry)
        if before:
            release()
    with monkeypatch.context() as patch:
        patch.setattr(ssd._catalog, "commit", committed)
        ssd.commit_waiting()
    assert (free, ssd.index.free_slots) == ([9], 12)
