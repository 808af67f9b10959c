"""Replays through tiers of a few pages."""

from __future__ import annotations

from typing import Any

from gdscache.commands.replay.clock import Clock, MachineModel
from gdscache.commands.replay.hierarchy import Hierarchy
from gdscache.commands.replay.traffic import Outcome, Traffic
from gdscache.commands.replay.workload import Workload, expand
from gdscache.config import Config
from gdscache.limits import EngineLimits
from tests.support.helpers import SMALL
from tests.support.traces import request

PAGE = 4096  # bytes; 512 tokens of 8

INSTANT = MachineModel()


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
) -> tuple[Hierarchy, Outcome]:
    tiers = Hierarchy(config, machine, Clock(), limits=limits)
    at = [0.0] * len(work.prompts) if times is None else times
    return tiers, Traffic(work, tiers, machine, at, serial=serial).run()
