"""What an engine has, by its KV events: a router's view of it."""

from __future__ import annotations

from collections.abc import Sequence

from gdscache.events.base import BlockRemoved, BlockStored, KVEventBatch


class CacheView:
    """Which pages an engine has on which tiers, as far as its events were heard. Not thread-safe.

    `lacking`: the number of the first batch that was missed, None while none was. What was lost is asked for again
    (`ZmqSubscriber.replay`); where it is kept no more, `reset` begins anew: until then the view may say too much or too
    little, which costs a router a worse choice, and nothing else.
    """

    def __init__(self) -> None:
        self.lacking: int | None = None
        self.next: int | None = None  # the number that comes next; None before the first batch
        self._pages: dict[bytes, set[str]] = {}

    def __len__(self) -> int:
        """Pages that are on any tier."""
        return len(self._pages)

    def apply(self, batch: KVEventBatch) -> bool:
        """Take a batch in; False where it is none of what comes next: an old one, or one behind a gap."""
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
        """Forget everything; `following` is the number of the next batch that counts."""
        self._pages.clear()
        self.next, self.lacking = following, None

    def prefix(self, keys: Sequence[bytes], tiers: Sequence[str] = ()) -> int:
        """How many of the first pages it has, on any tier or on one of `tiers`."""
        wanted = set(tiers)
        for n, key in enumerate(keys):
            found = self._pages.get(key, set())
            if not found or (wanted and found.isdisjoint(wanted)):
                return n
        return len(keys)
