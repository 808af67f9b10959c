"""SGLang's own radix tree over the pools of hybrid models on a CPU, with our linker below it.

Runs in SGLang's environment; the tests start it (`sglang_case.py`). Requests are SGLang's own, and what it does with
one is SGLang's own: matching, locks, loads, which states it tracks, checkpoints and the end. The forward pass alone is
made up: it asks the pools for each layer, checks what is there, and writes bytes that follow from all tokens before.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateDType, Mamba2StateShape
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req, ScheduleBatch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InitLoadBackParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.common import checkpoint_kv_cache, release_kv_cache
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, HybridReqToTokenPool, ReqToTokenPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_cache.linker_factory import create_unified_cache_linker
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.sampling.sampling_params import SamplingParams

from tests.engines import sglang_rig

PAGE, TOKENS, CHUNK = sglang_rig.PAGE, 512, 32  # CHUNK: tokens of a prompt that are computed at once
WINDOW = 6  # tokens before one that it attends to: part of a second page
STATE_TOKENS = 8  # a state may be kept where a multiple of so many tokens was computed
LAYERS = {"kv": [1, 4], "swa": [0, 2, 3], "mamba": [0, 3]}  # of the model's five, those of each pool
STATES, ROWS = 40, 8
COMPONENTS = {"swa": ["FULL", "SWA"], "mamba": ["FULL", "MAMBA"], "all": ["FULL", "SWA", "MAMBA"]}
prompt, until = sglang_rig.prompt, sglang_rig.until


class HybridRig(sglang_rig.Linked):
    """A tree over a hybrid model's pools, and our linker below it. `kind`: of `COMPONENTS`."""

    def __init__(
        self,
        folder: Path,
        kind: str,
        options: dict[str, Any] | None = None,
        *,
        group: Any = None,
        ranks: int = 1,
        **changes: Any,
    ) -> None:
        """`group`: of the `ranks` of the model, which has two heads of keys."""
        config = {"config": sections(folder, **changes), "ssd_wait": 10.0, **(options or {})}
        linker = {**sglang_rig.LINKER, "linker_extra_config": config}
        self.args = sglang_rig.server_args(
            folder,
            {"num_key_value_heads": 2},
            tp_size=ranks,
            enable_unified_cache_external_linker=True,
            unified_cache_external_linker_backend="dynamic",
            unified_cache_external_linker_config=linker,
        )
        self.args._mamba_cache_chunk_size = STATE_TOKENS
        self.params = params(COMPONENTS[kind], TOKENS, max(1, 2 // ranks), 32, WINDOW, group)
        self.rows, self.slots = self.params.req_to_token_pool, self.params.token_to_kv_pool_allocator
        self.windowed = "SWA" in COMPONENTS[kind]
        self.pool: Any = self.slots.get_kvcache()
        self.tree = UnifiedRadixCache(self.params)
        self.linker: Any = create_unified_cache_linker(
            self.args, self.params, backend="dynamic", config=linker, components=set(self.tree.components)
        )
        self.tree.init_cache_linker(self.linker)
        self.pool.register_layer_transfer_counter(self.linker.layer_done_counter)
        self.states = getattr(self.rows, "mamba_pool", None)
        self._number = 0

    def request(self, tokens: Sequence[int], rid: str | None = None) -> Req:
        """One that is considered: what the tree has of it on the device, and what we have behind that, is known."""
        self._number += 1
        found = Req(rid or f"r{self._number}", "", array("q", tokens), SamplingParams(max_new_tokens=1))
        found.init_next_round_input(self.tree)
        return found

    def serve(self, tokens: Sequence[int], chunk: int = CHUNK) -> tuple[int, int]:
        """A request from its begin to its end: (tokens on the device, tokens loaded). Checks what it begins with."""
        request = self.request(tokens)
        there, loaded = request.prefix_len, self.load(request)
        self.finish(request, tokens, chunk)
        return there, loaded

    def load(self, request: Req) -> int:
        """Its turn has come: what is locked and queued. The tokens that are loaded."""
        request.lock, loaded = self.tree.lock(request.last_node), 0
        if request.host_hit_length:
            about = InitLoadBackParams(
                best_match_node=request.best_match_node, host_hit_length=request.host_hit_length, req=request
            )
            loaded, request.last_node = self.tree.init_load_back(about)
            request.prefix_len += loaded
        return loaded

    def finish(self, request: Req, tokens: Sequence[int], chunk: int = CHUNK) -> None:
        """Compute it, chunk by chunk, to its end."""
        while request.prefix_len < len(tokens):
            request.extend_end = min(request.prefix_len + chunk, len(tokens))
            self._compute(request, tokens)
            if request.extend_end < len(tokens):
                checkpoint_kv_cache(request, self.tree)
            else:
                request.prefix_len = len(tokens)
        request.finished_reason = FINISH_LENGTH(length=1)
        request.kv.kv_committed_len = len(tokens)
        release_kv_cache(request, self.tree, checkpoint=True)
        self.poll()

    def abort(self, request: Req) -> None:
        """It goes before its load has begun."""
        tail = self.tree.linker.private_load_indices.get(request.rid)
        self.tree.linker.release_request(request.rid)
        if tail is not None:  # nothing was cached, or there was no room
            self.slots.free(tail)
        self.tree.unlock(request.lock)
        self.leave(request)

    def leave(self, request: Req) -> None:
        """It goes before its turn has come."""
        if self.states is not None and request.kv.holds_mamba:
            self.rows.mamba_allocator.free(request.kv.mamba_pool_idx.unsqueeze(0))

    def room(self) -> list[int]:
        """Free slots of each pool."""
        full = self.slots.full_available_size() if self.windowed else self.slots.available_size()
        found = [full, self.slots.swa_available_size() if self.windowed else 0]
        return [*found, *([self.rows.mamba_allocator.available_size()] if self.states is not None else [])]

    def _compute(self, request: Req, tokens: Sequence[int]) -> None:
        """A forward pass over tokens `prefix_len ... extend_end-1`."""
        begin, end = request.prefix_len, request.extend_end
        path = self.tree.prefix_device_indices(request) if not request.kv.holds_kv else None
        if self.states is not None:
            until(self._make_room_for_states, "states of the device can be evicted")
        self.rows.alloc([request])
        row = self.rows.req_to_token[request.kv.req_pool_idx]
        if path is not None:
            row[:begin] = path.to(row.dtype)
        row[begin:end] = self._allocate(end - begin).to(row.dtype)
        request.kv.kv_allocated_len = request.kv.kv_committed_len = end
        tracked = self._tracked(request) if self.states is not None and self.tree.enable_mamba_extra_buffer else None
        index = self.tree.ready_to_load_host_cache()
        self.linker.layer_done_counter.set_consumer(index)
        if self.states is not None:
            self._begin_state(request)
        for layer in range(5):
            if layer in LAYERS["kv"] or (self.windowed and layer in LAYERS["swa"]):
                self._attend(layer, tokens, row.long(), begin, end)
            if self.states is not None and layer in LAYERS["mamba"]:
                self._recur(layer, tokens, request, begin, end, tracked)
        assert self.tree.finish_external_linker_loads([request]) == []

    def _attend(self, layer: int, tokens: Sequence[int], row: torch.Tensor, begin: int, end: int) -> None:
        first = 0
        slots = row
        buffers = self.pool.get_kv_buffer(layer)
        if self.windowed and layer in LAYERS["swa"]:
            first = max(0, begin - WINDOW)
            slots = self.slots.translate_loc_from_full_to_swa(row)
            assert (slots[first:end] > 0).all(), "a token of the window has no slot"
        for part, buffer in enumerate(buffers):
            for at in range(first, begin):
                wanted = torch.full_like(buffer[0], self.content(tokens[: at + 1], layer, part))
                assert torch.equal(buffer[slots[at]], wanted), (layer, at, begin, "a wrong byte")
            for at in range(begin, end):
                buffer[slots[at]] = self.content(tokens[: at + 1], layer, part)

    def _recur(
        self, layer: int, tokens: Sequence[int], request: Req, begin: int, end: int, tracked: tuple[int, Any] | None
    ) -> None:
        cache, slot = self.rows.mamba2_layer_cache(layer), int(request.kv.mamba_pool_idx)
        for part, buffer in enumerate([*cache.conv, cache.temporal]):
            wanted = torch.full_like(buffer[0], self.content(tokens[:begin], layer, 2 + part) if begin else 0)
            assert torch.equal(buffer[slot], wanted), (layer, begin, "a wrong state")
            buffer[slot] = self.content(tokens[:end], layer, 2 + part)
            if tracked is not None:
                buffer[int(tracked[1])] = self.content(tokens[: tracked[0]], layer, 2 + part)

    def _tracked(self, request: Req) -> tuple[int, Any] | None:
        """Where SGLang keeps a state of this chunk, and in which slot."""
        batch = SimpleNamespace(
            model_config=SimpleNamespace(hf_text_config=SimpleNamespace(mamba_chunk_size=STATE_TOKENS)),
            tree_cache=self.tree,
            req_to_token_pool=self.rows,
        )
        entry = ScheduleBatch._mamba_radix_cache_v2_req_prepare_for_extend(batch, request)
        if not entry.track_mask:
            return None
        slot = request.kv.mamba_ping_pong_track_buffer[entry.track_position]
        return request.kv.mamba_last_track_seqlen, slot

    def _begin_state(self, request: Req) -> None:
        """What SGLang's runner does in front of a forward pass."""
        batch = SimpleNamespace()
        ScheduleBatch._collect_deferred_mamba_cow_and_clear(batch, [request])
        if batch.mamba_clear_indices is not None:
            self.states.clear_slots(batch.mamba_clear_indices)
        if batch.mamba_cow_src_indices is not None:
            self.rows.copy_mamba_state(batch.mamba_cow_src_indices, batch.mamba_cow_dst_indices)

    def _allocate(self, tokens: int) -> torch.Tensor:
        """Slots of whole pages; those of a partial last page that are not used go with it."""
        size = -(-tokens // PAGE) * PAGE
        until(lambda: self._make_room(size), "pages of the device can be evicted")
        if not self.windowed:
            return self.slots.alloc(size)[:tokens]
        full, own = self.slots.full_attn_allocator.alloc(size), self.slots.swa_attn_allocator.alloc(size)
        self.slots.set_full_to_swa_mapping(full, own)
        return full[:tokens]

    def _make_room(self, tokens: int) -> bool:
        full, own, *_ = self.room()
        own = own if self.windowed else tokens
        if full < tokens or own < tokens:
            self.poll()  # pages that were being read
            self.tree.evict(EvictParams(num_tokens=max(0, tokens - full), swa_num_tokens=max(0, tokens - own)))
        return bool(full >= tokens and own >= tokens)

    def _make_room_for_states(self) -> bool:
        """A request has a state of its own, and two that SGLang tracks."""
        states = self.rows.mamba_allocator
        if (short := 3 - states.available_size()) > 0:
            self.poll()  # states that were being read
            self.tree.evict(EvictParams(num_tokens=0, mamba_num=short))
        return bool(states.available_size() >= 3)

    def flush(self) -> None:
        """`flush_cache`: the device's pages are gone."""
        self.tree.reset()
        self.slots.clear()
        self.rows.clear()
        for buffer in self.buffers():
            buffer.fill_(-1)

    def buffers(self) -> list[torch.Tensor]:
        pools = [self.pool.full_kv_pool, *([self.pool.swa_kv_pool] if self.windowed else [])]
        found = [buffer for pool in pools for buffer in [*pool.k_buffer, *pool.v_buffer]]
        if self.states is not None:
            found += [*self.states.mamba_cache.conv, self.states.mamba_cache.temporal]
        return found

    def close(self) -> None:
        self.tree.linker.close()

    def content(self, tokens: Sequence[int], layer: int, part: int) -> float:
        """Of a token, or of a state behind the last of them: it follows from all of them."""
        return float((hash(tuple(tokens)) ^ (5 * part + layer + 1) * 0x9E3779B1) >> 8 & 0xFF)


def sections(folder: Path, **changes: Any) -> dict[str, Any]:
    """A configuration of gdscache, with room for windows of small chunks."""
    room = {"cpu": {"capacity": "4MiB"}, "ssd": {"capacity": "16MiB"}, "host_buffer": "4MiB"}
    return sglang_rig.sections(folder, **{**room, "store": {"window_every": CHUNK}, **changes})


def params(components: Sequence[str], tokens: int, heads: int, dim: int, window: int, group: Any) -> CacheInitParams:
    """What a tree over the pools of a hybrid model is made of. `heads`: of keys, on this rank. `dim`: of each head."""
    rows: Any = _rows_with_states(tokens, dim) if "MAMBA" in components else ReqToTokenPool(ROWS, tokens, "cpu", False)
    size: dict[str, Any] = {"size": tokens, "page_size": PAGE, "dtype": torch.bfloat16, "device": "cpu"}
    size |= {"head_num": heads, "head_dim": dim, "full_attention_layer_ids": LAYERS["kv"]}
    if windowed := "SWA" in components:
        pool: Any = SWAKVPool(**size, size_swa=tokens, swa_attention_layer_ids=LAYERS["swa"])
        slots: Any = SWATokenToKVPoolAllocator(tokens, tokens, PAGE, torch.bfloat16, "cpu", pool, False)
    else:
        pool = HybridLinearKVPool(**size, mamba_pool=rows.mamba_pool)
        of_tokens = TokenToKVPoolAllocator(tokens, torch.bfloat16, "cpu", pool, False) if PAGE == 1 else None
        slots = of_tokens or PagedTokenToKVPoolAllocator(tokens, PAGE, torch.bfloat16, "cpu", pool, False)
    return CacheInitParams(
        disable=False,
        req_to_token_pool=rows,
        token_to_kv_pool_allocator=slots,
        page_size=PAGE,
        sliding_window_size=window if windowed else None,
        enable_mamba_extra_buffer="MAMBA" in components and PAGE > 1,  # as for LFM2, which has pages of one token
        tree_components=tuple(ComponentType[name] for name in components),
        tree_core_backend="python",
        tp_cache_group=group,
    )


def _rows_with_states(tokens: int, dim: int) -> Any:
    shape = Mamba2StateShape.create(
        tp_world_size=1, intermediate_size=2 * dim, n_groups=1, num_heads=2, head_dim=dim, state_size=16, conv_kernel=4
    )
    dtype = Mamba2StateDType(conv=torch.bfloat16, temporal=torch.float32)
    return HybridReqToTokenPool(
        size=ROWS,
        mamba_size=STATES,
        mamba_spec_state_size=ROWS,
        max_context_len=tokens,
        device="cpu",
        enable_memory_saver=False,
        cache_params=Mamba2CacheParams(shape=shape, layers=LAYERS["mamba"], dtype=dtype),
        mamba_layer_ids=LAYERS["mamba"],
        enable_mamba_extra_buffer=PAGE > 1,
    )
