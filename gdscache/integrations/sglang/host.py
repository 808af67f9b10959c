"""Pages between a host pool of SGLang's and the SSD tier: what `GdsCacheStorage` does, without SGLang.

The pool's memory is the engine's planes, so a page is gathered from it and scattered into it, with its checksum, and
SGLang copies nothing. HiCache calls from several threads of its own. An exception would end such a thread for good, so
whatever a page comes to is a bool: False is a miss, or a page that was not kept.

When SGLang's weights have changed, what its pool has is still of the old ones, until it is flushed. So nothing is
stored between a change and the flush behind it.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from gdscache.engine.engine import CacheEngine
from gdscache.errors import DeadlineError, GdsCacheError
from gdscache.integrations.sglang.pages import PageLinks
from gdscache.integrations.sglang.planes import KV
from gdscache.integrations.weights import fresh_salt
from gdscache.load.handle import LayerwiseLoad
from gdscache.moves import PageStatus
from gdscache.pages.hit import Hit
from gdscache.pages.keys import Page, PageHashes
from gdscache.ranks.lender import Lender
from gdscache.runtime.threads import log_failure


class HostPages:
    """The SSD tier under one host pool. Thread-safe."""

    def __init__(self, engine: CacheEngine) -> None:
        """The planes of `engine` are the pool's memory, a block a page."""
        self.engine = engine
        self.counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._page_tokens = engine.layout.page_tokens
        self._links = PageLinks()
        self._salt = ""
        self._epoch = 0  # how often the weights were told of
        self._held = False  # the pool may have pages of weights of before
        self._used = False  # since the last flush
        self._lender: Lender | None = None
        self._patience = 2 * engine.config.deadline
        # As many pages at once as are taken in, whatever else is on its way: what is beyond the queue is dropped.
        self._at_once = max(1, engine.config.store.queue // 2 // engine.layout.extent_bytes)

    def exists(self, keys: Sequence[str], before: Sequence[str] = ()) -> int:
        """How many of the first pages are stored. `before`: the keys of the pages in front of them, if known."""
        self._used = True
        found = 0
        with self._told():
            found = self._look(keys, before).tokens // self._page_tokens
        self._count(asked=len(keys), found=found)
        return found

    def present(self, keys: Sequence[str], before: Sequence[str] = ()) -> bytes:
        """1 for each page that is stored, 0 for the others. Counts as no use of them."""
        self._used, found = True, bytes(len(keys))
        with self._told():
            found = self.engine.present(self._pages(keys, before, self._salt))
        return found

    def pool(self, name: str) -> HostPages | None:
        """What keeps a pool of SGLang's, by its name; None where nothing does."""
        return self if name == KV else None

    @property
    def by_groups(self) -> dict[str, CacheEngine]:
        """The engine, by no name."""
        return {"": self.engine}

    def lengths(
        self, keys: Sequence[str], trailing: Mapping[str, int | None], before: Sequence[str] = ()
    ) -> tuple[dict[str, int], list[int]]:
        """See `PoolPages.lengths`: no pool is kept beside this one."""
        return lengths_of(self.exists(keys, before), trailing)

    def get(self, keys: Sequence[str], slots: Sequence[int], before: Sequence[str] = ()) -> list[bool]:
        """Bring pages into the pool, each to the tokens from `slots[i]` on; which of them are there, and good.

        When it returns nothing writes to the pool any more.
        """
        self._used = True
        good = [False] * len(keys)
        with self._told():
            hit = self._look(keys, before)
            blocks = self._blocks(slots)[: len(hit.pages)]
            if len(blocks):
                good[: len(blocks)] = self._load(self.engine.load(hit, blocks), len(blocks))
        self._count(wanted=len(keys), loaded=sum(good))
        return good

    def set(self, keys: Sequence[str], slots: Sequence[int], before: Sequence[str] = ()) -> list[bool]:
        """Store pages that lie in the pool at the tokens from `slots[i]` on; which of them are on the SSD now.

        When it returns nothing reads the pool any more.
        """
        self._used = True
        kept, salt = list[bool](), self._salt  # first the salt, then the look: see `weights_changed`
        if self._held:
            self._count(held=len(keys))
            return [False] * len(keys)
        for first in range(0, len(keys), self._at_once):
            part = slice(first, first + self._at_once)
            kept += self._set(keys[part], slots[part], [*before, *keys[:first]][-1:], salt)
        self._count(offered=len(keys), stored=sum(kept))
        return kept

    def clear(self) -> None:
        """Drop every page of this model. Those of weights between the files' and today's have gone already."""
        for salt in {"", self._salt}:
            self.engine.invalidate(*self.engine.namespaces(salt))

    def weights_changed(self, *, ends: bool = False) -> None:
        """Find no page of the weights of before, and store none until the flush. Called before and behind each change.

        `ends`: of the end of an update that was begun apart, which SGLang does not flush behind. Its last part was
        flushed behind, if it was asked to: what the pool has from then on is of before only if it was used since.
        """
        self._held = self._held or self._used or not ends
        self._epoch += 1
        before, self._salt = self._salt, fresh_salt()  # behind the hold: whoever has it, and looks then, is held
        with self._told():
            if before:  # nobody finds these again
                self.engine.invalidate(*self.engine.namespaces(before))

    def flushed(self) -> None:
        """SGLang's cache is empty: what comes now is of the weights of now."""
        self._used = self._held = False

    def named(self, hashes: Sequence[bytes], parent: bytes | None, epoch: int) -> Sequence[Page]:
        """The pages of hashes, for a rank whose weights have changed `epoch` times; none where they changed more often
        here, or less. Raises `InvalidValueError`."""
        salt = self._salt  # first the salt, which changes behind the epoch
        if epoch != self._epoch:
            return ()
        return self.engine.pages(PageHashes(hashes, parent=parent), salt)

    def lend(self) -> str:
        """Lend the pages to other ranks from now on; the address for their `Borrower`."""
        self._lender = self.engine.lend(self.named)
        return self._lender.address

    def close(self) -> None:
        """Finish what was accepted, and close the engine. Twice is fine."""
        if self._lender is not None:
            self._lender.close()
        self.engine.close()

    # -- inside ------------------------------------------------------------------------------------------------------

    def _look(self, keys: Sequence[str], before: Sequence[str]) -> Hit:
        """The first pages that are stored, which are used now."""
        if not self.engine.groups:
            return self.engine.lookup(self._links.named(keys, before), salt=self._salt)
        return self.engine.lookup_pages(self._pages(keys, before, self._salt))

    def _pages(self, keys: Sequence[str], before: Sequence[str], salt: str) -> list[Page]:
        """The names of pages. Windows and states follow nothing: each is wanted by itself."""
        (namespace,) = self.engine.namespaces(salt)
        pages = self._links.named(keys, before).pages(namespace)
        if any(group.keeps != "all" for group in self.engine.groups):
            return [Page(page.key, namespace, namespace) for page in pages]
        return pages

    def _set(self, keys: Sequence[str], slots: Sequence[int], before: Sequence[str], salt: str) -> list[bool]:
        kept = [False] * len(keys)
        with self._told():
            blocks = self.engine.block_table(self._blocks(slots))
            self.engine.check_blocks(blocks)
            handle = self.engine.store_pages(self._pages(keys, before, salt), blocks, salt)
            try:
                report = handle.result(self._patience)
                kept = [number not in report.dropped for number in range(len(keys))]
            finally:
                handle.release_event.synchronize()
        return kept

    def _load(self, load: LayerwiseLoad, pages: int) -> list[bool]:
        """The verdict on each page. After the deadline, or an interrupt, the pool is left alone first."""
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

    def _count(self, **numbers: int) -> None:
        with self._lock:
            self.counts.update(numbers)

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except GdsCacheError as error:
            self._count(errors=1)
            log_failure(error)


def lengths_of(found: int, trailing: Iterable[str]) -> tuple[dict[str, int], list[int]]:
    """What SGLang is told where the pool of all tokens alone is kept, and has the first `found` pages: how many each
    pool has, and the lengths at which all pools have what is needed. `trailing`: the pools beside it."""
    told = {KV: found, **dict.fromkeys(trailing, 0)}
    return told, [] if len(told) > 1 else [*range(1, found + 1)]
