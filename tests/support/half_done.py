"""An index in use while calls below it fail: what each may leave behind, and what must work when all is well again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from gdscache.errors import IOFailedError, NativeCallError
from gdscache.index.index import PageIndex
from gdscache.index.retention import DEFAULT, Retention
from gdscache.index.table import PENDING
from gdscache.pages.keys import Page
from gdscache.policies import POLICIES
from tests.support.index_machine import chain

SLOTS = 8
Quiet = Callable[[], contextlib.AbstractContextManager[None]]
Tried = Callable[[Callable[[], object], int], None]


def tries(quiet: Quiet, index: PageIndex, problems: Callable[[], Sequence[str]]) -> Tried:
    """`tried(call, most)`: the call may fail, and at most `most` pages go."""

    def tried(call: Callable[[], object], most: int = 0) -> None:
        before = {entry.key for entry in index if entry.state is not PENDING}
        with contextlib.suppress(MemoryError, NativeCallError, IOFailedError):
            call()
        with quiet():
            assert not problems()
            assert len(before - {entry.key for entry in index}) <= most
            assert not [entry for entry in index if entry.state is PENDING]

    return tried


def put(index: PageIndex, pages: Sequence[Page], retention: Retention = DEFAULT) -> None:
    slots = index.allocate_some(len(pages), pages=pages)
    entries = index.insert_all(pages, slots, PENDING, [retention] * len(slots), leases=1)
    index.commit_all(entries)
    index.release_all(entries)


def drop(index: PageIndex, page: Page) -> None:
    if (entry := index.get(page.key)) is not None:
        index.drop(entry)


def drop_held(index: PageIndex, pages: Sequence[Page]) -> None:
    held = index.hold_run(pages, 0, len(pages))
    try:
        drop(index, pages[len(held) - 1])
    finally:
        index.let_go(pages[: len(held)], held)


def index_life(policy: str, quiet: Quiet) -> None:
    """An index in use. `quiet()`: a context in which nothing fails."""
    first, second, third, fourth = (chain(number, pages) for number, pages in enumerate((4, 3, 4, 2)))
    with quiet():
        index = PageIndex(SLOTS, POLICIES[policy](1))
        index.orders.changes_kept = 3
    tried = tries(quiet, index, index.check)
    tried(lambda: put(index, first))
    tried(lambda: put(index, second))
    tried(lambda: index.touch([page.key for page in reversed(first)]))
    tried(lambda: put(index, third), 4)
    tried(lambda: index.retain(second[0].key, Retention(1, 5.0)))
    tried(lambda: put(index, fourth, Retention(-1, 3.0)), 2)
    tried(lambda: drop_held(index, first), 1)
    tried(lambda: drop(index, third[0]), 1)
    tried(lambda: index.retain(fourth[0].key, Retention(2, 3.0)))
    tried(lambda: index.expire_among(fourth[:1], 4.0), 1)
    tried(lambda: index.expire(4.0, 8), 2)
    tried(lambda: index.make_room(third[:3], 3), SLOTS)
    tried(lambda: index.free(index.allocate(2) or ()), 2)
    tried(lambda: index.evict(2), 2)
    tried(lambda: put(index, first), 4)
    tried(lambda: index.retire(index.detach().slots), SLOTS)
    with quiet():
        index.evict(SLOTS)
        assert index.free_slots == SLOTS
        put(index, first)
        put(index, second)
        assert index.evict(SLOTS) == 7
        assert not index.check()
