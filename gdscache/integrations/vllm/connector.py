"""vLLM's KV connector: a prefix computed once is later loaded from the CPU tier or the SSD.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "GdsCacheConnector", "kv_role": "kv_both",
      "kv_connector_module_path": "gdscache.integrations.vllm", "kv_load_failure_policy": "recompute",
      "kv_connector_extra_config": {"config": "gdscache.yaml"}}'

docs/vllm.md lists supported and refused settings. vLLM makes an object of this class for its scheduler and one in each
worker. With one worker in the same process they share an engine (`session.py`). Otherwise the scheduler's object has
the engine, and each worker's is a rank of it (`ranks.py`). This class passes vLLM's calls on to `requests.py` and
`worker.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import vllm
from vllm.config import CUDAGraphMode
from vllm.distributed.kv_events import KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.executor.abstract import Executor
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from gdscache.config import Config
from gdscache.engine.engine import CacheEngine
from gdscache.engine.hybrid import HybridEngine
from gdscache.groups.pools import pools_of
from gdscache.integrations.settings import engine_configuration, follow, one_model
from gdscache.integrations.vllm import setup
from gdscache.integrations.vllm.cache_groups import block_tokens, groups_of, key_elements, state_layers
from gdscache.integrations.vllm.events import VllmEvents
from gdscache.integrations.vllm.groups import GroupTable, KeptStates
from gdscache.integrations.vllm.metrics import ENGINE, GdsCacheProm, GdsCacheStats
from gdscache.integrations.vllm.planes import planes_of, write_first_scales
from gdscache.integrations.vllm.ranks import Lead, Observed, RankWorker, addresses_of
from gdscache.integrations.vllm.requests import RequestTable, StoreOrder, prefill_of
from gdscache.integrations.vllm.session import SESSIONS, GroupSession, VllmSession, joined
from gdscache.integrations.vllm.worker import EngineWorker
from gdscache.integrations.watching import CallWatch, ExecutorWatch
from gdscache.metrics.mirror import Differences, News
from gdscache.metrics.table import parts_of
from gdscache.ranks.address import RankAddress
from gdscache.runtime.threads import in_turn

_REST_S = 0.005  # the wait of a step that computes nothing, for pages under way
FIGURES_S = 1.0  # the least time between two reads of the engine's figures
_log = logging.getLogger("gdscache")


@dataclasses.dataclass
class StepOrders(KVConnectorMetadata):  # type: ignore[misc]
    """A step's loads and stores: `LoadOrder` and `StoreOrder`, or for ranks in other processes `LoadBatch` and marks
    (`Lead.step`).

    `prefill`: the prompt of the step's time (`prefill_of`). `idle`: nothing is computed. `last`: idle, or a request has
    ended, so that there may be no further step.
    """

    prefill: tuple[int, int] | None
    idle: bool
    last: bool
    loads: Sequence[Any] = ()
    stores: Sequence[Any] = ()


@dataclasses.dataclass
class RankFacts(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """A rank's report to the scheduler before the first request: its address in each pool, and its part of the
    model."""

    addresses: list[RankAddress]
    model: dict[str, object]


@dataclasses.dataclass
class RankNews(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """A rank's report to the scheduler after a step: times of prefills."""

    observed: list[Observed]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> RankNews:
        return RankNews(self.observed + (other.observed if isinstance(other, RankNews) else []))


class GdsCacheConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """See the module. Raises the `IntegrationError` of the first unsupported setting of vLLM.

    Many methods: vLLM's `KVConnectorBase_V1` names the public ones, and each hands over.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        follow(logging.getLogger("vllm"))
        setup.refuse_setup(vllm_config, kv_cache_config, version=vllm.__version__)
        self._options = _options(vllm_config)
        self._engine_id: str = vllm_config.kv_transfer_config.engine_id
        self._grouped = bool(groups_of(kv_cache_config))
        self._counts: Counter[str] = Counter()
        self._quiet = 0  # steps since the last report
        self._figures = {"": Differences(FIGURES_S, time.monotonic)}  # by group of layers
        self._separate = setup.separate(vllm_config.parallel_config)
        self._session: VllmSession | None = None
        self._events: VllmEvents | None = None
        self._states = KeptStates()
        self._closing = ExitStack()
        if role is not KVConnectorRole.SCHEDULER:
            return
        if self._separate:
            executor, changed = Executor.get_class(vllm_config), self._weights_written
            watch = ExecutorWatch(executor, setup.WEIGHT_METHODS, self._is_mine, changed, self._workers_end)
            self._closing.callback(watch.close)
            return
        session, worker = joined(self._engine_id), resolve_obj_by_qualname(vllm_config.parallel_config.worker_cls)
        with self._closing as undo:
            undo.callback(CallWatch(worker, setup.WEIGHT_METHODS, self._weights_written, self._weights_written).close)
            self._begin(session)
            self._closing = undo.pop_all()

    def _begin(self, session: VllmSession) -> None:
        """Use the session in the scheduler's object."""
        self._session = session
        if setup.tells_events(self._vllm_config):
            self._events = VllmEvents(session.whole, self._kv_cache_config)
        settings: dict[str, Any] = {
            "wait": self._options.wait_seconds,
            "refuses": functools.partial(setup.leaves_alone, media=self._options.media),
            "named": None if self._events is None else self._events.name,
            "counts": self._counts,
        }
        if isinstance(session, GroupSession):
            self._table: RequestTable = GroupTable(session, self._states, **settings)
        else:
            self._table = RequestTable(session, session.engine.layout.page_tokens, **settings)
        self._closing.callback(self._table.clear)

    @property
    def _overlapping(self) -> bool:
        """Whether vLLM cannot take back a step with a bad load: it has submitted the next one, or has groups."""
        return self._grouped or bool(self._vllm_config.scheduler_config.async_scheduling)

    # -- class ---------------------------------------------------------------------------------------------------------

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> GdsCacheStats:
        return GdsCacheStats(data=data if data is not None else {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> GdsCacheProm:
        return GdsCacheProm(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a page that is not stored is computed again."""
        return False

    # -- scheduler -----------------------------------------------------------------------------------------------------

    def set_xfer_handshake_metadata(self, metadata: dict[int, RankFacts]) -> None:
        """All ranks have reported (workers are processes of their own): open their engine."""
        if not self._separate:
            return
        config = self._vllm_config
        addresses = addresses_of(
            {rank: facts.addresses for rank, facts in metadata.items()}, config.parallel_config.tensor_parallel_size
        )
        session = self._opened(one_model({rank: facts.model for rank, facts in metadata.items()}), ranks=addresses)
        self._closing.callback(session.close)
        lead = Lead(session.engines, self._counts, overlapping=self._overlapping)
        self._closing.callback(lead.close)
        session.stores, session.loads = lead, lead.loads
        self._begin(session)

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._states.bind(gpu_block_pool)

    def update_connector_output(self, connector_output: Any) -> None:
        news = connector_output.kv_connector_worker_meta
        if isinstance(news, RankNews) and self._session is not None:
            for tokens, before, seconds in news.observed:
                self._session.observe_prefill(tokens, before, seconds)

    def on_new_request(self, request: Any) -> None:
        with self._timed("scheduler_seconds"), self._joined.telling(request.request_id):
            self._table.add(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        with self._timed("scheduler_seconds"), self._joined.telling(request.request_id):
            return self._table.ask(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        with self._timed("scheduler_seconds"):
            tables = blocks.get_block_ids()
            self._table.place(request, tables if self._grouped else tables[0], num_external_tokens)

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[CacheHitSource, int]:
        if not num_external_tokens:
            return {}
        tokens: Counter[CacheHitSource] = Counter()
        for tier, pages in self._table.hit_sources(request).items():
            source = CacheHitSource.HOST if self._joined.on_host(tier) else CacheHitSource.DISK
            tokens[source] += pages * self._table.page_tokens
        return dict(tokens)

    def take_events(self) -> Iterable[KVCacheEvent]:
        """KV events of our tiers, which vLLM publishes with those of its own cache."""
        return () if self._events is None else self._events.take()

    def build_connector_meta(self, scheduler_output: Any) -> StepOrders:
        with self._timed("scheduler_seconds"):
            step, table = scheduler_output, self._table
            cached = step.scheduled_cached_reqs
            fresh = table.take_fresh()
            for request_id, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
                if blocks is not None and request_id not in cached.resumed_req_ids:
                    fresh.update(*blocks)
            fresh.update(copy.dst_block_id for copy in step.kv_cache_block_copies or ())
            state = step.kv_connector_block_state
            if isinstance(table, GroupTable):
                table.states.let_go(self._joined.stores.reads)
                found = table.stores(step.num_scheduled_tokens, state.get_block_ids, state.boundary_state_offloads)
            else:
                found = table.stores(step.num_scheduled_tokens, lambda name: state.get_block_ids(name)[0])
            stores: list[StoreOrder] = [*found]
            idle, loads = not step.num_scheduled_tokens, table.take_loads()
            orders = StepOrders(None if loads else prefill_of(step), idle, idle or bool(step.finished_req_ids))
        self._counts["steps"] += 1
        deferred, table.deferred = table.deferred, False
        orders.loads, orders.stores = self._joined.stores.step(loads, stores, fresh, idle=idle, last=orders.last)
        if idle and not loads and (deferred or self._joined.loads.under_way):
            self._joined.rest(_REST_S)
        return orders

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Blocks may be freed at once: the next owner of a block that a store still reads waits
        (`Stores.wait_until_read`)."""
        orders = self._table.end(request, block_ids if self._grouped else block_ids[0])
        if self._session is not None:
            self._session.stores.end(orders)
        return False, None

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def reset_cache(self) -> bool:
        """Drop every page of this model; vLLM calls it when its weights have changed. Returns whether vLLM's own cache
        is empty: it is not where requests hold blocks of it.

        Running requests have KV of the old weights, so nothing of them is stored.
        """
        empty = self._states.vllm_is_empty
        self._drop_all("reset_prefix_cache, which failed", stale=not empty)
        return empty

    def _weights_written(self, method: str, *call: Any) -> None:
        """Called before and after a method that writes weights. vLLM's own cache has pages of the old weights until its
        reset."""
        self._drop_all(method, stale=True)

    def _drop_all(self, cause: str, *, stale: bool) -> None:
        if stale and not self._table.stale:
            _log.warning(
                "%s: nothing is loaded or stored until reset_prefix_cache(reset_connector=True), since vLLM's own "
                "prefix cache has pages of the old weights",
                cause,
            )
        self._table.leave_alone(stale=stale)
        in_turn(self._joined.weights_changed, *(() if self._events is None else (self._events.forget_all,)))

    def _is_mine(self, executor: Any) -> bool:
        """Whether an executor's workers are this connector's ranks."""
        transfer = executor.vllm_config.kv_transfer_config  # None: of another LLM, without a connector
        return self._session is not None and transfer is not None and transfer.engine_id == self._engine_id

    def _workers_end(self, executor: Any) -> None:
        """Store computed pages while the workers live; not after a worker's death, which vLLM must report."""
        if not executor.is_failed:
            self.shutdown()

    # -- worker --------------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        config, cache = self._vllm_config, self._kv_cache_config
        write_first_scales(config.compilation_config.static_forward_context[name] for name in kv_caches)
        layout, states = str(cache.kv_cache_layout), state_layers(cache)
        planes = planes_of(kv_caches, cache.num_blocks, block_tokens(cache), layout, states, key_elements(cache))
        self._layers = planes.layers
        model = setup.model_of(config, cache, planes, vllm.__version__, os.environ)
        if self._separate:
            self._rank = rank = get_tensor_model_parallel_rank()
            shard = setup.shard_of(config, cache, rank)
            groups = Config.from_dict({"model": model}).model.layer_groups()
            pools = [pool.layers for pool in pools_of(groups)]
            ranks = RankWorker(planes.tensors, rank, shard, overlapping=self._overlapping, pools=pools)
            self._worker: EngineWorker | RankWorker = ranks
            self._facts = RankFacts([one.address for one in ranks.ranks], model)
        else:
            self._session = session = self._opened(model, [(tensor,) for tensor in planes.tensors])
            self._closing.callback(session.close)
            self._worker = worker = EngineWorker(session, planes.tensors, self._counts, overlapping=self._overlapping)
            session.stores, session.loads = worker.stores, worker.loads
            SESSIONS[self._engine_id] = session
        self._closing.callback(self._worker.close)

    def get_handshake_metadata(self) -> RankFacts | None:
        return self._facts if self._separate else None

    def build_connector_worker_meta(self) -> RankNews | None:
        """Times of prefills, from the first rank."""
        observed = self._worker.take_observed() if isinstance(self._worker, RankWorker) else []
        return RankNews(observed) if observed and not self._rank else None

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """A step begins. vLLM calls it before the forward pass, and `wait_for_save` after it."""
        super().bind_connector_metadata(connector_metadata)
        self._orders: StepOrders = connector_metadata
        with self._timed("worker_seconds"):
            self._worker.prefills.begin(self._orders.prefill)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        with self._timed("worker_seconds"):
            self._worker.begin(self._orders.loads)
            if not (self._options.layerwise and _asks_by_layers(forward_context)):
                self._worker.loads.wait_all()

    def wait_for_layer_load(self, layer_name: str) -> None:
        if not self._worker.loads.within:  # most steps; and a step has a call for each layer
            return
        with self._timed("worker_seconds"):
            self._worker.loads.wait(self._layers[layer_name])

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: all layers are stored together when the step has been submitted."""

    def wait_for_save(self) -> None:
        with self._timed("worker_seconds"):
            orders = self._orders
            self._worker.end(orders.stores, idle=orders.idle, last=orders.last)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """With several groups a failed load is reported by its request: block numbers would end vLLM."""
        loads = self._worker.loads
        arrived, failed = loads.take_arrived(), loads.take_failed()
        return KVConnectorTransferResults(finished_recving=arrived, failed_recving=failed if self._grouped else set())

    def get_block_ids_with_load_errors(self) -> set[int]:
        bad = self._worker.loads.take_bad()
        return set() if self._grouped else bad

    # -- both ----------------------------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> GdsCacheStats | None:
        """Counts since the last call, and once a second the changes of the engine's figures; None in steps that only
        computed. Of ranks, the first one reports."""
        if self.role is not KVConnectorRole.SCHEDULER and self._separate and self._rank:
            return None
        counts, told, news = self._counts, self._counts.keys() - _QUIET, self._news()
        self._quiet += 1
        if news is None and not any(counts[name] for name in told) and self._quiet < _QUIET_STEPS:
            return None
        self._quiet = 0
        data: dict[str, Any] = {name: value for name, value in counts.items() if value}
        if news is not None:
            data[ENGINE] = news
        counts.clear()
        return GdsCacheStats(data=data)

    def _news(self) -> dict[str, News] | None:
        """The changes of the engine's figures, by group of layers as in `parts_of`; None before their time, or in a
        worker."""
        figures, session = self._figures, self._session
        if session is None or self.role is not KVConnectorRole.SCHEDULER or not figures[""].due:
            return None
        return {
            group: figures.setdefault(group, Differences(FIGURES_S, time.monotonic)).take(stats)
            for group, stats in parts_of(session.whole.stats()).items()
        }

    def shutdown(self) -> None:
        """Leave the engine; the object that has opened it closes it. Repeated calls are fine."""
        self._session = None
        self._closing.close()

    def _opened(
        self,
        model: Mapping[str, object],
        planes: Sequence[Sequence[torch.Tensor]] | None = None,
        ranks: Sequence[Sequence[RankAddress]] = (),
    ) -> VllmSession:
        """A session with a new engine, over planes of this process or those of ranks."""
        vllm_config, source = self._vllm_config, "kv_connector_extra_config.config"
        variables, events = setup.variables_of(vllm_config.parallel_config), setup.tells_events(vllm_config)
        weights, pins = functools.partial(setup.weights_of, vllm_config), self._options.pin_seconds
        config = engine_configuration(self._options.config, model, weights, source, variables, events=events)
        if self._grouped:
            hybrid = HybridEngine(config, planes, ranks=ranks or None)
            return GroupSession(hybrid, pins, self._kv_cache_config.hash_block_size)
        return VllmSession(CacheEngine(config, planes, ranks=ranks[0] if ranks else None), pins)

    @property
    def _joined(self) -> VllmSession:
        assert self._session is not None, "the connector was shut down"
        return self._session

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._counts[name] += time.perf_counter() - start  # type: ignore[assignment]


def _options(vllm_config: Any) -> setup.Options:
    """Raises `ConfigError`, and `MediaUnsupportedError`."""
    options = setup.Options.of(vllm_config.kv_transfer_config.kv_connector_extra_config or {})
    if options.media:
        setup.refuse_media(vllm_config)
    return options


def _refuse(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Refuse an unsupported setup, if this is its connector, before vLLM loads weights.

    vLLM makes its connectors later, in processes whose errors it reports in its own lines. Before, it calls
    `Executor.get_class(config)` in the operator's process, which has imported this module.
    """
    (vllm_config,) = (*args, *kwargs.values())
    transfer = vllm_config.kv_transfer_config
    if transfer is not None and transfer.kv_connector == GdsCacheConnector.__name__:
        setup.refuse_config(vllm_config, version=vllm.__version__)
        _options(vllm_config)


CallWatch(Executor, ["get_class"], before=_refuse)

_QUIET = {"steps", "scheduler_seconds", "worker_seconds"}
_QUIET_STEPS = 256  # this many steps with quiet counts only are reported together


def _asks_by_layers(forward_context: Any) -> bool:
    """Whether a forward pass waits for its layers one by one. A single CUDA graph of the whole pass, as in a step that
    only decodes, does not; vLLM's second model runner replays it without metadata in the context."""
    whole: bool = forward_context.cudagraph_runtime_mode == CUDAGraphMode.FULL
    return forward_context.attn_metadata is not None and not whole
