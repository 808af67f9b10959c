"""A process that serves random requests on small tiers for a while, under faults, and says what it holds meanwhile."""

from __future__ import annotations

import dataclasses
import logging
import os
import random
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from faulty import PLAN, Fault
from helpers import WAIT, fill, holds, prompt, settle

from gdscache import CacheEngine
from gdscache.errors import PoolFullError
from gdscache.storage.base import Op

FAULTS = [(Op.READ, fault) for fault in (Fault.EIO, Fault.SHORT, Fault.FLIP)]
FAULTS += [(Op.WRITE, fault) for fault in (Fault.EIO, Fault.SHORT, Fault.FLIP, Fault.LOST, Fault.TORN)]
KNOWN = 12  # prompts that come again; the others are new each time


@dataclasses.dataclass(frozen=True)
class Sample:
    """What the process holds while nothing is under way."""

    resident: int  # bytes
    files: int
    threads: int


def sample() -> Sample:
    time.sleep(0.02)  # a thread that was joined takes a moment to leave the kernel's list
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    tasks = len(os.listdir("/proc/self/task"))
    return Sample(pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir("/proc/self/fd")), tasks)


def soak(pipe: Connection, config: dict[str, Any], seconds: float, rounds: int, seed: int) -> None:
    """Samples: before the engine, after every round of requests, after the engine. Then what was counted."""
    logging.getLogger("gdscache").setLevel(logging.ERROR)  # the faults are on purpose
    rng = random.Random(seed)
    done: Counter[str] = Counter()
    misses: Counter[str] = Counter()
    pipe.send(sample())
    engine = CacheEngine.from_config(config)
    for round_ in range(rounds):
        until = time.monotonic() + seconds / rounds
        with ThreadPoolExecutor(3) as pool:
            faults = pool.submit(inject, rng.random(), until)
            for work in [pool.submit(requests, engine, rng.random(), until) for _ in range(2)]:
                done.update(work.result())
            faults.result()
        PLAN.reset()
        if round_ % 3 == 2:
            misses.update(engine.stats().get("misses", {}))
            engine.close(drain=rng.random() < 0.5)
            engine = CacheEngine.from_config(config)
        settle(engine)
        pipe.send(sample())
    misses.update(engine.stats().get("misses", {}))
    engine.close()
    pipe.send(sample())
    pipe.send((done, misses))


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
        if what < 0.01:
            engine.clear()
        elif what < 0.02:
            engine.invalidate(engine.namespace(rng.choice(("", "a"))))
        elif what < 0.05:
            engine.drain(WAIT)
        elif what < 0.1:
            engine.prefetch(tokens).result(WAIT)
        elif not request(engine, rng, tokens, rng.choice(("", "a"))):
            done["full"] += 1
            continue
        done["requests"] += 1
    return done


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
            seq.commit()
    except PoolFullError:
        return False
    return True
