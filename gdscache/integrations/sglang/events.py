"""KV events in SGLang's names, published with those of its own tree.

A linker gets page hashes only. So a block's tokens and parent come from SGLang's own events, in either order. Pages
with a salt or an adapter have other hashes in events than in storage, and get no events.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from sglang.srt.disaggregation.kv_events import BlockRemoved, BlockStored, StorageMedium
from sglang.srt.mem_cache.utils import hash_str_to_int64

from gdscache.engine.engine import CacheEngine
from gdscache.events.names import EXPECTED, BlockName

_MEDIA = {"CPU": StorageMedium.CPU, "STORAGE": StorageMedium.DISK}


class SglangEvents:
    """Changes of the tiers of an engine with a section `events`. Called by SGLang's scheduler, which is one thread."""

    def __init__(self, engine: CacheEngine, page_tokens: int) -> None:
        self._size = page_tokens
        self._blocks: OrderedDict[int, BlockName] = OrderedDict()  # of SGLang's own events
        self._keys: OrderedDict[int, bytes] = OrderedDict()  # page keys of lookups and offloads
        self._events, self.close = engine.named_events()

    def asked(self, hashes: Sequence[str], keys: Sequence[bytes]) -> None:
        """SGLang has named pages by their hashes; `keys` are ours."""
        self._match([(hash_str_to_int64(one), key) for one, key in zip(hashes, keys, strict=True)], [])

    def follow(self, tree: Any) -> None:
        """The linker's tree publishes them."""
        tree.take_events = self._with_ours(tree.take_events)

    def forget_all(self) -> None:
        """SGLang's hashes stay with new weights, and the keys do not."""
        self._keys.clear()
        self._events.forget_all()

    def _with_ours(self, take: Callable[[], list[Any]]) -> Callable[[], list[Any]]:
        """`take_events` of a tree, with our events appended."""

        def taken() -> list[Any]:
            events = take()
            self._match([], [name for event in events if isinstance(event, BlockStored) for name in self._named(event)])
            return [*events, *map(self._event, self._events.take())]

        return taken

    def _named(self, event: Any) -> list[BlockName]:
        size, tokens = self._size, event.token_ids
        if event.block_size != size or len(tokens) != size * len(event.block_hashes) or isinstance(tokens[0], tuple):
            return []
        parents = [event.parent_block_hash, *event.block_hashes]
        return [
            BlockName(one, parent, array("I", tokens[n * size : (n + 1) * size]))
            for n, (one, parent) in enumerate(zip(event.block_hashes, parents, strict=False))
        ]

    def _match(self, keys: Sequence[tuple[int, bytes]], blocks: Sequence[BlockName]) -> None:
        """Remember new keys and blocks, and name the pages that have both."""
        self._keys.update(keys)
        self._blocks.update((block.digest, block) for block in blocks)
        both = [one for one in [*dict(keys), *(block.digest for block in blocks)] if one in self._keys]
        both = [one for one in dict.fromkeys(both) if one in self._blocks]
        if both:
            self._events.name([self._keys[one] for one in both], [self._blocks[one] for one in both])
        for known in (self._keys, self._blocks):
            while len(known) > EXPECTED:
                known.popitem(last=False)

    def _event(self, told: Any) -> Any:
        medium, blocks = _MEDIA[told.medium].value, told.blocks
        hashes = [block.digest for block in blocks]
        if not told.stored:
            return BlockRemoved(block_hashes=hashes, medium=medium)
        return BlockStored(
            block_hashes=hashes,
            parent_block_hash=blocks[0].parent,
            token_ids=[token for block in blocks for token in block.tokens],
            block_size=self._size,
            lora_id=None,
            medium=medium,
        )
