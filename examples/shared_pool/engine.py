"""An inference engine's process: a prompt a line of JSON on stdin, what became of it on stdout.

    python engine.py CONFIG

What a model would compute is stood in for by bytes that follow from the page's key, so that what comes out of the pool
can be compared with them.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from typing import Any

import torch

import gdscache

BLOCKS = 256


class Toy:
    """Planes, a block a page, and the cache below them."""

    def __init__(self, config: str) -> None:
        self.planes = [[torch.zeros(BLOCKS, 16, 8, 64, dtype=torch.float16) for _ in "kv"] for _ in range(4)]
        self.engine = gdscache.CacheEngine.from_config(config, planes=self.planes)
        self.size = self.engine.layout.page_tokens

    def computed(self, key: bytes, layer: int, plane: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(int.from_bytes(key[:6], "little") + 8 * layer + plane)
        return torch.randint(-99, 99, (16, 8, 64), generator=generator).to(torch.float16)

    def ask(self, prompt: list[int]) -> dict[str, Any]:
        """Serve a prompt: fetch what there is of it anywhere, load that, compute the rest, store it."""
        with self.engine.prefetch(prompt, pin=30.0) as fetch:  # asks the pool, and brings what it has to the CPU tier
            fetch.result()
            hit = fetch.hit()
            blocks = list(range(len(prompt) // self.size))
            loaded = self.engine.load(hit, blocks[: len(hit.pages)]).result()
        pages = self.engine.pages(prompt)
        cached = loaded.tokens // self.size
        right = all(
            torch.equal(self.planes[layer][plane][n], self.computed(pages[n].key, layer, plane))
            for n in range(cached)
            for layer in range(4)
            for plane in range(2)
        )
        for n in range(cached, len(pages)):
            for layer in range(4):
                for plane in range(2):
                    self.planes[layer][plane][n] = self.computed(pages[n].key, layer, plane)
        self.engine.store(prompt, blocks).result()
        self.engine.drain()
        return {"cached": cached, "computed": len(pages) - cached, "from": Counter(fetch.tiers), "right": right}


def main(config: str) -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # the store's library logs
    toy = Toy(config)
    print(json.dumps({"namespace": toy.engine.namespace().hex(), "page_tokens": toy.size}), file=answers)
    for line in sys.stdin:
        print(json.dumps(toy.ask(json.loads(line))), file=answers)
    toy.engine.close()


if __name__ == "__main__":
    main(sys.argv[1])
