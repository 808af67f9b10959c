"""Every metric of an engine, and the function that reads it from `stats()`. Nothing of Prometheus is imported.

Each series exists from the engine's beginning, with 0: a series made at its first event would hide that event from
queries for a counter's growth. So causes are listed here, and no label has a value chosen by a caller.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
_OF_TOKENS = tuple(name for name in _DECISIONS if name != "cut")


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
    pools: dict[str, Stats] = {
        names: {**one, "tokens": None, "gate": {**one["gate"], **dict.fromkeys(of_pool)}}
        for names, one in stats["pools"].items()
    }
    return {"": {"gate": {name: stats["gate"].get(name) for name in of_pool}, "tokens": stats["tokens"]}, **pools}


def _found(
    figures: Any, path: Sequence[str], none: Any, zeros: Iterable[str] = (), labels: Labels = ()
) -> Iterator[tuple[Labels, Any]]:
    """The figures at a path, each name in place of a `<label>` with its own, and those of `zeros` in any case. A
    missing figure is `none`; None, and what would be below it, has no series."""
    if figures is None:
        return
    if not path:
        yield labels, figures
        return
    part, *rest = path
    missing = {} if rest else none
    if part[0] == "<":
        for name, one in {**dict.fromkeys(zeros, missing), **figures}.items():
            yield from _found(one, rest, none, (), (*labels, name))
    else:
        yield from _found(figures.get(part, missing), rest, none, zeros, labels)


def _moved(stats: Stats) -> Values:
    paths = stats["measured"]["moved_pages"]
    sizes = stats["page_bytes"], stats["plain_page_bytes"]
    return {
        (source, target): pages * sizes[is_plain(source) or is_plain(target)]
        for source, to in paths.items()
        for target, pages in to.items()
    }


def _quarantine(stats: Stats) -> Mapping[str, Any]:
    """The figures of late I/O and of switches, in the first tier of files."""
    return next((tier["quarantine"] for tier in stats["tiers"].values() if "quarantine" in tier), {})


def _late(stats: Stats) -> Values:
    found = _quarantine(stats)
    return {(op,): found[f"late_{op}s"] for op in ("read", "write")} if found else {}


def _switched_off(stats: Stats) -> Values:
    found = _quarantine(stats)
    off = (*found.get("switched_off_by_errors", ()), *found.get("switched_off_alone", ()))
    files = {tier: about for tier, about in stats["tiers"].items() if about.get("kind") == "files"}
    off = (*off, *(tier for tier, about in files.items() if about.get("state") in ("connecting", "open", "ended")))
    return {(tier,): int(found["switched_off"] or tier in off) for tier in files} if found else {}


def _switches(stats: Stats) -> Values:
    found = _quarantine(stats)
    return {("hung",): found["switch_offs"], ("errors",): found["error_switch_offs"]} if found else {}


def _lost(stats: Stats) -> Values:
    ssds = [about for tier, about in stats["tiers"].items() if tier in ("ssd", f"ssd{PLAIN}")]
    lost = Counter(dict.fromkeys(LOSSES, 0))
    for about in ssds:
        lost.update(about.get("lost_at_recovery", {}))
    return {(cause,): pages for cause, pages in lost.items()} if ssds else {}


def _leased(stats: Stats) -> Values:
    pages = Counter(dict.fromkeys(OWNERS, 0))
    for lease in stats["leases"]:
        pages[lease["owner"]] += lease["pages"]
    return {(owner,): held for owner, held in pages.items()}


def _quarantined(name: str) -> Callable[[Stats], Values]:
    return lambda stats: dict(_found(_quarantine(stats) or None, [name], 0))


def _ranks(stats: Stats, read: Callable[[Mapping[str, Any]], float]) -> Values:
    return {(str(rank["rank"]),): read(rank) for rank in stats["ranks"] or ()}


# -- the table ---------------------------------------------------------------------------------------------------------


def _family(
    kind: Kind,
    name: str,
    text: str,
    read: str | Callable[[Stats], Any],
    zeros: Iterable[str] | Callable[[Stats], Iterable[str]] = (),
    *,
    labels: Labels = (),
    bounds: Sequence[float] = (),
    hybrid: bool = False,
) -> Family:
    """`name`: without `gdscache_`. `read`: a path (`_found`) as `tiers.<tier>.pages`, or a function, with `labels`.
    `zeros`: values of the path's label whose series are there without a figure. `hybrid`: the part of a hybrid engine
    for whole hits has the metric, too."""
    path = read.split(".") if isinstance(read, str) else []
    none = Histogram(bounds).describe() if kind == "histogram" else 0

    def found(stats: Stats) -> dict[Labels, Any]:
        if not (hybrid or "tiers" in stats):
            return {}
        if callable(read):
            return dict(read(stats))
        return dict(_found(stats, path, none, zeros(stats) if callable(zeros) else zeros))

    named = tuple(part[1:-1] for part in path if part[0] == "<")
    return Family(kind, f"gdscache_{name}", text, labels or named, found, bounds)


def _tiers(stats: Stats) -> list[str]:
    return [*stats["tiers"]]


def _below_gpu(stats: Stats) -> list[str]:
    return [tier for tier in stats["tiers"] if tier != "gpu"]


def _drops(stats: Stats) -> list[str]:
    return [*DROPS, *REFUSALS, *(f"{tier}_full" for tier in _below_gpu(stats))]


_counter = functools.partial(_family, "counter")
_gauge = functools.partial(_family, "gauge")
_histogram = functools.partial(_family, "histogram", bounds=SECONDS)
_ages = functools.partial(_family, "histogram", bounds=AGES)
_errors = functools.partial(_family, "histogram", bounds=ERRORS)
_ENDURANCE = "store_policy.admission.endurance"
_ENDS = [end.value for end in PrefetchEnd]
_READ = [PageStatus.LOADED.value, "cleared", *BAD]  # verdicts on pages of prefetches

FAMILIES = (
    # Lookups
    _counter("lookups", "Lookups.", "lookups.requests"),
    _counter("lookup_tokens", "Tokens of full pages that lookups asked for.", "tokens.asked", hybrid=True),
    _counter("hit_tokens", "Tokens that lookups found, by the fastest tier.", "tokens.hit.<tier>", hybrid=True),
    _counter("lookup_pages", "Pages looked up.", "lookups.pages"),
    _counter("hit_pages", "Pages found, by their fastest tier.", "hits.<tier>", _tiers),
    _counter("miss_pages", "Pages not found or not loaded, by cause.", "misses.<cause>", MISSES),
    _counter(
        "gate_hits", "Hits below the GPU, by load.gate's decision.", "gate.hits.<decision>", _DECISIONS, hybrid=True
    ),
    _counter(
        "gate_tokens",
        "Tokens of hits below the GPU, by load.gate's decision.",
        "gate.tokens.<decision>",
        _OF_TOKENS,
        hybrid=True,
    ),
    # Loads
    _counter("loaded_pages", "Pages loaded or prefetched, by source.", "loaded.<tier>", _tiers),
    _counter("loaded_bytes", "Bytes of pages loaded or prefetched, by source.", "bytes_loaded.<tier>", _tiers),
    _histogram(
        "load_duration_seconds",
        "From the begin of a load, or of a chunk of a prefetch, to its verdict, by its slowest tier and its size.",
        "measured.load_seconds.<tier>.<size>",
    ),
    _histogram("layer_wait_seconds", "Waits for a layer of a load.", "measured.wait_seconds.layer"),
    _histogram(
        "request_wait_seconds",
        "Waits of a request: for the verdict on its load, or for its pages to come to the CPU tier.",
        lambda stats: {(what,): stats["measured"]["wait_seconds"][what] for what in ("verdict", "pages")},
        labels=("wait",),
    ),
    _counter(
        "moved_bytes", "Bytes of good pages that went from one place to another.", _moved, labels=("source", "target")
    ),
    # Stores
    _counter("stores", "Stores.", "stores.requests"),
    _counter("present_pages", "Pages of stores that were there already.", "stores.present"),
    _counter("unfit_pages", "Pages of stores that do not fit into packed extents.", "stores.unfit"),
    _counter("stored_pages", "Pages committed, by tier.", "stored.<tier>", _tiers),
    _counter("dropped_pages", "Pages of stores dropped, by cause.", "dropped.<cause>", _drops),
    _histogram(
        "store_duration_seconds",
        "From a store to the commit of pages of it, by tier and by the size of the store.",
        "measured.store_seconds.<tier>.<size>",
    ),
    _gauge("store_queue_bytes", "Bytes accepted and not done.", "store_queue.bytes"),
    _gauge("store_queue_to_ssd_bytes", "Bytes of them on their way to the SSD.", "store_queue.to_ssd_bytes"),
    _gauge(
        "store_queue_limit_bytes",
        "The most of them on their way to the SSD, and of the others; of both without a CPU tier. "
        "With model.pack it is twice store.queue.",
        "store_queue.limit_bytes",
    ),
    _counter("admitted_pages", "Pages that the SSD's admission let in.", "store_policy.admission.admitted"),
    _counter("refused_pages", "Pages the SSD's admission refused, by cause.", "refused.<cause>", REFUSALS),
    _gauge("endurance_bytes", "Bytes ssd.endurance lets be written a day.", f"{_ENDURANCE}.bytes_per_day"),
    _gauge("endurance_left_bytes", "Bytes ssd.endurance lets be written now.", f"{_ENDURANCE}.left_bytes"),
    # Tiers
    _gauge("tier_capacity_bytes", "Bytes reserved.", "tiers.<tier>.capacity_bytes"),
    _gauge("tier_slots", "Pages that fit.", "tiers.<tier>.slots"),
    _gauge("tier_pages", "Pages there, those on their way included.", "tiers.<tier>.pages"),
    _gauge("tier_dirty_pages", "Pages that no lower tier has yet (write_back).", "tiers.<tier>.dirty_pages"),
    _gauge("tier_free_slots", "Slots free without evicting.", "tiers.<tier>.free_slots"),
    _counter("evicted_pages", "Pages evicted, by tier.", "tiers.<tier>.evictions"),
    _ages(
        "evicted_page_age_seconds",
        "Time since they came, of a sample of pages that are evicted.",
        "tiers.<tier>.evicted_age_seconds",
    ),
    _ages(
        "evicted_page_idle_seconds",
        "Time since they were used, or came, of a sample of pages that are evicted.",
        "tiers.<tier>.evicted_idle_seconds",
    ),
    _ages(
        "page_reuse_gap_seconds",
        "Time from one use of a page to the next, of a sample of pages.",
        "tiers.<tier>.reuse_gap_seconds",
    ),
    _counter("expired_pages", "Pages dropped as their ttl was over.", "expired.<tier>", _tiers),
    _counter("lost_pages", "Pages that the SSD tier gave up when it was opened, by cause.", _lost, labels=("cause",)),
    _gauge("leased_pages", "Pages held in their slots, by holder.", _leased, labels=("owner",)),
    # Trouble
    _gauge(
        "tier_switched_off",
        "1 while nothing is read from a tier of files, nor written: its I/O hangs or fails, its directory was lost, or "
        "the pool does not answer.",
        _switched_off,
        labels=("tier",),
    ),
    _counter("switch_offs", "Times that a tier was switched off: I/O hung, or failed.", _switches, labels=("cause",)),
    _gauge("late_requests", "Reads and writes past their deadline.", _late, labels=("op",)),
    _gauge(
        "quarantined_slots",
        "Slots that I/O past its deadline may still touch, by the pool that they are of.",
        lambda stats: _found(_quarantine(stats), ["held_slots", "<pool>"], 0),
        labels=("pool",),
    ),
    _gauge("failing_pages", "Pages whose last read failed.", _quarantined("failing_pages")),
    _counter("given_up_pages", "Pages dropped as their reads kept failing.", _quarantined("given_up")),
    _gauge(
        "rank_running",
        "1 while a rank answers.",
        lambda stats: _ranks(stats, lambda rank: int(rank["state"] == "running")),
        labels=("rank",),
    ),
    _gauge(
        "rank_overdue_orders",
        "Orders that a rank has not answered in time.",
        lambda stats: _ranks(stats, lambda rank: rank["overdue"]),
        labels=("rank",),
    ),
    _gauge("concerns", "Warnings of the configuration when it was opened.", lambda stats: {(): len(stats["concerns"])}),
    _gauge(
        "copies",
        "1 for the page copier in use: cuda, copy_engine or native.",
        lambda stats: {} if stats["copies"] is None else {(stats["copies"]["name"],): 1},
        labels=("mover",),
    ),
    # Prefetches
    _counter("prefetches", "Prefetches.", "prefetch.requests"),
    _counter("prefetches_ended", "Prefetches ended, by why.", "prefetch.ended.<cause>", _ENDS),
    _counter("prefetch_pages", "Pages prefetches read, by verdict.", "prefetch.pages.<cause>", _READ),
    _counter("prefetch_bytes", "Bytes prefetched, of good pages.", "prefetch.bytes"),
    _counter("prefetch_used_pages", "Prefetched pages that a load then used.", "prefetch.used_pages"),
    _counter("prefetch_lost_pages", "Prefetched pages that left the CPU tier unused.", "prefetch.lost_pages"),
    _gauge("prefetches_under_way", "Prefetches that have not ended.", "prefetch.under_way"),
    _gauge("prefetch_unused_pages", "Prefetched pages that no load has used yet.", "prefetch.unused_pages"),
    _gauge("prefetch_held_pages", "Unused pages of prefetches, and pages under way.", "prefetch.held_pages"),
    _gauge("prefetch_quota_pages", "The most of them.", "prefetch.quota_pages"),
    # The gate's figures
    _gauge("load_bytes_per_second", "Bandwidth that estimates use, by source.", "bytes_per_second.<tier>"),
    _gauge(
        "load_latency_seconds",
        "Estimated seconds of a load before its bytes move, by source.",
        "gate.tiers.<tier>.latency_seconds",
    ),
    _gauge("prefill_tokens_per_second", "Estimated tokens a second of prefills.", "gate.prefill.tokens_per_second"),
    _errors(
        "load_error_ratio",
        "Errors of load estimates, relative to the loads' times, by source.",
        "gate.tiers.<tier>.relative_errors",
        _below_gpu,
    ),
    _errors(
        "prefill_error_ratio",
        "Errors of prefill estimates, relative to the prefills' times.",
        "gate.prefill.relative_errors",
    ),
    # KV events
    _counter("event_batches", "Batches of KV events.", "events.batches"),
    _counter("event_dropped_pages", "Pages whose KV events were dropped.", "events.dropped_pages"),
    _gauge("event_waiting_pages", "Pages whose KV events wait.", "events.waiting_pages"),
)
