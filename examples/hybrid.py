"""An engine of your own for a hybrid model: one layer in three attends to all tokens, two to the last 96.

    python examples/hybrid.py

Each group of layers has planes and a block table of its own. The table of the windows lets blocks go as the prompt
grows, as an engine does that has more prompts than memory. The "attention" writes numbers that follow from token,
position and layer, so that every row that a layer may look at can be checked.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from gdscache import HybridEngine

LAYERS, HEADS, HEAD_DIM = 6, 2, 64
PAGE, WINDOW = 16, 96  # tokens of a page, which is a block here, and of a window
GROUPS = {"full": [2, 5], "window": [0, 1, 3, 4]}
BLOCKS = {"full": 64, "window": 24}  # the windows need fewer


def rows_of(layer: int, tokens: list[int]) -> torch.Tensor:
    """K of all tokens, (tokens, heads, head_dim); V is its negative."""
    phase = torch.tensor(tokens, dtype=torch.float32) * (layer + 1) + torch.arange(len(tokens))
    return (phase[:, None, None] * torch.linspace(0.01, 1.0, HEADS * HEAD_DIM).view(HEADS, HEAD_DIM)).sin()


class ToyEngine:
    """One prompt at a time."""

    def __init__(self, directory: Path) -> None:
        self.group_of = {layer: name for name, layers in GROUPS.items() for layer in layers}
        planes = [
            [torch.zeros(BLOCKS[self.group_of[layer]], PAGE, HEADS, HEAD_DIM) for _ in "kv"] for layer in range(LAYERS)
        ]
        model = {"name": "toy", "layers": LAYERS, "kv_heads": HEADS, "head_dim": HEAD_DIM, "dtype": "float32"}
        groups = [
            {"name": "full", "layers": GROUPS["full"]},
            {"name": "window", "layers": GROUPS["window"], "window": WINDOW},
        ]
        config = {
            "model": {**model, "page_tokens": PAGE, "groups": groups},
            "cpu": {"capacity": "32MiB"},  # of all groups together, as every size
            "ssd": {"path": directory, "capacity": "64MiB"},
            "store": {"window_every": 256},
        }
        self.planes = planes
        self.cache = HybridEngine.from_config(config, planes)

    def serve(self, tokens: list[int], chunk: int = 128) -> str:
        """Prefill a prompt, chunk by chunk; says how many tokens came from the cache."""
        cache, size = self.cache, len(tokens)
        hit = cache.lookup(tokens[: size - 1])  # at least one token is left to compute
        free = {name: list(range(blocks)) for name, blocks in BLOCKS.items()}
        # 1. A block for each page that the hit brings; -1 for those before a window.
        tables = {name: [-1] * pages.start + [free[name].pop() for _ in pages] for name, pages in hit.pages.items()}
        load = cache.load(hit, {name: tables[name][pages.start :] for name, pages in hit.pages.items()})
        # 2. The forward pass of each chunk, layer by layer, as the layers of the hit arrive.
        for begin in range(hit.tokens, size, chunk):
            end = min(size, begin + chunk)
            self.let_go(tables, free, begin)
            for name, table in tables.items():
                table += [free[name].pop() for _ in range(-(-end // PAGE) - len(table))]
            positions = torch.arange(begin, end)
            for layer in range(LAYERS):
                load.wait(layer)
                where = torch.tensor(tables[self.group_of[layer]])[positions // PAGE], positions % PAGE
                rows = rows_of(layer, tokens)[begin:end]
                self.planes[layer][0][where], self.planes[layer][1][where] = rows, -rows
                self.check(layer, tokens, begin, tables)
            # 3. The verdict on the hit, before any output is used.
            assert load.result().tokens == hit.tokens, "a page was bad: compute the prompt again"
            # 4. Store what this chunk filled; blocks may be used again when they were read.
            start = begin // PAGE * PAGE
            filled = {name: table[start // PAGE : end // PAGE] for name, table in tables.items()}
            store = cache.store(tokens[:end], filled, start, keep_at=[hit.parted])
            store.released()
        return f"{hit.tokens:4} of {size} tokens from the cache, pages " + ", ".join(
            f"{name} {pages.start}-{pages.stop}" for name, pages in hit.pages.items()
        )

    def let_go(self, tables: dict[str, list[int]], free: dict[str, list[int]], tokens: int) -> None:
        """Give back the windows' blocks that token number `tokens` and those behind it do not attend to."""
        for page in range(max(0, tokens - WINDOW + 1) // PAGE):
            if tables["window"][page] >= 0:
                free["window"].append(tables["window"][page])
                tables["window"][page] = -1

    def check(self, layer: int, tokens: list[int], begin: int, tables: dict[str, list[int]]) -> None:
        """Every row that token `begin` attends to is right."""
        first = max(0, begin - WINDOW + 1) if self.group_of[layer] == "window" else 0
        positions = torch.arange(first, begin)
        where = torch.tensor(tables[self.group_of[layer]])[positions // PAGE], positions % PAGE
        assert torch.equal(self.planes[layer][0][where], rows_of(layer, tokens)[first:begin]), f"layer {layer} differs"


def main() -> None:
    shared, other = list(range(1000, 1300)), list(range(2000, 2200))
    with tempfile.TemporaryDirectory() as folder:
        engine = ToyEngine(Path(folder))
        with engine.cache:
            print("a prompt            ", engine.serve(shared + other))
            print("again               ", engine.serve(shared + other))
            print("parts at token 300  ", engine.serve(shared + other[::-1]))
            print("parts there as well ", engine.serve(shared + list(range(3000, 3100))))
        engine = ToyEngine(Path(folder))
        with engine.cache:
            print("after a restart     ", engine.serve(shared + other))


if __name__ == "__main__":
    main()
