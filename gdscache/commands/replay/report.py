"""Runs over capacities and policies, as plain data. Behind `gdscache replay`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

from gdscache.commands.replay.simulate import Counts, Progress, infinite, optimum, plain_lru, silent, simulate
from gdscache.commands.replay.workload import Workload
from gdscache.errors import InvalidValueError
from gdscache.policies import POLICIES

SCHEMA = 1
_MOST_PAGES = 10**15  # of 4 KiB they are half of what a file can have
_STEP = 1000  # of the progress of one run


def capacity_pages(text: str, unique: int) -> int:
    """Pages that a capacity means: `5000`, or `12.5%` of the trace's `unique` pages (rounded down, at least one).

    Raises `InvalidValueError` for anything else and for less than a page.
    """
    digits = text.strip()
    percent = digits.endswith("%")
    try:
        value = Decimal(digits.removesuffix("%"))
    except InvalidOperation:
        value = Decimal("NaN")
    if not value.is_finite() or not 0 < value <= _MOST_PAGES or (not percent and value != int(value)):
        raise InvalidValueError(
            f"capacity {text[:40]!r} is neither pages nor percent",
            f"write --capacity 5000 or --capacity 12.5%; at most {_MOST_PAGES:,} pages",
        )
    return max(1, int(value * unique / 100)) if percent else int(value)


def run(
    workload: Workload, capacities: Sequence[str], policies: Sequence[str], progress: Progress = silent
) -> dict[str, Any]:
    """Replay a workload on a tier of each capacity with each policy, and find what they are compared with.

    `seconds` of a run are of the processor. `progress(done, total, text)` is called now and then. Raises
    `InvalidValueError` for a capacity that cannot be understood and a policy that is not in `POLICIES`, before anything
    runs.
    """
    for name in policies:
        if name not in POLICIES:
            raise InvalidValueError(f"no policy is named {name!r}", f"--policy is one of {', '.join(POLICIES)}")
    references, unique = workload.references, len(workload.names)
    if not references:
        raise InvalidValueError(
            f"no prompt of the trace has a full page of {workload.page_tokens} tokens", "set --page-tokens to less"
        )
    sizes = sorted({capacity_pages(text, unique) for text in capacities})
    total = _STEP * (1 + len(sizes) * (2 + len(policies)))
    finished = 0

    def step(text: str) -> Progress:
        return lambda done, of, _: progress(finished + _STEP * done // of, total, text)

    progress(finished, total, "infinite")
    forever = _described(infinite(workload), workload)
    finished += _STEP
    runs, bounds, plain = [], [], []
    for pages in sizes:
        size = {"capacity_pages": pages, "capacity_percent": 100 * pages / unique}
        progress(finished, total, f"optimum, {pages:,} pages")
        best = optimum(workload, pages)
        bounds.append({**size, **_described(best, workload)})
        finished += _STEP
        progress(finished, total, f"plain LRU, {pages:,} pages")
        base = plain_lru(workload, pages)
        plain.append({**size, **_flat(base, workload)})
        finished += _STEP
        for name in policies:
            start = time.process_time()
            counts = simulate(workload, pages, POLICIES[name](), step(f"{name}, {pages:,} pages"))
            took = time.process_time() - start
            gap = best.hits - base.hits
            compared = {
                "of_optimum": counts.hits / best.hits if best.hits else None,
                "of_plain_lru": counts.hits / base.hits if base.hits else None,
                "gap_closed": (counts.hits - base.hits) / gap if gap else None,
            }
            runs.append({"policy": name, **size, **_described(counts, workload), **compared, "seconds": took})
            finished += _STEP
    progress(total, total, "done")
    return {
        "schema": SCHEMA,
        "workload": {
            "requests": len(workload.prompts),
            "page_tokens": workload.page_tokens,
            "partial_pages": workload.partial,
            "pages": references,
            "unique_pages": unique,
            "blocks": workload.blocks,
            "tokens": workload.tokens,
        },
        "infinite": forever,
        "optimum": bounds,
        "plain_lru": plain,
        "runs": runs,
    }


def _flat(counts: Counts, workload: Workload) -> dict[str, Any]:
    return {
        "hit_rate": counts.hits / workload.references,
        "hit_pages": counts.hits,
        "miss_pages": {"cold": counts.cold, "absent": counts.absent},
        "written_pages": counts.written,
        "evictions": counts.evictions,
    }


def _described(counts: Counts, workload: Workload) -> dict[str, Any]:
    return {
        **_flat(counts, workload),
        "hit_blocks": counts.hit_blocks,
        "miss_blocks": workload.blocks - counts.hit_blocks,
        "hit_tokens": counts.hit_tokens,
        "miss_tokens": workload.tokens - counts.hit_tokens,
        "token_hit_rate": counts.hit_tokens / workload.tokens,
        "unstored_pages": counts.unstored,
    }
