"""Pages between a host pool of SGLang's and the SSD tier, for `GdsCacheStorage`, without SGLang.

The pool's memory is the engine's planes: pages are gathered and scattered there with their checksums, and SGLang copies
nothing. HiCache calls from several threads, and an exception would end such a thread. So a page's result is a bool:
False is a miss, or a page that was not kept.

After a weight change the pool holds old pages until its flush. So nothing is stored in between.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from gdscache.engine.engine import CacheEngine
from gdscache.engine.hybrid import HybridEngine
from gdscache.errors import DeadlineError, GdsCacheError
from gdscache.integrations.sglang.pages import PageLinks, digest, parent_of
from gdscache.integrations.sglang.planes import KV
from gdscache.integrations.weights import fresh_salt
from gdscache.load.handle import LayerwiseLoad
from gdscache.moves import PageStatus
from gdscache.pages.hit import Hit
from gdscache.pages.keys import Page, PageHashes
from gdscache.ranks.borrower import Borrower
from gdscache.ranks.lender import Lender
from gdscache.runtime.threads import in_turn, log_failure


@contextlib.contextmanager
def _misses() -> Iterator[None]:
    """An error is a miss, and a line of the log."""
    try:
        yield
    except GdsCacheError as error:
        log_failure(error)


class HostPages:
    """The SSD tier under one host pool. Thread-safe."""

    def __init__(self, engine: CacheEngine) -> None:
        """The planes of `engine` are the pool's memory, a block a page."""
        self.engine = engine
        self._page_tokens = engine.layout.page_tokens
        self._links = PageLinks()
        self._salt = ""
        self._epoch = 0  # changes of the weights so far
        self._held = False  # the pool may have pages of old weights
        self._used = False  # since the last flush
        self._lender: Lender | None = None
        self._patience = 2 * engine.config.deadline
        # As many pages at once as half of the store queue holds: pages beyond the queue would be dropped.
        self._at_once = max(1, engine.config.store.queue // 2 // engine.layout.extent_bytes)

    def exists(self, keys: Sequence[str], before: Sequence[str] = ()) -> int:
        """The number of the first pages that are stored. `before`: the keys of the pages before them, if known."""
        self._used = True
        found = 0
        with _misses():
            found = self._look(keys, before).tokens // self._page_tokens
        return found

    def present(self, keys: Sequence[str], before: Sequence[str] = ()) -> bytes:
        """1 for each stored page, 0 for the others. Does not count as a use."""
        self._used, found = True, bytes(len(keys))
        with _misses():
            found = self.engine.present(self._pages(keys, before, self._salt))
        return found

    def get(self, keys: Sequence[str], slots: Sequence[int], before: Sequence[str] = ()) -> list[bool]:
        """Bring pages into the pool, page `i` to the tokens from `slots[i]` on. Returns whether each page has come and
        is good. After the return nothing writes to the pool."""
        self._used = True
        good = [False] * len(keys)
        with _misses():
            hit = self._look(keys, before)
            blocks = self._blocks(slots)[: len(hit.pages)]
            if len(blocks):
                good[: len(blocks)] = self._load(self.engine.load(hit, blocks), len(blocks))
        return good

    def set(self, keys: Sequence[str], slots: Sequence[int], before: Sequence[str] = ()) -> list[bool]:
        """Store pages that lie in the pool, page `i` at the tokens from `slots[i]` on. Returns whether each page is on
        the SSD. After the return nothing reads the pool."""
        self._used = True
        kept, salt = list[bool](), self._salt  # the salt before the flag: see `weights_changed`
        if self._held:
            return [False] * len(keys)
        for first in range(0, len(keys), self._at_once):
            part = slice(first, first + self._at_once)
            kept += self._set(keys[part], slots[part], [*before, *keys[:first]][-1:], salt)
        return kept

    def clear(self) -> None:
        """Drop every page of this model. Pages of weights between the files' and today's have gone already."""
        self.engine.invalidate(*self.engine.namespaces(), *self.engine.namespaces(self._salt))

    def weights_changed(self, *, ends: bool = False) -> None:
        """Find no page of the old weights, and store none until the flush. Called before and after each change. `ends`:
        the end of an update in parts, which SGLang does not flush; its last part may have been flushed, and then the
        pool has old pages only if it was used since."""
        self._held = self._held or self._used or not ends
        self._epoch += 1
        before, self._salt = self._salt, fresh_salt()  # after the flag: a store that reads the new salt sees it
        with _misses():
            if before:  # no lookup uses this salt again
                self.engine.invalidate(*self.engine.namespaces(before))

    def flushed(self) -> None:
        self._used = self._held = False

    def named(self, hashes: Sequence[bytes], parent: bytes | None, epoch: int) -> Sequence[Page]:
        """The pages of hashes, for a rank whose weights have changed `epoch` times; none if they have changed more or
        less often here. Raises `InvalidValueError`."""
        salt = self._salt  # the salt before the epoch: it changes after the epoch
        if epoch != self._epoch:
            return ()
        return self.engine.pages(PageHashes(hashes, parent=parent), salt)

    def lend(self) -> str:
        """Lend the pages to other ranks. Returns the address for their `Borrower`."""
        self._lender = self.engine.lend(self.named)
        return self._lender.address

    def close(self) -> None:
        """Finish accepted stores, and close the engine. Repeated calls are fine."""
        in_turn(*(part.close for part in (self._lender, self.engine) if part is not None))

    def _look(self, keys: Sequence[str], before: Sequence[str]) -> Hit:
        """Look up the first stored pages, and count their use."""
        if not self.engine.groups:
            return self.engine.lookup(self._links.named(keys, before), salt=self._salt)
        return self.engine.lookup_pages(self._pages(keys, before, self._salt))

    def _pages(self, keys: Sequence[str], before: Sequence[str], salt: str) -> list[Page]:
        """The names of pages. Windows and states have no parent: each is wanted by itself."""
        (namespace,) = self.engine.namespaces(salt)
        if any(group.keeps != "all" for group in self.engine.groups):
            pages = PageHashes([digest(key) for key in keys]).pages(namespace)
            return [Page(page.key, namespace, namespace) for page in pages]
        return self._links.named(keys, before).pages(namespace)

    def _set(self, keys: Sequence[str], slots: Sequence[int], before: Sequence[str], salt: str) -> list[bool]:
        kept = [False] * len(keys)
        with _misses():
            handle = self.engine.store_pages(self._pages(keys, before, salt), self._blocks(slots), salt)
            try:
                report = handle.result(self._patience)
                kept = [number not in report.dropped for number in range(len(keys))]
            finally:
                handle.release_event.synchronize()
        return kept

    def _load(self, load: LayerwiseLoad, pages: int) -> list[bool]:
        """The verdict on each page. After the deadline, or an interrupt, wait until the pool is left alone."""
        try:
            try:
                report = load.result()
            except DeadlineError:
                load.cancel()
                report = load.result()
        finally:
            load.cancel()
            load.release_event.synchronize()
        good = [status is PageStatus.LOADED for status in report.pages[:pages]]
        return good + [False] * (pages - len(good))

    def _blocks(self, slots: Sequence[int]) -> npt.NDArray[np.int64]:
        return np.asarray(slots, np.int64) // self._page_tokens


class BorrowedPages:
    """`HostPages` for a rank that reads the pages which the first rank has stored. Thread-safe.

    Each rank sees a change of weights at its own time. Pages are found once both have seen equally many.
    """

    def __init__(self, borrower: Borrower, page_tokens: int) -> None:
        self._borrower, self._page_tokens = borrower, page_tokens
        self._epoch = 0

    def exists(self, keys: Sequence[str], before: Sequence[str] = ()) -> int:
        found = 0
        with _misses():
            found = self._borrower.find([digest(key) for key in keys], parent_of(before), self._epoch)
        return found

    def get(self, keys: Sequence[str], slots: Sequence[int], before: Sequence[str] = ()) -> list[bool]:
        blocks = (np.asarray(slots, np.int64) // self._page_tokens).reshape(-1, 1)
        came: list[PageStatus] = []
        with _misses():
            came = self._borrower.load([digest(key) for key in keys], parent_of(before), self._epoch, blocks)
        good = [status is PageStatus.LOADED for status in came]
        return good + [False] * (len(keys) - len(good))

    def set(self, keys: Sequence[str], slots: Sequence[int], before: Sequence[str] = ()) -> list[bool]:
        """Nothing: SGLang stores on the first rank only."""
        return [False] * len(keys)

    def clear(self) -> None:
        """Nothing: the first rank clears."""

    def weights_changed(self, *, ends: bool = False) -> None:
        self._epoch += 1

    def flushed(self) -> None:
        """Nothing is stored here."""

    def close(self) -> None:
        """Release everything. Repeated calls are fine."""
        self._borrower.close()


class PoolPages:
    """Pages of all pools that are kept, by SGLang's names. Thread-safe."""

    def __init__(
        self, pools: Mapping[str, HostPages | BorrowedPages], engine: CacheEngine | HybridEngine | None = None
    ) -> None:
        """`engine`: of this rank's own directory."""
        self.pools, self.engine = pools, engine

    @classmethod
    def over(cls, engine: CacheEngine | HybridEngine) -> PoolPages:
        if isinstance(engine, CacheEngine):
            return cls({KV: HostPages(engine)}, engine)
        each = zip(engine.names, engine.engines, strict=True)
        return cls({name: HostPages(one) for names, one in each for name in names}, engine)

    def lengths(
        self, keys: Sequence[str], trailing: Mapping[str, int | None], before: Sequence[str] = ()
    ) -> tuple[dict[str, int], list[int]]:
        """Each pool's number of first pages, and the lengths in pages at which all pools have their part.

        `trailing`: for each other pool, the number of a length's last pages that it needs (None: all); its answer is
        the longest length at which it has them. Pools that are not kept have no page.
        """
        whole = self.pools[KV].exists(keys, before)
        reach, found = {KV: whole}, [*range(1, whole + 1)]
        for name, pages in trailing.items():
            pool = self.pools.get(name)
            there = pool.present(keys[:whole], before) if isinstance(pool, HostPages) else bytes(whole)
            good = [n for n in range(1, whole + 1) if 0 not in there[max(0, n - (pages or n)) : n]]
            reach[name] = good[-1] if good else 0
            found = sorted({*found} & {*good})
        return reach, found

    def clear(self) -> None:
        in_turn(*(pool.clear for pool in self.pools.values()))

    def weights_changed(self, *, ends: bool = False) -> None:
        for pool in self.pools.values():
            pool.weights_changed(ends=ends)

    def flushed(self) -> None:
        for pool in self.pools.values():
            pool.flushed()

    def close(self) -> None:
        """Finish accepted stores, and close all engines. Repeated calls are fine."""
        in_turn(*(one.close for one in (*self.pools.values(), self.engine) if one is not None))
