"""The rows of a transformers cache: loads of their prefixes, and stores of their computed pages.

`PoolRows` are sequences of an engine that owns its pool. `HybridRows` borrow blocks of a `HybridEngine` during a load
or a commit.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import LinearAttentionAndFullAttentionLayer

from gdscache.cuda.streams import record
from gdscache.engine.engine import CacheEngine
from gdscache.engine.hybrid import HybridEngine
from gdscache.engine.hybrid_handles import HybridHit, HybridLoad, HybridStore
from gdscache.errors import DeadlineError, SequenceStateError
from gdscache.groups.base import kept, marks
from gdscache.integrations.transformers_layers import (
    FullStateLayer,
    Layer,
    LayerPart,
    StateLayer,
    States,
    WindowLayer,
    layers_of,
)
from gdscache.pages.keys import as_tokens
from gdscache.store.handle import StoreHandle

_log = logging.getLogger("gdscache")


class PoolRows:
    """Rows that are sequences of an engine with a pool of its own. Their load is verified.

    `layers` hold `cached_tokens` tokens, the length of the shortest prefix. One thread at a time.
    """

    def __init__(self, engine: CacheEngine, prompts: Sequence[Any], salt: str) -> None:
        self._engine = engine
        with contextlib.ExitStack() as opened:
            self._sequences = [opened.enter_context(engine.sequence(prompt, salt)) for prompt in prompts]
            for sequence in self._sequences:
                sequence.verify()
            self.cached_tokens = min(sequence.cached_tokens for sequence in self._sequences)
            self._done = [sequence.cached_tokens // engine.layout.page_tokens for sequence in self._sequences]
            self.layers = [Layer(planes, len(prompts)) for planes in engine.layout.layers]
            if self.cached_tokens:
                self._take_prefix()
            opened.pop_all()

    @property
    def prompts(self) -> list[list[int]]:
        return [sequence.tokens for sequence in self._sequences]

    @property
    def sources(self) -> dict[str, int]:
        layout, found = self._engine.layout, Counter[str]()
        for sequence in self._sequences:
            report = sequence.load.result() if sequence.load is not None else None
            loaded = report.bytes_by_tier if report is not None else {}
            found["gpu"] += sequence.cached_tokens - (report.tokens if report is not None else 0)
            found.update(
                {tier: nbytes // layout.bytes_in(tier) * layout.page_tokens for tier, nbytes in loaded.items()}
            )
        return {tier: tokens for tier, tokens in found.items() if tokens}

    def commit(self, number: int, row: Any) -> StoreHandle:
        sequence, page_tokens = self._sequences[number], self._engine.layout.page_tokens
        first, last = self._done[number], len(row) // page_tokens
        sequence.append(row[len(sequence) :])
        slots = sequence.slots[first:last].to(self._engine.gpu.planes(0)[0].device)
        for index, layer in enumerate(self.layers if last > first else ()):
            pages = layer.pages(number, range(first, last), page_tokens)
            for plane, states in zip(self._engine.gpu.planes(index), pages, strict=True):
                plane[slots] = states.reshape(last - first, *plane.shape[1:]).to(plane.device)
        handle = sequence.commit()
        self._done[number] = last
        return handle

    def close(self) -> None:
        """Release the engine's pages. Repeated calls are fine."""
        for sequence in self._sequences:
            sequence.close()

    def _take_prefix(self) -> None:
        pages = self.cached_tokens // self._engine.layout.page_tokens
        slots = torch.stack([sequence.slots[:pages] for sequence in self._sequences])
        slots = slots.to(self._engine.gpu.planes(0)[0].device)
        for number, layer in enumerate(self.layers):
            layer.begin([plane[slots] for plane in self._engine.gpu.planes(number)], self.cached_tokens)


class HybridRows:
    """Rows in a `HybridEngine` that allocated its planes. Their load is verified: after a bad page in one row, all
    start from nothing.

    `layers`: the cache's, starting behind `cached_tokens` tokens, the longest prefix of every row. `states`: of
    layers; calls have to end where they are wanted. `parts`: of the model's cache, in the engine's order. One thread at
    a time.
    """

    def __init__(
        self,
        engine: HybridEngine,
        model: torch.nn.Module,
        parts: Sequence[LayerPart],
        prompts: Sequence[Any],
        salt: str,
    ) -> None:
        self._engine, self._salt = engine, salt
        self._tokens = [as_tokens(prompt) for prompt in prompts]
        self._open = True
        self.sources: dict[str, int] = {}
        hits = self._hits()
        self.cached_tokens = hits[0].tokens
        # Windows for other requests: where the prompt ends or parts, and at each `store.window_every`.
        size = len(prompts[0])
        self._ends = engine.window_ends(size, {size - 1, *(hit.parted for hit in hits)})
        self.layers, self._parts = self._made(model, parts, len(prompts))
        self.states = [part for part in self._parts if isinstance(part, States)]
        if self.cached_tokens:
            self._take_prefix(hits)
        self._done = [self.cached_tokens] * len(prompts)

    @property
    def prompts(self) -> list[list[int]]:
        return [row.tolist() for row in self._tokens]

    def cuts(self, past: int, end: int) -> list[int]:
        """The tokens at which a call of the tokens `past ... end-1` is to be cut, for states from which later requests
        begin: where this prompt ends or parts, at each `store.window_every` tokens, and where the call ends."""
        return sorted(one for one in self._ends | self._engine.window_ends(end, ()) if past < one < end)

    def ended(self, end: int) -> None:
        """A call that ends at token `end` has ended, and the layers keep the state behind it."""
        engine = self._engine
        if end % engine.alignment == 0:
            if end in marks(engine.window_every, engine.alignment, end + 1):
                self._ends.add(end)
            for part in self.states:
                part.take(end, passing=end not in self._ends)

    def commit(self, number: int, row: Any) -> HybridStore:
        """Store the full pages of a row, and its windows and states as far as the layers have them: see
        `GdsCache.commit`. Returns when the pages were read."""
        if not self._open:
            raise SequenceStateError("the cache was closed", "open another one")
        engine, start, length = self._engine, self._done[number], len(row)
        ends = self._ends | {length // engine.alignment * engine.alignment}
        slots: dict[str, Any] = {}
        with self._borrowed() as (take, used):
            for group in engine.groups:
                size = group.page_tokens
                first, stop = start // size, length // size
                parts = [self._parts[layer] for layer in group.layers]
                pages = [
                    page
                    for page in kept(group, ends, first, stop)
                    if all(part.has(page * size, (page + 1) * size) for part in parts)
                ]
                table = slots[group.name] = np.full(stop - first, -1, np.int64)
                if pages:
                    table[np.array(pages) - first] = blocks = take(group.name, len(pages))
                    for index, part in zip(group.layers, parts, strict=True):
                        for plane, rows in zip(engine.planes[index], part.pages(number, pages, size), strict=True):
                            rows = rows.reshape(len(pages), *plane.shape[1:])
                            plane[torch.tensor(blocks, device=plane.device)] = rows.to(plane.device)
            handle = engine.store(row, slots, start, self._salt, keep_at=ends)
            used.append(handle)
        self._tokens[number] = row
        self._done[number] = length // engine.alignment * engine.alignment
        for part in self.states:
            part.forget(min(self._done))
        return handle

    def reset(self) -> None:
        for part in self.states:
            part.reset()

    def close(self) -> None:
        """Refuse further commits. Repeated calls are fine."""
        self._open = False

    def _made(
        self, model: torch.nn.Module, parts: Sequence[LayerPart], rows: int
    ) -> tuple[list[Any], list[Layer | WindowLayer | States]]:
        """The layers of the cache, and their parts. Layers without parts are transformers' own."""
        engine, device = self._engine, next(model.parameters()).device
        groups = {layer: group for group in engine.groups for layer in group.layers}
        layers: list[Any] = list(layers_of(model).layers)
        found: list[Layer | WindowLayer | States] = []
        for number, (part, planes) in enumerate(zip(parts, engine.config.model.layout().layers, strict=True)):
            group, theirs = groups[number], type(layers[part.layer])
            if part.keeps == "window":
                layers[part.layer] = WindowLayer(planes, rows, group, engine.alignment, self._ends)
            elif part.keeps == "all":
                both = theirs is LinearAttentionAndFullAttentionLayer
                layers[part.layer] = (FullStateLayer if both else Layer)(planes, rows)
            elif theirs is not FullStateLayer:  # made by the part before
                layers[part.layer] = StateLayer()
            own = layers[part.layer]
            found.append(States(own, planes, rows, group.page_tokens, device) if part.keeps == "state" else own)
        return layers, found

    def _hits(self) -> list[HybridHit]:
        """A hit of each row, all of one length: all tokens but the last at most."""
        most = len(self._tokens[0]) - 1
        while True:
            hits = [self._engine.lookup(row[:most], salt=self._salt) for row in self._tokens]
            least = min(hit.tokens for hit in hits)
            if all(hit.tokens == least for hit in hits):
                return hits
            most = least

    @contextlib.contextmanager
    def _borrowed(self) -> Iterator[tuple[Any, list[HybridLoad | HybridStore]]]:
        """`take(group, pages)` of the engine, and a list for the loads and stores that use these blocks. The blocks are
        given back when nothing uses them; if a transfer hangs, they are kept for good."""
        engine, taken = self._engine, list[tuple[str, list[int]]]()
        used: list[HybridLoad | HybridStore] = []

        def take(group: str, pages: int) -> list[int]:
            blocks = engine.take(group, pages)
            taken.append((group, blocks))
            return blocks

        try:
            yield take, used
        finally:
            try:
                for one in used:
                    if isinstance(one, HybridLoad):
                        one.cancel()  # for a failed load of another row
                    one.released(engine.config.deadline)
            except DeadlineError as error:
                _log.error("blocks of a transformers cache are kept, since their transfer hangs: %s", error)
            else:
                event = record(engine.planes[0][0].device)
                if event is not None:
                    event.synchronize()
                for group, blocks in taken:
                    engine.give(group, blocks)

    def _take_prefix(self, hits: Sequence[HybridHit]) -> None:
        """Load row after row, through the same blocks."""
        engine, found = self._engine, Counter[str]()
        pages: list[list[list[torch.Tensor]]] = [[] for _ in self._parts]  # of each layer, of each row
        for hit in hits:
            with self._borrowed() as (take, used):
                table = {name: take(name, len(numbers)) for name, numbers in hit.pages.items()}
                load = engine.load(hit, table)
                used.append(load)
                report = load.result()
                if not report.tokens:
                    self.cached_tokens = 0
                    return
                whole = sum(report.bytes_by_tier.values())
                found.update({t: round(report.tokens * n / whole) for t, n in report.bytes_by_tier.items()})
                for group in engine.groups:
                    blocks = torch.tensor([table[group.name]], dtype=torch.int64, device="cpu")
                    for index in group.layers:
                        pages[index].append([plane[blocks.to(plane.device)] for plane in engine.planes[index]])
        for part, rows in zip(self._parts, pages, strict=True):
            part.begin(
                [torch.cat(plane) if len(rows) > 1 else plane[0] for plane in zip(*rows, strict=True)], hit.tokens
            )
        self.sources = {tier: tokens for tier, tokens in found.items() if tokens}
