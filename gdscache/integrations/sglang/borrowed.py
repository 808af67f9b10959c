"""Pages between a host pool of SGLang's and another rank's SSD tier, if both ranks keep the same bytes (MLA)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gdscache.errors import GdsCacheError
from gdscache.integrations.sglang.pages import digest, parent_of
from gdscache.moves import PageStatus
from gdscache.ranks.borrower import Borrower
from gdscache.runtime.threads import log_failure


class BorrowedPages:
    """`HostPages` for a rank that reads the pages which the first rank has stored. Thread-safe.

    Each rank sees a change of weights at its own time. Pages are found once both have seen equally many.
    """

    def __init__(self, borrower: Borrower, page_tokens: int) -> None:
        self._borrower, self._page_tokens = borrower, page_tokens
        self._epoch = 0

    def exists(self, keys: Sequence[str], before: Sequence[str] = ()) -> int:
        try:
            return self._borrower.find([digest(key) for key in keys], parent_of(before), self._epoch)
        except GdsCacheError as error:
            log_failure(error)
            return 0

    def get(self, keys: Sequence[str], slots: Sequence[int], before: Sequence[str] = ()) -> list[bool]:
        blocks = (np.asarray(slots, np.int64) // self._page_tokens).reshape(-1, 1)
        came: list[PageStatus] = []
        try:
            came = self._borrower.load([digest(key) for key in keys], parent_of(before), self._epoch, blocks)
        except GdsCacheError as error:
            log_failure(error)
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
