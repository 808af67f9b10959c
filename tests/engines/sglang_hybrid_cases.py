"""Our linker below SGLang's own trees of hybrid models, on one rank or several, one case by its name:
sglang_hybrid_cases.py CASE FOLDER RANK RANKS"""

from __future__ import annotations

import contextlib
import os
import random
import socket
from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from gdscache.ranks.agreement import Agreement
from gdscache.storage.base import Op
from tests.engines import sglang_hybrid_rig as rig
from tests.engines.sglang_case import FAULTY, change_weights
from tests.engines.sglang_linker_ranks_rig import HybridRankRig, Ranks, case, run_case
from tests.support.faults import Fault, FaultPlan
from tests.support.faulty import PLAN

KINDS = ("swa", "mamba", "all")


@case
def hybrids_come_back(ranks: Ranks) -> None:
    """From the CPU tier after a flush, from the SSD after a restart; where prompts part, the last end before."""
    _come_back(ranks)


@case
def packed_hybrids_come_back(ranks: Ranks) -> None:
    """Windows are packed, states lie as they are, and so do pages that do not fit."""
    _come_back(ranks, model={"pack": "on"}, ssd={"capacity": "96MiB"})  # more than eight pages that do not fit


def _come_back(ranks: Ranks, **more: Any) -> None:
    for kind in KINDS:
        found, long = ranks.hybrid(kind, **more), rig.prompt(1, 100)
        found.unfit = "model" in more
        assert found.serve(long) == (0, 0)
        assert found.serve_and_flush(long) == (96, 0), "the tree has it"
        assert found.serve(long) == (0, 96)
        found.settle()
        if found.unfit and ranks.leads:
            for name, pool in found.linker.engine.by_groups.items():
                assert pool.layout.packed == (name != "mamba")
                unfit, stored = pool.stats()["stores"].get("unfit", 0), pool.stats()["stored"]
                assert (unfit and stored["cpu"]) or name == "mamba", (name, unfit, stored)
        found.close()
        # SGLang keeps a page more than the windows at the ends of chunks: at 32, 64 and 96.
        hits = {30: 28, 62: 60, 94: 92, 98: 96} if kind == "swa" else {30: 0, 62: 32, 94: 64, 98: 96}
        for head, hit in hits.items():
            found = ranks.hybrid(kind, **more)
            found.unfit = "model" in more
            assert found.serve(rig.prompt(head, 110, rig.prompt(1, head))) == (0, hit), (kind, head)
            found.settle()
            found.close()


@case
def pages_of_one_token(ranks: Ranks) -> None:
    """Of each length, after a restart too. SGLang keeps such models' states at the ends of chunks and requests alone,
    so where prompts part none is kept, and a window alone is of no use."""
    rig.PAGE = rig.sglang_rig.PAGE = 1
    asked, of = list[Any](), Agreement.of
    Agreement.of = lambda self, find: asked.append(find) or of(self, find)  # type: ignore[method-assign,func-returns-value]
    for kind in KINDS:
        found, head = ranks.hybrid(kind), rig.prompt(1, 45)
        asked.clear()
        first, second = rig.prompt(2, 57, head), rig.prompt(3, 70, head)
        assert found.serve_and_flush(first) == (0, 0)
        assert found.serve(rig.prompt(4, 100, first)) == (0, 57), kind
        assert bool(asked) == (kind != "mamba"), "ranks agree about places where something can be kept"
        found.settle()
        found.close()
        found = ranks.hybrid(kind)
        assert found.serve_and_flush(second) == (0, 32), kind
        assert found.serve_and_flush(rig.prompt(5, 60, head)) == (0, 45 if kind == "swa" else 32), kind
        assert found.serve(rig.prompt(6, 77, second)) == (0, 70), kind
        found.close()


@case
def prompts_that_end_on_the_edge_of_a_chunk(ranks: Ranks) -> None:
    for kind in KINDS:
        found = ranks.hybrid(kind)
        for tokens in (32, 64, 96):
            first = rig.prompt(tokens, tokens)
            assert found.serve_and_flush(first) == (0, 0)
            assert found.serve_and_flush(rig.prompt(1, tokens + 6, first)) == (0, tokens), (kind, tokens)
            shorter = tokens - (4 if kind == "swa" else 32)  # one token is computed
            assert found.serve_and_flush(first) == (0, shorter), (kind, tokens)
        found.close()


@case
def where_prompts_part(ranks: Ranks) -> None:
    """The second prompt on a common beginning keeps a window, or a state, where it parts: later ones find it."""
    for kind in KINDS:
        found, head = ranks.hybrid(kind), rig.prompt(1, 57)
        for flushed in (False, True):  # where SGLang's tree has the first one, and where our tiers alone have
            if ranks.leads:
                found.linker.engine.clear()
            assert found.serve(rig.prompt(2, 100, head)) == (0, 0)
            found.settle()
            if flushed:
                found.flush()
            assert sum(found.serve_and_flush(rig.prompt(3, 110, head))) in (32, 52), (
                "SGLang keeps a page more than a window"
            )
            assert found.serve_and_flush(rig.prompt(4, 90, head)) == (0, 56), (kind, flushed)
        found.close()


@case
def where_prompts_part_and_the_tiers_have_lost_that(ranks: Ranks) -> None:
    """A window or state that was offered where prompts part, and that device and tiers have let go since: the next
    prompt that parts there keeps it, and offers it again."""
    for kind in KINDS:
        found, head = ranks.hybrid(kind), rig.prompt(1, 57)
        for number in (2, 3):
            found.serve(rig.prompt(number, 90, head))
            found.settle()
        for engine in found.linker.engine.engines[1:] if ranks.leads else ():
            engine.clear()
        found.tree.evict(EvictParams(num_tokens=0, swa_num_tokens=rig.TOKENS, mamba_num=rig.STATES))
        assert found.serve_and_flush(rig.prompt(4, 90, head)) == (0, 0), kind
        assert found.serve(rig.prompt(5, 90, head)) == (0, 56), kind
        found.close()


@case
def the_device_has_more_by_then(ranks: Ranks) -> None:
    """A request that is looked up again, with fewer pages missing, loads what is missing by then."""
    for kind in KINDS:
        found, long = ranks.hybrid(kind), rig.prompt(1, 100)
        found.serve_and_flush(long)
        assert found.request(long, "waits").host_hit_length == 96
        assert found.serve(rig.prompt(2, 40, rig.prompt(1, 33))) == (0, 32)
        again = found.request(long, "waits")
        # A loaded state is its request's: the tree has got that behind the 40 tokens alone.
        assert (again.prefix_len, again.host_hit_length) == ((32, 64) if kind == "swa" else (0, 96)), kind
        found.load(again)
        found.finish(again, long)
        found.close()


@case
def a_group_whose_pages_are_gone(ranks: Ranks) -> None:
    """Where one group has lost its pages, all is computed, and stored anew."""
    for kind in KINDS:
        found, long = ranks.hybrid(kind), rig.prompt(1, 100)
        found.serve(long)
        for number in range(len(rig.COMPONENTS[kind])):
            found.settle()
            found.flush()
            if ranks.leads:
                found.linker.engine.engines[number].clear()
            assert found.serve_and_flush(long) == (0, 0), kind
            assert found.serve(long) == (0, 96), kind
        found.close()


@case
def a_group_whose_bytes_flip(ranks: Ranks) -> None:
    """Where the bytes of one group are bad on the last rank, all is computed, on all ranks."""
    for kind in KINDS:
        found, long = ranks.hybrid(kind), rig.prompt(1, 100)
        found.serve(long)
        found.settle()
        found.close()
        for number in range(len(rig.COMPONENTS[kind])):
            # before it opens: the leader may have the last rank read as soon as all are open
            with _flips(number) if ranks.rank == ranks.ranks - 1 else contextlib.nullcontext():
                again = ranks.hybrid(kind, ssd=FAULTY["ssd"])
                assert again.serve(long) == (0, 0), (kind, number)
                again.settle()
            again.flush()
            assert again.serve(long) == (0, 96), "computed and stored anew"
            again.close()


def _flips(number: int) -> Any:
    """Bits of one group are wrong as they are read."""
    return FaultPlan.rule(PLAN, Fault.FLIP, Op.READ, where=lambda path, _: f"groups-{number}" in path, rate=1.0, bit=7)


@case
def a_rank_whose_connection_is_lost(ranks: Ranks) -> None:
    """All processes live, and the last one and the leader have lost each other in one pool: misses, on all ranks alike.
    The first prompts part where the leader would find something to keep."""
    if ranks.ranks == 1:
        return
    for kind in KINDS:
        found, head = ranks.hybrid(kind), rig.prompt(1, 57)
        found.serve(rig.prompt(2, 90, head))
        found.settle()
        ranks.barrier()
        if ranks.rank == ranks.ranks - 1:
            found.linker._rank.ranks[-1]._service._channel._socket.shutdown(socket.SHUT_RDWR)
        if ranks.leads:
            rig.until(lambda found=found: _states(found)[-1] == "lost", "it is heard of")
        ranks.barrier()
        for number in range(6):
            assert found.serve(rig.prompt(3 + number, 90, head))[1] == 0, kind
            found.settle_reads()
            if number == 3:
                found.flush()
        found.close()


def _states(found: HybridRankRig) -> list[str]:
    """Of all ranks of the last pool."""
    return [one["state"] for one in [*found.linker.engine.stats()["pools"].values()][-1]["ranks"]]


@case
def the_rig_notices(ranks: Ranks) -> None:
    """A window that is not brought, or a state that is zero, is what the cases look at."""
    for kind, name in zip(KINDS, ("swa", "mamba", "kv"), strict=True):
        found, long = ranks.hybrid(kind), rig.prompt(1, 100)
        found.serve_and_flush(long)
        _spoil(found, name)
        seen = ""
        try:
            found.serve(long)
        except AssertionError as error:
            seen = str(error)
        assert "a wrong" in seen, f"{name} was spoilt, and nobody saw it"
        found.linker.close()


def _spoil(found: HybridRankRig, name: str) -> None:
    """Blocks of one group are zero behind a load."""
    counter, planes = found.linker.layer_done_counter, found.linker._planes
    begin, layers = counter._load, next(group["layers"] for group in planes.groups if group["name"] == name)

    def spoilt(number: int, queued: Any) -> Any:
        given = [one.blocks()[name] for one in queued]
        load = begin(number, queued)
        load.landed()
        for blocks in given:
            for layer in layers:
                for plane in planes.tensors[layer]:
                    plane[torch.tensor(blocks)] = 0
        return load

    counter._load = spoilt


@case
def random_traffic_of_windows(ranks: Ranks) -> None:
    _random(ranks, "swa")


@case
def random_traffic_of_states(ranks: Ranks) -> None:
    _random(ranks, "mamba")


@case
def random_traffic_of_both(ranks: Ranks) -> None:
    _random(ranks, "all")


def _random(ranks: Ranks, kind: str) -> None:
    """Prompts with common beginnings, flushes, aborts and restarts, in a pool and tiers that are too small: no wrong
    byte, and no batch fails."""
    source, loaded = random.Random(int(os.environ.get("GDSCACHE_SEED", "5"))), 0
    room = {"cpu": {"capacity": f"{ranks.ranks}MiB"}, "ssd": {"capacity": f"{2 * ranks.ranks}MiB"}}
    found = ranks.hybrid(kind, **room)
    for number in range(int(os.environ.get("GDSCACHE_OPERATIONS", "100"))):
        head = rig.prompt(source.randrange(4), source.randrange(4, 150))
        tokens = rig.prompt(source.randrange(3, 9), len(head) + source.randrange(1, 90), head)
        what = source.random()
        if what < 0.1:
            if what < 0.05:
                found.settle()
            found.flush()
        elif what < 0.14:
            found.close()
            found = ranks.hybrid(kind, **room)
        elif what < 0.2:
            found.leave(found.request(tokens, f"gone{number}"))  # it is looked up; the linker never hears of it again
        elif what < 0.3:  # it goes while its load is queued
            request = found.request(tokens, f"aborted{number}")
            found.load(request)
            found.abort(request)
        loaded += found.serve(tokens, source.choice([16, 32, 256]))[1]
    assert loaded > 500, loaded
    assert found.linker.counts["failed_loads"] == 0
    found.settle()
    if ranks.leads:
        assert found.linker.engine.check().ok
    found.close()


@case
def aborted_loads_of_hybrids(ranks: Ranks) -> None:
    """A request that goes while its load is queued leaves nothing behind."""
    for kind in KINDS:
        found, long = ranks.hybrid(kind), rig.prompt(1, 100)
        found.serve_and_flush(long)
        for _ in range(3):
            room = found.room()
            request = found.request(long)
            found.load(request)
            assert found.room() != room
            found.abort(request)
            assert found.room() == room, kind
            assert found.linker.start_layer_wise_loading() == -1
        assert found.serve_and_flush(long) == (0, 96)
        if ranks.leads:
            rig.until(lambda found=found: _leases(found) == [], "nothing is held")
        found.close()


def _leases(found: HybridRankRig) -> list[Any]:
    return [lease for part in found.linker.engine.stats()["pools"].values() for lease in part["leases"]]


@case
def hybrids_of_new_weights_find_nothing(ranks: Ranks) -> None:
    for kind in KINDS:
        found, long = ranks.hybrid(kind), rig.prompt(1, 100)
        found.serve(long)
        found.settle()
        change_weights()
        found.flush()
        assert found.serve_and_flush(long) == (0, 0), kind
        assert found.serve(long) == (0, 96), "those of the new weights are kept"
        found.close()


if __name__ == "__main__":
    run_case()
