"""The ceilings of `gdscache bench ttft`: a plain copy of host memory, and bare O_DIRECT loops."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from pathlib import Path

import torch

from gdscache.commands.bench.bare import IO_BYTES, BareLoop
from gdscache.commands.bench.measure import copy_rate, idle
from gdscache.cuda.host_memory import HostBuffer
from gdscache.storage.base import Op


class Ceilings:
    """Measures the ceilings on one slab, each once a round: GB/s by name (`copy`, `read`, `onward`).

    `copy`: one copy of `nbytes` of page-locked host memory to the device; on a CPU-only machine from one part of memory
    to another. `read`: the best bare loop on the slab's first `nbytes`, which hold pages. `onward`: the best bare loop
    that copies its reads on to the device. `loops` names both.
    """

    def __init__(self, device: torch.device, slab: Path, nbytes: int) -> None:
        nbytes = max(nbytes // max(IO_BYTES), 1) * max(IO_BYTES) if nbytes >= max(IO_BYTES) else nbytes
        with contextlib.ExitStack() as undo:
            self._host = undo.enter_context(HostBuffer(nbytes, "auto"))
            self._source = self._host.tensor[:nbytes]
            self._source.fill_(1)
            self._target = torch.ones(nbytes, dtype=torch.uint8, device=device)
            self.ways: dict[str, Callable[[], float]] = {"copy": self._copy}
            self.loops: dict[str, str] = {}
            if nbytes >= min(IO_BYTES):
                loop = undo.enter_context(contextlib.closing(BareLoop(slab, nbytes, self._target)))
                for name, onward in (("read", False), ("onward", True)):
                    best = loop.scout(Op.READ, onward=onward)[0]
                    self.loops[name] = f"{best.label}, {'O_DIRECT' if loop.direct else 'through the page cache'}"
                    self.ways[name] = functools.partial(loop.run, Op.READ, best, onward=onward)
            undo.callback(self._forget)
            self._undo = undo.pop_all()

    def _copy(self) -> float:
        return copy_rate(self._source, self._target)

    def _forget(self) -> None:
        idle(self._target.device)
        del self._source, self._target

    def close(self) -> None:
        self._undo.close()
