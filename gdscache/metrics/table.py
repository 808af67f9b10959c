"""Every metric of an engine, and the function that reads it from `stats()`. Nothing of Prometheus is imported.

Each series exists from the engine's beginning, with 0: a series made at its first event would hide that event from
queries for a counter's growth. So causes are listed here, and no label has a value chosen by a caller.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from gdscache.histograms import AGES, ERRORS, SECONDS, Buckets, Histogram
from gdscache.moves import PageStatus, PrefetchEnd
from gdscache.pages.layout import PLAIN, is_plain
from gdscache.policies.admission import ADMISSIONS

Kind = Literal["counter", "gauge", "histogram"]
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

    kind: Kind
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


def _single(value: Callable[[Stats], float | None]) -> Callable[[Stats], Values]:
    return lambda stats: {} if (found := value(stats)) is None else {(): found}


def _one(group: str, name: str) -> Callable[[Stats], Values]:
    return lambda stats: {(): stats.get(group, {}).get(name, 0)}


def _labelled(values: Mapping[str, float | None]) -> Values:
    return {(label,): value for label, value in values.items() if value is not None}


def _by_tier(group: str) -> Callable[[Stats], Values]:
    return lambda stats: _labelled({**dict.fromkeys(stats["tiers"], 0), **stats.get(group, {})})


def _by_cause(group: str, causes: Iterable[str]) -> Callable[[Stats], Values]:
    zeros = dict.fromkeys(causes, 0)
    return lambda stats: _labelled({**zeros, **stats.get(group, {})})


def _drops(stats: Stats) -> Values:
    full = (f"{tier}_full" for tier in stats["tiers"] if tier != "gpu")
    return _by_cause("dropped", [*DROPS, *REFUSALS, *full])(stats)


def _of_tiers(name: str) -> Callable[[Stats], Any]:
    return lambda stats: {(tier,): about[name] for tier, about in stats["tiers"].items()}


def _asked(stats: Stats) -> Values:
    return {(): stats["tokens"]["asked"]} if "tokens" in stats else {}


def _hit(stats: Stats) -> Values:
    return _labelled(stats["tokens"]["hit"]) if "tokens" in stats else {}


def _moved(stats: Stats) -> Values:
    paths = stats["measured"]["moved_pages"]
    sizes = stats["page_bytes"], stats["plain_page_bytes"]
    return {
        (source, target): pages * sizes[is_plain(source) or is_plain(target)]
        for source, to in paths.items()
        for target, pages in to.items()
    }


def _by_tier_and_size(name: str) -> Callable[[Stats], Histograms]:
    return lambda stats: {
        (tier, size): buckets for tier, sizes in stats["measured"][name].items() for size, buckets in sizes.items()
    }


def _request_waits(stats: Stats) -> Histograms:
    waits = stats["measured"]["wait_seconds"]
    return {(what,): waits[what] for what in ("verdict", "pages")}


def _prefetch(name: str, causes: Iterable[str]) -> Callable[[Stats], Values]:
    zeros = dict.fromkeys(causes, 0)
    return lambda stats: _labelled({**zeros, **stats["prefetch"][name]})


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


def _lost(stats: Stats) -> Values:
    ssds = [about for tier, about in stats["tiers"].items() if tier in ("ssd", f"ssd{PLAIN}")]
    lost = Counter(dict.fromkeys(LOSSES, 0))
    for about in ssds:
        lost.update(about.get("lost_at_recovery", {}))
    return _labelled(lost) if ssds else {}


def _leased(stats: Stats) -> Values:
    pages = Counter(dict.fromkeys(OWNERS, 0))
    for lease in stats["leases"]:
        pages[lease["owner"]] += lease["pages"]
    return _labelled(pages)


def _admission(name: str, of: str = "") -> Callable[[Stats], Values]:
    """A figure of the SSD's admission, or of its part `of`; none without them."""

    def read(stats: Stats) -> float | None:
        found = stats["store_policy"]["admission"]
        found = found[of] if found is not None and of else found
        return None if found is None else float(found[name])

    return _single(read)


def _gate(name: str) -> Callable[[Stats], Values]:
    decisions = dict.fromkeys(_DECISIONS if name == "hits" else (d for d in _DECISIONS if d != "cut"), 0)
    return lambda stats: _labelled({**decisions, **found}) if (found := stats["gate"].get(name)) is not None else {}


def _load_errors(stats: Stats) -> Histograms:
    known = {tier: one["relative_errors"] for tier, one in stats["gate"]["tiers"].items()}
    return {(tier,): known.get(tier) or Histogram(ERRORS).describe() for tier in stats["tiers"] if tier != "gpu"}


def _ranks(read: Callable[[Mapping[str, Any]], float]) -> Callable[[Stats], Values]:
    return lambda stats: {(str(rank["rank"]),): read(rank) for rank in stats["ranks"] or ()}


def _events(name: str) -> Callable[[Stats], Values]:
    return _single(lambda stats: None if stats["events"] is None else stats["events"][name])


# -- the table ---------------------------------------------------------------------------------------------------------


def _family(
    kind: Kind,
    name: str,
    text: str,
    read: Callable[[Stats], Any],
    labels: Labels = (),
    *,
    bounds: Sequence[float] = (),
    hybrid: bool = False,
) -> Family:
    """`name`: without `gdscache_`. `hybrid`: the part of a hybrid engine for whole hits has the metric, too."""
    name = f"gdscache_{name}"
    return Family(kind, name, text, labels, read if hybrid else lambda s: read(s) if "tiers" in s else {}, bounds)


_counter = functools.partial(_family, "counter")
_gauge = functools.partial(_family, "gauge")
_histogram = functools.partial(_family, "histogram", bounds=SECONDS)
_TIER, _CAUSE = ("tier",), ("cause",)


def _ages(name: str, text: str, of: str) -> Family:
    return _histogram(name, text, _of_tiers(of), _TIER, bounds=AGES)


FAMILIES = (
    # Lookups
    _counter("lookups", "Lookups.", _one("lookups", "requests")),
    _counter("lookup_tokens", "Tokens of full pages that lookups asked for.", _asked, hybrid=True),
    _counter("hit_tokens", "Tokens that lookups found, by the fastest tier.", _hit, _TIER, hybrid=True),
    _counter("lookup_pages", "Pages looked up.", _one("lookups", "pages")),
    _counter("hit_pages", "Pages found, by their fastest tier.", _by_tier("hits"), _TIER),
    _counter("miss_pages", "Pages not found or not loaded, by cause.", _by_cause("misses", MISSES), _CAUSE),
    _counter("gate_hits", "Hits below the GPU, by load.gate's decision.", _gate("hits"), ("decision",), hybrid=True),
    _counter(
        "gate_tokens",
        "Tokens of hits below the GPU, by load.gate's decision.",
        _gate("tokens"),
        ("decision",),
        hybrid=True,
    ),
    # Loads
    _counter("loaded_pages", "Pages loaded, by source.", _by_tier("loaded"), _TIER),
    _counter("loaded_bytes", "Bytes of pages loaded, by source.", _by_tier("bytes_loaded"), _TIER),
    _histogram(
        "load_duration_seconds",
        "From the begin of a load, or of a chunk of a prefetch, to its verdict, by its slowest tier and its size.",
        _by_tier_and_size("load_seconds"),
        ("tier", "size"),
    ),
    _histogram(
        "layer_wait_seconds",
        "Waits for a layer of a load.",
        lambda stats: {(): stats["measured"]["wait_seconds"]["layer"]},
    ),
    _histogram(
        "request_wait_seconds",
        "Waits of a request: for the verdict on its load, or for its pages to come to the CPU tier.",
        _request_waits,
        ("wait",),
    ),
    _counter("moved_bytes", "Bytes of good pages that went from one place to another.", _moved, ("source", "target")),
    # Stores
    _counter("stores", "Stores.", _one("stores", "requests")),
    _counter("present_pages", "Pages of stores that were there already.", _one("stores", "present")),
    _counter("unfit_pages", "Pages of stores that do not fit into packed extents.", _one("stores", "unfit")),
    _counter("stored_pages", "Pages committed, by tier.", _by_tier("stored"), _TIER),
    _counter("dropped_pages", "Pages of stores dropped, by cause.", _drops, _CAUSE),
    _histogram(
        "store_duration_seconds",
        "From a store to the commit of pages of it, by tier and by the size of the store.",
        _by_tier_and_size("store_seconds"),
        ("tier", "size"),
    ),
    _gauge("store_queue_bytes", "Bytes accepted and not done.", _one("store_queue", "bytes")),
    _gauge("store_queue_to_ssd_bytes", "Bytes of them on their way to the SSD.", _one("store_queue", "to_ssd_bytes")),
    _gauge(
        "store_queue_limit_bytes",
        "The most of them on their way to the SSD, and of the others; of both without a CPU tier.",
        _one("store_queue", "limit_bytes"),
    ),
    _counter("admitted_pages", "Pages that the SSD's admission let in.", _admission("admitted")),
    _counter("refused_pages", "Pages the SSD's admission refused, by cause.", _by_cause("refused", REFUSALS), _CAUSE),
    _gauge("endurance_bytes", "Bytes ssd.endurance lets be written a day.", _admission("bytes_per_day", "endurance")),
    _gauge("endurance_left_bytes", "Bytes ssd.endurance lets be written now.", _admission("left_bytes", "endurance")),
    # Tiers
    _gauge("tier_capacity_bytes", "Bytes reserved.", _of_tiers("capacity_bytes"), _TIER),
    _gauge("tier_slots", "Pages that fit.", _of_tiers("slots"), _TIER),
    _gauge("tier_pages", "Pages there, those on their way included.", _of_tiers("pages"), _TIER),
    _gauge("tier_dirty_pages", "Pages that no lower tier has yet (write_back).", _of_tiers("dirty_pages"), _TIER),
    _gauge("tier_free_slots", "Slots free without evicting.", _of_tiers("free_slots"), _TIER),
    _counter("evicted_pages", "Pages evicted, by tier.", _of_tiers("evictions"), _TIER),
    _ages(
        "evicted_page_age_seconds",
        "Time since they came, of a sample of pages that are evicted.",
        "evicted_age_seconds",
    ),
    _ages(
        "evicted_page_idle_seconds",
        "Time since they were used, or came, of a sample of pages that are evicted.",
        "evicted_idle_seconds",
    ),
    _ages(
        "page_reuse_gap_seconds", "Time from one use of a page to the next, of a sample of pages.", "reuse_gap_seconds"
    ),
    _counter("expired_pages", "Pages dropped as their ttl was over.", _by_tier("expired"), _TIER),
    _counter("lost_pages", "Pages that the SSD tier gave up when it was opened, by cause.", _lost, _CAUSE),
    _gauge("leased_pages", "Pages held in their slots, by holder.", _leased, ("owner",)),
    # Trouble
    _gauge(
        "tier_switched_off",
        "1 while nothing is read from a tier of files, nor written: its I/O hangs or fails, or its directory was lost.",
        _switched_off,
        _TIER,
    ),
    _counter("switch_offs", "Times that a tier was switched off: I/O hung, or failed.", _switches, _CAUSE),
    _gauge("late_requests", "Reads and writes past their deadline.", _late, ("op",)),
    _gauge(
        "quarantined_slots",
        "Slots that I/O past its deadline may still touch, by the pool that they are of.",
        lambda stats: _labelled(_quarantine(stats).get("held_slots", {})),
        ("pool",),
    ),
    _gauge("failing_pages", "Pages whose last read failed.", _given_up("failing_pages")),
    _counter("given_up_pages", "Pages dropped as their reads kept failing.", _given_up("given_up")),
    _gauge("rank_running", "1 while a rank answers.", _ranks(lambda rank: int(rank["state"] == "running")), ("rank",)),
    _gauge(
        "rank_overdue_orders",
        "Orders that a rank has not answered in time.",
        _ranks(lambda rank: rank["overdue"]),
        ("rank",),
    ),
    _gauge("concerns", "Warnings of the configuration when it was opened.", lambda stats: {(): len(stats["concerns"])}),
    _gauge(
        "copies",
        "1 for the page copier in use: cuda, copy_engine or native.",
        lambda stats: {} if stats["copies"] is None else {(stats["copies"]["name"],): 1},
        ("mover",),
    ),
    # Prefetches
    _counter("prefetches", "Prefetches.", _one("prefetch", "requests")),
    _counter(
        "prefetches_ended", "Prefetches ended, by why.", _prefetch("ended", [e.value for e in PrefetchEnd]), _CAUSE
    ),
    _counter(
        "prefetch_pages",
        "Pages prefetches read, by verdict.",
        _prefetch("pages", [PageStatus.LOADED.value, "cleared", *BAD]),
        _CAUSE,
    ),
    _counter("prefetch_bytes", "Bytes prefetched, of good pages.", _one("prefetch", "bytes")),
    _counter("prefetch_used_pages", "Prefetched pages that a load then used.", _one("prefetch", "used_pages")),
    _counter("prefetch_lost_pages", "Prefetched pages that left the CPU tier unused.", _one("prefetch", "lost_pages")),
    _gauge("prefetches_under_way", "Prefetches that have not ended.", _one("prefetch", "under_way")),
    _gauge("prefetch_unused_pages", "Prefetched pages that no load has used yet.", _one("prefetch", "unused_pages")),
    _gauge("prefetch_held_pages", "Unused pages of prefetches, and pages under way.", _one("prefetch", "held_pages")),
    _gauge("prefetch_quota_pages", "The most of them.", _one("prefetch", "quota_pages")),
    # The gate's figures
    _gauge(
        "load_bytes_per_second",
        "Bandwidth that estimates use, by source.",
        lambda stats: _labelled(stats["bytes_per_second"]),
        _TIER,
    ),
    _gauge(
        "load_latency_seconds",
        "Estimated seconds of a load before its bytes move, by source.",
        lambda stats: _labelled({name: one["latency_seconds"] for name, one in stats["gate"]["tiers"].items()}),
        _TIER,
    ),
    _gauge(
        "prefill_tokens_per_second",
        "Estimated tokens a second of prefills.",
        _single(lambda stats: stats["gate"]["prefill"]["tokens_per_second"]),
    ),
    _histogram(
        "load_error_ratio",
        "Errors of load estimates, relative to the loads' times, by source.",
        _load_errors,
        _TIER,
        bounds=ERRORS,
    ),
    _histogram(
        "prefill_error_ratio",
        "Errors of prefill estimates, relative to the prefills' times.",
        lambda stats: {(): stats["gate"]["prefill"]["relative_errors"]},
        bounds=ERRORS,
    ),
    # KV events
    _counter("event_batches", "Batches of KV events.", _events("batches")),
    _counter("event_dropped_pages", "Pages whose KV events were dropped.", _events("dropped_pages")),
    _gauge("event_waiting_pages", "Pages whose KV events wait.", _events("waiting_pages")),
)
