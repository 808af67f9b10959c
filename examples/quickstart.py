"""The ten lines of the README, with bytes: one engine stores a prefix, the next one finds it on the SSD.

    python examples/quickstart.py [DIRECTORY]

Needs no GPU and no model: numbers stand in for a model's results.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch

import gdscache


def main(directory: Path) -> None:
    config = {
        "model": {"name": "toy", "layers": 4, "kv_heads": 2, "head_dim": 64, "dtype": "float32", "page_tokens": 16},
        "gpu": {"capacity": "4MiB"},  # on the GPU if there is one, else in host memory
        "cpu": {"capacity": "16MiB"},
        "ssd": {"path": directory, "capacity": "64MiB"},
    }
    tokens = list(range(1000, 1100))  # 100 tokens: 6 full pages, and a tail that is not stored

    with gdscache.CacheEngine.from_config(config) as engine, engine.sequence(tokens) as seq:
        print(f"first engine: {seq.cached_tokens} of {len(seq)} tokens are cached")
        for layer in range(4):
            k, v = engine.gpu.planes(layer)  # each (slots, page_tokens, kv_heads, head_dim)
            k[seq.slots], v[seq.slots] = layer + 0.25, layer + 0.5  # "compute" all pages of this sequence
        seq.commit()  # from here on the pages exist; the engine writes them to the SSD in the background

    with gdscache.CacheEngine.from_config(config) as engine, engine.sequence(tokens) as seq:
        print(f"second engine: {seq.cached_tokens} of {len(seq)} tokens are cached")
        pages = seq.slots[: seq.cached_tokens // 16]
        for layer in range(4):
            seq.wait(layer)  # this layer's cached pages have arrived
            k, v = engine.gpu.planes(layer)
            assert torch.all(k[pages] == layer + 0.25)
            assert torch.all(v[pages] == layer + 0.5)
        seq.commit()  # the verdict: every byte read is the byte that was written
        print("every byte came back from the SSD")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, nargs="?", help="keep the SSD tier here; a temporary one by default")
    given = parser.parse_args().directory
    if given is not None:
        main(given)
    else:
        with tempfile.TemporaryDirectory() as fresh:
            main(Path(fresh))
