"""Time to first token of hits from every place, beside recomputing and the ideal. Behind `gdscache bench ttft`."""

from __future__ import annotations

import contextlib
import functools
import itertools
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from gdscache.commands.bench import kit
from gdscache.commands.bench.figures import (
    Bar,
    Ratios,
    Series,
    Values,
    compared,
    copy_rate,
    idle,
    in_turns,
    series,
    target,
)
from gdscache.commands.bench.io import IO_BYTES, BareLoop
from gdscache.commands.bench.kit import cause_of
from gdscache.commands.bench.shapes import LLAMAS
from gdscache.commands.bench.ttft_cells import (
    NOWHERE,
    Answer,
    Cell,
    Settings,
    cell_of,
    chosen,
    compare,
    transfer_seconds,
    worst,
)
from gdscache.commands.console import Table, duration, figure, percent, verdict
from gdscache.cuda.host_memory import HostBuffer
from gdscache.storage.base import Op

if TYPE_CHECKING:
    from gdscache.commands.bench.ttft_transformers import TransformersClient

Ways = dict[Any, Callable[[], Any]]
"""Ways that take turns: each measures once."""

LONG = 32 << 10  # tokens: from this length on hits are compared with the ideal
LEAST_CACHED = 50  # percent
IDEAL_TARGETS = {"cpu": 0.90, "ssd_via_cpu": 0.85}  # max(c, t) / measured
MISS_TARGET = 0.02  # of the time without a cache
OTHER_TOKENS = "it gave other tokens than without a cache"


def measure(run: kit.Run, settings: Settings, directory: Path) -> None:
    """Measure the chosen cells. Files go into a temporary directory, which is deleted. Raises `InvalidValueError`,
    `MissingPackageError`, `NoSpaceError` and `CapacityError`."""
    from gdscache.commands.bench.ttft_transformers import TransformersClient  # needs the extra hf

    cells = chosen(settings)
    run.plan([cell.label for cell in cells])
    with (
        tempfile.TemporaryDirectory(prefix="gdscache-bench-", dir=directory) as made,
        contextlib.closing(TransformersClient(settings, Path(made))) as client,
    ):
        run.found["model"] = {"engine": "transformers", "name": settings.preset, **LLAMAS[settings.preset]}
        for length, of_length in itertools.groupby(cells, lambda cell: cell.prompt_tokens):
            some = list(of_length)
            with run.failing(*(cell.label for cell in some)):
                _length(run, client, length, some)


def _length(run: kit.Run, client: TransformersClient, length: int, cells: Sequence[Cell]) -> None:
    run.say(f"{length:,} tokens: the document is computed and stored")
    nbytes = min(client.prime(length), client.settings.ceiling_bytes)
    with _ceilings(client.device, client.slab, nbytes) as (ceilings, loops):
        if any(cell.gate for cell in cells):
            run.say(f"{length:,} tokens: the gate learns")
            client.learn(length)
        for _, of_group in itertools.groupby(cells, lambda cell: cell.group):
            group = list(of_group)
            with run.guarded(*(cell.label for cell in group)):
                if group[0].where == NOWHERE:
                    _miss(run, client, *group)
                else:
                    _hits(run, client, group, ceilings, loops)


@contextlib.contextmanager
def _ceilings(device: torch.device, slab: Path, nbytes: int) -> Iterator[tuple[Ways, dict[str, str]]]:
    """The ceilings of a hit of `nbytes`: ways that measure each once, in GB/s, and the names of bare loops among them.

    `copy`: one copy of page-locked host memory to the device; on a CPU-only machine from one part of memory to another.
    `onward`: the best bare loop on the slab's first `nbytes`, which hold pages, that copies its reads on to the device.
    """
    nbytes = max(nbytes // max(IO_BYTES), 1) * max(IO_BYTES) if nbytes >= max(IO_BYTES) else nbytes
    with contextlib.ExitStack() as undo:
        source = undo.enter_context(HostBuffer(nbytes, "auto")).tensor[:nbytes]
        source.fill_(1)
        target = torch.ones(nbytes, dtype=torch.uint8, device=device)
        ways: Ways = {"copy": functools.partial(copy_rate, source, target)}
        loops: dict[str, str] = {}
        if nbytes >= min(IO_BYTES):
            loop = undo.enter_context(contextlib.closing(BareLoop(slab, nbytes, target)))
            best = loop.scout(Op.READ, onward=True)[0]
            loops["onward"] = f"{best.label}, {'O_DIRECT' if loop.direct else 'through the page cache'}"
            ways["onward"] = functools.partial(loop.run, Op.READ, best, onward=True)
        undo.callback(idle, device)
        yield ways, loops


# -- cells -------------------------------------------------------------------------------------------------------------


def _rounds(run: kit.Run, ways: Mapping[Any, Callable[[], Any]], repeat: int, text: str) -> dict[Any, list[Any]]:
    """The answers of ways in turns: of a round that warms up, and of `repeat` more."""
    return in_turns(ways, repeat + 1, lambda done, *_: run.say(f"{text}: round {min(done, repeat)} of {repeat}"))


def _miss(run: kit.Run, client: TransformersClient, cell: Cell) -> None:
    """A request without a hit, with a cache and without, in turns; the time includes the call of `store`.

    The difference is about a hundredth of the time, so short prompts have more rounds, with as many tokens in total as
    the middle one.
    """
    settings = client.settings
    rounds = settings.repeat * max(1, statistics.median_low(settings.prompts) // cell.prompt_tokens)
    ways = {cached: functools.partial(client.miss, cell, cached=cached) for cached in (True, False)}
    ours, plain = _rounds(run, ways, rounds, cell.label).values()
    with_, without = (series(a.ttft for a in some[1:]) for some in (ours, plain))
    row = {
        **cell._asdict(),
        "cached_tokens": 0,
        "bytes": {},
        "ttft_seconds": with_,
        "recompute_seconds": without,
        "added": with_["median"] / without["median"] - 1,
        "tokens": compare(ours, plain, settings.near_tie),
    }
    wrong = OTHER_TOKENS if row["tokens"] == "other" else ""
    run.add(cell.label, {"cells": [judge(row, client.device, ram=client.in_memory)]}, wrong=wrong)


def _hits(
    run: kit.Run, client: TransformersClient, cells: Sequence[Cell], ceilings: Ways, loops: Mapping[str, str]
) -> None:
    """Cells with different place, overlap and gate, in turns with their baselines and ceilings."""
    first, broken = cells[0], dict[Cell, str]()

    def hit(cell: Cell) -> Answer | None:
        try:
            return None if cell in broken else client.hit(cell)
        except kit.ERRORS as error:
            broken[cell] = cause_of(error)
            return None

    baselines = {"plain": functools.partial(client.plain, first), "resident": functools.partial(client.resident, first)}
    ways: Ways = {**ceilings, **baselines}
    ways |= {cell: functools.partial(hit, cell) for cell in cells}
    text = f"{first.prompt_tokens:,} tokens, {first.cached_percent} % cached"
    answers = _rounds(run, ways, client.settings.repeat, text)
    rates = {name: series(answers[name][1:]) for name in ceilings}
    for cell in cells:
        if cell in broken:
            run.note("failed", cell.label, broken[cell])
        else:
            row = judge(_row(client, cell, answers, rates, loops), client.device, ram=client.in_memory)
            run.add(cell.label, {"cells": [row]}, wrong=_wrong(cell, row, answers[cell]))


def _row(
    client: TransformersClient,
    cell: Cell,
    answers: Mapping[Any, Sequence[Answer]],
    rates: Mapping[str, Series],
    loops: Mapping[str, str],
) -> dict[str, Any]:
    mine, plain, resident = (series(a.ttft for a in answers[key][1:]) for key in (cell, "plain", "resident"))
    _, cached = client.of(cell)
    placed = answers[cell][-1].placed
    transfer = transfer_seconds(placed, {name: found["median"] for name, found in rates.items()})
    ideal = None if transfer is None else max(resident["median"], transfer)
    tie, waits = client.settings.near_tie, [wait for answer in answers[cell][1:] for wait in answer.waits]
    return {
        **cell._asdict(),
        "cached_tokens": cached,
        "bytes": placed,
        "ttft_seconds": mine,
        "recompute_seconds": plain,
        "resident_seconds": resident,
        "transfer_seconds": transfer,
        "ideal_seconds": ideal,
        "ideal_ratio": None if ideal is None else ideal / mine["median"],
        "speed_up": plain["median"] / mine["median"],
        "wait_seconds": statistics.median(waits) if waits else None,
        "sources": answers[cell][-1].sources,
        "tokens": worst(answers[cell], answers["plain"], answers["resident"], tie, gated=cell.gate),
        "gb_per_second": dict(rates),
        "loops": dict(loops),
    }


def judge(row: dict[str, Any], device: torch.device, *, ram: bool) -> dict[str, Any]:
    """The row, with `target` and `met` if it is of a long hit, or of a prompt that hit nothing, on a GPU. `ram`: the
    SSD tier lies on a RAM disk."""
    if device.type != "cuda":  # such a model is not worth caching
        return row
    if row["where"] == NOWHERE:
        return row | target(row["added"], MISS_TARGET, at_least=False)
    limit = IDEAL_TARGETS.get(row["where"]) if ram or row["where"] != "ssd_via_cpu" else None
    long = row["prompt_tokens"] >= LONG and row["cached_percent"] >= LEAST_CACHED
    if limit is None or not long or not cell_of(row).usual or row["ideal_ratio"] is None:
        return row
    return row | target(row["ideal_ratio"], limit, at_least=True)


def _wrong(cell: Cell, row: Mapping[str, Any], answers: Sequence[Answer]) -> str:
    """The reason why a cell's figures do not count: other tokens, pages from elsewhere, or bad pages."""
    if row["tokens"] == "other":
        return OTHER_TOKENS
    if any(answer.recomputed for answer in answers):
        return "pages of a hit were bad, see the log"
    expected = set(row["bytes"]) or {"pool"}
    if not cell.gate and any(set(answer.sources) != expected for answer in answers):
        return f"tokens came from {row['sources']}"
    return ""


# -- tables and the plot -----------------------------------------------------------------------------------------------

_TOLD, _TOLD_PLACES = 90, {"cpu": "the CPU tier", "ssd_via_cpu": "the SSD"}


def panels(report: kit.Report) -> list[Ratios | Values]:
    """First tokens of usual hits beside computing, prompt by prompt, and of misses; also for some of the cells."""
    found: list[Ratios | Values] = []
    for tokens, some in itertools.groupby(_usual(report), lambda row: row["prompt_tokens"]):
        rows = list(some)
        computed = {r["cached_percent"]: r["recompute_seconds"]["values"] for r in rows}
        bars = [Bar("computed", [*itertools.chain(*computed.values())], "0.6")]
        for r in rows:
            name = f"{r['cached_percent']} % cached, {r['where'].replace('_', ' ')}"
            bars.append(Bar(name, r["ttft_seconds"]["values"], "tab:blue", r["ideal_seconds"], r["speed_up"]))
        title = f"{report['model']['name']}, prompt of {tokens:,} tokens; line: the ideal, max(c, t)"
        found.append(Values(title, bars, "time to first token", duration))
    misses = [(f"{r['prompt_tokens']:,} tokens", _miss_row(r)) for r in report["cells"] if r["where"] == NOWHERE]
    return [*found, Ratios("Nothing cached: looked up and stored", misses)]


def _miss_row(r: kit.Report) -> kit.Report:
    """A miss as a row whose ratio is of the times with a cache and without."""
    row = compared("", r["ttft_seconds"], "without a cache", r["recompute_seconds"], unit="s")
    return row | ({"target": 1 + r["target"], "met": r["met"]} if "target" in r else {})


def details(report: kit.Report) -> list[Table]:
    """Every cell beside the ideal."""
    hits = Table(
        "c: with the prefix in the planes, t: its bytes over the ceiling, ideal: max(c, t) / TTFT",
        *("cell", "TTFT", "c", "t", "ideal", "wait", "tokens"),
    )
    for r in (r for r in report["cells"] if r["where"] != NOWHERE):
        ideal = "" if r["ideal_ratio"] is None else figure(r["ideal_ratio"])
        ideal += f" ({verdict(r, 'at least')})" if "met" in r else ""
        transfer = "" if r["transfer_seconds"] is None else duration(r["transfer_seconds"])
        waited = "" if r["wait_seconds"] is None else duration(r["wait_seconds"])
        takes, resident = (duration(r[key]["median"]) for key in ("ttft_seconds", "resident_seconds"))
        hits.add_row(cell_of(r).label, takes, resident, transfer, ideal, waited, r["tokens"])
    return [hits]


def bottom(report: kit.Report) -> list[str]:
    """A user's gain: the longest prompt, 90 % cached, beside computing it; and the cost of a miss."""
    found, some = [], [r for r in _usual(report) if r["cached_percent"] == _TOLD]
    longest = max((r["prompt_tokens"] for r in some), default=0)
    some = [r for r in some if r["prompt_tokens"] == longest and r["where"] in _TOLD_PLACES]
    if some:
        said = []
        for r in some:
            took, times = duration(r["ttft_seconds"]["median"]), figure(r["speed_up"])
            said.append(f"{took} from {_TOLD_PLACES[r['where']]} ({times} times as fast)")
        computed = duration(some[0]["recompute_seconds"]["median"])
        found.append(
            f"A prompt of {longest:,} tokens has its first token after {computed} where all of it is computed. With "
            f"{_TOLD} % of it cached, it has it after {' and '.join(said)}."
        )
    misses = [r for r in report["cells"] if r["where"] == NOWHERE]
    if misses:
        added = max(misses, key=lambda row: row["prompt_tokens"])["added"]
        change = "longer" if added > 0 else "less"
        found.append(f"A prompt that hits nothing takes {percent(abs(added))} {change}, with its pages stored.")
    return [" ".join(found)] if found else []


def _usual(report: kit.Report) -> list[kit.Report]:
    """Hits as an engine has them: loads run under the forward pass, and no gate decides."""
    some = [r for r in report["cells"] if r["where"] != NOWHERE and cell_of(r).usual]
    return sorted(some, key=lambda r: (r["prompt_tokens"], r["cached_percent"]))


SECTIONS: dict[str, Any] = {"model": None, "cells": []}
BENCH = kit.Bench("ttft", "gdscache.bench.ttft/9", SECTIONS, Settings, measure, panels, bottom, details)
