"""What the tests of the engine share: tiny configurations counted in pages, bytes that follow from a key, checks."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from gdscache import CacheEngine, PageHashes
from gdscache.config import ModelConfig
from gdscache.limits import EngineLimits
from gdscache.load.handle import LayerwiseLoad
from gdscache.load.plan import LoadReport
from gdscache.moves.native import NativeExecutor
from gdscache.pages.layout import PLAIN, PageLayout
from gdscache.store.handle import StoreHandle
from gdscache.tiers.ssd import SsdTier

Bytes = npt.NDArray[np.uint8]
Planes = Sequence[Sequence[torch.Tensor]]
Tokens = Sequence[int] | PageHashes
SENTINEL = 0xA5
WAIT = 60.0  # seconds after which something hangs, on a machine that others keep busy too
# Of engines that are counted in pages: every slot of the SSD takes one, and prefetches move one chunk at a time.
SMALL = EngineLimits(prefetch_chunks=1, prefetch_share=1.0, ssd_reserve=0)
# Seconds of a test that does random things from many threads: in `make suites`, and in `make soak`.
LONG = [pytest.param(1.5, marks=pytest.mark.suite), pytest.param(60.0, marks=pytest.mark.soak)]
SEED = int(
    os.environ.get("GDSCACHE_SEED", "0")
)  # what is drawn at random follows from it; `make soak` prints a fresh one

# 3 layers x 2 planes x 4 tokens x 256 bytes: 6,144 bytes in an extent of 8,192, so that padding is always there.
MHA = {"name": "tiny", "layers": 3, "kv_heads": 4, "head_dim": 32, "dtype": "bfloat16", "page_tokens": 4}
PACKED = MHA | {"pack": "on"}  # of which half of the pages fit: see `expected`
MLA = {"name": "tiny", "layers": 3, "kv_lora_rank": 256, "rope_dim": 24, "dtype": "bfloat16", "page_tokens": 4}
EXTRA = {  # an indexer that only some layers have, and scales of another type
    "name": "tiny",
    "layers": 3,
    "dtype": "bfloat16",
    "page_tokens": 4,
    "planes": [
        {"name": "k", "shape": [4, 32]},
        {"name": "v", "shape": [4, 16]},
        {"name": "scale", "shape": [3], "dtype": "float32"},
        {"name": "index", "shape": [33], "dtype": "float8_e4m3fn", "layers": [0, 2]},
    ],
}


def layout_of(model: dict[str, Any]) -> PageLayout:
    return _layout_of(json.dumps(model))


@functools.cache
def _layout_of(model: str) -> PageLayout:
    return ModelConfig(**json.loads(model)).layout()


def make_config(
    path: Path | None = None,
    *,
    device: str = "cpu",
    model: dict[str, Any] | None = None,
    gpu: int = 8,
    cpu: int | None = 6,
    ssd: int | None = 12,
    bounce: int = 4,
    queue: int = 64,
    transport: str = "posix",
    ssd_options: dict[str, Any] | None = None,
    **sections: Any,
) -> dict[str, Any]:
    """A configuration whose tiers have so many pages; `path` None or `ssd` None is no SSD tier, `cpu` None no CPU tier.

    The GPU pool has at least the pages asked for (its capacity may not be below one extent).
    """
    model = dict(MHA if model is None else model)
    layout = layout_of(model)
    extent = layout.extent_bytes
    config: dict[str, Any] = {
        "model": model,
        "gpu": {"device": device, "capacity": max(extent, gpu * layout.plane_bytes), "staging": 8 * extent},
        "host_buffer": bounce * extent,
        "store": {"queue": queue * extent} | sections.pop("store", {}),
        "deadline": WAIT,
    }
    if cpu is not None:
        config["cpu"] = {"capacity": cpu * extent}
    if ssd is not None and path is not None:
        config["ssd"] = {
            "path": str(path),
            "capacity": ssd * extent,
            "threads": 2,
            "transport": transport,
            **(ssd_options or {}),
        }
    return config | sections


# -- bytes -----------------------------------------------------------------------------------------------------------


def expected(layout: PageLayout, key: bytes) -> Bytes:
    """The bytes of a page: random, and the same whenever the key is the same. Half of the pages fit if they are to be
    packed."""
    drawn = np.random.default_rng(int.from_bytes(key[:8], "little")).integers(
        0, 256, layout.plane_bytes, dtype=np.uint8
    )
    return narrowed(drawn) if layout.packed and key[0] & 1 else drawn


def narrowed(data: Bytes) -> Bytes:
    """Bytes whose bfloat16 values have some neighbouring exponents, so that they fit into a packed extent."""
    data = data.copy()
    data[1::2] = data[1::2] & 0x83 | 0x3C
    return data


def write_page(
    planes: Sequence[Sequence[torch.Tensor]], layout: PageLayout, blocks: Sequence[int], data: Bytes
) -> None:
    """Put a page's bytes (layer, plane, token) into blocks of planes, with nothing of the engine's own code."""
    at = 0
    for layer, tensors in zip(layout.layers, planes, strict=True):
        for plane, tensor in zip(layer, tensors, strict=True):
            raw, tokens = tensor.view(torch.uint8), tensor.shape[1]
            for block in blocks:
                end = at + tokens * plane.row_bytes
                raw[block] = torch.from_numpy(data[at:end].copy()).view(raw[block].shape).to(raw.device)
                at = end
    assert at == layout.plane_bytes


def read_page(planes: Planes, layout: PageLayout, blocks: Sequence[int]) -> Bytes:
    """The bytes of a page out of planes, the inverse of `write_page`."""
    parts = [
        tensor.view(torch.uint8)[block].cpu().numpy().reshape(-1)
        for tensors in planes
        for tensor in tensors
        for block in blocks
    ]
    return np.concatenate(parts)


def new_planes(
    layout: PageLayout, blocks: int, block_tokens: int, device: str = "cpu", order: str = "plain"
) -> list[list[torch.Tensor]]:
    """Planes as an engine with its own pool has them, full of a sentinel.

    `order`: `plain` is one tensor a plane; `kv_first` is views of one `[planes, blocks, ...]` tensor, `blocks_first` of
    one `[blocks, planes, ...]` tensor (planes of equal shape and type only).
    """
    result = []
    for planes in layout.layers:
        dtypes = [getattr(torch, p.dtype) for p in planes]
        shapes = [(blocks, block_tokens, *p.shape) for p in planes]
        if order == "plain":
            tensors = [torch.empty(s, dtype=d, device=device) for s, d in zip(shapes, dtypes, strict=True)]
        else:
            assert len(set(shapes)) == 1
            axis = 0 if order == "kv_first" else 1
            shape = list(shapes[0])
            shape.insert(axis, len(planes))
            tensors = list(torch.empty(shape, dtype=dtypes[0], device=device).unbind(axis))
        for tensor in tensors:
            tensor.view(torch.uint8).fill_(SENTINEL)
        result.append(tensors)
    return result


def untouched(planes: Planes, blocks: Iterable[int]) -> bool:
    """True when these blocks hold nothing but the sentinel."""
    rows = torch.tensor([*blocks], dtype=torch.int64, device=planes[0][0].device)
    whole = (t.view(torch.uint8).index_select(0, rows) for tensors in planes for t in tensors)
    return all(bool((some == SENTINEL).all()) for some in whole)


# -- an engine that owns its pool ------------------------------------------------------------------------------------


def fill(engine: CacheEngine, seq: Any, salt: str = "", start: int | None = None) -> None:
    """Compute a sequence's uncached full pages: put the bytes that belong to each key into its slot."""
    pages = engine.pages(seq.tokens, salt)
    first = seq.cached_tokens // engine.layout.page_tokens if start is None else start
    planes = [engine.gpu.planes(layer) for layer in range(engine.layout.n_layers)]
    for i in range(first, len(pages)):
        write_page(planes, engine.layout, [int(seq.slots[i])], expected(engine.layout, pages[i].key))


def holds(engine: CacheEngine, seq: Any, salt: str = "") -> None:
    """Every cached page of a sequence has the bytes that belong to its key."""
    pages = engine.pages(seq.tokens, salt)
    for layer in range(engine.layout.n_layers):
        seq.wait(layer)
    planes = [engine.gpu.planes(layer) for layer in range(engine.layout.n_layers)]
    for i in range(seq.cached_tokens // engine.layout.page_tokens):
        got = read_page(planes, engine.layout, [int(seq.slots[i])])
        assert np.array_equal(got, expected(engine.layout, pages[i].key)), f"page {i} has other bytes"


def run(engine: CacheEngine, tokens: Sequence[int], salt: str = "") -> int:
    """A whole request: find, verify, check the bytes, compute the rest, commit, drain. The tokens that were cached."""
    with engine.sequence(tokens, salt) as seq:
        cached = seq.verify(WAIT)
        holds(engine, seq, salt)
        fill(engine, seq, salt)
        seq.commit()
    quiet(engine)
    return int(cached)


def ran(open_engine: OpenEngine, pages: int, **options: Any) -> tuple[CacheEngine, list[int]]:
    """An engine, and a prompt of so many pages and a token that it has answered."""
    engine, tokens = open_engine(**options), prompt(1, pages, extra=1)
    run(engine, tokens)
    return engine, tokens


# -- an engine that is attached --------------------------------------------------------------------------------------


class Host:
    """An inference engine of our own: planes, a page allocator, and requests that go through an attached cache."""

    def __init__(
        self,
        config: dict[str, Any],
        blocks: int = 64,
        block_tokens: int | None = None,
        order: str = "plain",
        limits: EngineLimits = SMALL,
    ) -> None:
        self.layout = layout_of(config["model"])
        self.per_page = self.layout.page_tokens // (block_tokens or self.layout.page_tokens)
        device = config["gpu"]["device"]
        self.planes = new_planes(self.layout, blocks, block_tokens or self.layout.page_tokens, device, order)
        self.free = list(np.random.default_rng(7).permutation(blocks))
        self.engine = CacheEngine.from_config(config, planes=self.planes, limits=limits)
        self.data: Callable[[bytes], Bytes] = lambda key: expected(self.layout, key)

    def take(self, pages: int) -> list[int]:
        return [int(self.free.pop()) for _ in range(pages * self.per_page)]

    def give(self, blocks: Sequence[int]) -> None:
        for tensors in self.planes:
            for t in tensors:
                t.view(torch.uint8)[list(blocks)] = SENTINEL
        self.free += blocks

    def page(self, blocks: Sequence[int], i: int) -> Sequence[int]:
        return blocks[i * self.per_page : (i + 1) * self.per_page]

    def compute(self, tokens: Tokens, start: int = 0, salt: str = "", pages: int | None = None) -> list[int]:
        """Blocks with the bytes of the full pages from token `start` on (`pages` of them at most)."""
        names = self.engine.pages(tokens, salt)[start // self.layout.page_tokens :][:pages]
        blocks = self.take(len(names))
        for i, name in enumerate(names):
            write_page(self.planes, self.layout, self.page(blocks, i), self.data(name.key))
        return blocks

    def store(
        self, tokens: Tokens, start: int = 0, salt: str = "", dtype: torch.dtype = torch.int64, **options: Any
    ) -> StoreHandle:
        """Compute and store; waits until the slots were read and uses them for something else at once."""
        blocks = self.compute(tokens, start, salt)
        handle = self.engine.store(tokens, torch.tensor(blocks, dtype=dtype), start, salt, **options)
        handle.release_event.synchronize(WAIT)
        self.give(blocks)
        return handle

    def keep(self, tokens: Tokens, *arguments: Any, **options: Any) -> StoreHandle:
        """`store`; nothing of it is under way any more when this returns."""
        handle = self.store(tokens, *arguments, **options)
        quiet(self.engine)
        return handle

    def keep_on_ssd(self, tokens: Tokens) -> StoreHandle:
        """`keep`; the CPU tier has none of them, nor anything else that can go."""
        handle = self.keep(tokens)
        drop_from(self.engine, "cpu")
        return handle

    def begin(self, tokens: Tokens, start: int = 0, salt: str = "") -> tuple[LayerwiseLoad, list[int], list[bytes]]:
        hit = self.engine.lookup(tokens, start, salt)
        blocks = self.take(len(hit.pages))
        return self.engine.load(hit, blocks), blocks, [p.key for p in hit.pages]

    def finish(self, load: LayerwiseLoad, blocks: list[int], keys: list[bytes]) -> LoadReport:
        """The verdict; every page that it calls good has its bytes."""
        for layer in range(self.layout.n_layers):
            load.wait(layer)
        report = load.result()
        load.release_event.synchronize(WAIT)
        for i in range(report.tokens // self.layout.page_tokens):
            got = read_page(self.planes, self.layout, self.page(blocks, i))
            assert np.array_equal(got, self.data(keys[i])), f"page {i} has other bytes"
        assert untouched(self.planes, self.free), "a slot that nobody named was written"
        self.give(blocks)
        return report

    def load(self, tokens: Tokens, start: int = 0, salt: str = "") -> LoadReport:
        """Look up, load, wait; the report, its bytes checked."""
        return self.finish(*self.begin(tokens, start, salt))


# -- checks ----------------------------------------------------------------------------------------------------------


OpenHost = Callable[..., Host]
OpenEngine = Callable[..., CacheEngine]


def kept(open_host: OpenHost, pages: int, **options: Any) -> tuple[Host, list[int]]:
    """A host, and a prompt that it keeps on every tier."""
    host, tokens = open_host(**options), prompt(1, pages)
    host.keep(tokens)
    return host, tokens


def kept_on_ssd(open_host: OpenHost, pages: int, **options: Any) -> tuple[Host, list[int]]:
    host, tokens = kept(open_host, pages, **options)
    drop_from(host.engine, "cpu")
    return host, tokens


def stored(host: Host, seed: int, pages: int) -> list[int]:
    """A prompt that is on the SSD, and in no faster tier."""
    tokens = prompt(seed, pages)
    host.keep_on_ssd(tokens)
    return tokens


def until(condition: Callable[[], bool], what: str, seconds: float = WAIT) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{what}: not within {seconds} s"
        time.sleep(0.001)


def raising(error: BaseException | type[BaseException]) -> Callable[..., Any]:
    """A function that raises that, whatever it is given."""

    def raises(*_: Any, **__: Any) -> Any:
        raise error

    return raises


def together(work: Callable[[int], object], threads: int) -> None:
    """Run `work(0)`, `work(1)`, ... beside each other, to their ends; the first error is raised."""
    with ThreadPoolExecutor(threads) as pool:
        for ended in [pool.submit(work, number) for number in range(threads)]:
            ended.result(3 * WAIT)


def our_threads() -> list[str]:
    """The names of the threads of engines, calls and transports that live."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("gdscache")]


def quiet(engine: CacheEngine) -> None:
    """Wait until no store is under way and none pins anything."""
    engine.drain(WAIT)
    until(lambda: all(lease["owner"] != "store" for lease in engine.stats()["leases"]), "leases of stores end")


def settle(engine: CacheEngine) -> None:
    """Bring a healthy engine to rest: nothing queued, nothing pinned, each slot accounted for, no tier too large."""
    engine.drain(WAIT)
    until(lambda: not engine.stats()["leases"], f"leases end: {engine.stats()['leases']}")
    report = engine.check()
    assert report.problems == (), report.problems
    stats = engine.stats()
    assert stats["store_queue"]["bytes"] == 0
    for name, tier in stats["tiers"].items():
        assert tier["pages"] + tier["free_slots"] <= tier["slots"], name
        unit = engine.layout.page_bytes if name == "gpu" else engine.layout.extent_bytes
        most = getattr(engine.config, name).capacity if name in ("gpu", "cpu", "ssd") else tier["capacity_bytes"]
        assert tier["slots"] * unit <= tier["capacity_bytes"] <= most, name
    for bounce in engine._parts.bounces:
        assert not reserve_used(engine), "bounce slots of loads are lost"
        assert bounce.stores.free_slots == bounce.stores.slots, "bounce slots of stores are lost"
    if "gpu" in stats["tiers"]:
        assert stats["tiers"]["gpu"]["private_slots"] == 0


def close_kept(engine: CacheEngine) -> None:
    """Close it. What it had on its SSD is there behind a restart: each page has its row and its checksums."""
    tiers = engine._parts.manager.tiers.values()
    engine.close()
    for ssd in (tier for tier in tiers if isinstance(tier, SsdTier)):
        with contextlib.closing(sqlite3.connect(f"file:{ssd.path / 'catalog.sqlite'}?mode=ro", uri=True)) as catalogue:
            rows = catalogue.execute("SELECT key, place FROM pages JOIN checksums USING (place)").fetchall()
        assert dict(rows) == {entry.key: entry.slot for entry in ssd.index}, "the index and the catalogue differ"


def reserve_used(engine: CacheEngine) -> int:
    """Slots of the bounce reserve that loads have."""
    bounce = next(iter(engine._parts.bounces), None)
    assert bounce is not None, "no reserve"
    executor = engine._parts.executor
    return len(bounce.loads) - executor.moves.free_slots() if isinstance(executor, NativeExecutor) else 0  # the ranks'


def tokens_of(engine: CacheEngine, tokens: Sequence[int], salt: str = "") -> int:
    return engine.lookup(tokens, salt=salt).tokens


def prompt(seed: int, pages: int, page_tokens: int = 4, extra: int = 0) -> list[int]:
    """`pages` full pages of tokens that share no prefix with another seed's, and `extra` tokens of a tail."""
    rng = np.random.default_rng(seed)
    return [int(t) for t in rng.integers(0, 1 << 32, pages * page_tokens + extra, dtype=np.uint64)]


def drop_from(engine: CacheEngine, *tiers: str) -> None:
    """Empty tiers as eviction would, each with the one of its plain pages, and leave the others alone."""
    with engine.manager.lock:
        for name, tier in engine.manager.tiers.items():
            if name.removesuffix(PLAIN) in tiers:
                tier.index.evict(len(tier.index))


def on_ssd(tiers: Iterable[str]) -> bool:
    """Whether a page that these tiers have is on the SSD, packed or not."""
    return any(name.removesuffix(PLAIN) == "ssd" for name in tiers)


def flip_file(path: Path, offset: int, bit: int = 0) -> None:
    with open(path, "r+b", buffering=0) as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1 << bit]))


@contextlib.contextmanager
def running(engine: CacheEngine) -> Any:
    """The engine, settled and closed at the end unless the test fails first; closed in any case."""
    with engine:
        yield engine
        settle(engine)
