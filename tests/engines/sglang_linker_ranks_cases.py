"""Our linker below SGLang's own radix trees on one rank or several, one case by its name:
sglang_linker_ranks_cases.py CASE FOLDER RANK RANKS"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import time
from typing import Any

import torch

from gdscache.errors import GdsCacheError
from gdscache.integrations.sglang import linker as linkers
from gdscache.integrations.sglang.setup import RESETS_WEIGHTS, WEIGHT_METHODS
from gdscache.storage.base import Op
from tests.engines import sglang_rig as rig
from tests.engines.sglang_case import FAULTY, change_weights, restart
from tests.engines.sglang_linker_ranks_rig import PATIENCE_S, RankRig, Ranks, case, run_case
from tests.support.faults import Fault
from tests.support.faulty import PLAN

SHORT = {"options": {"ssd_wait": 0.2}, "deadline": 1}


@case
def heads_come_back(ranks: Ranks) -> None:
    _come_back(ranks, "mha", ranks.ranks)


@case
def heads_that_two_ranks_have_come_back(ranks: Ranks) -> None:
    _come_back(ranks, "mha", ranks.ranks // 2)


@case
def latents_come_back(ranks: Ranks) -> None:
    _come_back(ranks, "mla", 1)


@case
def packed_pages_come_back(ranks: Ranks) -> None:
    """Packed ones, and with those that do not fit among them."""
    for kind, unfit in itertools.product(("mha", "mla"), (False, True)):
        (place := ranks.folder / f"{kind}-{unfit}").mkdir(exist_ok=True)
        room = {"cpu": {"capacity": "4MiB"}, "ssd": {"capacity": "8MiB"}}
        packed = {"options": {"config": rig.sections(place, model={"pack": "on"}, **room)}}
        _come_back(ranks, kind, ranks.ranks if kind == "mha" else 1, unfit=unfit, **packed)


def _come_back(ranks: Ranks, kind: str, shards: int, *, unfit: bool = False, **more: Any) -> None:
    """From the CPU tier after a flush, from the SSD after a restart, and whatever branches off."""
    found = ranks.rig(kind, shards, **more)
    found.unfit = unfit
    long, branch = rig.prompt(1, 62), rig.prompt(2, 50, rig.prompt(1, 30))
    assert found.serve(long) == (0, 0)
    assert found.serve(long) == (60, 0), "the tree has it"
    assert found.serve_and_flush(branch) == (28, 0)
    assert found.serve(long) == (0, 60)
    assert found.serve(branch) == (28, 20)
    found.settle()
    if found.linker.engine is not None:
        stats = found.linker.engine.stats()
        assert sum(tier["pages"] for name, tier in stats["tiers"].items() if "ssd" in name) == 15 + 5
        assert bool(stats["stores"].get("unfit")) is unfit
        if ranks.ranks > 1:
            assert [one["state"] for one in stats["ranks"]] == ["running"] * ranks.ranks
            assert {one["shard"] for one in stats["ranks"]} == {*range(shards)}
    found.close()
    again = ranks.rig(kind, shards, **more)
    again.unfit = unfit
    assert again.serve(branch) == (0, 48), "a lone request waits for the SSD"
    assert again.serve(long) == (28, 32)
    again.close()


@case
def random_traffic(ranks: Ranks) -> None:
    """Prompts with common beginnings, flushes, aborts and restarts, in a pool and tiers that are too small: no wrong
    byte on any rank, and no batch fails. Packed pages have some among them that do not fit."""
    for kind, pack in itertools.product(("mha", "mla"), ("off", "on")):
        source, place = random.Random(int(os.environ.get("GDSCACHE_SEED", "5"))), ranks.folder / f"{kind}-{pack}"
        place.mkdir(exist_ok=True)
        sections = rig.sections(place, cpu={"capacity": "384KiB"}, ssd={"capacity": "768KiB"}, model={"pack": pack})

        def opened(kind: str = kind, pack: str = pack, sections: dict[str, Any] = sections) -> RankRig:
            made = ranks.rig(kind, options={"config": sections})
            made.unfit = pack == "on"
            return made

        found, loaded = opened(), 0
        for number in range(int(os.environ.get("GDSCACHE_OPERATIONS", "120"))):
            head = rig.prompt(source.randrange(4), source.randrange(4, 100))
            tokens = rig.prompt(source.randrange(3, 9), len(head) + source.randrange(1, 60), head)
            what = source.random()
            if what < 0.1:
                found.flush()
            elif what < 0.14:
                found.close()
                found = opened()
            elif what < 0.25:  # it is looked up, and never heard of again
                found.match(tokens, f"gone{number}")
            elif what < 0.35:  # it goes while its load is queued
                request, seen = found.match(tokens, f"aborted{number}")
                room = found.slots.available_size()
                if seen.host_hit_length and seen.host_hit_length <= room:
                    assert found.tree.linker.load_back(request)[0] == seen.host_hit_length
                    tail = found.tree.linker.private_load_indices[request.rid]
                    found.tree.linker.release_request(request.rid)
                    found.slots.free(tail)
                    assert found.linker.start_layer_wise_loading() == -1
            loaded += found.serve(tokens)[1]
        assert loaded > (300 if pack == "on" else 500), (kind, pack, loaded)
        assert found.linker.counts["failed_loads"] == 0
        found.settle()
        if found.linker.engine is not None:
            assert found.linker.engine.check().ok
            assert sum(file.stat().st_size for file in place.rglob("*.bin")) <= 768 << 10
        found.close()


@case
def a_rank_that_is_late(ranks: Ranks) -> None:
    """Reads hang on the last rank alone: computed on all, in time. When they end, its pages are found again."""
    last, tokens = ranks.rank == ranks.ranks - 1, rig.prompt(1, 61)
    found = ranks.rig(ssd=FAULTY["ssd"], **SHORT)
    found.serve(tokens)
    found.settle()
    found.close()
    found = ranks.rig(ssd=FAULTY["ssd"], **SHORT)
    with PLAN.rule(Op.READ, Fault.HANG) if last else contextlib.nullcontext():
        begun = time.monotonic()
        assert found.serve(tokens) == (0, 0)
        assert time.monotonic() - begun < PATIENCE_S / 2
        found.flush()
        assert found.hit(rig.prompt(7, 61)) == 0
        ranks.barrier()
    for _ in range(300):
        found.flush()
        loaded = found.serve(tokens)[1]
        found.settle()
        if loaded == 60:
            break
        time.sleep(0.1)
    assert loaded == 60, "the rank answers again"
    found.close()


@case
def a_rank_that_fails(ranks: Ranks) -> None:
    """Bytes that are bad on one rank are bad for all; a rank that has left costs hits only."""
    last, tokens = ranks.rank == ranks.ranks - 1, rig.prompt(1, 61)
    found = ranks.rig(ssd=FAULTY["ssd"])
    found.serve(tokens)
    found.settle()
    found.close()
    found = ranks.rig(ssd=FAULTY["ssd"])
    with PLAN.rule(Op.READ, Fault.FLIP, rate=1.0, bit=7) if last else contextlib.nullcontext():
        assert found.serve(tokens)[1] < 60
        found.settle()
    found.flush()
    assert found.serve(tokens) == (0, 60), "computed and stored anew"
    found.flush()
    ranks.barrier()
    if last:
        for rank in found.linker._rank.ranks:
            rank.close()
    if ranks.leads:
        rig.until(lambda: found.linker.engine.stats()["ranks"][-1]["state"] == "lost", "it is heard of")
    ranks.barrier()
    for number in range(3):
        assert found.serve_and_flush(rig.prompt(number, 61)) == (0, 0)
    found.close()


@case
def a_leader_without_an_engine(ranks: Ranks) -> None:
    """Rank 0 goes on, and its engine has gone: misses on all ranks, at once."""
    found, tokens = ranks.rig(), rig.prompt(1, 61)
    found.serve_and_flush(tokens)
    assert found.serve(tokens) == (0, 60)
    found.flush()
    if ranks.leads:
        found.linker.engine.close()
    ranks.barrier()
    begun = time.monotonic()
    for number in range(3):
        assert found.serve(rig.prompt(number, 61)) == (0, 0)
        found.settle_reads()
    assert time.monotonic() - begun < PATIENCE_S / 2
    found.close()


@case
def a_load_that_the_leader_cannot_begin(ranks: Ranks) -> None:
    """Promised, queued, and then its engine has gone: the batch fails on every rank, and none waits for long."""
    found, tokens = ranks.rig(), rig.prompt(1, 61)
    found.serve_and_flush(tokens)
    request, seen = found.match(tokens)
    assert seen.host_hit_length == 60
    assert found.tree.linker.load_back(request)[0] == 60
    if ranks.leads:
        found.linker.engine.close()
    index = found.tree.ready_to_load_host_cache()
    found.linker.layer_done_counter.set_consumer(index)
    for layer in range(rig.LAYERS):
        found.linker.layer_done_counter.wait_until(layer)
    assert found.tree.finish_external_linker_loads([request]) == [request]
    found.close()


@case
def a_dead_rank(ranks: Ranks) -> None:
    _die(ranks, ranks.ranks - 1)


@case
def a_dead_leader(ranks: Ranks) -> None:
    _die(ranks, 0)


def _die(ranks: Ranks, rank: int) -> None:
    """One process is killed while its requests are looked up: nothing of ours hangs or raises in front of SGLang's
    reduction, which does."""
    found, tokens = ranks.rig(**SHORT), rig.prompt(1, 61)
    found.serve_and_flush(tokens)
    ranks.barrier()
    if ranks.rank == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    if ranks.leads:
        rig.until(lambda: found.linker.engine.stats()["ranks"][-1]["state"] == "lost", "it is heard of")
    else:
        rig.until(lambda: found.linker._rank.ranks[0]._service is None, "it is heard of")
    begun = time.monotonic()
    transfers = rig.transfers_of(["ab" * 32, "cd" * 32])
    assert found.linker.lookup("r", transfers) == ([] if ranks.leads else [1, 2])
    assert found.linker.load("r", transfers)
    index = found.linker.start_layer_wise_loading()
    found.linker.layer_done_counter.set_consumer(index)
    found.linker.layer_done_counter.wait_until(0)
    assert not found.linker.finish_layer_wise_loading(index)
    assert found.linker.offload(transfers)
    rig.until(found.linker.num_completed_offloads, "it is over")
    found.linker.pop_completed_offload()
    found.linker.reset()
    found.linker.close()
    assert time.monotonic() - begun < PATIENCE_S / 2
    ranks.leave()


@case
def new_weights_find_nothing(ranks: Ranks) -> None:
    """Whatever way weights are written: no page of before is loaded, from any tier, after a restart neither."""
    found, tokens = ranks.rig(), rig.prompt(1, 61)
    found.serve(tokens)
    found.settle()
    for number, name in enumerate([*WEIGHT_METHODS, RESETS_WEIGHTS]):
        change_weights(name)
        assert not found.linker.offload(rig.transfers_of(["ab" * 32])), "the tree has pages of the old weights"
        found.flush()

        def fresh(at: int, value: float = float(200 + number)) -> float:
            return value

        assert found.serve_and_flush(tokens, fresh) == (0, 0), name
        assert found.serve(tokens, fresh) == (0, 60), "those of the new weights are kept"
        found.settle()
    found.close()
    late = ranks.rig()
    assert late.serve(tokens, fresh) == (0, 0), "in the same process: neither those of the files nor those of another"
    late.close()
    restart()
    again = ranks.rig()
    assert again.serve(tokens) == (0, 60), "the weights of the files"
    again.close()


@case
def refused_on_all_ranks(ranks: Ranks) -> None:
    """What one rank cannot, all of them hear of, by name."""
    for server, change, what in (
        ({"pp_size": 2}, None, "pp_size is 2"),
        ({}, ("refuse_model", 1), "rank 1"),
        ({}, ("_leading", 0), "rank 0"),
    ):
        patch = contextlib.nullcontext()
        if change is not None and ranks.rank == change[1]:
            patch = _broken(change[0])
        own = change is not None and ranks.rank == change[1]
        error = None
        try:
            with patch:
                ranks.rig(server=server)
        except GdsCacheError as raised:
            error = raised
        assert error is not None, what
        assert ("on purpose" if own else what) in str(error)
    found = ranks.rig()
    assert found.serve(rig.prompt(1, 61)) == (0, 0)
    found.close()


@contextlib.contextmanager
def _broken(name: str) -> object:
    owner = linkers.setup if hasattr(linkers.setup, name) else linkers.GdsCacheLinker
    whole = getattr(owner, name)

    def breaks(*args: object, **more: object) -> None:
        raise GdsCacheError("on purpose", "none")

    setattr(owner, name, breaks)
    try:
        yield
    finally:
        setattr(owner, name, whole)


if __name__ == "__main__":
    torch.set_num_threads(1)
    run_case()
