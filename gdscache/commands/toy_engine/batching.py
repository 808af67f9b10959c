"""What goes into a step's forward pass, and the blocks that are still in use when their request is over."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from gdscache.commands.toy_engine.model import Batch, Span
from gdscache.commands.toy_engine.pool import KVPool
from gdscache.commands.toy_engine.request import Request
from gdscache.commands.toy_engine.uploads import upload
from gdscache.cuda.streams import Fence


def batch_of(work: Sequence[tuple[Request, int]], device: torch.device) -> Batch:
    """The next so many tokens of each request, as one batch."""
    tokens, positions, places, spans, rows = [], [], [], [], 0
    for request, count in work:
        assert request.places is not None, "a request that runs has blocks"
        start, stop = request.computed, request.computed + count
        tokens += request.tokens[start:stop]
        positions.append(torch.arange(start, stop, device=device))
        places.append(request.places[start:stop])
        spans.append(Span(slice(rows, rows + count), request.places[:stop]))
        rows += count
    return Batch(upload(tokens, device), torch.cat(positions), torch.cat(places), spans)


class Parked:
    """Blocks of requests that are over. They are free when gdscache neither reads nor writes them any more."""

    def __init__(self, pool: KVPool, deadline: float) -> None:
        self._pool, self._deadline = pool, deadline
        self._blocks: deque[tuple[list[int], list[Fence]]] = deque()

    def __bool__(self) -> bool:
        return bool(self._blocks)

    def park(self, blocks: list[int], reads: list[Fence]) -> None:
        """Give these back when `reads` are over."""
        self._blocks.append((blocks, reads))

    def reclaim(self, *, wait: bool = False) -> None:
        """Take back blocks whose last use is over; with `wait`, those of the oldest request in any case."""
        if wait:
            for fence in self._blocks[0][1]:
                fence.synchronize(self._deadline)
        for _ in range(len(self._blocks)):
            blocks, reads = self._blocks.popleft()
            if all(fence.done() for fence in reads):
                self._pool.release(blocks)
            else:
                self._blocks.append((blocks, reads))
