"""HiCache whole with our storage below, as several ranks: a process each. sglang_ranks_cases.py CASE FOLDER"""

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
from tests.engines import sglang_hicache_rig as hicache
from tests.engines import sglang_rig as rig
from tests.engines.collectives import Recorder, compared
from tests.engines.sglang_case import FAULTY, case, change_weights, restart, run_case
from tests.engines.sglang_host_rig import same
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


class RanksRig(hicache.HiCacheRig):
    """One of several ranks. Pages have bytes of their own on each, unless they are latents."""

    def __init__(self, folder: Path, rank: int, kind: str, policy: str = "wait_complete", **more: Any) -> None:
        self.kind, self.rank, self.stored = kind, rank, dict[str, None]()
        self.packed = "model" in more
        super().__init__(folder, policy, kind=kind, rank=rank, ranks=RANKS, **more)

    def store(self, tokens: list[int], seed: int) -> list[torch.Tensor]:
        """Random pages of these tokens, stored by HiCache's own thread, and no longer in the pool; what they hold."""
        slots = self.pool.alloc(len(tokens))
        own = seed if self.kind == "mla" else seed * RANKS + self.rank
        pages = self.fill(hicache._pages_of(slots), own)
        self.backup(slots, tokens, self.keys(tokens))
        return pages

    def came(self, rid: str, tokens: list[int]) -> int:
        """A request comes and may run; how many of its first pages the pool has now."""
        self.wait(self.begin(rid, tokens))
        return int(self.match(tokens).host_hit_length) // rig.PAGE

    def content(self, key: str) -> torch.Tensor:
        """The bytes of a page on this rank, whenever it is computed."""
        own = 0 if self.kind == "mla" else self.rank
        return self.drawn(torch.Generator().manual_seed(int(key[:12], 16) * RANKS + own))

    def drawn(self, source: torch.Generator) -> torch.Tensor:
        """A random page; one of eight packed ones does not fit into a packed extent."""
        like = self.pool.get_data_page(0)
        values = torch.randn(like.shape, generator=source)
        if self.packed and torch.randint(8, (), generator=source) == 0:
            values *= 2.0 ** torch.randint(-60, 60, like.shape, generator=source)
        return values.to(like.dtype)

    def compute(self, tokens: list[int], keys: list[str]) -> None:
        """The pages are computed, and stored by HiCache's own thread. The pool is empty before and behind it."""
        slots = self.pool.alloc(len(tokens))
        for page, key in zip(hicache._pages_of(slots), keys, strict=True):
            self.pool.set_from_flat_data_page(page * rig.PAGE, self.content(key))
        self.backup(slots, tokens, keys)
        self.stored.update(dict.fromkeys(keys))

    def backup(self, slots: torch.Tensor, tokens: list[int], keys: list[str]) -> None:
        acks = self.tree.cache_controller.ack_backup_queue
        self.tree.cache_controller.write_storage(slots, tokens, hash_value=keys, prefix_keys=[])
        rig.until(lambda: not acks.empty(), "the backup ends")
        acks.get()
        self.pool.free(slots)
        self.pool.kv_buffer.zero_()
        self.meet()

    def until_free(self, room: int, came: int) -> None:
        """Pages that did not come are the pool's again, on all ranks."""
        free = room - came * rig.PAGE
        rig.until(lambda: self.poll() or self.all_agree(int(self.pool.available_size() == free)), "the rest is free")

    def meet(self) -> None:
        """All ranks are here."""
        torch.distributed.barrier()

    def all_agree(self, value: int) -> bool:
        """Whether the value is the same on all ranks."""
        least, most = torch.tensor(value), torch.tensor(value)
        torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN)
        torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX)
        return int(least) == int(most) == value

    def flush(self) -> None:
        self.tree.reset()


PACKED = {"model": {"pack": "on"}, "ssd": {"capacity": "16MiB"}, "host_buffer": "4MiB"}


def kinds(folder: Path) -> list[tuple[Path, str]]:
    return [(folder / kind, kind) for kind in ("mha", "mla")]


@case
def ranks_come_back(folder: Path) -> None:
    """Every rank gets its own bytes back, after a restart too; latents are stored once."""
    for place, kind in kinds(folder):
        assert ranks(_come_back, place.with_name(f"{kind}-packed"), kind, PACKED) > 20
        assert ranks(_come_back, place, kind, {}) > 20
        there = sorted(path.name for path in (place / "ssd").iterdir() if path.is_dir())
        assert there == ([f"rank-{number}-of-{RANKS}" for number in range(RANKS)] if kind == "mha" else []), there


def _come_back(folder: Path, rank: int, kind: str, more: dict[str, Any]) -> None:
    found = RanksRig(folder, rank, kind, **more)
    tokens = rig.prompt(1, 200)
    wanted = found.store(tokens, 3)
    unfit = [number for number, page in enumerate(wanted) if page.abs().max() > 1e6]
    there = min(unfit, default=50) if kind == "mla" else 50  # a borrower has no page that does not fit
    for turn in range(2):
        assert found.came(f"a{turn}", tokens) == there
        same(found.pages(tokens), wanted[:there])
        found.flush()
    longer = rig.prompt(2, 240, tokens)
    assert found.came("b", longer) == there > 10
    same(found.pages(longer), wanted[:there])
    if found.storage._place.leads:
        stats = found.storage.engine.stats()
        assert sum(tier["pages"] for name, tier in stats["tiers"].items() if "ssd" in name) == 50
        assert stats["stores"].get("unfit", 0) == len(unfit)
    found.close()
    restart()
    again = RanksRig(folder, rank, kind, **more | ({"model": {"pack": "auto"}} if more else {}))
    assert again.came("c", tokens) == there
    same(again.pages(tokens), wanted[:there])
    again.close()


@case
def ranks_late(folder: Path) -> None:
    """Reads of one rank hang: all ranks go on with what that one has, with our deadline, and nothing comes late."""
    for place, kind in kinds(folder):
        for late in range(RANKS):
            ranks(_late, place.with_name(f"{kind}-{late}"), kind, late)


def _late(folder: Path, rank: int, kind: str, late: int) -> None:
    found = RanksRig(folder, rank, kind, deadline=0.5, **FAULTY)
    tokens = rig.prompt(1, 200)
    wanted, room = found.store(tokens, 1), found.pool.available_size()
    with PLAN.rule(Op.READ, Fault.HANG, skip=12) if rank == late else contextlib.nullcontext():
        begun = time.monotonic()
        came = found.came("a", tokens)
        assert time.monotonic() - begun < 10
        assert found.all_agree(came)
        assert hicache.BATCH <= came <= 12, came  # two threads read: not the first pages first
        same(found.pages(tokens), wanted[:came])
        found.until_free(room, came)
        free = found.pool.alloc(found.pool.available_size())
        found.pool.kv_buffer.view(torch.uint8).view(-1)[:] = 7  # all of the pool is others' now
        found.meet()
    time.sleep(0.1)
    assert (found.pool.kv_buffer.view(torch.uint8) == 7).all(), "nothing comes late"
    found.pool.free(free)
    found.flush()
    rig.until(lambda: found.all_agree(found.storage.batch_exists(found.keys(tokens)) == 50), "all are found again")
    assert found.came("b", tokens) == 50
    same(found.pages(tokens), wanted)
    found.close()


@case
def ranks_fail(folder: Path) -> None:
    """Bytes that are wrong, reads that fail and a disk that is full, each on one rank: all ranks have the same hit, and
    what is stored again is found again."""
    for place, kind in kinds(folder):
        for failing in range(RANKS):
            ranks(_fail, place.with_name(f"{kind}-{failing}"), kind, failing)


def _fail(folder: Path, rank: int, kind: str, failing: int) -> None:
    found = RanksRig(folder, rank, kind, **FAULTY)
    tokens = rig.prompt(1, 200)
    wanted = found.store(tokens, 1)
    mine = rank == failing
    for number, fault in enumerate((Fault.FLIP, Fault.EIO)):
        with PLAN.rule(Op.READ, fault, skip=20, times=1) if mine else contextlib.nullcontext():
            came = found.came(f"a{number}", tokens)
            assert found.all_agree(came)
            assert 16 <= came < 50, came
            same(found.pages(tokens), wanted[:came])
        found.flush()
        found.store(tokens, 1)
        rig.until(lambda: found.all_agree(found.storage.batch_exists(found.keys(tokens)) == 50), "stored again")
        assert found.came(f"b{number}", tokens) == 50
        same(found.pages(tokens), wanted)
        found.flush()
    others = rig.prompt(2, 200)
    with PLAN.rule(Op.WRITE, Fault.ENOSPC) if mine else contextlib.nullcontext():
        found.store(others, 2)
    full = mine and found.storage._place.leads
    assert (found.storage.batch_exists(found.keys(others)) == 0) or not full
    if kind == "mha" or failing == 0:
        request = found.begin("c", others)
        found.wait(request)
        assert found.match(others).host_hit_length == 0, "what one rank has not, none has"
    found.flush()
    again = found.store(others, 2)
    assert found.came("d", others) == 50
    same(found.pages(others), again)
    found.close()


@case
def ranks_die(folder: Path) -> None:
    """A rank is killed: on the other one our calls return, at once or with the deadline, and it can be closed. (SGLang
    ends its server.)"""
    for place, kind in kinds(folder):
        for dying in range(RANKS):
            ranks(_die, place.with_name(f"{kind}-{dying}"), kind, dying, dead=(dying,))


def _die(folder: Path, rank: int, kind: str, dying: int) -> None:
    found = RanksRig(folder, rank, kind, deadline=1.0)
    tokens = rig.prompt(1, 200)
    wanted = found.store(tokens, 1)
    found.meet()
    if rank == dying:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.5)
    keys, slots = found.keys(tokens)[:8], found.slots(range(8))
    there = 8 if kind == "mha" or dying != 0 else 0
    for _ in range(5):
        begun = time.monotonic()
        assert found.storage.batch_exists(keys) == there
        assert found.storage.batch_get_v1(keys, slots) == [there > 0] * 8
        assert time.monotonic() - begun < 2.5
    if there:
        same(found.read(range(8)), wanted[:8])
    stored = found.storage.batch_set_v1(found.keys(rig.prompt(2, 32)), slots)
    assert stored == [found.storage._place.leads] * 8
    begun = time.monotonic()
    found.storage.close()
    assert time.monotonic() - begun < 5


@case
def ranks_open_all_or_none(folder: Path) -> None:
    """What hinders one rank is raised on all, each time, and they can open behind it; a directory of another number of
    ranks, or of another rank, is refused on all."""
    for place, kind in kinds(folder):
        ranks(_open, place, kind)


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
    found = RanksRig(folder, rank, kind)
    tokens = rig.prompt(1, 100)
    wanted = found.store(tokens, 1)
    assert found.came("a", tokens) == 25
    same(found.pages(tokens), wanted)
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
        RanksRig(folder, rank, kind)
    except GdsCacheError as error:
        return error
    raise AssertionError("it opens")


@case
def ranks_new_weights(folder: Path) -> None:
    """Ranks hear of new weights one after the other: no page of the old ones comes, not even between the two."""
    for place, kind in kinds(folder):
        ranks(_new_weights, place, kind)


def _new_weights(folder: Path, rank: int, kind: str) -> None:
    found = RanksRig(folder, rank, kind)
    tokens = rig.prompt(1, 100)
    found.store(tokens, 1)
    for first in range(RANKS):
        for turn in range(RANKS):
            if rank == (first + turn) % RANKS:
                change_weights()
            found.meet()
            found.wait(found.begin(f"{first}-{turn}", tokens))
            assert found.match(tokens).host_hit_length == 0, "of the old weights"
            found.flush()
        fresh = found.store(tokens, 10 + first)
        assert found.came(f"{first}", tokens) == 25
        same(found.pages(tokens), fresh)
        found.flush()
    found.close()


@case
def ranks_at_random(folder: Path) -> None:
    """Prompts with common beginnings, stores and flushes, in directories that are too small: what comes is right on
    every rank, and ranks that evict by themselves keep the same pages."""
    _at_random(folder, "mha", faults=False)


@case
def ranks_at_random_with_faults(folder: Path) -> None:
    """The same, with faults of one rank now and then: the pages that ranks keep are nearly the same."""
    _at_random(folder, "mha", faults=True)


@case
def latents_at_random(folder: Path) -> None:
    """The same of latents, which one rank stores."""
    _at_random(folder, "mla", faults=False)


@case
def latents_at_random_with_faults(folder: Path) -> None:
    """The same of latents, with faults."""
    _at_random(folder, "mla", faults=True)


@case
def packed_pages_at_random(folder: Path) -> None:
    """The same of packed pages, with some that do not fit, and with faults."""
    for kind in ("mha", "mla"):
        _at_random(folder, kind, faults=True, model=PACKED["model"])


def _at_random(folder: Path, kind: str, *, faults: bool, **more: Any) -> None:
    count = int(os.environ.get("GDSCACHE_OPERATIONS", "80"))
    print(ranks(_random, folder / kind, kind, count, faults, more), "collectives")


def _random(folder: Path, rank: int, kind: str, count: int, faults: bool, more: dict[str, Any]) -> None:
    ssd = {**FAULTY["ssd"], "capacity": "2MiB"}
    found = RanksRig(folder, rank, kind, ssd=ssd, deadline=1.0 if faults else 20.0, **more)
    source, came, asked = random.Random(f"{kind} {faults}"), 0, 0
    for number in range(count):
        head = rig.prompt(source.randrange(4), source.choice([0, 40, 80]))
        tokens = rig.prompt(source.randrange(4), source.randrange(40, 160, 4), head)
        failing, what = source.randrange(RANKS), source.random()
        fault = source.choice([Fault.FLIP, Fault.EIO]) if what < 0.2 else Fault.HANG
        skip = source.randrange(6)
        plan = PLAN.rule(Op.READ, fault, skip=skip, times=2) if faults and what < 0.21 and rank == failing else None
        with plan or contextlib.nullcontext():
            found.wait(found.begin(str(number), tokens))
        pages = int(found.match(tokens).host_hit_length) // rig.PAGE
        assert found.all_agree(pages)
        keys = found.keys(tokens)
        if pages:
            same(found.pages(tokens), [found.content(key) for key in keys[:pages]])
        came, asked = came + pages, asked + len(keys)
        found.flush()
        if pages < len(keys):
            found.compute(tokens, keys)
    print("came", came, "of", asked, "pages")
    assert came > asked / 10
    found.meet()
    if kind == "mha":
        known = [found.storage.exists(key) for key in found.stored]
        both = torch.tensor(known, dtype=torch.int)
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
