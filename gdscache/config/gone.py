"""Keys that there were, and what took their place: for the hint of an `UnknownKeyError`."""

from __future__ import annotations

_EVICTION = "one key has the order of all tiers: set `eviction`"
_DEADLINE = "one key is for reads and writes: set `deadline`"
_WAY = "take it out: `gdscache bench copy --path` forces a way"
_FIXED = "it is fixed: take it out"
_RANKS = "take it out: one engine leads all ranks of a host, see docs/embedding.md"
_PREFETCH = "how long a prefetch is waited for is an argument of the call: `prefetch.wait(seconds)`; the rest is fixed"

GONE = {
    "rank": "take it out, and name an environment variable in ssd.path, such as $RANK",
    "model.kind": "take it out: the sizes of `model` say which kind it is",
    "model.mla_split": "take it out, and list one plane in `model.planes`",
    "model.head_group": _RANKS,
    "model.head_groups": _RANKS,
    "gpu.eviction": _EVICTION,
    "gpu.load_path": _WAY,
    "gpu.store_path": _WAY,
    "cpu.eviction": _EVICTION,
    "cpu.high_watermark": _FIXED,
    "cpu.low_watermark": _FIXED,
    "cpu.pin": "take it out: the pool is page-locked where its pages are for a GPU, if the driver can",
    "ssd.eviction": _EVICTION,
    "ssd.direct_io": "take it out: O_DIRECT is used where it works, and `gdscache doctor` says where it does not",
    "ssd.reserve": _FIXED,
    "ssd.admission": "set `store.admission`, which is for all tiers behind the CPU tier",
    "ssd.admission_offers": "it is fixed: `store.admission: second_offer` admits a page at its second offer",
    "ssd.promotion": "take it out: pages that are read from the SSD stay in the CPU tier as far as there is room",
    "tiers[].admission": "set `store.admission`, which is for all tiers behind the CPU tier",
    "store.write_hits": "it is fixed: `write_through_selective` writes a page after two hits",
    "store.deadline": _DEADLINE,
    "load.threads": _FIXED,
    "load.deadline": _DEADLINE,
    "prefetch": _PREFETCH,
    "events.queue": _FIXED,
    "events.kept": _FIXED,
    "events.enabled": "take it out: events are on where the section `events` is; `events: {}` will do",
}
