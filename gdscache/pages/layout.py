"""The places of a page's bytes: planes, layers, extents. Arithmetic only; imports nothing heavy.

A *page* is `page_tokens` consecutive tokens of all layers. Each layer has one or more *planes*: arrays whose rows are
tokens. Attention kinds (MHA, GQA, MLA, quantised, indexed) differ in their list of planes and in nothing else.

`layer_first` is the order of engines' GPU pools: one array per layer and plane. `page_first` is one contiguous *extent*
a page, ordered layer → plane → token with no padding inside, padded to `EXTENT_ALIGNMENT` at its end. In a packed
extent each plane has one or more parts of fixed length instead: some 12 bits a bfloat16 value (docs/format.md).
"""

from __future__ import annotations

import bisect
import dataclasses
import math
import operator
from collections.abc import Sequence
from functools import cached_property

from gdscache.errors import GeometryError

EXTENT_ALIGNMENT = 4096
MAX_PAGE_TOKENS = 8192
GROUP_BYTES = 256 << 10
COPY_BYTES = 256 << 20
FIRST_BYTES = 4 << 20
FIRST_SECONDS = 0.002

PLAIN = "_plain"  # ends the names of tiers, and of their memories, of pages that do not fit into packed extents
PACKED_DTYPE = "bfloat16"
MAX_PACKED_VALUES = 1 << 24

DTYPE_BYTES = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}


@dataclasses.dataclass(frozen=True, slots=True)
class Plane:
    """One kind of per-token row: its name, the shape of a token's row in elements, and the element type.

    `values` and `parts` are for packed extents alone. `values`: the type of the values that rows of opaque bytes hold;
    empty: `dtype`. `parts`: bytes of consecutive runs that take turns in a block, of values of different sizes (vLLM's
    K and V); empty: all rows are one part.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    values: str = ""
    parts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for dtype in (self.dtype, self.values or self.dtype):
            if dtype not in DTYPE_BYTES:
                raise GeometryError(f"plane {self.name!r}: unknown dtype {dtype!r}", f"one of {', '.join(DTYPE_BYTES)}")
        if not self.shape or any(n < 1 for n in self.shape):
            raise GeometryError(f"plane {self.name!r}: shape {self.shape} has no elements", "use positive sizes")

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]

    def describe(self, *, packed: bool) -> list[object]:
        packing = [self.values, list(self.parts)] if packed and (self.values or self.parts) else []
        return [self.name, list(self.shape), self.dtype, *packing]

    def packed_values(self, tokens: int) -> tuple[int, ...]:
        """Values of each part of `tokens` tokens in a packed extent. Raises `GeometryError` for planes that cannot be
        packed."""
        nbytes = self.row_bytes * tokens
        turns, rest = divmod(nbytes, sum(self.parts) or nbytes)
        found = tuple(part * turns // 2 for part in self.parts or (nbytes,))
        dtype = self.values or self.dtype
        if rest or any(part % 2 for part in self.parts) or dtype != PACKED_DTYPE or max(found) > MAX_PACKED_VALUES:
            raise GeometryError(f"plane {self.name!r} ({dtype}) cannot be packed", _UNPACKED)
        return found


@dataclasses.dataclass(frozen=True, slots=True)
class PlaneSlice:
    """One plane of one layer inside an extent, or one `part` of it in a packed one."""

    layer: int
    plane: int
    offset: int
    nbytes: int
    part: int = 0


@dataclasses.dataclass(frozen=True)
class PageLayout:
    """The planes of each layer and the tokens of a page; everything else follows from them.

    `layers[i]` lists the planes of local layer `i` (layer 0 is the first one that *this* process holds). `shards`: the
    number of processes over which the heads are spread; the planes, and all bytes here, are of one shard.
    `packed`: extents are, as `pieces` and all that follows from it count. Raises `GeometryError` for planes of other
    types than bfloat16.
    """

    layers: tuple[tuple[Plane, ...], ...]
    page_tokens: int
    shards: int = 1
    packed: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.page_tokens <= MAX_PAGE_TOKENS:
            raise GeometryError(
                f"page_tokens is {self.page_tokens}", f"set model.page_tokens to 1 ... {MAX_PAGE_TOKENS}"
            )
        if not self.layers or any(not planes for planes in self.layers):
            raise GeometryError("a layout needs at least one layer, and every layer at least one plane")
        for planes in self.layers:
            names = [p.name for p in planes]
            if len(set(names)) != len(names):
                raise GeometryError(f"plane names repeat within a layer: {names}", "give each plane its own name")
            for plane in planes if self.packed else ():
                plane.packed_values(self.page_tokens)

    @classmethod
    def uniform(cls, planes: Sequence[Plane], n_layers: int, page_tokens: int, *, packed: bool = False) -> PageLayout:
        """The usual case: every layer has the same planes."""
        return cls(tuple(tuple(planes) for _ in range(n_layers)), page_tokens, packed=packed)

    def packed_as(self, *, packed: bool) -> PageLayout:
        """The same pages, packed or as they are. Raises `GeometryError` for planes that cannot be packed."""
        return dataclasses.replace(self, packed=packed)

    @property
    def n_layers(self) -> int:
        return len(self.layers)

    @property
    def n_sums(self) -> int:
        """Checksums of a page: one a layer, shard after shard."""
        return self.shards * len(self.layers)

    @cached_property
    def pieces(self) -> tuple[tuple[PlaneSlice, ...], ...]:
        """`pieces[layer]`: the places of its planes' `page_tokens` rows in the extent, or of all packed parts."""
        result, offset = [], 0
        for layer, planes in enumerate(self.layers):
            row = []
            for index, plane in enumerate(planes):
                sizes = [plane.row_bytes * self.page_tokens]
                if self.packed:
                    sizes = [packed_bytes(values) for values in plane.packed_values(self.page_tokens)]
                for part, nbytes in enumerate(sizes):
                    row.append(PlaneSlice(layer, index, offset, nbytes, part))
                    offset += nbytes
            result.append(tuple(row))
        return tuple(result)

    @cached_property
    def layer_bounds(self) -> tuple[tuple[int, int], ...]:
        """`(start, end)` byte offsets of each layer in the extent, as covered by its checksum."""
        return tuple((row[0].offset, row[-1].offset + row[-1].nbytes) for row in self.pieces)

    def read_span(self, layers: range, *, alone: bool = False) -> tuple[int, int]:
        """`(start, stop)` byte offsets in the extent of the read for a group of consecutive layers.

        Both ends are rounded up to `EXTENT_ALIGNMENT`: the first layer's bytes below `start` are read with the group
        before. So the groups of a page are disjoint reads, and a group is complete when those before it are too. The
        read of a group `alone` begins with the alignment unit of its first byte.
        """
        start, stop = self.layer_bounds[layers.start][0], self.layer_bounds[layers.stop - 1][1]
        return start - start % EXTENT_ALIGNMENT if alone else _rounded_up(start), _rounded_up(stop)

    @cached_property
    def page_bytes(self) -> int:
        """Bytes of a page, without the padding."""
        return self.layer_bounds[-1][1]

    @cached_property
    def plane_bytes(self) -> int:
        """Bytes of a page's rows in the planes: `page_bytes` unless it is packed."""
        return sum(plane.row_bytes for planes in self.layers for plane in planes) * self.page_tokens

    @cached_property
    def extent_bytes(self) -> int:
        """Bytes of a page's extent: `page_bytes` rounded up to `EXTENT_ALIGNMENT`."""
        return _rounded_up(self.page_bytes)

    def bytes_in(self, tier: str) -> int:
        """Bytes of a page in a tier, without padding."""
        return self.plane_bytes if is_plain(tier) else self.page_bytes

    @cached_property
    def token_bytes(self) -> int:
        """Bytes of one token over all layers and planes."""
        return self.plane_bytes // self.page_tokens

    def pages_for(self, n_tokens: int) -> int:
        """Pages that `n_tokens` touch, a partial tail included."""
        return -(-n_tokens // self.page_tokens)

    def describe(self) -> list[object]:
        """The layout as plain data, for a namespace's digest and a catalogue."""
        return [[plane.describe(packed=self.packed) for plane in planes] for planes in self.layers]


@dataclasses.dataclass(frozen=True, slots=True)
class GroupSizes:
    """The target sizes of the layer groups of a read.

    No group has fewer than `least` bytes of a page. The first has about `first` bytes over all pages of a load, enough
    requests to keep a device busy. None has more than about a `parts`-th of a page, as far as the other two allow.
    """

    least: int = GROUP_BYTES
    first: int = FIRST_BYTES
    parts: int = 8

    def paced(self, bytes_per_second: float | None) -> GroupSizes:
        """The same, with a first group that takes `FIRST_SECONDS` at a measured speed; unchanged without one.

        The first group is at least a quarter of `first`, since fewer requests would be too few in flight, and at most
        eight times `first`.
        """
        if not bytes_per_second:
            return self
        first = min(max(int(bytes_per_second * FIRST_SECONDS), self.first // 4), 8 * self.first)
        return dataclasses.replace(self, first=max(1, first))


def read_groups(layout: PageLayout, pages: int, sizes: GroupSizes = GroupSizes()) -> tuple[range, ...]:
    """The groups of consecutive layers in which a load of `pages` pages is read: all layers once, in order.

    The first group is as small as `sizes` allow, so that layer 0 is early. The following ones double until they reach a
    `parts`-th of a page. A model that computes as fast as pages are read then waits for about one largest group more
    than with pages in memory, and reads should be as large as that allows. The last groups are small again, so that few
    layers are left to compute when the last bytes come.

    There is one group if an extent has fewer than two `least`, since its neighbours are better read together, and if
    the load has fewer than two `first`, since it ends before a second group would help.
    """
    if layout.extent_bytes < 2 * sizes.least or pages * layout.page_bytes < 2 * sizes.first:
        return (range(layout.n_layers),)
    smallest = max(sizes.least, -(-sizes.first // pages), EXTENT_ALIGNMENT)
    largest = max(smallest, 2 * sizes.least, layout.page_bytes // sizes.parts)
    return _doubling(layout, smallest, largest)


def copy_groups(layout: PageLayout, pages: int, largest: int = COPY_BYTES) -> tuple[range, ...]:
    """The groups of consecutive layers in which `pages` pages are copied from memory: all layers once, in order.

    The first has little more than `GROUP_BYTES` a page, so that layer 0 is early. The following ones double until they
    have about `largest` bytes over all pages, and the last ones are small again. Queueing a group takes the
    interpreter's and the driver's locks, which threads that launch the model's kernels need too.
    """
    return _doubling(layout, GROUP_BYTES, max(GROUP_BYTES, largest // max(1, pages)))


def _doubling(layout: PageLayout, smallest: int, largest: int) -> tuple[range, ...]:
    """Groups of at least `smallest` bytes of a page. Each has twice the bytes of the one before until they reach
    `largest`, and about half of the rest at most: the last bytes come with few layers left to compute. The last group
    takes a rest too small for a group of its own."""
    bounds, size = layout.layer_bounds, layout.page_bytes
    groups, begin, wanted = list[range](), 0, smallest
    while True:
        start = bounds[begin][0]
        least = start + min(wanted, max(smallest, (size - start) // 2))
        layer = bisect.bisect_left(bounds, least, begin, key=operator.itemgetter(1))
        if layer == len(bounds) or size - bounds[layer][1] < smallest:
            return (*groups, range(begin, len(bounds)))
        groups.append(range(begin, layer + 1))
        begin, wanted = layer + 1, min(2 * wanted, largest)


_UNPACKED = (
    f"set model.pack to off: only {PACKED_DTYPE} is packed, at most {MAX_PACKED_VALUES:,} values a plane and page. By "
    "SmolLM2's cache, the same codes leave 0.94 of float16, 0.88 of float32 and float8_e5m2, and all of other types"
)


def is_plain(tier: str) -> bool:
    """Whether pages are never packed in a tier of this name."""
    return tier == "gpu" or tier.endswith(PLAIN)


def packed_bytes(values: int) -> int:
    """Bytes of a packed part."""
    return -(-values // 256) * 384 + max(1, -(-values // 8192)) * 128


def _rounded_up(nbytes: int) -> int:
    return -(-nbytes // EXTENT_ALIGNMENT) * EXTENT_ALIGNMENT
