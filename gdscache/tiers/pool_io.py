"""Bytes between memory and objects of a shared pool: a page is an object, its extent and a trailer behind it.

The trailer says whose bytes these are, and has their checksums, bound to the page's key: whoever gets the object can
tell without asking anybody else. Pages are put from and got into the memory that they lie in.
"""

from __future__ import annotations

import errno
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from gdscache.checksum import Checksums
from gdscache.errors import IOFailedError, StorageError
from gdscache.keys import KEY_BYTES, Page
from gdscache.layout import PageLayout
from gdscache.memory import HostBuffer
from gdscache.storage.base import Op, address_of
from gdscache.tiers.page_io import Positions
from gdscache.tiers.pool_calls import Lines
from gdscache.tiers.pool_client import CODES, DONE, NO_MASTER, NO_SPACE, Client

if TYPE_CHECKING:
    from gdscache.moves.machine import Places

TRAILER_BYTES = 4096
_HEAD = struct.Struct(f"<8sII{KEY_BYTES}s{KEY_BYTES}sQ")  # magic, layers, page bytes, key, namespace, its own hash
_MAGIC = b"gdspage1"
MOST_LAYERS = (TRAILER_BYTES - _HEAD.size) // 8
BATCH_PAGES = 128
CALL_BYTES = 32 << 20  # of a call: what memory a call that hangs keeps
FULL_S, FULL_LONGEST_S = 0.02, 0.5  # a put that finds the pool full tries again: first after, and for how long in all
_ERRNO = {NO_SPACE: errno.ENOSPC, NO_MASTER: errno.EHOSTUNREACH}


def trailer(page: Page, page_bytes: int, stored: Checksums) -> bytes:
    """What stands behind a page's extent. `stored`: its checksums, uint64 (layers,), bound to its key."""
    sums = np.ascontiguousarray(stored, dtype="<u8").tobytes()
    own = xxhash.xxh3_64_intdigest(_HEAD.pack(_MAGIC, len(stored), page_bytes, page.key, page.namespace, 0) + sums)
    head = _HEAD.pack(_MAGIC, len(stored), page_bytes, page.key, page.namespace, own)
    return (head + sums).ljust(TRAILER_BYTES, b"\0")


def stored_sums(found: bytes, page: Page, page_bytes: int, layers: int) -> Checksums | None:
    """The checksums in a trailer, bound to the page's key; None where it is not this page's, or damaged."""
    magic, count, nbytes, key, namespace, _ = _HEAD.unpack_from(found)
    if (magic, count, nbytes, key, namespace) != (_MAGIC, layers, page_bytes, page.key, page.namespace):
        return None
    sums = np.frombuffer(found, "<u8", layers, _HEAD.size).astype(np.uint64)
    return sums if trailer(page, page_bytes, sums) == found else None


class PoolPages:
    """I/O of pages that is under way; see `PagesIO`. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._new: list[tuple[Sequence[int], StorageError | None]] = []
        self._ended: list[int] = []
        self._told: Callable[[], None] = _nobody
        self._callbacks: list[Callable[[int], None]] = []

    def finish(self, pages: Sequence[int], error: StorageError | None = None) -> None:
        """Nothing touches the memory of these any more."""
        if not pages:
            return
        with self._lock:
            self._new.append((pages, error))
            self._ended += pages
            told, callbacks = self._told, list(self._callbacks)
        told()
        for callback in callbacks:
            for page in pages:
                callback(page)

    def follow(self, told: Callable[[], None]) -> None:
        with self._lock:
            self._told = told
            new = bool(self._new)
        if new:
            told()

    def take(self) -> Iterator[tuple[Sequence[int], StorageError | None]]:
        with self._lock:
            new, self._new = self._new, []
        return iter(new)

    def on_end(self, callback: Callable[[int], None]) -> None:
        with self._lock:
            self._callbacks.append(callback)
            ended = list(self._ended)
        for page in ended:
            callback(page)


class PoolFiles:
    """Slots of a tier as objects of the pool. `pages[slot]` is the page in a slot, while somebody leases it.

    `sums[slot]`: what its bytes have to give, uint64 (slots, layers), bound to its key; for slots that are written.
    `told(op, slots)`: called when pages were moved, in a thread of the pool's, before their ends are told.
    """

    def __init__(
        self,
        layout: PageLayout,
        slots: int,
        lines: Lines,
        name_of: Callable[[Page], str],
        told: Callable[[Op, Sequence[int]], None],
        batch: int = BATCH_PAGES,
    ) -> None:
        self.pages: list[Page | None] = [None] * slots
        self.sums = np.zeros((slots, layout.n_layers), np.uint64)
        self.absent: set[int] = set()  # slots whose page was found not to be there, or not to be ours
        self.counts: Counter[str] = Counter()
        self._layout = layout
        self._lines = lines
        self._name_of = name_of
        self._told = told
        self._batch = max(1, min(batch, BATCH_PAGES, CALL_BYTES // layout.extent_bytes))
        self._trailers = HostBuffer(3 * BATCH_PAGES * TRAILER_BYTES, "off", TRAILER_BYTES, setting="pool trailers")
        self._puts, self._gets, self._asks = (
            self._trailers.address + part * BATCH_PAGES * TRAILER_BYTES for part in range(3)
        )

    @property
    def buffer(self) -> tuple[int, int]:
        """Address and bytes of the memory of the trailers."""
        return self._trailers.address, self._trailers.nbytes

    def describe(self) -> str:
        return "mooncake"

    def close(self) -> None:
        self._trailers.close()

    def transfer(
        self, op: Op, slots: Positions, ends: Sequence[tuple[Places, Positions]], span: tuple[int, int] | None = None
    ) -> PoolPages:
        """Start I/O of whole extents between slots and memory of the host; see `SlabIO.transfer`."""
        io = PoolPages()
        if span not in (None, (0, self._layout.extent_bytes)):
            io.finish(range(len(slots)), _failed("a part of an object", "", errno.EINVAL))
            return io
        places: list[int] = []
        for memory, where in ends:
            flat = memory.flat
            if not isinstance(flat, memoryview):
                io.finish(range(len(slots)), _failed("memory of a device", "give the pages a CPU tier", errno.EINVAL))
                return io
            places += (memory.where(where, 0) + address_of(flat)).tolist()
        numbers = slots.tolist()
        for at in range(0, len(numbers), self._batch):
            some = range(at, min(at + self._batch, len(numbers)))
            part, where_ = [numbers[n] for n in some], [places[n] for n in some]
            self._begin(op, io, some, part, where_)
        return io

    def _begin(self, op: Op, io: PoolPages, some: range, slots: list[int], places: list[int]) -> None:
        move = self._put if op is Op.WRITE else self._get
        left = set(range(len(slots)))

        def end(rows: Sequence[int], error: StorageError | None, cause: str) -> None:
            mine = [row for row in rows if row in left]
            left.difference_update(mine)
            if not mine:
                return
            self.counts[cause] += len(mine)
            if error is None:
                self._told(op, [slots[row] for row in mine])
            io.finish([some[row] for row in mine], error)

        def work(client: Client) -> None:
            try:
                move(client, slots, places, end)
            finally:
                end(range(len(slots)), _failed("a call broke off", "see the log"), "failed")

        def refused() -> None:
            end(range(len(slots)), _failed(CODES[NO_MASTER], "", errno.EHOSTUNREACH), "refused")

        self._lines.begin("puts" if op is Op.WRITE else "gets", work, refused)

    def _put(self, client: Client, slots: list[int], places: list[int], end: _End) -> None:
        extent, view = self._layout.extent_bytes, self._trailers.view
        pages, objects = [self._page(slot) for slot in slots], []
        for row, (slot, page) in enumerate(zip(slots, pages, strict=True)):
            at = row * TRAILER_BYTES
            view[at : at + TRAILER_BYTES] = trailer(page, self._layout.page_bytes, self.sums[slot])
            objects.append([(places[row], extent), (self._puts + at, TRAILER_BYTES)])
        names, rows, pause = [self._name_of(page) for page in pages], list(range(len(slots))), FULL_S
        until = time.monotonic() + FULL_LONGEST_S
        while rows:
            codes = client.put([names[row] for row in rows], [objects[row] for row in rows])
            self._lines.answered(codes)
            end([row for row, code in zip(rows, codes, strict=True) if code == DONE], None, "put")
            again = [row for row, code in zip(rows, codes, strict=True) if code == NO_SPACE]
            if again and (time.monotonic() + pause > until or not self._lines.breaker.closed):
                end(again, _failed(CODES[NO_SPACE], "add segments, or store less", errno.ENOSPC), "full")
                again = []
            for row, code in zip(rows, codes, strict=True):
                if code not in (DONE, NO_SPACE):
                    end([row], _error(code), "not_put")
            rows = again
            if rows:
                self.counts["waits"] += 1
                time.sleep(pause)
                pause *= 2

    def _get(self, client: Client, slots: list[int], places: list[int], end: _End) -> None:
        extent = self._layout.extent_bytes
        gone = [row for row, slot in enumerate(slots) if slot in self.absent]
        end(gone, _failed("the page is not there", "", errno.ENOENT), "absent")
        rows = [row for row, slot in enumerate(slots) if slot not in self.absent]
        if not rows:
            return
        objects = [[(places[row], extent), (self._gets + row * TRAILER_BYTES, TRAILER_BYTES)] for row in rows]
        codes = client.get([self._name_of(self._page(slots[row])) for row in rows], objects)
        self._lines.answered(codes)
        good = [row for row, code in zip(rows, codes, strict=True) if code == extent + TRAILER_BYTES]
        end(good, None, "got")
        for row, code in zip(rows, codes, strict=True):
            if code != extent + TRAILER_BYTES:
                end([row], _error(code), "not_got")

    def ask_trailers(self, pages: Sequence[Page]) -> list[Checksums | None]:
        """The checksums that stand behind pages in the pool, bound to their keys; None where there are none to be had.

        Waits, for one deadline a batch at most.
        """
        found: list[Checksums | None] = []
        for at in range(0, len(pages), BATCH_PAGES):
            some = pages[at : at + BATCH_PAGES]
            answer = self._lines.finish("asks", lambda client, some=some: self._trailers_of(client, some))  # type: ignore[misc]
            found += [None] * len(some) if answer is None else answer
        return found

    def _trailers_of(self, client: Client, pages: Sequence[Page]) -> list[Checksums | None]:
        layout, offset = self._layout, self._asks - self._trailers.address
        places = [self._asks + row * TRAILER_BYTES for row in range(len(pages))]
        codes = client.get_part([self._name_of(page) for page in pages], places, layout.extent_bytes, TRAILER_BYTES)
        self._lines.answered(codes)
        found: list[Checksums | None] = [None] * len(pages)
        for row in (row for row, code in enumerate(codes) if code == TRAILER_BYTES):
            at = offset + row * TRAILER_BYTES
            raw = bytes(self._trailers.view[at : at + TRAILER_BYTES])
            found[row] = stored_sums(raw, pages[row], layout.page_bytes, layout.n_layers)
        bad = [row for row, code in enumerate(codes) if code == TRAILER_BYTES and found[row] is None]
        if bad:  # the pool would keep them in the place of good ones
            self.counts["spoiled"] += len(bad)
            self._lines.answered(client.remove([self._name_of(pages[row]) for row in bad]))
        return found

    def _page(self, slot: int) -> Page:
        page = self.pages[slot]
        assert page is not None, "a slot without a page"
        return page


_End = Callable[[Sequence[int], StorageError | None, str], None]


def _error(code: int) -> IOFailedError:
    return _failed(CODES.get(code, f"code {code}"), "see the master's log", _ERRNO.get(code, errno.EIO))


def _failed(cause: str, hint: str, code: int = errno.EIO) -> IOFailedError:
    return IOFailedError(f"the shared pool: {cause}", hint, code)


def _nobody() -> None:
    pass
