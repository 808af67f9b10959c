"""What the tiers give on this machine, against its ceilings. Behind `gdscache bench engine`."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

from gdscache.commands.bench import end_to_end, memory, ssd_tier
from gdscache.commands.bench.bare import Way
from gdscache.commands.bench.measure import Progress, silent
from gdscache.config import SsdConfig
from gdscache.errors import CapacityError
from gdscache.sizes import GIB, MIB, format_size
from gdscache.storage.base import Op


@dataclasses.dataclass(frozen=True)
class Settings:
    """How much is measured: sizes in bytes. `total` is moved in each round, `repeat` is rounds a figure."""

    pages: tuple[int, ...] = (1 * MIB, 4 * MIB)
    total: int = 2 * GIB
    repeat: int = 5
    threads: int = int(SsdConfig.model_fields["threads"].default)
    memory_pages: int = 10_000

    @classmethod
    def quick(cls) -> Settings:
        """Seconds instead of minutes; its figures say that things work, not how fast."""
        return cls(total=16 * MIB, repeat=2, memory_pages=500)

    def describe(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "pages": list(self.pages)}


def run(directory: Path, settings: Settings, progress: Progress = silent) -> dict[str, Any]:
    """All measurements, as plain data; files go into a temporary directory below `directory` and are deleted.

    Raises `CapacityError` when a round is less than a page, and what an engine raises that cannot be opened.
    """
    for page_bytes in settings.pages:
        if page_bytes > settings.total:
            raise CapacityError(
                f"a round of {format_size(settings.total)} holds no page of {format_size(page_bytes)}",
                "raise --total, or measure smaller pages",
            )
    tier: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="gdscache-bench-", dir=directory) as name:
        path = Path(name)
        for page_bytes in settings.pages:
            with tempfile.TemporaryDirectory(dir=path) as own:
                tier += ssd_tier.run(Path(own), page_bytes, settings.total, settings.repeat, settings.threads, progress)
        first = settings.pages[0]
        ways = {op: _way(tier, first, name) for op, name in ((Op.WRITE, "store"), (Op.READ, "load"))}
        with tempfile.TemporaryDirectory(dir=path) as own:
            whole = end_to_end.run(Path(own), first, settings.total, settings.repeat, settings.threads, ways, progress)
        held = memory.run(path, settings.memory_pages, progress)
    return {"ssd_tier": tier, "end_to_end": whole, "memory": held}


def _way(tier: list[dict[str, Any]], page_bytes: int, name: str) -> Way:
    found = next(r["bare"] for r in tier if r["name"] == name and r["page_bytes"] == page_bytes)
    return Way(found["threads"], found["io_bytes"])
