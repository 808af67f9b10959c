"""SGLang's cache linker: the CPU tier and the SSD under SGLang's radix tree, without a host pool of SGLang's.

    python -m sglang.launch_server --model-path MODEL --schedule-policy lpm --enable-unified-cache-external-linker
        --unified-cache-external-linker-backend dynamic --unified-cache-external-linker-config
        '{"linker": "GdsCacheLinker", "linker_module_path": "gdscache.integrations.sglang.linker",
        "linker_extra_config": {"config": "gdscache.yaml"}}'

docs/sglang.md says what works and what is refused. What is known of requests is in `sglang_loads`, what moves in
`sglang_moves`; this class only hands over.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import sglang
import torch
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
from sglang.srt.runtime_context import process_model_config

from gdscache.config import EventsConfig
from gdscache.cuda.streams import Event, record_on
from gdscache.engine import CacheEngine
from gdscache.integrations.fetching import PinningCache
from gdscache.integrations.sglang.events import SglangEvents
from gdscache.integrations.sglang.facts import resolved
from gdscache.integrations.sglang.loads import LoadTable
from gdscache.integrations.sglang.metrics import ToldMetrics
from gdscache.integrations.sglang.moves import BlockReader, LayerLoads, Offloads
from gdscache.integrations.sglang.pages import PageLinks
from gdscache.integrations.sglang.planes import device_planes
from gdscache.integrations.sglang.refused import refuse_components, refuse_model, refuse_ranks, refuse_setup
from gdscache.integrations.sglang.setup import (
    LINKER_OPTIONS,
    WEIGHT_METHODS,
    LinkerOptions,
    configuration,
)
from gdscache.integrations.watching import WeightWatch


class GdsCacheLinker(UnifiedCacheLinker):  # type: ignore[misc]
    """See the module. Raises the `GdsCacheError` that names what this setup of SGLang needs and has not got."""

    def __init__(
        self,
        server_args: Any,
        params: Any,
        *,
        components: Collection[Any],
        extra_config: Mapping[str, Any],
        forward_stream: torch.cuda.Stream | None = None,
    ) -> None:
        server, model = resolved(server_args), process_model_config()
        refuse_setup(server)
        refuse_ranks(server)
        refuse_model(model)
        refuse_components([component.name for component in components])
        options = LinkerOptions.of(extra_config)
        pool = params.token_to_kv_pool_allocator.get_kvcache()
        planes = device_planes(pool, params.page_size)
        config = configuration(options.config, server, model, planes, sglang.__version__, LINKER_OPTIONS, cpu=True)
        tells = bool(params.enable_kv_cache_events)  # SGLang publishes its own
        if tells and config.events is None:
            config = config.model_copy(update={"events": EventsConfig()})
        self.pools = {PoolName.KV: pool}
        self.forward_stream = forward_stream
        self.counts: Counter[str] = Counter()
        self._device = planes.tensors[0][0].device
        self._rows = params.req_to_token_pool
        self.engine = engine = CacheEngine(config, planes.tensors)
        with contextlib.ExitStack() as undo:
            undo.callback(engine.close, drain=False)
            self._events = SglangEvents(engine, self, params.page_size) if tells else None
            if self._events is not None:
                undo.callback(self._events.close)
            self._cache = PinningCache(engine, options.pin_seconds)
            self._links = PageLinks()
            self._table = LoadTable(
                self._cache,
                self._links,
                wait=options.ssd_wait if config.ssd is not None else 0.0,
                alone=self._alone,
                rest=self._cache.rest,
                seconds=self._seconds,
                counts=self.counts,
            )
            self.layer_done_counter = LayerLoads(engine, len(planes.tensors), self.counts, self._slots_free)
            self._blocks = BlockReader(self._device, params.page_size)
            self._used = self._outdated = False
            self._offloads = Offloads(engine, self.counts)
            undo.callback(self._offloads.close)
            self._told = ToldMetrics({"": engine}, server)
            undo.callback(self._told.close)
            self._watch = WeightWatch(WeightUpdater, WEIGHT_METHODS, self._weights_changed)
            if self._watch.last():  # another linker's time, in this process
                self._cache.renew_salt()
            undo.pop_all()

    # -- loads ---------------------------------------------------------------------------------------------------------

    def lookup(self, rid: str, transfers: list[PoolTransfer]) -> list[int]:
        """The longest prefix that may be loaded, in pages. Ranks would need each shorter one, too; there is one."""
        keys = _of_kv(transfers).keys or []
        self._name(keys)
        with self._cache.telling(rid):
            pages = self._table.lookup(rid, keys)
        return [pages] if pages else []

    def load(self, rid: str, transfers: list[PoolTransfer]) -> bool:
        transfer = _of_kv(transfers)
        return self._table.load(rid, transfer.keys or [], lambda: self._blocks.begin(transfer.device_indices))

    def start_layer_wise_loading(self) -> int:
        """SGLang begins a batch of prompts, with loads or without."""
        self._used = True
        return self.layer_done_counter.queue(self._table.take())

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        return self.layer_done_counter.finish(counter_index)

    def cancel_queued_load(self, rid: str) -> bool:
        return self._table.cancel(rid)

    # -- offloads ------------------------------------------------------------------------------------------------------

    def offload(self, transfers: list[PoolTransfer], session_id: str | None = None) -> bool:
        transfer = _of_kv(transfers)
        keys = transfer.keys or []
        self._used = True
        self._table.computed(keys)
        if self._outdated or not keys:
            return False
        ready = self.record_offload_ready() if self._device.type == "cuda" else [None]
        blocks = self._blocks.begin(transfer.device_indices)
        self._name(keys)
        self._offloads.start(self._links.named(keys), blocks, self._cache.salt, ready[-1])
        return True

    def num_completed_offloads(self) -> int:
        return self._offloads.completed()

    def pop_completed_offload(self) -> bool:
        return self._offloads.pop()

    # -- ends ----------------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """SGLang's own cache is flushed: nothing of its pages is used any more. What is stored stays."""
        self._table.reset()
        self.layer_done_counter.reset()
        self._offloads.reset()
        self._used = self._outdated = False

    def close(self) -> None:
        """Finish what was accepted, and give everything back. Twice is fine."""
        self._watch.close()
        if self._events is not None:
            self._events.close()
        self.reset()
        self._offloads.close()
        self._told.close()
        self.engine.close()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _weights_changed(self, method: str) -> None:
        """Find no page of before, and store none that SGLang has of the old weights: it flushes first.

        It has none where it has begun no prompt since it was flushed.
        """
        self._cache.renew_salt()
        self._table.reset()
        self._outdated = self._outdated or self._used

    def _name(self, keys: Sequence[str]) -> None:
        """KV events may say these hashes of SGLang's."""
        if self._events is not None and keys:
            pages = self.engine.pages(self._links.named(keys), self._cache.salt)
            self._events.asked(keys, [page.key for page in pages])

    def _slots_free(self) -> Event:
        """After this event nothing that was launched before the forward pass writes to the slots of a load."""
        return record_on(torch.cuda.current_stream(self._device)) if self._device.type == "cuda" else None

    def _alone(self) -> bool:
        """Whether no request runs: none has a row."""
        return bool(self._rows.available_size() >= self._rows.size)

    def _seconds(self, pages: int) -> float | None:
        """What bringing so many pages from the SSD should take."""
        return self.engine.load_seconds("ssd", pages)


def _of_kv(transfers: list[PoolTransfer]) -> PoolTransfer:
    return next(transfer for transfer in transfers if transfer.name == PoolName.KV)
