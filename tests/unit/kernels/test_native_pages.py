"""Pools and extents as Python hands them to the native library, and its checksums against `xxhash`. How it gathers and
scatters: csrc/host/tests/test_pages.cc, and test_strided_planes of test_attached.py."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from gdscache.arrays import integers
from gdscache.errors import NativeCallError
from gdscache.moves.native import NativePlanes
from gdscache.native import layer_sums
from gdscache.pages.checksum import layer_checksums
from gdscache.pages.layout import PageLayout, Plane
from gdscache.pages.planes import PagedPlanes
from tests.support.native_parts import address


def small() -> PagedPlanes:
    layout = PageLayout.uniform([Plane("k", (8,), "float16"), Plane("v", (4,), "float16")], 3, 4)
    return PagedPlanes.allocate(layout, 5, torch.device("cpu"))


@pytest.mark.parametrize(
    ("numbers", "cause"),
    [
        ((0, 1, 1), "number of blocks"), ((5, 0, 1), "tokens a block"), ((5, 4, -1), "blocks a page"),
        ((1 << 60, 4, 1), "number of blocks"), ((1 << 46, 4, 1), "address space"),
    ],
)  # fmt: skip
def test_pools_that_make_no_sense_are_refused(
    numbers: tuple[int, int, int], cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    planes = small()
    monkeypatch.setattr(planes, "blocks", numbers[0])
    monkeypatch.setattr(planes, "block_tokens", numbers[1])
    monkeypatch.setattr(PagedPlanes, "blocks_per_page", property(lambda self: numbers[2]))
    monkeypatch.setattr(planes, "tensors", [[Strided(t) for t in layer] for layer in planes.tensors])
    with pytest.raises(NativeCallError, match=cause):
        NativePlanes(planes)


class Strided:
    """A tensor that says that its blocks are far apart."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def data_ptr(self) -> int:
        return self.tensor.data_ptr()

    def stride(self) -> tuple[int, ...]:
        return (1 << 40, *self.tensor.stride()[1:])


def test_a_sum_of_any_length_at_any_alignment_is_xxhash_s() -> None:
    """csrc/host/tests/test_xxh3.cc compares all arms, and chunks of a stream, with each other."""
    data, rng = np.frombuffer(random.Random(7).randbytes(1 << 20), np.uint8).copy(), random.Random(3)
    sizes = [*range(4097), *(rng.randrange(4097, len(data) - 4000) for _ in range(60))]
    sizes += [n * 1024 + d for n in (5, 9) for d in (-1, 0, 1)]
    spans = [(size % 61, size % 61 + size) for size in sizes]
    starts = (0, 57, 3000)  # of extents
    found = layer_sums(np.array([address(data) + start for start in starts], np.uint64), integers(spans))
    assert found.tolist() == [layer_checksums(memoryview(data)[start:], spans).tolist() for start in starts]
    assert layer_sums(np.empty(0, np.uint64), integers(spans)).shape == (0, len(spans))


@pytest.mark.parametrize(("extents", "bounds"), [([0], [(0, 4)]), ([1 << 20], [(8, 4)]), ([1 << 20], [(-4, 4)])])
def test_layer_sums_of_nowhere_are_refused(extents: list[int], bounds: list[tuple[int, int]]) -> None:
    with pytest.raises(NativeCallError):
        layer_sums(np.array(extents, np.uint64), integers(bounds))
