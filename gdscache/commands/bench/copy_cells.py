"""The cells of `gdscache bench copy`: page sizes, geometries, directions, parts of a page. Arithmetic only."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

from gdscache.kernels.choice import Direction
from gdscache.pages.layout import PageLayout, Plane
from gdscache.sizes import MIB

PAGE_TOKENS = (64, 1, 256, 16)  # in the order of measuring
BOTH: tuple[Direction, ...] = ("load", "store")
DIRECTIONS = (*BOTH, "both")
PARTS = ("one", "group", "all")  # layers a call
GROUP_BYTES = 1 * MIB  # of a page's layer group, or all of a smaller page

BULK_TARGET = 0.97  # calls that move 1 MiB a page or more
LAYER_TARGET = 0.92  # one layer of GQA pages of 64 tokens
TOKEN_TARGET = 0.92  # pages of one token
BOTH_TARGET = 0.93  # load and store together, 1 MiB a page or more
PACKED_TARGETS = {"load": 1.28, "store": 1.20}  # of packed pages; bytes as in the planes


@dataclasses.dataclass(frozen=True)
class Geometry:
    """A model's planes, with layers for at least 1 MiB in a page of 64 tokens."""

    name: str
    planes: tuple[Plane, ...]
    n_layers: int
    packed: bool = False

    def layout(self, page_tokens: int) -> PageLayout:
        return PageLayout.uniform(self.planes, self.n_layers, page_tokens, packed=self.packed)

    def layers(self, page_tokens: int, part: str) -> int:
        """Layers of a call: one layer, a group of at least 1 MiB a page (or all, if these are smaller), or all."""
        if part != "group":
            return 1 if part == "one" else self.n_layers
        ends = (end for _, end in self.layout(page_tokens).layer_bounds)
        return next((number for number, end in enumerate(ends, start=1) if end >= GROUP_BYTES), self.n_layers)


GQA = Geometry("gqa", (Plane("k", (8, 128), "bfloat16"), Plane("v", (8, 128), "bfloat16")), 8)
MLA = Geometry("mla", (Plane("latent", (576,), "bfloat16"),), 16)
MLA_FP8 = Geometry("mla_fp8", (Plane("latent", (656,), "uint8"),), 32)
GEOMETRIES = (GQA, MLA, MLA_FP8)
PACKED = Geometry("gqa packed", GQA.planes, GQA.n_layers, packed=True)


@dataclasses.dataclass(frozen=True)
class Cell:
    """A measurement. `parts` has several names if they mean the same layers."""

    geometry: Geometry
    page_tokens: int
    parts: tuple[str, ...]
    direction: str

    @property
    def layers(self) -> int:
        """Layers of one call."""
        return self.geometry.layers(self.page_tokens, self.parts[0])

    @property
    def span_bytes(self) -> int:
        """Bytes of a page in one call, as in the planes; contiguous in the extent, but for packed pages."""
        return self.page_tokens * self.layers * sum(plane.row_bytes for plane in self.geometry.planes)

    @property
    def directions(self) -> tuple[Direction, ...]:
        return tuple(d for d in BOTH if self.direction in (d, "both"))

    @property
    def target(self) -> float | None:
        """The least ratio to cudaMemcpyAsync, if the cell has a target."""
        if self.geometry.packed:
            return PACKED_TARGETS.get(self.direction)
        if self.span_bytes >= GROUP_BYTES:
            return BOTH_TARGET if self.direction == "both" else BULK_TARGET
        if self.direction == "both":
            return None
        if self.page_tokens == 1 and "all" in self.parts and self.geometry in (GQA, MLA):
            return TOKEN_TARGET
        if self.page_tokens == 64 and "one" in self.parts and self.geometry == GQA:
            return LAYER_TARGET
        return None

    def describe(self) -> dict[str, Any]:
        return {
            "geometry": self.geometry.name,
            "row_bytes": [plane.row_bytes for plane in self.geometry.planes],
            "page_tokens": self.page_tokens,
            "direction": self.direction,
            "parts": list(self.parts),
            "layers": self.layers,
            "span_bytes": self.span_bytes,
        }


def cells() -> list[Cell]:
    """Every page size, geometry, part and direction with a target, page size by page size; packed pages last."""
    found = []
    for page_tokens, geometry in itertools.product(PAGE_TOKENS, GEOMETRIES):
        same: dict[int, list[str]] = {}
        for part in PARTS:
            same.setdefault(geometry.layers(page_tokens, part), []).append(part)
        for parts, direction in itertools.product(same.values(), DIRECTIONS):
            found.append(Cell(geometry, page_tokens, tuple(parts), direction))
    found += [Cell(PACKED, PAGE_TOKENS[0], ("all",), direction) for direction in BOTH]
    return [cell for cell in found if cell.target is not None]
