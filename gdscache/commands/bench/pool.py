"""What a shared pool gives through the tier, against a bare loop of the same calls; and what it costs when it is dead.

Behind `gdscache bench pool`. One run, in turns: the pool's own speed drifts more than the ratio.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gdscache import CacheEngine
from gdscache.commands.bench import kit
from gdscache.commands.bench.measure import Series, interleave, ratio, seconds, target
from gdscache.commands.bench.rows import Line, bars, lines_table
from gdscache.commands.console import Progress, Table
from gdscache.cuda.host_memory import HostBuffer
from gdscache.errors import IOFailedError, TierUnavailableError
from gdscache.pool.client import MooncakeClient, PoolAddress, load_package
from gdscache.pool.io import BATCH_PAGES, TRAILER_BYTES

LEAST, MOST_P99 = 0.85, 1.1
PAGE_TOKENS, LAYERS = 16, 32  # 1 MiB a page: 32 layers of 8 heads of 64, of two bytes
MIB = 1 << 20
_BLOCK = 200  # calls
_CALL_BYTES = 32 << 20  # of the bare loop's calls
_OWNER = (
    "import sys, threading; from mooncake.store import MooncakeDistributedStore as S; s = S(); "
    "print(s.setup('127.0.0.1', 'P2PHANDSHAKE', int(sys.argv[2]), 0, 'tcp', '', sys.argv[1]), flush=True); "
    "threading.Event().wait()"
)


@dataclasses.dataclass(frozen=True)
class Settings(kit.Settings):
    """`pages` of 1 MiB move in each round. `lookups`: of each of the engines that are compared with the master dead."""

    pages: int = 128
    repeat: int = 7
    lookups: int = 12_000

    @classmethod
    def of(cls, profile: str) -> Settings:
        return cls(profile, pages=16, repeat=2, lookups=200) if profile == "quick" else cls(profile)


class LocalPool:
    """A master and an owner on loopback; `kill_master` is what it says."""

    def __init__(self, directory: Path, nbytes: int) -> None:
        package = load_package()
        binary = Path(str(package.__file__)).parent / "mooncake_master"
        port, metrics = _free_port(), _free_port()
        self.address = f"127.0.0.1:{port}"
        self._log = (directory / "pool.log").open("wb")
        options = ("-rpc_address=127.0.0.1", f"-rpc_port={port}", "-metrics_host=127.0.0.1", f"-metrics_port={metrics}")
        self._master = self._begin(str(binary), *options)
        self._owner: subprocess.Popen[bytes] | None = None
        until = time.monotonic() + 20
        while time.monotonic() < until:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            time.sleep(0.05)
        self._owner = self._begin(sys.executable, "-c", _OWNER, self.address, str(nbytes))
        assert self._owner.stdout is not None
        if self._owner.stdout.readline().strip() != b"0":
            self.close()
            raise TierUnavailableError("an owner of memory does not come up", "see mooncake_master's log")

    def _begin(self, *command: str) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "GLOG_minloglevel": "2"}
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self._log, env=environment)

    def kill_master(self) -> None:
        self._master.kill()
        self._master.wait()

    def close(self) -> None:
        for process in (self._owner, self._master):
            if process is not None:
                process.kill()
                process.wait()
                if process.stdout is not None:
                    process.stdout.close()
        self._log.close()


def measure(run: kit.Run, settings: Settings, directory: Path) -> None:
    """Both measurements, against a pool that is started for them."""
    run.plan(["pool", "dead_master"])
    with tempfile.TemporaryDirectory(prefix="gdscache-bench-") as name:
        pool = LocalPool(Path(name), (4 * settings.pages + 64) * MIB)
        with contextlib.closing(pool):
            run.case("pool", lambda: {"pool": _moved(pool.address, settings, run.progress)})
            run.case("dead_master", lambda: {"dead_master": _dead(pool, settings, run.progress)})


def tables(report: kit.Report) -> list[Table]:
    """The tier beside the bare loop, and the engine with a dead master beside one without the tier."""
    judged, (moved, calls) = not kit.quick(report), _lines(report)
    return [
        lines_table("Shared pool", moved, judged=judged),
        lines_table("With the master dead", calls, judged=judged),
    ]


def plot(report: kit.Report, figure: Any) -> None:
    """A bar a row of both tables."""
    bars(figure.subplots(), [line for lines in _lines(report) for line in lines], judged=not kit.quick(report))


def _lines(report: kit.Report) -> tuple[list[Line], list[Line]]:
    moved, dead = (report[key] or {} for key in SECTIONS)
    puts = [Line.of(what, row, "bare loop", ours="tier", other="bare") for what, row in moved.items()]
    return puts, [
        Line.of(f"p99 of {what}", row, "without the tier", "s", "with", "without") for what, row in dead.items()
    ]


SECTIONS = dict.fromkeys(("pool", "dead_master"))
BENCH = kit.Bench("pool", "gdscache.bench.pool/2", SECTIONS, measure, tables, plot)


# -- puts and gets ---------------------------------------------------------------------------------------------------


class Bare:
    """The calls that the tier makes, and nothing else."""

    def __init__(self, master: str, pages: int) -> None:
        self._client = MooncakeClient(PoolAddress(master))
        self._pages = pages
        self._extents = HostBuffer(pages * MIB, "off")
        self._trailers = HostBuffer(BATCH_PAGES * TRAILER_BYTES, "off")
        self._extents.tensor.random_()
        for buffer in (self._extents, self._trailers):
            self._client.register(buffer.address, buffer.nbytes)
        self._batch = max(1, min(BATCH_PAGES, _CALL_BYTES // MIB))

    def move(self, names: Sequence[str], *, put: bool) -> None:
        call = self._client.put if put else self._client.get
        for at in range(0, len(names), self._batch):
            some = range(at, min(at + self._batch, len(names)))
            pages = [(self._extents.address + n * MIB, MIB) for n in some]
            trailers = [(self._trailers.address + n * TRAILER_BYTES, TRAILER_BYTES) for n in range(len(some))]
            pieces = [list(pair) for pair in zip(pages, trailers, strict=True)]
            codes = call([names[n] for n in some], pieces)
            if any(code != (0 if put else MIB + TRAILER_BYTES) for code in codes):
                raise IOFailedError(f"the bare loop got the codes {sorted(set(codes))}", "see the pool's log")

    def remove(self, names: Sequence[str]) -> None:
        if names:
            self._client.remove(names)

    def close(self) -> None:
        for buffer in (self._extents, self._trailers):
            self._client.unregister(buffer.address)
        self._client.close()


def _engine(master: str | None, pages: int) -> tuple[CacheEngine, Any]:
    tiers = [
        {
            "tier": "gdscache.tiers.mooncake:MooncakeTier",
            "capacity": f"{64 * pages}MiB",
            "options": {"master": master, "deadline": 10.0},
        }
    ]
    config = {
        "model": {
            **{"name": "bench", "layers": LAYERS, "kv_heads": 8, "head_dim": 64, "dtype": "float16"},
            "page_tokens": PAGE_TOKENS,
        },
        "gpu": {"device": "cpu"},
        "cpu": {"capacity": f"{2 * pages}MiB"},
        "host_buffer": "8MiB",
        "store": {"write_policy": "write_back"},  # pages lie in the CPU tier until they are flushed
        "tiers": [] if master is None else tiers,
    }
    planes = [[torch.zeros(pages, PAGE_TOKENS, 8, 64, dtype=torch.float16) for _ in "kv"] for _ in range(LAYERS)]
    for tensors in planes:
        for tensor in tensors:
            tensor.view(torch.int16).random_()
    return CacheEngine.from_config(config, planes=planes), planes


def _moved(master: str, settings: Settings, progress: Progress) -> dict[str, Any]:
    pages, numbers = settings.pages, itertools.count()
    nbytes = pages * (MIB + TRAILER_BYTES)
    bare = Bare(master, pages)
    engine, _ = _engine(master, pages)
    with contextlib.closing(bare), engine:
        blocks = list(range(pages))
        last: dict[str, Any] = {}

        def bare_put() -> float:
            bare.remove(last.get("names", ()))
            last["names"] = [f"bare/{next(numbers)}" for _ in range(pages)]
            return nbytes / seconds(lambda: bare.move(last["names"], put=True)) / 1e9

        def bare_get() -> float:
            return nbytes / seconds(lambda: bare.move(last["names"], put=False)) / 1e9

        def tier_put() -> float:
            first = next(numbers)
            engine.clear()
            last["tokens"] = np.random.default_rng(first).integers(0, 1 << 30, pages * PAGE_TOKENS, dtype=np.uint32)

            engine.store(last["tokens"], blocks).result(600)
            elapsed = seconds(lambda: engine.flush(600))
            if len(engine.manager.tiers["mooncake"].index) != pages:
                raise IOFailedError("not all pages reached the pool", "see its log")
            return nbytes / elapsed / 1e9

        def tier_get() -> float:
            engine.drain(600)
            with engine.manager.lock:
                index = engine.manager.cpu_index
                index.evict(len(index))

            def fetch() -> None:
                report = engine.prefetch(last["tokens"]).result(600)
                if report.pages != {"loaded": pages}:
                    raise IOFailedError(f"the pool gave {report.pages}", "see its log")

            return nbytes / seconds(fetch) / 1e9

        ways = {"bare_put": bare_put, "tier_put": tier_put, "bare_get": bare_get, "tier_get": tier_get}
        interleave(ways, 1)  # connections are made
        found = interleave(ways, settings.repeat, progress, "puts and gets")
    return {what: _compared(found[f"tier_{what}"], found[f"bare_{what}"]) for what in ("put", "get")}


def _compared(tier: Series, bare: Series) -> dict[str, Any]:
    over = ratio(tier, bare)
    return {"tier": tier.describe(), "bare": bare.describe(), **over, **target(over["ratio"], LEAST, at_least=True)}


# -- a dead master ---------------------------------------------------------------------------------------------------


def _dead(pool: LocalPool, settings: Settings, progress: Progress) -> dict[str, Any]:
    """Lookups and loads of what lies here, with the tier and without, in turns."""
    pages = 8
    engines = {"with": _engine(pool.address, 4 * pages), "without": _engine(None, 4 * pages)}
    tokens = list(range(pages * PAGE_TOKENS))
    blocks = list(range(pages))
    took: dict[tuple[str, str], list[float]] = {}
    with contextlib.ExitStack() as ends:
        for engine, _ in engines.values():
            ends.callback(engine.close)
            engine.store(tokens, blocks).result(60)
        pool.kill_master()
        for engine, _ in engines.values():
            engine.store(list(range(7, 7 + PAGE_TOKENS)), blocks[:1]).result(60)
        for done in range(settings.lookups):
            progress(done, settings.lookups, "a dead master")
            for name, (engine, _) in list(engines.items())[:: 1 if done % 2 else -1]:
                begun = time.perf_counter()
                hit = engine.lookup(tokens)
                looked = time.perf_counter()
                loaded = engine.load(hit, blocks).result()
                ended = time.perf_counter()
                if loaded.tokens != len(tokens):
                    raise IOFailedError(f"{loaded.tokens} tokens of {len(tokens)} were loaded", "please report it")
                took.setdefault(("lookup", name), []).append(looked - begun)
                took.setdefault(("load", name), []).append(ended - looked)
        progress(settings.lookups, settings.lookups, "a dead master")
    return {what: _p99(took[what, "with"], took[what, "without"]) for what in ("lookup", "load")}


def _p99(ours: Sequence[float], other: Sequence[float]) -> dict[str, Any]:
    """The median of the 99th percentiles of blocks of calls: what else the machine does disturbs some of them."""
    blocks = (np.reshape(some[: len(some) // _BLOCK * _BLOCK], (-1, _BLOCK)) for some in (ours, other))
    mine, theirs = (np.percentile(block, 99, axis=1) for block in blocks)
    found = float(np.median(mine / theirs))
    figures = {"with": float(np.median(mine)), "without": float(np.median(theirs)), "ratio": found}
    return {**figures, **target(found, MOST_P99, at_least=False)}


def _free_port() -> int:
    with socket.socket() as some:
        some.bind(("127.0.0.1", 0))
        return int(some.getsockname()[1])
