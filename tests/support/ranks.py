"""Ranks as processes, and an engine that leads them: bytes that follow from a page's key and the rank's shard."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gdscache import CacheEngine, PageStatus, Rank, RankAddress
from gdscache.load.plan import LoadReport
from gdscache.pages.layout import PageLayout
from gdscache.store.handle import StoreReport
from tests.support.helpers import MHA, WAIT, Bytes, layout_of, make_config, narrowed, read_page, write_page
from tests.support.rank_messages import Point, Trap

BLOCKS = 64


def fits(key: bytes, shard: int) -> bool:
    """Whether a shard's part of a page fits into a packed extent."""
    return bool(key[0] & (3 if shard % 2 else 1))


def bytes_of(layout: PageLayout, key: bytes, shard: int) -> Bytes:
    """The part of a page that a shard has: random, and the same whenever key and shard are. Half of the pages fit on
    all shards if they are to be packed, and a quarter on some of them."""
    seed = int.from_bytes(key[:8], "little") ^ (shard * 0x9E3779B97F4A7C15 % 2**64)
    drawn = np.random.default_rng(seed).integers(0, 256, layout.plane_bytes, dtype=np.uint8)
    return narrowed(drawn) if layout.packed and fits(key, shard) else drawn


def serve(line: Connection, rank: int, shard: int, model: dict[str, Any], blocks: int, device: str) -> None:
    """A rank's process: does what it is told over the line, until that is closed. `device`: of its planes; `cuda` is a
    GPU of its own, as far as there are so many."""
    torch.set_num_threads(1)
    layout, trap = layout_of(model), Trap()
    if device == "cuda":
        device = f"cuda:{rank % torch.cuda.device_count()}"
        torch.cuda.set_device(device)
    planes = [
        [
            torch.zeros((blocks, layout.page_tokens, *p.shape), dtype=getattr(torch, p.dtype), device=device)
            for p in some
        ]
        for some in layout.layers
    ]
    with Rank(planes, rank, shard=shard) as mine:
        line.send(mine.address)
        while True:
            try:
                what, *given = line.recv()
            except EOFError:
                return
            if what == "compute":  # block numbers and keys
                for block, key in zip(*given, strict=True):
                    write_page(planes, layout, [block], bytes_of(layout, key, shard))
                line.send(None)
            elif what == "store":
                trap.at("store", "before")
                mine.store(*given)
                trap.at("store", "behind")
                line.send(None)
            elif what == "place":
                number, numbers = given
                mine.place(number, functools.partial(list, numbers))
                line.send(None)
            elif what == "told":
                line.send(mine.told(*given))
            elif what in ("load", "load into"):  # blocks of all ranks, or of this one
                order, numbers, keys, wait = given
                trap.at("load", "before")
                load = mine.load(order, None if what == "load" else numbers)
                trap.at("load", "behind")
                with contextlib.suppress(Exception):  # layers that are late: the verdict says so
                    for layer in range(layout.n_layers):
                        load.wait(layer, wait)
                report = load.result(wait)
                good = [
                    bool(np.array_equal(read_page(planes, layout, [block]), bytes_of(layout, key, shard)))
                    for block, key in zip(numbers, keys, strict=False)
                ]
                line.send(([status.value for status in report.pages], good))
            elif what == "arm":  # a point, or None
                (trap.point,) = given
                line.send(None)
            elif what == "close in a fork":
                if not (child := os.fork()):
                    signal.alarm(10)  # one that hangs is killed
                    mine.close()
                    os._exit(0)
                line.send(os.waitpid(child, 0)[1])
            elif what == "zero":
                for some in planes:
                    for tensor in some:
                        tensor[given[0]] = 0
                line.send(None)


class RankProcess:
    def __init__(self, rank: int, shard: int, model: dict[str, Any], device: str, blocks: int = BLOCKS) -> None:
        context = multiprocessing.get_context("forkserver")  # a GPU is not touched before the fork
        context.set_forkserver_preload(["tests.support.ranks"])  # torch is imported once
        self.line, theirs = context.Pipe()
        self.rank, self.shard = rank, shard
        self.owed = 0  # answers that were not heard
        self.process = context.Process(target=serve, args=(theirs, rank, shard, model, blocks, device), daemon=True)
        self.process.start()
        theirs.close()

    def address(self) -> RankAddress:
        assert self.line.poll(WAIT), f"rank {self.rank} says nothing"
        address: RankAddress = self.line.recv()
        return address

    def tell(self, *what: Any) -> None:
        with contextlib.suppress(OSError):  # it was killed
            self.line.send(what)
            self.owed += 1

    def hear(self, seconds: float = WAIT) -> Any:
        """Its answer; None where there is none any more, or not in time."""
        try:
            if not self.line.poll(seconds):
                return None
            answer = self.line.recv()
        except (EOFError, OSError):
            self.owed = 0
            return None
        self.owed -= 1
        return answer

    def arm(self, point: Point | None) -> None:
        """Signal itself at a message, from now on. None: no more, and it goes on wherever it hangs; all that it owes is
        heard."""
        self.tell("arm", point)
        until = time.monotonic() + WAIT
        while self.owed:
            assert time.monotonic() < until, f"rank {self.rank} does not go on"
            self.signal(signal.SIGCONT)
            self.hear(0.05)

    def signal(self, number: int) -> None:
        if self.process.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.process.join(WAIT)
        self.line.close()


class RanksHost:
    """`shards` lists the shard of each rank. `config`: see `make_config`, counted in pages."""

    def __init__(
        self,
        path: Path,
        shards: Sequence[int],
        model: dict[str, Any] | None = None,
        rank_device: str = "cpu",
        **config: Any,
    ) -> None:
        self.model = dict(MHA if model is None else model)
        self.layout = layout_of(self.model)
        self.shards = [*shards]
        self.device = rank_device
        parts = 1 + max(shards)
        sizes = {"cpu": 16, "ssd": 64, "bounce": 8} | {k: config.pop(k) for k in ("cpu", "ssd") if k in config}
        pages = {name: None if size is None else size * parts for name, size in sizes.items()}
        self.config = make_config(path, model=self.model, **{"deadline": 5.0} | pages | config)  # type: ignore[arg-type]
        self.free = [*range(BLOCKS)]
        self.ranks: list[RankProcess] = []
        self.start_ranks()
        self.engine = self.open()

    def start_ranks(self) -> None:
        """All of them anew, with planes that are empty."""
        for rank in self.ranks:
            rank.kill()
        self.ranks = [RankProcess(rank, shard, self.model, self.device) for rank, shard in enumerate(self.shards)]
        self.addresses = [rank.address() for rank in self.ranks]
        self.free = [*range(BLOCKS)]

    def open(self) -> CacheEngine:
        return CacheEngine.from_config(self.config, ranks=self.addresses)

    def restart(self) -> None:
        self.engine.close()
        self.start_ranks()
        self.engine = self.open()

    def every(self, *what: Any, seconds: float = WAIT) -> list[Any]:
        """Tell all ranks, and hear from all."""
        for rank in self.ranks:
            rank.tell(*what)
        return [rank.hear(seconds) for rank in self.ranks]

    @contextlib.contextmanager
    def blocks(self, count: int) -> Iterator[list[int]]:
        taken, self.free = self.free[:count], self.free[count:]
        try:
            yield taken
        finally:
            self.free += taken

    def store(self, tokens: Sequence[int], salt: str = "", seconds: float = WAIT) -> StoreReport:
        """Compute all full pages of a prompt on every rank, and store them."""
        keys = [page.key for page in self.engine.pages(tokens, salt)]
        with self.blocks(len(keys)) as blocks:
            self.every("compute", blocks, keys)
            handle = self.engine.store(tokens, blocks, salt=salt)
            self.every("store", handle.order)
            report = handle.result(seconds)
            handle.release_event.synchronize(seconds)
            return report

    def load(self, tokens: Sequence[int], salt: str = "", seconds: float = WAIT) -> tuple[LoadReport, list[list[str]]]:
        """Load what there is of a prompt: the leader's report, and what each rank says of its pages.

        Bytes of pages that a rank calls loaded are right, and what is loaded is so on every rank."""
        hit = self.engine.lookup(tokens, 0, salt)
        keys = [page.key for page in hit.pages]
        with self.blocks(len(keys)) as blocks:
            self.every("zero", blocks)
            load = self.engine.load(hit, blocks)
            answers = self.every("load", load.order, blocks, keys, seconds, seconds=seconds + 10)
            report = load.result(seconds)
        for rank, answer in zip(self.ranks, answers, strict=True):
            if answer is not None:
                for n, (status, good) in enumerate(zip(*answer, strict=True)):
                    assert good or status != "loaded", f"rank {rank.rank} has other bytes in page {n}"
                    assert status == "loaded" or report.pages[n] is not PageStatus.LOADED, "good where a rank's is not"
        return report, [[] if answer is None else answer[0] for answer in answers]

    def load_all(self, tokens: Sequence[int]) -> bool:
        """Whether all pages of a prompt come; again where a deadline passes on a machine that is busy."""
        pages = len(tokens) // self.layout.page_tokens
        for _ in range(20):
            report, _ = self.load(tokens)
            if report.pages == (PageStatus.LOADED,) * pages:
                return True
            if not set(report.pages) <= {PageStatus.LOADED, PageStatus.DEADLINE}:
                return False
            time.sleep(0.05)
        return False

    def close(self) -> None:
        self.engine.close()
        for rank in self.ranks:
            rank.kill()
