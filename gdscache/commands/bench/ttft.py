"""Time to first token of hits from every place, beside recomputing and the ideal. Behind `gdscache bench ttft`."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gdscache.commands.bench import io_cache, ttft_python, ttft_waits
from gdscache.commands.bench.io import resumed as resumed_io
from gdscache.commands.bench.io_trial import cause_of
from gdscache.commands.bench.measure import Progress, Series, frozen_heap, silent
from gdscache.commands.bench.ttft_answers import Answer, compare, percentiles, series_of, worst
from gdscache.commands.bench.ttft_ceilings import Ceilings
from gdscache.commands.bench.ttft_cells import (
    NOWHERE,
    Cell,
    Settings,
    bytes_at,
    cell_of,
    check,
    chosen,
    transfer_seconds,
)
from gdscache.commands.bench.ttft_client import EngineClient
from gdscache.commands.bench.ttft_report import verdicts
from gdscache.commands.toy_engine.report import NEAR_TIE
from gdscache.errors import CapacityError, GdsCacheError
from gdscache.sizes import about

Keep = Callable[[dict[str, Any]], None]
"""Called with what was measured so far, after every group of cells."""

RAM_DISK = Path("/dev/shm")
_ERRORS = (GdsCacheError, RuntimeError, OSError, MemoryError)


def place(directory: Path | None) -> Path:
    """Where the SSD tier's files go: a directory that was named, or a RAM disk, or the working directory."""
    if directory is not None:
        return directory
    usable = RAM_DISK.is_dir() and os.access(RAM_DISK, os.W_OK) and io_cache.in_memory(RAM_DISK)
    return RAM_DISK if usable else Path()


def resumed(path: Path, schema: str, settings: Settings, directory: Path) -> dict[str, Any]:
    """The report that a run goes on with, as for `bench io`. Raises `InvalidValueError`."""
    return resumed_io(path, schema, settings, directory, "ttft")


def run(
    directory: Path,
    settings: Settings,
    progress: Progress = silent,
    keep: Keep = lambda found: None,
    done: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """All cells, as plain data; files go into a temporary directory, which is deleted.

    `done`: a report whose cells are taken over and not measured again. After Ctrl-C what was measured until then, with
    `interrupted`. What raises errors is under `failed`, with the cause, and the rest goes on; what cannot be measured
    here is under `cannot`, what the profile leaves out under `not_run`. Raises `InvalidValueError`, `CapacityError`.
    """
    check(settings)
    bench = _Bench(directory, settings, progress, keep, done or {})
    try:
        with frozen_heap():
            bench.measure()
    except KeyboardInterrupt:
        bench.found["interrupted"] = True
    finally:
        bench.judge()
        keep(bench.found)
    return bench.found


class _Bench:
    """The measurements; `found` grows with each group of cells."""

    def __init__(
        self, directory: Path, settings: Settings, progress: Progress, keep: Keep, done: Mapping[str, Any]
    ) -> None:
        self.settings, self._directory, self._progress, self._keep = settings, directory, progress, keep
        self._ram = io_cache.in_memory(directory)
        self._cells, others = chosen(settings)
        self._until = math.inf
        again = {cell_of(row) for row in done.get("failed", ())}
        wanted, cells = set(self._cells), [row for row in done.get("cells", ()) if cell_of(row) not in again]
        self._known = {cell_of(row) for row in cells} & wanted
        measured = {cell_of(row) for row in cells}
        self.found: dict[str, Any] = {
            "complete": False,
            "interrupted": False,
            "left": len(wanted - self._known),
            "model": done.get("model"),
            "cells": cells,
            "waits": list(done.get("waits", ())),
            "python": list(done.get("python", ())),
            "cannot": [],
            "failed": [],
            "not_run": [{**c.describe(), "cause": cause} for c, cause in others.items() if c not in measured],
            "verdicts": [],
        }

    def measure(self) -> None:
        begun, budget = time.monotonic(), self.settings.budget_seconds
        self._until = math.inf if budget is None else begun + budget
        todo = [cell for cell in self._cells if cell not in self._known]
        if todo:
            longest = max(cell.prompt for cell in todo)
            with self._client(longest) as client:
                self.found["model"] = client.describe()
                for route, of_route in itertools.groupby(todo, lambda cell: cell.route):
                    some = list(of_route)
                    try:
                        client.open_cache(route)
                    except _ERRORS as error:
                        self._list("cannot", some, cause_of(error))
                        continue
                    for length, of_length in itertools.groupby(some, lambda cell: cell.prompt):
                        self._length(client, length, list(of_length))
        self.found["complete"] = not self.found["left"]

    def judge(self) -> None:
        """Hold what was measured against its targets, which are those of a GPU and a model worth caching."""
        judged = self.settings.device.startswith("cuda") and self.settings.profile != "quick"
        found = self.found
        found["verdicts"] = verdicts(found["cells"], found["waits"], judged=judged, ram=self._ram)

    @contextlib.contextmanager
    def _client(self, longest: int) -> Iterator[EngineClient]:
        with tempfile.TemporaryDirectory(prefix="gdscache-bench-", dir=self._directory) as name:
            client: EngineClient
            if self.settings.client == "transformers":
                from gdscache.commands.bench.ttft_transformers import TransformersClient

                client = TransformersClient(self.settings, longest, Path(name))
            else:
                client = EngineClient(self.settings, longest, Path(name))
            with contextlib.closing(client):
                ssd = client.config("via_cpu").ssd
                self._require_room(0 if ssd is None else ssd.capacity)
                yield client

    def _length(self, client: EngineClient, length: int, cells: Sequence[Cell]) -> None:
        """Everything with prompts of one length, on the cache that is open."""
        if time.monotonic() >= self._until:
            return
        begun: list[Cell] = []
        try:
            self._say(cells[0], "the document is computed and stored")
            stored = client.prime(length)
            with Ceilings(client.device, client.slabs()[0], min(stored, self.settings.ceiling_bytes)) as ceilings:
                if any(cell.gate for cell in cells):
                    self._say(cells[0], "the gate learns")
                    client.learn(length)
                for _, some in itertools.groupby(cells, lambda cell: cell.group):
                    if time.monotonic() >= self._until:
                        return
                    group = list(some)
                    begun += group
                    self._measured(client, group, ceilings)
                    self._keep(self.found)
        except _ERRORS as error:
            self._list("failed", [cell for cell in cells if cell not in begun], cause_of(error))

    def _measured(self, client: EngineClient, group: Sequence[Cell], ceilings: Ceilings) -> None:
        """One group; what is wrong with its baselines is so for each of its cells, and not for the next group."""
        try:
            if group[0].where == NOWHERE:
                self._miss(client, group[0])
            else:
                self._group(client, group, ceilings)
        except _ERRORS as error:
            self._list("failed", group, cause_of(error))
        else:
            self.found["left"] -= len(group)

    # -- cells -----------------------------------------------------------------------------------------------------

    def _miss(self, client: EngineClient, cell: Cell) -> None:
        """A request that hits nothing, with a cache and without, in turns; the time includes the call of `store`.

        What is looked for is a hundredth of the time, so short prompts have more rounds: as many tokens in all as the
        middle one.
        """
        ours: list[Answer] = []
        plain: list[Answer] = []
        middle = statistics.median_low(self.settings.prompts)
        rounds = self.settings.repeat * max(1, middle // cell.prompt)
        for number in range(rounds + 1):
            self._say(cell, f"round {number} of {rounds}")
            for cached in (False, True) if number % 2 else (True, False):
                (ours if cached else plain).append(client.miss(cell, cached=cached))
        with_, without = (Series(tuple(a.whole for a in some[1:])) for some in (ours, plain))
        self.found["cells"].append(
            {
                **cell.describe(),
                "cached_tokens": 0,
                "bytes": {},
                "ttft_seconds": series_of(with_),
                "recompute_seconds": series_of(without),
                "added": with_.median / without.median - 1,
                "tokens": compare(ours, plain, self._near_tie),
            }
        )

    def _group(self, client: EngineClient, cells: Sequence[Cell], ceilings: Ceilings) -> None:
        """Cells that differ in place, overlap and gate, in turns with their baselines and ceilings."""
        first, repeat = cells[0], self.settings.repeat
        answers: dict[Any, list[Answer]] = {"plain": [], "resident": [], **{cell: [] for cell in cells}}
        rates: dict[str, list[float]] = {name: [] for name in ceilings.ways}
        broken: dict[Cell, str] = {}
        for number in range(repeat + 1):  # the first round warms up
            self._say(first, f"round {number} of {repeat}")
            for name, way in ceilings.ways.items():
                rates[name].append(way())
            for key in list(answers) if number % 2 == 0 else reversed(list(answers)):
                if key in ("plain", "resident"):
                    answers[key].append(client.plain(first) if key == "plain" else client.resident(first))
                elif key not in broken:
                    try:
                        answers[key].append(client.hit(key))
                    except _ERRORS as error:
                        broken[key] = cause_of(error)
        counted = {name: Series(tuple(values[1:])) for name, values in rates.items()}
        for cell in cells:
            cause = broken.get(cell) or self._wrong(client, cell, answers)
            if cause:
                self._list("failed", [cell], cause, count=False)
            if cell not in broken:
                self.found["cells"].append(self._row(client, cell, answers, counted, ceilings.loops))
        if self.settings.client == "engine" and (some := ttft_python.chosen([c for c in cells if c not in broken])):
            self._say(first, "beside threads of Python")
            transfers = [self._transfer(client, cell, counted) for cell in some]
            others = [row for row in self.found["python"] if cell_of(row) not in some]
            self.found["python"] = [*others, *ttft_python.measure(client, some, transfers, repeat)]
        if first.route == "via_cpu" and self.settings.client == "engine" and first.cached == 50:
            others = [row for row in self.found["waits"] if row["prompt_tokens"] != first.prompt]
            self.found["waits"] = [*others, {"prompt_tokens": first.prompt, **ttft_waits.measure(client, first)}]

    def _row(
        self,
        client: EngineClient,
        cell: Cell,
        answers: Mapping[Any, Sequence[Answer]],
        rates: Mapping[str, Series],
        loops: Mapping[str, str],
    ) -> dict[str, Any]:
        mine, plain, resident = (Series(tuple(a.ttft for a in answers[key][1:])) for key in (cell, "plain", "resident"))
        nbytes = self._bytes(client, cell)
        transfer = self._transfer(client, cell, rates)
        ideal = None if transfer is None else max(resident.median, transfer)
        waits = [seconds for answer in answers[cell][1:] for seconds in answer.waits]
        return {
            **cell.describe(),
            "cached_tokens": client.of(cell)[1],
            "bytes": nbytes,
            "ttft_seconds": series_of(mine),
            "recompute_seconds": series_of(plain),
            "resident_seconds": series_of(resident),
            "transfer_seconds": transfer,
            "ideal_seconds": ideal,
            "ideal_ratio": None if ideal is None else ideal / mine.median,
            "speed_up": plain.median / mine.median,
            "wait_seconds": percentiles(waits),
            "sources": answers[cell][-1].sources,
            "tokens": self._tokens(cell, answers),
            "gb_per_second": {name: series.describe() for name, series in rates.items()},
            "loops": dict(loops),
        }

    def _transfer(self, client: EngineClient, cell: Cell, rates: Mapping[str, Series]) -> float | None:
        """The least seconds that the bytes of a hit take."""
        return transfer_seconds(
            cell.where, self._bytes(client, cell), {k: series.median for k, series in rates.items()}
        )

    def _wrong(self, client: EngineClient, cell: Cell, answers: Mapping[Any, Sequence[Answer]]) -> str:
        """What makes a cell's figures worth nothing: other tokens, pages from elsewhere, or pages that were bad."""
        mine = answers[cell]
        if self._tokens(cell, answers) == "other":
            return "it gave other tokens than without a cache"
        if any(answer.recomputed for answer in mine):
            return "pages of a hit were bad, see the log"
        expected = set(self._bytes(client, cell)) or {"pool"}
        if not cell.gate and any(set(answer.sources) != expected for answer in mine):
            return f"tokens came from {mine[-1].sources}"
        return ""

    def _bytes(self, client: EngineClient, cell: Cell) -> dict[str, int]:
        """What a hit of the whole prefix has to move, by tier."""
        _, cached = client.of(cell)
        return bytes_at(cell.where, cached // self.settings.page_tokens, client.cache.layout.page_bytes)

    def _tokens(self, cell: Cell, answers: Mapping[Any, Sequence[Answer]]) -> str:
        return worst(answers[cell], answers["plain"], answers["resident"], self._near_tie, gated=cell.gate)

    @property
    def _near_tie(self) -> float:
        return NEAR_TIE if self.settings.dtype in ("bfloat16", "float16") else 0.0

    def _list(self, kind: str, cells: Sequence[Cell], cause: str, *, count: bool = True) -> None:
        self.found[kind] += [{**cell.describe(), "cause": cause} for cell in cells]
        if count:
            self.found["left"] -= len(cells)

    def _say(self, cell: Cell, text: str) -> None:
        total = len(self._cells)
        self._progress(total - self.found["left"], total, f"{cell.prompt:,} tokens, {cell.cached} % cached: {text}")

    def _require_room(self, nbytes: int) -> None:
        free, where = shutil.disk_usage(self._directory).free, self._directory
        if free < nbytes:
            raise CapacityError(f"{where} has {about(free)} free, {about(nbytes)} are needed", "name another --dir")
