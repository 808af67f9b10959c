"""Calls of an engine under `lock_shim.c`: prints, as JSON, how often each kind gave the interpreter's lock up; in the
main thread and in another, of loads that are planned at once and in parts."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import torch

from gdscache.load import loader
from tests.support.helpers import WAIT, Host, drop_from, make_config, prompt, quiet

ROUNDS, PAGES = 6, 64
_shim = ctypes.PyDLL(sys.argv[1])


def serve(host: Host, found: dict[str, list[int]]) -> None:
    @contextlib.contextmanager
    def counted(call: str) -> Iterator[None]:
        _shim.lock_shim_begin()
        try:
            yield
        finally:
            found[call].append(_shim.lock_shim_end())

    engine = host.engine
    for seed in range(ROUNDS):
        tokens = torch.tensor(prompt(seed, PAGES, extra=1)).tolist()
        blocks = torch.tensor(host.compute(tokens)) if seed % 2 else host.compute(tokens)
        with counted("store"):
            stored = engine.store(tokens, blocks)
        stored.result(WAIT)
        for where in ("the CPU tier", "the SSD"):
            with counted("lookup"):
                hit = engine.lookup(tokens)
            with counted(f"load from {where}"):
                load = engine.load(hit, blocks)
            load.result(WAIT)
            quiet(engine)
            drop_from(engine, "cpu")
        with counted("prefetch"):
            prefetch = engine.prefetch(tokens)
        prefetch.result(WAIT)
        with counted("os.stat"):
            os.stat(".")
        host.give([int(block) for block in blocks])


def main() -> None:
    sys.setswitchinterval(60.0)  # no other thread takes the lock from a call that a busy machine has stopped
    told = {}
    for loads, pages, least in (("at once", loader.FIRST_PAGES, loader.FIRST_BYTES), ("in parts", PAGES // 8, 0)):
        loader.FIRST_PAGES, loader.FIRST_BYTES = pages, least
        for where in ("main", "another"):
            found = told[f"{loads}, {where} thread"] = defaultdict[str, list[int]](list)
            with tempfile.TemporaryDirectory() as directory:
                config = make_config(Path(directory) / "cache", cpu=PAGES + 8, ssd=ROUNDS * PAGES + 64)
                host = Host(config, blocks=2 * PAGES)
                with host.engine:
                    if where == "main":
                        serve(host, found)
                    else:
                        thread = threading.Thread(target=serve, args=(host, found))
                        thread.start()
                        thread.join()
    print(json.dumps(told))


if __name__ == "__main__":
    main()
