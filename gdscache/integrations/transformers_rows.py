"""The rows of a transformers cache: where their prefixes come from, and where what was computed goes.

`PoolRows` are sequences of an engine that owns its pool. `HybridRows` borrow blocks of a `HybridEngine` for as long as
a hit is loaded, or a commit is stored.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from gdscache.cuda.streams import record
from gdscache.engine import CacheEngine
from gdscache.errors import DeadlineError, SequenceStateError
from gdscache.groups.base import kept
from gdscache.hybrid import HybridEngine
from gdscache.hybrid_handles import HybridHit, HybridLoad, HybridStore
from gdscache.integrations.transformers_layers import Layer, WindowLayer
from gdscache.pages.keys import as_tokens
from gdscache.store.handle import StoreHandle

_log = logging.getLogger("gdscache")


class PoolRows:
    """Rows that are sequences of an engine with a pool of its own. Their load is verified.

    `layers` hold `cached_tokens` tokens, as many as the shortest of their prefixes has. One thread at a time.
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
        """The token ids of the rows, with what was committed since."""
        return [sequence.tokens for sequence in self._sequences]

    @property
    def sources(self) -> dict[str, int]:
        """Tokens of the prefixes found, by the tier that they came from, over all rows."""
        layout, found = self._engine.layout, Counter[str]()
        for sequence in self._sequences:
            report = sequence.load.result() if sequence.load is not None else None
            loaded = report.bytes_by_tier if report is not None else {}
            found["gpu"] += sequence.cached_tokens - (report.tokens if report is not None else 0)
            found.update({tier: nbytes // layout.page_bytes * layout.page_tokens for tier, nbytes in loaded.items()})
        return {tier: tokens for tier, tokens in found.items() if tokens}

    @property
    def load_seconds(self) -> float:
        """Seconds that the slowest row's load took, 0.0 when nothing was loaded."""
        return max((s.load.result().seconds for s in self._sequences if s.load is not None), default=0.0)

    def commit(self, number: int, row: Any) -> StoreHandle:
        """Store the full pages of a row: see `GdsCache.commit`."""
        sequence, page_tokens = self._sequences[number], self._engine.layout.page_tokens
        first, last = self._done[number], len(row) // page_tokens
        sequence.append(row[len(sequence) :])
        slots = sequence.slots[first:last].to(self._engine.gpu.planes(0)[0].device)
        for index, layer in enumerate(self.layers if last > first else ()):
            for plane, states in zip(self._engine.gpu.planes(index), (layer.keys, layer.values), strict=True):
                states = states[number, :, first * page_tokens : last * page_tokens].transpose(0, 1)
                plane[slots] = states.reshape(last - first, page_tokens, *plane.shape[2:]).to(plane.device)
        handle = sequence.commit()
        self._done[number] = last
        return handle

    def close(self) -> None:
        """Release the engine's pages. Twice is fine."""
        for sequence in self._sequences:
            sequence.close()

    def _take_prefix(self) -> None:
        pages = self.cached_tokens // self._engine.layout.page_tokens
        slots = torch.stack([sequence.slots[:pages] for sequence in self._sequences])
        slots = slots.to(self._engine.gpu.planes(0)[0].device)
        for number, layer in enumerate(self.layers):
            keys, values = (as_heads(plane[slots].flatten(1, 2)) for plane in self._engine.gpu.planes(number))
            layer.begin(keys, values, self.cached_tokens)


class HybridRows:
    """Rows in a `HybridEngine` that allocated its planes. Their load is verified: where a page of one is bad, all start
    from nothing.

    `layers` begin behind `cached_tokens` tokens, the longest prefix that every row has. One thread at a time.
    """

    def __init__(self, engine: HybridEngine, prompts: Sequence[Any], salt: str) -> None:
        self._engine, self._salt = engine, salt
        self._tokens = [as_tokens(prompt) for prompt in prompts]
        self._open = True
        self.sources: dict[str, int] = {}
        self.load_seconds = 0.0
        hits = self._hits()
        self.cached_tokens = hits[0].tokens
        # Windows that serve other requests: where the prompt ends or parts, and at each `store.window_every`.
        size = len(prompts[0])
        self._ends = engine.window_ends(size, {size - 1, *(hit.parted for hit in hits)})
        groups = {layer: group for group in engine.groups for layer in group.layers}
        self.layers = [
            WindowLayer(planes, len(prompts), groups[number], engine.alignment, self._ends)
            if groups[number].keeps == "window"
            else Layer(planes, len(prompts))
            for number, planes in enumerate(engine.config.model.layout().layers)
        ]
        if self.cached_tokens:
            self._take_prefix(hits)
        self._done = [self.cached_tokens] * len(prompts)

    @property
    def prompts(self) -> list[list[int]]:
        """The token ids of the rows, with what was committed since."""
        return [row.tolist() for row in self._tokens]

    def commit(self, number: int, row: Any) -> HybridStore:
        """Store the full pages of a row, and of windows those that the layers have: see `GdsCache.commit`. Returns when
        the pages were read."""
        if not self._open:
            raise SequenceStateError("the cache was closed", "open another one")
        engine, start, length = self._engine, self._done[number], len(row)
        ends = self._ends | {length // engine.alignment * engine.alignment}
        slots: dict[str, Any] = {}
        with self._borrowed() as (take, used):
            for group in engine.groups:
                size = group.page_tokens
                first, stop = start // size, length // size
                layers = [self.layers[layer] for layer in group.layers]
                pages = [
                    page
                    for page in kept(group, ends, first, stop)
                    if all(layer.has(page * size, (page + 1) * size) for layer in layers)
                ]
                table = slots[group.name] = np.full(stop - first, -1, np.int64)
                if pages:
                    table[np.array(pages) - first] = blocks = take(group.name, len(pages))
                    for index, layer in zip(group.layers, layers, strict=True):
                        for plane, states in zip(engine.planes[index], layer.pages(number, pages, size), strict=True):
                            rows = states.transpose(1, 2).reshape(len(pages), size, *plane.shape[2:])
                            plane[torch.tensor(blocks, device=plane.device)] = rows.to(plane.device)
            handle = engine.store(row, slots, start, self._salt, keep_at=ends)
            used.append(handle)
        self._tokens[number] = row
        self._done[number] = length // engine.alignment * engine.alignment
        return handle

    def close(self) -> None:
        """Nothing can be committed any more. Twice is fine."""
        self._open = False

    # -- inside --------------------------------------------------------------------------------------------------------

    def _hits(self) -> list[HybridHit]:
        """A hit of each row, of one length: all tokens but the last at most."""
        most = len(self._tokens[0]) - 1
        while True:
            hits = [self._engine.lookup(row[:most], salt=self._salt) for row in self._tokens]
            least = min(hit.tokens for hit in hits)
            if all(hit.tokens == least for hit in hits):
                return hits
            most = least

    @contextlib.contextmanager
    def _borrowed(self) -> Iterator[tuple[Any, list[HybridLoad | HybridStore]]]:
        """`take(group, pages)` of the engine, and a list for the loads and stores that use these blocks. They are given
        back when nothing uses them; where a transfer hangs, they are kept for good."""
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
                        one.cancel()  # where a load of another row failed
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
        engine = self._engine
        with self._borrowed() as (take, used):
            tables: list[dict[str, list[int]]] = []
            loads: list[HybridLoad] = []
            for hit in hits:
                tables.append({name: take(name, len(pages)) for name, pages in hit.pages.items()})
                loads.append(engine.load(hit, tables[-1]))
                used.append(loads[-1])
            reports = [load.result() for load in loads]
            self.load_seconds = max(report.seconds for report in reports)
            if not all(report.tokens for report in reports):
                self.cached_tokens = 0
                return
            found = Counter[str]()
            for report in reports:
                whole = sum(report.bytes_by_tier.values())
                found.update({t: round(report.tokens * n / whole) for t, n in report.bytes_by_tier.items()})
            self.sources = {tier: tokens for tier, tokens in found.items() if tokens}
            for group in engine.groups:
                blocks = torch.tensor([table[group.name] for table in tables], dtype=torch.int64, device="cpu")
                for index in group.layers:
                    own = (plane[blocks.to(plane.device)] for plane in engine.planes[index])
                    keys, values = (as_heads(rows.flatten(1, 2)) for rows in own)
                    self.layers[index].begin(keys, values, self.cached_tokens)


def as_heads(rows: torch.Tensor) -> torch.Tensor:
    """(rows, tokens, heads, head_dim) or (rows, tokens, width) as (rows, heads, tokens, head_dim); a view."""
    return rows.transpose(1, 2) if rows.dim() == 4 else rows.unsqueeze(1)
