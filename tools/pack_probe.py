"""How fast packed pages go between page-locked memory and a GPU's planes, by csrc/packed.cu: to be run on a GPU, once.

    python tools/pack_probe.py [--grid 24 48 132] [--kv kv.pt]

1 GiB of logical pages of Llama-3-8B's shape, in turns with one page-locked copy of as many bytes, alone and beside
matrix products. Values: normal ones with a scale a channel, or of a real cache (`real_kv.py --save`).
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable

import torch

from gdscache.kernels.packed import PackedKernels
from gdscache.pages.layout import PageLayout, Plane
from gdscache.pages.planes import PagedPlanes

PAGES, SLOTS, LAYERS, PER, RINGS = 128, 512, 32, 4, 4


def values(kv: str | None) -> torch.Tensor:
    """(layers, 2, slots, 64, 8, 128) bfloat16 on the GPU."""
    shape = (LAYERS, 2, SLOTS, 64, 8, 128)
    if kv is None:
        scale = torch.rand(LAYERS, 2, 1, 1, 1, 128, device="cuda").mul(3).exp()
        return torch.cat([(torch.randn(1, *shape[1:], device="cuda") * s).bfloat16() for s in scale.split(1)])
    parts = torch.load(kv)
    made = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
    for layer in range(LAYERS):
        for n, name in enumerate(("keys", "values")):
            real = parts[name][layer % len(parts[name])].transpose(0, 1).reshape(-1).cuda()
            at = torch.arange(made[layer, n].numel(), device="cuda") % real.numel()
            made[layer, n] = real[at].view(shape[2:])
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--grid", type=int, nargs="+", default=[16, 32, 66, 132])
    parser.add_argument("--kv")
    given = parser.parse_args()
    torch.manual_seed(0)
    layout = PageLayout.uniform([Plane(n, (8, 128), "bfloat16") for n in ("k", "v")], LAYERS, 64, packed=True)
    planes = values(given.kv)
    pool = PagedPlanes(layout, [[layer[0], layer[1]] for layer in planes])
    kernels = PackedKernels(pool)
    slots = random.Random(3).sample(range(SLOTS), PAGES)
    blocks = torch.tensor(slots, device="cuda").view(-1, 1)
    extent = layout.extent_bytes
    host = torch.empty((PAGES, extent), dtype=torch.uint8, pin_memory=True)
    ring = torch.empty((RINGS, PER, extent), dtype=torch.uint8, device="cuda")
    digests = torch.zeros((2, PAGES, LAYERS), dtype=torch.int64, device="cuda")
    unfit = torch.zeros(PAGES, dtype=torch.int32, device="cuda")
    copies, work = torch.cuda.Stream(), torch.cuda.Stream(priority=-1)

    def move(name: str, grid: int) -> None:
        load = name == "scatter_packed"
        busy: list[torch.cuda.Event | None] = [None] * RINGS
        first, second = (copies, work) if load else (work, copies)
        for n in range(PAGES // PER):
            some, buffer = slice(n * PER, (n + 1) * PER), ring[n % RINGS]
            with torch.cuda.stream(first):
                if (before := busy[n % RINGS]) is not None:
                    first.wait_event(before)
                if load:
                    buffer.copy_(host[some], non_blocking=True)
                else:
                    kernels.launch(name, buffer, None, blocks[some], digests[0, some], unfit[some], grid, first)
                second.wait_event(first.record_event())
            with torch.cuda.stream(second):
                if load:
                    kernels.launch(name, buffer, None, blocks[some], digests[1, some], unfit[some], grid, second)
                else:
                    host[some].copy_(buffer, non_blocking=True)
                busy[n % RINGS] = second.record_event()
        second.synchronize()

    one_host = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    one_gpu = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")

    def plain(to: torch.Tensor, of: torch.Tensor) -> None:
        with torch.cuda.stream(copies):
            to.copy_(of, non_blocking=True)
        copies.synchronize()

    ways: dict[str, Callable[[], None]] = {
        "copy up": lambda: plain(one_gpu, one_host),
        "copy down": lambda: plain(one_host, one_gpu),
    }
    for grid in given.grid:
        ways[f"load {grid}"] = lambda grid=grid: move("scatter_packed", grid)
        ways[f"store {grid}"] = lambda grid=grid: move("gather_packed", grid)
    keep = planes[:, :, slots].clone()
    move("gather_packed", given.grid[-1])
    planes[:, :, slots] = 0
    move("scatter_packed", given.grid[-1])
    assert torch.equal(planes[:, :, slots].view(torch.int16), keep.view(torch.int16)), "values differ"
    assert torch.equal(digests[0], digests[1]), "sums differ"
    assert not unfit.any(), "pages do not fit"
    print(torch.cuda.get_device_name(), f"extent {extent / (planes[:, :, 0].numel() * 2):.4f} of the plain one")
    square = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
    for beside in (False, True):
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
        for turn in range(9):
            for name in random.sample(list(ways), len(ways)):
                torch.cuda.synchronize()
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                begin.record()
                for _ in range(40 if beside else 0):
                    torch.mm(square, square)
                end.record()
                since = time.perf_counter()
                ways[name]()
                took = time.perf_counter() - since
                torch.cuda.synchronize()
                if turn:
                    found[name].append((took, begin.elapsed_time(end)))
        for name, rows in found.items():
            took = statistics.median(row[0] for row in rows)
            copied = statistics.median(row[0] for row in found["copy up" if "load" in name else "copy down"])
            products = f", products {statistics.median(row[1] for row in rows):.1f} ms" if beside else ""
            print(f"{'beside' if beside else 'alone'} {name}: {(1 << 30) / took / 1e9:.1f} GB/s logical", end="")
            print(f", {copied / took:.3f} of a copy{products}")


if __name__ == "__main__":
    main()
