"""HiCache whole with our storage below, as several ranks: a process each. sglang_ranks_cases.py CASE FOLDER

Of K and V, of latents, which one rank stores for all, and of hybrid models.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from gdscache.errors import GdsCacheError, RankError, ShardsError
from gdscache.storage.base import Op
from tests.engines import sglang_rig as rig
from tests.engines.collectives import Recorder, compared
from tests.engines.sglang_case import FAULTY, case, change_weights, restart, run_case
from tests.engines.sglang_hicache_rig import BATCH, HYBRIDS, KINDS, HiCacheRig
from tests.support.faults import Fault
from tests.support.faulty import PLAN

RANKS = int(os.environ.get("GDSCACHE_RANKS", "2"))
LIMIT_S = float(os.environ.get("GDSCACHE_LIMIT_S", "100"))
_forked = multiprocessing.get_context("fork")


def ranks(work: Callable[..., None], folder: Path, *given: Any, dead: tuple[int, ...] = ()) -> int:
    """Have each rank do `work(folder, rank, *given)` in a process of its own; how many collectives they entered, all of
    them together. `dead`: ranks that are killed in it."""
    folder.mkdir(exist_ok=True)
    rig.server_args(folder)  # writes the model's files once
    processes = [_forked.Process(target=_rank, args=(work, folder, rank, given)) for rank in range(RANKS)]
    for process in processes:
        process.start()
    end = time.monotonic() + LIMIT_S
    for process in processes:
        process.join(max(0.1, end - time.monotonic()))
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    wanted = [-signal.SIGKILL if rank in dead else 0 for rank in range(RANKS)]
    assert codes == wanted, f"ranks ended with {codes} (None hangs)"
    return compared(folder, RANKS, dead)


def _rank(work: Callable[..., None], folder: Path, rank: int, given: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    Recorder(folder, rank)
    work(folder, rank, *given)
    sys.stdout.flush()
    os._exit(0)


def opened(folder: Path, rank: int, kind: str, **changes: Any) -> HiCacheRig:
    return HiCacheRig(folder, kind=kind, rank=rank, ranks=RANKS, **changes)


PURE = [kind for kind in KINDS if kind not in HYBRIDS]
PACKED = {"model": {"pack": "on"}}


@case
def ranks_come_back(folder: Path) -> None:
    """Every rank gets its own bytes back, after a restart too, and windows and states with the pages they belong to, at
    lengths at which both are there. Latents are stored once."""
    _all_come_back(folder, {})


@case
def packed_ranks_come_back(folder: Path) -> None:
    """Windows are packed, states lie as they are, and so do pages that do not fit."""
    _all_come_back(folder, PACKED)


def _all_come_back(folder: Path, changes: dict[str, Any]) -> None:
    for kind in KINDS:
        assert ranks(_come_back, folder / kind, kind, changes) > 10
        there = sorted(path.name for path in (folder / kind / "ssd").glob("rank-*"))
        assert there == ([f"rank-{number}-of-{RANKS}" for number in range(RANKS)] if kind != "mla" else []), there


def _come_back(folder: Path, rank: int, kind: str, changes: dict[str, Any]) -> None:
    found, tokens, before = opened(folder, rank, kind, **changes), rig.prompt(15, 160), 0
    for stop in (10, 20, 30, 40):  # pages that a node of the tree ended with
        node, ends = tokens[before * rig.PAGE : stop * rig.PAGE], [stop - before - 1] if stop < 40 else []
        found.compute(node, ends=ends, before=tokens[: before * rig.PAGE])
        before = stop
    keys = found.keys(tokens)
    unfit = [number for number, key in enumerate(keys) if found.unfit(key)]
    most = min(unfit, default=40) if kind == "mla" else 40  # a borrower has no page that does not fit
    assert most > 10
    for asked in (160, 120, 119, 84, 80, 76, 39):
        pages = asked // rig.PAGE
        there = min(pages, most) if kind in PURE else min(pages // 10 * 10, 30)
        assert found.came(f"a{asked}", tokens[:asked]) == there, (kind, asked)
    if found.storage._place.leads:
        for name, engine in getattr(found.storage.engine, "by_groups", {"kv": found.storage.engine}).items():
            stats = engine.stats()
            assert engine.layout.packed == (found.packed and name != "mamba")
            assert (stats["stores"].get("unfit", 0) > 0) == engine.layout.packed, name
            assert stats["stored"]["ssd"], name
            if kind in PURE:
                assert sum(tier["pages"] for tier_name, tier in stats["tiers"].items() if "ssd" in tier_name) == 40
                assert stats["stores"].get("unfit", 0) == len(unfit)
    found.close()
    restart()
    again = opened(folder, rank, kind, **changes | ({"model": {"pack": "auto"}} if changes else {}))
    assert again.came("b", tokens) == (most if kind in PURE else 30)
    again.storage.clear()
    again.meet()
    assert again.came("c", tokens) == 0
    again.close()


@case
def ranks_late(folder: Path) -> None:
    """Reads of one rank hang: all ranks go on with what that one has, with our deadline, and nothing comes late."""
    for kind in PURE:
        for late in range(RANKS):
            ranks(_late, folder / f"{kind}-{late}", kind, late)


def _late(folder: Path, rank: int, kind: str, late: int) -> None:
    found, tokens = opened(folder, rank, kind, deadline=0.5, **FAULTY), rig.prompt(1, 200)
    found.compute(tokens)
    room = found.pool.available_size()
    with PLAN.rule(Op.READ, Fault.HANG, skip=12) if rank == late else contextlib.nullcontext():
        assert found.wait(found.begin("a", tokens)) < 10
        came = found.hit(tokens)
        found.agree(came)
        assert BATCH <= came <= 12, came  # two threads read: not the first pages first
        found.holds(tokens, came)
        left = room - came * rig.PAGE
        found.until_all(lambda: found.poll() or found.pool.available_size() == left, "the rest is free")
        free = found.pool.alloc(found.pool.available_size())
        found.pool.kv_buffer.view(torch.uint8).view(-1)[:] = 7  # all of the pool is others' now
        found.meet()
    time.sleep(0.1)
    assert (found.pool.kv_buffer.view(torch.uint8) == 7).all(), "nothing comes late"
    found.pool.free(free)
    found.tree.reset()
    found.until_all(lambda: found.storage.batch_exists(found.keys(tokens)) == 50, "all are found again")
    assert found.came("b", tokens) == 50
    found.close()


@case
def ranks_fail(folder: Path) -> None:
    """Bytes that are wrong, reads that fail and a disk that is full, each on one rank: all ranks have the same hit, and
    what is stored again is found again."""
    for kind in PURE:
        _all_fail(folder, kind)


@case
def hybrids_fail(folder: Path) -> None:
    """A read of a window or a state that fails, or hangs, costs the prefix, on all ranks alike."""
    for kind in HYBRIDS:
        _all_fail(folder, kind)


def _all_fail(folder: Path, kind: str) -> None:
    for failing in range(RANKS):
        ranks(_fail, folder / f"{kind}-{failing}", kind, failing)


def _fail(folder: Path, rank: int, kind: str, failing: int) -> None:
    pure, mine = kind in PURE, rank == failing
    found, pages = opened(folder, rank, kind, deadline=20.0 if pure else 0.5, **FAULTY), 50 if pure else 20
    tokens, others = (rig.prompt(seed, pages * rig.PAGE) for seed in (1, 2))
    for number, fault in enumerate((Fault.FLIP, Fault.EIO, *([] if pure else [Fault.HANG]))):
        found.compute(tokens, ends=[pages - 1])
        times = {"times": 1} if pure else {}
        with PLAN.rule(Op.READ, fault, skip=20, **times) if mine else contextlib.nullcontext():
            came = found.came(f"a{number}", tokens)
            assert 16 <= came < 50 if pure else came == 0, "a window's or a state's page is behind the 20 others"
        found.compute(tokens, ends=[pages - 1])
        found.until_all(lambda: found.came("b", tokens) == pages, "stored again")
    if pure:
        with PLAN.rule(Op.WRITE, Fault.ENOSPC) if mine else contextlib.nullcontext():
            found.compute(others)
        full = mine and found.storage._place.leads
        assert (found.storage.batch_exists(found.keys(others)) == 0) or not full
        if kind == "mha" or failing == 0:
            assert found.came("c", others) == 0, "what one rank has not, none has"
        found.compute(others)
        assert found.came("d", others) == 50
    found.close()


@case
def ranks_die(folder: Path) -> None:
    """A rank is killed: on the other one our calls return, at once or with the deadline, and it can be closed. (SGLang
    ends its server.)"""
    for kind in KINDS:
        for dying in range(RANKS):
            ranks(_die, folder / f"{kind}-{dying}", kind, dying, dead=(dying,))


def _die(folder: Path, rank: int, kind: str, dying: int) -> None:
    found, tokens = opened(folder, rank, kind, deadline=1.0), rig.prompt(1, 80)
    found.compute(tokens, ends=[19])
    keys, wanted = found.keys(tokens), found.transfers(found.keys(tokens))
    found.meet()
    if rank == dying:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.5)
    storage, there = found.storage, kind != "mla" or dying != 0
    for _ in range(5):
        found.wipe()
        begun = time.monotonic()
        if kind in PURE:
            assert storage.batch_exists(keys) == 20 * there
            came = storage.batch_get_v1(keys, wanted[0].host_indices)
        else:
            assert storage.batch_exists_v2(keys, wanted[1:]).restorable_prefix_pages == [20]
            came = [one for its in storage.batch_get_v2(wanted).values() for one in its]
        assert time.monotonic() - begun < 2.5
        assert {*came} == {there}
        if there:
            found.same(wanted)
    if kind in PURE:
        stored = storage.batch_set_v1(found.keys(rig.prompt(2, 80)), wanted[0].host_indices)
    else:
        stored = [one for its in storage.batch_set_v2(wanted).values() for one in its]
    assert {*stored} == {storage._place.leads}
    begun = time.monotonic()
    storage.close()
    assert time.monotonic() - begun < 5


@case
def ranks_open_all_or_none(folder: Path) -> None:
    """What hinders one rank is raised on all, each time, and they can open behind it; a directory of another number of
    ranks, or of another rank, is refused on all."""
    for kind in PURE:
        ranks(_open, folder / kind, kind)


def _open(folder: Path, rank: int, kind: str) -> None:
    if rank == 0 and kind == "mla":  # the directory that only the first rank has
        (folder / "ssd").mkdir(mode=0o700)
        (folder / "ssd" / "slab-0.bin").mkdir()
    if rank == 1 and kind == "mha":
        (folder / "ssd" / "rank-1-of-2").mkdir(parents=True, mode=0o700)
        (folder / "ssd" / "rank-1-of-2" / "slab-0.bin").mkdir()
    broken = next(iter((folder / "ssd").rglob("slab-0.bin")), None) if (folder / "ssd").exists() else None
    fails = (kind == "mha") == (rank == 1)
    error = _refused(folder, rank, kind)
    assert isinstance(error, RankError) is not fails, error
    assert fails or f"rank {1 if kind == 'mha' else 0}" in str(error)
    if fails:
        assert broken is not None
        broken.rmdir()
    torch.distributed.barrier()
    found, tokens = opened(folder, rank, kind), rig.prompt(1, 100)
    found.compute(tokens)
    assert found.came("a", tokens) == 25
    found.close()
    torch.distributed.barrier()
    if kind == "mha":
        if rank == 0:
            names = [folder / "ssd" / name for name in ("rank-0-of-2", "rank-1-of-2", "other")]
            for old, new in ((0, 2), (1, 0), (2, 1)):
                names[old].rename(names[new])
        torch.distributed.barrier()
        assert isinstance(_refused(folder, rank, kind), ShardsError)
        torch.distributed.barrier()
    (folder / "ssd" / "rank-0-of-4").mkdir(exist_ok=True)
    torch.distributed.barrier()
    error = _refused(folder, rank, kind)
    assert isinstance(error, ShardsError if found.storage._place.leads else RankError)
    assert "4 parts" in str(error)


def _refused(folder: Path, rank: int, kind: str) -> GdsCacheError:
    try:
        opened(folder, rank, kind)
    except GdsCacheError as error:
        return error
    raise AssertionError("it opens")


@case
def ranks_new_weights(folder: Path) -> None:
    """Ranks hear of new weights one after the other: no page of the old ones comes, not even between the two."""
    for kind in PURE:
        ranks(_new_weights, folder / kind, kind)


def _new_weights(folder: Path, rank: int, kind: str) -> None:
    found, tokens = opened(folder, rank, kind), rig.prompt(1, 100)
    found.compute(tokens)
    for first in range(RANKS):
        for turn in range(RANKS):
            if rank == (first + turn) % RANKS:
                change_weights()
            found.meet()
            assert found.came(f"{first}-{turn}", tokens) == 0, "of the old weights"
        found.weights = 1 + first
        found.compute(tokens)
        assert found.came(f"{first}", tokens) == 25
    found.close()


@case
def ranks_at_random(folder: Path) -> None:
    """Prompts with common beginnings, stores and flushes, in directories that are too small: what comes is right on
    every rank, and ranks that evict by themselves keep the same pages."""
    _at_random(folder, PURE, faults=False)


@case
def ranks_at_random_with_faults(folder: Path) -> None:
    """The same, with faults of one rank now and then: the pages that ranks keep are nearly the same."""
    _at_random(folder, PURE, faults=True)


@case
def hybrids_at_random_with_faults(folder: Path) -> None:
    _at_random(folder, HYBRIDS, faults=True)


@case
def packed_pages_at_random(folder: Path) -> None:
    """The same of packed pages, with some that do not fit, and with faults."""
    _at_random(folder, [*PURE, "all"], faults=True, **PACKED)


def _at_random(folder: Path, kinds: list[str], *, faults: bool, **more: Any) -> None:
    for kind in kinds:
        print(kind, ranks(_random, folder / kind, kind, faults, more), "collectives")


def _random(folder: Path, rank: int, kind: str, faults: bool, more: dict[str, Any]) -> None:
    pure, ssd = kind in PURE, {**FAULTY["ssd"], "capacity": "2MiB"}
    room = {"host_buffer": "1MiB" if pure or not more else "4MiB", "deadline": 1.0 if faults else 20.0}
    found, source = opened(folder, rank, kind, ssd=ssd, **room, **more), random.Random(f"{kind} {faults}")
    came, asked, stored = 0, 0, dict[str, None]()
    for number in range(int(os.environ.get("GDSCACHE_OPERATIONS", "80"))):
        head = rig.prompt(source.randrange(4), source.choice([0, 40, 80]))
        tokens = rig.prompt(source.randrange(4), source.randrange(40, 160, 4), head)
        failing, what = source.randrange(RANKS), source.random()
        fault = source.choice([Fault.FLIP, Fault.EIO]) if what < 0.2 else Fault.HANG
        skip = source.randrange(6 if pure else 30)
        plan = PLAN.rule(Op.READ, fault, skip=skip, times=2) if faults and what < 0.21 and rank == failing else None
        with plan or contextlib.nullcontext():
            pages = found.came(str(number), tokens)
        came, asked = came + pages, asked + len(tokens) // rig.PAGE
        if left := tokens[pages * rig.PAGE :]:
            found.compute(left, ends=[len(left) // rig.PAGE - 1], before=tokens[: pages * rig.PAGE])
            stored.update(dict.fromkeys(found.keys(tokens)))
    print("came", came, "of", asked, "pages")
    assert came > asked / (10 if pure else 20)
    found.meet()
    if kind == "mha":
        both = torch.tensor([found.storage.exists(key) for key in stored], dtype=torch.int)
        either = both.clone()
        torch.distributed.all_reduce(both, torch.distributed.ReduceOp.MIN)
        torch.distributed.all_reduce(either, torch.distributed.ReduceOp.MAX)
        print("kept by both", int(both.sum()), "by either", int(either.sum()))
        assert more or int(both.sum()) >= (0.85 if faults else 0.98) * int(either.sum())
    problems = found.storage.engine.check().problems if found.storage._place.leads else ()
    assert not problems, problems
    found.close()


if __name__ == "__main__":
    run_case()
