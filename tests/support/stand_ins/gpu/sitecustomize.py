"""With this folder on PYTHONPATH a Python process has the stand-ins' GPU from its start: what the probe's child needs.

STAND_INS is the folder of the libraries, STAND_IN_PIDS a file that this process adds its number to. STAND_IN_FAULTS is
JSON: calls of `StandIns`, each the method's name and its arguments. STAND_IN_STATS, where set, is the file that counts
I/O as the nvidia-fs driver does.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import types
from pathlib import Path
from typing import Any

with open(os.environ["STAND_IN_PIDS"], "a") as pids:
    pids.write(f"{os.getpid()}\n")
sys.path.append(str(Path(__file__).parents[4]))

import numpy as np

from tests.support.cufile_parts import GpuBytes, StandIns

there = StandIns(Path(os.environ["STAND_INS"]))
if "STAND_IN_STATS" in os.environ:
    there.count_in(Path(os.environ["STAND_IN_STATS"]))
for name, *arguments in json.loads(os.environ.get("STAND_IN_FAULTS", "[]")):
    getattr(there, name)(*arguments)


class Tensor(GpuBytes):
    """What the probes do with a CUDA tensor."""

    def cpu(self) -> Tensor:
        return self

    def numpy(self) -> np.ndarray[Any, Any]:
        return np.frombuffer(self.memory, np.uint8)


def frombuffer(content: bytearray, **options: Any) -> Any:
    made = there.gpu_memory(len(content), Tensor)
    made.memory[:] = content
    return types.SimpleNamespace(to=lambda device: made)


torch: Any = importlib.import_module("torch")
importlib.import_module("gdscache.storage.calls").PROC_MODULES = os.devnull  # type: ignore[attr-defined]
library = os.environ["STAND_INS"] + "/libcufile.so.0"
importlib.import_module("gdscache.storage.cufile").find_cufile = lambda: library  # type: ignore[attr-defined]
torch.cuda.set_device = lambda device: None
torch.cuda.synchronize = lambda device=None: None
torch.frombuffer = frombuffer
