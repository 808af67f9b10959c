"""Our lengths of hits beside those that vLLM's own managers and coordinators find, as JSON: run in its environment.

    vllm_lengths.py CASES

`CASES`: random presences of pages for each set of groups.
"""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Sequence
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.coordinator import (
    ExternalCachedBlockPool,
    MooncakeStoreCoordinator,
)
from vllm.v1.core.kv_cache_coordinator import get_kv_cache_coordinator
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)

from gdscache.groups.base import Group, alignment, lengths, needed
from gdscache.integrations.vllm.cache_groups import groups_of

TOKENS = 96


def full(block: int) -> Any:
    return FullAttentionSpec(block_size=block, num_kv_heads=1, head_size=8, dtype=torch.float16)


def window(block: int, span: int) -> Any:
    return SlidingWindowSpec(block_size=block, num_kv_heads=1, head_size=8, dtype=torch.float16, sliding_window=span)


def chunk(block: int, span: int) -> Any:
    return ChunkedLocalAttentionSpec(
        block_size=block, num_kv_heads=1, head_size=8, dtype=torch.float16, attention_chunk_size=span
    )


def state(block: int) -> Any:
    return MambaSpec(block_size=block, shapes=((4,),), dtypes=(torch.float32,), mamba_cache_mode="align")


MODELS = {
    "qwen 3 next": [state(8), state(8), state(8), full(8)],
    "states, windows and all": [state(8), window(4, 7), full(4)],
    "gemma 3": [window(4, 8), window(4, 8), full(4)],
    "gemma 4": [window(8, 9), window(8, 9), full(4)],
    "gpt-oss": [window(4, 4), full(4)],
    "llama 4": [chunk(4, 16), chunk(4, 16), full(4)],
    "mistral": [window(4, 11)],
    "windows of two sizes": [window(4, 6), window(4, 17)],
    "windows, chunks and all": [full(4), window(4, 7), chunk(4, 8)],
    "smaller windows": [full(8), window(4, 13), window(2, 2)],
    "pages that do not divide each other": [full(4), window(6, 15)],
    "chunks alone": [chunk(4, 12)],
}


def group_of(cache: Any, number: int) -> Group:
    """As the connector reads it, where there is more than one group or a window."""
    spec = cache.kv_cache_groups[number].kv_cache_spec
    for about in groups_of(cache)[number : number + 1]:
        if "window" in about:
            return Group(str(number), (number,), spec.block_size, "window", spec.sliding_window)
        if "state" in about:
            return Group(str(number), (number,), spec.block_size, "state")
        if "chunk" in about:
            return Group(str(number), (number,), spec.block_size, "chunk", spec.attention_chunk_size)
    return Group(str(number), (number,), spec.block_size)


def presence(random_: random.Random, groups: Sequence[Group]) -> list[set[int]]:
    """The pages of each group that are there: of some density, or what a few requests have left."""
    if random_.random() < 0.5:
        share = random_.choice([0.3, 0.6, 0.9, 0.97])
        return [{n for n in range(TOKENS // group.page_tokens) if random_.random() < share} for group in groups]
    align, found = alignment(groups), [set[int]() for _ in groups]
    for _ in range(random_.randint(1, 4)):
        for there, some in zip(found, needed(groups, align * random_.randint(1, TOKENS // align)), strict=True):
            there.update(some)
    for there in found:
        there.difference_update(random_.sample(sorted(there), min(len(there), random_.choice([0, 0, 1, 2]))))
    return found


def compare(name: str, specs: Sequence[Any], cases: int) -> list[str]:
    cache = KVCacheConfig(
        num_blocks=64,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec([f"layer.{number}"], spec) for number, spec in enumerate(specs)],
    )
    groups = [group_of(cache, number) for number in range(len(specs))]
    align, hashed = alignment(groups), math.gcd(*(group.page_tokens for group in groups))
    hashes = [end.to_bytes(32, "big") for end in range(hashed, TOKENS + 1, hashed)]
    store = MooncakeStoreCoordinator(cache.kv_cache_groups, align, hashed)
    own = get_kv_cache_coordinator(cache, TOKENS, TOKENS, False, True, False, 1, 1, align, hashed)
    found = []
    for length in range(align, TOKENS + 1, align):
        for manager, group in zip(own.single_type_managers, groups, strict=True):
            skipped = manager.get_num_skipped_tokens(length) // group.page_tokens
            if skipped != group.first(length):
                found.append(f"{name}: at {length} vLLM's table of group {group.name} begins at {skipped}")
    for case in range(cases):
        random_ = random.Random(f"{name} {case}")
        there, most = presence(random_, groups), random_.randint(0, TOKENS)
        exists = {
            (g, hashes[(n + 1) * group.page_tokens // hashed - 1]) for g, group in enumerate(groups) for n in there[g]
        }
        pool: Any = ExternalCachedBlockPool(hashed, exists)
        for manager in own.single_type_managers:
            manager.block_pool = pool
        if hasattr(own, "block_pool"):
            own.block_pool = pool
        ours = next(lengths(groups, lambda g, a, b, there=there: bytes(n in there[g] for n in range(a, b)), most), 0)
        _, theirs = store.find_longest_cache_hit(hashes, most, pool)
        _, length, *_ = own.find_longest_cache_hit(hashes, most)
        if not ours == theirs == length:
            found.append(f"{name}, case {case}: {ours}, Mooncake's store {theirs}, vLLM {length}; {there} up to {most}")
        loads = [[n for n, load in enumerate(mask) if load] for mask in store.load_mask(hashes, ours)]
        if loads != (wanted := [list(some) for some in needed(groups, ours)]):
            found.append(f"{name}, case {case}: a hit of {ours} needs {wanted}, Mooncake's store loads {loads}")
    return found


if __name__ == "__main__":
    told = [line for name, specs in MODELS.items() for line in compare(name, specs, int(sys.argv[1]))]
    print("\n" + json.dumps({"models": len(MODELS), "found": told}))
