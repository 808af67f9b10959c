"""Bytes between memory and objects of a shared pool: a page is an object, its extent and a trailer behind it.

The trailer says whose bytes these are, and has their checksums, bound to the page's key: whoever gets the object can
tell without asking anybody else. Pages are put from and got into the memory that they lie in.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from gdscache.arrays import Int64Array, integers
from gdscache.cuda.host_memory import HostBuffer
from gdscache.errors import IOFailedError, PageBytesError, PageGoneError, StorageError
from gdscache.limits import KEY_BYTES
from gdscache.native import layer_sums, take_rows
from gdscache.pages.checksum import Checksums, unbound
from gdscache.pages.keys import Page
from gdscache.pages.layout import PageLayout
from gdscache.pool.calls import Lines
from gdscache.pool.client import CODES, DONE, GONE, MISFIT, NO_MASTER, NO_SPACE, Client
from gdscache.runtime.threads import Workers
from gdscache.storage.base import Op, address_of

if TYPE_CHECKING:
    from gdscache.moves.machine import Places

TRAILER_BYTES = 4096
_HEAD = struct.Struct(f"<8sII{KEY_BYTES}s{KEY_BYTES}sQ")  # magic, layers, page bytes, key, namespace, its own hash
_MAGIC = b"gdspage1"
MOST_LAYERS = (TRAILER_BYTES - _HEAD.size) // 8
BATCH_PAGES = 128
CALL_BYTES = 32 << 20  # of a call: what memory a call that hangs keeps
_CHECKERS = 2  # threads that check what came
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
    """I/O of pages that is under way; see `PagesIO` and `CheckedIO`. Thread-safe."""

    def __init__(self, pages: int = 0, layers: int = 0) -> None:
        self.sums = np.zeros((pages, layers), np.uint64)  # of the bytes of pages that came and were good
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

    def sums_of(self, pages: Sequence[int]) -> Checksums:
        return take_rows(self.sums, pages)

    def on_end(self, callback: Callable[[int], None]) -> None:
        with self._lock:
            self._callbacks.append(callback)
            ended = list(self._ended)
        for page in ended:
            callback(page)


class PoolFiles:
    """Slots of a tier as objects of the pool. `pages[slot]` is the page in a slot, while somebody leases it.

    `sums[slot]`: what its bytes have to give, uint64 (slots, layers), bound to its key; for slots that are written.
    What comes is compared with its trailer, in threads that do nothing else. `written(slots)`: called when pages are
    in the pool, in a thread of the pool's, before their ends are told.
    """

    def __init__(
        self,
        layout: PageLayout,
        slots: int,
        lines: Lines,
        name_of: Callable[[Page], str],
        written: Callable[[Sequence[int]], None],
        batch: int = BATCH_PAGES,
    ) -> None:
        self.pages: list[Page | None] = [None] * slots
        self.sums = np.zeros((slots, layout.n_layers), np.uint64)
        self.counts: Counter[str] = Counter()
        self._layout = layout
        self._lines = lines
        self._name_of = name_of
        self._written = written
        self._batch = max(1, min(batch, BATCH_PAGES, CALL_BYTES // layout.extent_bytes))
        self._trailers = HostBuffer(2 * BATCH_PAGES * TRAILER_BYTES, "off", TRAILER_BYTES, setting="pool trailers")
        self._puts, self._gets = 0, BATCH_PAGES * TRAILER_BYTES  # bytes of it
        self._checks = Workers(_CHECKERS, "gdscache-pool-checks")

    @property
    def buffer(self) -> tuple[int, int]:
        """Address and bytes of the memory of the trailers."""
        return self._trailers.address, self._trailers.nbytes

    def describe(self) -> str:
        return "mooncake"

    def close(self) -> None:
        """Nothing is under way any more."""
        self._checks.shutdown()
        self._trailers.close()

    def transfer(
        self, op: Op, slots: Int64Array, ends: Sequence[tuple[Places, Int64Array]], span: tuple[int, int] | None = None
    ) -> PoolPages:
        """Start I/O of whole extents between slots and memory of the host; see `Files.transfer`."""
        io = PoolPages(len(slots), self._layout.n_layers)
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
        left, taking = set(range(len(slots))), threading.Lock()

        def end(rows: Sequence[int], error: StorageError | None, cause: str) -> None:
            with taking:  # checks of one call run beside each other, and may be broken off
                mine = [row for row in rows if row in left]
                left.difference_update(mine)
            if not mine:
                return
            self.counts[cause] += len(mine)
            if error is None and op is Op.WRITE:
                self._written([slots[row] for row in mine])
            io.finish([some[row] for row in mine], error)

        def broke_off(rows: Sequence[int]) -> None:
            end(rows, _failed("a call broke off", "see the log"), "failed")

        def work(client: Client) -> None:
            with contextlib.ExitStack() as on_failure:
                on_failure.callback(broke_off, range(len(slots)))
                if op is Op.WRITE:
                    self._put(client, slots, places, end)
                    return
                came = self._get(client, slots, places, end)
                share = -(-len(came) // _CHECKERS) or 1
                for part in (came[at : at + share] for at in range(0, len(came), share)):
                    check = functools.partial(self._check, slots, places, part, io.sums[some.start :], end)
                    self._checks.submit(check, functools.partial(broke_off, [row for row, _ in part]))
                on_failure.pop_all()

        def refused() -> None:
            end(range(len(slots)), _failed(CODES[NO_MASTER], "", errno.EHOSTUNREACH), "refused")

        self._lines.begin("puts" if op is Op.WRITE else "gets", work, refused)

    def _put(self, client: Client, slots: list[int], places: list[int], end: _End) -> None:
        extent, view = self._layout.extent_bytes, self._trailers.view
        pages, objects = [self._page(slot) for slot in slots], []
        for row, (slot, page) in enumerate(zip(slots, pages, strict=True)):
            at = self._puts + row * TRAILER_BYTES
            view[at : at + TRAILER_BYTES] = trailer(page, self._layout.page_bytes, self.sums[slot])
            objects.append([(places[row], extent), (self._trailers.address + at, TRAILER_BYTES)])
        names, rows, pause = [self._name_of(page) for page in pages], list(range(len(slots))), FULL_S
        until = time.monotonic() + FULL_LONGEST_S
        codes = client.exist(names)  # a put of what exists is done at once, and changes nothing
        self._lines.answered(codes)
        end([row for row, code in zip(rows, codes, strict=True) if code == 1], None, "existed")
        rows = [row for row, code in zip(rows, codes, strict=True) if code != 1]
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

    def _get(self, client: Client, slots: list[int], places: list[int], end: _End) -> list[tuple[int, bytes]]:
        """Rows whose bytes came, with the trailers behind them; ends the others."""
        extent, base = self._layout.extent_bytes, self._trailers.address + self._gets
        objects = [[(place, extent), (base + row * TRAILER_BYTES, TRAILER_BYTES)] for row, place in enumerate(places)]
        codes = client.get([self._name_of(self._page(slot)) for slot in slots], objects)
        self._lines.answered(codes)
        if len(codes) != len(slots):
            raise _failed(f"{len(codes)} answers came for {len(slots)} objects", "see the package of the pool's client")
        came, misfits = [], []
        for row, code in enumerate(codes):
            if code == MISFIT:
                misfits.append(row)
            elif code == extent + TRAILER_BYTES:
                at = self._gets + row * TRAILER_BYTES
                came.append((row, bytes(self._trailers.view[at : at + TRAILER_BYTES])))
            else:
                end([row], _error(code), "not_got")
        if misfits:
            self._spoiled([slots[row] for row in misfits], misfits, end)
        return came

    def _check(
        self,
        slots: list[int],
        places: list[int],
        came: list[tuple[int, bytes]],
        sums: Checksums,
        end: _End,
    ) -> None:
        """Compare what came with its trailers."""
        layout, good, bad = self._layout, list[int](), list[int]()
        found = layer_sums(np.array([places[row] for row, _ in came], np.uint64), integers(layout.layer_bounds))
        for (row, raw), of_bytes in zip(came, found, strict=True):
            page = self._page(slots[row])
            stored = stored_sums(raw, page, layout.page_bytes, layout.n_layers)
            whole = stored is not None and np.array_equal(unbound(stored[None], [page.key])[0], of_bytes)
            (good if whole else bad).append(row)
            sums[row] = of_bytes
        end(good, None, "got")  # together: each end wakes threads that the next check would wait for
        if bad:
            self._spoiled([slots[row] for row in bad], bad, end)

    def _spoiled(self, slots: list[int], rows: Sequence[int], end: _End) -> None:
        """Objects that are not the pages in these slots go, so that the pages can be put."""
        names = [self._name_of(self._page(slot)) for slot in slots]
        error = PageBytesError("the shared pool: a page is not what was stored", "see who writes to the pool")
        end(rows, error, "spoiled")
        self._lines.begin("asks", lambda client: self._lines.answered(client.remove(names)))

    def _page(self, slot: int) -> Page:
        page = self.pages[slot]
        assert page is not None, "a slot without a page"
        return page


_End = Callable[[Sequence[int], StorageError | None, str], None]


def _error(code: int) -> StorageError:
    if code == GONE:
        return PageGoneError(f"the shared pool: {CODES[code]}", "see how the pool evicts")
    return _failed(CODES.get(code, f"code {code}"), "see the master's log", _ERRNO.get(code, errno.EIO))


def _failed(cause: str, hint: str, code: int = errno.EIO) -> IOFailedError:
    return IOFailedError(f"the shared pool: {cause}", hint, code)


def _nobody() -> None:
    pass
