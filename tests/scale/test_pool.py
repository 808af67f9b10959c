"""The tier over a real Mooncake Store: a master, owners and engines as processes on loopback, which are killed.

Whatever a load calls good is compared byte for byte (`pool_child.py`), and no answer may take longer than `ENDS_S`.
"""

from __future__ import annotations

import os
import random
import subprocess
import time
from pathlib import Path

import pytest

from gdscache.mooncake.tier import TRAILER_BYTES
from tests.scale.pool_parts import EXTENT, PAGES, PYTHON, RealPool, eventually, fence, needs_mooncake, real_pool

pytestmark = pytest.mark.scale
MANY = 4 * PAGES  # 8 MiB: some tens of milliseconds


def stored_in_both(found: list[list[str]]) -> bool:
    return all(tiers == ["cpu", "mooncake"] for tiers in found)


def test_smoke_two_engines_share_pages(pool: RealPool) -> None:
    pool.new_owner()
    first, second = pool.new_engine(), pool.new_engine()
    assert stored_in_both(first.call("store", seed=1, pages=PAGES))
    found = second.call("fetch", seed=1, pages=PAGES)
    assert found["good"] == PAGES
    assert found["tiers"] == ["mooncake"] * PAGES
    assert second.call("fetch", seed=1, pages=PAGES)["pages"] == {"present": PAGES}
    assert second.call("fetch", seed=2, pages=PAGES)["good"] == 0
    assert first.call("check") == []
    assert second.call("check") == []
    first.call("clear")
    second.call("forget")
    assert second.call("fetch", seed=1, pages=PAGES)["good"] == 0
    for engine in (first, second):
        engine.call("close")


def test_a_master_that_dies_and_comes_back(pool: RealPool) -> None:
    owner = pool.new_owner()
    first, second = pool.new_engine(), pool.new_engine()
    assert stored_in_both(first.call("store", seed=1, pages=PAGES))
    pool.master.kill()
    begun = time.monotonic()
    assert all(tiers == ["cpu"] for tiers in first.call("store", seed=2, pages=PAGES))
    assert time.monotonic() - begun < 10
    first.is_state("open")
    assert first.call("fetch", seed=1, pages=PAGES)["good"] == PAGES  # what lies here
    found = second.call("fetch", seed=1, pages=PAGES)
    assert found["good"] == 0
    second.is_state("open")
    assert second.call("fetch", seed=1, pages=PAGES)["seconds"] < 0.5  # nobody calls it any more
    pool.new_master()
    for engine in (first, second):
        engine.is_state("ready")
    # The owner's segment comes back when its client has noticed; until then the pool has no room.
    seeds = iter(range(10, 1000))
    eventually("stores reach the pool again", lambda: stored_in_both(first.call("store", seed=next(seeds), pages=4)))
    found = second.call("fetch", seed=next(seeds) - 1, pages=4)
    assert found["good"] == 4, (found, second.call("state"), first.call("state"))
    assert second.call("fetch", seed=1, pages=PAGES)["good"] == 0  # it has forgotten what it had
    assert owner.process.poll() is None
    assert first.call("check") == []


def test_a_master_killed_in_mid_transfer(pool: RealPool) -> None:
    pool.new_owner()
    first, second = pool.new_engine(), pool.new_engine()
    assert stored_in_both(first.call("store", seed=1, pages=MANY))
    for round_ in range(3):
        first.begin("store", seed=100 + round_, pages=MANY)
        second.begin("fetch", seed=1, pages=MANY)
        time.sleep(random.Random(round_).uniform(0.0, 0.02))
        pool.master.kill()
        assert len(first.end()) == MANY
        assert second.end()["good"] in range(MANY + 1)
        pool.new_master()
        for engine in (first, second):
            engine.is_state("ready")
        second.call("forget")
        seeds = iter(range(1000 * (round_ + 1), 10**6))
        eventually(
            "the pool takes pages", lambda seeds=seeds: stored_in_both(first.call("store", seed=next(seeds), pages=2))
        )
    assert first.call("check") == []
    assert second.call("check") == []


def test_an_owner_killed_in_mid_transfer(pool: RealPool) -> None:
    owner = pool.new_owner()
    first, second = pool.new_engine(), pool.new_engine()
    assert stored_in_both(first.call("store", seed=1, pages=MANY))
    second.begin("fetch", seed=1, pages=MANY)
    first.begin("store", seed=2, pages=MANY)
    time.sleep(0.01)
    owner.kill()
    assert second.end()["good"] in range(MANY + 1)
    assert len(first.end()) == MANY
    second.call("forget")
    found = second.call("fetch", seed=1, pages=MANY)  # it exists for ten seconds more, and cannot be got
    assert found["good"] == 0
    first.call("forget")
    assert first.call("fetch", seed=1, pages=MANY)["good"] == 0
    pool.new_owner()
    seeds = iter(range(10, 1000))
    eventually("stores reach the new owner", lambda: stored_in_both(first.call("store", seed=next(seeds), pages=4)))
    assert second.call("fetch", seed=next(seeds) - 1, pages=4)["good"] == 4
    assert second.call("check") == []


def test_an_owner_that_stands_still(pool: RealPool) -> None:
    """Not dead, so its connections stay: calls to it hang, and nobody else does."""
    owner = pool.new_owner()
    first, second = pool.new_engine(deadline=1.0), pool.new_engine(deadline=1.0)
    assert stored_in_both(first.call("store", seed=1, pages=PAGES))
    assert stored_in_both(second.call("store", seed=5, pages=4))
    owner.pause()
    second.begin("fetch", seed=1, pages=PAGES)
    time.sleep(2.0)
    owner.resume()
    assert second.end()["good"] in range(PAGES + 1)
    assert second.call("fetch", seed=5, pages=4)["good"] == 4
    second.is_state("ready")
    second.call("forget")
    eventually("it is got", lambda: second.call("fetch", seed=1, pages=PAGES)["good"] == PAGES)


def test_objects_of_another_size_make_room_for_good_ones(pool: RealPool) -> None:
    pool.new_owner()
    first, second = pool.new_engine(), pool.new_engine()
    assert stored_in_both(first.call("store", seed=1, pages=PAGES))
    for page, nbytes in enumerate((1, EXTENT, EXTENT + TRAILER_BYTES - 1, EXTENT + TRAILER_BYTES + 1)):
        first.call("replace", seed=1, page=page, nbytes=nbytes)
    found = second.call("fetch", seed=1, pages=PAGES)
    assert (found["good"], found["pages"]) == (0, {"loaded": PAGES - 4, "checksum": 4})
    second.call("forget")
    assert stored_in_both(second.call("store", seed=1, pages=4))
    second.call("forget")
    assert second.call("fetch", seed=1, pages=PAGES)["good"] == PAGES


def test_a_full_pool_evicts_and_goes_on(pool: RealPool) -> None:
    mib = 32
    pool.new_owner(mib)
    first, second = pool.new_engine(cpu=64), pool.new_engine(cpu=64)
    room = (mib << 20) // (EXTENT + TRAILER_BYTES)
    kept = 0
    for seed in range(3 * room // PAGES):
        found = first.call("store", seed=seed, pages=PAGES)
        kept += sum("mooncake" in tiers for tiers in found)
        assert all("cpu" in tiers for tiers in found)
    assert kept > room  # what was there made room
    told = first.call("state")
    assert told["state"] == "ready"
    assert told["opened"] == 0
    good = [second.call("fetch", seed=seed, pages=PAGES)["good"] for seed in range(3 * room // PAGES)]
    assert sum(good) > 0  # and each of them was the right page
    assert first.call("check") == []


def test_an_engine_that_dies_takes_its_segment_and_nothing_else(pool: RealPool) -> None:
    pool.new_owner()
    first, second = pool.new_engine(segment="64MiB"), pool.new_engine()
    assert stored_in_both(first.call("store", seed=1, pages=PAGES))
    first.kill()
    found = second.call("fetch", seed=1, pages=PAGES)
    assert found["good"] in range(PAGES + 1)
    again = pool.new_engine(segment="64MiB")
    seeds = iter(range(10, 1000))
    eventually("stores reach the pool", lambda: stored_in_both(again.call("store", seed=next(seeds), pages=4)))
    assert second.call("fetch", seed=next(seeds) - 1, pages=4)["good"] == 4


def test_an_engine_that_starts_again_finds_its_pages_in_the_pool(pool: RealPool) -> None:
    pool.new_owner()
    engine = pool.new_engine()
    for seed, end in enumerate(("close", "kill")):
        assert stored_in_both(engine.call("store", seed=seed, pages=PAGES))
        if end == "close":
            engine.call("close")
        else:
            engine.kill()
        engine = pool.new_engine()
        found = engine.call("fetch", seed=seed, pages=PAGES)
        assert found["good"] == PAGES, end
        assert found["tiers"] == ["mooncake"] * PAGES
        assert engine.call("check") == []


def test_replicas_survive_a_lost_owner(pool: RealPool) -> None:
    owners = [pool.new_owner(), pool.new_owner()]
    first, second = pool.new_engine(replicas=2), pool.new_engine(replicas=2)
    assert stored_in_both(first.call("store", seed=1, pages=PAGES))
    owners[0].kill()
    eventually("all of it is got", lambda: second.call("fetch", seed=1, pages=PAGES)["good"] == PAGES)


def test_an_engine_starts_before_its_master(tmp_path: Path) -> None:
    with real_pool(tmp_path) as pool:
        pool.master.kill()
        engine = pool.new_engine()
        assert engine.call("state")["state"] == "connecting"
        assert all(tiers == ["cpu"] for tiers in engine.call("store", seed=1, pages=4))
        assert engine.call("fetch", seed=1, pages=4)["good"] == 4
        pool.new_master()
        pool.new_owner()
        engine.is_state("ready")
        assert stored_in_both(engine.call("store", seed=2, pages=4))


def test_the_example_shares_prefixes_and_its_router_knows_who_has_them(tmp_path: Path) -> None:
    needs_mooncake()
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root), "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [*fence(), PYTHON, str(root / "examples" / "shared_pool" / "run.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines() == [
        "owner: 256 MiB, code 0",
        "prompt A to engine one: 16 pages computed, nothing cached",
        "prompt A to engine two: 0 pages computed, 16 from mooncake",
        "prompt B to engine one: 16 pages computed, nothing cached",
        "router: of prompt A, pages by engine {'one': 16, 'two': 16}: it goes to engine one",
        "router: of prompt B, pages by engine {'one': 16, 'two': 0}: it goes to engine one",
    ]
    assert not list(tmp_path.iterdir()), "left behind"
