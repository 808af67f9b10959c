"""Two ranks of tensor parallelism, a process each, and one engine that decides for both.

    python examples/tensor_parallel.py

Each rank holds half of the heads. The leader has the index and no planes; it could as well live in a process with
planes. Here the processes talk by pipes; a real engine sends the orders along with its other messages to the ranks, by
torch.distributed or its own channel. The "attention" writes numbers that follow from token, position, layer and rank,
so that every row can be checked.
"""

from __future__ import annotations

import multiprocessing
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from gdscache import CacheEngine, PageStatus, Rank

RANKS = 2
LAYERS, HEADS, HEAD_DIM = 4, 2, 64  # a rank's
PAGE, BLOCKS = 32, 24  # tokens of a block, which is a page here; blocks


def rows_of(rank: int, layer: int, tokens: list[int]) -> torch.Tensor:
    """K of all tokens on a rank, (tokens, heads, head_dim); V is its negative."""
    phase = torch.tensor(tokens, dtype=torch.float32) * (layer + 1) + torch.arange(len(tokens)) + 0.5 * rank
    angles = phase[:, None, None] * torch.linspace(0.01, 1.0, HEADS * HEAD_DIM).view(HEADS, HEAD_DIM)
    return angles.sin()


def serve(number: int, line: Connection) -> None:
    """A rank: planes of its own, and the leader's orders, in the order of its steps."""
    planes = [[torch.zeros(BLOCKS, PAGE, HEADS, HEAD_DIM) for _ in "kv"] for _ in range(LAYERS)]
    with Rank(planes, rank=number) as rank:
        line.send(rank.address)
        while (step := line.recv()) is not None:
            tokens, blocks, cached, load_order = step
            # 1. Begin the load that the leader decided.
            load = rank.load(load_order)
            # 2. The forward pass, layer by layer, as the layers arrive.
            positions = torch.arange(cached, len(tokens))
            where = torch.tensor(blocks)[positions // PAGE], positions % PAGE
            for layer in range(LAYERS):
                load.wait(layer)
                rows = rows_of(number, layer, tokens)
                planes[layer][0][where], planes[layer][1][where] = rows[cached:], -rows[cached:]
            # 3. The verdict, before any output is used. A page that is bad on one rank is bad: the leader hears of it.
            line.send([status.value for status in load.result().pages])
            # 4. Stored pages are read behind this rank's work so far.
            rank.store(line.recv())
            for layer in range(LAYERS):
                rows = planes[layer][0][blocks].flatten(0, 1)[: len(tokens)]
                assert torch.equal(rows, rows_of(number, layer, tokens)), f"rank {number}, layer {layer} differs"


class Leader:
    """The engine's process: the index, the block numbers, the orders."""

    def __init__(self, directory: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self.lines, self.processes = [], []
        for number in range(RANKS):
            here, there = context.Pipe()
            self.processes.append(context.Process(target=serve, args=(number, there), daemon=True))
            self.processes[-1].start()
            self.lines.append(here)
        model = {"name": "toy", "layers": LAYERS, "kv_heads": HEADS, "head_dim": HEAD_DIM, "dtype": "float32"}
        config = {
            "model": {**model, "page_tokens": PAGE},  # a rank's part of the model
            "cpu": {"capacity": "32MiB"},  # of all ranks together, like every size but gpu.staging
            "ssd": {"path": directory, "capacity": "64MiB"},
        }
        self.cache = CacheEngine.from_config(config, ranks=[line.recv() for line in self.lines])

    def serve(self, tokens: list[int]) -> str:
        """Prefill a prompt on all ranks. Returns a line on the tokens' sources."""
        blocks = [*range(-(-len(tokens) // PAGE))]  # all are free: one prompt at a time
        hit = self.cache.lookup(tokens[:-1])
        load = self.cache.load(hit, blocks[: hit.tokens // PAGE])
        for line in self.lines:
            line.send((tokens, blocks, load.tokens, load.order))
        for line in self.lines:
            assert all(status == PageStatus.LOADED.value for status in line.recv()), "a page is bad: compute it"
        stored = self.cache.store(tokens, blocks[: len(tokens) // PAGE])
        for line in self.lines:
            line.send(stored.order)
        stored.result()  # only for this printout: a server goes on at once
        return f"{load.result().tokens:3} of {len(tokens)} tokens from {', '.join(sorted(set(hit.tiers))) or 'nowhere'}"

    def close(self) -> None:
        self.cache.close()  # finishes running stores
        for line, process in zip(self.lines, self.processes, strict=True):
            line.send(None)
            process.join()


def main(directory: Path) -> None:
    document = [7 * i % 1000 for i in range(200)]
    for run in ("a new engine", "after a restart"):
        leader = Leader(directory)
        print(run)
        for question in range(3):
            print(f"  question {question}: {leader.serve(document + [2000 + question] * 40)}")
        leader.close()
    print(f"every row was the one that the model computes, on {RANKS} ranks")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as fresh:
        main(Path(fresh))
