"""What the cases against SGLang's own classes share. They run in SGLang's environment; `test_sglang.py` starts them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
from sglang.srt.utils.weight_checker import WeightChecker

from gdscache.integrations.sglang.setup import RESETS_WEIGHTS

FAULTY = {"ssd": {"transport": "tests.support.faulty:FaultyTransport"}}
_CASES: dict[str, Callable[[Path], None]] = {}


def case(run: Callable[[Path], None]) -> Callable[[Path], None]:
    """One that a test starts by its name. Where something is not as it should be, it raises."""
    _CASES[run.__name__] = run
    return run


def run_case() -> None:
    """The one that the command line names, in a folder:  FILE CASE FOLDER."""
    _CASES[sys.argv[1]](Path(sys.argv[2]))
    print("done", flush=True)


def change_weights(name: str = "update_weights_from_tensor") -> None:
    """SGLang's method is called, and fails at once, for there is no model: weights may have changed even so."""
    with contextlib.suppress(Exception):
        getattr(WeightChecker if name == RESETS_WEIGHTS else WeightUpdater, name)(SimpleNamespace(), None)


def restart() -> None:
    """SGLang's classes are as in a process that has just begun: nobody has watched them."""
    for kind in (WeightUpdater, WeightChecker, MHATokenToKVPoolHost, MLATokenToKVPoolHost):
        for name, method in list(vars(kind).items()):
            if hasattr(method, "_gdscache_calls"):
                setattr(kind, name, method.__wrapped__)
