"""Who asks for first tokens in `gdscache bench ttft`: the engine of `toy_engine`, with a cache on its pool.

Prompts of one length begin with the same document, as much of it as is to be cached, and go on with tokens of their
own. The document is computed and stored once; it stays in the engine's pool too, for runs with the prefix resident.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from gdscache import CacheEngine, Config
from gdscache.commands.bench import io_cache
from gdscache.commands.bench.io import RAM_THREADS
from gdscache.commands.bench.neighbours import beside
from gdscache.commands.bench.ttft_answers import Answer, stored_bytes
from gdscache.commands.bench.ttft_cells import CACHED, SWITCHED, Cell, Settings, cached_tokens, expected_tiers
from gdscache.commands.toy_engine import PRESETS, EngineOptions, InferenceEngine, KVPool, fingerprint, random_model
from gdscache.errors import IOFailedError
from gdscache.gate.costs import Costs
from gdscache.gate.gate import Gate
from gdscache.sizes import MIB

_DEADLINE_S = 600.0
_LEARNT_PARTS = (8, 4, 2, 1)  # of a prompt: lengths that the gate learns from, as many as it needs


class EngineClient:
    """The model and its pool, for as long as it is open; and one cache after another (`open_cache`)."""

    def __init__(self, settings: Settings, longest: int, directory: Path) -> None:
        """`longest`: tokens of the longest prompt."""
        self.settings, self.device = settings, torch.device(settings.device)
        self.shape, self._dtype = PRESETS[settings.preset], getattr(torch, settings.dtype)
        self._directory, self._longest = directory, longest
        self._cache: CacheEngine | None = None
        self._gates: dict[tuple[bool, bool], Gate] = {}
        self._misses = itertools.count()
        self._route = ""
        self.model = random_model(self.shape, self.device, self._dtype, settings.seed)
        blocks = -(-(2 * self._longest + self._longest // 8 + 4 * settings.page_tokens) // settings.block_tokens)
        self.pool = KVPool(self.shape, blocks, settings.block_tokens, self.device, self._dtype)

    @property
    def cache(self) -> CacheEngine:
        """The cache that is open."""
        assert self._cache is not None, "no cache is open"
        return self._cache

    def describe(self) -> dict[str, Any]:
        """The model, as plain data."""
        return {**dataclasses.asdict(self.shape), "dtype": self.settings.dtype}

    # -- caches ----------------------------------------------------------------------------------------------------

    def config(self, route: str) -> Config:
        """A cache with room for two of the longest prompts on each tier; without a CPU tier on the direct route."""
        settings, section = self.settings, self.section()
        extent = Config.from_dict({"model": section}).model.layout().extent_bytes
        pages = self._longest // settings.page_tokens
        room, ring = (2 * pages + pages // 8 + 16) * extent, max(256 * MIB, 8 * extent)
        ssd = {"path": str(self._directory / route), "capacity": room + room // 4, "route": route}
        if io_cache.in_memory(self._directory):
            ssd["threads"] = RAM_THREADS
        if route == "via_cpu":
            ssd["gds"] = "off"
        return Config.from_dict(
            {
                "model": section,
                "gpu": {"device": str(self.device), "staging": ring, "capacity": room},
                "cpu": {"capacity": room} if route == "via_cpu" else None,
                "ssd": ssd,
                "host_buffer": ring,
                "store": {"queue": room},
                "deadline": _DEADLINE_S,
                "load": {"gate": "off"},
            },
            source="the configuration made for this run",
        )

    def section(self) -> dict[str, Any]:
        """The section `model` of a cache's configuration."""
        named = {"name": self.shape.name, "weights": fingerprint(self.model), "page_tokens": self.settings.page_tokens}
        return named | self.shape.cache_geometry(self.settings.dtype)

    def open_cache(self, route: str) -> None:
        """Open an empty cache in place of the one before. Raises what opening raises: some routes need hardware."""
        self.close_cache()
        self._route = route
        self._cache = CacheEngine.from_config(self.config(route), planes=self.pool.planes)
        layout = self._cache.layout
        costs = {overlap: Costs() for overlap in (True, False)}
        self._gates = {
            (overlap, gate): Gate("enforcing" if gate else "off", costs[overlap], layout.page_tokens, layout.page_bytes)
            for overlap in costs
            for gate in (True, False)
        }

    def close_cache(self) -> None:
        """Close the cache, and delete its files."""
        if self._cache is not None:
            self._cache.close(drain=False)
            self._cache = None
        self.pool.forget()
        if self._route:
            shutil.rmtree(self._directory / self._route, ignore_errors=True)

    def close(self) -> None:
        """Close the cache and give the memory back."""
        self.close_cache()
        del self.model, self.pool
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def install(self, *, overlap: bool, gate: bool) -> None:
        """A gate has figures of its own for each way of running: what one learns is wrong for the other."""
        self.cache.judge_by(self._gates[overlap, gate])

    # -- prompts ---------------------------------------------------------------------------------------------------

    def prompt(self, length: int, cached: int, other: int = 0) -> list[int]:
        """`length` tokens, the first `cached` of them those of the document for prompts of this length."""
        draw, vocab = torch.Generator().manual_seed(self.settings.seed + length), self.shape.vocab
        document = torch.randint(0, vocab, (length,), generator=draw)
        own = torch.randint(0, vocab, (length,), generator=draw)
        own[cached:][:1] = (document[cached:][:1] + 1 + other) % vocab  # no page of the document goes on with it
        return [*document[:cached].tolist(), *own[cached:].tolist()]

    def of(self, cell: Cell) -> tuple[list[int], int]:
        """The prompt of a cell, and how many tokens of it are cached."""
        cached = cached_tokens(cell.prompt, cell.cached, self.settings.page_tokens)
        return self.prompt(cell.prompt, cached), cached

    def prime(self, length: int) -> int:
        """Compute and store the document for prompts of a length, and keep it in the pool; the pages' bytes.

        Raises `IOFailedError` where not all of it reaches every tier.
        """
        self.pool.forget()
        cached = cached_tokens(length, max(CACHED), self.settings.page_tokens)
        self.install(overlap=True, gate=False)
        tokens = self.prompt(length, cached)[: cached + 1]
        self._ask(tokens, EngineOptions(length, 1), self.cache, new_tokens=1)
        return stored_bytes(self.cache, tokens)

    # -- runs ------------------------------------------------------------------------------------------------------

    def plain(self, cell: Cell) -> Answer:
        """The cell's prompt, all of it computed, without a cache."""
        return self._ask(self.of(cell)[0], self._options(cell, store=False, share=False), None)

    def resident(self, cell: Cell) -> Answer:
        """The same with the cached tokens in the engine's own pool: what is left to compute, and nothing else."""
        self.install(overlap=True, gate=False)
        return self._ask(self.of(cell)[0], self._options(cell, store=False, share=True), self.cache)

    def hit(self, cell: Cell) -> Answer:
        """The cell's request, its cached tokens being where the cell says."""
        tokens, cached = self.of(cell)
        if cell.where in SWITCHED:
            self.place(tokens, cached, cell.where)
            self.install(overlap=cell.overlap, gate=cell.gate)
            ask = functools.partial(self._ask, tokens, self._options(cell, store=False, share=False), self.cache)
        else:
            ask = functools.partial(self.resident, cell)
        return beside(cell.beside, ask)() if cell.beside else ask()

    def miss(self, cell: Cell, *, cached: bool) -> Answer:
        """A request that hits nothing, in four chunks, and is stored meanwhile; or, not `cached`, without a cache."""
        options = self._options(cell, store=cached, share=False)
        options, (tokens, _) = dataclasses.replace(options, chunk_tokens=max(1, cell.prompt // 4)), self.of(cell)
        if not cached:
            return self._ask(tokens, options, None, new_tokens=1)
        self.install(overlap=True, gate=False)
        salt = f"miss {next(self._misses)}"
        answer = self._ask(tokens, options, self.cache, salt, new_tokens=1)
        self.cache.invalidate(self.cache.namespace(salt))
        return answer

    def learn(self, length: int) -> None:
        """Show the gates what prefills and loads take: misses and hits of several lengths, with overlap and without."""
        size = self.settings.page_tokens
        places = ("ssd_direct",) if self._route == "direct" else SWITCHED[:2]
        most, cell = cached_tokens(length, max(CACHED), size), Cell(length, 0, "none", overlap=True, gate=False)
        for overlap, part in itertools.product((True, False), _LEARNT_PARTS):
            options = self._options(dataclasses.replace(cell, overlap=overlap), store=False, share=False)
            self.install(overlap=overlap, gate=False)
            salt = f"miss {next(self._misses)}"
            self._ask(self.prompt(max(2, length // part), 0), options, self.cache, salt, new_tokens=1)
            cached = most // part // size * size
            for where in places if cached else ():
                tokens = self.prompt(length, cached, other=part)[: cached + max(2, length // 8)]
                self.place(tokens, cached, where)
                self._ask(tokens, options, self.cache, new_tokens=1)

    def place(self, tokens: Sequence[int], cached: int, where: str) -> None:
        """See to it that the cached pages are found where they are to be hit, the rest of `mixed` on the SSD."""
        manager, some = self.cache.manager, self.cache.pages(tokens)[: cached // self.settings.page_tokens]
        if where in ("cpu", "mixed") and set(manager.peek(some)) != {"cpu"}:
            self._bring(tokens, cached)
        if manager.cpu is not None and where != "cpu":
            with manager.lock:
                gone = some[len(some) // 2 if where == "mixed" else 0 :]
                manager.cpu.index.drop_all([page.key for page in gone], some[0].namespace)
        if where != "cpu" and not self.direct:
            io_cache.drop(self.slabs())
        if manager.peek(some) != expected_tiers(where, len(some)):
            raise IOFailedError(f"pages are not where {where} needs them", "see the log")

    @property
    def direct(self) -> bool:
        """Whether the transport bypasses the page cache."""
        return bool(self.cache.stats()["tiers"]["ssd"]["transport"]["direct"])

    def slabs(self) -> list[Path]:
        """The files of the SSD tier's bytes."""
        ssd = self.cache.manager.ssd
        return [] if ssd is None else sorted(ssd.path.glob("slab-*.bin"))

    def _bring(self, tokens: Sequence[int], cached: int) -> None:
        """Load pages once, which leaves them in the CPU tier."""
        self.install(overlap=True, gate=False)
        blocks = self.pool.take(cached // self.pool.block_tokens)
        assert blocks is not None, "the pool has room for two prompts"
        load = self.cache.load(self.cache.lookup(tokens[:cached]), blocks)
        load.result()
        load.release_event.synchronize(_DEADLINE_S)
        self.pool.release(blocks)

    def _options(self, cell: Cell, *, store: bool, share: bool) -> EngineOptions:
        """One chunk a prompt: a load is overlapped with the chunk behind it, and with no later one."""
        return EngineOptions(cell.prompt, 1, cell.overlap, share=share, store=store, deadline=_DEADLINE_S)

    def _ask(
        self,
        tokens: Sequence[int],
        options: EngineOptions,
        cache: CacheEngine | None,
        salt: str = "",
        *,
        new_tokens: int = 0,
    ) -> Answer:
        waits: list[float] = []

        def observe(name: str, number: int, seconds: float) -> None:
            if name == "wait":
                waits.append(seconds)

        engine = InferenceEngine(self.model, self.pool, cache, options, observe)
        self.idle()
        with contextlib.closing(engine):
            request = engine.submit(tokens, new_tokens or self.settings.new_tokens, salt)
            engine.run()
            if cache is not None:
                cache.drain(_DEADLINE_S)
        return Answer(
            request.first_token - request.submitted,
            request.finished - request.submitted,
            tuple(request.generated),
            tuple(request.margins),
            dict(request.sources),
            tuple(waits),
            request.recomputed,
        )

    def idle(self) -> None:
        """Wait for everything on the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
