"""An inference engine with paged KV tensors and a block allocator of its own, with gdscache attached beneath them.

    python examples/attach_engine.py

The engine is a toy: its "attention" writes numbers that follow from token, position and layer, so that every row can be
checked. It calls the cache like a real engine, in the same order.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from gdscache import CacheEngine, StoreHandle

LAYERS, HEADS, HEAD_DIM = 4, 2, 64
BLOCK, PAGE = 16, 32  # tokens: the engine's blocks, and the cache's pages of two blocks each
BLOCKS = 24


class ToyEngine:
    """Serves one prompt at a time and keeps nothing between prompts: that is left to the cache."""

    def __init__(self, directory: Path) -> None:
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        shape = (BLOCKS, BLOCK, HEADS, HEAD_DIM)
        self.planes = [
            (torch.zeros(shape, device=self.device), torch.zeros(shape, device=self.device)) for _ in range(LAYERS)
        ]
        self.free = list(range(BLOCKS))
        model = {"name": "toy", "layers": LAYERS, "kv_heads": HEADS, "head_dim": HEAD_DIM, "dtype": "float32"}
        config = {
            "model": {**model, "page_tokens": PAGE},
            "gpu": {"device": self.device, "staging": "16MiB"},
            "cpu": {"capacity": "16MiB"},
            "ssd": {"path": directory, "capacity": "64MiB"},
        }
        self.cache = CacheEngine.from_config(config, planes=self.planes)

    def serve(self, tokens: list[int]) -> tuple[str, StoreHandle]:
        """Prefill a prompt. Returns a line on the tokens' sources, and the store of its pages."""
        blocks = [self.free.pop() for _ in range(-(-len(tokens) // BLOCK))]

        # 1. Which pages are cached? A prompt's last token is always computed: its logits are wanted.
        hit = self.cache.lookup(tokens[:-1])
        # 2. Begin loading into our blocks. The hit was a snapshot: `load.tokens` is the number that is on its way.
        load = self.cache.load(hit, blocks[: hit.tokens // BLOCK])
        # 3. The forward pass: layer by layer, as the layers arrive.
        for layer in range(LAYERS):
            load.wait(layer)
            self.forward(layer, tokens, blocks, start=load.tokens)
        # 4. The verdict, before any output is used. From the first bad page on, the prompt is computed after all: later
        #   tokens were computed on that page.
        report = load.settle(lambda gap: self.recompute(tokens, blocks, gap.first))
        # 5. Store the full pages, in the background. Pages already stored cost nothing. `lookup` finds a page when a
        #   tier has it complete, a moment after this call.
        full = len(tokens) // PAGE * PAGE
        handle = self.cache.store(tokens, blocks[: full // BLOCK])

        self.check(tokens, blocks)
        # 6. The blocks may be used again when the cache has read them.
        handle.release_event.synchronize()
        self.free += blocks
        source = ", ".join(sorted(set(hit.tiers))) or "nowhere"
        return f"{report.tokens:3} of {len(tokens)} tokens from {source}", handle

    def forward(self, layer: int, tokens: list[int], blocks: list[int], start: int) -> None:
        """Write the rows of tokens `start` and following."""
        positions = torch.arange(start, len(tokens))
        where = torch.tensor(blocks)[positions // BLOCK].to(self.device), (positions % BLOCK).to(self.device)
        for plane, rows in zip(self.planes[layer], rows_of(layer, tokens), strict=True):
            plane[where] = rows[start:].to(self.device)

    def recompute(self, tokens: list[int], blocks: list[int], start: int) -> None:
        """The forward pass again, for tokens `start` and following."""
        for layer in range(LAYERS):
            self.forward(layer, tokens, blocks, start)

    def check(self, tokens: list[int], blocks: list[int]) -> None:
        """Check that every row, loaded or computed, is the model's."""
        for layer, planes in enumerate(self.planes):
            for plane, rows in zip(planes, rows_of(layer, tokens), strict=True):
                assert torch.equal(plane[blocks].flatten(0, 1)[: len(tokens)].cpu(), rows), f"layer {layer} differs"

    def close(self) -> None:
        self.cache.close()  # finishes running stores


def rows_of(layer: int, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of all tokens, each (tokens, heads, head_dim): any function of token, position and layer will do."""
    phase = torch.tensor(tokens, dtype=torch.float32) * (layer + 1) + torch.arange(len(tokens))
    angles = phase[:, None, None] * torch.linspace(0.01, 1.0, HEADS * HEAD_DIM).view(HEADS, HEAD_DIM)
    return angles.sin(), angles.cos()


def main(directory: Path) -> None:
    document = [7 * i % 1000 for i in range(200)]
    for run in ("a new engine", "after a restart"):
        engine = ToyEngine(directory)
        print(run)
        for question in range(3):
            prompt = document + [2000 + question] * 40
            served, stored = engine.serve(prompt)
            print(f"  question {question}: {served}")
            # Only for this printout: a server goes on at once, and a prompt that comes before the store is complete
            # finds fewer pages and computes the others again.
            stored.result()
        engine.close()
    print("every row was the one that the model computes")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as fresh:
        main(Path(fresh))
