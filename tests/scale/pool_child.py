"""A process with an engine over a shared pool: commands as lines of JSON on stdin, answers on stdout."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import numpy as np

from gdscache.tiers.mooncake import MooncakeTier
from tests.support.helpers import Host, drop_from, prompt, quiet


class Child:
    """`host` has an engine; every page that a load calls good is compared with the bytes that belong to its key."""

    def __init__(self, config: dict[str, Any], blocks: int) -> None:
        self.host = Host(config, blocks)
        self.tokens = config["model"]["page_tokens"]

    def store(self, seed: int, pages: int) -> list[list[str]]:
        tokens = prompt(seed, pages, self.tokens)
        report = self.host.store(tokens).result(60)
        return [sorted(tiers) for tiers in report.tiers]

    def store_begin(self, seed: int, pages: int) -> None:
        self.host.store(prompt(seed, pages, self.tokens))

    def fetch(self, seed: int, pages: int) -> dict[str, Any]:
        """Bring what there is of a prompt, load it and compare it."""
        tokens = prompt(seed, pages, self.tokens)
        begun = time.monotonic()
        found = self.host.engine.prefetch(tokens, pin=30.0)
        report = found.result(60)
        seconds = time.monotonic() - begun
        loaded = self.host.load(tokens)
        found.release()
        return {
            "pages": report.pages,
            "end": report.end.value,
            "tiers": list(found.tiers),
            "good": loaded.tokens // self.tokens,
            "seconds": seconds,
        }

    def forget(self) -> None:
        """What lies here, but not what the pool has."""
        quiet(self.host.engine)
        drop_from(self.host.engine, "cpu")

    def lookups(self, seed: int, pages: int, rounds: int) -> dict[str, float]:
        """The 99th percentiles of lookups and of loads of what lies here, in seconds."""
        tokens = prompt(seed, pages, self.tokens)
        took: dict[str, list[float]] = {"lookup": [], "load": []}
        for _ in range(rounds):
            begun = time.perf_counter()
            hit = self.host.engine.lookup(tokens)
            took["lookup"].append(time.perf_counter() - begun)
            blocks = self.host.take(len(hit.pages))
            begun = time.perf_counter()
            load = self.host.engine.load(hit, blocks)
            assert load.result().tokens == pages * self.tokens
            took["load"].append(time.perf_counter() - begun)
            self.host.give(blocks)
        return {name: float(np.percentile(some, 99)) for name, some in took.items()}

    def state(self) -> dict[str, Any]:
        told = self.host.engine.stats()["tiers"]["mooncake"]
        return {name: told[name] for name in ("state", "opened", "calls", "moved", "pages", "longest_call_s", "asked")}

    def clear(self) -> dict[str, int]:
        return self.host.engine.clear()

    def check(self) -> list[str]:
        quiet(self.host.engine)
        return list(self.host.engine.check().problems)

    def close(self) -> None:
        self.host.engine.close()


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what the store's library prints is no answer
    assert MooncakeTier.served is False
    child: Child | None = None
    for line in sys.stdin:
        name, arguments = json.loads(line)
        if name == "open":
            child = Child(**arguments)
            answer = None
        else:
            answer = getattr(child, name)(**arguments)
        print(json.dumps(answer), file=answers)
        if name == "close":
            break


if __name__ == "__main__":
    main()
