"""HiCache whole for hybrid models with our storage below. sglang_pools_cases.py CASE FOLDER"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

from gdscache.storage.base import Op
from tests.engines import sglang_pools_rig as pools
from tests.engines import sglang_rig as rig
from tests.engines.sglang_case import FAULTY, case, restart, run_case
from tests.engines.sglang_ranks_cases import ranks
from tests.support.faults import Fault
from tests.support.faulty import PLAN

ROOM: dict[str, Any] = {"ssd": {"capacity": "16MiB"}, "host_buffer": "4MiB", "store": {"window_every": 64}}


def _changes(**more: Any) -> dict[str, Any]:
    found: dict[str, Any] = {**ROOM}
    for name, values in more.items():
        found[name] = {**found.get(name, {}), **values} if isinstance(values, dict) else values
    return found


@case
def pools_come_back(folder: Path) -> None:
    """Windows and states come with the pages they belong to, at lengths at which both are there, after a restart too;
    two ranks have each its own."""
    for kind in pools.KINDS:
        assert ranks(_come_back, folder / kind, kind, _changes()) > 10


@case
def packed_pools_come_back(folder: Path) -> None:
    """Windows are packed, states lie as they are, and so do pages that do not fit."""
    for kind in pools.KINDS:
        assert ranks(_come_back, folder / kind, kind, _changes(model={"pack": "on"}, ssd={"capacity": "32MiB"})) > 10


def _come_back(folder: Path, rank: int, kind: str, changes: dict[str, Any]) -> None:
    found = pools.PoolsRig(folder, kind, rank=rank, ranks=2, **changes)
    tokens = rig.prompt(1, 160)
    ends = (9, 19, 29)  # pages that a node of the tree ended with
    before = 0
    for end in ends:
        node = tokens[before * rig.PAGE : (end + 1) * rig.PAGE]
        found.compute(node, ends=[end - before], before=tokens[: before * rig.PAGE])
        before = end + 1
    found.compute(tokens[before * rig.PAGE :], before=tokens[: before * rig.PAGE])
    for asked, there in ((160, 30), (120, 30), (119, 20), (84, 20), (80, 20), (76, 10), (39, 0)):
        assert found.came(f"a{asked}", tokens[:asked]) == there, (kind, asked)
        found.tree.reset()
    if found.packed:
        for name, pool in found.storage.engine.by_groups.items():
            assert pool.layout.packed == (name != "mamba")
            unfit, stored = pool.stats()["stores"].get("unfit", 0), pool.stats()["stored"]
            assert (unfit and stored["ssd"]) or name == "mamba", (name, unfit, stored)
    found.storage.close()
    restart()
    again = pools.PoolsRig(folder, kind, rank=rank, ranks=2, **changes)
    assert again.came("b", tokens) == 30
    names = {f"rank-{number}-of-2" for number in range(2)}
    assert {path.name for path in (folder / "ssd").iterdir()} == names
    again.tree.reset()
    again.storage.clear()
    assert again.came("c", tokens) == 0
    again.close()


@case
def pools_with_faults(folder: Path) -> None:
    """A read of a window or a state that fails, or hangs, costs the prefix, on all ranks alike, and no wrong byte."""
    for kind in pools.KINDS:
        for failing in range(2):
            ranks(_with_faults, folder / f"{kind}-{failing}", kind, failing)


def _with_faults(folder: Path, rank: int, kind: str, failing: int) -> None:
    found = pools.PoolsRig(folder, kind, rank=rank, ranks=2, **_changes(deadline=0.5, **FAULTY))
    tokens = rig.prompt(1, 80)
    for number, fault in enumerate((Fault.FLIP, Fault.EIO, Fault.HANG)):
        found.compute(tokens, ends=[19])
        with PLAN.rule(Op.READ, fault, skip=20) if rank == failing else contextlib.nullcontext():
            assert found.came(f"a{number}", tokens) == 0, "the window's or the state's page is behind the 20 others"
            found.tree.reset()
        found.compute(tokens, ends=[19])
        rig.until(lambda: found.all_here() and found.came("b", tokens) in (0, 20), "it is read again")
        found.tree.reset()
        assert found.came(f"c{number}", tokens) == 20
        found.tree.reset()
    found.close()


@case
def pools_die(folder: Path) -> None:
    """A rank of a hybrid model is killed: on the other one the calls for each pool return, and it can be closed."""
    for kind in pools.KINDS:
        for dying in range(2):
            ranks(_die, folder / f"{kind}-{dying}", kind, dying, dead=(dying,))


def _die(folder: Path, rank: int, kind: str, dying: int) -> None:
    found = pools.PoolsRig(folder, kind, rank=rank, ranks=2, **_changes(deadline=1.0))
    tokens = rig.prompt(1, 80)
    found.compute(tokens, ends=[19])
    keys, wanted = found.keys(tokens), found.transfers(found.keys(tokens))
    found.all_here()
    if rank == dying:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.5)
    begun = time.monotonic()
    for _ in range(5):
        assert found.storage.batch_exists_v2(keys, wanted[1:]).restorable_prefix_pages == [20]
        found.wipe()
        came = found.storage.batch_get_v2(wanted)
        assert all(all(its) for its in came.values()), came
        found.same(wanted)
        assert all(all(its) for its in found.storage.batch_set_v2(wanted).values())
    found.storage.close()
    assert time.monotonic() - begun < 10


@case
def pools_at_random(folder: Path) -> None:
    """Prompts with common beginnings, in directories that are too small, with faults of one rank."""
    for kind, pack in (*((kind, "off") for kind in pools.KINDS), ("all", "on")):
        room = {"model": {"pack": "on"}, "host_buffer": "4MiB"} if pack == "on" else {"host_buffer": "1MiB"}
        print(kind, pack, ranks(_at_random, folder / f"{kind}-{pack}", kind, room), "collectives")


def _at_random(folder: Path, rank: int, kind: str, room: dict[str, Any]) -> None:
    changes = _changes(deadline=1.0, ssd={**FAULTY["ssd"], "capacity": "2MiB"}, **room)
    found = pools.PoolsRig(folder, kind, rank=rank, ranks=2, **changes)
    source, came, asked = random.Random(kind), 0, 0
    for number in range(int(os.environ.get("GDSCACHE_OPERATIONS", "60"))):
        head = rig.prompt(source.randrange(4), source.choice([0, 40, 80]))
        tokens = rig.prompt(source.randrange(4), source.randrange(40, 160, 4), head)
        fault, skip = source.choice([Fault.FLIP, Fault.EIO]), source.randrange(30)
        mine = source.random() < 0.15 and source.randrange(2) == rank
        with PLAN.rule(Op.READ, fault, skip=skip, times=2) if mine else contextlib.nullcontext():
            pages = found.came(str(number), tokens)
        came, asked = came + pages, asked + len(tokens) // rig.PAGE
        found.tree.reset()
        left = tokens[pages * rig.PAGE :]
        if left:
            found.compute(left, ends=[len(left) // rig.PAGE - 1], before=tokens[: pages * rig.PAGE])
    print("came", came, "of", asked, "pages")
    assert came > asked / 20
    assert not found.storage.engine.check().problems
    found.close()


if __name__ == "__main__":
    run_case()
