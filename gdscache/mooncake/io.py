"""Moves pages between memory and objects of a shared pool: a page is an object, its extent followed by a trailer.

The trailer names the page and has its checksums, bound to the page's key: any reader of the object can verify it. Pages
are put from and got into their own memory, without a copy.
"""

from __future__ import annotations

import errno
import itertools
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import xxhash

from gdscache.arrays import integers
from gdscache.cuda.host_memory import HostBuffer
from gdscache.errors import IOFailedError, PageBytesError, PageGoneError, StorageError, TierAnswerError
from gdscache.limits import KEY_BYTES
from gdscache.mooncake.calls import Lines
from gdscache.mooncake.client import CODES, DONE, GONE, MISFIT, NO_MASTER, NO_SPACE, MooncakeClient
from gdscache.native import layer_sums
from gdscache.pages.checksum import Checksums, bound, unbound
from gdscache.pages.keys import Page
from gdscache.pages.layout import PageLayout
from gdscache.runtime.threads import log_failure
from gdscache.storage.base import Descriptors, Memory, Transport, address_of

TRAILER_BYTES = 4096
_HEAD = struct.Struct(f"<8sII{KEY_BYTES}s{KEY_BYTES}sQ")  # magic, layers, page bytes, key, namespace, its own hash
_MAGIC = b"gdspage1"
MOST_LAYERS = (TRAILER_BYTES - _HEAD.size) // 8
BATCH_PAGES = 128
SIDE_BY_SIDE = 2  # puts at a time, and gets: bounds the memory and threads of hanging calls
FULL_S, FULL_LONGEST_S = 0.02, 0.5  # seconds until a put that finds the pool full tries again, and in all
FULL_AGAIN_S = 1.0  # after a put that waited in vain, others do not wait for this time
_ERRNO = {NO_SPACE: errno.ENOSPC, NO_MASTER: errno.EHOSTUNREACH}
_Pieces = list[tuple[int, int]]
_End = tuple[str, StorageError | None]  # a page's outcome, and its error
_Call = Callable[[range, list[int], int], list[_End]]  # slots, addresses of their pages, offset of the trailers


def trailer(page: Page, page_bytes: int, stored: Checksums) -> bytes:
    """The bytes behind a page's extent. `stored`: its checksums, uint64 (layers,), bound to its key."""
    sums = np.ascontiguousarray(stored, dtype="<u8").tobytes()
    own = xxhash.xxh3_64_intdigest(_HEAD.pack(_MAGIC, len(stored), page_bytes, page.key, page.namespace, 0) + sums)
    head = _HEAD.pack(_MAGIC, len(stored), page_bytes, page.key, page.namespace, own)
    return (head + sums).ljust(TRAILER_BYTES, b"\0")


def stored_sums(found: bytes, page: Page, page_bytes: int, layers: int) -> Checksums | None:
    """The checksums in a trailer, bound to the page's key; None if it is another page's, or damaged."""
    magic, count, nbytes, key, namespace, _ = _HEAD.unpack_from(found)
    if (magic, count, nbytes, key, namespace) != (_MAGIC, layers, page_bytes, page.key, page.namespace):
        return None
    sums = np.frombuffer(found, "<u8", layers, _HEAD.size).astype(np.uint64)
    return sums if trailer(page, page_bytes, sums) == found else None


def is_stored(found: bytes, page: Page, layout: PageLayout, sums: Checksums) -> bool:
    """Whether bytes with the checksums `sums` and this trailer are the page as it was put."""
    stored = stored_sums(found, page, layout.page_bytes, layout.n_layers)
    return stored is not None and np.array_equal(unbound(stored[None], [page.key])[0], sums)


class MooncakeFiles(Transport):
    """Slots of a tier as objects of the pool, in one file. `pages[slot]`: the page in a leased slot.

    `sums[slot]`: checksums, uint64 (slots, layers): expected ones of written slots, actual ones of read slots, which
    are compared with the trailer. `written(slots)` is called when pages are in the pool.
    """

    name = "mooncake"
    call_bytes = 32 << 20
    direct = True

    def __init__(
        self,
        layout: PageLayout,
        slots: int,
        lines: Lines,
        name_of: Callable[[Page], str],
        written: Callable[[Sequence[int]], None],
    ) -> None:
        super().__init__(2 * SIDE_BY_SIDE + 1)  # if all calls hang, one thread is left to refuse others
        self.pages: list[Page | None] = [None] * slots
        self.sums = np.zeros((slots, layout.n_layers), np.uint64)
        self.counts: Counter[str] = Counter()
        self._counting = threading.Lock()
        self._layout = layout
        self._lines = lines
        self._name_of = name_of
        self._written = written
        self._gave_up = 0.0  # the last time that a put waited for room in vain
        area = BATCH_PAGES * TRAILER_BYTES
        self._trailers = HostBuffer(self.threads * area, "off", TRAILER_BYTES, setting="pool trailers")
        # offsets of free areas for one call's trailers, enough for all threads
        self._areas: SimpleQueue[int] = SimpleQueue()
        for n in range(self.threads):
            self._areas.put(n * area)

    @property
    def buffer(self) -> tuple[int, int]:
        return self._trailers.address, self._trailers.nbytes

    def hand_over(self) -> Descriptors:
        return Descriptors((0,), max(1, len(self.pages)), self.threads, transport=self, sums=self.sums)

    def open(self, path: Path) -> int:
        return 0

    def flush(self, file: int) -> None:
        pass

    def close(self) -> None:
        self._trailers.close()

    def read(self, file: int, offset: int, memory: Memory) -> int:
        return self._move(self._get, offset, memory)

    def write(self, file: int, offset: int, memory: Memory) -> int:
        return self._move(self._put, offset, memory)

    def _move(self, call: _Call, offset: int, memory: Memory) -> int:
        """Move whole pages; returns the bytes of the pages before the first that failed, or raises its error if it is
        the first of all. The library then asks for each other page alone, and only a page that is moved alone is
        judged."""
        extent = self._layout.extent_bytes
        first, count, moved = offset // extent, memory.nbytes // extent, 0
        if not isinstance(memory, memoryview) or (first * extent, count * extent) != (offset, memory.nbytes):
            raise _failed("a part of an object, or memory of a device", "give the pages a CPU tier", errno.EINVAL)
        place, error = address_of(memory), None
        while moved < count and error is None:
            slots = range(first + moved, first + min(count, moved + BATCH_PAGES))
            ends = self._ends(call, slots, [place + (slot - first) * extent for slot in slots])
            good = list(itertools.takewhile(lambda end: end[1] is None, ends))
            moved += len(good)
            error = None if len(good) == len(ends) else ends[len(good)][1]
            with self._counting:
                self.counts.update(cause for cause, _ in (ends if count == 1 else good))
        if error is None or moved:
            return moved * extent
        if count == 1 and isinstance(error, PageBytesError):  # remove it, so that the page can be put again
            name = self._name_of(self._page(first))
            self._lines.begin(lambda client: self._lines.answered(client.remove([name])))
        raise error

    def _ends(self, call: _Call, slots: range, places: list[int]) -> list[_End]:
        area = self._areas.get()
        try:
            return call(slots, places, area)
        except IOFailedError as error:
            return [("refused", error)] * len(slots)
        except Exception as error:  # noqa: BLE001 - the client's library may raise any error
            log_failure(error)
            return [("failed", _failed("a call broke off", "see the log"))] * len(slots)
        finally:
            self._areas.put(area)

    def _objects(self, places: Sequence[int], area: int) -> list[_Pieces]:
        extent, trailers = self._layout.extent_bytes, self._trailers.address + area
        tails = range(trailers, trailers + len(places) * TRAILER_BYTES, TRAILER_BYTES)
        return [[(place, extent), (tail, TRAILER_BYTES)] for place, tail in zip(places, tails, strict=True)]

    def _put(self, slots: range, places: list[int], area: int) -> list[_End]:
        pages = [self._page(slot) for slot in slots]
        stored = bound(self.sums[slots.start : slots.stop], [page.key for page in pages])
        tails = b"".join(trailer(page, self._layout.page_bytes, sums) for page, sums in zip(pages, stored, strict=True))
        self._trailers.view[area : area + len(tails)] = tails
        names, objects, ends = [self._name_of(page) for page in pages], self._objects(places, area), dict[int, _End]()
        try:
            self._lines.call("puts", lambda client: self._put_all(client, names, objects, ends))
        finally:
            self._written([slots[n] for n, (_, error) in ends.items() if error is None])
        return [ends[n] for n in range(len(slots))]

    def _put_all(self, client: MooncakeClient, names: list[str], objects: list[_Pieces], ends: dict[int, _End]) -> None:
        begun, pause = time.monotonic(), FULL_S
        until = begun + (FULL_LONGEST_S if begun > self._gave_up + FULL_AGAIN_S else 0.0)
        codes = client.exist(names)  # putting an existing object is done at once, and changes nothing
        self._lines.answered(codes)
        ends.update((n, ("existed", None)) for n, code in enumerate(codes) if code == 1)
        while rows := [n for n in range(len(names)) if n not in ends]:
            codes = client.put([names[n] for n in rows], [objects[n] for n in rows])
            self._lines.answered(codes)
            over = time.monotonic() + pause > until or not self._lines.ready
            for n, code in zip(rows, codes, strict=True):
                if code == DONE:
                    ends[n], self._gave_up = ("put", None), 0.0
                elif code != NO_SPACE:
                    ends[n] = "not_put", _error(code)
                elif over:
                    ends[n] = "full", _failed(CODES[NO_SPACE], "add segments, or store less", errno.ENOSPC)
                    self._gave_up = time.monotonic()
            if len(ends) < len(names):
                with self._counting:
                    self.counts["waits"] += 1
                time.sleep(pause)
                pause *= 2

    def _get(self, slots: range, places: list[int], area: int) -> list[_End]:
        layout, pages = self._layout, [self._page(slot) for slot in slots]
        names, objects = [self._name_of(page) for page in pages], self._objects(places, area)
        codes = self._lines.call("gets", lambda client: client.get(names, objects))
        self._lines.answered(codes)
        if len(codes) != len(slots):
            raise TierAnswerError(
                f"{len(codes)} answers came for {len(slots)} objects", "see the package of the pool's client"
            )
        came = [n for n, code in enumerate(codes) if code == layout.extent_bytes + TRAILER_BYTES]
        sums = layer_sums(np.array([places[n] for n in came], np.uint64), integers(layout.layer_bounds))
        found, ends = dict(zip(came, sums, strict=True)), list[_End]()
        for n, code in enumerate(codes):
            tail = bytes(self._trailers.view[area + n * TRAILER_BYTES :][:TRAILER_BYTES])
            if n in found and is_stored(tail, pages[n], layout, found[n]):
                self.sums[slots[n]] = found[n]
                ends.append(("got", None))
            elif n in found or code == MISFIT:
                error = PageBytesError(
                    "the shared pool: a page's bytes differ from the stored ones",
                    "check the other programs that write to the pool",
                )
                ends.append(("spoiled", error))
            else:
                ends.append(("not_got", _error(code)))
        return ends

    def _page(self, slot: int) -> Page:
        page = self.pages[slot]
        assert page is not None, "a slot without a page"
        return page


def _error(code: int) -> StorageError:
    if code == GONE:
        return PageGoneError(f"the shared pool: {CODES[code]}", "see how the pool evicts")
    return _failed(CODES.get(code, f"code {code}"), "see the master's log", _ERRNO.get(code, errno.EIO))


def _failed(cause: str, hint: str, code: int = errno.EIO) -> IOFailedError:
    return IOFailedError(f"the shared pool: {cause}", hint, code)
