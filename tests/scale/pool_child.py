"""A process with an engine over a shared pool: commands as lines of JSON on stdin, answers on stdout."""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any, Self

import numpy as np

from gdscache.cuda.host_memory import HostBuffer
from gdscache.mooncake.client import MooncakeAddress, MooncakeClient
from gdscache.mooncake.tier import BATCH_PAGES, TRAILER_BYTES, MooncakeTier
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
            "pages": report.pages, "end": report.end.value, "tiers": list(found.tiers),
            "good": loaded.tokens // self.tokens, "seconds": seconds,
        }  # fmt: skip

    def forget(self) -> None:
        """What lies here, but not what the pool has."""
        quiet(self.host.engine)
        drop_from(self.host.engine, "cpu")

    def replace(self, seed: int, page: int, nbytes: int) -> None:
        """Another program puts an object of `nbytes` under a page's name."""
        tier = self.host.engine.manager.tiers["mooncake"]
        store = tier._lines._clients[0]._store
        name = tier._name_of(self.host.engine.pages(prompt(seed, page + 1, self.tokens))[page])
        assert store.remove(name, True) == 0
        assert store.put(name, bytes(nbytes)) == 0

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

    def rates(self, master: str, pages: int, rounds: int) -> dict[str, list[float]]:
        """GB/s of puts and gets of pages by the tier, and by a bare loop of the same calls, in turns."""
        engine, extent = self.host.engine, self.host.layout.extent_bytes
        nbytes, found = pages * (extent + TRAILER_BYTES), dict[str, list[float]]()
        blocks = self.host.take(pages)
        with BareLoop(master, pages, extent) as bare:
            for number in range(rounds + 1):
                engine.clear()
                tokens = np.random.default_rng(number).integers(0, 1 << 30, pages * self.tokens, dtype=np.uint32)
                engine.store(tokens, blocks).result(60)
                took = {"tier put": _seconds(lambda: engine.flush(60)), "bare put": bare.put()}
                assert len(engine.manager.tiers["mooncake"].index) == pages
                self.forget()
                took["bare get"] = bare.get()
                begun = time.perf_counter()
                assert engine.prefetch(tokens).result(60).pages == {"loaded": pages}
                took["tier get"] = time.perf_counter() - begun
                for name, seconds in took.items() if number else ():  # the first round makes connections
                    found.setdefault(name, []).append(nbytes / seconds / 1e9)
        self.host.give(blocks)
        return found

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


def _seconds(action: Callable[[], object]) -> float:
    begun = time.perf_counter()
    action()
    return time.perf_counter() - begun


class BareLoop:
    """The calls that the tier makes for its pages, and nothing else. Seconds of one pass over all of them."""

    def __init__(self, master: str, pages: int, extent: int) -> None:
        self._client = MooncakeClient(MooncakeAddress(master))
        self._extent, self._numbers = extent, itertools.count()
        self._names = [""] * pages
        self._extents = HostBuffer(pages * extent, "off")
        self._trailers = HostBuffer(BATCH_PAGES * TRAILER_BYTES, "off")
        self._extents.tensor.random_()
        for buffer in (self._extents, self._trailers):
            self._client.register(buffer.address, buffer.nbytes)

    def put(self) -> float:
        if self._names[0]:
            self._client.remove(self._names)
        self._names = [f"bare/{next(self._numbers)}" for _ in self._names]
        return _seconds(lambda: self._move(self._client.put, 0))

    def get(self) -> float:
        return _seconds(lambda: self._move(self._client.get, self._extent + TRAILER_BYTES))

    def _move(self, call: Callable[..., list[int]], code: int) -> None:
        at_once = max(1, min(BATCH_PAGES, (32 << 20) // self._extent))
        for at in range(0, len(self._names), at_once):
            names = self._names[at : at + at_once]
            pieces = [
                [(self._extents.address + (at + n) * self._extent, self._extent), (place, TRAILER_BYTES)]
                for n, place in enumerate(self._trailers.address + n * TRAILER_BYTES for n in range(len(names)))
            ]
            assert set(call(names, pieces)) == {code}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for buffer in (self._extents, self._trailers):
            self._client.unregister(buffer.address)
        self._client.close()


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
