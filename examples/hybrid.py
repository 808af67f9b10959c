"""An engine of your own for a hybrid model: of six layers two attend to all tokens, two to the last 96, and two keep a
state in place of tokens.

    python examples/hybrid.py

Each group of layers has planes and a block table of its own. The windows' table releases blocks as the prompt grows,
like an engine with more prompts than memory. A state exists only where a chunk ends, so chunks are cut where the cache
wants one. The "attention" writes numbers that follow from token, position and layer, so that every row that a layer may
read can be checked.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from gdscache import HybridEngine

LAYERS, HEADS, HEAD_DIM, STATE = 6, 2, 64, 32
PAGE, WINDOW = 16, 96  # tokens of a page, which is a block here, and of a window
GROUPS = {"full": [2, 5], "window": [1, 4], "state": [0, 3]}
BLOCKS = {"full": 64, "window": 24, "state": 1}  # the windows need fewer; a state is replaced as tokens come


def rows_of(layer: int, tokens: list[int]) -> torch.Tensor:
    """K of all tokens, (tokens, heads, head_dim); V is its negative."""
    phase = torch.tensor(tokens, dtype=torch.float32) * (layer + 1) + torch.arange(len(tokens))
    return (phase[:, None, None] * torch.linspace(0.01, 1.0, HEADS * HEAD_DIM).view(HEADS, HEAD_DIM)).sin()


def state_of(layer: int, tokens: list[int], state: torch.Tensor) -> torch.Tensor:
    """The state behind some more tokens, (STATE,): whole numbers, so that it can be compared."""
    for token in tokens:
        state = (3 * state + token + torch.arange(STATE) * (layer + 1)) % 8191
    return state


class ToyEngine:
    """One prompt at a time."""

    def __init__(self, directory: Path) -> None:
        self.group_of = {layer: name for name, layers in GROUPS.items() for layer in layers}
        attention = sorted(GROUPS["full"] + GROUPS["window"])
        kinds = [
            {"name": "k", "shape": [HEADS, HEAD_DIM], "layers": attention},
            {"name": "v", "shape": [HEADS, HEAD_DIM], "layers": attention},
            {"name": "state", "shape": [STATE], "layers": GROUPS["state"]},
        ]
        groups = [
            {"name": "full", "layers": GROUPS["full"]},
            {"name": "window", "layers": GROUPS["window"], "window": WINDOW},
            {"name": "state", "layers": GROUPS["state"], "state": True},
        ]
        model = {"name": "toy", "layers": LAYERS, "dtype": "float32", "page_tokens": PAGE}
        config = {
            "model": {**model, "planes": kinds, "groups": groups},
            "cpu": {"capacity": "32MiB"},  # of all groups together, like every size
            "ssd": {"path": directory, "capacity": "64MiB"},
            "store": {"window_every": 256},
        }
        self.planes = [
            [torch.zeros(1, 1, STATE)]  # a block is one state, for any number of tokens a page
            if layer in GROUPS["state"]
            else [torch.zeros(BLOCKS[self.group_of[layer]], PAGE, HEADS, HEAD_DIM) for _ in "kv"]
            for layer in range(LAYERS)
        ]
        self.cache = HybridEngine.from_config(config, self.planes)

    def serve(self, tokens: list[int], chunk: int = 128) -> str:
        """Prefill a prompt, chunk by chunk. Returns a line on the tokens from the cache."""
        cache, size = self.cache, len(tokens)
        hit = cache.lookup(tokens[: size - 1])  # at least one token is left to compute
        free = {name: list(range(blocks)) for name, blocks in BLOCKS.items()}
        # 1. A block for each page of the hit; -1 for pages before a window, and before a state.
        tables = {name: [-1] * pages.start + [free[name].pop() for _ in pages] for name, pages in hit.pages.items()}
        load = cache.load(hit, {name: tables[name][pages.start :] for name, pages in hit.pages.items()})
        # 2. The forward pass of each chunk, layer by layer, as the layers of the hit arrive. Chunks end where the next
        #   prompts may begin: at this one's last page, where another one parted from it, and at `store.window_every`.
        keep_at = [hit.parted, size - 1]
        wanted = cache.window_ends(size, keep_at)
        ends = sorted(
            {end for end in wanted if hit.tokens < end < size} | {*range(hit.tokens + chunk, size, chunk), size}
        )
        for begin, end in zip([hit.tokens, *ends], ends, strict=False):
            self.let_go(tables, free, begin)
            for name in ("full", "window"):
                tables[name] += [free[name].pop() for _ in range(-(-end // PAGE) - len(tables[name]))]
            positions = torch.arange(begin, end)
            for layer in range(LAYERS):
                load.wait(layer)
                self.check(layer, tokens, begin, tables)
                if layer in GROUPS["state"]:
                    before = self.planes[layer][0][0, 0] if begin else torch.zeros(STATE)
                    self.planes[layer][0][0, 0] = state_of(layer, tokens[begin:end], before)
                    continue
                where = torch.tensor(tables[self.group_of[layer]])[positions // PAGE], positions % PAGE
                rows = rows_of(layer, tokens)[begin:end]
                self.planes[layer][0][where], self.planes[layer][1][where] = rows, -rows
            # The state of this chunk's end is a page's, if it ends there. It is in block 0 in any case.
            tables["state"] = [-1] * (end // PAGE)
            if end in wanted:
                tables["state"][-1] = 0
            # 3. The verdict on the hit, before any output is used.
            assert load.result().tokens == hit.tokens, "a page was bad: compute the prompt again"
            # 4. Store the pages that this chunk filled; blocks may be used again when they were read.
            start = begin // PAGE * PAGE
            filled = {name: table[start // PAGE : end // PAGE] for name, table in tables.items()}
            cache.store(tokens[:end], filled, start, keep_at=keep_at).released()
        return f"{hit.tokens:4} of {size} tokens from the cache, pages " + ", ".join(
            f"{name} {pages.start}-{pages.stop}" for name, pages in hit.pages.items()
        )

    def let_go(self, tables: dict[str, list[int]], free: dict[str, list[int]], tokens: int) -> None:
        """Release the windows' blocks that tokens from number `tokens` on do not attend to."""
        for page in range(max(0, tokens - WINDOW + 1) // PAGE):
            if tables["window"][page] >= 0:
                free["window"].append(tables["window"][page])
                tables["window"][page] = -1

    def check(self, layer: int, tokens: list[int], begin: int, tables: dict[str, list[int]]) -> None:
        """Check the state, or every row, that token `begin` attends to."""
        if layer in GROUPS["state"]:
            state = state_of(layer, tokens[:begin], torch.zeros(STATE))
            assert not begin or torch.equal(self.planes[layer][0][0, 0], state), f"layer {layer} differs"
            return
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
