"""The client of `gdscache bench ttft --engine transformers`: a Llama of random weights with a cache on its planes.

Prompts of one length begin with the same document, up to the cached length, and continue with different tokens. The
document is computed and stored once. It also stays in blocks of the planes, for runs with a resident prefix.
transformers concatenates a layer's keys and values, so a forward pass begins each layer with a copy from the planes: of
a hit's loaded pages, or of resident ones.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from gdscache import CacheEngine, Config, LayerwiseLoad
from gdscache.commands.bench import machine
from gdscache.commands.bench.figures import idle
from gdscache.commands.bench.io import RAM_THREADS
from gdscache.commands.bench.shapes import LLAMAS
from gdscache.commands.bench.ttft_cells import CACHED, SWITCHED, Answer, Cell, Settings, cached_tokens
from gdscache.disk.slab import slab_name
from gdscache.errors import IOFailedError, MissingPackageError
from gdscache.gate.costs import Costs
from gdscache.gate.gate import Gate
from gdscache.pages.layout import PLAIN, Plane, is_plain
from gdscache.pages.planes import PagedPlanes
from gdscache.sizes import MIB
from gdscache.store.handle import StoreHandle

try:
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel

    from gdscache.integrations.transformers import model_section
    from gdscache.integrations.transformers_layers import Layer
except ImportError as error:
    raise MissingPackageError(
        f"bench ttft measures transformers, which cannot be imported: {error}", "install gdscache[hf]"
    ) from error

Planes = Sequence[torch.Tensor]
_DEADLINE_S = 600.0
_LEARNT_PARTS = (8, 4, 2, 1)  # of a prompt: lengths for the gate to learn from
_CHUNKS = 4  # of a miss: three of them are stored during the next one


class TransformersClient:
    """The model, its planes and a cache, while open."""

    def __init__(self, settings: Settings, directory: Path) -> None:
        """Raises as `CacheEngine.from_config`."""
        self.settings, self.device = settings, torch.device(settings.device)
        self._ssd = directory / "ssd"
        self.in_memory = machine.in_memory(directory)  # the SSD tier lies on a RAM disk
        self._misses = itertools.count()
        self.model = _model(settings, self.device)
        name, dtype = settings.preset, settings.dtype
        weights, size = f"random, seed {settings.seed}", settings.page_tokens
        section = model_section(self.model.config, dtype=dtype, name=name, weights=weights, page_tokens=size)
        section["pack"] = "on" if settings.pack else "off"
        self._vocab = self.model.config.vocab_size
        self.layout = Config.from_dict({"model": section}).model.layout()
        pages = settings.pages
        self._request, self._document = list(range(pages)), list(range(pages, 2 * pages))
        self.planes = PagedPlanes.allocate(self.layout, 2 * pages, self.device).tensors
        config = self._config(section, settings.tier_pages * self.layout.extent_bytes)
        self.cache = CacheEngine.from_config(config, planes=self.planes)
        costs = {overlap: Costs() for overlap in (True, False)}
        self._gates = {
            (overlap, gate): Gate("enforcing" if gate else "off", costs[overlap], size, self.layout.bytes_in)
            for overlap in costs
            for gate in (True, False)
        }

    def _config(self, section: dict[str, Any], room: int) -> Config:
        """A cache with `room` bytes on each tier, and a quarter more on the SSD. Loads go through the CPU tier."""
        ring = max(256 * MIB, 8 * self.layout.extent_bytes)
        ssd: dict[str, Any] = {"path": str(self._ssd), "capacity": room + room // 4, "route": "via_cpu", "gds": "off"}
        if self.in_memory:
            ssd["threads"] = RAM_THREADS
        return Config.from_dict(
            {
                "model": section,
                "gpu": {"device": str(self.device), "staging": ring, "capacity": room},
                "cpu": {"capacity": room},
                "ssd": ssd,
                "host_buffer": ring,
                "store": {"queue": room},
                "deadline": _DEADLINE_S,
                "load": {"gate": "off"},
            },
            source="the configuration made for this run",
        )

    def close(self) -> None:
        self.cache.close(drain=False)
        del self.model, self.planes
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def install(self, *, overlap: bool, gate: bool) -> None:
        """Install the gate of this way of running: each way has its own, because their times differ."""
        self.cache.judge_by(self._gates[overlap, gate])

    # -- prompts -------------------------------------------------------------------------------------------------------

    def prompt(self, length: int, cached: int, other: int = 0) -> list[int]:
        """`length` tokens. The first `cached` of them are the document's for this length."""
        draw, vocab = torch.Generator().manual_seed(self.settings.seed + length), self._vocab
        document = torch.randint(0, vocab, (length,), generator=draw)
        own = torch.randint(0, vocab, (length,), generator=draw)
        own[cached:][:1] = (document[cached:][:1] + 1 + other) % vocab  # no page of the document follows the prefix
        return [*document[:cached].tolist(), *own[cached:].tolist()]

    def of(self, cell: Cell) -> tuple[list[int], int]:
        """A cell's prompt, and the number of its cached tokens."""
        cached = cached_tokens(cell.prompt_tokens, cell.cached_percent, self.settings.page_tokens)
        return self.prompt(cell.prompt_tokens, cached), cached

    def prime(self, length: int) -> int:
        """Compute and store the document for prompts of a length, and keep it in the planes. Returns the pages' bytes.
        Raises `IOFailedError` unless all pages reach every tier."""
        cached = cached_tokens(length, max(CACHED), self.settings.page_tokens)
        self.install(overlap=True, gate=False)
        tokens = self.prompt(length, cached)[:cached]
        layers = self._layers((), 0)
        self._forward(self._ids(tokens), layers)
        layers.write_pages(0, self._document[: cached // self.settings.page_tokens])
        self.cache.store(tokens, self._document[: cached // self.settings.page_tokens]).result(_DEADLINE_S)
        self.cache.drain(_DEADLINE_S)
        pages, tiers = self.cache.pages(tokens), self.cache.manager.tiers
        for name in (name for name in tiers if not is_plain(name)):
            twins = [tiers[one] for one in (name, name + PLAIN) if one in tiers]
            if missing := sum(all(page.key not in twin.index for twin in twins) for page in pages):
                raise IOFailedError(f"{missing} of {len(pages)} pages did not reach the {name} tier", "see the log")
        return len(pages) * self.layout.page_bytes

    # -- runs ----------------------------------------------------------------------------------------------------------

    def plain(self, cell: Cell) -> Answer:
        """Compute the cell's whole prompt without a cache."""
        return self._compute(self.of(cell)[0])

    def resident(self, cell: Cell) -> Answer:
        """Compute the cell's prompt with the cached tokens resident in the planes: only the rest is computed."""
        tokens, cached = self.of(cell)
        blocks = self._document[: cached // self.settings.page_tokens]
        layers = self._layers(blocks, cached)
        return self._compute(tokens, layers, sources={"pool": cached})

    def hit(self, cell: Cell) -> Answer:
        """The cell's request, with its cached tokens in the cell's place."""
        if cell.where not in SWITCHED:
            return self.resident(cell)
        tokens, cached = self.of(cell)
        placed = self.place(tokens, cached, cell.where)
        self.install(overlap=cell.overlap, gate=cell.gate)
        return dataclasses.replace(self._load_and_compute(tokens, overlap=cell.overlap), placed=placed)

    def miss(self, cell: Cell, *, cached: bool) -> Answer:
        """A request without a hit, in chunks that are stored meanwhile; or, not `cached`, without a cache."""
        tokens, _ = self.of(cell)
        size = self.settings.page_tokens
        salt, handles, layers = f"miss {next(self._misses)}", list[StoreHandle](), self._layers((), 0)
        if cached:
            self.install(overlap=True, gate=False)
        idle(self.device)
        begun, kept = time.perf_counter(), 0
        if cached:
            assert not self.cache.lookup(tokens, salt=salt).tokens, "a miss that hits"
        ids, step = self._ids(tokens), max(1, len(tokens) // _CHUNKS)
        for at in range(0, len(tokens), step):
            logits = self._forward(ids[at : at + step], layers)
            if cached and (ready := min(at + step, len(tokens)) // size) > kept:
                blocks = self._request[kept:ready]
                layers.write_pages(kept * size, blocks)
                handles.append(self.cache.store(tokens[: ready * size], blocks, kept * size, salt))
                kept = ready
        token, margin = _best(logits)
        ended = time.perf_counter() - begun
        if cached:
            for handle in handles:
                handle.result(_DEADLINE_S)
            self.cache.drain(_DEADLINE_S)
            self.cache.invalidate(self.cache.namespace(salt))
        return Answer(ended, (token,), (margin,), {}, (), 0)

    def learn(self, length: int) -> None:
        """Train the gates on times of prefills and loads: misses and hits of several lengths, with overlap and
        without."""
        size = self.settings.page_tokens
        most = cached_tokens(length, max(CACHED), size)
        for overlap, part in itertools.product((True, False), _LEARNT_PARTS):
            self.install(overlap=overlap, gate=False)
            salt = f"miss {next(self._misses)}"
            self._load_and_compute(self.prompt(max(2, length // part), 0), overlap=overlap, salt=salt)
            cached = most // part // size * size
            for where in SWITCHED if cached else ():
                tokens = self.prompt(length, cached, other=part)[: cached + max(2, length // 8)]
                self.place(tokens, cached, where)
                self._load_and_compute(tokens, overlap=overlap)

    def place(self, tokens: Sequence[int], cached: int, where: str) -> dict[str, int]:
        """Move the cached pages to the place of the hit. Returns their bytes by tier: pages that cannot be packed lie
        plain beside the others."""
        manager, some = self.cache.manager, self.cache.pages(tokens)[: cached // self.settings.page_tokens]
        memories = {name for name, tier in manager.tiers.items() if tier.kind == "memory"}
        if where == "cpu" and not memories.issuperset(manager.peek(some)):
            self.install(overlap=True, gate=False)
            hit = self.cache.lookup(tokens[:cached])  # a load leaves its pages in the CPU tier
            self.cache.load(hit, self._request[: len(hit.pages)]).release_event.synchronize(_DEADLINE_S)
        if where != "cpu":
            with manager.lock:
                for name in memories:
                    manager.tiers[name].index.drop_all([page.key for page in some], {some[0].namespace})
            if not self.cache.stats()["tiers"]["ssd"]["transport"]["direct"]:
                machine.drop_cached(self.slab.parent.rglob(self.slab.name))
        found = manager.peek(some)
        if len(found) < len(some) or any((name in memories) != (where == "cpu") for name in found):
            raise IOFailedError(f"pages are not where {where} needs them", "see the log")
        return {name: found.count(name) * self.layout.bytes_in(name) for name in dict.fromkeys(found)}

    @property
    def slab(self) -> Path:
        return self._ssd / slab_name(0)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _load_and_compute(self, tokens: Sequence[int], *, overlap: bool, salt: str = "") -> Answer:
        """A request with its cached pages loaded. The gate learns the prefill's time."""
        cache, waits = self.cache, list[float]()
        idle(self.device)
        begun = time.perf_counter()
        ids = self._ids(tokens)
        hit = cache.lookup(tokens, salt=salt)
        pages = min(len(hit.pages), (len(tokens) - 1) // self.settings.page_tokens)  # one token at least is computed
        if not pages:
            answer = self._compute(tokens, begun=begun, ids=ids)
            cache.observe_prefill(len(tokens), 0, answer.ttft)
            return answer
        blocks = self._request[:pages]
        load = cache.load(hit, blocks)
        if not overlap:
            load.result(_DEADLINE_S)

        def wait(layer: int) -> None:
            start = time.perf_counter()
            load.wait(layer)
            waits.append(time.perf_counter() - start)

        layers = self._layers(blocks, load.tokens, wait if overlap else None)
        lead = time.perf_counter() - begun
        answer = self._compute(tokens, layers, begun=begun, ids=ids, load=load, waits=waits)
        report = load.result(_DEADLINE_S)
        if report.tokens == load.tokens:
            seconds, beside = (answer.ttft, report.seconds) if overlap else (answer.ttft - lead, None)
            cache.observe_prefill(len(tokens) - load.tokens, load.tokens, seconds, beside)
        load.release_event.synchronize(_DEADLINE_S)
        return answer

    def _compute(
        self,
        tokens: Sequence[int],
        layers: _Layers | None = None,
        *,
        begun: float | None = None,
        ids: torch.Tensor | None = None,
        load: LayerwiseLoad | None = None,
        waits: Sequence[float] = (),
        sources: dict[str, int] | None = None,
    ) -> Answer:
        """Compute the rest of a prompt and the first answered tokens. `begun`: time of the request's arrival, None for
        now; `load`: its verdict comes before the first token."""
        layers = self._layers((), 0) if layers is None else layers
        if begun is None:
            idle(self.device)
            begun = time.perf_counter()
        ids = self._ids(tokens) if ids is None else ids
        found = [_best(self._forward(ids[layers.get_seq_length() :], layers))]
        recomputed = 0
        if load is not None:
            report, page = load.result(_DEADLINE_S), self.layout
            recomputed = load.tokens - report.tokens
            sources = {
                tier: n // page.bytes_in(tier) * page.page_tokens for tier, n in report.bytes_by_tier.items() if n
            }
        first = time.perf_counter() - begun
        while len(found) < self.settings.new_tokens:
            found.append(_best(self._forward(self._ids([found[-1][0]]), layers)))
        answered, margins = zip(*found, strict=True)
        return Answer(first, answered, margins, sources or {}, tuple(waits), recomputed)

    def _layers(self, blocks: Sequence[int], cached: int, ready: Callable[[int], None] | None = None) -> _Layers:
        """A transformers cache whose first `cached` tokens are in these blocks of the planes. `ready(layer)` returns
        when (or queues a wait until) the layer's are loaded."""
        slots = torch.tensor([list(blocks)], dtype=torch.int64, device=self.device) if cached else None
        made = [
            _Layer(kinds, tensors, slots, cached, None if ready is None else functools.partial(ready, number))
            for number, (kinds, tensors) in enumerate(zip(self.layout.layers, self.planes, strict=True))
        ]
        return _Layers(made, self.settings.page_tokens)

    def _ids(self, tokens: Sequence[int]) -> torch.Tensor:
        """int64 (tokens,) on the device. A copy of more than 64 KiB waits for all queued loads: call it before a
        load."""
        return torch.tensor(tokens, dtype=torch.int64, device=self.device)

    @torch.inference_mode()
    def _forward(self, ids: torch.Tensor, layers: _Layers) -> torch.Tensor:
        """Logits of the last token of `ids`, int64 (tokens,): float32 (1, vocabulary)."""
        out = self.model(input_ids=ids[None], past_key_values=layers, use_cache=True, logits_to_keep=1)
        logits: torch.Tensor = out.logits[:, -1].float()
        return logits


class _Layers(DynamicCache):
    def __init__(self, layers: Sequence[_Layer], page_tokens: int) -> None:
        super().__init__()
        self.layer_class_to_replicate = None
        self.own, self.page_tokens = layers, page_tokens
        self.layers = list(layers)

    @torch.inference_mode()
    def write_pages(self, start: int, blocks: Sequence[int]) -> None:
        """Copy computed pages from token `start` on into blocks of the planes."""
        first = start // self.page_tokens
        for layer in self.own:
            pages = layer.pages(0, range(first, first + len(blocks)), self.page_tokens)
            for plane, rows in zip(layer.tensors, pages, strict=True):
                plane[torch.tensor(blocks, dtype=torch.int64, device=plane.device)] = rows


class _Layer(Layer):  # type: ignore[no-untyped-call]
    """A layer of the model's cache. Its first tokens stay in blocks of its tensors until the layer is computed."""

    def __init__(
        self,
        planes: Sequence[Plane],
        tensors: Planes,
        slots: torch.Tensor | None,
        cached: int,
        ready: Callable[[], None] | None,
    ) -> None:
        super().__init__(planes, 1)
        self.tensors, self._slots, self._cached, self._ready = tensors, slots, cached, ready

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized and self._slots is not None:
            if self._ready is not None:
                self._ready()
            self.begin([tensor[self._slots] for tensor in self.tensors], self._cached)
        return super().update(key_states, value_states, *args, **kwargs)

    def get_seq_length(self) -> int:
        return super().get_seq_length() if self.is_initialized else self._cached


def _model(settings: Settings, device: torch.device) -> PreTrainedModel:
    torch.manual_seed(settings.seed)
    shape: dict[str, Any] = {**LLAMAS[settings.preset], "max_position_embeddings": 1 << 18}
    shape |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    shape["initializer_range"] = 2 / math.sqrt(shape["hidden_size"])  # so that tokens attend to some others, not to all
    config = LlamaConfig.from_dict(shape)
    with device:
        model = LlamaForCausalLM._from_config(config, dtype=getattr(torch, settings.dtype))  # type: ignore[no-untyped-call]
    found: PreTrainedModel = model.eval()
    return found


def _best(logits: torch.Tensor) -> tuple[int, float]:
    """The first row's best token, and the difference of its logit to the second best. Waits for the device."""
    values, tokens = logits[0].topk(2)
    best, second = values.tolist()
    return int(tokens[0]), best - second
