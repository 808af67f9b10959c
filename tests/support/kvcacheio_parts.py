"""What the tests of kvcacheio share: pools in every layout, the copy by definition, and the kernel in slow Python."""

from __future__ import annotations

import ctypes
import dataclasses
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gdscache import kvcacheio
from gdscache.kvcacheio.launch import FORMS
from tests.support.helpers import SENTINEL

Bytes = npt.NDArray[np.uint8]
Positions = npt.NDArray[np.int64]

GUARD = 4096  # bytes around a pool that nobody may write
GAP = 64  # and between the layers of a layer-first one

# name: layout of the source, of the destination, whether of all layers, whether of one tensor (MLA)
OPERATIONS: dict[str, tuple[str, str, bool, bool]] = {
    "transfer_kv_per_layer": ("lf", "lf", False, False),
    "transfer_kv_per_layer_pf_lf": ("pf", "lf", False, False),
    "transfer_kv_per_layer_ph_lf": ("ph", "lf", False, False),
    "transfer_kv_all_layer": ("lf", "lf", True, False),
    "transfer_kv_all_layer_lf_pf": ("lf", "pf", True, False),
    "transfer_kv_all_layer_lf_ph": ("lf", "ph", True, False),
    "transfer_kv_per_layer_mla": ("lf", "lf", False, True),
    "transfer_kv_per_layer_mla_pf_lf": ("pf", "lf", False, True),
    "transfer_kv_all_layer_mla": ("lf", "lf", True, True),
    "transfer_kv_all_layer_mla_lf_pf": ("lf", "pf", True, True),
}


@dataclasses.dataclass(frozen=True)
class Shape:
    """Of a pool: bytes of an item, layers, heads, tokens of a page, tokens, bytes of a token that are no layer's."""

    item: int = 512
    layers: int = 3
    heads: int = 4
    page: int = 16
    tokens: int = 96
    slack: int = 0

    @property
    def dim(self) -> int:
        return self.layers * self.item + self.slack


class Pool:
    """K, or V, in one layout. `place` is cpu, pinned or cuda; `shift` bytes put it off the grid."""

    def __init__(self, layout: str, shape: Shape, place: str, seed: int | None = None, shift: int = 0) -> None:
        self.layout, self.shape, self.start = layout, shape, GUARD + shift
        self._layer_bytes = shape.tokens * shape.item + GAP
        self.nbytes = shape.layers * self._layer_bytes if layout == "lf" else shape.tokens * shape.dim
        size = self.start + self.nbytes + GUARD
        data = np.full(size, SENTINEL, np.uint8)
        if seed is not None:
            data = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
        host = torch.from_numpy(data)
        self.flat = host.cuda() if place == "cuda" else host.pin_memory() if place == "pinned" else host

    @property
    def tensor(self) -> torch.Tensor:
        """A page-first or page-head pool."""
        return self.flat[self.start : self.start + self.nbytes]

    def layer(self, number: int) -> torch.Tensor:
        """One layer of a layer-first pool."""
        begin = self.start + number * self._layer_bytes
        return self.flat[begin : begin + self.shape.tokens * self.shape.item]

    def table(self, device: str) -> torch.Tensor:
        """Base pointers of the layers of a layer-first pool."""
        bases = [self.layer(i).data_ptr() for i in range(self.shape.layers)]
        return torch.tensor(bases, dtype=torch.uint64, device=device)

    def bytes(self) -> Bytes:
        """A copy of all bytes, guards included."""
        return np.array(self.flat.cpu().numpy())

    def positions(self) -> Positions:
        """Where in `bytes()` the rows are, by the shape that defines the layout: (tokens, layers, item)."""
        s = self.shape
        inside = np.arange(self.start, self.start + self.nbytes)
        if self.layout == "lf":
            layers = inside.reshape(s.layers, self._layer_bytes)[:, : s.tokens * s.item]
            return layers.reshape(s.layers, s.tokens, s.item).transpose(1, 0, 2)
        if self.layout == "pf":
            return inside.reshape(s.tokens, s.dim)[:, : s.layers * s.item].reshape(s.tokens, s.layers, s.item)
        head = s.item // s.heads
        pages = inside.reshape(s.tokens // s.page, s.heads, s.page, s.dim // s.heads)[..., : s.layers * head]
        pages = pages.reshape(-1, s.heads, s.page, s.layers, head).transpose(0, 2, 3, 1, 4)
        return pages.reshape(s.tokens, s.layers, s.item)


class Rig:
    """The pools of one operation, random ones to copy from and sentinels to copy to."""

    def __init__(
        self, name: str, shape: Shape, places: tuple[str, str], shifts: tuple[int, int] = (0, 0), layer: int = 1
    ) -> None:
        self.name, self.shape, self.layer = name, shape, layer
        source, target, self.all_layers, self.mla = OPERATIONS[name]
        parts = range(1 if self.mla else 2)
        self.src = [Pool(source, shape, places[0], seed, shifts[0]) for seed in parts]
        self.dst = [Pool(target, shape, places[1], None, shifts[1]) for _ in parts]
        self.device = "cuda" if "cuda" in places or "pinned" in places else "cpu"
        self._kept: list[torch.Tensor] = []

    def arguments(self, sources: Positions, targets: Positions, dtype: torch.dtype = torch.int64) -> dict[str, Any]:
        """The operation's arguments, by name."""
        given: dict[str, Any] = {"item_size": self.shape.item}
        for side, pools in (("src", self.src), ("dst", self.dst)):
            table = self.all_layers and pools[0].layout == "lf"
            for part, pool in zip("kv", pools, strict=False):
                name = (side if self.mla else f"{side}_{part}") + ("_layers" if table else "")
                given[name] = self._tensor(pool)
            if pools[0].layout != "lf":
                given[f"{side}_layout_dim"] = self.shape.dim
            if pools[0].layout == "ph":
                given |= {"page_size": self.shape.page, "head_num": self.shape.heads}
        if self.all_layers:
            given["num_layers"] = self.shape.layers
        elif self.src[0].layout != "lf":
            given["layer_id"] = self.layer
        more = np.arange(64) % self.shape.tokens  # indices beside those given that must not be taken for some
        for name, values, rest in (
            ("src_indices", sources, more),
            ("dst_indices", targets, self.shape.tokens - 1 - more),
        ):
            every = torch.from_numpy(np.concatenate([rest, values, rest]).astype(np.int64)).to(dtype).to(self.device)
            given[name] = every[64 : 64 + len(values)]
        return given

    def _tensor(self, pool: Pool) -> torch.Tensor:
        if pool.layout != "lf":
            return pool.tensor
        return pool.table(self.device) if self.all_layers else pool.layer(self.layer)

    def run(
        self, sources: Positions, targets: Positions, dtype: torch.dtype = torch.int64, **options: int | None
    ) -> None:
        getattr(kvcacheio, self.name)(**self.arguments(sources, targets, dtype), **options)
        if self.device == "cuda":
            torch.cuda.synchronize()

    def expected(self, sources: Positions, targets: Positions) -> list[Bytes]:
        """All bytes of the destinations after the copy."""
        result = []
        layers = list(range(self.shape.layers)) if self.all_layers else [self.layer]
        for src, dst in zip(self.src, self.dst, strict=True):
            before, after = src.bytes(), dst.bytes()
            of, to = src.positions(), dst.positions()
            for source, target in zip(sources, targets, strict=True):
                for layer in layers:
                    after[to[target, layer]] = before[of[source, layer]]
            result.append(after)
        return result

    def check(
        self, sources: Positions, targets: Positions, dtype: torch.dtype = torch.int64, **options: int | None
    ) -> None:
        """Run it, and compare every byte of the destinations and around them."""
        expected, before = self.expected(sources, targets), [pool.bytes() for pool in self.src]
        self.run(sources, targets, dtype, **options)
        for pool, data in zip([*self.dst, *self.src], [*expected, *before], strict=True):
            assert np.array_equal(pool.bytes(), data), f"{self.name} {self.shape} {dtype} {options}"


class SlowKernels:
    """Instead of `TransferKernels`: what csrc/kvcacheio.cu does with its arguments, in host memory."""

    def __init__(self) -> None:
        self.count = 0
        self.launches = 0

    def skipped(self) -> int:
        return self.count

    def launch(self, name: str, blocks: int, threads: int, arguments: Sequence[Any]) -> None:
        struct.pack(FORMS[name], *arguments, 0)  # every number fits
        assert threads % 32 == 0
        assert threads <= 1024
        self.launches += 1
        src, dst, (sources, targets, *numbers) = arguments[:10], arguments[10:20], arguments[20:]
        count, per_warp, piece_bytes, layers, heads, parts = (int(n) for n in numbers)
        assert (blocks - 1) * threads // 32 * per_warp < count <= blocks * threads // 32 * per_warp
        kind: Any = ctypes.c_int64 if name == "transfer_int64" else ctypes.c_int32
        indices = [(kind * count).from_address(address) for address in (sources, targets)]
        for item in range(count):
            tokens = [values[item] for values in indices]
            bad = sum(not 0 <= t < int(side[8]) for t, side in zip(tokens, (src, dst), strict=True))
            self.count += bad
            for part, head, layer in np.ndindex(0 if bad else parts, heads, layers):
                of, to = (self._address(s, t, part, head, layer) for s, t in zip((src, dst), tokens, strict=True))
                ctypes.memmove(to, of, piece_bytes)

    @staticmethod
    def _address(side: Sequence[Any], token: int, part: int, head: int, layer: int) -> int:
        token_stride, page_gap, layer_step, head_step, reciprocal, shift, _, table = (int(n) for n in side[2:])
        page = token * reciprocal >> shift
        base: int = side[part]
        if table:
            base = (ctypes.c_uint64 * (layer + 1)).from_address(base)[layer]
        return base + token * token_stride + page * page_gap + layer * layer_step + head * head_step
