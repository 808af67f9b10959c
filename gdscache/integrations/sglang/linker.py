"""SGLang's cache linker: the CPU tier and the SSD under SGLang's radix tree, without a host pool of SGLang's.

    python -m sglang.launch_server --model-path MODEL --schedule-policy lpm --enable-unified-cache-external-linker
      --unified-cache-external-linker-backend dynamic --unified-cache-external-linker-config
      '{"linker": "GdsCacheLinker", "linker_module_path": "gdscache.integrations.sglang.linker",
      "linker_extra_config": {"config": "gdscache.yaml"}}'

docs/sglang.md lists supported and refused settings. This class passes SGLang's calls on: requests to `loads.py`, moves
to `moves.py`.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import sglang
import torch
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
from sglang.srt.runtime_context import process_model_config
from sglang.srt.utils.weight_checker import WeightChecker

from gdscache.cuda.streams import record_on
from gdscache.engine.engine import CacheEngine
from gdscache.engine.hybrid import HybridEngine
from gdscache.errors import CacheGroupsUnsupportedError, GdsCacheError
from gdscache.integrations.prefills import LEAST_TOKENS, Prefills
from gdscache.integrations.settings import one_model
from gdscache.integrations.sglang import setup
from gdscache.integrations.sglang.events import SglangEvents
from gdscache.integrations.sglang.junctions import Junctions
from gdscache.integrations.sglang.linker_ranks import LEFT_S, LinkerRanks, RankFacts, shard_of
from gdscache.integrations.sglang.loads import STOPPED_S, LoadTable, QueuedLoad, RankTable
from gdscache.integrations.sglang.metrics import ToldMetrics
from gdscache.integrations.sglang.moves import LayerLoads, Offloads
from gdscache.integrations.sglang.pages import PageLinks
from gdscache.integrations.sglang.planes import GROUPS, KV, device_planes, grouped_planes
from gdscache.integrations.sglang.ranks import place_in, together
from gdscache.integrations.sglang.served import BlockReader, LinkedFetch, PoolLoads, SeveralPools, SinglePool
from gdscache.integrations.watching import CallWatch
from gdscache.ranks.agreement import Agreement
from gdscache.ranks.rank import Rank
from gdscache.runtime.threads import log_failure


class _Lead(NamedTuple):
    """The leader's side: the engine, and the state of requests. With several ranks, only the first one has it."""

    pools: SinglePool | SeveralPools
    table: LoadTable
    events: SglangEvents | None


class GdsCacheLinker(UnifiedCacheLinker):  # type: ignore[misc]
    """See the module. Raises the `GdsCacheError` of the first unsupported setting of SGLang."""

    def __init__(
        self,
        server_args: Any,
        params: Any,
        *,
        components: Collection[Any],
        extra_config: Mapping[str, Any],
        forward_stream: torch.cuda.Stream | None = None,
    ) -> None:
        self.forward_stream = forward_stream
        self.counts: Counter[str] = Counter()
        self._params, self._links = params, PageLinks()
        self._used = self._outdated = self._broken = False
        self._junctions: Junctions | None = None
        self._number, self._ranks = place_in(params.tp_cache_group)
        with contextlib.ExitStack() as undo:
            facts = together(params.tp_cache_group, lambda: self._prepare(undo, server_args, components, extra_config))
            together(params.tp_cache_group, lambda: self._open(undo, facts))
            self._ends = undo.pop_all()

    def _prepare(
        self, undo: contextlib.ExitStack, server_args: Any, components: Collection[Any], extra: Mapping[str, Any]
    ) -> RankFacts:
        """Prepare this rank, before the leader opens an engine."""
        params = self._params
        self._server, self._model = server, model = setup.resolved(server_args), process_model_config()
        setup.refuse_setup(server)
        setup.refuse_model(model)
        names = [component.name for component in components]
        setup.refuse_components(names, params)
        self._options = options = setup.LinkerOptions.of(extra)
        pool, size = params.token_to_kv_pool_allocator.get_kvcache(), params.page_size
        if len(names) == 1:
            planes = device_planes(pool, size, untried=options.untried)
        else:
            states = params.req_to_token_pool if "MAMBA" in names else None
            planes = grouped_planes(pool, states, params.swa_retain_window, size, untried=options.untried)
        self._planes, self._reader = planes, BlockReader(planes)
        self.pools = {PoolName(GROUPS[name]): pool for name in names}
        self._device = planes.tensors[0][0].device
        self._rank: LinkerRanks | None = None
        self._agreement = Agreement(self._number)
        undo.callback(self._agreement.close)
        if self._ranks > 1:
            heads, kept = model.get_total_num_kv_heads(), getattr(pool, "full_kv_pool", pool)
            if len(names) > 1 and not hasattr(kept, "k_buffer"):
                raise CacheGroupsUnsupportedError(
                    f"the model's cache has {', '.join(sorted(names))}, and tp_size is {self._ranks}: all ranks have "
                    "the same latents (MLA), and windows or states of their own",
                    "run one server a GPU, each with an ssd.path of its own",
                )
            shared = shard_of(kept, heads, self._number, self._ranks)
            made = list[Rank]()
            for name, places in planes.pools().items():
                own = [planes.tensors[place] for place in places]
                # a window's or a state's number of heads is its own: no two ranks share them
                made.append(Rank(own, self._number, shard=shared if name == KV else self._number))
                undo.callback(made[-1].close)
            self._rank = LinkerRanks(planes, made)
            undo.callback(self._rank.left, LEFT_S)  # the leader stores the accepted pages
        addresses = [] if self._rank is None else [rank.address for rank in self._rank.ranks]
        return RankFacts(addresses, self._agreement.address, setup.model_of(server, model, planes, sglang.__version__))

    def _open(self, undo: contextlib.ExitStack, facts: Sequence[RankFacts]) -> None:
        """Open the engine on the leading rank, and on each rank the movers of its part of the bytes."""
        self._lead = None if self._number else self._leading(undo, facts)
        leading = None if self._lead is None else self._lead.pools
        self.engine = None if leading is None else leading.whole
        planes, rank, params = self._planes, self._rank, self._params
        layers = max(planes.layers) + 1 if planes.groups else len(planes.tensors)
        self._offloads = offloads = Offloads(leading, self.counts, rank)
        if rank is not None:
            rank.leading = leading
        self.layer_done_counter = LayerLoads(self._begin_loads if rank is None else rank.begin, layers, self.counts)
        self._table = RankTable(self.counts) if self._lead is None else self._lead.table
        undo.callback(offloads.close)
        undo.callback(self._end_transfers)
        if planes.groups:
            have = leading.has if isinstance(leading, SeveralPools) else lambda *asked: False  # the leader's is asked
            about = params.page_size, params.swa_retain_window
            self._junctions = Junctions(self, *about, have, offloads.reads, self._agreement.of)
        undo.callback(CallWatch(UnifiedRadixCache, ["init_cache_linker"], after=self._linked).close)
        if PoolName.MAMBA in self.pools:  # SGLang registers it only with pools of tokens
            params.req_to_token_pool.register_layer_transfer_counter(self.layer_done_counter)
        changed, also = self._weights_changed, {WeightChecker: [setup.RESETS_WEIGHTS]}
        updates = CallWatch(WeightUpdater, setup.WEIGHT_METHODS, changed, changed, also=also)
        undo.callback(updates.close)
        if self._lead is not None and updates.last():  # written in another linker's time, in this process
            self._lead.pools.renew_salt()

    def _leading(self, undo: contextlib.ExitStack, facts: Sequence[RankFacts]) -> _Lead:
        params, options, server, planes = self._params, self._options, self._server, self._planes
        one_model({rank: its.model for rank, its in enumerate(facts)})
        self._agreement.connect([its.numbers for its in facts[1:]])
        tells = bool(params.enable_kv_cache_events)
        about = server, self._model, planes, sglang.__version__, setup.LINKER_OPTIONS
        config = setup.configuration(options.config, *about, cpu=True, events=tells)
        of_pools = [*zip(*(its.addresses for its in facts), strict=True)]  # none of a single rank
        ranked, pins = bool(of_pools), options.pin_seconds + STOPPED_S
        own = None if ranked else planes.tensors
        pools: SinglePool | SeveralPools
        if planes.groups:
            pools = SeveralPools(HybridEngine(config, own, ranks=of_pools or None), pins, planes, ranked=ranked)
        else:
            pools = SinglePool(CacheEngine(config, own, ranks=of_pools[0] if ranked else None), pins, ranked=ranked)
        undo.callback(pools.whole.close)
        events = SglangEvents(pools.engine, params.page_size) if tells else None
        if events is not None:
            undo.callback(events.close)
        wait = options.ssd_wait if config.ssd is not None else 0.0
        table = LoadTable(pools, self._links, wait=wait, alone=self._alone, ranked=ranked, counts=self.counts)
        if server.enable_metrics:
            undo.callback(ToldMetrics(pools.whole, server).close)
        undo.callback(_pass_times(Prefills(pools.whole.observe_prefill, self._device)).close)
        return _Lead(pools, table, events)

    def lookup(self, rid: str, transfers: list[PoolTransfer]) -> list[int]:
        """The longest prefix that may be loaded, in pages, from the leading rank. SGLang intersects the ranks' answers,
        so the others answer every length."""
        keys, lead = _of_kv(transfers).keys or [], self._lead
        if self._junctions is not None:
            self._junctions.whole = 0
        if lead is None:
            return [*range(1, len(keys) + 1)]
        try:
            self._name(keys)
            with lead.pools.telling(rid):
                pages = lead.table.lookup(rid, keys)
            if self._junctions is not None:
                fetch, first = lead.table.fetch(rid, keys) or (None, 0)
                self._junctions.whole = fetch.whole - first if isinstance(fetch, LinkedFetch) else 0
        except GdsCacheError as error:  # no hit: a rank that raises would leave the others in a reduction
            log_failure(None if self._broken else error)
            self._broken = True
            return []
        return [pages] if pages else []

    def load(self, rid: str, transfers: list[PoolTransfer]) -> bool:
        return self._table.load(rid, _of_kv(transfers).keys or [], lambda: self._reader.begin(transfers))

    def start_layer_wise_loading(self) -> int:
        self._used = True
        queued = self._table.take()
        number = self.layer_done_counter.queue(queued)
        if self._rank is not None:
            self._rank.order(number, queued)
        return number

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        return self.layer_done_counter.finish(counter_index)

    def cancel_queued_load(self, rid: str) -> bool:
        return self._table.cancel(rid)

    def offload(self, transfers: list[PoolTransfer], session_id: str | None = None) -> bool:
        keys = max((one.keys or [] for one in transfers), key=len)  # a pool with fewer keys has the last ones
        self._used = True
        self._table.computed(keys)
        if self._outdated or not keys:
            return False
        ready = self.record_offload_ready() if self._device.type == "cuda" else [None]
        ends = frozenset() if self._junctions is None else self._junctions.ends(transfers)
        blocks = self._reader.begin(transfers)
        self._name(keys)
        if self._lead is None:
            self._offloads.start(keys, blocks, "", ready[-1], ends)
        else:
            self._offloads.start(self._links.named(keys), blocks, self._lead.pools.salt, ready[-1], ends)
        return True

    def num_completed_offloads(self) -> int:
        return self._offloads.completed()

    def pop_completed_offload(self) -> bool:
        return self._offloads.pop()

    def reset(self) -> None:
        """SGLang's own cache is flushed: no rank uses its pages any more. Stored pages stay."""
        self._end_transfers()
        if self._rank is not None:
            self._rank.reset(self.layer_done_counter.take_number())
        self._offloads.forget()
        self._used = self._outdated = False

    def close(self) -> None:
        """Finish accepted stores, and release everything. Repeated calls are fine."""
        self._ends.close()

    def _weights_changed(self, *call: Any) -> None:
        """Find no page of the old weights, and store none that SGLang still has: it flushes first.

        If SGLang has begun no prompt since the last flush, it has none.
        """
        if self._lead is not None:
            self._lead.pools.renew_salt()
            if self._lead.events is not None:
                self._lead.events.forget_all()
        self._table.reset()
        self._outdated = self._outdated or self._used

    def _linked(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """A tree of SGLang's has a linker."""
        tree, *rest = args
        if (rest[0] if rest else kwargs["cache_linker"]) is self:
            for one in (None if self._lead is None else self._lead.events, self._junctions):
                if one is not None:
                    one.follow(tree)

    def _end_transfers(self) -> None:
        self._table.reset()
        self.layer_done_counter.reset()
        self._offloads.wait()

    def _begin_loads(self, number: int, queued: Sequence[QueuedLoad]) -> PoolLoads:
        """For a single rank: behind all launched work that may write to the loads' slots."""
        assert self._lead is not None, "a single rank leads"
        requests = [(one.hit(), one.blocks()) for one in queued]
        free = record_on(torch.cuda.current_stream(self._device)) if self._device.type == "cuda" else None
        return self._lead.pools.load_many(requests, free)

    def _name(self, keys: Sequence[str]) -> None:
        """KV events may name these hashes of SGLang's."""
        lead = self._lead
        if lead is not None and lead.events is not None and keys:
            lead.events.asked(keys, lead.pools.keys(self._links.named(keys)))

    def _alone(self) -> bool:
        """Whether no request runs: none has a row."""
        rows = self._params.req_to_token_pool
        return bool(rows.available_size() >= rows.size)


def _of_kv(transfers: list[PoolTransfer]) -> PoolTransfer:
    return next(transfer for transfer in transfers if transfer.name == PoolName.KV)


def _pass_times(prefills: Prefills) -> CallWatch:
    def begins(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        prefills.begin(prefill_of(args[1] if len(args) > 1 else kwargs.get("batch")))

    return CallWatch(TpModelWorker, ["forward_batch_generation"], begins, lambda *call: prefills.end())


def prefill_of(batch: Any) -> tuple[int, int] | None:
    """(tokens, tokens before them) of a pass that computes a part of one prompt and loads nothing; else None. `batch`:
    SGLang's `ScheduleBatch`, or None."""
    if (
        batch is None
        or len(batch.reqs) != 1
        or batch.forward_mode.name != "EXTEND"
        or batch.hicache_consumer_index >= 0
    ):
        return None
    tokens = int(batch.extend_lens[0])
    return (tokens, int(batch.prefix_lens[0])) if tokens >= LEAST_TOKENS else None
