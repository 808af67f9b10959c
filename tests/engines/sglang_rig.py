"""SGLang's own radix tree, pools and controller on a CPU, with our linker below the tree.

Runs in SGLang's environment; the tests start it (`sglang_case.py`). Requests are made up: what a scheduler does with
one is done here call by call, in the scheduler's order.
"""

from __future__ import annotations

import json
import os
import time
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt import runtime_context
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_cache.linker_factory import create_unified_cache_linker
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.model_executor.runner.prefill_cuda_graph_runner import PrefillCudaGraphRunner
from sglang.srt.server_args import ServerArgs

PAGE, TOKENS, LAYERS = 4, 256, 3
MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 128, "intermediate_size": 128,
    "num_attention_heads": 2, "num_hidden_layers": LAYERS, "vocab_size": 512, "torch_dtype": "bfloat16",
}  # fmt: skip
LINKER = {"linker": "GdsCacheLinker", "linker_module_path": "gdscache.integrations.sglang.linker"}


def server_args(folder: Path, model: dict[str, Any] | None = None, **changes: Any) -> Any:
    """SGLang's arguments for a small model in that folder, published as those of this process.

    `model`: what its `config.json` has beside `MODEL`.
    """
    place = folder / "model"
    place.mkdir(exist_ok=True)
    written = place / f"config-{os.getpid()}"  # ranks write the same file, and read it, side by side
    written.write_text(json.dumps({**MODEL, **(model or {})}))
    written.replace(place / "config.json")
    given = {"model_path": str(place), "load_format": "dummy", "device": "cpu", "page_size": PAGE, **changes}
    args = ServerArgs(**given)
    runtime_context.publish(args, role="scheduler")
    return args


def sections(folder: Path, **changes: Any) -> dict[str, Any]:
    """A configuration of gdscache. None takes a section out."""
    found: dict[str, Any] = {
        "cpu": {"capacity": "1MiB"},
        "ssd": {"path": str(folder / "ssd"), "capacity": "4MiB", "gds": "off", "transport": "posix", "threads": 2},
        "host_buffer": "1MiB",
        "deadline": 20,
    }
    for name, values in changes.items():
        found[name] = {**found.get(name, {}), **values} if isinstance(values, dict) else values
    return {name: values for name, values in found.items() if values is not None}


def device_pool(kind: str, heads: int = 2) -> Any:
    """`heads`: of keys, on this rank."""
    if kind == "mla":
        return MLATokenToKVPool(
            size=TOKENS,
            page_size=PAGE,
            dtype=torch.bfloat16,
            kv_lora_rank=64,
            qk_rope_head_dim=16,
            layer_num=LAYERS,
            device="cpu",
            enable_memory_saver=False,
        )
    return MHATokenToKVPool(
        size=TOKENS,
        page_size=PAGE,
        dtype=torch.bfloat16,
        head_num=heads,
        head_dim=64,
        layer_num=LAYERS,
        device="cpu",
        enable_memory_saver=False,
    )


def tree_params(pool: Any, **more: Any) -> CacheInitParams:
    """What a tree over that device pool is made of."""
    return CacheInitParams(
        disable=False,
        req_to_token_pool=ReqToTokenPool(8, TOKENS, "cpu", False),
        token_to_kv_pool_allocator=PagedTokenToKVPoolAllocator(TOKENS, PAGE, torch.bfloat16, "cpu", pool, False),
        page_size=PAGE,
        tree_components=(ComponentType.FULL,),
        tree_core_backend="python",
        **more,
    )


def buffers(pool: Any) -> list[torch.Tensor]:
    return list(pool.kv_buffer) if hasattr(pool, "kv_buffer") else [*pool.k_buffer, *pool.v_buffer]


def transfers_of(keys: Sequence[str]) -> list[PoolTransfer]:
    """Pages as SGLang names them, in the first blocks."""
    return [PoolTransfer(name=PoolName.KV, keys=[*keys], device_indices=torch.arange(PAGE, (len(keys) + 1) * PAGE))]


def prompt(seed: int, tokens: int, head: Sequence[int] = ()) -> list[int]:
    return [*head, *((seed * 7919 + i * 31) % 500 + 3 for i in range(tokens - len(head)))]


class Request(SimpleNamespace):
    """What the tree and the linker read of SGLang's requests."""

    def __init__(self, rid: str) -> None:
        super().__init__(
            rid=rid,
            session=None,
            priority=0,
            kv=None,
            last_node=None,
            swa_branching_seqlen=None,
            extra_key=None,
            cache_salt=None,
        )


def waiting_request(rid: str, tokens: Sequence[int]) -> Request:
    """One as the scheduler's policies read it."""
    request = Request(rid)
    request.origin_input_ids, request.output_ids = array("q", tokens), array("q")
    request.prefix_len, request.host_hit_length, request.num_matched_prefix_tokens = 0, 0, 0
    request._compute_max_prefix_len = lambda length: length - 1
    request.kv = SimpleNamespace(cache_protected_len=0)
    return request


class Linked:
    """A `tree` of SGLang's, and our `linker` below it."""

    tree: Any
    linker: Any

    def poll(self) -> None:
        """What the scheduler asks in each step."""
        self.tree.check_hicache_events()

    def settle(self) -> None:
        """Everything is stored, and SGLang knows it."""
        until(lambda: self.poll() or not self.tree.linker.pending_offloads, "offloads complete")
        self.linker.engine.drain(30)

    def serve_and_flush(self, *given: Any) -> tuple[int, int]:
        """As `serve`; then our tiers alone have its pages."""
        found: tuple[int, int] = self.serve(*given)  # type: ignore[attr-defined]
        self.settle()
        self.flush()  # type: ignore[attr-defined]
        return found


class Rig(Linked):
    """A tree over a device pool, and our linker below it."""

    def __init__(
        self,
        folder: Path,
        kind: str = "mha",
        options: dict[str, Any] | None = None,
        server: dict[str, Any] | None = None,
        *,
        model: dict[str, Any] | None = None,
        kv_events: bool = False,
        **changes: Any,
    ) -> None:
        """`server`, `model`: more of SGLang's settings, and of the model's file."""
        config = {"config": sections(folder, **changes), "ssd_wait": 10.0, **(options or {})}
        self.linker_config = {**LINKER, "linker_extra_config": config}
        self.args = server_args(
            folder,
            model,
            enable_unified_cache_external_linker=True,
            unified_cache_external_linker_backend="dynamic",
            unified_cache_external_linker_config=self.linker_config,
            **(server or {}),
        )
        self.pool = self.device_pool(kind)
        self.params = self.tree_params(enable_kv_cache_events=kv_events)
        self.slots, self.rows = self.params.token_to_kv_pool_allocator, self.params.req_to_token_pool
        self.tree = UnifiedRadixCache(self.params)
        self.linker: Any = create_unified_cache_linker(
            self.args, self.params, backend="dynamic", config=self.linker_config, components=set(self.tree.components)
        )
        self.tree.init_cache_linker(self.linker)
        self.pool.register_layer_transfer_counter(self.linker.layer_done_counter)
        self.full_graphs = False  # of prompts: one wait in front of them
        self.salt: str | None = None  # `cache_salt` of the requests from now on
        self._number = 0

    def device_pool(self, kind: str) -> Any:
        return device_pool(kind)

    def tree_params(self, **more: Any) -> CacheInitParams:
        return tree_params(self.pool, **more)

    # -- what a scheduler does -----------------------------------------------------------------------------------------

    def match(self, tokens: Sequence[int], rid: str | None = None) -> tuple[Request, Any]:
        """A request is considered: what the tree has of it on the device, and what we have behind that."""
        if rid is None:
            self._number += 1
            rid = f"r{self._number}"
        request = Request(rid)
        request.cache_salt = self.salt
        found = self.tree.match_prefix(MatchPrefixParams(key=self.key(tokens, self.salt), req=request))
        request.last_node = found.last_device_node
        return request, found

    @staticmethod
    def key(tokens: Sequence[int], salt: str | None = None) -> RadixKey:
        return RadixKey(token_ids=array("q", tokens), extra_key=None, cache_salt=salt)

    def serve(self, tokens: Sequence[int], value: Callable[[int], float] | None = None) -> tuple[int, int]:
        """A request from its begin to its end: (tokens on the device, tokens loaded). Checks what is loaded.

        The bytes of a token follow from all tokens up to it, or from `value` of its place.
        """
        full = len(tokens) // PAGE * PAGE
        request, found = self.match(tokens[:full])
        there = found.device_prefix_len
        core = self.tree.tree_core
        loaded = 0
        slots = core.collect_full_device_indices(found.last_device_node, self.tree.root_node_handle()).to(torch.int64)
        assert len(slots) == there
        lock = self.tree.inc_lock_ref(request.last_node).to_dec_params()
        if self.tree.linker.has_hit(request.rid):
            loaded, _ = self.tree.linker.load_back(request)
            if loaded:
                slots = torch.cat([slots, self.tree.linker.private_load_indices[request.rid]])
        index = self.tree.ready_to_load_host_cache()
        self.linker.layer_done_counter.set_consumer(index)
        fresh = full - there - loaded
        if fresh:
            until(lambda: self._make_room(fresh), "pages of the device can be evicted")
            new = self.slots.alloc(fresh)
            slots = torch.cat([slots, new])
        if self.full_graphs:
            runner = SimpleNamespace(token_to_kv_pool=self.pool)
            PrefillCudaGraphRunner._wait_for_layer_loads(SimpleNamespace(_is_full_backend=True, model_runner=runner))
        for number, buffer in enumerate(buffers(self.pool)):
            if not self.full_graphs:
                self.linker.layer_done_counter.wait_until(number % LAYERS)
            for at in range(there + loaded, full):
                buffer[slots[at]] = self.content(tokens, at, number, value)
            for at in range(there + loaded):
                wanted = torch.full_like(buffer[0], self.content(tokens, at, number, value))
                assert torch.equal(buffer[slots[at]], wanted), (at, number, "a wrong byte")
        assert self.tree.finish_external_linker_loads([request]) == []
        self.tree.insert(InsertParams(key=self.key(tokens[:full], self.salt), value=slots, prev_prefix_len=there))
        self.tree.dec_lock_ref(request.last_node, lock)
        self.poll()
        return there, loaded

    def content(self, tokens: Sequence[int], at: int, number: int, value: Callable[[int], float] | None) -> float:
        if value is not None:
            return value(at)
        text = (hash(tuple(tokens[: at + 1])) ^ number * 0x9E3779B1) & 0xFF
        return float(text)

    def _make_room(self, tokens: int) -> bool:
        short = tokens - self.slots.available_size()
        if short > 0:
            self.poll()  # pages that were being read
            self.tree.evict(EvictParams(num_tokens=short))
        return bool(self.slots.available_size() >= tokens)

    def flush(self) -> None:
        """`flush_cache`: the device's pages are gone."""
        self.tree.reset()
        self.slots.clear()
        for buffer in buffers(self.pool):
            buffer.fill_(-1)

    def close(self) -> None:
        self.tree.linker.close()


def until(done: Callable[[], object], what: str, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, what
        time.sleep(0.002)
