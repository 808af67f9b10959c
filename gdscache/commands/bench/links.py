"""Loads over the links of several GPUs at once, against page-locked copies at once. Behind `gdscache bench links`.

Each GPU has a rank in a process of its own, as with tensor parallelism; this process leads. A round loads the same
pages from the CPU tier on all ranks, and each rank copies the same number of bytes from page-locked memory, before or
after. The ranks time both, from the first call to the last end. The additional time of the leader's lookup, load and
orders is a separate row.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import multiprocessing
import signal
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gdscache import CacheEngine, Config, PageStatus, Rank
from gdscache.commands.bench import kit
from gdscache.commands.bench.figures import Ratios, compared, in_turns, in_words, rate, series
from gdscache.commands.bench.shapes import LLAMAS
from gdscache.errors import InvalidValueError, IOFailedError
from gdscache.pages.layout import PageLayout
from gdscache.pages.planes import PagedPlanes

PAGE_TOKENS, LATENT = 64, 576
LAYERS, KV_HEADS, HEAD_DIM = (LLAMAS["8b"][key] for key in ("num_hidden_layers", "num_key_value_heads", "head_dim"))
LEAST = 0.9
LIMIT_S = 120.0  # for a rank's answer


@dataclasses.dataclass(frozen=True)
class Settings(kit.Settings):
    """`total`: a load's bytes for each rank."""

    ranks: int = 1
    total: int = 1 << 30
    repeat: int = 15

    @classmethod
    def defaults(cls, *, quick: bool = False, **options: Any) -> dict[str, Any]:
        return {"ranks": max(1, torch.cuda.device_count()), **({"total": 32 << 20, "repeat": 2} if quick else {})}

    def check(self) -> None:
        """Raise `InvalidValueError` where ranks would share a link."""
        if 0 < (gpus := torch.cuda.device_count()) < self.ranks:
            raise InvalidValueError(f"--ranks {self.ranks} on {gpus} GPUs", f"name {gpus} ranks at most")


class Answer(NamedTuple):
    """A rank's result, with its begin and end in seconds of a clock that all processes share."""

    good: bool
    start: float
    end: float


def models(ranks: int) -> dict[str, dict[str, Any]]:
    """A rank's share of Llama-3-8B's heads, and the latents of DeepSeek-V3, which every rank has in full."""
    both: dict[str, Any] = {"name": "bench", "layers": LAYERS, "page_tokens": PAGE_TOKENS, "dtype": "bfloat16"}
    latent = {"name": "latent", "shape": [LATENT], "dtype": "bfloat16"}
    heads = {"kv_heads": max(1, KV_HEADS // ranks), "head_dim": HEAD_DIM}
    return {"heads": both | heads, "latents": {k: both[k] for k in both if k != "dtype"} | {"planes": [latent]}}


def layout_of(model: dict[str, Any]) -> PageLayout:
    """A page in one rank."""
    return Config.from_dict({"model": model}).model.layout()


def serve(line: Connection, number: int, shard: int, model: dict[str, Any], pages: int) -> None:
    """A rank: its first `pages` blocks have random bytes, which are stored; loads go to the same number of blocks after
    them."""
    device = torch.device("cuda", number) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.manual_seed(shard)
    layout = layout_of(model)
    planes = PagedPlanes.allocate(layout, 2 * pages, device).tensors
    for plane in itertools.chain(*planes):
        plane.normal_()
    nbytes = pages * layout.page_bytes
    source = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    target = torch.empty(nbytes, dtype=torch.uint8, device=device)
    with Rank(planes, number, shard=shard) as rank:
        line.send(rank.address)
        while True:  # until the leader terminates it
            what, order = line.recv()
            good, start = True, time.perf_counter()
            if what == "store":
                rank.store(order)
            elif what == "load":
                good = all(status is PageStatus.LOADED for status in rank.load(order).result(LIMIT_S).pages)
            elif what == "copy":
                target.copy_(source, non_blocking=True)
                if device.type == "cuda":
                    torch.cuda.current_stream().synchronize()
            else:
                good = all(torch.equal(plane[:pages], plane[pages:]) for layer in planes for plane in layer)
            line.send(Answer(good, start, time.perf_counter()))


class Links:
    """Ranks, one a GPU, and their leading engine. One prompt's pages are in its CPU tier."""

    def __init__(self, settings: Settings, model: dict[str, Any], *, shared: bool) -> None:
        page_bytes = layout_of(model).page_bytes
        self.pages = max(1, settings.total // page_bytes)
        self.nbytes = self.pages * page_bytes
        context = multiprocessing.get_context("spawn")
        self._lines: list[Connection] = []
        with contextlib.ExitStack() as undo:
            for number in range(settings.ranks):
                here, there = context.Pipe()
                given = (there, number, 0 if shared else number, model, self.pages)
                process = context.Process(target=serve, args=given, daemon=True)
                # Ranks inherit this: the leader ends them on Ctrl-C.
                leading = signal.signal(signal.SIGINT, signal.SIG_IGN)
                try:
                    process.start()
                finally:
                    signal.signal(signal.SIGINT, leading)
                undo.callback(process.join, 10)
                undo.callback(process.terminate)
                there.close()
                self._lines.append(here)
            capacity = (self.nbytes + page_bytes) * (1 if shared else settings.ranks)
            verify = {"verify": "once"}  # as `config init` writes for engines
            config = {"model": model, "cpu": {"capacity": capacity}, "load": verify, "deadline": LIMIT_S}
            self._engine = CacheEngine.from_config(config, ranks=[self._heard(line) for line in self._lines])
            undo.callback(self._engine.close)
            self._tokens = [*range(self.pages * PAGE_TOKENS)]
            stored = self._engine.store(self._tokens, [*range(self.pages)])
            self._every("store", stored.order)
            stored.result(LIMIT_S)
            self._undo = undo.pop_all()

    def load(self) -> tuple[float, float]:
        """Seconds of a load on all ranks, and the same with the lookup and the orders before it."""
        start = time.perf_counter()
        hit = self._engine.lookup(self._tokens, 0)
        load = self._engine.load(hit, [*range(self.pages, 2 * self.pages)])
        answers = self._every("load", load.order)
        if not all(answer.good for answer in answers) or load.result(LIMIT_S).tokens != len(self._tokens):
            raise IOFailedError("a load did not bring every page", "let nothing else use the memory or the GPUs")
        return _spent(answers), max(answer.end for answer in answers) - start

    def copy(self) -> float:
        """Seconds of a copy on all ranks at once."""
        return _spent(self._every("copy", b""))

    def check(self) -> None:
        """Raises `IOFailedError` if a rank's bytes differ from the stored ones."""
        if not all(answer.good for answer in self._every("check", b"")):
            raise IOFailedError("loaded bytes differ from the stored ones", "report this: the cache is wrong")

    def close(self) -> None:
        self._undo.close()

    def _every(self, what: str, order: bytes) -> list[Answer]:
        for line in self._lines:
            line.send((what, order))
        return [self._heard(line) for line in self._lines]

    @staticmethod
    def _heard(line: Connection) -> Any:
        try:
            if line.poll(LIMIT_S):
                return line.recv()
        except EOFError:
            pass
        raise IOFailedError("a rank's process ended, or gave no answer", "see its error above")


def _spent(answers: Sequence[Answer]) -> float:
    return max(answer.end for answer in answers) - min(answer.start for answer in answers)


def measure(run: kit.Run, settings: Settings, directory: Path) -> None:
    of = models(settings.ranks)
    run.plan([*of])
    for name, model in of.items():
        run.case(name, functools.partial(_measured, settings, name, model))


def _measured(settings: Settings, name: str, model: dict[str, Any]) -> dict[str, Any]:
    with contextlib.closing(Links(settings, model, shared=name == "latents")) as links:
        for warm in (links.load, links.copy, links.load):
            warm()
        links.check()
        ways: dict[str, Callable[[], Any]] = {"load": links.load, "copy": links.copy}
        loads, copies = in_turns(ways, settings.repeat).values()
    moved = links.nbytes * settings.ranks
    alone, whole, copied = (series(rate(moved, s) for s in spent) for spent in (*zip(*loads, strict=True), copies))
    more: dict[str, Any] = {"ranks": settings.ranks, "bytes_of_a_rank": links.nbytes, "pages": links.pages}
    of, least = f"of {name}, {settings.ranks} ranks", LEAST if torch.cuda.is_available() else None
    return {
        "links": [
            compared(f"load {of}", alone, "copies", copied, least, **more),
            compared(f"lookup and load {of}", whole, "copies", copied, **more),
        ]
    }


def panels(report: kit.Report) -> list[Ratios]:
    return [Ratios("Links, all at once", [(row["what"], row) for row in report["links"]])]


def bottom(report: kit.Report) -> list[str]:
    """The rate of all links together, beside that of copies."""
    loads = [row for row in report["links"] if row["what"].startswith("load of")]
    found = [in_words(row["case"], row, "of copies") for row in loads]
    ranks = report["settings"]["ranks"]
    one, more = ("GPU", "GPUs") if report["machine"]["gpus"] else ("rank without a GPU", "ranks without GPUs")
    links = f"{ranks} {more} load at once" if ranks > 1 else f"One {one} loads"
    return [f"{links} {', and '.join(found)}."] if found else []


BENCH = kit.Bench("links", "gdscache.bench.links/1", {"links": []}, Settings, measure, panels, bottom)
