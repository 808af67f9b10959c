"""Paged planes: the tensors that hold the KV cache layer by layer, of the engine's own pool or of an attached engine.

A plane tensor has shape `(blocks, block_tokens, *row)`; blocks and tokens may be strided, a token's row must be
contiguous. `block_tokens` divides `page_tokens`; a page is `page_tokens // block_tokens` blocks, anywhere.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gdscache.errors import PlanesError, SlotCountError, SlotRangeError
from gdscache.native import blocks_fault
from gdscache.pages.layout import DTYPE_BYTES, PageLayout, Plane, PlaneSlice

Blocks = npt.NDArray[np.int64]
PLANES = "pass tensors of shape (blocks, block_tokens, *row), as planes[layer][plane], of each layer of the model"


class BlockTables:
    """The checks of block numbers: planes of `blocks` blocks of `block_tokens` tokens, without their memory."""

    def __init__(self, layout: PageLayout, blocks: int, block_tokens: int) -> None:
        """Raises `PlanesError` if blocks do not divide a page."""
        self.layout = layout
        self.blocks, self.block_tokens = blocks, block_tokens
        if layout.page_tokens % block_tokens:
            raise PlanesError(
                f"blocks of {block_tokens} tokens do not divide a page of {layout.page_tokens}",
                "set model.page_tokens to a multiple of the engine's block size",
            )

    @property
    def blocks_per_page(self) -> int:
        return self.layout.page_tokens // self.block_tokens

    def block_table(self, slots: Any) -> Blocks:
        """Block indices as an int64 array of shape (pages, blocks_per_page).

        `slots`: a list, numpy array or host tensor of int32 or int64, page after page. Raises `SlotRangeError` for
        values that are not block numbers of this pool or named twice, `SlotCountError` for a broken page.
        """
        table = host_indices(slots)
        self.check_blocks(table)
        if table.size % self.blocks_per_page:
            raise SlotCountError(
                f"{table.size} blocks are no whole number of pages of {self.blocks_per_page} blocks",
                f"pass all {self.blocks_per_page} blocks of each page, page after page",
            )
        return table.reshape(-1, self.blocks_per_page)

    def check_blocks(self, blocks: Blocks) -> None:
        """Raises `SlotRangeError` for numbers that are not blocks of this pool, or named twice."""
        fault = blocks_fault(blocks, self.blocks)
        if fault == "outside":
            raise SlotRangeError(
                f"slots span {blocks.min()} ... {blocks.max()}, the pool has blocks 0 ... {self.blocks - 1}",
                "pass block indices of the planes that the engine was opened with",
            )
        if fault:
            raise SlotRangeError("a slot is named twice", "every page needs blocks of its own")


def by_layer(planes: Any) -> list[tuple[Any, ...]]:
    """`planes[layer][plane]` as a list of tuples. Raises `PlanesError` for data of another form."""
    try:
        return [tuple(layer) for layer in planes]
    except TypeError as error:
        raise PlanesError(f"planes are of type {type(planes).__name__}: {error}", PLANES) from None


class PagedPlanes(BlockTables):
    """All planes of a pool, checked against a layout.

    `tensors[layer][plane]` has shape `(blocks, block_tokens, *plane.shape)` and the plane's dtype; all of them lie on
    one device and have the same `blocks` and `block_tokens`. Raises `PlanesError` otherwise.
    """

    def __init__(self, layout: PageLayout, tensors: Sequence[Sequence[torch.Tensor]]) -> None:
        self.tensors = by_layer(tensors)
        if len(self.tensors) != layout.n_layers:
            raise PlanesError(f"{len(self.tensors)} layers of planes for a model of {layout.n_layers}", PLANES)
        first = self._first(self.tensors)
        blocks, block_tokens = int(first.shape[0]), int(first.shape[1])
        if not blocks or not block_tokens:
            raise PlanesError(f"planes of {blocks} blocks of {block_tokens} tokens hold nothing")
        self.blocks, self.block_tokens = blocks, block_tokens
        self.device = first.device
        for number, (planes, given) in enumerate(zip(layout.layers, self.tensors, strict=True)):
            if len(planes) != len(given):
                raise PlanesError(
                    f"layer {number} has {len(given)} tensors for planes {[p.name for p in planes]}", PLANES
                )
            for plane, tensor in zip(planes, given, strict=True):
                self._check(f"layer {number}, plane {plane.name!r}", plane, tensor)
        super().__init__(layout, blocks, block_tokens)

    @classmethod
    def allocate(cls, layout: PageLayout, slots: int, device: torch.device) -> PagedPlanes:
        """A pool of `slots` pages of its own, zeroed, one block a page."""
        tensors = [
            [
                torch.zeros((slots, layout.page_tokens, *p.shape), dtype=getattr(torch, p.dtype), device=device)
                for p in planes
            ]
            for planes in layout.layers
        ]
        return cls(layout, tensors)

    @staticmethod
    def _first(tensors: Sequence[Sequence[Any]]) -> torch.Tensor:
        first = tensors[0][0] if tensors and len(tensors[0]) else None
        if not isinstance(first, torch.Tensor) or first.dim() < 3:
            raise PlanesError("the first plane is no tensor of blocks", PLANES)
        if first.layout is not torch.strided or first.device.type not in ("cpu", "cuda"):
            raise PlanesError(f"planes are {first.layout} on {first.device}", "pass dense tensors on a GPU or the host")
        return first

    def memory(self, piece: PlaneSlice) -> tuple[int, int, int, int, int]:
        """Where a plane, or a part of a packed one, has its bytes: the address, bytes from one block to the next, bytes
        from one run to the next in a block, bytes of a run, and runs of a block. They are in the order of addresses in
        a block."""
        plane, tensor = self.layout.layers[piece.layer][piece.plane], self.tensors[piece.layer][piece.plane]
        block, token = (step * DTYPE_BYTES[plane.dtype] for step in tensor.stride()[:2])
        if not (self.layout.packed and plane.parts):
            return tensor.data_ptr(), block, token, plane.row_bytes, self.block_tokens
        turn = sum(plane.parts)
        turns, rest = divmod(plane.row_bytes * self.block_tokens, turn)
        if rest or (token != plane.row_bytes and self.block_tokens > 1):
            raise PlanesError(
                f"plane {plane.name!r} has parts of {plane.parts} bytes, and blocks of {self.block_tokens} rows of "
                f"{plane.row_bytes} bytes, {token} apart",
                "parts take turns in a block that is one run of bytes",
            )
        first = tensor.data_ptr() + sum(plane.parts[: piece.part])
        return first, block, turn, plane.parts[piece.part], turns

    def _check(self, where: str, plane: Plane, tensor: object) -> None:
        shape = (self.blocks, self.block_tokens, *plane.shape)
        if not isinstance(tensor, torch.Tensor):
            raise PlanesError(f"{where} is {type(tensor).__name__}, not a tensor", "planes[layer][plane] are tensors")
        if tuple(tensor.shape) != shape or tensor.dtype != getattr(torch, plane.dtype):
            raise PlanesError(
                f"{where}: {tensor.dtype} of shape {tuple(tensor.shape)}, expected torch.{plane.dtype} of {shape}",
                "correct the section model (dtype, kv_heads, head_dim or planes), or the tensors",
            )
        if tensor.layout is not torch.strided:
            raise PlanesError(f"{where} is a tensor of layout {tensor.layout}", "pass dense tensors")
        if tensor.device != self.device:
            raise PlanesError(
                f"{where} is on {tensor.device}, layer 0 on {self.device}", "put all planes on one device"
            )
        row_strides = tensor.stride()[2:]
        contiguous = [math.prod(plane.shape[i + 1 :]) for i in range(len(plane.shape))]
        if any(s != c for s, c, n in zip(row_strides, contiguous, plane.shape, strict=True) if n > 1):
            raise PlanesError(
                f"{where}: a token's row is not contiguous (strides {tensor.stride()})",
                "keep heads innermost: (blocks, block_tokens, heads, head_dim)",
            )
        needed = math.prod(plane.shape)  # elements from a row to the next one, or from a block's
        for stride, count in sorted(zip(tensor.stride()[:2], shape[:2], strict=True)):
            if count > 1 and stride < needed:
                raise PlanesError(
                    f"{where}: rows of {math.prod(plane.shape)} elements overlap (strides {tensor.stride()})",
                    "pass tensors in which each token of each block has memory of its own",
                )
            needed += stride * (count - 1)


def _values(tensor: torch.Tensor) -> Any:
    """The integers of a host tensor of int32 or int64, without releasing the interpreter's lock, as torch does for each
    step, and at the end of an array made by `numpy()`."""
    if not tensor.numel():
        return ()
    if not tensor.is_contiguous():
        return np.array(tensor.reshape(-1).tolist(), np.int64)
    size = tensor.numel() * tensor.element_size()
    return np.frombuffer(
        ctypes.string_at(tensor.data_ptr(), size), np.int64 if tensor.dtype == torch.int64 else np.int32
    )


def host_indices(slots: Any) -> Blocks:
    """Integers on the host as a flat, contiguous int64 array. Raises `SlotRangeError` otherwise."""
    hint = "pass a flat list, numpy array or host tensor of int32 or int64 block indices"
    if isinstance(slots, torch.Tensor):
        if slots.device.type != "cpu":
            raise SlotRangeError(f"slots are on {slots.device}", "pass host indices: reading them back synchronises")
        if slots.layout is not torch.strided:
            raise SlotRangeError(f"slots are a tensor of layout {slots.layout}", hint)
        if slots.numel() and slots.dtype not in (torch.int32, torch.int64):
            raise SlotRangeError(f"slots have dtype {slots.dtype}", hint)
        slots = _values(slots)
    if isinstance(slots, np.ma.MaskedArray):
        raise SlotRangeError("slots are a masked array", hint)
    try:
        array = np.asarray(slots)
    except (TypeError, ValueError, RuntimeError) as error:  # ragged lists; tensors that are not in host memory
        raise SlotRangeError(f"slots are no array: {error}", hint) from None
    if array.size and array.dtype not in (np.int32, np.int64):
        raise SlotRangeError(f"slots have dtype {array.dtype}", hint)
    # A copy, since stores read it later; made without numpy's release of the interpreter's lock.
    flat = np.ascontiguousarray(array.reshape(-1), np.int64)
    return np.frombuffer(flat.tobytes(), np.int64) if flat.size else flat
