"""Every metric of an engine, and the function that reads it from `stats()`. Nothing of Prometheus is imported.

Each series exists from the engine's beginning, with 0: a series made at its first event would hide that event from
queries for a counter's growth. So causes are listed here, and no label has a value chosen by a caller.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, cast

from gdscache.histograms import AGES, ERRORS, SECONDS, Buckets
from gdscache.moves import PageStatus, PrefetchEnd
from gdscache.policies.admission import ADMISSIONS

Stats = Mapping[str, Any]
Labels = tuple[str, ...]
Values = Mapping[Labels, float]  # by the values of the metric's labels
Histograms = Mapping[Labels, Buckets]

_GOOD = (PageStatus.PENDING, PageStatus.LOADED, PageStatus.UNFIT)  # no page of a load is unfit
_AWAY = ("switched_off", "lock_lost", "rank_away", "rank_lost")  # causes while a tier, or all tiers, are unavailable
BAD = tuple(status.value for status in PageStatus if status not in _GOOD)  # verdicts
MISSES = ("absent", "expired", "quarantined", *BAD)
REFUSALS = (*(name for name in ADMISSIONS if name != "all"), "queue_full", "no_prefix", "endurance")
DROPS = ("queue_full", "cleared", "expired", "closed", "error", "deadline", "io_error", "disk_full", *_AWAY)
LOSSES = ("slot", "row", "packed", "expired", "length", "namespace", "duplicate", "parent")
OWNERS = ("load", "sequence", "prefetch", "store", "pin", "prefetch pin", "quarantine")
_DECISIONS = ("loaded", "cut", "declined", "explored", "unmeasured")


class Family(NamedTuple):
    """One metric: kind, name (without `_total`), help, labels, the function that reads it from `stats()`, and the
    bounds of a histogram."""

    kind: Literal["counter", "gauge", "histogram"]
    name: str
    help: str
    labels: Labels
    read: Callable[[Stats], Any]
    bounds: Sequence[float] = ()

    @property
    def sample(self) -> str:
        return f"{self.name}_total" if self.kind == "counter" else self.name


# -- reading -----------------------------------------------------------------------------------------------------------
# A whole engine has `tiers`; the part of a hybrid one for whole hits has `gate` and `tokens` alone (`parts_of`).


def parts_of(stats: Stats) -> dict[str, Stats]:
    """`stats()` by the names of a pool's groups; "": of whole hits, or of an engine without pools."""
    if "pools" not in stats:
        return {"": stats}
    of_pool = ("hits", "tokens", "pages")  # of a gate: its decisions on whole hits
    pools: dict[str, Stats] = {}
    for names, one in stats["pools"].items():
        gate = {name: value for name, value in one["gate"].items() if name not in of_pool}
        pools[names] = {**{name: value for name, value in one.items() if name != "tokens"}, "gate": gate}
    gate = {name: value for name, value in stats["gate"].items() if name in of_pool}
    return {"": {"gate": gate, "tokens": stats["tokens"]}, **pools}


def _of_engine(read: Callable[[Stats], Any]) -> Callable[[Stats], Any]:
    return lambda stats: read(stats) if "tiers" in stats else {}


def _single(value: Callable[[Stats], float | None]) -> Callable[[Stats], Values]:
    return _of_engine(lambda stats: {} if (found := value(stats)) is None else {(): found})


def _one(group: str, name: str) -> Callable[[Stats], Values]:
    return _single(lambda stats: stats.get(group, {}).get(name, 0))


def _labelled(values: Mapping[str, float | None]) -> Values:
    return {(label,): value for label, value in values.items() if value is not None}


def _by_tier(group: str) -> Callable[[Stats], Values]:
    return _of_engine(lambda stats: _labelled({**dict.fromkeys(stats["tiers"], 0), **stats.get(group, {})}))


def _by_cause(group: str, causes: Iterable[str]) -> Callable[[Stats], Values]:
    zeros = dict.fromkeys(causes, 0)
    return _of_engine(lambda stats: _labelled({**zeros, **stats.get(group, {})}))


def _drops(stats: Stats) -> Values:
    zeros = dict.fromkeys([*DROPS, *REFUSALS, *(f"{tier}_full" for tier in stats["tiers"] if tier != "gpu")], 0)
    return _labelled({**zeros, **stats.get("dropped", {})})


def _of_tiers(name: str) -> Callable[[Stats], Values]:
    return _of_engine(lambda stats: _labelled({tier: about[name] for tier, about in stats["tiers"].items()}))


def _ages(name: str) -> Callable[[Stats], Histograms]:
    return _of_engine(lambda stats: {(tier,): about[name] for tier, about in stats["tiers"].items()})


def _asked(stats: Stats) -> Values:
    return {(): stats["tokens"]["asked"]} if "tokens" in stats else {}


def _hit(stats: Stats) -> Values:
    return _labelled(stats["tokens"]["hit"]) if "tokens" in stats else {}


def _moved(stats: Stats) -> Values:
    paths = stats["measured"]["moved_pages"]
    return {
        (source, target): pages * stats["page_bytes"] for source, to in paths.items() for target, pages in to.items()
    }


def _by_tier_and_size(name: str) -> Callable[[Stats], Histograms]:
    return _of_engine(
        lambda stats: {
            (tier, size): buckets for tier, sizes in stats["measured"][name].items() for size, buckets in sizes.items()
        }
    )


def _wait(what: str) -> Callable[[Stats], Histograms]:
    return _of_engine(lambda stats: {(): stats["measured"]["wait_seconds"][what]})


def _request_waits(stats: Stats) -> Histograms:
    waits = stats["measured"]["wait_seconds"]
    return {(what,): waits[what] for what in ("verdict", "pages")}


def _prefetch(name: str, causes: Iterable[str]) -> Callable[[Stats], Values]:
    zeros = dict.fromkeys(causes, 0)
    return _of_engine(lambda stats: _labelled({**zeros, **stats["prefetch"][name]}))


def _quarantine(stats: Stats) -> Mapping[str, Any]:
    """The figures of late I/O and of switches, in the first tier of files."""
    return next((tier["quarantine"] for tier in stats["tiers"].values() if "quarantine" in tier), {})


def _late(stats: Stats) -> Values:
    found = _quarantine(stats)
    return {(op,): found[f"late_{op}s"] for op in ("read", "write")} if found else {}


def _switched_off(stats: Stats) -> Values:
    found = _quarantine(stats)
    off = (*found.get("switched_off_by_errors", ()), *found.get("switched_off_alone", ()))
    files = [tier for tier, about in stats["tiers"].items() if about.get("kind") == "files"]
    return {(tier,): int(found["switched_off"] or tier in off) for tier in files} if found else {}


def _switches(stats: Stats) -> Values:
    found = _quarantine(stats)
    return {("hung",): found["switch_offs"], ("errors",): found["error_switch_offs"]} if found else {}


def _given_up(name: str) -> Callable[[Stats], Values]:
    return _single(lambda stats: _quarantine(stats).get(name))


def _quarantined(stats: Stats) -> Values:
    return _labelled(_quarantine(stats).get("held_slots", {}))


def _lost(stats: Stats) -> Values:
    ssd = stats["tiers"].get("ssd")
    return {} if ssd is None else _labelled({**dict.fromkeys(LOSSES, 0), **ssd.get("lost_at_recovery", {})})


def _leased(stats: Stats) -> Values:
    pages = Counter(dict.fromkeys(OWNERS, 0))
    for lease in stats["leases"]:
        pages[lease["owner"]] += lease["pages"]
    return _labelled(pages)


def _admission(stats: Stats) -> Mapping[str, Any] | None:
    return cast("Mapping[str, Any] | None", stats["store_policy"]["admission"])


def _admitted(stats: Stats) -> float | None:
    admission = _admission(stats)
    return None if admission is None else float(admission["admitted"])


def _endurance(name: str) -> Callable[[Stats], Values]:
    def read(stats: Stats) -> float | None:
        admission = _admission(stats)
        budget = None if admission is None else admission["endurance"]
        return None if budget is None else float(budget[name])

    return _single(read)


def _gate(name: str) -> Callable[[Stats], Values]:
    decisions = dict.fromkeys(_DECISIONS if name == "hits" else (d for d in _DECISIONS if d != "cut"), 0)
    return lambda stats: _labelled({**decisions, **found}) if (found := stats["gate"].get(name)) is not None else {}


def _of_loads(name: str) -> Callable[[Stats], Values]:
    return _of_engine(lambda stats: _labelled({tier: one[name] for tier, one in stats["gate"]["tiers"].items()}))


def _of_prefills(name: str) -> Callable[[Stats], Values]:
    return _single(lambda stats: cast("float | None", stats["gate"]["prefill"][name]))


def _load_errors(stats: Stats) -> Histograms:
    known = {tier: one["relative_errors"] for tier, one in stats["gate"]["tiers"].items()}
    return {(tier,): known.get(tier) or _no_errors() for tier in stats["tiers"] if tier != "gpu"}


def _no_errors() -> Buckets:
    return {"counts": [0] * (len(ERRORS) + 1), "sums": [0.0] * (len(ERRORS) + 1)}


def _ranks(read: Callable[[Mapping[str, Any]], float]) -> Callable[[Stats], Values]:
    return _of_engine(lambda stats: {(str(rank["rank"]),): read(rank) for rank in stats["ranks"] or ()})


def _events(name: str) -> Callable[[Stats], Values]:
    return _single(lambda stats: None if stats["events"] is None else stats["events"][name])


def _mover(stats: Stats) -> Values:
    return {} if stats["copies"] is None else {(stats["copies"]["name"],): 1}


# -- the table ---------------------------------------------------------------------------------------------------------


def _counter(name: str, text: str, labels: Labels, read: Callable[[Stats], Values]) -> Family:
    return Family("counter", name, text, labels, read)


def _gauge(name: str, text: str, labels: Labels, read: Callable[[Stats], Values]) -> Family:
    return Family("gauge", name, text, labels, read)


def _histogram(
    name: str, text: str, labels: Labels, read: Callable[[Stats], Histograms], bounds: Sequence[float] = SECONDS
) -> Family:
    return Family("histogram", name, text, labels, read, bounds)


_TIER, _CAUSE = ("tier",), ("cause",)

FAMILIES = (
    # Lookups
    _counter("gdscache_lookups", "Lookups.", (), _one("lookups", "requests")),
    _counter("gdscache_lookup_tokens", "Tokens of full pages that lookups asked for.", (), _asked),
    _counter("gdscache_hit_tokens", "Tokens of them that were found, by the fastest tier of their page.", _TIER, _hit),
    _counter("gdscache_lookup_pages", "Pages looked up.", (), _one("lookups", "pages")),
    _counter("gdscache_hit_pages", "Pages found, by their fastest tier.", _TIER, _by_tier("hits")),
    _counter("gdscache_miss_pages", "Pages not found or not loaded, by cause.", _CAUSE, _by_cause("misses", MISSES)),
    _counter("gdscache_gate_hits", "Hits below the GPU, by load.gate's decision.", ("decision",), _gate("hits")),
    _counter("gdscache_gate_tokens", "Tokens of these hits, by load.gate's decision.", ("decision",), _gate("tokens")),
    # Loads
    _counter("gdscache_loaded_pages", "Pages loaded, by source.", _TIER, _by_tier("loaded")),
    _counter("gdscache_loaded_bytes", "Bytes of pages loaded, by source.", _TIER, _by_tier("bytes_loaded")),
    _histogram(
        "gdscache_load_duration_seconds",
        "From the begin of a load, or of a chunk of a prefetch, to its verdict, by its slowest tier and its size.",
        ("tier", "size"),
        _by_tier_and_size("load_seconds"),
    ),
    _histogram("gdscache_layer_wait_seconds", "Waits for a layer of a load.", (), _wait("layer")),
    _histogram(
        "gdscache_request_wait_seconds",
        "Waits of a request: for the verdict on its load, or for its pages to come to the CPU tier.",
        ("wait",),
        _of_engine(_request_waits),
    ),
    _counter(
        "gdscache_moved_bytes",
        "Bytes of good pages that went from one place to another.",
        ("source", "target"),
        _of_engine(_moved),
    ),
    # Stores
    _counter("gdscache_stores", "Stores.", (), _one("stores", "requests")),
    _counter("gdscache_present_pages", "Pages of stores that were there already.", (), _one("stores", "present")),
    _counter(
        "gdscache_unfit_pages",
        "Pages of stores that do not fit into packed extents, and are kept as they are.",
        (),
        _one("stores", "unfit"),
    ),
    _counter("gdscache_stored_pages", "Pages committed, by tier.", _TIER, _by_tier("stored")),
    _counter("gdscache_dropped_pages", "Pages of stores dropped, by cause.", _CAUSE, _of_engine(_drops)),
    _histogram(
        "gdscache_store_duration_seconds",
        "From a store to the commit of pages of it, by tier and by the size of the store.",
        ("tier", "size"),
        _by_tier_and_size("store_seconds"),
    ),
    _gauge("gdscache_store_queue_bytes", "Bytes accepted and not done.", (), _one("store_queue", "bytes")),
    _gauge(
        "gdscache_store_queue_to_ssd_bytes",
        "Bytes of them on their way to the SSD.",
        (),
        _one("store_queue", "to_ssd_bytes"),
    ),
    _gauge(
        "gdscache_store_queue_limit_bytes",
        "The most of them on their way to the SSD, and of the others; of both without a CPU tier.",
        (),
        _one("store_queue", "limit_bytes"),
    ),
    _counter("gdscache_admitted_pages", "Pages that the SSD's admission let in.", (), _single(_admitted)),
    _counter(
        "gdscache_refused_pages",
        "Pages that the SSD's admission refused, by cause.",
        _CAUSE,
        _by_cause("refused", REFUSALS),
    ),
    _gauge(
        "gdscache_endurance_bytes", "Bytes that ssd.endurance lets be written a day.", (), _endurance("bytes_per_day")
    ),
    _gauge(
        "gdscache_endurance_left_bytes", "Bytes that ssd.endurance lets be written now.", (), _endurance("left_bytes")
    ),
    # Tiers
    _gauge("gdscache_tier_capacity_bytes", "Bytes reserved.", _TIER, _of_tiers("capacity_bytes")),
    _gauge("gdscache_tier_slots", "Pages that fit.", _TIER, _of_tiers("slots")),
    _gauge("gdscache_tier_pages", "Pages there, those on their way included.", _TIER, _of_tiers("pages")),
    _gauge(
        "gdscache_tier_dirty_pages",
        "Pages that no lower tier has and that may not go before one does (write_back).",
        _TIER,
        _of_tiers("dirty_pages"),
    ),
    _gauge("gdscache_tier_free_slots", "Slots free without evicting.", _TIER, _of_tiers("free_slots")),
    _counter("gdscache_evicted_pages", "Pages evicted, by tier.", _TIER, _of_tiers("evictions")),
    _histogram(
        "gdscache_evicted_page_age_seconds",
        "Time since they came, of a sample of pages that are evicted.",
        _TIER,
        _ages("evicted_age_seconds"),
        AGES,
    ),
    _histogram(
        "gdscache_evicted_page_idle_seconds",
        "Time since they were used, or came, of a sample of pages that are evicted.",
        _TIER,
        _ages("evicted_idle_seconds"),
        AGES,
    ),
    _histogram(
        "gdscache_page_reuse_gap_seconds",
        "Time from one use of a page to the next, of a sample of pages.",
        _TIER,
        _ages("reuse_gap_seconds"),
        AGES,
    ),
    _counter("gdscache_expired_pages", "Pages dropped as their ttl was over.", _TIER, _by_tier("expired")),
    _counter(
        "gdscache_lost_pages",
        "Pages that the SSD tier gave up when it was opened, by cause.",
        _CAUSE,
        _of_engine(_lost),
    ),
    _gauge(
        "gdscache_leased_pages",
        "Pages held in their slots, by holder.",
        ("owner",),
        _of_engine(_leased),
    ),
    # Trouble
    _gauge(
        "gdscache_tier_switched_off",
        "1 while nothing is read from a tier of files, nor written: its I/O hangs or fails, or its directory was lost.",
        _TIER,
        _of_engine(_switched_off),
    ),
    _counter(
        "gdscache_switch_offs",
        "Times that a tier was switched off: I/O hung, or failed.",
        _CAUSE,
        _of_engine(_switches),
    ),
    _gauge("gdscache_late_requests", "Reads and writes past their deadline.", ("op",), _of_engine(_late)),
    _gauge(
        "gdscache_quarantined_slots",
        "Slots that I/O past its deadline may still touch, by the pool that they are of.",
        ("pool",),
        _of_engine(_quarantined),
    ),
    _gauge("gdscache_failing_pages", "Pages whose last read failed.", (), _given_up("failing_pages")),
    _counter("gdscache_given_up_pages", "Pages dropped as their reads kept failing.", (), _given_up("given_up")),
    _gauge(
        "gdscache_rank_running",
        "1 while a rank answers.",
        ("rank",),
        _ranks(lambda rank: int(rank["state"] == "running")),
    ),
    _gauge(
        "gdscache_rank_overdue_orders",
        "Orders that a rank has not answered in time.",
        ("rank",),
        _ranks(lambda rank: rank["overdue"]),
    ),
    _gauge(
        "gdscache_concerns",
        "Warnings about the configuration when it was opened.",
        (),
        _single(lambda stats: len(stats["concerns"])),
    ),
    _gauge(
        "gdscache_copies", "1 for the page copier in use: cuda, copy_engine or native.", ("mover",), _of_engine(_mover)
    ),
    # Prefetches
    _counter("gdscache_prefetches", "Prefetches.", (), _one("prefetch", "requests")),
    _counter(
        "gdscache_prefetches_ended",
        "Prefetches ended, by why.",
        _CAUSE,
        _prefetch("ended", [e.value for e in PrefetchEnd]),
    ),
    _counter(
        "gdscache_prefetch_pages",
        "Pages prefetches read, by verdict.",
        _CAUSE,
        _prefetch("pages", [PageStatus.LOADED.value, "cleared", *BAD]),
    ),
    _counter("gdscache_prefetch_bytes", "Bytes prefetched, of good pages.", (), _one("prefetch", "bytes")),
    _counter(
        "gdscache_prefetch_used_pages",
        "Prefetched pages that a load then used.",
        (),
        _one("prefetch", "used_pages"),
    ),
    _counter(
        "gdscache_prefetch_lost_pages",
        "Prefetched pages that left the CPU tier before any load used them.",
        (),
        _one("prefetch", "lost_pages"),
    ),
    _gauge("gdscache_prefetches_under_way", "Prefetches that have not ended.", (), _one("prefetch", "under_way")),
    _gauge(
        "gdscache_prefetch_unused_pages",
        "Prefetched pages in the CPU tier that no load has used yet.",
        (),
        _one("prefetch", "unused_pages"),
    ),
    _gauge(
        "gdscache_prefetch_held_pages",
        "Pages that count against the quota of prefetches: unused ones, and those under way.",
        (),
        _one("prefetch", "held_pages"),
    ),
    _gauge("gdscache_prefetch_quota_pages", "The most of them.", (), _one("prefetch", "quota_pages")),
    # The gate's figures
    _gauge(
        "gdscache_load_bytes_per_second",
        "Bandwidth that estimates use, by source.",
        _TIER,
        _of_engine(lambda stats: _labelled(stats["bytes_per_second"])),
    ),
    _gauge(
        "gdscache_load_latency_seconds",
        "Estimated seconds of a load before its bytes move, by source.",
        _TIER,
        _of_loads("latency_seconds"),
    ),
    _gauge(
        "gdscache_prefill_tokens_per_second",
        "Estimated tokens a second of prefills.",
        (),
        _of_prefills("tokens_per_second"),
    ),
    _histogram(
        "gdscache_load_error_ratio",
        "Errors of load estimates, relative to the loads' times, by source.",
        _TIER,
        _of_engine(_load_errors),
        ERRORS,
    ),
    _histogram(
        "gdscache_prefill_error_ratio",
        "Errors of prefill estimates, relative to the prefills' times.",
        (),
        _of_engine(lambda stats: {(): stats["gate"]["prefill"]["relative_errors"]}),
        ERRORS,
    ),
    # KV events
    _counter("gdscache_event_batches", "Batches of KV events.", (), _events("batches")),
    _counter("gdscache_event_dropped_pages", "Pages whose KV events were dropped.", (), _events("dropped_pages")),
    _gauge("gdscache_event_waiting_pages", "Pages whose KV events wait.", (), _events("waiting_pages")),
)
