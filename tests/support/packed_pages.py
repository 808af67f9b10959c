"""Packed parts as docs/format.md has them, value by value in numpy: the oracle of the library's codec.

Values to pack, too."""

from __future__ import annotations

import functools
import math

import numpy as np
import numpy.typing as npt
import torch

from gdscache import CacheEngine
from gdscache.pages.layout import PageLayout

Values = npt.NDArray[np.uint16]
Bytes = npt.NDArray[np.uint8]
TILE, ROUND, WINDOW, OTHER = 2048, 256, 14, 15


def exponents(values: Values) -> npt.NDArray[np.int64]:
    return ((values >> 7) & 0xFF).astype(np.int64)


def list_words(values: int) -> int:
    return 32 * max(1, -(-values // 8192))


def best_base(values: Values) -> int:
    """The lowest of those whose windows have the most values."""
    times = np.bincount(exponents(values), minlength=256)
    return int(np.argmax([times[base + 1 : base + 1 + WINDOW].sum() for base in range(256 - WINDOW)]))


def others(values: Values, base: int) -> npt.NDArray[np.int64]:
    """The places of the values whose exponents have no code of their own."""
    found = exponents(values)
    return np.flatnonzero((found != 0) & ((found <= base) | (found > base + WINDOW)))


def pack(values: Values, base: int) -> Bytes | None:
    """The part of some values; None where it has no room for all exceptions."""
    places = others(values, base)
    words = np.zeros(list_words(len(values)), np.uint32)
    if len(places) >= len(words):
        return None
    words[0] = base | len(places) << 8
    words[1 : 1 + len(places)] = places << 8 | exponents(values)[places]
    codes = np.where(exponents(values) == 0, 0, exponents(values) - base)
    codes[places] = OTHER
    filled = -(-len(values) // ROUND) * ROUND
    marks = np.zeros(filled, np.uint8)
    marks[: len(values)] = (values >> 8 & 0x80) | (values & 0x7F)
    nibbles = np.zeros(filled, np.uint8)
    nibbles[: len(values)] = codes
    eights = nibbles.reshape(-1, 2, 4)
    pairs = (eights[:, 0] | eights[:, 1] << 4).reshape(-1)
    tiles = [
        part for at in range(0, filled, TILE) for part in (marks[at : at + TILE], pairs[at // 2 : (at + TILE) // 2])
    ]
    return np.concatenate([*tiles, words.view(np.uint8)])


def unpack(part: Bytes, count: int) -> Values:
    """The `count` values of any bytes of a part's length."""
    filled = -(-count // ROUND) * ROUND
    words = part[filled // 2 * 3 :].copy().view(np.uint32)
    base, listed = int(words[0] & 0xFF), min(int(words[0] >> 8), len(words) - 1)
    found, at = [], 0
    for first in range(0, filled, TILE):
        some = min(TILE, filled - first)
        marks, pairs = part[at : at + some].astype(np.int64), part[at + some : at + some // 2 * 3].reshape(-1, 4)
        codes = np.concatenate([pairs & 15, pairs >> 4], axis=1).reshape(-1).astype(np.int64)
        exponent = np.where(codes == 0, 0, (codes + base) & 0xFF)
        found.append((marks & 0x80) << 8 | exponent << 7 | (marks & 0x7F))
        at += some // 2 * 3
    values = np.concatenate(found)[:count].astype(np.uint16)
    for word in words[1 : 1 + listed]:
        if (place := int(word >> 8)) < count:
            values[place] = (values[place] & 0x807F) | int(word & 0xFF) << 7
    return values


def unpacked(layout: PageLayout, extent: Bytes) -> Bytes:
    return _unpacked(layout, extent.tobytes())


def bytes_in(engine: CacheEngine, name: str, slot: int) -> Bytes:
    """The plain page in a slot of a tier of memory or files."""
    tier = engine.manager.tiers[name]
    layout = engine.layout.packed_as(packed=engine.layout.packed and not tier.plain)
    if tier.kind == "memory":
        found = np.frombuffer(tier.extents.memory(slot), np.uint8)[: layout.page_bytes]
    else:
        found = np.fromfile(tier.path / "slab-0.bin", np.uint8, layout.page_bytes, offset=slot * layout.extent_bytes)
    return unpacked(layout, found) if layout.packed else found


@functools.lru_cache(256)
def _unpacked(layout: PageLayout, content: bytes) -> Bytes:
    extent = np.frombuffer(content, np.uint8)
    parts = [
        unpack(extent[piece.offset : piece.offset + piece.nbytes], layout.page_tokens * math.prod(plane.shape))
        for pieces, planes in zip(layout.pieces, layout.layers, strict=True)
        for piece, plane in zip(pieces, planes, strict=True)
    ]
    return np.concatenate(parts).view(np.uint8)


# How often exponents from 108 on occur in keys and values of SmolLM2-135M, of 368,640 each (30 parts of 64 tokens).
SMOLLM2 = {
    "keys": "0 0 1 0 6 8 17 50 102 231 494 1028 2192 4175 8245 15877 29636 53464 85331 96921 54982 11244 4491 45",
    "values": "2 11 9 9 30 50 103 219 427 866 1757 3427 6561 11782 18670 30811 53016 80727 89294 54293 15095 1436 45",
}


def drawn(kind: str, count: int, rng: np.random.Generator) -> Values:
    """`count` values with the statistics of a kind."""
    exponents = rng.integers(120, 134, count)
    if kind in SMOLLM2:
        weights = np.array(SMOLLM2[kind].split(), float)
        exponents = rng.choice(np.arange(108, 108 + len(weights)), count, p=weights / weights.sum())
    elif kind == "outlier channels":
        exponents[5::128] += 40
    elif kind == "a few outliers":
        exponents[rng.integers(0, count, max(1, count // 600))] = rng.integers(0, 256)
    elif kind == "random":
        exponents = rng.integers(0, 256, count)
    elif kind == "NaN":
        exponents[:] = 255
    elif kind == "subnormal":
        exponents[:] = 0
    elif kind == "equal":
        return np.full(count, rng.integers(0, 1 << 16), np.uint16)
    return (exponents << 7 | rng.integers(0, 1 << 16, count) & 0x807F).astype(np.uint16)


KINDS = (*SMOLLM2, "outlier channels", "a few outliers", "random", "NaN", "subnormal", "equal")


def bits(tensor: torch.Tensor) -> npt.NDArray[np.uint16]:
    return tensor.view(torch.int16).numpy().view(np.uint16)
