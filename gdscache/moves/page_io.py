"""Pages in flight between the SSD and memory: neighbours that lie side by side at both ends are one request.

A request for sixteen pages costs about as much as one for a page, in Python and in system calls.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from gdscache.arrays import Int64Array
from gdscache.errors import DeadlineError, IOFailedError, StorageError
from gdscache.runtime.threads import failure_of, log_failure
from gdscache.storage.base import IORequest, Submission

_REFUSED = "see the traceback in the log"
_SLOW = "the device is slow or hangs; what is left keeps its memory until it ends"


def stretches(here: Int64Array, there: Int64Array, most: int, period: int) -> tuple[Int64Array, Int64Array]:
    """Cut pages into runs in which slots follow on at both ends, of `most` pages at most: their first pages, and how
    many each has.

    `here` and `there` have the slots of the pages; all are int64, of shape (pages,) or (runs,). No run crosses a
    multiple of `period` slots `here`: another file begins there.
    """
    pages = np.arange(len(here), dtype=np.int64)
    begins = np.ones(len(here), dtype=bool)
    if most > 1:
        begins[1:] = (np.diff(here) != 1) | (np.diff(there) != 1) | (here[1:] % period == 0)
        begun = pages[begins]
        begins |= (pages - begun[np.cumsum(begins) - 1]) % most == 0
    firsts = pages[begins]
    return firsts, np.diff(firsts, append=len(here))


class PageIO:
    """What `Submission` is to requests, to pages: each is answered for itself.

    Each request is for `counts` pages from `firsts` on; together they are all pages, in order. Where a request of
    several pages fails, its pages are tried one by one (`single` makes the request for one): a bad sector must not cost
    its neighbours. One thread consumes it.
    """

    def __init__(
        self,
        submit: Callable[[Sequence[IORequest]], Submission],
        requests: Sequence[IORequest],
        firsts: Int64Array,
        counts: Int64Array,
        single: Callable[[int], IORequest],
    ) -> None:
        self._submit = submit
        self._firsts = firsts
        self._counts = counts
        self._count = int(counts.sum())
        self._largest = int(counts.max(initial=1))
        self._single = single
        self._again: list[int] = []
        self._second: Submission | None = None
        self._told: Callable[[], None] = lambda: None
        self._seen = [0, 0]  # ends of both that were taken
        self._failed: list[int] = []
        self._first = submit(requests)

    def follow(self, told: Callable[[], None]) -> None:
        """Call `told()` whenever there may be something to `take`, in any thread."""
        self._told = told
        self._first.on_end(lambda number: told())

    def take(self) -> Iterator[tuple[Sequence[int], StorageError | None]]:
        """`(pages, their error or None)` of those that have ended since it was last asked for; never waits."""
        good, bad, self._seen[0] = self._first.since(self._seen[0])
        if good:
            yield self._pages(good), None
        for number, error in bad:
            pages = self._run(number)
            if len(pages) > 1:
                self._failed.extend(pages)
            else:
                yield pages, error
        if self._failed and self._second is None and not self._first.pending:
            self._again, self._failed = self._failed, []
            refusal = failure_of(self._try_again)
            if refusal is not None:  # whoever waits for these pages must hear of it
                log_failure(refusal)
                refused, self._again = self._again, []
                number = getattr(refusal, "errno", None) or errno.EIO
                yield refused, IOFailedError(f"the transport takes no pages again: {refusal}", _REFUSED, number)
        if self._second is not None:
            good, bad, self._seen[1] = self._second.since(self._seen[1])
            for number in good:
                yield [self._again[number]], None
            for number, error in bad:
                yield [self._again[number]], error

    def _try_again(self) -> None:
        self._second = self._submit([self._single(page) for page in self._again])
        self._second.on_end(lambda number: self._told())

    def _run(self, number: int) -> range:
        """The pages of a request."""
        first = int(self._firsts[number])
        return range(first, first + int(self._counts[number]))

    def _pages(self, numbers: Sequence[int]) -> Sequence[int]:
        """The pages of requests."""
        if self._largest == 1:
            return numbers
        return [page for number in numbers for page in self._run(number)]

    def wait(self, deadline: float | None = None) -> list[StorageError | None]:
        """Wait for all pages; the error or None of each, in their order. In place of `follow` and `take`.

        Raises `DeadlineError` when pages are left at `deadline` (`time.monotonic()` seconds).
        """
        ended: dict[int, StorageError | None] = {}
        told = threading.Event()
        self.follow(told.set)
        while len(ended) < self._count:
            ended |= {page: error for pages, error in self.take() for page in pages}
            left = None if deadline is None else deadline - time.monotonic()
            if len(ended) < self._count and not told.wait(left if left is None else max(0.0, left)):
                raise DeadlineError(f"{self._count - len(ended)} of {self._count} pages have not ended", _SLOW)
            told.clear()
        return [ended[page] for page in range(self._count)]

    def on_end(self, callback: Callable[[int], None]) -> None:
        """Call `callback(page)` once for each page, when nothing touches its memory any more; see `Submission.on_end`.

        Nobody consumes completions any more.
        """
        second, again = self._second, set(self._again)

        def run_ended(number: int) -> None:
            for page in self._run(number):
                if page not in again:
                    callback(page)

        self._first.on_end(run_ended)
        if second is not None:
            second.on_end(lambda number: callback(self._again[number]))
