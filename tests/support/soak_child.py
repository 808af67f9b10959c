"""A process that serves random requests on small tiers for a while, under faults, and says what it holds meanwhile.

Every few rounds the engine is opened anew over the same directory, with other policies.
"""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import logging
import os
import random
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, get_args

from gdscache import CacheEngine
from gdscache.config import EvictionOrder
from gdscache.errors import PoolFullError
from gdscache.limits import EngineLimits
from gdscache.policies.admission import ADMISSIONS
from gdscache.storage.base import Op
from tests.support import faults
from tests.support.faulty import PLAN, Fault
from tests.support.helpers import SMALL, WAIT, close_kept, fill, holds, prompt, settle

FAULTS = [(Op.READ, fault) for fault in (Fault.EIO, Fault.SHORT, Fault.FLIP)]
FAULTS += [(Op.WRITE, fault) for fault in (Fault.EIO, Fault.SHORT, Fault.FLIP, Fault.LOST, Fault.TORN)]
# Of an engine: four that load, two each that prefetch, write and do I/O (the transport's), one each that hands I/O
# over, gives prefetches their turns, gathers, carries calls out and rewrites the status page; and of its executor: two
# for the transport's files, one for what is late, and those of the library that copy. For pages that do not fit into
# packed extents there is a second set at most.
THREADS = 18 + faults.THREADS + min(4, os.cpu_count() or 1)
KNOWN = 12  # prompts that come again; the others are new each time
WRITES = ("write_through", "write_through_selective", "write_back", "write_through", "write_back", "never")
WAITS = (0.0, None, 0.01)  # for a prefetch


@dataclasses.dataclass(frozen=True)
class Sample:
    """What the process holds while nothing is under way; `queued` is the most bytes that were queued before."""

    resident: int  # bytes
    files: int
    threads: int
    queued: int


def sample(queued: int = 0, threads: int = 1) -> Sample:
    """`threads`: those that there may be; one that was joined takes a moment to leave the kernel's list."""
    until = time.monotonic() + 2
    while (tasks := len(os.listdir("/proc/self/task"))) > threads and time.monotonic() < until:
        time.sleep(0.01)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # otherwise the arenas keep what they gave the threads of closed engines
    if tasks > threads:
        print(f"{tasks} threads: {sorted(thread.name for thread in threading.enumerate())}", file=sys.stderr)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return Sample(pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir("/proc/self/fd")), tasks, queued)


def most_threads(config: dict[str, Any]) -> int:
    return THREADS * (2 if config["model"].get("pack") == "on" else 1)


def varied(config: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """The same tiers with policies that are drawn."""
    store = {"write_policy": rng.choice(WRITES), "admission": rng.choice(list(ADMISSIONS))}
    return config | {"eviction": rng.choice(get_args(EvictionOrder)), "store": config["store"] | store}


def other_limits(rng: random.Random) -> EngineLimits:
    share = rng.choice((0.2, 0.5, 1.0))
    return dataclasses.replace(SMALL, write_hits=rng.randint(1, 3), prefetch_share=share)


def soak(pipe: Connection, config: dict[str, Any], seconds: float, rounds: int, seed: int) -> None:
    """Samples: before the engine, after every round of requests, after the engine. Then what was counted."""
    logging.getLogger("gdscache").setLevel(logging.CRITICAL)  # the faults are on purpose, and so are the policies
    rng = random.Random(seed)
    done: Counter[str] = Counter()
    misses: Counter[str] = Counter()
    before = sample()
    pipe.send(before)
    engine = CacheEngine.from_config(config, limits=SMALL)
    for round_ in range(rounds):
        until = time.monotonic() + seconds / rounds
        with ThreadPoolExecutor(4) as pool:
            faults = pool.submit(inject, rng.random(), until)
            watched = pool.submit(watch, engine, until)
            for work in [pool.submit(requests, engine, rng.random(), until) for _ in range(2)]:
                done.update(work.result())
            faults.result()
        PLAN.reset()
        settle(engine)  # check(): no slot is both free and used, and none is neither
        pipe.send(sample(watched.result(), before.threads + most_threads(config)))
        if round_ % 3 == 2:
            count(engine, done, misses)
            engine.close(drain=rng.random() < 0.5)
            close_kept(engine)
            engine = CacheEngine.from_config(varied(config, rng), limits=other_limits(rng))
    count(engine, done, misses)
    close_kept(engine)
    pipe.send(sample(threads=before.threads))
    pipe.send((done, misses))


def count(engine: CacheEngine, done: Counter[str], misses: Counter[str]) -> None:
    """Add an engine's counts to those of the engines before it."""
    stats = engine.stats()
    misses.update(stats.get("misses", {}))
    for group in ("refused", "dropped", "expired", "stored", "hits"):
        done.update({f"{group} {name}": n for name, n in stats.get(group, {}).items()})
    lookups, missed = stats.get("lookups", {}).get("pages", 0), stats.get("misses", {})
    found = sum(stats.get("hits", {}).values())
    # Misses of loads, for which a lookup has counted a hit before, are counted besides.
    by_lookups = sum(missed.get(cause, 0) for cause in ("absent", "expired", "quarantined", "switched_off"))
    assert lookups == found + by_lookups, f"{lookups} pages looked up, {found} hits, misses {missed}"


def watch(engine: CacheEngine, until: float) -> int:
    """The most bytes that the store queue held; neither way may hold more than it is allowed."""
    most = 0
    while time.monotonic() < until:
        queue = engine.stats()["store_queue"]
        ways = (queue["to_ssd_bytes"], queue["bytes"] - queue["to_ssd_bytes"])
        assert max(ways) <= queue["limit_bytes"], f"the queue holds more than it may: {queue}"
        most = max(most, queue["bytes"])
        time.sleep(0.005)
    return most


def inject(seed: float, until: float) -> None:
    """Faults of every kind, a few milliseconds each."""
    rng = random.Random(seed)
    while time.monotonic() < until:
        op, fault = rng.choice(FAULTS)
        with PLAN.rule(op, fault, lambda offset: rng.random() < 0.5, bit=rng.randrange(8 * 6144)):
            time.sleep(rng.uniform(0, 0.02))
        time.sleep(rng.uniform(0, 0.01))


def requests(engine: CacheEngine, seed: float, until: float) -> Counter[str]:
    """Requests until the time is over; how many of what. Every page that is served has its bytes, whatever failed."""
    rng, done = random.Random(seed), Counter[str]()
    while time.monotonic() < until:
        what, number = rng.random(), rng.randrange(KNOWN + 3)
        tokens = prompt(number if number < KNOWN else rng.getrandbits(60), rng.randint(1, 5), extra=rng.randint(1, 3))
        salt = rng.choice(("", "a"))
        if what < 0.01:
            engine.clear()
        elif what < 0.02:
            engine.invalidate(engine.namespace(salt))
        elif what < 0.04:
            engine.drain(WAIT)
        elif what < 0.05:
            engine.flush(WAIT)
        elif what < 0.15:
            prefetch(engine, rng, tokens, salt)
            done["prefetches"] += 1
        elif what < 0.2:
            with engine.pin(tokens, rng.uniform(0.001, 0.1), salt):
                time.sleep(rng.uniform(0, 0.005))
        elif not request(engine, rng, tokens, salt):
            done["full"] += 1
            continue
        done["requests"] += 1
    return done


def prefetch(engine: CacheEngine, rng: random.Random, tokens: list[int], salt: str) -> None:
    """A prefetch that is waited for, cancelled, or left alone."""
    with engine.prefetch(tokens, salt=salt) as handle:
        end = rng.random()
        if end < 0.4:
            handle.result(WAIT)
        elif end < 0.8:
            handle.wait(rng.choice(WAITS))


def request(engine: CacheEngine, rng: random.Random, tokens: list[int], salt: str) -> bool:
    """One request; False when the pool had no room."""
    try:
        with engine.sequence(tokens, salt) as seq:
            if rng.random() < 0.1:
                return True  # left at once, whatever is under way
            seq.verify(WAIT)
            holds(engine, seq, salt)
            fill(engine, seq, salt)
            if rng.random() < 0.2:
                seq.append(prompt(rng.getrandbits(60), 1))
                fill(engine, seq, salt)
            ttl = rng.uniform(0.01, 0.5) if rng.random() < 0.1 else None
            seq.commit(priority=rng.choice((-1, 0, 0, 0, 1)), ttl=ttl)
    except PoolFullError:
        return False
    return True
