"""KV events in vLLM's names, which vLLM publishes with those of its own cache (`take_events` of a connector).

`ownership` is left out: Dynamo's index ignores events that have one.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterator, Sequence
from typing import Any

from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, maybe_convert_block_hash, to_event_extra_keys
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window

from gdscache.engine.engine import CacheEngine
from gdscache.engine.hybrid import HybridEngine
from gdscache.events.names import BlockName


class VllmEvents:
    """Changes of the tiers of an engine with a section `events`. `cache`: a `KVCacheConfig`."""

    def __init__(self, engine: CacheEngine | HybridEngine, cache: Any) -> None:
        specs = [group.kv_cache_spec for group in cache.kv_cache_groups]
        self._about = [(get_kv_cache_spec_kind(spec).value, get_kv_cache_spec_sliding_window(spec)) for spec in specs]
        self._sizes = [int(spec.block_size) for spec in specs]
        self._hashed = min(self._sizes) if len(specs) == 1 else int(cache.hash_block_size)
        pools = engine.pools if isinstance(engine, HybridEngine) else ()
        engines = engine.engines if isinstance(engine, HybridEngine) else (engine,)
        self._events = [one.named_events()[0] for one in engines]
        self._of_group = {g: events for pool, events in zip(pools, self._events, strict=False) for g in pool.groups}

    def name(self, request: Any, group: int, first: int, keys: Sequence[bytes]) -> None:
        """Give vLLM's names to the keys of a request's blocks from `first` on, in a group."""
        size, hashes = self._sizes[group], request.block_hashes
        step = size // self._hashed
        has_extra = bool(request.cache_salt or request.mm_features)
        names = []
        for number in range(first, first + len(keys)):
            begin, end = number * size, (number + 1) * size
            extra = generate_block_hash_extra_keys(request, begin, end, 0)[0] if has_extra else None
            parent = bytes(hashes[number * step - 1]) if number else None
            tokens = array("I", request.all_token_ids[begin:end])
            names.append(BlockName(bytes(hashes[(number + 1) * step - 1]), parent, tokens, group, extra))
        self._of_group.get(group, self._events[0]).name(keys, names)

    def forget_all(self) -> None:
        """vLLM's hashes stay with new weights, and the keys do not."""
        for events in self._events:
            events.forget_all()

    def take(self) -> Iterator[KVCacheEvent]:
        for stored, medium, blocks in itertools.chain(*(events.take() for events in self._events)):
            hashes, group = [maybe_convert_block_hash(block.digest) for block in blocks], blocks[0].group
            if not stored:
                yield BlockRemoved(block_hashes=hashes, medium=medium, group_idx=group, locality="LOCAL")
                continue
            kind, window = self._about[group]
            parent = blocks[0].parent
            extra = [block.extra for block in blocks]
            yield BlockStored(
                block_hashes=hashes,
                parent_block_hash=None if parent is None else maybe_convert_block_hash(parent),
                token_ids=[token for block in blocks for token in block.tokens],
                block_size=self._sizes[group],
                lora_id=None,
                medium=medium,
                lora_name=None,
                extra_keys=to_event_extra_keys(extra) if any(extra) else None,
                group_idx=group,
                kv_cache_spec_kind=kind,
                kv_cache_spec_sliding_window=window,
                locality="LOCAL",
            )
