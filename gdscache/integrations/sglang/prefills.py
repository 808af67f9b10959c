"""Times of SGLang's forward passes over one prompt, for the gate, which compares them with those of loads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from sglang.srt.managers.tp_worker import TpModelWorker

from gdscache.integrations.prefills import LEAST_TOKENS, Prefills
from gdscache.integrations.watching import CallWatch


class PassTimes(CallWatch):
    """Calls `observe(tokens, tokens before them, seconds)` for passes that compute a part of one prompt and load
    nothing, until `close`."""

    def __init__(self, observe: Callable[[int, int, float], object], device: torch.device) -> None:
        prefills = Prefills(observe, device)

        def begins(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            prefills.begin(prefill_of(args[1] if len(args) > 1 else kwargs.get("batch")))

        super().__init__(TpModelWorker, ["forward_batch_generation"], begins, lambda *call: prefills.end())


def prefill_of(batch: Any) -> tuple[int, int] | None:
    """(tokens, tokens before them) of a pass that computes a part of one prompt and loads nothing; else None. `batch`:
    SGLang's `ScheduleBatch`, or None."""
    if (
        batch is None
        or len(batch.reqs) != 1
        or batch.forward_mode.name != "EXTEND"
        or batch.hicache_consumer_index >= 0
    ):
        return None
    tokens = int(batch.extend_lens[0])
    return (tokens, int(batch.prefix_lens[0])) if tokens >= LEAST_TOKENS else None
