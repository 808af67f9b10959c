"""What finding a prompt's prefix costs, against the hashing that no lookup can do without."""

from __future__ import annotations

import hashlib
import itertools
from pathlib import Path
from typing import Any

import numpy as np

from gdscache import CacheEngine
from gdscache.commands.bench.measure import interleave, ratio, seconds, target
from gdscache.commands.console import Progress, silent
from gdscache.errors import IOFailedError

PAGE_TOKENS = 64
TARGET = 3.0
_OTHERS = 64  # pages of others that find room before one is evicted


def lookup(directory: Path, pages: int, rounds: int, progress: Progress = silent) -> dict[str, Any]:
    """`engine.lookup` of a new prompt whose pages are on all three tiers, in turns with the bare hash loop. Seconds.

    The loop chains BLAKE2b-256 over the same bytes, as keys are made, and does nothing else. Before each lookup a page
    is stored, as requests do: that counts the uses of the lookup before, so `in_a_row_seconds` has lookups without. A
    prompt that is remembered is not hashed again (`again_seconds`); those of the other figures are new.
    """
    tokens = np.random.default_rng(0).integers(0, 128_000, pages * PAGE_TOKENS, dtype=np.uint32)
    as_list = tokens.tolist()
    with CacheEngine.from_config(_config(directory, pages)) as engine:
        with engine.sequence(tokens) as sequence:
            sequence.commit()
        engine.drain(600.0)
        held = {name: len(tier.index) for name, tier in engine.manager.tiers.items()}
        if set(held.values()) != {pages}:
            raise IOFailedError(f"{pages} pages were to be on every tier, there are {held}", "please report it")
        namespace = engine.namespace()

        def look_up(given: Any, *, again: bool = False) -> float:
            _store_page(engine, next(others))
            if not again:
                engine.names.forget()
            return seconds(lambda: engine.lookup(given))

        def in_a_row() -> float:
            engine.names.forget()
            return seconds(lambda: engine.lookup(tokens))

        others = itertools.count()
        ways = {
            "hash": lambda: seconds(lambda: hash_loop(namespace, tokens.tobytes())),
            "numpy": lambda: look_up(tokens),
            "list": lambda: look_up(as_list),
            "again": lambda: look_up(tokens, again=True),
        }
        interleave(ways, 3)
        found = interleave(ways, rounds, progress, "looking up")
        alone = {"row": in_a_row}
        interleave(alone, 16)
        found |= interleave(alone, rounds)
        if engine.lookup(tokens).tokens != len(tokens):
            raise IOFailedError("a lookup missed pages that are there", "please report it")
    against = ratio(found["numpy"], found["hash"])
    return {
        "tokens": len(tokens),
        "pages": pages,
        "page_tokens": PAGE_TOKENS,
        "tiers": list(held),
        "hash_seconds": found["hash"].describe(),
        "numpy_seconds": found["numpy"].describe(),
        "list_seconds": found["list"].describe(),
        "in_a_row_seconds": found["row"].describe(),
        "again_seconds": found["again"].describe(),
        "list_ratio": ratio(found["list"], found["hash"])["ratio"],
        **against,
        **target(against["ratio"], TARGET, at_least=False),
    }


def _store_page(engine: CacheEngine, number: int) -> None:
    with engine.sequence(np.full(PAGE_TOKENS, number, dtype=np.uint32)) as sequence:
        sequence.commit()
    engine.drain(600.0)


def hash_loop(namespace: bytes, data: bytes) -> bytes:
    """The chained digests of token bytes, page after page; the last of them."""
    blake2b, parent, step = hashlib.blake2b, namespace, PAGE_TOKENS * 4
    for at in range(0, len(data), step):
        parent = blake2b(parent + data[at : at + step], digest_size=32, key=namespace).digest()
    return parent


def _config(directory: Path, pages: int) -> dict[str, Any]:
    page_bytes, room = 4096, pages + _OTHERS
    plane = {"name": "rows", "shape": [page_bytes // PAGE_TOKENS], "dtype": "uint8"}
    return {
        "model": {"name": "bench", "layers": 1, "page_tokens": PAGE_TOKENS, "planes": [plane]},
        "gpu": {"device": "cpu", "capacity": (room + 1) * page_bytes},
        "cpu": {"capacity": (room + 2) * page_bytes},
        "ssd": {"path": str(directory), "capacity": (room + 128) * page_bytes, "transport": "posix", "threads": 2},
        "store": {"queue": pages * page_bytes},
    }
