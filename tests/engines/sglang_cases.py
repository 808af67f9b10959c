"""One case against SGLang's own classes, by its name:  sglang_cases.py CASE FOLDER

The tests start it in SGLang's environment (`test_sglang.py`). A case that is not as it should be raises.
"""

from __future__ import annotations

import contextlib
import functools
import random
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.managers.schedule_policy import SchedulePolicy
from sglang.srt.mem_cache.hicache_storage import PoolTransfer
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

from gdscache.integrations.sglang.setup import WEIGHT_METHODS
from gdscache.storage.base import Op
from gdscache.testing.faults import Fault
from tests.engines import sglang_hicache_rig as hicache
from tests.engines import sglang_host_rig as host
from tests.engines import sglang_rig as rig
from tests.support.faulty import PLAN

CASES: dict[str, Callable[[Path], None]] = {}
FAULTY = {"ssd": {"transport": "tests.support.faulty:FaultyTransport"}}


def case(run: Callable[[Path], None]) -> Callable[[Path], None]:
    CASES[run.__name__] = run
    return run


def change_weights(name: str = "update_weights_from_tensor") -> None:
    """SGLang's method is called, and fails at once, for there is no model: weights may have changed even so."""
    with contextlib.suppress(Exception):
        getattr(WeightUpdater, name)(SimpleNamespace(), None)


# -- the linker ------------------------------------------------------------------------------------------------------


@case
def mha_pages_come_back(folder: Path) -> None:
    _come_back(folder, "mha")


@case
def mla_pages_come_back(folder: Path) -> None:
    _come_back(folder, "mla")


def _come_back(folder: Path, kind: str) -> None:
    """From the CPU tier after a flush, from the SSD after a restart, and whatever branches off."""
    found = rig.Rig(folder, kind)
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
    again = rig.Rig(folder, kind)
    assert again.serve(branch) == (0, 48)
    assert again.serve(long) == (28, 32)
    again.close()


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
    assert again.linker.counts["late"] == 0
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
    assert not hasattr(WeightUpdater.update_weights_from_disk, "_gdscache_listeners"), "SGLang's methods are its own"
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
    return [PoolTransfer(name="kv", keys=["ab" * 32], device_indices=torch.arange(4, 8))]


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


# -- the storage -----------------------------------------------------------------------------------------------------


@case
def host_pools(folder: Path) -> None:
    """Each pool and layout: bytes come back where they are asked for, after a restart too; a miss ends a prefix."""
    for kind in ("mha", "mla"):
        for layout in ("page_first", "page_first_direct"):
            place = folder / f"{kind}-{layout}"
            place.mkdir()
            _host_pool(place, kind, layout)


def _host_pool(folder: Path, kind: str, layout: str) -> None:
    found = host.HostRig(folder, kind, layout)
    keys = found.keys(rig.prompt(1, 40))
    wanted = found.fill([7, 3, 9, 1, 30], 1)
    assert found.backup(keys[:3], [7, 3, 9])
    assert found.backup(keys[3:5], [1, 30], keys[:3])
    assert found.storage.batch_exists(keys) == 5
    assert found.storage.batch_exists(keys[2:]) == 3
    assert (found.storage.exists(keys[4]), found.storage.exists(keys[5])) == (True, False)
    assert found.backup(keys[:3], [7, 3, 9]), "what is there already is no failure"
    found.close()
    again = host.HostRig(folder, kind, layout)
    before = again.fill(range(60), 2)
    assert again.prefetch(keys[:7], [20, 21, 22, 23, 24, 25, 26]) == 5
    now = again.read(range(60))
    for page in range(60):
        right = wanted[page - 20] if 20 <= page < 25 else before[page]
        assert torch.equal(now[page], right), page
    result = again.storage.batch_exists_v2(keys)
    assert (result.kv_hit_pages, result.restorable_prefix_pages) == (5, [1, 2, 3, 4, 5])
    assert again.storage.batch_exists_v2(keys, [PoolTransfer(name="mamba", keys=keys[:1])]).kv_hit_pages == 0
    transfer = PoolTransfer(name="kv", keys=keys[1:3], host_indices=again.slots([50, 51]))
    assert again.storage.batch_get_v2([transfer]) == {"kv": [True, True]}
    assert torch.equal(again.read([51])[0], wanted[2])
    transfer = PoolTransfer(name="kv", keys=keys[5:6], host_indices=again.slots([51]))
    assert again.storage.batch_set_v2([transfer]) == {"kv": [True]}
    assert again.storage.batch_exists(keys) == 6
    again.storage.clear()
    assert again.storage.batch_exists(keys) == 0
    assert again.prefetch(keys, range(10)) == 0
    again.close()
    other = "page_first" if layout == "page_first_direct" else "page_first_direct"
    apart = host.HostRig(folder, kind, other)
    assert apart.storage.batch_exists(keys) == 0, "other bytes"
    apart.close()


@case
def host_faults(folder: Path) -> None:
    """A page that is bad, a read that hangs, a disk that takes nothing: False, and the pool is left alone."""
    found = host.HostRig(folder, ssd=FAULTY["ssd"], deadline=0.5)
    keys = found.keys(rig.prompt(1, 40))
    wanted = found.fill(range(10), 1)
    assert found.backup(keys, range(10))
    before = found.fill(range(20, 30), 2)
    with PLAN.rule(Op.READ, Fault.FLIP, skip=4, times=1):
        came = found.prefetch(keys, range(20, 30))
    assert came < 10, came
    for page, data in enumerate(found.read(range(20, 20 + came))):
        assert torch.equal(data, wanted[page])
    before = found.fill(range(40, 50), 3)
    with PLAN.rule(Op.READ, Fault.HANG):
        assert found.prefetch(keys[:2], [40, 41]) == 0
        before = found.fill(range(40, 50), 4)  # the pool's again
    for now, was in zip(found.read(range(40, 50)), before, strict=True):
        assert torch.equal(now, was), "nothing comes late"
    found.close()
    more = host.HostRig(folder, ssd=FAULTY["ssd"], deadline=0.5)
    others = more.keys(rig.prompt(2, 40))
    with PLAN.rule(Op.WRITE, Fault.ENOSPC):
        assert not more.backup(others, range(10))
    assert more.storage.batch_exists(others) == 0
    more.close()


@case
def host_capacity(folder: Path) -> None:
    """The directory never has more than it was given, and a prefix keeps its head."""
    found = host.HostRig(folder, ssd={"capacity": "256KiB"})
    for seed in range(30):
        keys = found.keys(rig.prompt(seed, 40))
        wanted = found.fill(range(10), seed)
        found.backup(keys, range(10))
        there = found.storage.batch_exists(keys)
        assert found.prefetch(keys[:there], range(50, 50 + there)) == there
        for a, b in zip(found.read(range(50, 50 + there)), wanted, strict=False):
            assert torch.equal(a, b)
    assert sum(file.stat().st_size for file in (folder / "ssd").glob("*.slab*")) <= 256 << 10
    found.close()


@case
def host_new_weights(folder: Path) -> None:
    """No page of the old weights is found, and none that the pool has from before is stored under the new ones."""
    found = host.HostRig(folder)
    keys = found.keys(rig.prompt(1, 40))
    wanted = found.fill(range(10), 1)
    go, outcomes = [threading.Event(), threading.Event()], list[Any]()

    def backup_thread() -> None:
        for event in go:
            event.wait(60)
            outcomes.append(found.backup(keys, range(10)))

    old = threading.Thread(target=backup_thread)
    old.start()
    go[0].set()
    rig.until(lambda: outcomes == [True], "stored")
    change_weights()
    assert found.storage.batch_exists(keys) == 0
    go[1].set()
    old.join(60)
    assert outcomes == [True, False], "the pool's pages are of the old weights until it is flushed"
    assert found.storage.batch_exists(keys) == 0
    fresh = found.fill(range(10), 2)
    assert host.in_thread(lambda: found.backup(keys, range(10)))
    assert host.in_thread(lambda: found.prefetch(keys, range(20, 30))) == 10
    for a, b in zip(found.read(range(20, 30)), fresh, strict=True):
        assert torch.equal(a, b)
    change_weights("begin_weight_update")
    change_weights()
    flushed = threading.Event()  # by SGLang, behind that part of the update
    new = threading.Thread(target=lambda: flushed.wait(60) and outcomes.append(found.backup(keys, range(10))))
    new.start()
    change_weights("end_weight_update")
    flushed.set()
    new.join(60)
    assert outcomes == [True, False, True]
    assert found.storage.batch_exists(keys) == 10
    found.close()
    again = host.HostRig(folder)
    assert again.prefetch(keys, range(20, 30)) == 10
    for a, b in zip(again.read(range(20, 30)), wanted, strict=True):
        assert torch.equal(a, b), "the weights of the files"
    again.close()


@case
def hicache_waits_for_all(folder: Path) -> None:
    """Its policy `wait_complete`, with a disk that stops for a while; and again from what it has in memory."""
    found = hicache.HiCacheRig(folder, "wait_complete", **FAULTY)
    tokens = rig.prompt(1, 200)
    wanted, room = found.store(tokens, 1), found.pool.available_size()
    with PLAN.rule(Op.READ, Fault.HANG, skip=12):
        request = found.begin("a", tokens)
        rig.until(lambda: found.poll() or PLAN.held, "a read hangs")
        assert not found.tree.check_prefetch_progress(request)
    found.wait(request)
    _same(found.pages(tokens), wanted)
    found.poll()
    assert found.pool.available_size() == room - 200
    found.tree.reset()
    assert found.match(tokens).host_hit_length == 0
    found.wait(found.begin("b", tokens))
    _same(found.pages(tokens), wanted)
    found.close()


@case
def hicache_waits_for_some_time(folder: Path) -> None:
    """Its policy `timeout`: a request goes on with what has come, and what comes later is nobody's."""
    _goes_on(folder, "timeout")


@case
def hicache_does_not_wait(folder: Path) -> None:
    """Its policy `best_effort`."""
    _goes_on(folder, "best_effort")


def _goes_on(folder: Path, policy: str) -> None:
    found = hicache.HiCacheRig(folder, policy, timeout=0.5, **FAULTY)
    tokens = rig.prompt(1, 200)
    wanted, room = found.store(tokens, 1), found.pool.available_size()
    whole = 2 * hicache.BATCH
    with PLAN.rule(Op.READ, Fault.HANG, skip=whole):
        request = found.begin("a", tokens)
        operation = found.tree.ongoing_prefetch[request].operation
        rig.until(lambda: found.poll() or (PLAN.held and operation.completed_tokens), "the third batch hangs")
        seconds = found.wait(request)
        assert seconds < 0.2 if policy == "best_effort" else 0.4 < seconds < 5, seconds
        _same(found.pages(tokens), wanted[:whole])
        others = found.pool.alloc(found.pool.available_size())  # the pool's next pages
        found.pool.kv_buffer[:, others // rig.PAGE] = 7
    rig.until(lambda: found.poll() or found.pool.available_size(), "pages that did not come are the pool's again")
    rig.until(lambda: found.poll() or found.pool.available_size() + len(others) + 4 * whole == room, "all of them")
    assert (found.pool.kv_buffer[:, others // rig.PAGE] == 7).all(), "nothing comes late"
    _same(found.pages(tokens), wanted[:whole])
    found.pool.free(others)
    found.close()


@case
def hicache_and_a_disk_that_hangs(folder: Path) -> None:
    """Our deadline ends what no timeout of SGLang's ends: with `wait_complete` a request would wait for ever."""
    found = hicache.HiCacheRig(folder, "wait_complete", deadline=0.5, **FAULTY)
    tokens = rig.prompt(1, 200)
    wanted, room = found.store(tokens, 1), found.pool.available_size()
    with PLAN.rule(Op.READ, Fault.HANG, skip=10):
        assert found.wait(found.begin("a", tokens)) < 10
        came = found.pages(tokens)
        assert len(came) in (8, 9, 10)
        _same(came, wanted[: len(came)])
        rig.until(lambda: found.poll() or found.pool.available_size() == room - 4 * len(came), "the rest is free")
    found.close()


def _same(now: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    assert len(now) == len(wanted), (len(now), len(wanted))
    for number, (a, b) in enumerate(zip(now, wanted, strict=True)):
        assert torch.equal(a, b), (number, "a wrong byte")


if __name__ == "__main__":
    CASES[sys.argv[1]](Path(sys.argv[2]))
    print("done", flush=True)
