"""Random schedules: what a caller does with an engine, what is late, what fails, and what comes in between.

A schedule is made from its seed alone, so that `play(seed, directory)` does the same again, as far as threads let it.
`python -m tests.support.load_schedules SEED` plays one. `test_loads_stepped.py` tries every order of small loads.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from gdscache.errors import DeadlineError, EngineClosedError
from gdscache.load import loader
from gdscache.load import run as load_run
from gdscache.load.handle import Gap, LayerwiseLoad
from gdscache.pages.layout import GroupSizes, read_groups
from gdscache.prefetch.handle import Prefetch
from gdscache.storage.base import Op
from gdscache.store.handle import StoreHandle
from tests.support import fake_gpu
from tests.support.faults import FaultRule
from tests.support.faulty import PLAN, Fault
from tests.support.helpers import (
    MHA,
    MLA,
    PACKED,
    SMALL,
    WAIT,
    Host,
    close_kept,
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

ACTIONS = ("none", "cancel", "close", "raise")
PAGES = 4
SOON = 0.002  # seconds within which the action comes, once its step has begun
BLOCKS = 56  # six steps take eight each at most, and then a load
EVEN = MHA | {"layers": 6, "head_dim": 72}  # several groups of layers, with the sizes below
SIZES = GroupSizes(least=4096, first=1)


class InterruptedCallError(Exception):
    """What the caller's thread raises in the middle of its work."""


@dataclasses.dataclass
class Begun:
    """A load of one or more requests: for each the tokens, the blocks and the keys."""

    load: LayerwiseLoad
    requests: list[tuple[list[int], list[int], list[bytes]]]
    left: bool = False  # its blocks were given back


class Player:
    """One schedule: a caller with an engine, everything that it has begun, and an `action` at one of its steps.

    That is: `cancel` every load and prefetch so far, or `close` the engine, from another thread; or `raise` in the
    caller's.
    """

    def __init__(self, seed: int, directory: Path, device: str = "cpu") -> None:
        """`directory` may be that of schedules before: each begins empty."""
        self.draw = draw = random.Random(seed)
        model = draw.choice([MHA, MLA, EVEN, PACKED])
        self.config = make_config(
            directory / f"{layout_of(model).extent_bytes}-{model.get('pack')}",  # `auto` would be as that directory is
            device=device,
            model=model,
            cpu=draw.choice([None, 3, 8, 20]),
            ssd=32 if model is not PACKED else 8192,  # a 256th is for pages that do not fit
            bounce=draw.choice([4, 16]),
            transport=draw.choice(["tests.support.faulty:FaultyTransport", "tests.support.faulty:FaultyMerging"]),
            load={"verify": draw.choice(["once", "always"])},
        )
        self.limits = dataclasses.replace(SMALL, load_threads=draw.choice([1, 2, 4]))
        with pytest.MonkeyPatch.context() as patch:  # on the host, or as on a GPU
            if draw.random() < 0.5 and device == "cpu":
                fake_gpu.use(patch, draw.choice(["staged", "zero_copy", "copy_engine"]), kernels=draw.random() < 0.7)
            self.host = Host(self.config, BLOCKS, limits=self.limits)
        self.action, self.at = draw.choice(ACTIONS), draw.randrange(12)
        self.steps = 0
        self.acted = False
        self.prompts = [prompt(1, 2) + prompt(10 + i, PAGES - 2) for i in range(3)]
        self.loads: list[Begun] = []
        self.stores: list[tuple[StoreHandle, list[int]]] = []
        self.prefetches: list[Prefetch] = []
        self.helpers: list[threading.Thread] = []
        self.drain = draw.random() < 0.5
        self.flips = False  # whether reads bring other bytes: a page that has them is dropped, and may be lost
        self.kept: list[int] = []  # tokens of each prompt that the SSD has before anything goes wrong

    # -- what comes in between -----------------------------------------------------------------------------------------

    def _cancel(self) -> None:
        for begun in list(self.loads):
            begun.load.cancel()
        for prefetch in list(self.prefetches):
            prefetch.cancel()

    def _close(self) -> None:
        self.host.engine.close(drain=self.drain)

    def _soon(self, action: Callable[[], None]) -> None:
        """Have it done from another thread, in a moment."""
        seconds = self.draw.uniform(0.0, SOON)
        self.helpers.append(threading.Thread(target=lambda: (time.sleep(seconds), action())))
        self.helpers[-1].start()

    # -- the caller ----------------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Pages in the tiers, before anything goes wrong."""
        host, draw = self.host, self.draw
        host.engine.clear()
        for tokens in self.prompts:
            host.store(tokens)
        quiet(host.engine)
        ssds = [tier.index for tier in host.engine.manager.files]
        there = [
            [any(page.key in ssd for ssd in ssds) for page in host.engine.pages(tokens)] for tokens in self.prompts
        ]
        self.kept = [4 * [*pages, False].index(False) for pages in there]
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
            self.flips |= fault is Fault.FLIP
            PLAN.add(FaultRule(fault, op, rate=draw.choice([0.1, 0.5]), seconds=seconds))

    def step(self) -> None:
        self.steps += 1
        if self.steps != self.at + 1 or self.action == "none":
            return
        self.acted = True
        if self.action == "raise":
            raise InterruptedCallError
        self._soon(self._cancel if self.action == "cancel" else self._close)

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
            except DeadlineError:
                load.cancel()

    def finish(self, begun: Begun) -> None:
        """The end of a forward: the verdict, and what is missing computed. Then every promised page is right."""
        host, size = self.host, self.host.layout.page_tokens

        def recompute(gap: Gap) -> None:
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
            for i in range(part.pages):
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
            with contextlib.suppress(InterruptedCallError, EngineClosedError):
                if self.action == "raise":
                    with engine:  # an exception leaves the block, which closes the engine
                        self.run()
                else:
                    self.run()
            for thread in self.helpers:
                thread.join(WAIT)
            self.over()
            if not engine._closing.begun:
                PLAN.reset()
                self.rested()
        finally:
            PLAN.reset()
            for thread in self.helpers:
                thread.join(WAIT)
            rested = not engine._closing.begun
            engine.close()
        close_kept(engine)
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
        self.left(self.host)
        settle(engine)

    def closed(self) -> None:
        """After close(): nothing is held, no thread is left, and nobody writes to the planes."""
        parts = self.host.engine._parts
        assert not parts.manager._leases, "leases are left"
        assert not parts.loader.planner._filling, "pages are still being filled"
        assert not +parts.loader.planner.under_way, "pages are still under way"
        for bounce in parts.bounces:
            assert bounce.stores.free_slots == bounce.stores.slots, "bounce slots of stores are lost"
        assert not parts.storer._jobs
        assert not parts.storer._planner.queued
        assert untouched(self.host.planes, range(BLOCKS)), "a slot was written after it was given back"

    def left(self, host: Host) -> None:
        """What the SSD had before anything went wrong is there; the bytes are compared."""
        for tokens, kept in zip(self.prompts, self.kept, strict=True):
            assert host.load(tokens).tokens >= kept or self.flips, "a page is lost that nothing has damaged"

    def reopened(self) -> None:
        """What the SSD has kept is right, by a new engine."""
        host = Host(self.config, BLOCKS, limits=self.limits)
        try:
            self.left(host)
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
def groups(first: int = 64) -> Iterator[None]:
    """Groups of layers that suit tiny pages; so many pages are planned before the first of them moves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader, "FIRST_PAGES", first)
        patch.setattr(loader, "FIRST_BYTES", 0)
        patch.setattr(load_run, "GROUP_SIZES", SIZES)
        patch.setattr(load_run, "copy_groups", lambda layout, pages: read_groups(layout, pages, SIZES))
        yield


def play(seed: int, directory: Path, device: str = "cpu") -> Player:
    """Play a schedule, then look for leaks. What fails says how to play it again."""
    try:
        with groups(1 + seed % 3):
            before = descriptors()
            player = Player(seed, directory, device)
            player.play()
            until(lambda: not threads(), f"threads end: {threads()}")
            assert descriptors() == before, "file descriptors are left open"
            return player
    except BaseException as error:
        error.add_note(f"schedule: python -m tests.support.load_schedules {seed}")
        raise


def main(arguments: Sequence[str]) -> str:
    with tempfile.TemporaryDirectory() as directory:
        player = play(int(arguments[0]), Path(directory))
    return f"{player.action} at step {player.at}: {player.acted}"


if __name__ == "__main__":
    print(main(sys.argv[1:]))
