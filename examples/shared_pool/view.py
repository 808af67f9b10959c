"""A router's view of an engine's pages, from its KV events."""

from __future__ import annotations

from collections.abc import Sequence

from gdscache.events.base import BlockRemoved, BlockStored, KVEventBatch


class CacheView:
    """The pages of an engine by tier, as far as its events came. Not thread-safe.

    `lacking`: the number of the first missed batch, or None. Missed batches can be asked for again
    (`ZmqSubscriber.replay`); if they are not kept any more, `reset` begins anew. Until then the view may be wrong,
    which only makes a router's choice worse.
    """

    def __init__(self) -> None:
        self.lacking: int | None = None
        self.next: int | None = None  # the next batch's number; None before the first batch
        self._pages: dict[bytes, set[str]] = {}

    def __len__(self) -> int:
        return len(self._pages)

    def apply(self, batch: KVEventBatch) -> bool:
        """Apply a batch. False if it is not the next one: an old one, or one after a gap."""
        if self.next is not None and batch.seq != self.next:
            if batch.seq > self.next:
                self.lacking = self.next
            return False
        self.next, self.lacking = batch.seq + 1, None
        for event in batch.events:
            if isinstance(event, BlockStored):
                for key in event.block_hashes:
                    self._pages.setdefault(key, set()).add(event.ownership)
            elif isinstance(event, BlockRemoved):
                for key in event.block_hashes:
                    tiers = self._pages.get(key, set())
                    tiers.discard(event.ownership)
                    if not tiers:
                        self._pages.pop(key, None)
            else:
                self._pages.clear()
        return True

    def reset(self, following: int | None = None) -> None:
        """Forget everything; `following` is the number of the next batch to apply."""
        self._pages.clear()
        self.next, self.lacking = following, None

    def prefix(self, keys: Sequence[bytes], tiers: Sequence[str] = ()) -> int:
        """The number of the first pages on any tier, or on one of `tiers`."""
        wanted = set(tiers)
        for n, key in enumerate(keys):
            found = self._pages.get(key, set())
            if not found or (wanted and found.isdisjoint(wanted)):
                return n
        return len(keys)
