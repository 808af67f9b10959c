"""The engine's own paged KV tensors, and who has which block of them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import torch

from gdscache.commands.toy_engine.shape import ModelShape
from gdscache.commands.toy_engine.uploads import upload


class KVPool:
    """`planes[layer][plane]`, each (blocks, block_tokens, *row), and a block manager. One thread at a time.

    `rows[layer][plane]` are the same tensors as (blocks * block_tokens, *row).

    A block is held by as many requests as share it. Full pages that were published under their key stay, when nobody
    holds them, until their blocks are needed for something else: the page that was released first goes first, and of
    one request the last page before the first.
    """

    def __init__(
        self, shape: ModelShape, blocks: int, block_tokens: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.block_tokens, self.blocks = block_tokens, blocks
        self.planes = [
            [torch.zeros((blocks, block_tokens, *row), dtype=dtype, device=device) for row in shape.rows]
            for _ in range(shape.layers)
        ]
        self.rows = [[plane.flatten(0, 1) for plane in planes] for planes in self.planes]
        self._free = list(range(blocks - 1, -1, -1))
        self._holders = [0] * blocks
        self._pages: dict[bytes, tuple[int, ...]] = {}  # published
        self._key_of: dict[int, bytes] = {}
        self._idle: OrderedDict[bytes, None] = OrderedDict()  # published and held by nobody, next to go first

    @property
    def available(self) -> int:
        """Blocks that `take` could give."""
        return len(self._free) + sum(len(self._pages[key]) for key in self._idle)

    def places(self, blocks: Sequence[int]) -> torch.Tensor:
        """The rows that these blocks have, in their order, int64 on the device."""
        device = self.rows[0][0].device
        first = upload(blocks, device) * self.block_tokens
        return (first[:, None] + torch.arange(self.block_tokens, device=device)).flatten()

    def take(self, count: int) -> list[int] | None:
        """`count` blocks, or None and nothing when there are fewer."""
        if count > self.available:
            return None
        while len(self._free) < count:
            self._forget(next(iter(self._idle)))
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._holders[block] = 1
        return taken

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """The blocks of the longest run of published pages, now held by the caller too."""
        found: list[int] = []
        for key in keys:
            if key not in self._pages:
                break
            self._idle.pop(key, None)
            found += self._pages[key]
        for block in found:
            self._holders[block] += 1
        return found

    def publish(self, key: bytes, blocks: Sequence[int]) -> None:
        """A full page whose bytes are final and verified; others may find it. Nothing if there is one already."""
        if key not in self._pages:
            self._pages[key] = tuple(blocks)
            self._key_of.update(dict.fromkeys(blocks, key))

    def release(self, blocks: Sequence[int]) -> None:
        """The caller's hold on these blocks ends."""
        for block in reversed(blocks):
            self._holders[block] -= 1
            if self._holders[block]:
                continue
            key = self._key_of.get(block)
            if key is None:
                self._free.append(block)
            elif not any(self._holders[other] for other in self._pages[key]):
                self._idle[key] = None

    def forget(self) -> None:
        """Take back every published page: those that are held when they are released."""
        for key in list(self._pages):
            self._forget(key)

    def _forget(self, key: bytes) -> None:
        self._idle.pop(key, None)
        for block in self._pages.pop(key):
            del self._key_of[block]
            if not self._holders[block]:
                self._free.append(block)
