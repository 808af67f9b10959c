"""Who has entered which collective of torch: so that none is entered by one rank alone.

A rank's calls of `torch.distributed` are written to a file, group by group, when they begin and when they end. Behind
the run, the files of all ranks have to tell the same of each group. Nothing of SGLang or of gdscache is imported.
"""

from __future__ import annotations

import functools
import json
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed import distributed_c10d

COLLECTIVES = (
    "all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "broadcast", "broadcast_object_list",
    "barrier", "gather", "gather_object", "reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter",
    "scatter_object_list", "all_to_all", "all_to_all_single", "new_group",
)  # fmt: skip


class Recorder:
    """Writes down this rank's collectives, from now on and for the life of the process. One a process."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._file = (folder / f"collectives-{rank}").open("w")
        self._lock = threading.Lock()
        self._inside = threading.local()
        for name in COLLECTIVES:
            wrapped = functools.wraps(getattr(torch.distributed, name))(self._wrap(name))
            setattr(torch.distributed, name, wrapped)
            setattr(distributed_c10d, name, wrapped)

    def _wrap(self, name: str) -> Callable[..., Any]:
        inner = getattr(torch.distributed, name)

        def called(*given: Any, **named: Any) -> Any:
            if getattr(self._inside, "of", ""):  # a collective of a collective
                return inner(*given, **named)
            self._inside.of = name
            told = {"group": _group(given, named), "what": name, "shape": _shape(given, named)}
            told["by"] = sys._getframe(1).f_code.co_filename
            self._write({**told, "at": "begin"})
            try:
                found = inner(*given, **named)
            finally:
                self._inside.of = ""
            self._write({**told, "at": "end"})
            return found

        return called

    def _write(self, told: Mapping[str, Any]) -> None:
        with self._lock:
            self._file.write(json.dumps(told) + "\n")
            self._file.flush()


def _group(given: Sequence[Any], named: Mapping[str, Any]) -> str:
    """The name of the group, which is the same on all of its ranks."""
    groups = [one for one in (*given, *named.values()) if isinstance(one, torch.distributed.ProcessGroup)]
    return distributed_c10d._get_process_group_name(groups[0]) if groups else "world"


def _shape(given: Sequence[Any], named: Mapping[str, Any]) -> list[int]:
    return next((list(one.shape) for one in (*given, *named.values()) if isinstance(one, torch.Tensor)), [])


def compared(folder: Path, ranks: int, dead: Sequence[int] = ()) -> int:
    """Raise `AssertionError` where the ranks have not entered the same collectives, group by group, in one order, or
    have not left them; how many there were. Of `dead` ranks what they have left is a first part of the others'.
    """
    told: list[dict[str, list[tuple[str, list[int], str]]]] = []
    for rank in range(ranks):
        groups: dict[str, list[tuple[str, list[int], str]]] = {}
        for line in (folder / f"collectives-{rank}").read_text().splitlines():
            one = json.loads(line)
            groups.setdefault(one["group"], []).append((one["what"], one["shape"], one["at"]))
        told.append(groups)
    living = [rank for rank in range(ranks) if rank not in dead]
    first = told[living[0]]
    for rank in living[1:]:
        assert told[rank].keys() == first.keys(), f"groups of rank {rank}: {sorted(told[rank])}, {sorted(first)}"
        for group, calls in first.items():
            other = told[rank][group]
            at = next((n for n, pair in enumerate(zip(calls, other, strict=False)) if pair[0] != pair[1]), None)
            assert at is None, f"{group}, call {at}: rank {living[0]} {calls[at]}, rank {rank} {other[at]}"
            assert len(calls) == len(other), f"{group}: rank {rank} {len(other)} calls, rank {living[0]} {len(calls)}"
    for rank in dead:
        for group, calls in told[rank].items():
            left = [one for one in calls if one[2] == "end"]
            assert left == [one for one in first.get(group, []) if one[2] == "end"][: len(left)], (rank, group)
    if not dead:
        for group, calls in first.items():
            begun, ended = ([one[:2] for one in calls if one[2] == at] for at in ("begin", "end"))
            assert begun == ended, f"{group}: entered and not left: {begun[len(ended) :]}"
    return sum(len(calls) for calls in first.values()) // 2
