"""Host time of `wait` for a layer when several requests are loaded at once, by `load_many`. For `bench ttft`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from gdscache.commands.bench.ttft_answers import percentiles
from gdscache.commands.bench.ttft_cells import Cell
from gdscache.commands.toy_engine.batching import batch_of
from gdscache.commands.toy_engine.request import Request
from gdscache.pages.hit import Hit

if TYPE_CHECKING:
    from gdscache.commands.bench.ttft_client import EngineClient

REQUESTS = 4


def after(cell: Cell) -> bool:
    """Whether that is measured after a cell: once for each length of prompt."""
    return cell.where == "cpu" and cell.cached == 50 and cell.overlap and not cell.gate


def measure(client: EngineClient, cell: Cell) -> dict[str, Any]:
    """`REQUESTS` hits of the CPU tier in one load, and one forward pass over the tokens behind them, some times.

    Each request has a quarter of the cell's cached tokens, and about as many behind them.
    Plain data: `prompt_tokens`, `requests`, `cached_tokens` and `tokens` of each, and the seconds of a wait.
    """
    size, cache, pool = client.settings.page_tokens, client.cache, client.pool
    tokens, cached = client.of(cell)
    part = max(size, cached // REQUESTS // size * size)
    more = min(part, len(tokens) - part)
    client.place(tokens, part, "cpu")
    client.install(overlap=True, gate=False)
    waits: list[float] = []
    for number in range(client.settings.repeat + 1):
        requests: list[Request] = []
        batch: list[tuple[Hit, list[int]]] = []
        for _ in range(REQUESTS):
            request = Request(tokens[: part + more], part + more, 1, computed=part)
            request.blocks = pool.take(-(-(part + more) // pool.block_tokens)) or []
            request.places = client.pool.places(request.blocks)
            requests.append(request)
            batch.append((cache.lookup(tokens[:part]), request.blocks[: part // pool.block_tokens]))
        client.idle()
        load = cache.load_many(batch)

        def ready(layer: int, load: Any = load, counted: bool = number > 0) -> None:
            start = time.perf_counter()
            load.wait(layer)
            if counted:
                waits.append(time.perf_counter() - start)

        with torch.inference_mode():
            client.model(batch_of([(r, more) for r in requests], client.device), pool.rows, ready)
        load.result()
        client.idle()
        for request in requests:
            pool.release(request.blocks)
    return {
        "prompt_tokens": cell.prompt,
        "requests": REQUESTS,
        "cached_tokens": part,
        "tokens": more,
        "wait_seconds": percentiles(waits),
    }
