"""Keeps the measured costs beside the catalogue, so that the gate decides after a restart as before.

Only the gate depends on `costs.json`: figures that cannot be read, or are of another model, device or disk, are left
out.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gdscache.disk.kept_file import KeptFile, read_json
from gdscache.errors import StorageError
from gdscache.gate.costs import Costs, Observations
from gdscache.limits import MAX_SECONDS

COSTS_NAME = "costs.json"
_VERSION = 1
_MOST, _SHORTEST_S = 1 << 50, 1e-9  # most bytes or tokens, and fewest seconds, of an observation
_log = logging.getLogger("gdscache.disk.costs_file")


class CostsFile:
    """The file of one engine. `about`: model and device, which prefills depend on."""

    def __init__(self, directory: Path, costs: Costs, about: Mapping[str, str]) -> None:
        self._file = KeptFile(directory / COSTS_NAME, _log)
        self._costs = costs
        self._about = dict(about)
        self._written: Any = None

    def restore(self) -> None:
        """Take the figures of an earlier engine, as far as they hold for this one."""
        if not (found := self._read()):
            return
        if found.get("about") == self._about:
            self._costs.restore_prefills(_observations(found.get("prefills"), 3))
        tiers = found.get("tiers")
        if found.get("disk") == self._disk() and isinstance(tiers, dict):
            for name, rows in list(tiers.items())[:16]:
                self._costs.restore_loads(name, _observations(rows, 2))
        self._written = self._costs.observations()

    def save(self) -> None:
        """Write the figures, if they are new. Never raises an error of the disk."""
        prefills, tiers = now = self._costs.observations()
        if now == self._written or not (prefills or tiers):
            return
        content = {"version": _VERSION, "about": self._about, "prefills": prefills, "tiers": tiers}
        if self._file.write(lambda: json.dumps({**content, "disk": self._disk()}).encode()):
            self._written = now

    def _read(self) -> dict[str, Any]:
        path = self._file.path
        try:
            found = read_json(path)
            if isinstance(found, dict) and found.get("version") == _VERSION:
                return found
            _log.warning("%s is left out: it is of another version", path)
        except FileNotFoundError:
            pass
        except (OSError, ValueError, RecursionError, StorageError) as error:
            _log.warning("%s is left out: %s", path, error)
        return {}

    def _disk(self) -> int:
        return self._file.path.parent.stat().st_dev


def _observations(found: object, columns: int) -> Observations:
    """The plausible rows: features as `Costs` makes them (tokens or bytes first, 1 last), and seconds."""
    rows: Observations = []
    for row in found[-64:] if isinstance(found, list) else ():
        if not (isinstance(row, list) and len(row) == 2 and isinstance(row[0], list) and len(row[0]) == columns):
            continue
        numbers = [*row[0], row[1]]
        if not all(type(x) in (int, float) and 0 <= x < 1e30 for x in numbers):
            continue
        if not (1 <= numbers[0] <= _MOST and min(row[0]) >= 0.5 and row[0][-1] == 1):  # half a pair of tokens
            continue
        if _SHORTEST_S <= row[1] <= MAX_SECONDS:
            rows.append((tuple(map(float, row[0])), float(row[1])))
    return rows
