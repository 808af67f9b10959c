"""Replays through tiers of a few pages, and what has to add up behind them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gdscache.commands.replay.clock import Clock, MachineModel
from gdscache.commands.replay.hierarchy import Hierarchy
from gdscache.commands.replay.trace import Workload, expand
from gdscache.commands.replay.traffic import Outcome, Traffic
from gdscache.config import Config
from gdscache.limits import LIMITS, EngineLimits
from gdscache.pages.keys import Page
from gdscache.store.outlets import Outlet
from gdscache.store.parcel import Parcel, StoreJob
from tests.support.helpers import SMALL
from tests.support.traces import request

PAGE = 4096  # bytes; 512 tokens of 8

INSTANT = MachineModel()


class Moved:
    """What a hierarchy's planner and writer move, in pages: their calls are counted."""

    def __init__(self, tiers: Hierarchy) -> None:
        self.read, self.written = tiers.executor.read, tiers.executor.written
        self.demoted = 0  # from the CPU tier to the SSD, without a store
        self.to_ssd = 0  # handed to the writer
        self.not_written: Counter[str] = Counter()  # dropped by the writer, by cause
        self.most_queued = 0  # most pages accepted and unfinished, except those on their way to the SSD
        self.most_to_ssd = 0  # most pages on their way to the SSD
        planner, writer = tiers.planner, tiers.storer.writers.get("ssd")
        accept, leaving, written = planner.accept, planner.leaving, planner.written

        def accepted(job: StoreJob) -> None:
            accept(job)
            self.most_queued = max(self.most_queued, planner.queued - len(planner.keys))

        def left(pages: Iterable[Page]) -> list[Parcel]:
            parcels = leaving(pages)
            self.demoted += sum(map(len, parcels))
            return parcels

        def was_written(parcel: Parcel, outlet: Outlet, rows: Sequence[int], cause: str) -> Sequence[int]:
            ended = written(parcel, outlet, rows, cause)
            if cause:
                self.not_written[cause] += len(ended)
            return ended

        def put(parcels: Sequence[Parcel]) -> None:
            self.to_ssd += sum(map(len, parcels))
            self.most_to_ssd = max(self.most_to_ssd, len(planner.keys))
            writing(parcels)

        planner.accept, planner.leaving, planner.written = accepted, left, was_written  # type: ignore[method-assign]
        if writer is not None:
            writing, writer.put = writer.put, put  # type: ignore[method-assign]


class Counted(Hierarchy):
    def __init__(self, config: Config, machine: MachineModel, *, limits: EngineLimits = LIMITS) -> None:
        super().__init__(config, machine, Clock(), limits=limits)
        self.moved = Moved(self)


def problems(tiers: Hierarchy) -> list[str]:
    """Inconsistencies after all accepted pages are done."""
    manager, ledger, planner = tiers.manager, tiers.ledger, tiers.planner
    found = manager.check()
    found += [f"a lease of {lease['pages']} pages is left: {lease['owner']}" for lease in manager.stats()["leases"]]
    if planner.queued or planner.keys:
        found.append(f"{planner.queued} pages are queued and {len(planner.keys)} on their way")
    if ledger.offered != ledger.finished:
        found.append(f"{ledger.offered} pages were offered, {ledger.finished} have an outcome")
    if tiers.spare is not None and tiers.spare.free_slots != tiers.spare.slots:
        found.append(f"{tiers.spare.slots - tiers.spare.free_slots} bounce slots are not given back")
    if isinstance(tiers, Counted):
        stored, moved = manager.counts["stored", "ssd"], tiers.moved
        if moved.to_ssd != stored + sum(moved.not_written.values()):
            found.append(f"{moved.to_ssd} pages went to the writer, {stored} are stored, {moved.not_written} dropped")
    return found


def adds_up(run: Mapping[str, Any]) -> bool:
    """Whether a report's lookups are hits and misses, and its hits those of the tiers."""
    hits = sum(tier["hit_pages"] for tier in run["tiers"].values())
    return bool(run["lookup_pages"] == hits + sum(run["miss_pages"].values()) and run["hit_pages"] == hits)


def make(cpu: int | None = 4, ssd: int | None = 8, row: int = 8, **sections: Any) -> Config:
    """A config of so many pages a tier."""
    extent = row * 512
    plane = {"name": "rows", "shape": [row], "dtype": "uint8"}
    parts = {name: sections.pop(f"{name}_", {}) for name in ("gpu", "cpu", "ssd")}
    fields: dict[str, Any] = {
        "model": {"name": "tiny", "layers": 1, "page_tokens": 512, "planes": [plane]},
        "gpu": {"device": "cpu", "capacity": extent} | parts["gpu"],
        "cpu": None if cpu is None else {"capacity": cpu * extent} | parts["cpu"],
        "ssd": None if ssd is None else {"path": "none", "capacity": ssd * extent} | parts["ssd"],
    }
    return Config.from_dict(fields | sections)


def work_of(*prompts: list[int], tokens: int | None = None) -> Workload:
    return expand([request(blocks, tokens) for blocks in prompts])


def run(
    work: Workload,
    config: Config,
    machine: MachineModel = INSTANT,
    times: list[float] | None = None,
    *,
    serial: bool = True,
    limits: EngineLimits = SMALL,
) -> tuple[Counted, Outcome]:
    tiers = Counted(config, machine, limits=limits)
    at = [0.0] * len(work.prompts) if times is None else times
    return tiers, Traffic(work, [tiers], tiers.config, machine, at, serial=serial).run()
