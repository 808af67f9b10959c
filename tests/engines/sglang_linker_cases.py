"""Our linker below SGLang's own radix tree, one case by its name:  sglang_linker_cases.py CASE FOLDER"""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
from sglang.srt.disaggregation.kv_events import AllBlocksCleared, BlockRemoved, KVEventBatch
from sglang.srt.managers.schedule_policy import SchedulePolicy
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.mem_cache.hicache_storage import PoolTransfer
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from gdscache.integrations.sglang.setup import WEIGHT_METHODS
from gdscache.storage.base import Op
from tests.engines import sglang_rig as rig
from tests.engines.sglang_case import FAULTY, case, change_weights, restart, run_case
from tests.support.faults import Fault
from tests.support.faulty import PLAN


@case
def mha_pages_come_back(folder: Path) -> None:
    _come_back(folder, "mha")


@case
def mla_pages_come_back(folder: Path) -> None:
    _come_back(folder, "mla")


@case
def packed_pages_come_back(folder: Path) -> None:
    for kind in ("mha", "mla"):
        place = folder / kind
        place.mkdir()
        _come_back(place, kind, options={"config": rig.sections(place, model={"pack": "on"})})


def _come_back(folder: Path, kind: str, **changes: Any) -> None:
    """From the CPU tier after a flush, from the SSD after a restart, and whatever branches off."""
    found = rig.Rig(folder, kind, **changes)
    long, branch = rig.prompt(1, 62), rig.prompt(2, 50, rig.prompt(1, 30))
    assert found.serve(long) == (0, 0)
    assert found.serve(long) == (60, 0), "the tree has it"
    assert found.serve(branch) == (28, 0)
    found.settle()
    found.flush()
    assert found.serve(long) == (0, 60)
    assert found.serve(branch) == (28, 20)
    found.settle()
    assert found.linker.engine.stats()["tiers"]["ssd"]["pages"] == 15 + 5
    found.close()
    again = rig.Rig(folder, kind, **changes)
    assert again.serve(branch) == (0, 48)
    assert again.serve(long) == (28, 32)
    again.close()


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
    assert found.serve(long) == (0, 0)
    found.settle()
    found.flush()
    assert found.serve(long) == (0, 60)
    assert found.serve(branch) == (28, 0)
    assert found.linker.counts["failed_loads"] == 0
    found.close()


@case
def random_traffic(folder: Path) -> None:
    """Prompts with common beginnings, flushes and restarts, in a pool and tiers that are too small: no wrong byte."""
    source = random.Random(5)
    found = rig.Rig(folder, cpu={"capacity": "192KiB"}, ssd={"capacity": "384KiB"})
    loaded = 0
    for _ in range(250):
        head = rig.prompt(source.randrange(4), source.randrange(4, 100))
        tokens = rig.prompt(source.randrange(3, 9), len(head) + source.randrange(1, 60), head)
        loaded += found.serve(tokens)[1]
        if source.random() < 0.1:
            found.flush()
        if source.random() < 0.04:
            found.close()
            found = rig.Rig(folder, cpu={"capacity": "192KiB"}, ssd={"capacity": "384KiB"})
    assert loaded > 500, loaded
    assert found.linker.counts["failed_loads"] == 0
    found.settle()
    assert found.linker.engine.check().ok
    assert sum(file.stat().st_size for file in (folder / "ssd").glob("*.slab*")) <= 384 << 10
    found.close()


@case
def aborts(folder: Path) -> None:
    """Requests that go while they wait, or while their load is queued, leave nothing behind."""
    found = rig.Rig(folder)
    tokens = rig.prompt(1, 61)
    found.serve(tokens)
    found.settle()
    found.flush()
    for _ in range(3):
        request, seen = found.match(tokens)
        assert seen.host_hit_length == 60
        room = found.slots.available_size()
        assert found.tree.linker.load_back(request)[0] == 60
        tail = found.tree.linker.private_load_indices[request.rid]
        found.tree.linker.release_request(request.rid)
        found.slots.free(tail)  # as the scheduler does with an aborted request
        assert found.slots.available_size() == room
        assert found.linker.start_layer_wise_loading() == -1
    for number in range(5):
        found.match(tokens, f"gone{number}")  # never heard of again
    assert found.serve(tokens) == (0, 60)
    found.settle()
    found.flush()
    rig.until(lambda: found.linker.engine.stats()["leases"] == [], "nothing is held")
    assert len(found.linker._table) == 0
    found.close()


@case
def a_hung_read_is_computed(folder: Path) -> None:
    found = rig.Rig(folder, ssd=FAULTY["ssd"], options={"ssd_wait": 0.2})
    tokens = rig.prompt(1, 61)
    found.serve(tokens)
    found.settle()
    found.close()
    again = rig.Rig(folder, ssd=FAULTY["ssd"], options={"ssd_wait": 0.2})
    with PLAN.rule(Op.READ, Fault.HANG):
        assert again.serve(tokens) == (0, 0)
    assert again.linker.counts["late"] == 1
    again.flush()
    rig.until(lambda: again.linker.engine.stats()["leases"] == [], "nothing is held")
    again.close()


@case
def a_flipped_byte_is_computed(folder: Path) -> None:
    found = rig.Rig(folder)
    tokens = rig.prompt(1, 61)
    found.serve(tokens)
    found.settle()
    found.close()
    again = rig.Rig(folder, ssd=FAULTY["ssd"])
    with PLAN.rule(Op.READ, Fault.FLIP, rate=1.0, bit=7):
        assert again.serve(tokens)[1] < 60
    again.settle()
    again.flush()
    assert again.serve(tokens) == (0, 60), "computed and stored anew"
    again.close()


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
def new_weights_find_nothing(folder: Path) -> None:
    """Whatever way weights are written: no page of before is loaded, from any tier, after a restart neither."""
    found = rig.Rig(folder)
    tokens = rig.prompt(1, 61)

    def plain(at: int) -> float:
        return float(at % 100)

    found.serve(tokens, plain)
    found.settle()
    for number, name in enumerate(WEIGHT_METHODS):
        change_weights(name)
        assert not found.linker.offload(_whole(found, tokens)), "the tree has pages of the old weights"
        found.flush()  # as SGLang does behind an update
        fresh = functools.partial(_constant, float(200 + number))
        assert found.serve(tokens, fresh) == (0, 0), name
        found.settle()
        found.flush()
        assert found.serve(tokens, fresh) == (0, 60), "those of the new weights are kept"
        found.settle()
    found.close()
    late = rig.Rig(folder)
    assert late.serve(tokens, fresh) == (0, 0), "in the same process: neither those of the files nor those of another"
    late.close()
    restart()
    again = rig.Rig(folder)
    assert again.serve(tokens, plain) == (0, 60), "the weights of the files"
    again.close()


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
    assert found.serve(tokens, fresh) == (0, 0)
    found.settle()
    found.flush()
    assert found.serve(tokens, fresh) == (0, 60)
    found.settle()
    found.flush()
    found.serve(rig.prompt(2, rig.PAGE - 1))  # nothing of it is looked up, and it may grow
    change_weights()
    assert not found.linker.offload(_whole(found, tokens)), "SGLang may have pages of the old weights"
    found.close()


def _constant(value: float, at: int) -> float:
    return value


def _whole(found: rig.Rig, tokens: list[int]) -> list[PoolTransfer]:
    return rig.transfers_of(["ab" * 32])


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
