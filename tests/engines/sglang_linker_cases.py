"""Our linker below SGLang's own radix tree, one case by its name:  sglang_linker_cases.py CASE FOLDER

Cases that are the same on one rank and on several are in `sglang_linker_ranks_cases.py`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
from sglang.srt.disaggregation.kv_events import AllBlocksCleared, BlockRemoved, KVEventBatch
from sglang.srt.managers.schedule_policy import SchedulePolicy
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from gdscache.storage.base import Op
from tests.engines import sglang_rig as rig
from tests.engines.sglang_case import FAULTY, case, change_weights, run_case
from tests.support.faults import Fault
from tests.support.faulty import PLAN


@case
def events_say_what_tiers_have(folder: Path) -> None:
    """In SGLang's own hashes, with tokens; of a page of before a restart when a request begins with it."""
    found, long = rig.Rig(folder, kv_events=True), rig.prompt(1, 62)
    index = Index()
    index.hear(found.tree.take_events())
    assert found.serve(long) == (0, 0)
    found.settle()
    rig.until(lambda: index.hear(found.tree.take_events()) or index.prefix("DISK", long) == 60, "it is on the SSD")
    assert [index.prefix(medium, long) for medium in ("GPU", "CPU_PINNED")] == [60, 60]
    assert index.blocks["DISK"] == index.blocks["CPU_PINNED"] == index.blocks["GPU"]
    found.linker.engine.clear()
    rig.until(lambda: index.hear(found.tree.take_events()) or not index.blocks["DISK"], "it is gone")
    assert index.prefix("GPU", long) == 60
    assert not index.blocks["CPU_PINNED"]
    found.flush()
    assert found.serve(long) == (0, 0)
    found.settle()
    found.close()
    again, index = rig.Rig(folder, kv_events=True), Index()
    assert again.serve(long) == (0, 60)
    rig.until(lambda: index.hear(again.tree.take_events()) or index.prefix("DISK", long) == 60, "it is told of")
    rig.until(lambda: index.hear(again.tree.take_events()) or index.prefix("CPU_PINNED", long) == 60, "it was brought")
    again.close()


@case
def events_of_new_weights(folder: Path) -> None:
    """SGLang's hashes stay: blocks of the old weights are told of as removed at once, and not when their pages go."""
    found, long, index = rig.Rig(folder, kv_events=True), rig.prompt(1, 62), Index()
    for turn in range(2):
        assert found.serve(long) == (0, 0)
        found.settle()
        rig.until(lambda: index.hear(found.tree.take_events()) or index.prefix("DISK", long) == 60, "it is on the SSD")
        if not turn:
            change_weights()
            index.hear(found.tree.take_events())
            assert [index.prefix(medium, long) for medium in ("GPU", "CPU_PINNED", "DISK")] == [60, 0, 0]
            found.flush()
    engine = found.linker.engine
    batches = engine.stats()["events"]["batches"]
    assert engine.invalidate(engine.namespace())["ssd"]
    rig.until(lambda: engine.stats()["events"]["batches"] > batches, "their removals were heard of")
    found.settle()
    index.hear(found.tree.take_events())
    assert [index.prefix(medium, long) for medium in ("GPU", "CPU_PINNED", "DISK")] == [60] * 3
    found.close()


class Index:
    """Blocks by medium, as a router has them: hash, parent and tokens."""

    def __init__(self) -> None:
        self.blocks: dict[str, dict[int, tuple[int | None, tuple[int, ...]]]] = {}

    def hear(self, events: list[Any]) -> None:
        for event in _read(events):
            if isinstance(event, AllBlocksCleared):
                self.blocks.clear()
            elif isinstance(event, BlockRemoved):
                for one in event.block_hashes:
                    self.blocks[event.medium].pop(one)
            else:
                size, parents = event.block_size, [event.parent_block_hash, *event.block_hashes]
                for n, (one, parent) in enumerate(zip(event.block_hashes, parents, strict=False)):
                    tokens = tuple(event.token_ids[n * size : (n + 1) * size])
                    self.blocks.setdefault(event.medium, {})[one] = parent, tokens

    def prefix(self, medium: str, tokens: list[int]) -> int:
        following = {block: one for one, block in self.blocks.get(medium, {}).items()}
        parent, found = None, 0
        while (one := following.get((parent, tuple(tokens[found : found + rig.PAGE])))) is not None:
            parent, found = one, found + rig.PAGE
        return found


def _read(events: list[Any]) -> list[Any]:
    """As whoever reads them decodes them."""
    sent = msgspec.msgpack.encode(KVEventBatch(ts=0.0, events=events))
    batch: Any = msgspec.msgpack.Decoder(KVEventBatch).decode(sent)
    return list(batch.events)


@case
def the_gate_learns_what_prompts_take(folder: Path) -> None:
    """From passes over one prompt that load nothing, and from no other."""
    found = rig.Rig(folder)
    costs = found.linker.engine.gate.costs

    def passes(mode: str, lengths: Sequence[int], consumer: int = -1) -> int:
        """SGLang's method is called, and fails at once, for there is no model; the prefills known by then."""
        batch = SimpleNamespace(
            reqs=[None] * len(lengths),
            forward_mode=ForwardMode[mode],
            hicache_consumer_index=consumer,
            extend_lens=lengths,
            prefix_lens=[64] * len(lengths),
        )
        with contextlib.suppress(AttributeError, AssertionError):
            TpModelWorker.forward_batch_generation(SimpleNamespace(), batch)
        with contextlib.suppress(AttributeError, AssertionError):
            TpModelWorker.forward_batch_generation(SimpleNamespace(), batch=None)
        return len(costs.observations()[0])

    assert passes("DECODE", [1]) == passes("EXTEND", [64, 64]) == passes("EXTEND", [64], consumer=3) == 0
    assert passes("EXTEND", [4]) == 0, "that is a kernel's launch"
    assert passes("EXTEND", [64]) == 1
    assert passes("EXTEND", [32]) == 2
    found.close()
    assert passes("EXTEND", [64]) == 2


@case
def prompts_that_are_one_graph(folder: Path) -> None:
    """SGLang's runner asks the counter for the last layer, before it replays the whole pass."""
    found = rig.Rig(folder)
    found.full_graphs = True
    long, branch = rig.prompt(1, 62), rig.prompt(2, 50, rig.prompt(1, 30))
    assert found.serve_and_flush(long) == (0, 0)
    assert found.serve(long) == (0, 60)
    assert found.serve(branch) == (28, 0)
    assert found.linker.counts["failed_loads"] == 0
    found.close()


@case
def a_full_disk_costs_hits_only(folder: Path) -> None:
    found = rig.Rig(folder, ssd=FAULTY["ssd"])
    with PLAN.rule(Op.WRITE, Fault.ENOSPC):
        for seed in range(5):
            assert found.serve(rig.prompt(seed, 61)) == (0, 0)
        found.settle()
    found.flush()
    for seed in range(5):
        assert found.serve(rig.prompt(seed, 61))[1] in (0, 60)
        found.flush()
    found.close()


@case
def others_run(folder: Path) -> None:
    """Nobody waits for the SSD while another request has a row."""
    found = rig.Rig(folder)
    tokens = rig.prompt(1, 61)
    found.serve(tokens)
    found.settle()
    found.close()
    again = rig.Rig(folder, ssd=FAULTY["ssd"])
    rows = again.rows.alloc_rows(1)
    with PLAN.rule(Op.READ, Fault.DELAY, seconds=0.3):
        assert again.match(tokens, "first")[1].host_hit_length == 0
    rig.until(lambda: again.match(tokens, "first")[1].host_hit_length == 60, "a later lookup finds what has come")
    assert again.linker.counts["late"] == 0, "nobody has waited"
    again.rows.free_slots += rows
    again.close()


@case
def who_is_looked_up(folder: Path) -> None:
    """SGLang's own policies: with lpm all that wait are looked up in each pass, with fcfs none before its turn."""
    found = rig.Rig(folder)
    waiting = [rig.waiting_request(f"w{number}", rig.prompt(number, 41)) for number in range(5)]
    for name, lookups in (("lpm", 5), ("fcfs", 0)):
        policy = SchedulePolicy(name, found.tree, False, False, False)
        for _ in range(3):
            before = found.linker.counts["lookups"]
            policy.calc_priority(list(waiting))
            assert found.linker.counts["lookups"] - before == lookups, name
    found.close()


@case
def salts_apart(folder: Path) -> None:
    """Requests with another `cache_salt` find nothing, on the device, in the CPU tier or on the SSD."""
    found, tokens = rig.Rig(folder), rig.prompt(1, 61)
    salts = (None, "a", "b")
    for number, found.salt in enumerate(salts):
        assert found.serve(tokens, functools.partial(_constant, float(number))) == (0, 0)
        found.settle()
    for again in (found, None):
        if again is None:
            found.close()
            found = rig.Rig(folder)
        found.flush()
        for number, found.salt in enumerate(salts):
            assert found.serve(tokens, functools.partial(_constant, float(number))) == (0, 60)
    found.close()


@case
def weights_in_an_update_that_is_begun_apart(folder: Path) -> None:
    """SGLang flushes within such an update, and not behind its end: what comes then is kept."""
    found = rig.Rig(folder)
    tokens, fresh = rig.prompt(1, 61), functools.partial(_constant, 200.0)
    found.serve(tokens)
    found.settle()
    change_weights("begin_weight_update")
    change_weights()
    found.flush()
    change_weights("end_weight_update")
    assert found.serve_and_flush(tokens, fresh) == (0, 0)
    assert found.serve_and_flush(tokens, fresh) == (0, 60)
    found.serve(rig.prompt(2, rig.PAGE - 1))  # nothing of it is looked up, and it may grow
    change_weights()
    assert not found.linker.offload(rig.transfers_of(["ab" * 32])), "SGLang may have pages of the old weights"
    found.close()


def _constant(value: float, at: int) -> float:
    return value


@case
def killed(folder: Path) -> None:
    """Stores without an end; the test kills it."""
    found = rig.Rig(folder, ssd={"capacity": "64MiB"})
    print("begun", flush=True)
    for seed in range(100_000):
        found.serve(rig.prompt(seed, 61))
        found.flush()


@case
def after_the_kill(folder: Path) -> None:
    found = rig.Rig(folder, ssd={"capacity": "64MiB"})
    loaded = sum(found.serve(rig.prompt(seed, 61))[1] for seed in range(3))
    assert loaded > 0, "what was committed is there"
    assert found.linker.engine.check().ok
    found.close()


if __name__ == "__main__":
    run_case()
