"""What the SSD is written for: bytes over hits for every admission and write policy, at several sizes of the SSD.

The real index, admission and store plan of all tiers, without time: each request ends, writes included, before the
next one begins. Behind `gdscache bench policy`.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from gdscache.commands.bench.measure import Progress, silent
from gdscache.commands.replay.tier_report import simulate, totals
from gdscache.commands.replay.tier_setup import TOKEN_BYTES, Asked, setups
from gdscache.commands.replay.trace import BLOCK_TOKENS, Request
from gdscache.commands.replay.workload import Workload, expand
from gdscache.config import CpuConfig, SsdConfig, StoreConfig
from gdscache.moves.clock import MachineModel

MODEL = "llama-3-8b"  # whose bytes are given; what is found does not depend on them
_SIMULATED_PAGE = "1MiB"  # so that 32 pages are gathered and written together
_ROOM = ("store.queue=1PiB", "host_buffer=1GiB")  # nothing is dropped: what is compared is what policies want


class Setting(NamedTuple):
    """A write policy and an admission: keys of a config, and their values."""

    write_policy: str
    write_hits: int
    admission: str
    admission_offers: int

    @property
    def label(self) -> str:
        write, admission = self.write_policy, self.admission
        if write == "write_through_selective":
            write += f" ({self.write_hits})"
        if admission == "second_offer":
            admission += f" ({self.admission_offers})"
        return f"{write}, {admission}"


WRITES = (("write_through", 2), ("write_through_selective", 1), ("write_through_selective", 2), ("write_back", 2))
ADMISSIONS = (("all", 2), ("second_offer", 2), ("second_offer", 3), ("tinylfu", 2))
SETTINGS = tuple(Setting(*write, *admission) for write, admission in itertools.product(WRITES, ADMISSIONS))
DEFAULT = Setting(
    StoreConfig().write_policy,
    StoreConfig().write_hits,
    SsdConfig.model_fields["admission"].default,
    SsdConfig.model_fields["admission_offers"].default,
)
ADMISSIONS_ALONE = tuple(dict.fromkeys([DEFAULT, *(one for one in SETTINGS if one.write_policy == "write_through")]))
EVICTION = CpuConfig().eviction


@dataclass(frozen=True)
class Plan:
    """What is run: all `settings` on recorded traffic, the admissions alone on made-up `kinds` at the smallest SSD and
    the largest, and with `others` than the default order.

    `cpu` and `ssd` are capacities as `gdscache replay` takes them, in percent of the traffic's unique pages.
    """

    cpu: str = "2%"
    ssd: tuple[str, ...] = ("5%", "10%", "25%")
    kinds: tuple[str, ...] = ("chat", "rag", "agents")
    others: tuple[str, ...] = ("lru",)
    others_ssd: str = "5%"
    settings: tuple[Setting, ...] = SETTINGS

    @classmethod
    def quick(cls) -> Plan:
        return cls(ssd=("5%", "25%"), kinds=("chat",), others=(), settings=ADMISSIONS_ALONE)

    def runs(self, kind: str) -> list[tuple[str, str, Setting]]:
        """The order of eviction, the SSD's size and the setting of each run on one kind of traffic."""
        if kind in self.kinds:
            return [(EVICTION, size, setting) for size in (self.ssd[0], self.ssd[-1]) for setting in ADMISSIONS_ALONE]
        runs = [(EVICTION, size, setting) for size in self.ssd for setting in self.settings]
        return runs + [(other, self.others_ssd, setting) for other in self.others for setting in ADMISSIONS_ALONE]


def run(name: str, requests: Sequence[Request], plan: Plan, progress: Progress = silent) -> list[dict[str, Any]]:
    """A row a run. Rows say themselves whether they lie on the frontier of their order and size; see `mark`."""
    workload = expand(requests, partial=False)
    times = [request.timestamp / 1000 for request in requests]
    rows = []
    runs = plan.runs(name)
    for done, (eviction, size, setting) in enumerate(runs):
        progress(done, len(runs), f"{name}: SSD of {size}, {setting.label}")
        rows.append({"traffic": name, **_row(workload, times, plan.cpu, size, eviction, setting)})
    mark(rows)
    return rows


def _row(
    workload: Workload, times: Sequence[float], cpu: str, size: str, eviction: str, setting: Setting
) -> dict[str, Any]:
    asked = Asked(
        page_bytes=_SIMULATED_PAGE,
        cpu=(cpu,),
        ssd=(size,),
        eviction=(eviction,),
        write=(setting.write_policy,),
        admission=(setting.admission,),
        sets=(*_ROOM, f"store.write_hits={setting.write_hits}", f"ssd.admission_offers={setting.admission_offers}"),
    )
    unique = len(workload.names)
    [setup] = setups(asked, unique)
    with _refusals_unsaid():
        found = simulate(workload, times, setup, MachineModel(), serial=True)
    if wrong := totals(found):
        raise RuntimeError(f"figures do not add up: {'; '.join(wrong)}")
    ssd, written = found["tiers"]["ssd"], found["tiers"]["ssd"]["stored_pages"]
    return {
        "eviction": eviction,
        "ssd_percent": 100 * ssd["capacity_pages"] / unique,
        "ssd_pages": ssd["capacity_pages"],
        "cpu_pages": found["tiers"]["cpu"]["capacity_pages"],
        **setting._asdict(),
        "label": setting.label,
        "default": setting == DEFAULT and eviction == EVICTION,
        "hit_pages": found["hit_pages"],
        "hit_rate": found["hit_rate"],
        "hit_tokens": found["hit_tokens"],
        "token_hit_rate": found["token_hit_rate"],
        "cpu_hit_pages": found["tiers"]["cpu"]["hit_pages"],
        "ssd_hit_pages": ssd["hit_pages"],
        "written_pages": written,
        "written_bytes": written * BLOCK_TOKENS * TOKEN_BYTES[MODEL],
        "write_amplification": found["ssd"]["write_amplification"],
        "drive_writes_per_day": found["ssd"]["drive_writes_per_day"],
        "refused_pages": found["ssd"]["refused_pages"],
        "dropped_pages": found["stores"]["dropped_pages"],
        "seconds": found["seconds"],
    }


@contextlib.contextmanager
def _refusals_unsaid() -> Iterator[None]:
    """Refusals are what is counted here: no log of the first of each run's."""
    log = logging.getLogger("gdscache.store")

    def hide(record: logging.LogRecord) -> bool:
        return False

    log.addFilter(hide)
    try:
        yield
    finally:
        log.removeFilter(hide)


def mark(rows: Iterable[dict[str, Any]]) -> None:
    """Give each row `frontier`: no other run of its traffic, order and size writes less at its hits or more.

    And `frontier_of_admissions`: no other with the same write policy does. `least_label` and `least_written_pages` are
    the run that writes least at its hits or more, the row itself where nobody writes less.
    """
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["traffic"], row["eviction"], row["ssd_pages"]), []).append(row)
    for group in groups.values():
        for row in group:
            least = _least(row, group)
            same = [other for other in group if _writes(other) == _writes(row)]
            row["frontier"] = least is row
            row["frontier_of_admissions"] = _least(row, same) is row
            row["least_label"], row["least_written_pages"] = least["label"], least["written_pages"]


def _least(row: dict[str, Any], group: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Which of `group` writes least at the row's hits or more; of equal writes, at most hits; of equals, the row."""
    as_good = [other for other in group if other["hit_pages"] >= row["hit_pages"]]
    best = min(as_good, key=lambda other: (other["written_pages"], -other["hit_pages"], other is not row))
    return row if _figures(best) == _figures(row) else best


def _writes(row: Mapping[str, Any]) -> tuple[str, int]:
    return row["write_policy"], row["write_hits"]


def _figures(row: Mapping[str, Any]) -> tuple[int, int]:
    return row["hit_pages"], row["written_pages"]


def verdicts(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The default at each size: whether it lies on the frontier of all admissions with its write policy.

    Write policies promise different things (what is stored, is it there after a kill?), so that another one which
    writes less is told (`frontier`, `least_label`), and not held against the default.
    """
    wanted = ("traffic", "ssd_percent", "hit_pages", "written_pages", "least_label", "least_written_pages")
    return [
        {
            **{name: row[name] for name in (*wanted, "frontier", "frontier_of_admissions")},
            "met": row["frontier_of_admissions"],
        }
        for row in rows
        if row["default"]
    ]
