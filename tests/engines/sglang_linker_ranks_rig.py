"""SGLang's own radix trees and pools on a CPU as two or more ranks, a process each, with our linker below each tree.

Every rank runs a case from its begin to its end, in step with the others by SGLang's own reductions, over gloo. What is
called of torch.distributed is written down, and has to be the same on all ranks.
"""

from __future__ import annotations

import datetime
import functools
import os
import random
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.engines import sglang_hybrid_rig as hybrids
from tests.engines import sglang_rig as rig
from tests.engines.collectives import Recorder

_CASES: dict[str, Callable[[Ranks], None]] = {}
PATIENCE_S = 60.0  # of gloo


class Ranks:
    """This process, as one of them. `group`: of SGLang's tensor parallelism."""

    def __init__(self, folder: Path, rank: int, ranks: int) -> None:
        self.folder, self.rank, self.ranks = folder, rank, ranks
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/rendezvous",
            rank=rank,
            world_size=ranks,
            timeout=datetime.timedelta(seconds=PATIENCE_S),
        )
        self.group = dist.new_group(backend="gloo")
        self._barrier = functools.partial(dist.barrier, self.group)
        Recorder(folder, rank)

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def barrier(self) -> None:
        """For the test itself: not written down."""
        self._barrier()

    def rig(self, kind: str = "mha", heads: int = 2, **more: Any) -> RankRig:
        """A tree of this rank. `heads`: of keys, of the whole model."""
        return RankRig(self, kind, heads, **more)

    def hybrid(self, kind: str, **more: Any) -> HybridRankRig:
        """A tree of this rank, of a hybrid model."""
        (place := self.folder / kind).mkdir(exist_ok=True)
        return HybridRankRig(self, kind, place, **more)

    def leave(self) -> None:
        """Where others have died, nobody is waited for."""
        print("done", flush=True)
        os._exit(0)


class InStep(rig.Linked):
    """A tree that waits as often as those of the other ranks."""

    ranks: Ranks

    def settle_reads(self) -> None:
        """SGLang knows of all offloads that they are over, on all ranks."""
        for _ in range(10_000):
            self.poll()
            if not self.tree.linker.pending_offloads:  # equal on all ranks: by a reduction
                return
            time.sleep(0.002)
        raise AssertionError("offloads complete")

    def settle(self) -> None:
        """Everything is stored, on all ranks."""
        self.settle_reads()
        if self.linker.engine is not None:
            self.linker.engine.drain(30)
        self.ranks.barrier()


class RankRig(InStep, rig.Rig):
    """A rank's tree. Its bytes are those of its heads, and its blocks have other numbers than those of other ranks."""

    def __init__(self, ranks: Ranks, kind: str, heads: int, **more: Any) -> None:
        self.ranks = ranks
        replicas = ranks.ranks if kind == "mla" else max(1, ranks.ranks // heads)
        self.shard = ranks.rank // replicas
        self._heads = max(1, heads // ranks.ranks)
        self.unfit = False  # whether each eighth page does not fit into a packed extent
        server = {"tp_size": ranks.ranks, **more.pop("server", {})}
        super().__init__(ranks.folder, kind, server=server, model={"num_key_value_heads": heads}, **more)
        self.shuffle()

    def device_pool(self, kind: str) -> Any:
        return rig.device_pool(kind, heads=self._heads)

    def tree_params(self, **more: Any) -> Any:
        return super().tree_params(tp_cache_group=self.ranks.group, **more)

    def content(self, tokens: Sequence[int], at: int, number: int, value: Callable[[int], float] | None) -> float:
        found = float(int(super().content(tokens, at, number, value)) ^ (37 * self.shard))
        return found * 2.0**40 if self.unfit and at % (8 * rig.PAGE) == 5 * rig.PAGE + 1 else found

    def shuffle(self) -> None:
        """Free blocks come in an order of this rank's own."""
        _shuffle(self.slots, "free_pages", self.ranks.rank)

    def flush(self) -> None:
        super().flush()
        self.shuffle()

    def _make_room(self, tokens: int) -> bool:
        for _ in range(5_000):  # as often as on the other ranks
            if super()._make_room(tokens):
                return True
            time.sleep(0.002)
        return False

    def hit(self, tokens: Sequence[int], rid: str | None = None) -> int:
        """Tokens that a lookup promises on all ranks."""
        return int(self.match(tokens, rid)[1].host_hit_length)


class HybridRankRig(InStep, hybrids.HybridRig):
    """A rank's tree of a hybrid model: see `RankRig`."""

    def __init__(self, ranks: Ranks, kind: str, folder: Path, **more: Any) -> None:
        self.ranks = ranks
        self.unfit = False  # whether the last page of each chunk does not fit into a packed extent
        super().__init__(folder, kind, group=ranks.group, ranks=ranks.ranks, **more)
        self.shuffle()

    def content(self, tokens: Sequence[int], layer: int, part: int) -> float:
        own = self.ranks.rank
        if layer in hybrids.LAYERS["kv"]:  # which has two heads; a window's or a state's parts are each rank's own
            own //= max(1, self.ranks.ranks // 2)
        found = float(int(super().content(tokens, layer, part)) ^ (37 * own))
        far = self.unfit and len(tokens) % hybrids.CHUNK == hybrids.CHUNK - hybrids.PAGE + 1
        return found * 2.0**40 if far else found

    def shuffle(self) -> None:
        own = [self.slots.full_attn_allocator, self.slots.swa_attn_allocator] if self.windowed else [self.slots]
        for slots in own:
            _shuffle(slots, "free_pages", self.ranks.rank)
        if self.states is not None:
            _shuffle(self.rows.mamba_allocator, "free_slots", self.ranks.rank)

    def flush(self) -> None:
        super().flush()
        self.shuffle()


def _shuffle(slots: Any, name: str, seed: int) -> None:
    pages = getattr(slots, name)
    order = [*range(len(pages))]
    random.Random(seed).shuffle(order)
    setattr(slots, name, pages[torch.tensor(order)])


def case(run: Callable[[Ranks], None]) -> Callable[[Ranks], None]:
    """One that a test starts by its name, on every rank."""
    _CASES[run.__name__] = run
    return run


def run_case() -> None:
    """FILE CASE FOLDER RANK RANKS"""
    name, folder, rank, count = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    ranks = Ranks(folder, rank, count)
    try:
        _CASES[name](ranks)
        ranks.barrier()
    except BaseException:  # noqa: BLE001 - the other ranks wait in a reduction, and the test is to hear of it at once
        traceback.print_exc()
        sys.stdout.flush()
        os._exit(1)
    ranks.leave()
