"""Random operations on several ranks while one of them, or all, are late, hang or are killed: no wrong byte, no hang,
and nothing that was committed is lost."""

from __future__ import annotations

import itertools
import random
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from gdscache import PageStatus
from gdscache.errors import GdsCacheError, RankLostError
from gdscache.ranks import executor, leader
from gdscache.ranks.leader import RankSet
from tests.support.helpers import MHA, MLA, SEED, WAIT, drop_from, prompt, settle, until
from tests.support.rank_messages import Point
from tests.support.ranks import RankProcess, RanksHost, fits

DEADLINE_S = 0.5
PROMPTS = 8  # of PAGES each: the SSD tier has room for all of them
PAGES = 4
LONGEST_S = 25.0  # of any call, beside a deadline and two graces
OPENING = ("hello", "memory", "slab", "start", "cut", "answer")  # messages that ranks hear, or say
WORKING = ("move", "cancel", "forget", "load", "store", "ended")


class Machine:
    """A host of ranks, and what a plain model knows of it: the prompts whose pages were all committed."""

    def __init__(self, path: Path, shards: list[int], seed: int, *, packed: bool = False) -> None:
        self.rng = random.Random(seed)
        model = MLA if max(shards) == 0 else MHA
        self.prompts, sizes = [*range(PROMPTS)], {"cpu": 10, "ssd": 48}
        if packed:
            model, sizes = model | {"pack": "on"}, {"cpu": 64, "ssd": 256}
        self.host = RanksHost(path, shards, model=model, deadline=DEADLINE_S, **sizes)
        if packed:
            self.prompts = self._few_unfit(4)
        self.committed: set[int] = set()
        self.stopped: set[int] = set()
        self.trapped: set[int] = set()  # those that die, or hang, at a message which may come: they are not heard
        self.killed = False
        self.open = True
        self.done = 0

    def _few_unfit(self, room: int) -> list[int]:
        """Prompts for whose pages that do not fit the SSD has room."""
        found, unfit = list[int](), 0
        for number in range(100):
            keys = [page.key for page in self.host.engine.pages(prompt(number, PAGES))]
            shards = {*self.host.shards}
            more = sum(not all(fits(key, shard) for shard in shards) for key in keys)
            if unfit + more <= room:
                found, unfit = [*found, number], unfit + more
            if len(found) == PROMPTS:
                break
        return found

    def step(self) -> None:
        acts = [self.store] * 4 + [self.load] * 4 + [self.prefetch, self.cool, self.reopen]
        acts += [self.stop, self.kill, self.clear, *[self.trap] * 3] if self.done % 5 == 4 else []
        began = time.monotonic()
        self.rng.choice(acts)()
        assert time.monotonic() - began < LONGEST_S, "it hangs"
        self.done += 1

    @property
    def well(self) -> bool:
        return not (self.stopped or self.trapped or self.killed)

    @property
    def heard(self) -> list[RankProcess]:
        return [rank for rank in self.host.ranks if rank.rank not in self.stopped | self.trapped]

    def store(self) -> None:
        number = self.rng.choice(self.prompts)
        tokens = prompt(number, PAGES)
        if self.well:
            report = self.host.store(tokens)
            assert {*report.dropped.values()} <= {"deadline"}, report.dropped  # which a busy machine may miss
            self.host.engine.drain(WAIT)  # another store may be bringing pages of this one
            there = self.on_disk(number)
            for page, tiers in enumerate(report.tiers):
                assert there[page] or not {"ssd", "ssd_plain"} & {*tiers}, f"page {page} of prompt {number} is lost"
            if all(there):
                self.committed.add(number)
            return
        keys = [page.key for page in self.host.engine.pages(tokens)]
        with self.host.blocks(len(keys)) as blocks:
            there = [rank for rank in self.host.ranks if rank.rank not in self.stopped]
            for rank in there:
                rank.tell("compute", blocks, keys)
            handle = self.host.engine.store(tokens, blocks)
            for rank in there:
                rank.tell("store", handle.order)
            handle.result(LONGEST_S)
            for rank in self.heard:
                while rank.owed:
                    rank.hear(LONGEST_S)

    def on_disk(self, number: int) -> list[bool]:
        """Of each page of a prompt, whether it is committed on the SSD."""
        engine = self.host.engine
        keys = [page.key for page in engine.pages(prompt(number, PAGES))]
        with engine.manager.lock:
            masks = [tier.index.visible(keys) for tier in engine.manager.files]
        return [*map(any, zip(*masks, strict=True))]

    def load(self) -> None:
        number = self.rng.choice(self.prompts)
        tokens = prompt(number, PAGES)
        if self.well:
            if number in self.committed:
                assert self.host.load_all(tokens), f"pages of prompt {number} are lost"
            else:
                self.host.load(tokens)
            return
        hit = self.host.engine.lookup(tokens)
        keys = [page.key for page in hit.pages]
        with self.host.blocks(len(keys)) as blocks:
            load = self.host.engine.load(hit, blocks)
            order, there = load.order, [rank for rank in self.host.ranks if rank.rank not in self.stopped]
            for rank in there:
                rank.tell("load", order, blocks, keys, LONGEST_S)
            answers = [rank.hear(LONGEST_S) for rank in self.heard]
            report = load.result(LONGEST_S)
        for answer in answers:
            for n, (status, good) in enumerate(zip(*answer, strict=True) if answer is not None else ()):
                assert good or status != "loaded", "wrong bytes"
                assert status == "loaded" or report.pages[n] is not PageStatus.LOADED

    def prefetch(self) -> None:
        with self.host.engine.prefetch(prompt(self.rng.choice(self.prompts), PAGES)) as prefetch:
            prefetch.result(LONGEST_S)

    def cool(self) -> None:
        if self.well:
            self.empty_memory()

    def empty_memory(self) -> None:
        for name in {"cpu", "cpu_plain"} & {*self.host.engine.manager.tiers}:
            drop_from(self.host.engine, name)

    def clear(self) -> None:
        if self.well:
            self.host.engine.clear()
            self.committed.clear()

    def reopen(self) -> None:
        self.recover()
        self.host.engine.close()
        if self.rng.random() < 0.5:
            self.host.start_ranks()
        self.host.engine = self.host.open()

    def stop(self, number: int = signal.SIGSTOP) -> None:
        """One rank hangs, or all do, and go on after some operations."""
        some = self.host.ranks if self.rng.random() < 0.3 else [self.rng.choice(self.host.ranks)]
        for rank in some:
            rank.signal(number)
            self.stopped.add(rank.rank)
        for _ in range(2):
            self.rng.choice([self.store, self.load, self.prefetch])()
        self.recover()

    def kill(self) -> None:
        """One rank dies, or all do; then all of them, and the engine, start anew."""
        self.killed = True
        self.stop(signal.SIGKILL)

    def trap(self) -> None:
        """One rank dies, or hangs, at a message that comes in the next operations, or does not."""
        kind = self.rng.choice([*OPENING, *WORKING, "close", "closed"])
        number = self.rng.choice([signal.SIGKILL, signal.SIGSTOP])
        point = Point(kind, self.rng.choice(["before", "behind"]), self.rng.randrange(1, 4), number)
        self.trap_at(self.rng.choice(self.host.ranks), point)

    def trap_at(self, rank: RankProcess, point: Point) -> None:
        self.cool()
        if point.kind in OPENING:
            self.host.engine.close()
            self.arm(rank, point)
            with pytest.MonkeyPatch.context() as patch:
                wait_for_an_opening(patch, 0.8)  # one that is only slow is taken for one that hangs, here alone
                try:
                    self.host.engine = self.host.open()
                except RankLostError:
                    self.open = False
        else:
            self.arm(rank, point)
        if self.open:
            for _ in range(2):
                self.rng.choice([self.store, self.load, self.prefetch])()
        if point.kind in ("close", "closed"):
            self.host.engine.close()
            self.open = False
        self.recover()

    def arm(self, rank: RankProcess, point: Point) -> None:
        rank.arm(point)
        self.trapped.add(rank.rank)
        self.killed = point.signal == signal.SIGKILL

    def recover(self) -> None:
        if self.killed:
            self.host.engine.close()
            self.host.start_ranks()
            self.stopped, self.trapped, self.killed, self.open = set(), set(), False, True
            self.host.engine = self.host.open()
            return
        for rank in self.host.ranks:
            if rank.rank in self.stopped:
                rank.signal(signal.SIGCONT)
            if rank.rank in self.trapped:
                rank.arm(None)
        self.stopped, self.trapped = set(), set()
        if not self.open:
            self.host.engine, self.open = self.host.open(), True
        until = time.monotonic() + WAIT
        while any(rank["state"] != "running" for rank in self.host.engine.stats()["ranks"]):
            assert time.monotonic() < until, "ranks that go on are not heard"
            time.sleep(0.01)

    def end(self) -> None:
        """All that was committed is there, on every rank, and nothing is left."""
        self.recover()
        settle(self.host.engine)
        self.empty_memory()
        for number in sorted(self.committed):
            assert self.host.load_all(prompt(number, PAGES)), f"pages of prompt {number} are lost"
        settle(self.host.engine)
        self.host.close()


def wait_for_an_opening(patch: pytest.MonkeyPatch, seconds: float) -> None:
    """For each answer of a rank while an engine opens."""
    patch.setattr(leader, "OPEN_S", seconds)
    patch.setattr(leader, "CONNECT_S", seconds)
    patch.setitem(RankSet.call.__kwdefaults__, "seconds", seconds)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that hangs while an engine opens is waited for no longer than anywhere else."""
    wait_for_an_opening(monkeypatch, 3.0)
    monkeypatch.setattr(executor, "GRACE_S", 0.3)


def run(
    path: Path, shards: list[int], operations: int, seed: int, points: Sequence[Point] = (), *, packed: bool = False
) -> None:
    machine = Machine(path, shards, seed, packed=packed)
    try:
        for _ in range(operations):
            machine.step()
        for point in points:
            until(lambda: (machine.store(), bool(machine.committed))[1], "a prompt is stored")
            machine.trap_at(machine.rng.choice(machine.host.ranks), point)
        machine.end()
    except BaseException:
        machine.host.close()
        raise


def test_a_rank_that_dies_or_hangs_at_some_messages(tmp_path: Path) -> None:
    dies = [Point(kind, number=1) for kind in ("slab", "store")]
    hangs = [Point(kind, number=1, signal=signal.SIGSTOP) for kind in ("move", "ended")]
    run(tmp_path / "cache", [0, 1], 0, 1, dies + hangs)


@pytest.mark.suite
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("shards", [[0, 1], [0, 0]])
def test_a_rank_that_dies_or_hangs_at_any_message(tmp_path: Path, shards: list[int], number: int) -> None:
    kinds = itertools.product([*OPENING, *WORKING, "close", "closed"], ["before", "behind"], [1, 2])
    run(tmp_path / "cache", shards, 0, SEED, [Point(*kind, number) for kind in kinds])


LONGER = [([0, 1], False), ([0, 0], False), ([0, 1, 2, 3], False), ([0, 1], True), ([0, 0], True)]


@pytest.mark.parametrize(
    ("shards", "packed", "operations", "seed"),
    [
        ([0, 1], False, 15, 1),
        ([0, 0, 1, 1], False, 15, 1),
        *(pytest.param(*one, 120, SEED, marks=pytest.mark.suite) for one in LONGER),
    ],
)
def test_random_operations(tmp_path: Path, shards: list[int], packed: bool, operations: int, seed: int) -> None:
    """The short form of the 10,000 below."""
    run(tmp_path / "cache", shards, operations, seed, packed=packed)


@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("shards", [[0, 1], [0, 0], [0, 0, 1, 1], [0, 1, 2, 3]])
def test_many_random_operations(tmp_path: Path, shards: list[int], packed: bool) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    print("seed", seed)
    try:
        run(tmp_path / "cache", shards, 10_000, seed, packed=packed)
    except GdsCacheError as error:
        raise AssertionError(f"seed {seed}: {error}") from error
