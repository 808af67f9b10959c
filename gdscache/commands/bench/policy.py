"""The default policies beside all others, on recorded and on made-up traffic; the index's cost a page.

Behind `gdscache bench policy`.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gdscache.commands.bench import policy_admission
from gdscache.commands.bench.measure import Progress, Series, frozen_heap, silent, target
from gdscache.commands.replay import report as replays
from gdscache.commands.replay.synthetic import KINDS, generate
from gdscache.commands.replay.trace import Request, read_trace
from gdscache.commands.replay.workload import expand
from gdscache.config import CpuConfig
from gdscache.errors import InvalidValueError
from gdscache.index.index import PageIndex
from gdscache.index.table import PageState
from gdscache.limits import KEY_BYTES
from gdscache.pages.keys import Page
from gdscache.policies import POLICIES, new_policy

DEFAULT: str = CpuConfig().eviction
CAPACITIES = ("1%", "5%", "10%", "25%", "50%")
RECORDED = "recorded"  # the name of the traffic that is read from files
INDEX_PAGES = (10_000, 100_000, 1_000_000)
PROMPT_PAGES = 24
# For recorded traffic: hits against plain LRU's, by percent of the unique pages; below LRU nowhere.
AT_LEAST = {"1%": 1.69, "5%": 1.16, "10%": 1.03, "25%": 1.0, "50%": 1.0}
AT_LEAST_MADE_UP = 0.99
US_A_PAGE = 15.0
FLATNESS = 1.5
REPLAY_SECONDS = 10.0  # for recorded traffic, at any capacity


@dataclass(frozen=True)
class Settings:
    """What is replayed and timed."""

    traces: tuple[Path, ...] = ()
    kinds: tuple[str, ...] = tuple(KINDS)
    policies: tuple[str, ...] = tuple(POLICIES)
    capacities: tuple[str, ...] = CAPACITIES
    seconds: float = 3600.0  # of made-up traffic
    seed: int = 0
    index_pages: tuple[int, ...] = INDEX_PAGES
    index_prompts: int = 400  # timed, in a round
    repeat: int = 3
    admission: policy_admission.Plan | None = field(default_factory=policy_admission.Plan)

    @classmethod
    def quick(cls) -> Settings:
        return cls(
            seconds=120.0,
            capacities=("5%", "25%"),
            index_pages=(1_000, 4_000),
            index_prompts=40,
            repeat=1,
            admission=policy_admission.Plan.quick(),
        )

    def describe(self) -> dict[str, Any]:
        return {**asdict(self), "traces": [path.name for path in self.traces]}


def check(settings: Settings) -> None:
    """Raise `InvalidValueError` for what cannot be measured, before anything is."""
    for known, names, option in ((POLICIES, settings.policies, "--policy"), (KINDS, settings.kinds, "--kind")):
        for name in names:
            if name not in known:
                raise InvalidValueError(f"{option} {name!r} does not exist", f"it is one of {', '.join(known)}")


def run(settings: Settings, progress: Progress = silent) -> dict[str, Any]:
    """All of it. `progress(done, total, text)` is called now and then."""
    check(settings)
    traffic, skipped = [], []
    runs: list[dict[str, Any]] = []
    if settings.traces:
        missing = [str(path) for path in settings.traces if not path.is_file()]
        if missing:
            skipped.append({"traffic": RECORDED, "why": f"{', '.join(missing)}: no such file"})
        else:
            requests = read_trace(settings.traces)
            traffic.append(_replayed(RECORDED, requests, settings, progress))
            runs += _admissions(RECORDED, requests, settings, progress)
    else:
        skipped.append({"traffic": RECORDED, "why": "no trace was given: name Mooncake's conversation_trace.jsonl"})
    for kind in settings.kinds:
        requests = generate(kind, settings.seed, settings.seconds)
        traffic.append(_replayed(kind, requests, settings, progress))
        runs += _admissions(kind, requests, settings, progress)
    return {
        "default": DEFAULT,
        "traffic": traffic,
        "skipped": skipped,
        "eviction": verdicts(traffic),
        "admission": {
            "default": policy_admission.DEFAULT.label,
            "model": policy_admission.MODEL,
            "runs": runs,
            "verdicts": policy_admission.verdicts(runs),
        },
        "replay": _replay_seconds(traffic),
        "index": index_cost(settings, progress),
    }


def _replayed(name: str, requests: Sequence[Request], settings: Settings, progress: Progress) -> dict[str, Any]:
    workload = expand(requests)

    def step(done: int, total: int, text: str) -> None:
        progress(done, total, f"{name}: {text}")

    return {"traffic": name, **replays.run(workload, settings.capacities, settings.policies, step)}


def _admissions(name: str, requests: Sequence[Request], settings: Settings, progress: Progress) -> list[dict[str, Any]]:
    plan = settings.admission
    if plan is None or name not in (RECORDED, *plan.kinds):
        return []
    return policy_admission.run(name, requests, plan, progress)


def verdicts(traffic: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The default order on each kind of traffic at each capacity: hits against plain LRU's, and what they should be."""
    found = []
    for part in traffic:
        for run in part["runs"]:
            if run["policy"] != DEFAULT or run["of_plain_lru"] is None:
                continue
            recorded = part["traffic"] == RECORDED
            percent = f"{run['capacity_percent']:.0f}%"
            least = AT_LEAST.get(percent, 1.0) if recorded else AT_LEAST_MADE_UP
            best = max(other["hit_pages"] for other in part["runs"] if _same_size(run, other))
            found.append(
                {
                    "traffic": part["traffic"],
                    "capacity_percent": run["capacity_percent"],
                    "ratio": run["of_plain_lru"],
                    "gap_closed": run["gap_closed"],
                    "of_best": run["hit_pages"] / best if best else None,
                    "seconds": run["seconds"],
                    **target(run["of_plain_lru"], least, at_least=True),
                }
            )
    return found


def _replay_seconds(traffic: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The longest replay of recorded traffic with the default order; None where there was none."""
    recorded = [run for part in traffic if part["traffic"] == RECORDED for run in part["runs"]]
    spent = [run["seconds"] for run in recorded if run["policy"] == DEFAULT]
    return {"seconds": max(spent), **target(max(spent), REPLAY_SECONDS, at_least=False)} if spent else None


def _same_size(run: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return bool(run["capacity_pages"] == other["capacity_pages"])


def index_cost(settings: Settings, progress: Progress = silent) -> dict[str, Any]:
    """Microseconds to look up, store and evict a page with so many resident, in prompts of `PROMPT_PAGES` pages.

    Every prompt is new, so each of its pages takes the place of another; a prompt stored not long before is looked up
    and touched with it. One thread, no bytes; the keys are made before. Time of the processor, so that others on
    the machine do not count.
    """
    rows = []
    for pages in settings.index_pages:
        progress(0, 1, f"index of {pages:,} pages")
        spent = _index_rounds(pages, settings.index_prompts, settings.repeat)
        micros = Series(tuple(1e6 * seconds / (settings.index_prompts * PROMPT_PAGES) for seconds in spent))
        rows.append(
            {"pages": pages, "us_per_page": micros.describe(), **target(micros.median, US_A_PAGE, at_least=False)}
        )
    medians = [row["us_per_page"]["median"] for row in rows]
    flat = max(medians) / medians[0] if medians else 1.0
    return {"policy": DEFAULT, "rows": rows, "flatness": {"ratio": flat, **target(flat, FLATNESS, at_least=False)}}


def _index_rounds(pages: int, prompts: int, repeat: int) -> list[float]:
    """Seconds of each round of so many prompts."""
    index = PageIndex(pages, new_policy(DEFAULT))
    turn = 0
    before: list[list[Page]] = []
    for _ in range(0, pages + PROMPT_PAGES, PROMPT_PAGES):
        prompt = _prompt(turn)
        _store(index, prompt)
        before = [*before[-15:], prompt]
        turn += 1
    spent = []
    for _ in range(repeat):
        coming = [_prompt(turn + i) for i in range(prompts)]
        turn += prompts
        evicted, there = index.evictions, len(index)
        with frozen_heap():
            start = time.thread_time()
            for prompt in coming:
                index.touch([page.key for page in reversed(before[0]) if index.has(page.key)])
                _store(index, prompt)
                before = [*before[-15:], prompt]
            spent.append(time.thread_time() - start)
        evicted = index.evictions - evicted
        if len(index) - there != prompts * PROMPT_PAGES - evicted or not 0.99 * pages <= len(index) <= pages:
            raise RuntimeError(f"{evicted} evictions for {prompts * PROMPT_PAGES} stored pages, {len(index)} are left")
    return spent


def _store(index: PageIndex, prompt: Sequence[Page]) -> None:
    """Look a prompt up, and store it, as an engine does."""
    lacking = [page for page in prompt if not index.has(page.key)]
    slots = index.allocate_some(len(lacking), keep={page.key for page in prompt})
    for page, slot in zip(lacking, slots, strict=False):
        entry = index.insert(page, slot, PageState.PENDING)
        index.lease(entry)
        index.commit(entry)
        index.release(entry)


def _prompt(number: int) -> list[Page]:
    namespace = b"\0" * KEY_BYTES
    above, pages = namespace, []
    for place in range(PROMPT_PAGES):
        key = hashlib.blake2b(b"%d %d" % (number, place), digest_size=KEY_BYTES).digest()
        pages.append(Page(key, above, namespace))
        above = key
    return pages
