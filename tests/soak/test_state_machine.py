"""The engine against a plain dict: whatever happens, in whatever order, what is served is what was stored last.

The model knows which bytes belong to each key since the last clear. After every step each tier is read slot by slot and
held against it. Keys come from a small tree of prompts, so that prefixes are shared and the pools of a few pages are
always under pressure.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import shutil
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from gdscache import CacheEngine, LoadReport, PageStatus
from gdscache.errors import EngineClosedError, LoadFailedError, PoolFullError
from gdscache.kernels.cuda import CopyRoute
from gdscache.limits import EngineLimits
from gdscache.load.handle import LayerwiseLoad
from gdscache.prefetch.handle import Prefetch
from gdscache.storage.base import Op
from gdscache.store.handle import StoreHandle
from tests.support import fake_gpu
from tests.support.faults import ExtentPart, Fault, FaultRule
from tests.support.faulty import PLAN
from tests.support.helpers import (
    PACKED,
    SMALL,
    WAIT,
    Bytes,
    Host,
    drop_from,
    expected,
    flip_file,
    make_config,
    our_threads,
    quiet,
    read_page,
    until,
    write_page,
)
from tests.support.native_parts import has_ring
from tests.support.packed_pages import bytes_in
from tests.support.places import scratch
from tests.support.transport_parts import has_libcuda

SALTS = ["", "tenant"]
paths = st.lists(st.integers(0, 1), min_size=0, max_size=5).map(tuple)
salts = st.sampled_from(SALTS)
tails = st.integers(0, 3)
cooled = st.sampled_from([(), ("gpu",), ("gpu", "cpu")])
read_faults = st.sampled_from([Fault.EIO, Fault.SHORT, Fault.FLIP])
write_faults = st.sampled_from([Fault.EIO, Fault.SHORT, Fault.FLIP, Fault.LOST, Fault.TORN])
Path_ = tuple[int, ...]
DAMAGE = {PageStatus.CHECKSUM, PageStatus.IO_ERROR, PageStatus.SHORT_READ}


def tokens_at(path: Path_, tail: int = 0) -> list[int]:
    return [t for branch in path for t in (branch, 7, 7, 7)] + [9] * tail


def left_by(report: LoadReport) -> int:
    """Tokens that are found behind a load: a page whose bytes are bad goes, one that could not be read stays."""
    bad = (i for i, status in enumerate(report.pages) if status is PageStatus.CHECKSUM)
    return 4 * next(bad, len(report.pages))


class Machine(RuleBasedStateMachine):
    """What both faces have in common. `bytes_of[key]` names the content that a page was committed with."""

    options: ClassVar[dict[str, Any]]
    limits: ClassVar[EngineLimits] = SMALL
    transport: ClassVar[str] = "tests.support.faulty:FaultyTransport"
    met: ClassVar[Counter[str] | None] = None  # random faults, counted here; None: only those of a rule

    def __init__(self) -> None:
        super().__init__()
        PLAN.reset()
        self.directory = scratch() if self.met is None else Path(tempfile.mkdtemp(prefix="gdscache-machine-"))
        self.generation = 0
        self.bytes_of: dict[bytes, int] = {}
        self.salt_of: dict[bytes, str] = {}
        self.spoiled: set[bytes] = set()  # keys whose bytes in the slab may be bad
        self.engine = self.open()
        self.layout = self.engine.layout

    def open(self) -> CacheEngine:
        raise NotImplementedError

    def config(self) -> dict[str, Any]:
        return make_config(self.directory / "cache", transport=self.transport, **self.options)

    def in_memory(self, key: bytes) -> bool:
        return any(self.slot(tier, key) is not None for tier in ("cpu", "cpu_plain"))

    def on_ssd(self) -> set[bytes]:
        return {entry.key for tier in self.engine.manager.files for entry in tier.index}

    def may_be_bad(self, key: bytes) -> bool:
        """Whether the page's bytes in the slab may be others than those committed."""
        return self.met is not None or key in self.spoiled

    def badly_written(self, keys: list[bytes]) -> None:
        """Pages with these keys were stored while writes failed."""
        self.spoiled.update(keys)

    def teardown(self) -> None:
        if self.met is not None:
            self.met.update(PLAN.describe())
        PLAN.reset()
        self.engine.close()
        shutil.rmtree(self.directory)

    # -- the model ---------------------------------------------------------------------------------------------------

    def data(self, key: bytes) -> Bytes:
        """The bytes that belong to a key: those it was committed with, else those of the next commit."""
        generation = self.bytes_of.get(key, self.generation)
        number = (int.from_bytes(key[:8], "little") + generation) % (1 << 64)
        return expected(self.layout, number.to_bytes(8, "little"))

    def committed(self, key: bytes, salt: str) -> None:
        self.bytes_of.setdefault(key, self.generation)
        self.salt_of[key] = salt

    def forget(self, salt: str | None) -> None:
        """From now on a page with one of these keys may have other bytes."""
        self.generation += 1
        for key in [k for k, s in self.salt_of.items() if salt in (None, s)]:
            del self.bytes_of[key], self.salt_of[key]

    def keys(self, path: Path_, salt: str) -> list[bytes]:
        keys = [p.key for p in self.engine.pages(tokens_at(path), salt)]
        assert all(self.salt_of.get(key, salt) == salt for key in keys), "two tenants share a key"
        return keys

    def cool(self, tiers: tuple[str, ...]) -> None:
        """Push everything out of the tiers named, so that what follows comes from below."""
        drop_from(self.engine, *tiers)

    def slot(self, tier: str, key: bytes) -> int | None:
        if tier not in self.engine.manager.tiers:
            return None
        entry = self.engine.manager.tiers[tier].index.get(key)
        return None if entry is None else entry.slot

    def stored_bytes(self, tier: str, slot: int) -> Bytes:
        if tier == "gpu":
            return read_page([self.engine.gpu.planes(n) for n in range(self.layout.n_layers)], self.layout, [slot])
        return bytes_in(self.engine, tier, slot)

    # -- what must hold after each step ------------------------------------------------------------------------------

    holders = 0  # leases of sequences that the machine holds

    @invariant()
    def at_rest_nothing_is_lost_and_nothing_is_wrong(self) -> None:
        quiet(self.engine)
        until(lambda: len(self.engine.stats()["leases"]) <= self.holders, "leases end")
        assert self.engine.check().problems == ()
        for name, tier in self.engine.manager.tiers.items():
            for entry in list(tier.index):
                assert entry.key in self.bytes_of, f"{name} holds a page that was cleared, or never committed"
                if entry.namespace != self.engine.namespace(self.salt_of[entry.key]):
                    raise AssertionError(f"{name} holds a page under another namespace")
                same = np.array_equal(self.stored_bytes(name, entry.slot), self.data(entry.key))
                assert same or (name.startswith("ssd") and self.may_be_bad(entry.key)), f"{name} holds other bytes"
                if same and name.startswith("ssd"):
                    self.spoiled.discard(entry.key)
        stats = self.engine.stats()["tiers"]
        assert all(t["pages"] <= t["slots"] for t in stats.values())
        for name, limit in () if self.layout.packed else (("cpu", self.options["cpu"]), ("ssd", self.options["ssd"])):
            assert stats.get(name, {"slots": limit or 0})["slots"] == (limit or 0)

    # -- rules of both faces -----------------------------------------------------------------------------------------

    @rule(path=paths, salt=salts, start=st.integers(0, 5), tail=tails)
    def lookup(self, path: Path_, salt: str, start: int, tail: int) -> None:
        hit = self.engine.lookup(tokens_at(path, tail), 4 * start, salt)
        keys = self.keys(path, salt)[start:]
        assert [p.key for p in hit.pages] == keys[: len(hit.pages)]
        assert hit.tokens == 4 * len(hit.pages) == 4 * len(hit.tiers)
        found = [any(self.slot(tier, key) is not None for tier in self.engine.manager.tiers) for key in keys]
        assert len(hit.pages) == next((i for i, there in enumerate(found) if not there), len(found))

    @rule(path=paths, salt=salts, cancel=st.booleans())
    def prefetch(self, path: Path_, salt: str, cancel: bool) -> None:
        prefetch = self.engine.prefetch(tokens_at(path), salt=salt)
        if cancel:
            prefetch.cancel()
        report = prefetch.result(WAIT)
        bad = {PageStatus(s) for s in report.pages if s not in ("loaded", "present", "left")}
        assert bad <= (DAMAGE if self.met is not None else {PageStatus.CHECKSUM} if self.spoiled else set())

    @rule(tier=st.sampled_from(["gpu", "cpu", "ssd", "cpu_plain", "ssd_plain"]), pages=st.integers(1, 3))
    def press(self, tier: str, pages: int) -> None:
        with self.engine.manager.lock:
            if tier in self.engine.manager.tiers:
                self.engine.manager.tiers[tier].index.evict(pages)

    @rule()
    def clear(self) -> None:
        there = {name: len(tier.index) for name, tier in self.engine.manager.tiers.items()}
        assert self.engine.clear() == there
        self.forget(None)

    @rule(salt=salts)
    def invalidate(self, salt: str) -> None:
        namespace = self.engine.namespace(salt)
        there = {n: sum(page.namespace == namespace for page in t.index) for n, t in self.engine.manager.tiers.items()}
        assert self.engine.invalidate(namespace) == there
        self.forget(salt)

    @rule(path=paths.filter(len), salt=salts, bit=st.integers(0, 6144 * 8 - 1))
    def spoil_the_slab(self, path: Path_, salt: str, bit: int) -> None:
        key = self.keys(path, salt)[-1]
        slot = self.slot("ssd", key)
        if slot is not None:
            offset = slot * self.layout.extent_bytes + bit // 8 % self.layout.page_bytes
            flip_file(self.directory / "cache" / "slab-0.bin", offset, bit % 8)
            self.spoiled.add(key)

    @rule(path=paths.filter(len), salt=salts, bit=st.integers(0, 6144 * 8 - 1))
    def spoil_the_cpu_pool(self, path: Path_, salt: str, bit: int) -> None:
        """Found by whatever reads the page, or else by `check`."""
        key, cpu = self.keys(path, salt)[-1], self.engine.manager.cpu
        slot = self.slot("cpu", key)
        if cpu is None or slot is None:
            return
        cpu.extents.memory(slot)[bit // 8 % self.layout.page_bytes] ^= 1 << bit % 8
        assert len(self.engine.check().problems) == 1
        self.engine.prefetch(tokens_at(path), salt=salt).result(WAIT)
        if self.slot("cpu", key) is not None:
            assert len(self.engine.check().problems) <= 1
            with self.engine.manager.lock:
                cpu.index.drop(cpu.index.find(key))

    def reopen(self, drain: bool) -> None:
        quiet(self.engine)
        before = self.on_ssd()
        self.engine.close(drain=drain)
        self.engine.close()
        with contextlib.suppress(EngineClosedError):
            self.engine.lookup([])
            raise AssertionError("a closed engine answers")
        assert self.open_again() == before

    def open_again(self) -> set[bytes]:
        """What is on the SSD then; the others may come back with other bytes."""
        self.engine = self.open()
        after = self.on_ssd()
        assert after <= self.bytes_of.keys(), "a page that was never committed"
        for key in set(self.bytes_of) - after:
            del self.bytes_of[key], self.salt_of[key]
        self.generation += 1
        return after


class Owned(Machine):
    """Sequences; one may be held open over other steps."""

    options: ClassVar[dict[str, Any]] = {"gpu": 12, "cpu": 4, "ssd": 6, "bounce": 4}

    def __init__(self) -> None:
        super().__init__()
        self.held: Any = None
        self.held_path: Path_ = ()
        self.held_salt = ""
        self.stale = False

    def open(self) -> CacheEngine:
        return CacheEngine.from_config(self.config(), limits=self.limits)

    def teardown(self) -> None:
        if self.held is not None:
            self.held.close()
        super().teardown()

    def planes(self) -> list[tuple[torch.Tensor, ...]]:
        return [self.engine.gpu.planes(layer) for layer in range(self.layout.n_layers)]

    def compute(self, seq: Any, keys: list[bytes], first: int) -> None:
        for i in range(first, len(keys)):
            write_page(self.planes(), self.layout, [int(seq.slots[i])], self.data(keys[i]))

    def serve(self, seq: Any, keys: list[bytes]) -> int:
        """What is served is what was committed; how many pages it is."""
        pages = seq.verify(WAIT) // 4
        for layer in range(self.layout.n_layers):
            seq.wait(layer)
        for i in range(pages):
            assert keys[i] in self.bytes_of, "a page was served that was cleared, or never committed"
            assert np.array_equal(read_page(self.planes(), self.layout, [int(seq.slots[i])]), self.data(keys[i]))
        return pages

    @rule(path=paths, salt=salts, tail=tails, commit=st.booleans(), cold=cooled)
    def request(self, path: Path_, salt: str, tail: int, commit: bool, cold: tuple[str, ...] = ()) -> None:
        self.cool(cold)
        keys = self.keys(path, salt)
        try:
            seq = self.engine.sequence(tokens_at(path, tail), salt)
        except PoolFullError:
            assert self.held is not None
            return
        with seq:
            first = self.serve(seq, keys)
            assert 4 * first <= max(0, len(tokens_at(path, tail)) - 1)
            self.compute(seq, keys, first)
            if not commit:
                return
            seq.commit()
            for key in keys:
                self.committed(key, salt)
        quiet(self.engine)
        assert self.engine.lookup(tokens_at(path), salt=salt).tokens == 4 * len(path)

    @rule(path=paths, salt=salts, fault=read_faults, nth=st.integers(0, 4), strict=st.booleans(), cold=cooled)
    def request_from_a_bad_disk(
        self, path: Path_, salt: str, fault: Fault, nth: int, strict: bool, cold: tuple[str, ...]
    ) -> None:
        self.cool(cold)
        keys = self.keys(path, salt)
        with PLAN.rule(Op.READ, fault, skip=nth, bit=3):
            try:
                seq = self.engine.sequence(tokens_at(path, 1), salt)
            except PoolFullError:
                return
            with seq:
                cached = seq.cached_tokens // 4
                if strict and seq.load is not None and seq.load.result(WAIT).first_bad is not None:
                    with pytest.raises(LoadFailedError) as caught:
                        seq.commit()
                    assert caught.value.page < cached
                    assert seq.load.result(WAIT).pages[caught.value.page - cached].value == caught.value.cause
                    return
                first = self.serve(seq, keys)
                self.compute(seq, keys, first)
                seq.commit()
                for key in keys:
                    self.committed(key, salt)

    @rule(path=paths, salt=salts, fault=write_faults)
    def request_to_a_bad_disk(self, path: Path_, salt: str, fault: Fault) -> None:
        with PLAN.rule(Op.WRITE, fault, bit=11):
            self.request(path, salt, 1, True, ())
            quiet(self.engine)
        self.badly_written(self.keys(path, salt))

    def store_and_load(self, path: Path_, salt: str) -> None:
        self.request(path, salt, 1, True, ())
        self.request(path, salt, 1, True, ("gpu", "cpu"))

    @precondition(lambda self: self.held is None)
    @rule(path=paths, salt=salts)
    def hold(self, path: Path_, salt: str) -> None:
        self.held = self.engine.sequence(tokens_at(path), salt)
        self.held_path, self.held_salt, self.stale, self.holders = path, salt, False, 1
        keys = self.keys(path, salt)
        self.compute(self.held, keys, self.serve(self.held, keys))
        self.fixed = {key: self.data(key).tobytes() for key in keys}

    @precondition(lambda self: self.held is not None and len(self.held_path) < 5)
    @rule(branch=st.integers(0, 1), commit=st.booleans())
    def grow(self, branch: int, commit: bool) -> None:
        self.held_path = (*self.held_path, branch)
        try:
            self.held.append(tokens_at((branch,)))
        except PoolFullError:
            self.held_path = self.held_path[:-1]
            return
        keys = self.keys(self.held_path, self.held_salt)
        self.compute(self.held, keys, len(keys) - 1)
        self.fixed[keys[-1]] = self.data(keys[-1]).tobytes()
        if commit:
            self.publish()

    @precondition(lambda self: self.held is not None)
    @rule(commit=st.booleans())
    def let_go(self, commit: bool) -> None:
        if commit:
            self.publish()
        self.held.close()
        self.held, self.holders = None, 0

    def publish(self) -> None:
        keys = self.keys(self.held_path, self.held_salt)
        if not self.stale:  # another request may have committed the same key with other bytes since: its bytes count,
            for key in keys:  # also where its page is gone by now, and this one takes its place
                if self.fixed[key] != self.data(key).tobytes():
                    self.compute(self.held, keys, keys.index(key))
                    self.fixed |= {key: self.data(key).tobytes() for key in keys[keys.index(key) :]}
            for key in keys:
                self.committed(key, self.held_salt)
        self.held.commit()

    @rule()
    def clear(self) -> None:
        super().clear()
        self.stale = True

    @rule(salt=salts)
    def invalidate(self, salt: str) -> None:
        super().invalidate(salt)
        self.stale = self.stale or salt == self.held_salt

    @precondition(lambda self: self.held is None)
    @rule(drain=st.booleans())
    def close_and_reopen(self, drain: bool) -> None:
        self.reopen(drain)


class Attached(Machine):
    """Loads and stores on planes of our own."""

    options: ClassVar[dict[str, Any]] = {"cpu": 4, "ssd": 6, "bounce": 4}
    route: ClassVar[CopyRoute | None] = None  # copies of a GPU that is not there

    def open(self) -> CacheEngine:
        with pytest.MonkeyPatch.context() as patch:
            if self.route is not None:
                fake_gpu.use(patch, self.route, kernels=self.route != "copy_engine")
            self.host = Host(self.config(), blocks=96, block_tokens=2, limits=self.limits)
        self.host.data = lambda key: self.data(key)
        return self.host.engine

    def offer(self, path: Path_, salt: str, start: int, tail: int = 0) -> None:
        self.stored(self.host.store(tokens_at(path, tail), 4 * start, salt), self.keys(path, salt)[start:], salt)

    def stored(self, handle: StoreHandle, keys: list[bytes], salt: str) -> None:
        report = handle.result(WAIT)
        assert len(report.tiers) == len(keys)
        for key, tiers in zip(keys, report.tiers, strict=True):
            if tiers:
                self.committed(key, salt)
        for i, key in enumerate(keys):
            if not report.tiers[i] and i not in report.dropped:
                assert key in self.bytes_of, "a page that was never committed counts as present"

    def store_and_load(self, path: Path_, salt: str) -> None:
        self.offer(path, salt, 0)
        quiet(self.engine)
        self.load(path, salt, 0, ("gpu", "cpu"))

    @rule(path=paths, salt=salts, start=st.integers(0, 4), tail=tails)
    def store(self, path: Path_, salt: str, start: int, tail: int) -> None:
        self.offer(path, salt, start, tail)

    @rule(path=paths, salt=salts, fault=write_faults)
    def store_to_a_bad_disk(self, path: Path_, salt: str, fault: Fault) -> None:
        with PLAN.rule(Op.WRITE, fault, bit=5):
            self.offer(path, salt, 0)
        self.badly_written(self.keys(path, salt))

    @rule(path=paths, salt=salts, start=st.integers(0, 4), cold=cooled)
    def load(self, path: Path_, salt: str, start: int, cold: tuple[str, ...]) -> None:
        self.cool(cold)
        keys = self.keys(path, salt)[start:]
        on_cpu = [self.in_memory(key) for key in keys]
        load, blocks, hit = self.host.begin(tokens_at(path), 4 * start, salt)
        assert load.tokens == 4 * len(hit)
        report = self.host.finish(load, blocks, hit)  # compares the bytes
        assert set(hit[: report.tokens // 4]) <= set(self.bytes_of)
        for i, status in enumerate(report.pages):
            causes = DAMAGE if self.met is not None else {PageStatus.CHECKSUM}
            spoiled = self.may_be_bad(hit[i]) and not on_cpu[i]
            assert status is PageStatus.LOADED or (spoiled and status in causes)
        if report.first_bad is not None:
            assert self.engine.lookup(tokens_at(path), 4 * start, salt).tokens == left_by(report)

    @rule(path=paths, salt=salts, fault=read_faults, nth=st.integers(0, 4), cold=cooled)
    def load_from_a_bad_disk(self, path: Path_, salt: str, fault: Fault, nth: int, cold: tuple[str, ...]) -> None:
        self.cool(cold)
        with PLAN.rule(Op.READ, fault, skip=nth, bit=3):
            report = self.host.load(tokens_at(path), salt=salt)
        assert self.engine.lookup(tokens_at(path), salt=salt).tokens == left_by(report)

    @rule(path=paths, salt=salts)
    def give_up(self, path: Path_, salt: str) -> None:
        load, blocks, keys = self.host.begin(tokens_at(path), salt=salt)
        load.cancel()
        self.host.finish(load, blocks, keys)

    @rule(one=paths, two=paths, salt=salts)
    def load_both(self, one: Path_, two: Path_, salt: str) -> None:
        begun = [self.host.begin(tokens_at(path), salt=salt) for path in (one, two)]
        for load, _, _ in begun:
            load.result()
            load.release_event.synchronize(WAIT)
        for load, blocks, keys in begun:
            self.host.finish(load, blocks, keys)

    @rule(
        some=st.lists(paths.filter(len), min_size=2, max_size=4),
        salt=salts,
        end=st.sampled_from(["cancel", "close", "close at once"]),
        seconds=st.floats(0, 0.002),
    )
    def cut_short(self, some: list[Path_], salt: str, end: str, seconds: float) -> None:
        """Another thread cancels what is under way, or closes the engine, while the caller goes on."""
        quiet(self.engine)
        before, keys = self.on_ssd(), [self.keys(path, salt) for path in some]
        loads: list[tuple[LayerwiseLoad, list[int], list[bytes]]] = []
        stores: list[tuple[StoreHandle, list[bytes]]] = []
        prefetches: list[Prefetch] = []

        def act() -> None:
            time.sleep(seconds)
            if end != "cancel":
                self.engine.close(drain=end == "close")
            for handle in [*(load for load, *_ in loads), *prefetches] if end == "cancel" else ():
                handle.cancel()

        thread = threading.Thread(target=act)
        thread.start()
        with contextlib.suppress(EngineClosedError):
            for path, its in zip(some, keys, strict=True):
                loads.append(self.host.begin(tokens_at(path), salt=salt))
                loads[-1][0].wait(0, WAIT)
                if not stores:  # a second one may take a page for present that the first one then drops
                    stores.append((self.host.store(tokens_at(path), salt=salt), its))
                prefetches.append(self.engine.prefetch(tokens_at(path), salt=salt))
        thread.join(WAIT)
        for begun in loads:
            self.host.finish(*begun)
        for handle, its in stores:
            self.stored(handle, its, salt)
        for prefetch in prefetches:
            prefetch.result(WAIT)
        if end != "cancel":
            until(lambda: not our_threads(), "threads end")
            room = not self.layout.packed and len(self.bytes_of) <= (self.options["ssd"] or 0)
            after = self.open_again()
            assert not room or self.met is not None or self.spoiled or before <= after, "a close loses pages"

    @rule(drain=st.booleans())
    def close_and_reopen(self, drain: bool) -> None:
        self.reopen(drain)


class WritesBack(Machine):
    """Pages go to the SSD when the CPU tier is half full of dirty ones, whatever store is at hand."""

    def badly_written(self, keys: list[bytes]) -> None:
        self.spoiled.update(self.bytes_of)

    @rule()
    def flush(self) -> None:
        self.engine.flush(WAIT)
        assert not any(tier["dirty_pages"] for tier in self.engine.stats()["tiers"].values())

    def reopen(self, drain: bool) -> None:
        if drain:
            self.engine.flush(WAIT)
        super().reopen(drain)


def varied(name: str, *bases: type[Any], options: dict[str, Any], **more: Any) -> type[Machine]:
    """A machine with these options beside those of the last of its `bases`."""
    return type(name, bases, {"options": bases[-1].options | options, **more})


BACK = {"store": {"write_policy": "write_back"}}
SELECTIVE = {"store": {"write_policy": "write_through_selective"}}
PACKS = {"cpu": 6, "ssd": 9, "model": PACKED}  # half of the pages fit into packed extents
OwnedWithoutCpu = varied("OwnedWithoutCpu", Owned, options={"gpu": 8, "cpu": None, "ssd": 5, "bounce": 2})
OwnedWritesBack = varied("OwnedWritesBack", WritesBack, Owned, options=BACK)
OwnedPacked = varied("OwnedPacked", Owned, options=PACKS)
OwnedOnGpu = varied("OwnedOnGpu", Owned, options={"device": "cuda"})
AttachedWithoutCpu = varied("AttachedWithoutCpu", Attached, options={"cpu": None, "ssd": 5, "bounce": 2})
AttachedWithoutSsd = varied("AttachedWithoutSsd", Attached, options={"cpu": 5, "ssd": None, "bounce": 2})
AttachedWritesBack = varied("AttachedWritesBack", WritesBack, Attached, options=BACK)
ONE_HIT = dataclasses.replace(SMALL, write_hits=1)
AttachedSelective = varied("AttachedSelective", Attached, options=SELECTIVE, limits=ONE_HIT)
AttachedPacked = varied("AttachedPacked", Attached, options=PACKS)
AttachedPackedWithoutCpu = varied("AttachedPackedWithoutCpu", Attached, options=PACKS | {"cpu": None, "ssd": 8})
AttachedPackedWritesBack = varied("AttachedPackedWritesBack", WritesBack, Attached, options=PACKS | BACK)
AttachedOnGpu = varied("AttachedOnGpu", Attached, options={"device": "cuda"})
# Copies are those of a GPU that is not there.
AttachedStaged, AttachedZeroCopy, AttachedCopyEngine = (
    varied(f"Attached{route.title()}", Attached, options={}, route=route)
    for route in ("staged", "zero_copy", "copy_engine")
)
EXAMPLES = settings.default.max_examples  # 7 in `make test`, 400 in `make soak`
MORE = settings(max_examples=(3 if EXAMPLES > 12 else 2) * EXAMPLES)
FEWER = settings(max_examples=max(5, EXAMPLES // 3))
ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.hypothesis
@pytest.mark.parametrize(
    "face",
    [
        *(Owned, OwnedWithoutCpu, OwnedWritesBack, OwnedPacked),
        *(Attached, AttachedWithoutCpu, AttachedWithoutSsd, AttachedWritesBack, AttachedSelective),
        *(AttachedPacked, AttachedPackedWithoutCpu, AttachedPackedWritesBack, AttachedStaged),
        *(pytest.param(face, marks=pytest.mark.suite) for face in (AttachedZeroCopy, AttachedCopyEngine)),
        *(pytest.param(face, marks=ON_GPU) for face in (OwnedOnGpu, AttachedOnGpu)),
    ],
)
def test_random_steps(face: type[Machine]) -> None:
    run_state_machine_as_test(face, settings=MORE if face in (Owned, Attached) else FEWER)


# -- every transport that is here, and I/O that fails now and then ---------------------------------------------------

NIXL = pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="nixl is not installed")
FEW = settings(max_examples=max(5, EXAMPLES // 5))
KVIKIO = pytest.mark.skipif(
    importlib.util.find_spec("kvikio") is None or not has_libcuda(), reason="no kvikio, or no libcuda.so.1"
)


def _faults() -> list[Any]:
    """Every face over every transport; one transport a face in `make test`."""
    transports = {"FaultyTransport": [], "FaultyUring": [], "FaultyNixl": [NIXL], "FaultyKvikio": [KVIKIO]}
    faces = [Owned, Attached, OwnedWithoutCpu, AttachedWithoutCpu, OwnedPacked, AttachedPacked]
    return [
        pytest.param(transport, face, marks=[*needs, *([] if i == n else [pytest.mark.suite])])
        for n, (transport, needs) in enumerate(transports.items())
        for i, face in enumerate(faces)
    ]


@pytest.mark.parametrize(("transport", "face"), _faults())
def test_random_faults(transport: str, face: type[Machine], device: str) -> None:
    if transport == "FaultyUring" and not has_ring():
        pytest.skip("no io_uring")
    counts: Counter[str] = Counter()

    class Unlucky(face):  # type: ignore[misc, valid-type]
        met = counts
        options: ClassVar[dict[str, Any]] = {**face.options, "device": device}

        @initialize(seed=st.integers(0, 1 << 32))
        def let_io_fail_now_and_then(self, seed: int) -> None:
            PLAN.seed = seed
            for fault in Fault:
                if fault not in (Fault.HANG, Fault.DELAY):
                    PLAN.add(FaultRule(fault, rate=0.07))
            PLAN.add(FaultRule(Fault.DELAY, rate=0.07, seconds=0.002))
            PLAN.add(FaultRule(Fault.FLIP, rate=0.07, part=ExtentPart.layer(self.layout, 1)))
            PLAN.add(FaultRule(Fault.ZERO, rate=0.07, part=ExtentPart.layer(self.layout, 2)))
            for salt in SALTS:  # whatever the steps are, there is I/O, and almost half of it meets a fault
                self.store_and_load((0, 1, 0, 1, 0), salt)

    Unlucky.transport = f"tests.support.faulty:{transport}"
    run_state_machine_as_test(Unlucky, settings=FEW)
    assert sum(counts.values()) > FEW.max_examples, f"hardly a fault was met: {dict(counts)}"
