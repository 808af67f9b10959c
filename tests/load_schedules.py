"""Random schedules: what a caller does with an engine, what is late, what fails, and at which point what happens.

A schedule is made from its seed alone, so that `play(Schedule(...), directory)` does the same again, as far as threads
let it. `python tests/load_schedules.py SEED ACTION NAME NUMBER` plays one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from faulty import PLAN, Fault
from helpers import (
    MHA,
    MLA,
    WAIT,
    Host,
    drop_from,
    layout_of,
    make_config,
    prompt,
    quiet,
    read_page,
    settle,
    until,
    untouched,
    write_page,
)
from load_points import FAILING, InjectedError, Point, Points

from gdscache import load_run
from gdscache.errors import DeadlineError, EngineClosedError
from gdscache.layout import GroupSizes, read_groups
from gdscache.loading import Gap, LayerwiseLoad
from gdscache.prefetch import Prefetch
from gdscache.storage.base import Op
from gdscache.store.handle import StoreHandle
from gdscache.testing.faults import FaultRule

ACTIONS = ("none", "cancel", "close", "raise", "error")
PAGES = 4
LOCKED = 0.01  # seconds that a call which needs the manager's lock is waited for at a point that may hold it
BLOCKS = 56  # six steps take eight each at most, and then a load
EVEN = MHA | {"layers": 6, "head_dim": 72}  # several groups of layers, with the sizes below
SIZES = GroupSizes(least=4096, first=1)


class InterruptedCallError(Exception):
    """What the caller's thread raises in the middle of its work."""


@dataclasses.dataclass(frozen=True)
class Schedule:
    """`action` happens when point `at` is reached: `cancel` every load and prefetch so far, `close` the engine from
    another thread, `raise` in the caller's thread at its next step, or an `error` from the point itself."""

    seed: int
    action: str = "none"
    at: Point | None = None

    def __str__(self) -> str:
        name, number = self.at or ("none", 0)
        return f"python tests/load_schedules.py {self.seed} {self.action} {name} {number}"

    @classmethod
    def random(cls, seed: int, points: Sequence[Point]) -> Schedule:
        """Any action at a point of any name, early ones more often: `points` are those that runs were seen to reach."""
        draw = random.Random(f"action {seed}")
        action = draw.choice(ACTIONS)
        if action == "none":
            return cls(seed)
        name = draw.choice(sorted({name for name, _ in points if action != "error" or name in FAILING}))
        numbers = sorted(number for at, number in points if at == name)
        return cls(seed, action, (name, numbers[int(draw.random() ** 2 * len(numbers))]))


@dataclasses.dataclass
class Begun:
    """A load of one or more requests: for each the tokens, the blocks and the keys."""

    load: LayerwiseLoad
    requests: list[tuple[list[int], list[int], list[bytes]]]
    left: bool = False  # its blocks were given back


class Player:
    """One schedule: a caller with an engine, and everything that it has begun."""

    def __init__(self, schedule: Schedule, directory: Path, device: str = "cpu") -> None:
        self.schedule = schedule
        """`directory` may be that of schedules before: each begins empty."""
        self.draw = draw = random.Random(schedule.seed)
        model = draw.choice([MHA, MLA, EVEN])
        self.config = make_config(
            directory / str(layout_of(model).extent_bytes),
            device=device,
            model=model,
            cpu=draw.choice([None, 3, 8, 20]),
            ssd=32,
            bounce=draw.choice([4, 16]),
            transport=draw.choice(["faulty:FaultyTransport", "faulty:FaultyMerging"]),
            load={"verify": draw.choice(["once", "always"]), "threads": draw.choice([1, 2, 4])},
        )
        self.host = Host(self.config, BLOCKS)
        if device == "cpu" and draw.random() < 0.5:  # as a mover for a GPU
            self.host.engine.loader.mover.queues = lambda extents: True  # type: ignore[method-assign]
        rate = draw.choice([0.0, 0.15, 0.4])
        self.points = Points(
            schedule.seed,
            rate,
            draw.choice([0.0003, 0.0015]),
            schedule.at,
            None if schedule.action in ("none", "error") else getattr(self, "_" + schedule.action),
            error=schedule.action == "error",
        )
        self.prompts = [prompt(1, 2) + prompt(10 + i, PAGES - 2) for i in range(3)]
        self.loads: list[Begun] = []
        self.stores: list[tuple[StoreHandle, list[int]]] = []
        self.prefetches: list[Prefetch] = []
        self.interrupt = threading.Event()
        self.closer: threading.Thread | None = None
        self.cancellers: list[threading.Thread] = []
        self.drain = draw.random() < 0.5

    # -- what happens at the point -------------------------------------------------------------------------------------

    def _cancel(self) -> None:
        for begun in list(self.loads):
            begun.load.cancel()
        if not self.prefetches:
            return
        # Whoever is at the point may hold the manager's lock, and no caller of `cancel` does: it comes from a thread
        # of its own, which is waited for only as long as it may be waiting for that lock.
        canceller = threading.Thread(target=lambda: [prefetch.cancel() for prefetch in list(self.prefetches)])
        self.cancellers.append(canceller)
        canceller.start()
        canceller.join(LOCKED)

    def _close(self) -> None:
        if self.closer is None:
            self.closer = threading.Thread(target=self.host.engine.close, kwargs={"drain": self.drain})
            self.closer.start()
            until(lambda: self.host.engine._closed, "the engine begins to close")

    def _raise(self) -> None:
        self.interrupt.set()

    # -- the caller ----------------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Pages in the tiers, before anything goes wrong."""
        host, draw = self.host, self.draw
        host.engine.clear()
        for tokens in self.prompts:
            host.store(tokens)
        quiet(host.engine)
        if "cpu" in self.config and draw.random() < 0.8:
            drop_from(host.engine, "cpu")
            for tokens in self.prompts:
                if draw.random() < 0.3:
                    host.load(tokens[: 4 * draw.randint(1, PAGES)])

    def faults(self) -> None:
        draw = self.draw
        for _ in range(draw.choice([0, 0, 1, 3])):
            fault = draw.choice([Fault.DELAY, Fault.DELAY, Fault.EIO, Fault.FLIP, Fault.SHORT])
            seconds = draw.uniform(0.0003, 0.0015) if fault is Fault.DELAY else 0.0
            op = Op.READ if fault is not Fault.DELAY else draw.choice([Op.READ, Op.WRITE])
            PLAN.add(FaultRule(fault, op, rate=draw.choice([0.1, 0.5]), seconds=seconds))

    def step(self) -> None:
        self.points.reach("caller")
        if self.interrupt.is_set():
            raise InterruptedCallError

    def run(self) -> None:
        """Ops one after the other, most of which leave work behind; then the end of a forward for each load."""
        steps = [self.load, self.load, self.load_many, self.store, self.store, self.prefetch, self.wait, self.evict]
        chosen = [self.load, *(self.draw.choice([*steps, self.cancel_one, self.impatient]) for _ in range(5))]
        for step in chosen:
            self.step()
            step()
        for begun in self.loads:
            self.step()
            self.finish(begun)

    def begin(self, prompts: Sequence[list[int]]) -> None:
        host = self.host
        hits = [host.engine.lookup(tokens) for tokens in prompts]
        blocks = [host.take(len(hit.pages)) for hit in hits]
        try:
            load = host.engine.load_many(list(zip(hits, blocks, strict=True)))
        except BaseException:
            for some in blocks:
                host.give(some)
            raise
        keys = [[page.key for page in hit.pages] for hit in hits]
        self.loads.append(Begun(load, list(zip(prompts, blocks, keys, strict=True))))

    def load(self) -> None:
        self.begin([self.draw.choice(self.prompts)])

    def load_many(self) -> None:
        self.begin(self.draw.sample(self.prompts, 2))

    def store(self) -> None:
        host = self.host
        tokens = self.draw.choice([*self.prompts, prompt(self.draw.randrange(50, 60), 3)])
        blocks = host.compute(tokens)
        try:
            self.stores.append((host.engine.store(tokens, blocks), blocks))
        except BaseException:
            host.give(blocks)
            raise

    def prefetch(self) -> None:
        if "cpu" in self.config:
            self.prefetches.append(self.host.engine.prefetch(self.draw.choice(self.prompts)))

    def wait(self) -> None:
        if self.loads:
            self.draw.choice(self.loads).load.wait(self.draw.randrange(self.host.layout.n_layers))

    def evict(self) -> None:
        if "cpu" in self.config:
            drop_from(self.host.engine, "cpu")

    def cancel_one(self) -> None:
        if self.loads:
            begun = self.draw.choice(self.loads)
            begun.load.cancel()
            if self.draw.random() < 0.5:
                self.leave(begun)

    def leave(self, begun: Begun) -> None:
        """Somebody else has the blocks of a load as soon as `release_event` says so."""
        if not begun.left:
            begun.left = True
            begun.load.release_event.synchronize(WAIT)
            for _, blocks, _ in begun.requests:
                self.host.give(blocks)

    def impatient(self) -> None:
        """A deadline that has passed in result(), and what a caller does then."""
        if self.loads:
            load = self.draw.choice(self.loads).load
            try:
                load.settle(lambda gap: None, 0.0)
            except (DeadlineError, InjectedError):
                load.cancel()

    def finish(self, begun: Begun) -> None:
        """The end of a forward: the verdict, and what is missing computed. Then every promised page is right."""
        host, size = self.host, self.host.layout.page_tokens

        def recompute(gap: Gap) -> None:
            self.points.reach("recompute")
            _, blocks, keys = begun.requests[gap.request]
            for i in range(gap.first // size, gap.stop // size):
                write_page(host.planes, host.layout, host.page(blocks, i), host.data(keys[i]))

        if begun.load.cancelled:
            self.leave(begun)
            return
        for layer in range(host.layout.n_layers):
            begun.load.wait(layer)
        begun.load.settle(recompute)
        for part, (_, blocks, keys) in zip(begun.load.parts, begun.requests, strict=True):
            for i in range(len(part.plan.tasks)):
                self.same(keys[i], host.page(blocks, i), f"page {i} after settle()")

    def same(self, key: bytes, blocks: Sequence[int], what: str) -> None:
        found = read_page(self.host.planes, self.host.layout, blocks)
        assert np.array_equal(found, self.host.data(key)), what

    # -- the end -------------------------------------------------------------------------------------------------------

    def play(self) -> None:
        """Run the caller until it ends, is interrupted, or meets what it is meant to meet; then the checks."""
        engine = self.host.engine
        try:
            self.prepare()
            self.faults()
            self.points.install(engine)
            self.points.on = True
            with contextlib.suppress(InterruptedCallError, InjectedError, EngineClosedError):
                if self.schedule.action == "raise":
                    with engine:  # an exception leaves the block, which closes the engine
                        self.run()
                else:
                    self.run()
            self.over()
            if not engine._closed:
                self.points.on = False
                PLAN.reset()
                self.rested()
        finally:
            PLAN.reset()
            self.points.on = False
            for thread in [*self.cancellers, *([] if self.closer is None else [self.closer])]:
                thread.join(WAIT)
            rested = not engine._closed
            engine.close()
        self.closed()
        if not rested:
            self.reopened()

    def over(self) -> None:
        """Everything that was begun ends by itself, and says so."""
        for begun in self.loads:
            load = begun.load
            self.leave(begun)
            until(load.done, "a load ends")
            for layer in range(self.host.layout.n_layers):
                load.wait(layer, WAIT)
            assert [part.report is not None for part in load.parts] == [True] * len(begun.requests)
        for handle, blocks in self.stores:
            handle.release_event.synchronize(WAIT)
            self.host.give(blocks)
            handle.result(WAIT)
        for prefetch in self.prefetches:
            prefetch.result(WAIT)
        assert sorted(self.host.free) == list(range(BLOCKS))

    def rested(self) -> None:
        """A healthy engine: nothing held, every slot there once, and what is served is right."""
        engine = self.host.engine
        settle(engine)
        for name, tier in engine.manager.tiers.items():
            with engine.manager.lock:
                slots = [entry.slot for entry in tier.index]
                assert len(set(slots)) == len(slots), f"a slot of {name} twice"
                returned = len(getattr(tier, "_returned", ())) + len(getattr(tier, "_deleting", ()))
                assert len(slots) + tier.index.free_slots + returned == tier.index.slots, f"slots of {name} are lost"
        for tokens in self.prompts:
            self.host.load(tokens)  # compares the bytes, and that no other slot was written
        settle(engine)

    def closed(self) -> None:
        """After close(): nothing is held, no thread is left, and nobody writes to the planes."""
        parts = self.host.engine._parts
        assert not parts.manager._leases, "leases are left"
        assert not parts.manager._filling, "pages are still being filled"
        assert not +parts.manager.under_way, "pages are still under way"
        if parts.bounce is not None:
            assert parts.bounce.loads.free_slots == parts.bounce.loads.slots, "bounce slots of loads are lost"
            assert parts.bounce.stores.free_slots == parts.bounce.stores.slots, "bounce slots of stores are lost"
        assert not parts.storer._jobs
        assert not parts.storer._planner.queued
        assert untouched(self.host.planes, range(BLOCKS)), "a slot was written after it was given back"

    def reopened(self) -> None:
        """What the SSD has kept is right, by a new engine."""
        host = Host(self.config, BLOCKS)
        try:
            for tokens in self.prompts:
                host.load(tokens)
            settle(host.engine)
        finally:
            host.engine.close()


def descriptors() -> list[str]:
    """What the open file descriptors of the process are."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{number}"))
    return sorted(found)


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("gdscache")]


@contextlib.contextmanager
def groups() -> Iterator[None]:
    """Groups of layers that suit tiny pages."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load_run, "GROUP_SIZES", SIZES)
        patch.setattr(load_run, "copy_groups", lambda layout, pages: read_groups(layout, pages, SIZES))
        yield


def play(schedule: Schedule, directory: Path, device: str = "cpu") -> Points:
    """Play a schedule, then look for leaks. What fails says how to play it again."""
    try:
        with groups():
            before = descriptors()
            player = Player(schedule, directory, device)
            player.play()
            until(lambda: not threads(), f"threads end: {threads()}")
            assert descriptors() == before, "file descriptors are left open"
            return player.points
    except BaseException as error:
        error.add_note(f"schedule: {schedule}")
        raise


def main(arguments: Sequence[str]) -> str:
    seed, action, name, number = arguments
    with tempfile.TemporaryDirectory() as directory:
        points = play(Schedule(int(seed), action, (name, int(number))), Path(directory))
    return f"reached: {points.reached}; points: {dict(points.counts)}"


if __name__ == "__main__":
    print(main(sys.argv[1:]))
