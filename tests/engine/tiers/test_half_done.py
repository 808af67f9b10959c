"""Operations of an index and of the SSD tier whose native calls and calls of the catalogue fail, each in turn.

Every slot is free or used, no page goes that was not to go, and all works when memory is there again."""

from __future__ import annotations

import contextlib
import errno
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gdscache.config import SsdConfig
from gdscache.disk.catalog import Catalog
from gdscache.disk.slab import SlabIO
from gdscache.errors import IOFailedError, NativeCallError
from gdscache.index import index as index_module
from gdscache.index.retention import Retention
from gdscache.native import LruShadow, Victims
from gdscache.pages.keys import Page
from gdscache.policies import POLICIES, guarded
from gdscache.policies.base import LRU
from gdscache.policies.guarded import Lifetime
from gdscache.tiers import ssd as ssd_module
from gdscache.tiers.clear import Clearing
from gdscache.tiers.ssd import SsdTier
from tests.support.half_done import SLOTS, drop, index_life, tries
from tests.support.helpers import MHA, layout_of
from tests.support.index_machine import chain

LAYOUT = layout_of(MHA)
NO_MEMORY = NativeCallError("as ordered", "free memory", errno.ENOMEM)
NO_DISK = IOFailedError("as ordered", "wait", 5)
CHANGES = ("insert_all", "touch_all", "remove", "evict_all", "hasten", "defer_all", "walk", "begin")


class Failing:
    """The `at`th place fails: a call before it has begun, or behind its work where that may be half done."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.at = self.places = 0
        self.error: Exception = NO_MEMORY
        self._patch = patch

    def patch(self, of: Any, *names: str, half: bool = True, disk: bool = False) -> None:
        for name in names:
            self._patch.setattr(of, name, self.around(of, name, half=half, disk=disk))

    def patch_index(self) -> None:
        for module, real, names in ((guarded, LruShadow, SHADOW), (index_module, Victims, ("look",))):
            self._patch.setattr(
                module, real.__name__, type("Failing", (real,), {name: self.around(real, name) for name in names})
            )
        self.patch(LRU, *CHANGES)
        self.patch(Lifetime, "defer_all")  # its own; the others are of LRU
        self.patch(index_module, "take_out", half=False)

    def patch_tier(self) -> None:
        self.patch(ssd_module, "put_rows", "take_rows", "bound")
        self.patch(Catalog, "commit", "checksum_rows", disk=True)
        self.patch(SlabIO, "flush", disk=True)

    def around(self, of: Any, name: str, *, half: bool = True, disk: bool = False) -> Callable[..., Any]:
        real = getattr(of, name)

        def call(*args: Any, **more: Any) -> Any:
            self.meet(disk)
            found = real(*args, **more)
            if half:
                self.meet(disk)
            return found

        return call

    def meet(self, disk: bool) -> None:
        self.places += disk or self.error is NO_MEMORY
        if self.places == self.at:
            self.places += 1
            raise self.error

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        at, self.at = self.at, 0
        yield
        self.at = at

    def each(self, error: Exception, least: int, life: Callable[[], object], step: int = 1) -> None:
        """One life for each place that it has, more than `least`, or for one in so many."""
        self.at, self.error = 0, error
        places, begun = self.places, self.places
        life()
        places = self.places - begun
        assert places > least, "hardly a call fails"
        for at in range(1, places + 1, step):
            self.at = self.places + at
            life()


SHADOW = ("insert", "touch", "evict", "drop", "first", "walk")


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Failing:
    return Failing(monkeypatch)


@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.suite), 3])
@pytest.mark.parametrize("policy", POLICIES)
def test_an_index_is_whole_behind_each_native_call_that_fails(policy: str, failing: Failing, step: int) -> None:
    failing.patch_index()
    failing.each(NO_MEMORY, 20, lambda: index_life(policy, failing.quiet), step)


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    with contextlib.closing(opened(tmp_path / "filled")) as tier:
        keep(tier, [*chain(0, 4), *chain(1, 2)])
    return tmp_path / "filled"


def opened(path: Path) -> SsdTier:
    config = SsdConfig(path=path, capacity=SLOTS * LAYOUT.extent_bytes, transport="posix")
    return SsdTier(LAYOUT, config, "cpu", threading.RLock(), reserve=0)


def keep(tier: SsdTier, pages: Sequence[Page]) -> None:
    """As a writer does, which drops what was not committed."""
    entries = tier.reserve(pages)
    try:
        assert all(tier.commit(entries, np.zeros((len(entries), LAYOUT.n_sums), np.uint64)))
    except BaseException:
        for entry in entries:
            tier.index.drop(entry)
        raise
    finally:
        tier.index.release_all(entries)


@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.suite), 3])
@pytest.mark.parametrize("error", [NO_MEMORY, NO_DISK], ids=["memory", "disk"])
def test_the_ssd_tier_is_whole_behind_each_call_that_fails(
    filled: Path, tmp_path: Path, failing: Failing, error: Exception, step: int
) -> None:
    old, fresh, more = chain(0, 4), chain(2, 3), chain(3, 2)

    failing.patch_tier()

    def life() -> None:
        path = tmp_path / "cache"
        shutil.copytree(filled, path)
        with failing.quiet():
            tier = opened(path)
        index, lock = tier.index, tier.lock
        tried = tries(failing.quiet, index, lambda: tier.check(lock))

        def drop_unlearned() -> None:
            """A load still reads it, and has yet to learn its checksums."""
            held = index.hold_run(old, 0, 4)
            try:
                drop(index, old[3])
                tier.commit_waiting()
            finally:
                index.let_go(old[: len(held)], held)

        tried(drop_unlearned, 1)
        tried(lambda: tier.learn([entry for page in old if (entry := index.get(page.key)) is not None]))
        tier.describe_namespace(old[0].namespace, {"model": "tiny"})
        tried(lambda: tier.touch([page.key for page in reversed(old)]))
        tried(lambda: keep(tier, fresh), 3)
        tried(lambda: tier.retain(fresh[0].key, Retention(1, None)))
        tried(lambda: keep(tier, more), 2)
        tried(lambda: drop(index, fresh[2]), 1)
        tried(tier.commit_deletions)
        tried(lambda: keep(tier, fresh), 3)
        clearing = Clearing(lock, {"ssd": tier}, [tier])
        tried(lambda: clearing.clear(bytes(32)))
        tried(lambda: keep(tier, more), 2)
        left = {entry.key for entry in index}
        tried(clearing.clear, SLOTS)
        with failing.quiet():
            tier.commit_all_deletions()
            assert index.free_slots + len(index) == SLOTS
            assert len(index) in (0, len(left))
            keep(tier, chain(4, 4))
            left = {entry.key for entry in index}
            tier.close()
            again = opened(path)
            assert {entry.key for entry in again.index} == left
            again.close()
        shutil.rmtree(path)

    failing.each(error, 20, life, step)
