"""Our storage below SGLang's own host pools and below HiCache whole, one case by its name:
sglang_storage_cases.py CASE FOLDER"""

from __future__ import annotations

import itertools
from pathlib import Path

import torch
from sglang.srt.mem_cache.hicache_storage import PoolTransfer

from gdscache.errors import ParallelismUnsupportedError
from gdscache.integrations.sglang.setup import RESETS_WEIGHTS
from gdscache.storage.base import Op
from tests.engines import sglang_hicache_rig as hicache
from tests.engines import sglang_host_rig as host
from tests.engines import sglang_rig as rig
from tests.engines.sglang_case import FAULTY, case, change_weights, restart, run_case
from tests.engines.sglang_host_rig import same
from tests.support.faults import Fault
from tests.support.faulty import PLAN


@case
def host_pools(folder: Path) -> None:
    """Each pool and layout: bytes come back where they are asked for, after a restart too; a miss ends a prefix."""
    pools = [*itertools.product(("mha", "mla"), ("page_first", "page_first_direct")), ("mha", "page_head")]
    for (kind, layout), pack in itertools.product(pools, ("off", "on")):
        place = folder / f"{kind}-{layout}-{pack}"
        place.mkdir()
        _host_pool(place, kind, layout, {"pack": pack})


def _host_pool(folder: Path, kind: str, layout: str, model: dict[str, str]) -> None:
    found = host.HostRig(folder, kind, layout, model=model)
    keys = found.keys(rig.prompt(1, 40))
    wanted = found.fill([7, 3, 9, 1, 30], 1)
    assert found.backup(keys[:3], [7, 3, 9])
    assert found.backup(keys[3:5], [1, 30], keys[:3])
    assert found.storage.batch_exists(keys) == 5
    assert found.storage.batch_exists(keys[2:]) == 3
    assert (found.storage.exists(keys[4]), found.storage.exists(keys[5])) == (True, False)
    assert found.backup(keys[:3], [7, 3, 9]), "what is there already is no failure"
    found.close()
    again = host.HostRig(folder, kind, layout, model=model)
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
    apart = host.HostRig(folder, kind, other, model=model)
    assert apart.storage.batch_exists(keys) == 0, "other bytes"
    apart.close()


@case
def pages_for_several_numbers_of_ranks(folder: Path) -> None:
    """Parts of the heads are no objects of their own: refused where SGLang would split pages, and by that name."""
    error = None
    try:
        host.HostRig(folder, "mha", "page_head", shared={"tp_lcm_size": 2, "should_split_heads": True})
    except ParallelismUnsupportedError as raised:
        error = raised
    assert "tp_lcm_size is 2" in str(error)
    host.HostRig(folder, "mha", "page_head", shared={"tp_lcm_size": 1}).close()


@case
def host_new_weights(folder: Path) -> None:
    """No page of the old weights is found, and none that the pool has from before is stored under the new ones."""
    found = host.HostRig(folder)
    keys = found.keys(rig.prompt(1, 40))
    wanted = found.fill(range(10), 1)
    assert found.backup(keys, range(10))
    change_weights()
    assert found.storage.batch_exists(keys) == 0
    assert not host.in_thread(lambda: found.backup(keys, range(10))), "the pool's pages are of the old weights"
    assert found.storage.batch_exists(keys) == 0
    found.flush()
    fresh = found.fill(range(10), 2)
    assert host.in_thread(lambda: found.backup(keys, range(10)))
    assert host.in_thread(lambda: found.prefetch(keys, range(20, 30))) == 10
    same(found.read(range(20, 30)), fresh)
    change_weights("begin_weight_update")
    change_weights()
    found.flush()  # by SGLang, behind that part of the update
    change_weights("end_weight_update")
    assert host.in_thread(lambda: found.backup(keys, range(10)))
    assert found.storage.batch_exists(keys) == 10
    found.close()
    restart()
    again = host.HostRig(folder)
    assert again.prefetch(keys, range(20, 30)) == 10
    same(again.read(range(20, 30)), wanted)  # the weights of the files
    change_weights(RESETS_WEIGHTS)
    assert again.storage.batch_exists(keys) == 0, "weights at random"
    assert not host.in_thread(lambda: again.backup(keys, range(20, 30)))
    again.close()


@case
def attached_again_behind_new_weights(folder: Path) -> None:
    """Each attach makes a new object: it knows what its process has seen, while one was attached and while none was."""
    tokens, other = rig.prompt(1, 40), rig.prompt(2, 40)
    found = host.HostRig(folder)
    keys, new = found.keys(tokens), found.keys(other)
    found.fill(range(10), 1)
    assert found.backup(keys, range(10))
    found.close()
    pool = found.pool
    found = host.HostRig(folder, pool=pool)
    assert found.prefetch(keys, range(10)) == 10, "no weights have changed"
    found.close()
    for when in ("attached", "detached"):
        attached = host.HostRig(folder, pool=pool) if when == "attached" else None
        change_weights()
        if attached is not None:
            attached.close()
        found = host.HostRig(folder, pool=pool)
        assert found.prefetch(keys, range(10)) == 0, (when, "old weights")
        assert not found.backup(new, range(10)), (when, "SGLang may have pages of the old weights")
        found.flush()
        assert found.backup(new, range(10)), when
        assert found.prefetch(new, range(10)) == 10, when
        found.close()
        found = host.HostRig(folder, pool=pool)
        assert found.prefetch(new, range(10)) == 0, (when, "another object does not know their salt")
        assert found.backup(new, range(10)), "flushed since the change"
        found.close()
    restart()
    found = host.HostRig(folder)
    assert found.prefetch(new, range(10)) == 0, "pages of the new weights are nobody's"
    assert found.prefetch(keys, range(10)) == 10, "the weights of the files"
    found.close()


@case
def attached_to_a_server_that_runs(folder: Path) -> None:
    """Whether its weights have changed before is not known: nothing is found, and nothing is kept until a flush."""
    started = host.HostRig(folder)
    keys = started.keys(rig.prompt(1, 40))
    started.fill(range(10), 1)
    assert started.backup(keys, range(10))
    started.close()
    restart()
    pool = host.host_pool("mha", "page_first")
    for flushed in (False, True):
        found = host.HostRig(folder, pool=pool, at_start=False)
        assert found.prefetch(keys, range(10)) == 0, "they may be of other weights"
        assert found.backup(keys, range(10)) is flushed
        found.flush()
        assert found.backup(keys, range(10))
        found.close()
    restart()
    found = host.HostRig(folder)
    assert found.prefetch(keys, range(10)) == 10
    found.close()


@case
def hicache_waits_for_all(folder: Path) -> None:
    """Its policy `wait_complete`, with a disk that stops for a while; and again after a flush."""
    found = hicache.HiCacheRig(folder, "wait_complete", **FAULTY)
    tokens = rig.prompt(1, 200)
    found.compute(tokens)
    room = found.pool.available_size()
    with PLAN.rule(Op.READ, Fault.HANG, skip=12):
        request = found.begin("a", tokens)
        rig.until(lambda: found.poll() or PLAN.held, "a read hangs")
        assert not found.tree.check_prefetch_progress(request)
    found.wait(request)
    found.holds(tokens, 50)
    found.poll()
    assert found.pool.available_size() == room - 200
    found.tree.reset()
    assert found.match(tokens).host_hit_length == 0
    assert found.came("b", tokens) == 50
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
    found.compute(tokens)
    room, whole = found.pool.available_size(), 2 * hicache.BATCH
    with PLAN.rule(Op.READ, Fault.HANG, skip=whole):
        request = found.begin("a", tokens)
        operation = found.tree.ongoing_prefetch[request].operation
        rig.until(lambda: found.poll() or (PLAN.held and operation.completed_tokens), "the third batch hangs")
        seconds = found.wait(request)
        assert seconds < 0.2 if policy == "best_effort" else 0.4 < seconds < 5, seconds
        found.holds(tokens, whole)
        others = found.pool.alloc(found.pool.available_size())  # the pool's next pages
        found.pool.kv_buffer[:, others // rig.PAGE] = 7
    rig.until(lambda: found.poll() or found.pool.available_size(), "pages that did not come are the pool's again")
    rig.until(lambda: found.poll() or found.pool.available_size() + len(others) + 4 * whole == room, "all of them")
    assert (found.pool.kv_buffer[:, others // rig.PAGE] == 7).all(), "nothing comes late"
    found.holds(tokens, whole)
    found.pool.free(others)
    found.close()


if __name__ == "__main__":
    run_case()
