"""An inference engine's process: a prompt a line of JSON on stdin, its result on stdout.

    python engine.py CONFIG

Bytes that follow from the page's key stand in for a model's results, so that pages out of the pool can be compared.
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
        """Serve a prompt: fetch its pages from any tier, load them, compute the rest, store it."""
        with self.engine.prefetch(prompt, pin=30.0) as fetch:  # asks the pool, and brings its pages to the CPU tier
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
